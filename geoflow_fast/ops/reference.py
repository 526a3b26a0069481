"""The fused operations in plain torch: slow, obvious, differentiable, and the truth for their faster twins."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from geoflow_fast.directions import DIRECTIONS
from geoflow_fast.geometry import follow, interpolate, project_tangent, tangent_part

I2T, T2I = DIRECTIONS.index("i2t"), DIRECTIONS.index("t2i")


Pair = tuple[Tensor, Tensor]


_TILE_ROWS, _TILE_ITEMS = 512, 4096  # samples and gallery items per tile of scores: 8 MB of float32


def masked_interpolant(
    image0: Tensor, text0: Tensor, image1: Tensor, text1: Tensor, t: Tensor, direction: Tensor, drop: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Point and target velocity on both spheres, [B, d_I] and [B, d_T], with the given stream pinned to its data.

    Each stream follows its geodesic from noise (t=0) to data (t=1) unless `direction` [B] says that it is given: then
    it is its data point, or its noise where `drop` [B] is set, at zero velocity.
    """
    image = _stream(image0, image1, t, direction == I2T, drop)
    text = _stream(text0, text1, t, direction == T2I, drop)
    return image[0], text[0], image[1], text[1]


def _stream(noise: Tensor, data: Tensor, t: Tensor, given: Tensor, drop: Tensor | None) -> tuple[Tensor, Tensor]:
    point, velocity = interpolate(noise, data, t)
    given = given.unsqueeze(-1)
    shown = data if drop is None else torch.where(drop.unsqueeze(-1), noise, data)
    return torch.where(given, shown, point), torch.where(given, torch.zeros_like(velocity), velocity)


def transport_cost(
    image0: Tensor, text0: Tensor, image1: Tensor, text1: Tensor, cost: str, weights: tuple[float, float]
) -> Tensor:
    """Cost of moving noise row i to data row j, [n, m]: a weighted sum over the two spheres.

    "arc" is the arc length acos<x, y>, "chord" the squared chord |x - y|^2 = 2 - 2 <x, y> of unit rows.
    """
    total = torch.zeros(image0.shape[0], image1.shape[0], dtype=image0.dtype, device=image0.device)
    for noise, data, weight in ((image0, image1, weights[0]), (text0, text1, weights[1])):
        cosine = (noise @ data.T).clamp(-1, 1)
        total += weight * (cosine.acos() if cost == "arc" else 2 - 2 * cosine)
    return total


def sinkhorn(cost: Tensor, eps: float, tol: float, max_iter: int) -> tuple[Tensor, Tensor, int, float]:
    """Potentials f [n], g [m] of the plan P = exp((f + g - C) / eps) with uniform marginals; iterations; error.

    Log domain. An iteration makes the rows exact, looks at the L1 violation of the columns, and makes the columns
    exact; it stops when the violation is at most `tol`, which bounds that of the rows after the column update.
    """
    n, m = cost.shape
    g = torch.zeros(m, dtype=cost.dtype, device=cost.device)
    iteration, error = 0, math.inf
    while error > tol and iteration < max_iter:
        iteration += 1
        f = -eps * (torch.logsumexp((g - cost) / eps, dim=1) + math.log(n))
        log_columns = torch.logsumexp((f[:, None] + g - cost) / eps, dim=0)
        error = float((log_columns.exp() - 1 / m).abs().sum())
        g = g - eps * (log_columns + math.log(m))
    return f, g, iteration, error


def ot_assign(cost: Tensor, g: Tensor, eps: float, uniform: Tensor | None) -> Tensor:
    """Target column of each row, int64 [n]: argmax_j of the plan, or its inverse row distribution at `uniform` [n]."""
    if uniform is None:
        return (g - cost).argmax(dim=1)
    cumulative = torch.softmax((g - cost).double() / eps, dim=1).cumsum(dim=1)
    target = uniform.double() * cumulative[:, -1]
    return torch.searchsorted(cumulative, target[:, None], right=True)[:, 0].clamp(max=cost.shape[1] - 1)


def tangent_step(x: Tensor, v: Tensor, h: float, v_free: Tensor | None, guidance: float, renormalise: bool) -> Tensor:
    """One Euler step of size `h` from the unit rows `x` [B, d] along the tangent part of the velocity `v` [B, d].

    With `v_free` the velocity is v + guidance (v - v_free). The step follows the geodesic (exp map), or the straight
    line back to the sphere when `renormalise` is set.
    """
    guided = v if v_free is None else v + guidance * (v - v_free)
    step = h * tangent_part(x, guided)
    if not renormalise:
        return follow(x, step)
    y = x + step
    return y / torch.linalg.vector_norm(y, dim=-1, keepdim=True)


def working_dtype(x: Tensor) -> torch.dtype:
    """The dtype of intermediate results: float32 for half-precision tensors, else the tensor's own."""
    return torch.promote_types(x.dtype, torch.float32)


def _per_row(group: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """`like` [R, H] as [G, R/G, H] beside `group` [G, H] as [G, 1, H]: row r belongs to group r // (R/G)."""
    return like.reshape(group.shape[0], -1, like.shape[-1]), group.unsqueeze(1)


def adaln(x: Tensor, shift: Tensor, scale: Tensor, eps: float) -> Tensor:
    """LayerNorm without weights, then (1 + scale) * . + shift. `x` [R, H]; `shift` and `scale` [G, H], G dividing R."""
    work = working_dtype(x)
    unit, scale = _per_row(scale, torch.nn.functional.layer_norm(x.to(work), x.shape[-1:], eps=eps))
    return torch.addcmul(unit, unit, scale.to(work)).add(shift.unsqueeze(1).to(work)).reshape(x.shape).to(x.dtype)


def adaln_backward(grad: Tensor, x: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `adaln` with respect to x [R, H], shift and scale [G, H]; the statistics of `x` are recomputed."""
    work = working_dtype(x)
    full = x.to(work)
    unit, mean, rstd = torch.native_layer_norm(full, x.shape[-1:], None, None, eps)
    grad, groups = _per_row(scale.to(work), grad.to(work))
    d_scale = (grad * unit.view(grad.shape)).sum(1)
    d_unit = torch.addcmul(grad, grad, groups).reshape(x.shape)
    d_x, _, _ = torch.ops.aten.native_layer_norm_backward(
        d_unit, full, x.shape[-1:], mean, rstd, None, None, [True, False, False]
    )
    return d_x.to(x.dtype), grad.sum(1).to(scale.dtype), d_scale.to(scale.dtype)


def adaln_jvp(x: Tensor, dx: Tensor, shift: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`adaln` and its derivative along the K tangents `dx` [K, R, H] of `x`."""
    work = working_dtype(x)
    unit, _, rstd = torch.native_layer_norm(x.to(work), x.shape[-1:], None, None, eps)
    along = dx.to(work)
    along = along - along.mean(-1, keepdim=True) - unit * (unit * along).mean(-1, keepdim=True)
    factor = (1 + scale.to(work)).repeat_interleave(x.shape[0] // scale.shape[0], dim=0)
    return adaln(x, shift, scale, eps), (along * rstd * factor).to(x.dtype)


def gate_residual(
    residual: Tensor, gate: Tensor | None, value: Tensor, layer_scale: Tensor, keep: Tensor | None, dropout: float
) -> Tensor:
    """residual + layer_scale * sigmoid(gate) * value, all [R, H]; `layer_scale` [G, H], G dividing R.

    Where `keep` is false the branch is dropped, elsewhere scaled by 1/(1-dropout); without `gate` its factor is one.
    """
    work = working_dtype(residual)
    branch, scale = _per_row(layer_scale.to(work), _branch(gate, value.to(work), keep, dropout))
    out = torch.addcmul(residual.to(work).view(branch.shape), branch, scale)
    return out.reshape(residual.shape).to(residual.dtype)


def _branch(gate: Tensor | None, value: Tensor, keep: Tensor | None, dropout: float) -> Tensor:
    """sigmoid(gate) * value, dropped and rescaled."""
    branch = value if gate is None else torch.sigmoid(gate.to(value.dtype)) * value
    return branch if keep is None else branch * keep * (1 / (1 - dropout))


def gate_residual_backward(
    grad: Tensor, gate: Tensor | None, value: Tensor, layer_scale: Tensor, keep: Tensor | None, dropout: float
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Gradients of `gate_residual` with respect to gate, value and layer_scale; that of residual is `grad` itself."""
    work = working_dtype(grad)
    full_value = value.to(work)
    grad_rows, scale = _per_row(layer_scale.to(work), grad.to(work))
    branch = _branch(gate, full_value, keep, dropout)
    d_layer_scale = (grad_rows * branch.view(grad_rows.shape)).sum(1).to(layer_scale.dtype)
    d_branch = (grad_rows * scale).reshape(value.shape)
    if keep is not None:
        d_branch = d_branch * keep * (1 / (1 - dropout))
    if gate is None:
        return None, d_branch.to(value.dtype), d_layer_scale
    sigmoid = torch.sigmoid(gate.to(work))
    d_value = d_branch * sigmoid
    d_gate = d_value * full_value * (1 - sigmoid)
    return d_gate.to(gate.dtype), d_value.to(value.dtype), d_layer_scale


def gate_residual_jvp(
    residual: Tensor,
    d_residual: Tensor,
    gate: Tensor | None,
    d_gate: Tensor | None,
    value: Tensor,
    d_value: Tensor,
    layer_scale: Tensor,
) -> tuple[Tensor, Tensor]:
    """`gate_residual` without dropout and its derivative along K tangents, each [K, R, H]."""
    work = working_dtype(residual)
    d_branch = d_value.to(work)
    if gate is not None and d_gate is not None:
        sigmoid = torch.sigmoid(gate.to(work))
        d_branch = sigmoid * (d_branch + (1 - sigmoid) * value.to(work) * d_gate.to(work))
    scale = layer_scale.to(work).repeat_interleave(residual.shape[0] // layer_scale.shape[0], dim=0)
    tangent = torch.addcmul(d_residual.to(work), d_branch, scale)
    return gate_residual(residual, gate, value, layer_scale, None, 0.0), tangent.to(residual.dtype)


def _halves(gate: Tensor, value: Tensor | None) -> tuple[Tensor, Tensor]:
    """Gate and value in the working dtype; without `value`, the two halves of `gate`."""
    first, second = gate.chunk(2, dim=-1) if value is None else (gate, value)
    return first.to(working_dtype(gate)), second.to(working_dtype(gate))


def swiglu(gate: Tensor, value: Tensor | None) -> Tensor:
    """silu(gate) * value, [R, I]; without `value`, of the two halves of `gate` [R, 2 I]."""
    first, second = _halves(gate, value)
    return (torch.nn.functional.silu(first) * second).to(gate.dtype)


def _silu_and_slope(x: Tensor) -> tuple[Tensor, Tensor]:
    """silu(x) = x sigmoid(x) and its derivative sigmoid + silu (1 - sigmoid)."""
    sigmoid = torch.sigmoid(x)
    silu = x * sigmoid
    return silu, torch.addcmul(sigmoid, silu, 1 - sigmoid)


def swiglu_backward(grad: Tensor, gate: Tensor, value: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Gradients of `swiglu` in the form of its arguments."""
    first, second = _halves(gate, value)
    silu, slope = _silu_and_slope(first)
    grad = grad.to(first.dtype)
    d_first, d_second = grad * second * slope, grad * silu
    if value is None:
        return torch.cat((d_first, d_second), dim=-1).to(gate.dtype), None
    return d_first.to(gate.dtype), d_second.to(value.dtype)


def swiglu_jvp(gate: Tensor, d_gate: Tensor, value: Tensor | None, d_value: Tensor | None) -> tuple[Tensor, Tensor]:
    """`swiglu` and its derivative along K tangents of its arguments, each with a leading dimension K."""
    first, second = _halves(gate, value)
    d_first, d_second = _halves(d_gate, d_value)
    silu, slope = _silu_and_slope(first)
    return swiglu(gate, value), (slope * second * d_first + silu * d_second).to(gate.dtype)


def flow_loss(velocity: Pair, target: Pair, point: Pair, direction: Tensor) -> Tensor:
    """Squared norm of the tangent part of velocity - target, summed over the generated spheres: one loss per row [B].

    Each argument is (image, text), [B, d_I] and [B, d_T]; a stream that `direction` says is given does not count.
    """
    total = torch.zeros(direction.shape, dtype=working_dtype(velocity[0]), device=direction.device)
    for v, u, x, given in zip(velocity, target, point, (I2T, T2I)):
        squared = _tangent_error(v, u, x).square().sum(-1)
        total = total + torch.where(direction == given, torch.zeros_like(squared), squared)
    return total


def _tangent_error(v: Tensor, u: Tensor, x: Tensor) -> Tensor:
    work = working_dtype(v)
    return project_tangent(x.to(work), v.to(work) - u.to(work))


def flow_loss_backward(grad: Tensor, velocity: Pair, target: Pair, point: Pair, direction: Tensor) -> Pair:
    """Gradients of `flow_loss` with respect to the two velocities, given that of the row losses [B]."""
    gradients = []
    for v, u, x, given in zip(velocity, target, point, (I2T, T2I)):
        weight = torch.where(direction == given, torch.zeros_like(grad), 2 * grad).unsqueeze(-1)
        error = torch.where(weight == 0, torch.zeros_like(v, dtype=grad.dtype), _tangent_error(v, u, x))
        gradients.append((weight * error).to(v.dtype))
    return gradients[0], gradients[1]


Statistics = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Per query, of its items' scores s: max s, sum e^(s - max), sum (s - max) e^(s - max), top scores, top indices."""


def gallery_scores(samples: Tensor, gallery: Tensor, kappa: float, item_bias: Tensor | None) -> Tensor:
    """s_qj = log mean_m exp(kappa <g_j, x_qm>) + bias_j: [Q, N] for `samples` [Q, M, d] and `gallery` [N, d]."""
    work = working_dtype(samples)
    queries, draws, width = samples.shape
    # Item-major, so that the mean over the draws runs along memory.
    logits = (gallery.to(work) @ samples.to(work).reshape(-1, width).T).mul_(kappa).view(-1, queries, draws)
    peak = logits.amax(dim=-1)
    score = logits.sub_(peak.unsqueeze(-1)).exp_().mean(dim=-1).log_().add_(peak).T
    return score if item_bias is None else score + item_bias.to(work)


def gallery_statistics(
    samples: Tensor, gallery: Tensor, kappa: float, top_k: int, item_bias: Tensor | None
) -> Statistics:
    """Statistics of `gallery_scores` in float64, with never more than one tile of [Q, M, N] in memory."""
    blocks = []
    queries_per_block = max(1, _TILE_ROWS // samples.shape[1])
    for block in samples.split(queries_per_block):
        running: Statistics | None = None
        for start in range(0, gallery.shape[0], _TILE_ITEMS):
            tile = slice(start, start + _TILE_ITEMS)
            score = gallery_scores(block, gallery[tile], kappa, None if item_bias is None else item_bias[tile])
            found = _score_statistics(score.double(), top_k, start)
            running = found if running is None else merge_statistics(running, found, top_k)
        assert running is not None
        blocks.append(running)
    peak, weight, moment, top_score, top_index = zip(*blocks)
    return torch.cat(peak), torch.cat(weight), torch.cat(moment), torch.cat(top_score), torch.cat(top_index)


def _score_statistics(score: Tensor, top_k: int, first_index: int) -> Statistics:
    """Statistics of the scores [Q, N] of items `first_index`, `first_index` + 1, ..."""
    # A stable sort, not topk: equal scores, as of items that occur twice, must be kept in the order of their indices.
    ranked, order = score.sort(dim=1, descending=True, stable=True)
    peak = ranked[:, 0]
    below = score - peak.unsqueeze(1)
    mass = below.exp()
    return peak, mass.sum(1), (mass * below).sum(1), ranked[:, :top_k], order[:, :top_k] + first_index


def merge_statistics(a: Statistics, b: Statistics, top_k: int) -> Statistics:
    """Statistics of the union of two disjoint sets of items: exact, in any order and grouping."""
    peak = torch.maximum(a[0], b[0])
    weight, moment = torch.zeros_like(peak), torch.zeros_like(peak)
    for part_peak, part_weight, part_moment, _, _ in (a, b):
        shrink = (part_peak - peak).exp()
        weight = weight + shrink * part_weight
        # Moving the reference point from the part's maximum to the common one adds a multiple of its weight.
        moment = moment + shrink * (part_moment + (part_peak - peak) * part_weight)
    score, index = torch.cat((a[3], b[3]), dim=1), torch.cat((a[4], b[4]), dim=1)
    # Equal scores go by index, so that the order of merging does not show.
    index, order = index.sort(dim=1)
    score, order = score.gather(1, order).sort(dim=1, descending=True, stable=True)
    kept = min(top_k, score.shape[1])
    return peak, weight, moment, score[:, :kept], index.gather(1, order)[:, :kept]
