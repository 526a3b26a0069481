"""Adaptive LayerNorm: affine-free LayerNorm, then a shift and a scale per row or per group of rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from geoflow_fast.ops import dispatch, native, network_cpu, reference, triton_kernels
from geoflow_fast.ops.rows import (
    Out,
    check_floating,
    check_tangents,
    groups_of,
    out_rows,
    rows_of,
    with_derivatives,
    with_out,
)

EPS = 1e-6


def adaln(x: Tensor, shift: Tensor, scale: Tensor, *, eps: float = EPS, backend: str = "auto") -> Tensor:
    """Adaptive layer normalisation, (1 + scale) * LayerNorm(x) + shift, in the shape and dtype of `x` [..., H].

    `shift` and `scale` have the same shape: [H], shared by all rows; that of `x`, one per row; or [..., H] with G rows
    in total, where G divides the number R of rows of `x` and each serves R/G consecutive rows. An nn.LayerNorm is
    `adaln(x, bias, weight - 1)`. Differentiable in all three tensors, in reverse and forward mode.
    """
    rows = _check(x, shift, scale)
    if rows.numel() == 0:
        return x + 0 * (shift.sum() + scale.sum())
    out: Tensor = with_derivatives(_AdaLN)(
        rows, groups_of(shift, "shift", rows), groups_of(scale, "scale", rows), eps, backend
    )
    return out.view(x.shape)


def adaln_jvp(
    x: Tensor,
    dx: Tensor,
    shift: Tensor,
    scale: Tensor,
    *,
    eps: float = EPS,
    backend: str = "auto",
    out: Out | None = None,
) -> tuple[Tensor, Tensor]:
    """`adaln(x, shift, scale)` and its derivatives along K tangents `dx` [K, *x.shape], without an autograd tape.

    `out`: two contiguous tensors, distinct from the inputs, to write the results to.
    """
    rows = _check(x, shift, scale)
    check_floating(x=x, dx=dx)
    check_tangents(dx, "dx", x)
    if rows.numel() == 0:
        return adaln(x, shift, scale, eps=eps, backend=backend), dx.clone()
    passes = dispatch.choose("adaln", x, backend)
    tangents = dx.reshape(len(dx), *rows.shape)
    groups = groups_of(shift, "shift", rows), groups_of(scale, "scale", rows)
    y, dy = passes.jvp(rows, tangents, *groups, eps, out_rows(out, x.shape, dx.shape, x))
    return y.view(x.shape), dy.view(dx.shape)


def _check(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    check_floating(x=x, shift=shift, scale=scale)
    if x.dim() < 1 or x.shape[-1] == 0:
        raise ValueError(f"x must have at least one column, got {tuple(x.shape)}")
    if shift.shape != scale.shape or shift.dtype != scale.dtype:
        shapes = f"{shift.dtype} {tuple(shift.shape)} and {scale.dtype} {tuple(scale.shape)}"
        raise ValueError(f"shift and scale must have one shape and dtype, got {shapes}")
    return rows_of(x)


class _AdaLN(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, shift: Tensor, scale: Tensor, eps: float, backend: str) -> Tensor:
        out: Tensor = dispatch.choose("adaln", x, backend).forward(x, shift, scale, eps)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], _output: Tensor) -> None:
        x, shift, scale, ctx.eps, ctx.backend = inputs
        ctx.save_for_backward(x, scale)
        ctx.save_for_forward(x, shift, scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, scale = ctx.saved_tensors
        # Second derivatives exist in the reference only.
        backend = "reference" if torch.is_grad_enabled() else ctx.backend
        return *dispatch.choose("adaln", x, backend).backward(grad, x, scale, ctx.eps), None, None

    @staticmethod
    def jvp(ctx: Any, dx: Tensor, d_shift: Tensor, d_scale: Tensor, *_: None) -> Tensor:
        x, shift, scale = ctx.saved_tensors
        along_x = reference.adaln_jvp(x, dx.unsqueeze(0), shift, scale, ctx.eps)[1]
        # Linear in shift and 1 + scale, so their tangents go through the primal itself.
        return along_x[0] + reference.adaln(x, d_shift, d_scale - 1, ctx.eps)


@dispatch.register("adaln", "reference", devices=dispatch.EVERYWHERE)
class _Reference:
    forward = staticmethod(reference.adaln)
    backward = staticmethod(reference.adaln_backward)
    jvp = staticmethod(with_out(reference.adaln_jvp))


dispatch.register("adaln", "cpu", devices=("cpu",), missing=native.missing, dtypes=network_cpu.DTYPES)(
    network_cpu.AdaLN
)


@dispatch.register(
    "adaln", "triton", devices=triton_kernels.devices, missing=triton_kernels.missing, dtypes=triton_kernels.DTYPES
)
class _Triton:
    forward = staticmethod(triton_kernels.kernel("network", "adaln"))
    backward = staticmethod(triton_kernels.kernel("network", "adaln_backward"))
    jvp = staticmethod(triton_kernels.kernel("network", "adaln_jvp"))
