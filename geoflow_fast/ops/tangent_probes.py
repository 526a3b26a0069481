"""Random probes of the divergence and the traces that they give, each in one pass over the rows.

For a random vector e whose second moment is the tangent projection, the mean of e^T J e is the trace of J over the
tangent space (Hutchinson). Probes are computed from a hash of seed, row, draw and stream, so they do not depend on
batches. `likelihood/probes.py` says which probes there are.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from geoflow_fast.geometry import inner, tangent_part
from geoflow_fast.ops import dispatch, triton_kernels
from geoflow_fast.ops.dispatch import Backend

# Constants of splitmix64, whose outputs pass the usual test batteries, as signed 64-bit integers: these wrap as
# unsigned ones do.
GOLDEN = 0x9E3779B97F4A7C15 - 2**64
FIRST, SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
_LOW = 2**32 - 1
MEMORY = 0.8
"""What the direction of aligned probes keeps of itself from draw to draw."""
CLEAR = 1e-3
"""Length that a unit direction must have left in the tangent space to be followed there."""


def hashed_normals(rows: Tensor, seed: int | Tensor, number: int, stream: int, probes: int, width: int) -> Tensor:
    """Standard normals [K, B, d], float32, by Box-Muller from hashes of seed, row, draw, stream and coordinate."""
    lanes = torch.arange(probes, device=rows.device) * 2 + stream + (number << 32)
    keys = _mix(_mix(rows * GOLDEN + seed) + lanes.unsqueeze(1) * GOLDEN)
    half = torch.arange(1, (width + 1) // 2 + 1, device=rows.device)
    bits = _mix(keys.unsqueeze(-1) + half * GOLDEN)
    uniform = (((bits >> 32) & _LOW).float() + 0.5) * 2.0**-32
    radius = torch.sqrt(-2 * torch.log(uniform))
    turn = (bits & _LOW).float() * (2 * math.pi * 2.0**-32)
    return torch.cat((radius * turn.cos(), radius * turn.sin()), dim=-1).narrow(-1, 0, width)


def _mix(z: Tensor) -> Tensor:
    """Finaliser of splitmix64 on int64; the masks turn arithmetic shifts into logical ones."""
    z = (z ^ ((z >> 30) & (2**34 - 1))) * FIRST
    z = (z ^ ((z >> 27) & (2**37 - 1))) * SECOND
    return z ^ ((z >> 31) & (2**33 - 1))


def leading_part(seen: Tensor, e: Tensor) -> Tensor:
    """The direction that was `seen` [B, d], with the sign that the probes `e` [K, B, d] have along it."""
    lead = functional.normalize(seen, dim=-1)
    return lead * inner(lead, e).sign()


def align(e: Tensor, plain: Tensor, lead: Tensor, freedom: int) -> Tensor:
    """Probes of size one along the tangent direction `lead`, and uniform in the rest, where there is such a direction;
    `e` are the tangent ones before they were scaled, `plain` after it."""
    length = torch.linalg.vector_norm(lead, dim=-1, keepdim=True)
    lead = lead / length.clamp_min(CLEAR)
    rest = functional.normalize(e - inner(lead, e) * lead, dim=-1) * math.sqrt(freedom - 1)
    return torch.where(length > CLEAR, lead + rest, plain)


def learned_direction(e: Tensor, product: Tensor, before: Tensor | None) -> Tensor:
    """The direction [B, d] in which a Jacobian acts most, after it has made the tangent `product` of the probes `e`,
    both [K, B, d], and was seen to act along `before`."""
    r = product - inner(e, product) / inner(e, e) * e
    along = functional.normalize(r.select(0, 0) if before is None else before, dim=-1)
    new = (r * inner(functional.normalize(r, dim=-1), along)).mean(0)
    return new if before is None else torch.add(new, before, alpha=MEMORY)


def tangent_probes_reference(
    x: Tensor,
    rows: Tensor,
    seed: Tensor,
    number: int,
    stream: int,
    probes: int,
    signs: bool,
    seen: Tensor | None,
    freedom: int,
) -> Tensor:
    """Probes [K, B, d] of draw `number` at the points `x` [B, d] with the numbers `rows` [B], tangent there if
    `freedom` is less than d: random `signs`, or scaled to the norm sqrt(freedom) and aligned with the direction `seen`.
    """
    normals = hashed_normals(rows, seed, number, stream, probes, x.shape[1]).to(x.dtype)
    return shaped_probes(x, normals, signs, seen, freedom)


def shaped_probes(x: Tensor, normals: Tensor, signs: bool, seen: Tensor | None, freedom: int) -> Tensor:
    """The probes [K, B, d] that are made of standard `normals`, [K, B, d] or [K, 1, d] for all rows."""
    normals = normals.expand(-1, len(x), -1)
    if signs:
        return _tangent(x, torch.where(normals < 0, -1.0, 1.0).to(x.dtype), freedom)
    e = _tangent(x, normals, freedom)
    plain = functional.normalize(e, dim=-1) * math.sqrt(freedom)
    return plain if seen is None else align(e, plain, _tangent(x, leading_part(seen, normals), freedom), freedom)


def probe_traces_reference(
    x: Tensor,
    f: Tensor,
    e: Tensor,
    product: Tensor,
    integral: Tensor,
    weight: float,
    curvature: float,
    freedom: int,
    learns: bool,
    seen: Tensor | None,
) -> Tensor:
    """Adds weight (e^T product + curvature x^T f) to `integral` [K, B], float64, for values `f` [B, d] of a field at
    the points `x` and what its Jacobian made of the probes, `product` [K, B, d]. Returns the learned direction [B, d]
    if it `learns`, else an empty tensor."""
    trace = (product.double() * e.double()).sum(-1) + curvature * (x.double() * f.double()).sum(-1)
    integral.add_(trace, alpha=weight)
    return learned_direction(e, _tangent(x, product.to(e.dtype), freedom), seen) if learns else x.new_empty(0)


def _tangent(x: Tensor, v: Tensor, freedom: int) -> Tensor:
    return tangent_part(x, v) if freedom < x.shape[1] else v


for _name, _plain in (("tangent_probes", tangent_probes_reference), ("probe_traces", probe_traces_reference)):
    _kernel = triton_kernels.backend("probes", _name, (torch.float32,), triton_kernels.WIDEST_ROW)
    dispatch.register(_name, reference=Backend(_plain), triton=_kernel)
    dispatch._PASSES.add(_name)
