"""The only importer of the compiled extension: tensors are checked here, then pointers, sizes and streams cross.

Every function takes tensors that its operation has already validated in the user's terms; the checks here guard memory.
"""

from __future__ import annotations

import functools
import importlib
import math
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.utils.dlpack
from torch import Tensor

from geoflow_fast.ops.dispatch import Backend
from geoflow_fast.runtime import processors


@functools.cache
def extension() -> ModuleType | None:
    """The compiled extension; None when it was never built. One that is there but does not load is an error, and so is
    a name in GEOFLOW_ISA of instructions that the processor does not have."""
    try:
        module = importlib.import_module("geoflow_fast._C")
    except ModuleNotFoundError as error:
        if error.name != "geoflow_fast._C":
            raise
        return None
    problem = module.isa_problem()
    if problem:
        raise ValueError(problem)
    connect(module)
    return module


SMALL = 4096
"""Numbers up to which compiled code works in the calling thread: waking a team that spins takes longer."""
SMALL_WHEN_ASLEEP = 500_000
"""The same where the threads of a team sleep while they wait."""


def connect(module: ModuleType, exchange: object = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)) -> None:
    """Tells compiled code how it reads tensors and makes them. `exchange` is the capsule that torch has for this since
    2.10; without it, tensors cross by capsules of their own."""
    module.connect(
        tensor=torch.Tensor,
        exchange=exchange,
        to_dlpack=torch.utils.dlpack.to_dlpack,  # type: ignore[attr-defined]
        from_dlpack=torch.utils.dlpack.from_dlpack,
        usable_threads=lambda: usable_threads(),  # looked up in each call
        alone=SMALL_WHEN_ASLEEP if processors.threads_sleep() else SMALL,
    )


@functools.cache
def missing() -> str | None:
    """Why the compiled CPU code cannot be used; None if it can."""
    if extension() is not None:
        return None
    if sys.platform == "win32":
        return "the compiled extension is not built on Windows, where operations run in torch"
    return "the compiled extension is not built; reinstall geoflow_fast with a C++17 compiler at hand"


def one_thread_only() -> str | None:
    """Why the compiled CPU code runs on one thread; None if it does not."""
    if required().openmp():
        return None
    return "built without OpenMP, so compiled operations run on one thread; reinstall with libomp"


def missing_cuda() -> str | None:
    """Why the compiled CUDA code cannot be used; None if it can."""
    module = extension()
    if module is None:
        return missing()
    return module.cuda_status() or None


def backend(function: Callable[..., Any], dtypes: tuple[torch.dtype, ...] | None = (torch.float32,)) -> Backend:
    """The backend "cpu" of an operation: a function that calls the compiled code."""
    return Backend(function, ("cpu",), missing, dtypes)


def bound(
    name: str, dtypes: tuple[torch.dtype, ...] | None = (torch.float32,), like: tuple[int, ...] | None = None
) -> Backend:
    """The backend "cpu" of an operation that the extension has under this name: it takes the arguments of the operation
    and refuses what it cannot read, of which it then gets copies in float32 without gaps. `like`: the numbers of the
    arguments whose dtypes the results have, if there are several."""

    def call(*inputs: Any) -> Any:
        module = required()
        try:
            return getattr(module, name)(*inputs)
        except module.NotServed:
            results = getattr(module, name)(*map(_dense, inputs))
        if like is None:
            return results
        return tuple(x if inputs[k] is None else x.to(inputs[k].dtype) for x, k in zip(results, like, strict=True))

    return Backend(call, ("cpu",), missing, dtypes, bound=name, extension=lambda: extension())


def _dense(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    return (x.to(torch.float32) if x.is_floating_point() else x).contiguous()


def cuda_backend(function: Callable[..., Any]) -> Backend:
    """The backend "cuda" of an operation: a function that calls the compiled CUDA code."""
    return Backend(function, cuda_devices, missing_cuda)


def required() -> ModuleType:
    """The compiled extension; an error if it is missing."""
    module = extension()
    if module is None:
        raise OSError(missing())
    return module


def usable_threads() -> int:
    """Threads of a compiled kernel: those of torch, but no more than control groups grant this process."""
    limit = _most_threads()
    return torch.get_num_threads() if limit is None else min(torch.get_num_threads(), limit)


@functools.cache
def _most_threads() -> int | None:
    """The threads that control groups grant this process; None without a limit."""
    quota = processors.quota()
    return None if quota is None else math.ceil(quota)


def isa() -> str:
    """Name of the instruction set whose kernels run: the best that the processor has, or the one that GEOFLOW_ISA
    names."""
    return str(required().isa())


def supported_isas() -> list[str]:
    """Names that GEOFLOW_ISA may have on this processor, the best last."""
    return list(required().supported_isas())


def caches() -> tuple[int, int, int]:
    """Bytes of the data caches by which kernels cut their tiles: two of a core, and what cores share."""
    first, second, shared = required().caches()
    return first, second, shared


def mkl_is_narrow() -> bool:
    """Whether MKL, with which torch multiplies float32 matrices, leaves half of this processor's width unused."""
    return bool(required().mkl_is_narrow())


def missing_bfloat16() -> str | None:
    """Why the compiled code cannot multiply in bfloat16; None if it can."""
    if extension() is None:
        return missing()
    return None if required().has_bfloat16() else f"the kernels for {isa()} have no bfloat16 unit (AVX512-BF16)"


def missing_int8() -> str | None:
    """Why the compiled code cannot multiply in int8; None if it can."""
    if extension() is None:
        return missing()
    return None if required().has_int8() else f"the kernels for {isa()} have no int8 unit (AVX512-VNNI)"


STORAGES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""The dtypes in which compiled code reads the rows of a gallery, as `Storage` of csrc/rows.h numbers them."""


def _address(x: Tensor, name: str, dtype: torch.dtype, *, device: str = "cpu", whole: bool = True) -> int:
    """The address of `x`, after the last check before it crosses: the type of its device, its dtype, and elements
    without gaps; if not `whole`, without gaps along each row of a matrix."""
    if x.device.type != device:
        raise ValueError(f"{name} is on {x.device}, expected {device}")
    if x.dtype != dtype:
        raise TypeError(f"{name} is {x.dtype}, expected {dtype}")
    if not (x.is_contiguous() if whole else x.stride(1) == 1 or x.shape[1] == 1):
        raise ValueError(f"{name} must be contiguous, got strides {x.stride()}")
    return x.data_ptr()


def counter_noise(numbers: Tensor, width: int, seed: int, step: int, stream: int, unit: bool) -> Tensor:
    """See `counter_noise_reference` of ops/counter_noise.py."""
    numbers = numbers.contiguous()
    out = torch.empty(len(numbers), width, dtype=torch.float32, device="cpu")
    rows = _address(numbers, "numbers", torch.int64), len(numbers)
    required().counter_noise(*rows, width, seed % 2**64, step, stream, unit, out.data_ptr(), usable_threads())
    return out


class TransportMatrix:
    """The one large matrix of the CPU transport solver and the passes over it; csrc/cpu/sinkhorn_cpu.h explains them.

    It holds the centred score S = offset - C, or exp((S - centre) / eps) while `in_kernel_domain`. Potentials passed in
    and out are float64 and refer to S.
    """

    STOPPED, CONVERGED, OUT_OF_RANGE = 0, 1, 2

    def __init__(self, rows: int, cols: int, storage: torch.dtype):
        if storage not in (torch.float32, torch.float16):
            raise TypeError(f"storage must be float32 or float16, not {storage}")
        leading = required().OT_LEADING
        self._elements = torch.empty(rows, -(-cols // leading) * leading, dtype=storage, device="cpu")
        self._shape, self.storage = (rows, cols), storage
        self._matrix = required().OtMatrix(self._elements.data_ptr(), rows, cols, storage == torch.float16)

    @property
    def in_kernel_domain(self) -> bool:
        """Whether the matrix holds exponentials; scores otherwise."""
        return bool(self._matrix.kernel)

    def scores(self) -> Tensor:
        """A view of the entries, [rows, cols]."""
        return self._elements[:, : self._shape[1]]

    def build(
        self,
        image: tuple[Tensor, Tensor],
        text: tuple[Tensor, Tensor],
        weights: tuple[float, float],
        arc: bool,
        kernel_eps: float | None,
        *,
        bfloat16: bool = False,
    ) -> tuple[float, float]:
        """Fills the matrix from (noise, data) of both spheres and returns the extremes of S.

        With `kernel_eps` it goes straight to the kernel domain, which the caller must know to be in range. With
        `bfloat16`, inner products are those of rounded rows, and `resolve` mends the assignment.
        """
        self._matrix.kernel = kernel_eps is not None
        self._matrix.centre, self._matrix.eps = 0.0, kernel_eps or 1.0
        factors = [self._factor(*pair, weight) for pair, weight in zip((image, text), weights)]
        low, high = required().ot_build(self._matrix, *factors, arc=arc, bfloat16=bfloat16, threads=usable_threads())
        return low, high

    def resolve(
        self,
        image: tuple[Tensor, Tensor],
        text: tuple[Tensor, Tensor],
        weights: tuple[float, float],
        arc: bool,
        g: Tensor,
        eps: float,
        margin: float,
    ) -> Tensor:
        """Column of each row, int64 [rows], where the plan is largest, of a matrix from rounded rows: what is within
        `margin` of the best score of its row is computed again."""
        factors = [self._factor(*pair, weight) for pair, weight in zip((image, text), weights)]
        index = torch.empty(self._shape[0], dtype=torch.int64, device="cpu")
        addresses = {"g": _address(g, "g", torch.float64), "index": index.data_ptr()}
        threads = usable_threads()
        required().ot_resolve(self._matrix, *factors, arc=arc, eps=eps, margin=margin, threads=threads, **addresses)
        return index

    def _factor(self, noise: Tensor, data: Tensor, weight: float) -> Any:
        """The native factor, which holds addresses: the tensors must outlive it."""
        rows, cols = self._shape
        width = data.shape[1]
        if data.shape != (cols, width) or noise.shape != (rows, width):
            raise ValueError(f"noise {tuple(noise.shape)} and data {tuple(data.shape)} do not fit {self._shape}")
        addresses = {"noise": _address(noise, "noise", torch.float32), "data": _address(data, "data", torch.float32)}
        return required().OtFactor(**addresses, dim=width, weight=weight)

    def load(self, cost: Tensor, offset: float) -> tuple[float, float]:
        """Fills the matrix with S = offset - cost [rows, cols]; returns its extremes, infinite if one entry is bad."""
        address = _address(cost, "cost", torch.float32)
        if cost.shape != self._shape:
            raise ValueError(f"cost has shape {tuple(cost.shape)}, expected {self._shape}")
        self._matrix.kernel = False
        low, high = required().ot_import(self._matrix, address, offset, usable_threads())
        return low, high

    def enter_kernel(self, centre: float, eps: float) -> None:
        """From scores to exp((S - centre) / eps), in place."""
        if self.in_kernel_domain:
            raise ValueError("the matrix is in the kernel domain already")
        self._matrix.centre, self._matrix.eps = centre, eps
        required().ot_change_domain(self._matrix, usable_threads())
        self._matrix.kernel = True

    def leave_kernel(self) -> None:
        """Back to scores, in place."""
        if not self.in_kernel_domain:
            raise ValueError("the matrix is not in the kernel domain")
        required().ot_change_domain(self._matrix, usable_threads())
        self._matrix.kernel = False

    def iterate(self, f: Tensor, g: Tensor, eps: float, tol: float, max_iter: int) -> tuple[int, int, float]:
        """Sinkhorn iterations, updating `f` and `g` in place: (outcome, iterations, column violation)."""
        self._check_potentials(f=f, g=g)
        outcome, iterations, error = required().ot_iterate(
            self._matrix, eps, tol, max_iter, f.data_ptr(), g.data_ptr(), usable_threads()
        )
        return outcome, iterations, error

    def panel_pass(self, f: Tensor, g: Tensor, eps: float, total_rows: int) -> Tensor | None:
        """Sums of the plan's columns over these rows of a problem with `total_rows`, float64 [cols]; `f` is updated in
        place. None where the kernel domain cannot hold them."""
        self._check_potentials(f=f, g=g)
        sums = torch.empty_like(g)
        fine = required().ot_panel_pass(
            self._matrix, eps, total_rows, f.data_ptr(), g.data_ptr(), sums.data_ptr(), usable_threads()
        )
        return sums if fine else None

    def assign(self, f: Tensor, g: Tensor, eps: float, uniform: Tensor | None) -> Tensor:
        """Column of each row, int64 [rows]: the argmax of the plan, or its inverse row distribution at `uniform`."""
        self._check_potentials(f=f, g=g)
        index = torch.empty(self._shape[0], dtype=torch.int64, device="cpu")
        drawn_at = 0 if uniform is None else _address(uniform, "uniform", torch.float64)
        if uniform is not None and uniform.numel() != self._shape[0]:
            raise ValueError(f"uniform has {uniform.numel()} entries for {self._shape[0]} rows")
        threads = usable_threads()
        required().ot_read_out(self._matrix, eps, 0, g.data_ptr(), drawn_at, index.data_ptr(), threads)
        return index

    def mean_score(self, f: Tensor, g: Tensor, eps: float) -> float:
        """sum_ij P_ij S_ij."""
        self._check_potentials(f=f, g=g)
        threads = usable_threads()
        return float(required().ot_read_out(self._matrix, eps, f.data_ptr(), g.data_ptr(), 0, 0, threads))

    def _check_potentials(self, **potentials: Tensor) -> None:
        for size, (name, potential) in zip(self._shape, potentials.items()):
            _address(potential, name, torch.float64)
            if potential.numel() != size:
                raise ValueError(f"{name} has {potential.numel()} entries, expected {size}")


def gallery_posterior(
    samples: Tensor,
    gallery: Tensor,
    kappa: float,
    top_k: int,
    item_bias: Tensor | None,
    sample_bias: Tensor | None = None,
    bfloat16: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Statistics (peak, weight, moment [Q], top_score, top_index [Q, top_k]) of the scores of the rows of `gallery`
    [N, d]. With `bfloat16`, inner products are those of rounded rows, but for the best items."""
    inputs = _gallery_inputs(samples, gallery, kappa, item_bias, sample_bias) | {"bfloat16": bfloat16}
    queries = len(samples)
    if not 1 <= top_k <= len(gallery):
        raise ValueError(f"top_k={top_k} of {len(gallery)} items")
    peak, weight, moment = (torch.empty(queries, dtype=torch.float64, device="cpu") for _ in range(3))
    top_score = torch.empty(queries, top_k, dtype=torch.float64, device="cpu")
    top_index = torch.empty(queries, top_k, dtype=torch.int64, device="cpu")
    required().gallery_posterior(
        required().GalleryInputs(**inputs),
        top_k=top_k,
        peak=peak.data_ptr(),
        weight=weight.data_ptr(),
        moment=moment.data_ptr(),
        top_score=top_score.data_ptr(),
        top_index=top_index.data_ptr(),
    )
    return peak, weight, moment, top_score, top_index


def gallery_scores(
    samples: Tensor, gallery: Tensor, kappa: float, item_bias: Tensor | None, sample_bias: Tensor | None = None
) -> Tensor:
    """Scores [Q, N] of the rows of `gallery` [N, d]."""
    inputs = _gallery_inputs(samples, gallery, kappa, item_bias, sample_bias)
    scores = torch.empty(len(samples), len(gallery), dtype=torch.float32, device="cpu")
    required().gallery_scores(required().GalleryInputs(**inputs, bfloat16=False), scores=scores.data_ptr())
    return scores


def _gallery_inputs(
    samples: Tensor,
    gallery: Tensor,
    kappa: float,
    item_bias: Tensor | None,
    sample_bias: Tensor | None,
) -> dict[str, float]:
    """The arguments of the binding's `GalleryInputs`, after a check of the tensors."""
    queries, draws, dim = samples.shape
    addresses = {"samples": _address(samples, "samples", torch.float32), "sample_bias": 0, "bias": 0}
    if gallery.dtype not in STORAGES:
        raise TypeError(f"gallery is {gallery.dtype}, expected one of {list(STORAGES)}")
    addresses["gallery"] = _address(gallery, "gallery", gallery.dtype)
    if gallery.dim() != 2 or gallery.shape[1] != dim:
        raise ValueError(f"gallery has shape {tuple(gallery.shape)}, expected [N, {dim}]")
    items = len(gallery)
    if item_bias is not None:
        addresses["bias"] = _address(item_bias, "item_bias", torch.float32)
        if item_bias.shape != (items,):
            raise ValueError(f"item_bias has shape {tuple(item_bias.shape)}, expected [{items}]")
    if sample_bias is not None:
        addresses["sample_bias"] = _address(sample_bias, "sample_bias", torch.float32)
        if sample_bias.shape != (queries, draws):
            raise ValueError(f"sample_bias has shape {tuple(sample_bias.shape)}, expected [{queries}, {draws}]")
    if not (queries and draws and dim and items):
        raise ValueError(f"nothing to score: samples {tuple(samples.shape)}, {items} items")
    return {
        **addresses,
        "queries": queries,
        "draws": draws,
        "items": items,
        "dim": dim,
        "kappa": kappa,
        "threads": usable_threads(),
        "storage": STORAGES[gallery.dtype],
    }


def gallery_search(queries: Tensor, gallery: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """(scores float32, indices) [Q, top_k] of the rows of `gallery` [N, d] with the largest inner products."""
    score, index = _search_results(len(queries), top_k)
    if len(queries):
        inputs = _search_inputs(queries, gallery, top_k)
        required().gallery_search(inputs, score=score.data_ptr(), index=index.data_ptr())
    return score, index


def code_stride(dim: int) -> int:
    """Bytes of the codes of a row."""
    return int(required().code_stride(dim))


def encode_rows(gallery: Tensor) -> tuple[Tensor, Tensor, Tensor, float]:
    """Codes [N, code_stride(d)], scales [N] and errors [N] of rotated rows [N, d], and their largest norm."""
    items, dim = gallery.shape
    code = torch.empty(items, code_stride(dim), dtype=torch.uint8, device="cpu")
    scale, error = (torch.empty(items, dtype=torch.float32, device="cpu") for _ in range(2))
    inputs = _search_inputs(torch.empty(0, dim, dtype=torch.float32, device="cpu"), gallery, 1)
    largest = required().encode_rows(inputs, _code_inputs(code, scale, error, 0.0, items, dim))
    return code, scale, error, float(largest)


def search_codes(
    queries: Tensor, gallery: Tensor, code: Tensor, scale: Tensor, error: Tensor, largest_norm: float, top_k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """As `gallery_search` by the codes of the rows; and how many items of each query were scored [Q], or -1 for queries
    whose bounds excluded too little, of which nothing was found."""
    score, index = _search_results(len(queries), top_k)
    kept = torch.empty(len(queries), dtype=torch.int64, device="cpu")
    codes = _code_inputs(code, scale, error, largest_norm, len(gallery), gallery.shape[1], kept)
    inputs = _search_inputs(queries, gallery, top_k)
    required().search_codes(inputs, codes, score=score.data_ptr(), index=index.data_ptr())
    return score, index, kept


def _search_results(queries: int, top_k: int) -> tuple[Tensor, Tensor]:
    score = torch.empty(queries, top_k, dtype=torch.float32, device="cpu")
    return score, torch.empty(queries, top_k, dtype=torch.int64, device="cpu")


def _search_inputs(queries: Tensor, gallery: Tensor, top_k: int) -> Any:
    """The binding's `SearchInputs`, after a check of the tensors."""
    if gallery.dtype not in STORAGES:
        raise TypeError(f"gallery is {gallery.dtype}, expected one of {list(STORAGES)}")
    if gallery.dim() != 2 or queries.dim() != 2 or queries.shape[1] != gallery.shape[1]:
        raise ValueError(f"queries {tuple(queries.shape)} and gallery {tuple(gallery.shape)} do not fit")
    if not 1 <= top_k <= len(gallery):
        raise ValueError(f"top_k={top_k} of {len(gallery)} items")
    return required().SearchInputs(
        queries=_address(queries, "queries", torch.float32),
        gallery=_address(gallery, "gallery", gallery.dtype),
        storage=STORAGES[gallery.dtype],
        count=len(queries),
        items=len(gallery),
        dim=gallery.shape[1],
        top_k=top_k,
        threads=usable_threads(),
    )


def _code_inputs(
    code: Tensor, scale: Tensor, error: Tensor, largest_norm: float, items: int, dim: int, kept: Tensor | None = None
) -> Any:
    """The binding's `CodeInputs`, after a check of the tensors."""
    if code.shape != (items, code_stride(dim)) or scale.shape != (items,) or error.shape != (items,):
        raise ValueError(f"codes {tuple(code.shape)} are not those of {items} rows of width {dim}")
    return required().CodeInputs(
        code=_address(code, "code", torch.uint8),
        scale=_address(scale, "scale", torch.float32),
        error=_address(error, "error", torch.float32),
        kept=0 if kept is None else kept.data_ptr(),
        largest_norm=largest_norm,
        most_kept=items // 16 + 1024,
    )


# The device type whose memory the compiled CUDA code reads; the emulation of the GPU under tests/ runs it on the CPU.
CUDA_MEMORY = "cuda"


def cuda_devices() -> tuple[str, ...]:
    """Device types of the tensors that the compiled CUDA code takes."""
    return (CUDA_MEMORY,)


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


class CudaTransport:
    """A transport problem in GPU memory and the kernels that solve it; csrc/cuda/sinkhorn_cuda.h explains them.

    Every method but `status` only enqueues work on the current stream, in memory allocated here, and may
    be captured in a CUDA graph. The order is: `build` or `load`, `solve`, then any of `status`, `read` and `sample`.
    `storage` is the dtype of the matrix: float16 is half as much to read in every iteration.
    """

    def __init__(self, rows: int, cols: int, device: torch.device, storage: torch.dtype = torch.float32):
        if storage not in (torch.float32, torch.float16):
            raise TypeError(f"storage must be float32 or float16, not {storage}")
        self._shape, self._device, self._storage = (rows, cols), device, storage
        self._matrix = torch.empty(0, dtype=torch.float32, device=device)
        self._workspace = torch.empty(0, dtype=torch.uint8, device=device)
        self._status = torch.empty(3, dtype=torch.int32, device=device)
        self._offset: float | None = None
        self._native: Any = None

    def build(
        self,
        image: tuple[Tensor, Tensor],
        text: tuple[Tensor, Tensor],
        weights: tuple[float, float],
        arc: bool,
    ) -> None:
        """Scores S = offset - C from (noise, data) of both spheres, float32 or float16 as a whole, to the accuracy of
        their type."""
        rows, cols = self._shape
        points = image[0].dtype
        if points not in (torch.float32, torch.float16) or (points, self._storage) == (torch.float32, torch.float16):
            raise TypeError(f"a matrix in {self._storage} cannot be made of points in {points}")
        for stream, (noise, data) in (("image", image), ("text", text)):
            width = data.shape[1]
            if noise.shape != (rows, width) or data.shape != (cols, width):
                raise ValueError(f"{stream}: {tuple(noise.shape)} and {tuple(data.shape)} do not fit {self._shape}")
            self._own(points, noise=noise, data=data)
        self._take(torch.empty(rows, -(-cols // 4) * 4, dtype=self._storage, device=self._device))
        columns = 16 // points.itemsize
        padded = [_aligned_rows(x, columns) for x in (image[0], text[0], image[1], text[1])]
        names = ("image0", "text0", "image1", "text1")
        self._offset = self._native.build(
            **{name: cloud.data_ptr() for name, cloud in zip(names, padded)},
            image_dim=padded[2].shape[1],
            text_dim=padded[3].shape[1],
            image_weight=weights[0],
            text_weight=weights[1],
            arc=arc,
            half=points == torch.float16,
            **_stream(self._device),
        )

    def load(self, cost: Tensor, middle: float) -> None:
        """Takes a cost matrix [rows, cols] in the dtype of the storage; `middle` is subtracted from the entries when
        they are read.

        Copied only where rows do not start at multiples of 4 entries.
        """
        self._own(self._storage, cost=cost)
        if cost.shape != self._shape:
            raise ValueError(f"cost has shape {tuple(cost.shape)}, expected {self._shape}")
        self._take(_aligned_rows(cost, 4))
        self._native.use_given_costs(middle)

    def _take(self, matrix: Tensor) -> None:
        """Makes `matrix`, whose rows are padded, that of the problem."""
        self._matrix, self._offset = matrix, None
        half = self._storage == torch.float16
        self._native = required().CudaTransport(*self._shape, matrix.data_ptr(), matrix.shape[1], half)

    def costs(self) -> Tensor:
        """C, [rows, cols] in float32: what was loaded, or computed from the scores."""
        entries = self._matrix[:, : self._shape[1]].float()
        return entries if self._offset is None else self._offset - entries

    def solve(self, eps: float, tol: float, max_iter: int, halvings: int = 0) -> None:
        """All iterations, in one launch that ends itself; the first ones at larger eps, down from eps 2^halvings."""
        self._native.set_limits(eps, tol, max_iter, halvings)
        stream = _stream(self._device)
        workspace_bytes = self._native.workspace_bytes(stream["device"])
        self._workspace = torch.empty(workspace_bytes, dtype=torch.uint8, device=self._device)
        self._native.solve(self._workspace.data_ptr(), self._status.data_ptr(), *stream.values())

    def status(self) -> tuple[int, bool, float]:
        """Iterations done, whether they converged, and the column violation seen last; waits for the solve."""
        return self.read_status(self._status.cpu())

    @property
    def status_on_device(self) -> Tensor:
        """What `read_status` takes, once it has been copied to the host; int32 [3]."""
        return self._status

    @staticmethod
    def read_status(status: Tensor) -> tuple[int, bool, float]:
        """Iterations done, whether they converged, and the column violation seen last."""
        return int(status[0]), bool(status[1]), float(status[2:].view(torch.float32))

    def read(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """(argmax of each row, f, g, row sums of the plan times rows, transport cost of each row times rows)."""
        rows, cols = self._shape
        index = torch.empty(rows, dtype=torch.int64, device=self._device)
        f = torch.empty(rows, dtype=torch.float64, device=self._device)
        g = torch.empty(cols, dtype=torch.float64, device=self._device)
        row_mass, row_cost = (torch.empty(rows, dtype=torch.float32, device=self._device) for _ in range(2))
        self._native.result(
            workspace=self._workspace.data_ptr(),
            index=index.data_ptr(),
            f=f.data_ptr(),
            g=g.data_ptr(),
            row_mass=row_mass.data_ptr(),
            row_cost=row_cost.data_ptr(),
            **_stream(self._device),
        )
        return index, f, g, row_mass, row_cost

    def sample(self, uniform: Tensor) -> Tensor:
        """A column of each row: the inverse of the row's distribution at `uniform` [rows] in [0, 1)."""
        self._own(torch.float64, uniform=uniform)
        if uniform.numel() != self._shape[0]:
            raise ValueError(f"uniform has {uniform.numel()} entries for {self._shape[0]} rows")
        index, _, _, row_mass, _ = self.read()
        self._native.sample(
            workspace=self._workspace.data_ptr(),
            row_mass=row_mass.data_ptr(),
            uniform=uniform.data_ptr(),
            index=index.data_ptr(),
            **_stream(self._device),
        )
        return index

    def _own(self, dtype: torch.dtype, **tensors: Tensor) -> None:
        """Tensors must be on this problem's device, not just on any GPU."""
        for name, tensor in tensors.items():
            _address(tensor, name, dtype, device=CUDA_MEMORY)
            if tensor.device != self._device:
                raise ValueError(f"{name} is on {tensor.device}, expected {self._device}")
