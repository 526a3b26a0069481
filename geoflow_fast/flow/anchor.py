"""The linear part of a flow: where the given stream says that the generated one should go."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from geoflow_fast.directions import Direction
from geoflow_fast.linear import ridge
from geoflow_fast.manifolds import Sphere

POWERS = 4
"""Number of coefficients of the polynomial in time by which a prediction is weighted."""
RIDGES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Strengths of regularisation to choose among, as multiples of the mean variance of a coordinate."""
GAIN_ROWS = 20_000
GAIN_RIDGE = 1e-6


class Anchor(nn.Module):
    """A linear prediction of the generated stream from the given one, times a weight per coordinate that depends on
    time: in a conditional direction it is added to what the network returns.

    Both are fitted in closed form before training. So a flow begins with what a linear map knows, which is much where
    image and text share a space, instead of having to learn it from pairs that may be few. `image_map` [d_T, d_I] and
    `text_map` [d_I, d_T] predict a stream from the other one; `gains` [POWERS, d] are the coefficients of the weights.
    `shares` [2] say by which factor what the network returns for a stream counts beside the prediction; they are one
    unless held-out pairs have chosen others (`training/blending.py`).
    """

    image_map: Tensor
    text_map: Tensor
    shares: Tensor

    def __init__(self, dims: tuple[int, int]) -> None:
        super().__init__()
        for stream, name in enumerate(("image_map", "text_map")):
            self.register_buffer(name, torch.zeros(dims[1 - stream], dims[stream], dtype=torch.float32))
        self.gains = nn.ParameterList(torch.zeros(POWERS, d, dtype=torch.float32) for d in dims)
        self.register_buffer("shares", torch.ones(2, dtype=torch.float32))

    def predict(self, given: Tensor, stream: int) -> Tensor:
        """What the rows `given` [B, d'] predict for the other stream, [B, d]."""
        return given @ (self.text_map if stream else self.image_map).to(given.dtype)

    def weight(self, t: float | Tensor, stream: int) -> Tensor:
        """Weights of a prediction at time `t`: [d], or [B, d] for a tensor [B, 1] of times."""
        last, *others = reversed(self.gains[stream].unbind())
        weight = last
        for coefficient in others:
            weight = weight * t + coefficient
        return weight

    @torch.no_grad()
    def fit(
        self, streams: tuple[Tensor, Tensor], fold: Tensor, start: Tensor | None, manifold: Sphere, seed: int
    ) -> None:
        """Fits maps and weights to pairs (image [n, d_I], text [n, d_T]) in the flow's coordinates.

        The maps are those of a ridge regression that shrinks towards a multiple of `start` [d_I, d_T], if there is one.
        Its strength is the one with which the halves of the pairs, told apart by `fold` [n], predict each other best.
        """
        self.shares.fill_(1.0)
        for stream, target in enumerate((self.image_map, self.text_map)):
            given, generated = (streams[k].double().cpu() for k in (1 - stream, stream))
            towards = given.new_zeros(target.shape) if start is None else start.double().cpu()
            if start is not None and stream == 0:
                towards = towards.T
            weight, predictions = shrunken_map(given, generated, towards, fold.cpu())
            target.copy_(weight)
            self._fit_gains(predictions, generated, stream, manifold, seed)

    def _fit_gains(self, predictions: Tensor, generated: Tensor, stream: int, manifold: Sphere, seed: int) -> None:
        """Least squares of the velocity on the powers of time, each times the prediction."""
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randint(len(generated), (GAIN_ROWS,), generator=generator, device="cpu")
        t = torch.rand(GAIN_ROWS, generator=generator, dtype=torch.float32, device="cpu")
        data = generated[rows].float()
        noise = manifold.from_normal(torch.randn(data.shape, generator=generator, dtype=torch.float32, device="cpu"))
        codes = torch.full((GAIN_ROWS,), Direction.JOINT.code, dtype=torch.int8, device="cpu")
        points, _, velocity, _ = manifold.interpolant((noise, noise), (data, data), t, codes, codes.bool())
        prediction = manifold.project(points, predictions[rows].float()).double()
        powers = t.double().unsqueeze(1) ** torch.arange(POWERS, device="cpu")
        moment = powers.T @ (powers * prediction.square().sum(1, keepdim=True))
        least = GAIN_RIDGE * moment.trace().clamp(min=1e-12) * torch.eye(POWERS, dtype=moment.dtype, device="cpu")
        gains = torch.linalg.solve(moment + least, powers.T @ (prediction * velocity).sum(1))
        self.gains[stream].copy_(gains.unsqueeze(1).expand_as(self.gains[stream]))


def shrunken_map(given: Tensor, generated: Tensor, towards: Tensor, fold: Tensor) -> tuple[Tensor, Tensor]:
    """The matrix [d', d] of a ridge regression of `generated` [n, d] on `given` [n, d'] that shrinks towards the best
    multiple of `towards`, with the strength by which the halves of `fold` [n] predict each other best; and what each
    half predicts of the other [n, d], which is what can be expected of new pairs."""
    x, y, start, first = (each.numpy() for each in (given, generated, towards, fold))
    plain = x @ start
    start = start * ((plain * y).sum() / max(float(np.square(plain).sum()), 1e-12))
    halves = [(x[rows].T @ x[rows], x[rows].T @ y[rows]) for rows in (first, ~first)]
    whole = halves[0][0] + halves[1][0], halves[0][1] + halves[1][1]
    if not 0 < int(first.sum()) < len(first):  # one image
        weight = torch.from_numpy(ridge(*whole, RIDGES[-1:], start)[0])
        return weight, given @ weight
    by_half = [ridge(*half, RIDGES, start) for half in halves]
    # The sums of squared errors in the other half, but for a constant.
    errors = [
        sum(float((w * (gram @ w - 2 * product)).sum()) for w, (gram, product) in zip(pair, halves[::-1]))
        for pair in zip(*by_half)
    ]
    best = int(np.argmin(errors))
    predictions = np.where(first[:, None], x @ by_half[1][best], x @ by_half[0][best])
    return torch.from_numpy(ridge(*whole, RIDGES[best : best + 1], start)[0]), torch.from_numpy(predictions)
