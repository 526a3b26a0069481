"""The only importer of the compiled extension: loads it, says why it is missing, and tells it how tensors cross.

Its functions take tensors and return new ones; csrc/tensor.h checks what they are given.
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
def loaded() -> ModuleType | None:
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


def connect(
    module: ModuleType,
    exchange: object = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None),
    alone: int | None = None,
) -> None:
    """Tells compiled code how it reads tensors and makes them. `exchange` is the capsule that torch has for this since
    2.10; without it, tensors cross by capsules of their own. `alone`: numbers up to which the calling thread works
    alone, by default as its threads wait."""
    if alone is None:
        alone = SMALL_WHEN_ASLEEP if processors.threads_sleep() else SMALL
    module.connect(
        tensor=torch.Tensor,
        exchange=exchange,
        to_dlpack=torch.utils.dlpack.to_dlpack,  # type: ignore[attr-defined]
        from_dlpack=torch.utils.dlpack.from_dlpack,
        usable_threads=lambda: usable_threads(),  # looked up in each call
        alone=alone,
    )


@functools.cache
def missing() -> str | None:
    """Why the compiled CPU code cannot be used; None if it can."""
    if loaded() is not None:
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
    module = loaded()
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

    return Backend(call, ("cpu",), missing, dtypes, bound=name, extension=lambda: loaded())


def _dense(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    return (x.to(torch.float32) if x.is_floating_point() else x).contiguous()


def cuda_backend(function: Callable[..., Any]) -> Backend:
    """The backend "cuda" of an operation: a function that calls the compiled CUDA code."""
    return Backend(function, cuda_devices, missing_cuda)


def required() -> ModuleType:
    """The compiled extension; an error if it is missing."""
    module = loaded()
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
    if loaded() is None:
        return missing()
    return None if required().has_bfloat16() else f"the kernels for {isa()} have no bfloat16 unit (AVX512-BF16)"


def missing_int8() -> str | None:
    """Why the compiled code cannot multiply in int8; None if it can."""
    if loaded() is None:
        return missing()
    return None if required().has_int8() else f"the kernels for {isa()} have no int8 unit (AVX512-VNNI)"


STORAGES = (torch.float32, torch.float16, torch.bfloat16)
"""The dtypes in which compiled code reads the rows of a gallery."""


# The device type whose memory the compiled CUDA code reads; the emulation of the GPU under tests/ runs it on the CPU.
CUDA_MEMORY = "cuda"


def cuda_devices() -> tuple[str, ...]:
    """Device types of the tensors that the compiled CUDA code takes."""
    return (CUDA_MEMORY,)


def cuda_address(x: Tensor, name: str, dtype: torch.dtype) -> int:
    """The address of a tensor that compiled CUDA code reads or fills, after the last check before it crosses: the type
    of its device, its dtype, and elements without gaps."""
    if x.device.type != CUDA_MEMORY:
        raise ValueError(f"{name} is on {x.device}, expected {CUDA_MEMORY}")
    if x.dtype != dtype:
        raise TypeError(f"{name} is {x.dtype}, expected {dtype}")
    if not x.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {x.stride()}")
    return x.data_ptr()
