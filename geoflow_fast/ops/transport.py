"""The compiled transport solvers: what they are given on CPUs and on GPUs, and what they return."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from geoflow_fast.ops import extension


def ot_solve(
    image0: Tensor,
    text0: Tensor,
    image1: Tensor,
    text1: Tensor,
    eps: float,
    tol: float,
    max_iter: int,
    uniform: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `ot_solve_reference` of ops/ot_assign.py; points of any dtype are read in float32."""
    points = (x.to(torch.float32).contiguous() for x in (image0, text0, image1, text1))
    index, f, g, report = extension.required().ot_solve(*points, eps, tol, max_iter, uniform)
    return index, f, g, report


def _ot_results(points: dict[str, Tensor], uniform: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Memory for index, f, g and report, once the shapes fit each other."""
    image0, text0, image1, text1 = points.values()
    (rows, image_dim), (cols, text_dim) = image0.shape, text1.shape
    if text0.shape != (rows, text_dim) or image1.shape != (cols, image_dim) or not rows or not cols:
        raise ValueError(f"points {[tuple(x.shape) for x in points.values()]} do not fit")
    if uniform is not None and uniform.shape != (rows,):
        raise ValueError(f"uniform has shape {tuple(uniform.shape)}, expected {(rows,)}")
    f, g, report = (torch.empty(n, dtype=torch.float64, device=image0.device) for n in (rows, cols, 3))
    return torch.empty(rows, dtype=torch.int64, device=image0.device), f, g, report


def _scores(cost: Tensor, middle: float, multiple: int) -> Tensor:
    """`middle` less the costs, float32, in rows that are padded with zeros to a multiple of entries."""
    rows, cols = cost.shape
    scores = torch.empty(rows, -(-cols // multiple) * multiple, dtype=torch.float32, device=cost.device)
    scores[:, cols:] = 0.0
    torch.sub(cost, middle, out=scores[:, :cols]).neg_()
    return scores


def sinkhorn(
    cost: Tensor, middle: float, spread: float, eps: float, tol: float, max_iter: int
) -> tuple[Tensor, Tensor, int, float]:
    """Potentials f and g of the plan of `cost` less `middle`, iterations and column violation. `spread`: largest cost
    less smallest."""
    scores = _scores(cost, middle, extension.required().OT_LEADING)
    f, g, iterations, violation = extension.required().sinkhorn(scores, cost.shape[1], spread, eps, tol, max_iter)
    return f, g, iterations, violation


def _stream(device: torch.device) -> dict[str, int]:
    """The index of the device and the handle of its current stream, as the launchers take them."""
    if device.type != "cuda":
        return {"device": 0, "stream": 0}
    stream = torch.cuda.current_stream(device)
    return {"device": stream.device_index, "stream": stream.cuda_stream}


def _aligned_rows(x: Tensor, columns: int) -> Tensor:
    """`x` itself, or a copy with zeros appended, so that rows have a multiple of `columns` and begin at 16 bytes."""
    missing = -x.shape[1] % columns
    if missing:
        return torch.nn.functional.pad(x, (0, missing))
    return x if x.data_ptr() % 16 == 0 else x.clone()


def ot_solve_cuda(
    image0: Tensor,
    text0: Tensor,
    image1: Tensor,
    text1: Tensor,
    eps: float,
    tol: float,
    max_iter: int,
    uniform: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `ot_solve_reference` of ops/ot_assign.py. Only enqueues work on the current stream, in memory allocated here,
    and may be captured in a CUDA graph. Points are rounded to float16; the matrix is, too, where costs rounded to a
    4096th of their range misplace no more than about a hundredth of the mass."""
    points = dict(zip(("image0", "text0", "image1", "text1"), (image0, text0, image1, text1)))
    points = {name: _aligned_rows(x.to(torch.float16).contiguous(), 8) for name, x in points.items()}
    dtype = torch.float16 if 2 * math.pi <= _HALF_SPAN * eps else torch.float32
    matrix = torch.empty(len(image0), -(-len(image1) // 4) * 4, dtype=dtype, device=image0.device)
    results = _ot_results(points, uniform)
    _transport_cuda(matrix, results, points, uniform, math.pi, 2 * math.pi, eps, tol, max_iter)
    return results


def sinkhorn_cuda(
    cost: Tensor, middle: float, spread: float, eps: float, tol: float, max_iter: int
) -> tuple[Tensor, Tensor, int, float]:
    """See `sinkhorn`; waits for the GPU."""
    rows, cols = cost.shape
    f, g, report = (torch.empty(n, dtype=torch.float64, device=cost.device) for n in (rows, cols, 3))
    results = torch.empty(rows, dtype=torch.int64, device=cost.device), f, g, report
    _transport_cuda(_scores(cost, middle, 4), results, {}, None, 0.0, spread, eps, tol, max_iter)
    iterations, violation, _ = report.tolist()
    return f, g, int(iterations), violation


# (largest - smallest cost) / eps up to which a matrix is in float16, and a solve starts from potentials of zero.
_HALF_SPAN = _FAST_SPAN = 160.0


def _transport_cuda(
    matrix: Tensor,
    results: tuple[Tensor, Tensor, Tensor, Tensor],
    points: dict[str, Tensor],
    uniform: Tensor | None,
    offset: float,
    spread: float,
    eps: float,
    tol: float,
    max_iter: int,
) -> None:
    """Fills the matrix [rows, padded cols] with scores of points, if there are any, and solves the plan of costs
    `offset` less the scores, whose range is `spread`."""
    device, (index, f, g, report) = matrix.device, results
    shape = {"rows": len(f), "cols": len(g), "stride": matrix.shape[1], "half": matrix.dtype == torch.float16}
    where = _stream(device)
    workspace_bytes = extension.required().transport_workspace(**shape, device=where["device"])
    workspace = torch.empty(workspace_bytes, dtype=torch.uint8, device=device)
    row_mass = torch.empty(len(f), dtype=torch.float32, device=device)
    read = {**points, **({} if uniform is None else {"uniform": uniform})}
    for name, x in read.items():
        if x.device != device:
            raise ValueError(f"{name} is on {x.device}, expected {device}")
    addresses: dict[str, int | None] = {**dict.fromkeys(("image0", "text0", "image1", "text1"), 0), "uniform": None}
    addresses |= {
        name: extension.cuda_address(x, name, torch.float64 if name == "uniform" else torch.float16)
        for name, x in read.items()
    }
    extension.required().transport(
        **shape,
        **addresses,
        matrix=extension.cuda_address(matrix, "matrix", matrix.dtype),
        image_dim=points["image1"].shape[1] if points else 0,
        text_dim=points["text1"].shape[1] if points else 0,
        offset=offset,
        eps=eps,
        tol=tol,
        max_iter=max_iter,
        # On the way to eps it is halved, but not at all unless it is far below the cost's range.
        halvings=0 if spread <= _FAST_SPAN * eps else int(math.log2(spread / (10 * eps))),
        workspace=workspace.data_ptr(),
        row_mass=row_mass.data_ptr(),
        **{name: x.data_ptr() for name, x in zip(("index", "f", "g", "report"), (index, f, g, report))},
        **where,
    )
