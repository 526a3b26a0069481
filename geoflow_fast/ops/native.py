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
