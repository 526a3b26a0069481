"""Centring and principal components of embeddings before they enter the flow."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional


class Preprocess(nn.Module):
    """Centring and principal components of one modality: x -> unit(B (x - mean)), and back.

    `basis` [k, d] has orthonormal rows. Normalising forgets how far from the mean a point was, so `restore` puts it at
    the root-mean-square distance `radius` of the training rows and returns to the unit sphere.
    """

    mean: Tensor
    basis: Tensor
    radius: Tensor

    def __init__(self, dim: int, kept: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(dim, dtype=torch.float32))
        self.register_buffer("basis", torch.eye(kept, dim, dtype=torch.float32))
        self.register_buffer("radius", torch.ones((), dtype=torch.float32))

    def fit(self, blocks: Iterable[Tensor], *, centre: bool) -> None:
        """Sets mean, leading components and radius from unit rows, given in blocks [n, d] that are read once."""
        kept, dim = self.basis.shape
        rows = 0
        total, moment = (torch.zeros(n, dtype=torch.float64, device="cpu") for n in ((dim,), (dim, dim)))
        for block in blocks:
            x = block.double()
            rows, total = rows + len(x), total + x.sum(0)
            moment.addmm_(x.T, x)
        if rows < kept < dim:
            raise ValueError(f"{rows} rows cannot determine {kept} principal components")
        mean = total / rows if centre else torch.zeros_like(total)
        # Without centring the mean is zero, and the second moment is what is left.
        spread = moment / rows - torch.outer(mean, mean)
        self.mean.copy_(mean)
        if kept == dim:  # nothing is left out, so no basis is better than the one there is
            self.radius.copy_(spread.trace().clamp(min=0).sqrt())
            return
        values, vectors = torch.linalg.eigh(spread)
        basis = vectors.flip(1).T[:kept]
        # An eigenvector's sign is arbitrary: fixing it makes the result a function of the data alone.
        signs = basis.gather(1, basis.abs().argmax(1, keepdim=True)).sign()
        self.basis.copy_(basis * signs)
        self.radius.copy_(values[-kept:].sum().clamp(min=0).sqrt())

    def forward(self, x: Tensor) -> Tensor:
        return functional.normalize((x - self.mean) @ self.basis.T.to(x.dtype), dim=-1)

    def restore(self, y: Tensor) -> Tensor:
        """Unit embedding [..., d] whose preprocessed form is close to `y` [..., k]."""
        return functional.normalize(self.mean + self.radius * (y @ self.basis.to(y.dtype)), dim=-1)
