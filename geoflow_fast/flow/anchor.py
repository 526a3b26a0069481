"""The linear part of a flow: where the given stream says that the generated one should go."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from geoflow_fast.directions import Direction
from geoflow_fast.manifolds import Manifold

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
        self, streams: tuple[Tensor, Tensor], fold: Tensor, start: Tensor | None, manifold: Manifold, seed: int
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

    def _fit_gains(self, predictions: Tensor, generated: Tensor, stream: int, manifold: Manifold, seed: int) -> None:
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
        ridge = GAIN_RIDGE * moment.trace().clamp(min=1e-12) * torch.eye(POWERS, dtype=moment.dtype, device="cpu")
        gains = torch.linalg.solve(moment + ridge, powers.T @ (prediction * velocity).sum(1))
        self.gains[stream].copy_(gains.unsqueeze(1).expand_as(self.gains[stream]))


def shrunken_map(given: Tensor, generated: Tensor, towards: Tensor, fold: Tensor) -> tuple[Tensor, Tensor]:
    """The matrix [d', d] of a ridge regression of `generated` [n, d] on `given` [n, d'] that shrinks towards the best
    multiple of `towards`, with the strength by which the halves of `fold` [n] predict each other best; and what each
    half predicts of the other [n, d], which is what can be expected of new pairs."""
    plain = given @ towards
    towards = towards * ((plain * generated).sum() / plain.square().sum().clamp(min=1e-12))
    halves = [(x.T @ x, x.T @ generated[rows]) for rows in (fold, ~fold) for x in (given[rows],)]
    (gram, product), (other_gram, other_product) = halves
    whole = gram + other_gram, product + other_product
    if not 0 < int(fold.sum()) < len(fold):  # one image
        weight = _ridge_solutions(*whole, towards, RIDGES[-1:])[0]
        return weight, given @ weight
    by_half = [_ridge_solutions(*half, towards, RIDGES) for half in halves]
    errors = torch.zeros(len(RIDGES), dtype=given.dtype, device="cpu")
    for solutions, (gram, product) in zip(by_half, halves[::-1]):
        for number, solution in enumerate(solutions):
            # The sum of squared errors, but for a constant.
            errors[number] += (solution * (gram @ solution - 2 * product)).sum()
    best = int(errors.argmin())
    predictions = torch.where(fold.unsqueeze(1), given @ by_half[1][best], given @ by_half[0][best])
    return _ridge_solutions(*whole, towards, RIDGES[best : best + 1])[0], predictions


def _ridge_solutions(gram: Tensor, product: Tensor, towards: Tensor, ridges: Sequence[float]) -> list[Tensor]:
    """The matrices [d', d] of ridge regressions, given the moments [d', d'] and [d', d] of the rows."""
    values, vectors = torch.linalg.eigh(gram)
    rest = vectors.T @ (product - gram @ towards)
    floor = values.mean().clamp(min=1e-12)
    return [towards + vectors @ (rest / (values.clamp(min=0) + ridge * floor).unsqueeze(1)) for ridge in ridges]
