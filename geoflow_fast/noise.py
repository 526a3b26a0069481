"""Random points on the unit sphere: independent, orthogonal, antithetic, or rows of fast Hadamard rotations."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from geoflow_fast.geometry import eps
from geoflow_fast.runtime import checks


def sample_uniform(
    n: int,
    d: int,
    *,
    generator: torch.Generator | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    structured: bool = False,
) -> Tensor:
    """Draws `n` points on the unit sphere of R^d: [n, d]. They are independent and uniform, unless `structured`.

    `structured=True` draws blocks of random Hadamard rotations instead; `StructuredNoise` describes their distribution.
    To make transport costs cheap, draw a `StructuredNoise` and pass it on.
    """
    eps(dtype)
    device = checks.device(device)
    if structured:
        return StructuredNoise.draw(n, d, generator=generator, device=device).dense(dtype)
    _check_size(n, d)
    x = torch.randn(n, d, generator=generator, dtype=dtype, device=device)
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)


def _check_size(n: int, d: int) -> None:
    for name, value in (("n", n), ("d", d)):
        checks.integer(value, name, least=-checks.LARGEST_SEED)
    if n < 0 or d < 2:
        raise ValueError(f"need n >= 0 points with d >= 2 coordinates, got n={n}, d={d}")


@dataclass(frozen=True)
class StructuredNoise:
    """Points on the unit sphere of R^d, drawn as rows of random Hadamard rotations in blocks of `order` rows.

    A block is Q = H D1 H D2 H D3 / order^1.5, with H the Hadamard matrix of a power-of-two order >= max(d, 128) and
    D1, D2, D3 independent random signs; a point is a row of Q cut to d coordinates and rescaled to unit norm. Only
    `signs` [blocks, 3, order] is stored, and the inner products of a whole block with a vector are three fast
    Walsh-Hadamard transforms: `ops.ot_assign` accepts a `StructuredNoise` in place of a noise tensor and computes its
    cost in this way, several times faster (docs/performance.md).

    As for uniform points, every row has mean zero, vanishing odd moments, covariance I/d (exactly if d = order, to
    O(1/order) otherwise), and a fourth moment along any fixed direction that is right up to O(1/order). Unlike uniform
    points, the distribution is discrete (finitely many signs), and rows of one block are orthogonal if d = order
    (nearly so otherwise) instead of independent, so that a batch covers the sphere more evenly than independent points.
    Blocks are independent of each other.
    """

    signs: Tensor
    n: int
    d: int

    MIN_ORDER = 128

    @classmethod
    def draw(
        cls,
        n: int,
        d: int,
        *,
        generator: torch.Generator | None = None,
        device: torch.device | str = "cpu",
    ) -> StructuredNoise:
        """Draws `n` points of R^d, that is, their signs."""
        _check_size(n, d)
        device = checks.device(device)
        order = max(cls.MIN_ORDER, 1 << (d - 1).bit_length())
        blocks = -(-n // order)
        bits = torch.randint(0, 2, (blocks, 3, order), generator=generator, device=device)
        return cls((2 * bits - 1).float(), n, d)

    @property
    def order(self) -> int:
        """Number of rows in a block: the power of two that d is padded to."""
        return self.signs.shape[-1]

    @property
    def shape(self) -> torch.Size:
        """Shape (n, d) of the dense tensor."""
        return torch.Size((self.n, self.d))

    @property
    def device(self) -> torch.device:
        """Device of the signs."""
        return self.signs.device

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The points as a plain tensor [n, d]."""
        rows = self._rows(dtype)
        return rows if self.d == self.order else rows / torch.linalg.vector_norm(rows, dim=-1, keepdim=True)

    def inverse_norm(self) -> Tensor | None:
        """Reciprocal norm of each row of Q after the cut to d coordinates, float32 [n]; None if nothing is cut."""
        return None if self.d == self.order else 1 / torch.linalg.vector_norm(self._rows(torch.float32), dim=-1)

    def _rows(self, dtype: torch.dtype) -> Tensor:
        """Rows of Q, cut but not rescaled: [n, d]. Row i of a block is D3 H D2 H D1 h_i with h_i row i of H."""
        d1, d2, d3 = self.signs.to(dtype).unsqueeze(-2).unbind(1)  # [blocks, 1, order] each
        first = hadamard(self.order, dtype, self.signs.device)[: min(self.n, self.order)]
        rows = hadamard_transform(first * d1).mul_(d2 / self.order**1.5)
        rows = hadamard_transform(rows).mul_(d3)
        return rows.flatten(0, 1)[: self.n, : self.d]


def hadamard(order: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """The Hadamard matrix of a power-of-two order, with entries 1 and -1: [order, order]."""
    if checks.integer(order, "order", 1, 1 << 20).bit_count() != 1:
        raise ValueError(f"order must be a power of two, got {order}")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"dtype must be floating point, got {dtype!r}")
    matrix = torch.ones(1, 1, dtype=dtype, device=checks.device(device))
    while matrix.shape[0] < order:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


def hadamard_transform(x: Tensor) -> Tensor:
    """Multiplies the last dimension of `x` by the Hadamard matrix, by way of two of order about sqrt(d)."""
    order = x.shape[-1] if checks.floating(x, "x").dim() else 0
    if order.bit_count() != 1:
        raise ValueError(f"x must be rows [..., d] with d a power of two, got {tuple(x.shape)}")
    left = 1 << (order.bit_length() - 1) // 2
    right = order // left
    inner = x.reshape(-1, right) @ hadamard(right, x.dtype, x.device)
    return (hadamard(left, x.dtype, x.device) @ inner.view(-1, left, right)).view(x.shape)


NOISE_KINDS = ("iid", "orthogonal", "antithetic")


def base_noise(
    n: int,
    d: int,
    kind: str = "iid",
    *,
    generator: torch.Generator | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Draws `n` points on the unit sphere of R^d, each of which is uniform: [n, d].

    "iid": independent. "orthogonal": orthogonal to each other within blocks of d rows, which spreads them more evenly
    than chance. "antithetic": row 2k+1 is minus row 2k, and the even rows are orthogonal.
    """
    if kind not in NOISE_KINDS:
        raise ValueError(f"noise must be one of {NOISE_KINDS}, got {kind!r}")
    if kind == "antithetic":
        half = base_noise(-(-n // 2), d, "orthogonal", generator=generator, dtype=dtype, device=device)
        return torch.stack((half, -half), dim=1).reshape(-1, d)[:n]
    if kind == "iid":
        return sample_uniform(n, d, generator=generator, dtype=dtype, device=device)
    blocks = [_orthogonal_rows(min(d, n - start), d, generator) for start in range(0, n, d)]
    return torch.cat(blocks or [torch.empty(0, d, dtype=torch.float64, device="cpu")]).to(device, dtype)


def _orthogonal_rows(n: int, d: int, generator: torch.Generator | None) -> Tensor:
    """The first `n` rows of a random rotation (Haar measure), float64."""
    device = generator.device if generator is not None else "cpu"
    q, r = torch.linalg.qr(torch.randn(d, n, generator=generator, dtype=torch.float64, device=device))
    return (q * r.diagonal().sign()).T  # without the signs the columns would not be uniform
