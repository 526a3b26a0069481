"""Random points on the unit sphere: independent, orthogonal or antithetic."""

from __future__ import annotations

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
) -> Tensor:
    """Draws `n` independent uniform points on the unit sphere of R^d: [n, d]."""
    eps(dtype)
    device = checks.device(device)
    _check_size(n, d)
    x = torch.randn(n, d, generator=generator, dtype=dtype, device=device)
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)


def _check_size(n: int, d: int) -> None:
    for name, value in (("n", n), ("d", d)):
        checks.integer(value, name, least=-checks.LARGEST_SEED)
    if n < 0 or d < 2:
        raise ValueError(f"need n >= 0 points with d >= 2 coordinates, got n={n}, d={d}")


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
