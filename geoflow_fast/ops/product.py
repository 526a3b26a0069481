"""Products of float32 rows and weights, by whichever of torch's libraries is faster on this processor.

torch multiplies float32 matrices with MKL, which keeps to AVX2 on AMD's processors. Most of those since Zen 5 have
AVX-512 units of twice the width, and oneDNN, which torch has for other products, uses all of it. Which of the two it is
depends on the processor, on shapes and on what the user allows, so that a job that is continued computes the same.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from geoflow_fast.ops import dispatch, extension

FEWEST_ROWS, LEAST_DEPTH, FEWEST_COLUMNS = 32, 64, 128
"""Smaller matrices take longer in oneDNN, which packs both."""
WORTH_MULTIPLICATIONS = 2**21
"""Below this a product takes ten microseconds, as long as it takes to ask another library."""


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight, [R, in] and [in, out] or [n, R, in] and [n, in, out]; differentiable as torch's own."""
    transformed = torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None
    if transformed or not served(x, weight):
        return x @ weight
    y: Tensor = _operation(x, weight, "auto")
    return y


def product_into(out: Tensor, x: Tensor, weight: Tensor) -> None:
    """Writes x @ weight to `out`, whose rows may stand apart, without derivatives."""
    if served(x, weight):
        _write(out, x, weight)
    else:
        (torch.bmm if x.dim() == 3 else torch.mm)(x, weight, out=out)


def served(x: Tensor, weight: Tensor) -> bool:
    """Whether another library than torch's usual one multiplies these."""
    return (
        x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and missing_onednn() is None
        and x.shape[:-2] == weight.shape[:-2]
        and _worthwhile(x.shape[-2:], weight.shape[-1])
        and bool(torch.backends.mkldnn.enabled)
        and not torch.is_autocast_enabled("cpu")
    )


def _worthwhile(rows: torch.Size, columns: int) -> bool:
    """Whether [R, in] @ [in, out] is large enough in every direction."""
    count, depth = rows
    large = count >= FEWEST_ROWS and depth >= LEAST_DEPTH and columns >= FEWEST_COLUMNS
    return large and count * depth * columns >= WORTH_MULTIPLICATIONS


def has_onednn() -> bool:
    """Whether this build of torch can multiply float32 rows by oneDNN at all."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


@functools.cache
def missing_onednn() -> str | None:
    """Why oneDNN does not multiply float32 rows here; None if it does."""
    if not has_onednn():
        return "this build of torch has no oneDNN product of float32 rows"
    if not torch.backends.mkl.is_available():
        return "this build of torch multiplies without MKL"
    if extension.missing() is not None:
        return extension.missing()
    return None if extension.mkl_is_narrow() else f"MKL uses the whole width of a processor with {extension.isa()}"


def product_reference(x: Tensor, weight: Tensor) -> Tensor:
    """The same by `torch.matmul`."""
    return x @ weight


def _onednn(x: Tensor, weight: Tensor) -> Tensor:
    if x.dim() == 2:
        return _multiply(x, weight)
    y = x.new_empty(*x.shape[:2], weight.shape[2])
    _write(y, x, weight)
    return y


def _write(out: Tensor, x: Tensor, weight: Tensor) -> None:
    factors = zip(out, x, weight, strict=True) if x.dim() == 3 else ((out, x, weight),)
    for target, rows, columns in factors:
        target.copy_(_multiply(rows, columns))


def _multiply(rows: Tensor, columns: Tensor) -> Tensor:
    """[R, in] @ [in, out]."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise(_dense(rows), _dense(columns).mT, None, "none", [], "")
    return result


def _dense(x: Tensor) -> Tensor:
    """The same matrix by rows or by columns without gaps: oneDNN takes a thousand times as long if both have some."""
    return x if x.is_contiguous() or x.mT.is_contiguous() else x.contiguous()


class _Derivatives(dispatch.Derivatives):
    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG004
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        for_x, for_weight = ctx.needs_input_grad[:2]
        return product(grad, weight.mT) if for_x else None, product(x.mT, grad) if for_weight else None, None


# The reason is looked up by name in each call, as `served` does, so that both always agree.
_operation = dispatch.operation(
    "product",
    product_reference,
    cpu=dispatch.Backend(_onednn, ("cpu",), lambda: missing_onednn(), (torch.float32,)),
    derivatives=_Derivatives,
)
