"""In which numbers a network's matrix products are computed while samples are drawn and densities estimated.

Everything else is float32 whatever the products are: states, normalisation, gates, the sphere and its geodesics; traces
are summed in float64. A network of 16-bit weights has the products of its own type.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from geoflow_fast.ops import extension
from geoflow_fast.ops.product import product
from geoflow_fast.runtime import checks
from geoflow_fast.runtime.device import tf32_allowed

TF32 = "tf32"
"""What networks know besides `checks.PRECISIONS`."""
HALVES = (torch.bfloat16, torch.float16)
AMPERE = (8, 0)
"""The first NVIDIA GPUs that multiply in bfloat16 and TF32."""
_PRODUCTS = threading.RLock()
WORTH_ROWS = 128
"""From so many rows through the network in one call the weights are worth converting for it."""


def product_dtype(precision: str, like: Tensor, rows: int | None = None) -> torch.dtype:
    """The type of products for a network with parameters `like`: that of a 16-bit network where the device is good at
    it, that of an autocast in which this is called, else what `precision` asks for. `rows`: rows that pass the network
    in the whole call, if they are known."""
    device = like.device.type
    if like.dtype == torch.float64:
        if precision == "bfloat16":
            raise ValueError("precision='bfloat16' is for float32 and 16-bit networks, and this one is float64")
        return torch.float64
    if like.dtype in HALVES:
        # Processors convert float16 one by one; without units for bfloat16 they do the same with it.
        good = device == "cuda" or (like.dtype == torch.bfloat16 and extension.missing_bfloat16() is None)
        return like.dtype if good else torch.float32
    if precision == "float32" and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    if precision == "auto":
        few = rows is not None and rows < WORTH_ROWS
        return torch.bfloat16 if not few and bfloat16_pays(like.device) else torch.float32
    return torch.bfloat16 if precision == "bfloat16" else torch.float32


def settled_precision(precision: str, device: torch.device) -> str:
    """What a job writes down and keeps to on every machine that continues it: what "auto" stands for on this device, or
    `precision` itself."""
    if checks.precision(precision, TF32) != "auto":
        return precision
    return "bfloat16" if bfloat16_pays(device) else "float32"


def bfloat16_pays(device: torch.device) -> bool:
    """Whether products of float32 rows are faster in bfloat16 here, conversions included."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= AMPERE
    return device.type == "cpu" and extension.missing_bfloat16() is None and _measured_gain() > 1.2


@functools.cache
def _measured_gain() -> float:
    """How many times faster a typical product is in bfloat16 on this processor, measured once in a few milliseconds."""
    rows, weight = (torch.ones(shape, dtype=torch.float32, device="cpu") for shape in ((256, 512), (512, 1408)))
    half = weight.bfloat16()
    plain = min(_seconds(lambda: product(rows, weight)) for _ in range(4))
    return plain / min(_seconds(lambda: (rows.bfloat16() @ half).float()) for _ in range(4))


def _seconds(run: Callable[[], Tensor]) -> float:
    start = time.thread_time()
    run()
    return max(time.thread_time() - start, 1e-9)


@contextlib.contextmanager
def tf32_products(enabled: bool, device: torch.device) -> Iterator[None]:
    """Lets float32 products on a GPU use TF32 inside, if `enabled`. torch has one setting for all threads: a call waits
    until those of other threads that want it otherwise have started their products."""
    if device.type != "cuda":
        yield
        return
    with _PRODUCTS, tf32_allowed() if enabled else contextlib.nullcontext():
        yield
