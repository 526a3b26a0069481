"""`pytest --foreign device` and `--foreign dtype`: the library runs under foreign defaults of torch, the tests do not.

A program may call `torch.set_default_device` or `torch.set_default_dtype` for its own purposes. With the option, what
library code creates without naming a device has no values (device "meta"), or what it creates without naming a dtype is
float64, as under these calls; a test that then fails has found an allocation that names too little. Tests make their
own tensors under torch's own defaults.

Modules are created on the default device like those of torch, so their constructors are exempt from "device".
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _device

import geoflow_fast as gf

KINDS = ("device", "dtype")
ROOT = Path(__file__).resolve().parents[1]
LIBRARY = tuple(f"{ROOT / folder}/" for folder in ("geoflow_fast", "kernels"))
TESTS = f"{ROOT / 'tests'}/"
TORCH = f"{Path(torch.__file__).parent}/"


def caller() -> FrameType | None:
    """The frame that called a function of torch, looking through torch's own frames."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((TORCH, __file__)):
        frame = frame.f_back
    return frame


def is_library(frame: FrameType | None) -> bool:
    """Whether the code that runs in the frame belongs to the library."""
    return frame is not None and frame.f_code.co_filename.startswith(LIBRARY)


def creates_a_module(frame: FrameType | None) -> bool:
    """Whether the frame is part of the construction of a module on the default device; scorers and re-rankers are made
    of a flow and are where it is."""
    while frame is not None and not frame.f_code.co_filename.startswith(TESTS):
        if frame.f_code.co_name == "__init__":
            made = frame.f_locals.get("self")
            if isinstance(made, nn.Module) and not isinstance(made, (gf.RetrievalEntropy, gf.BayesReranker)):
                return True
        frame = frame.f_back
    return False


class ForeignDevice(TorchFunctionMode):
    """Gives library code tensors without values where it names no device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        # A device that the code has entered (`with torch.device(...)`) is one that it names.
        unnamed = kwargs.get("device") is None and _device.CURRENT_DEVICE is None
        if unnamed and func in _device._device_constructors():
            frame = caller()
            if is_library(frame) and not creates_a_module(frame):
                kwargs["device"] = "meta"
        return func(*args, **kwargs)


class ForeignDtype(TorchFunctionMode):
    """Gives library code float64 where it names no dtype; that includes quotients of integers.

    The default dtype is that of the whole process, so threads take turns.
    """

    turn = threading.RLock()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        with self.turn:
            before = torch.get_default_dtype()
            torch.set_default_dtype(torch.float64 if is_library(caller()) else before)
            try:
                return func(*args, **kwargs or {})
            finally:
                torch.set_default_dtype(before)


@contextmanager
def foreign_defaults(kind: str) -> Iterator[None]:
    """Library code runs under a foreign default, in this thread and in those that it starts."""
    mode = {"device": ForeignDevice, "dtype": ForeignDtype}[kind]
    run: Callable[[threading.Thread], None] = threading.Thread.run

    @functools.wraps(run)
    def run_in_mode(thread: threading.Thread) -> None:
        with mode():
            run(thread)

    with mode(), mock.patch.object(threading.Thread, "run", run_in_mode):
        yield
