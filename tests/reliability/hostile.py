"""Hostile values for arguments, and the rules by which the outcome of a call is judged."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import shutil
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor

import geoflow_fast as gf

PACKAGE = str(Path(gf.__file__).parent)
SECONDS = 60
"""Seconds of processor time after which a call counts as hanging; ten times as many if it only waits."""

TENSORS: dict[str, Callable[[Tensor], Any]] = {
    "nan": lambda x: _with(x, math.nan),
    "inf": lambda x: _with(x, math.inf),
    "minus inf": lambda x: _with(x, -math.inf),
    "zero row": lambda x: _with_row(x, 0.0),
    "denormal row": lambda x: _with_row(x, 1e-42),
    "huge": lambda x: x * 1e30 if x.is_floating_point() else x,
    "tiny": lambda x: x * 1e-20 if x.is_floating_point() else x,
    "int": lambda x: x.to(torch.int64),
    "int8": lambda x: x.to(torch.int8),
    "float16": lambda x: x.to(torch.float16),
    "bfloat16": lambda x: x.to(torch.bfloat16),
    "float64": lambda x: x.to(torch.float64),
    "complex": lambda x: x.to(torch.complex64),
    "bool": lambda x: x != 0,
    "transposed": lambda x: x.transpose(0, -1),
    "strided": lambda x: x.repeat_interleave(2, 0)[::2],
    "column order": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "expanded": lambda x: x[:1].expand(x.shape) if x.dim() else x,
    "no rows": lambda x: x[:0] if x.dim() else x,
    "no columns": lambda x: x[..., :0] if x.dim() else x,
    "one row": lambda x: x[:1] if x.dim() else x,
    "fewer rows": lambda x: x[:-1] if x.dim() else x,
    "fewer columns": lambda x: x[..., :-1] if x.dim() else x,
    "more rows": lambda x: torch.cat((x, x)) if x.dim() else x,
    "rank up": lambda x: x.unsqueeze(0),
    "rank down": lambda x: x[0] if x.dim() and len(x) else x,
    "scalar": lambda x: x.flatten()[0] if x.numel() else x,
    "requires grad": lambda x: x.detach().clone().requires_grad_() if x.is_floating_point() else x,
    "meta": lambda x: x.to("meta"),
    "sparse": lambda x: x.to_sparse() if x.dim() else x,
    "negative": lambda x: -x if x.dtype != torch.bool else ~x,
    "array": lambda x: x.numpy(),
    "list": lambda x: x.tolist(),
    "nothing": lambda _: None,
    "word": lambda _: "tensor",
    "number": lambda _: 3,
    "object": lambda _: object(),
}
NUMBERS = (
    math.nan,
    math.inf,
    -math.inf,
    -1,
    0,
    0.5,
    1,
    5e-324,
    1e-30,
    1e30,
    1.7e308,
    10**30,
    True,
    None,
    "1",
    "",
    1j,
    [],
    object(),
)
COUNTS = (math.nan, -1, 0, 0.5, 1.0, True, None, "3", "", 1j, [2], -(2**70), object())
WORDS = ("", "no such", "JOINT", "joint ", None, 3, b"joint", ["joint"], object(), "\0", "🙂" * 50)
OTHERS = (None, 3, "word", b"", [], {}, (), object(), math.nan)
PATHS = (
    "",
    ".",
    "no such",
    "\0",
    "a" * 300,
    "🙂",
    "deep/er/🙂",
    "/dev/null/x",
    "/proc/self/mem",
    "/proc",
    None,
    3,
    b"bytes",
    [],
    object(),
)
DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "cut": lambda raw: raw[: len(raw) // 2],
    "cut by one": lambda raw: raw[:-1],
    "longer": lambda raw: raw + b"\0" * 64,
    "garbage": lambda raw: bytes((7 * k) % 256 for k in range(len(raw))),
    "head": lambda raw: b"\xff" * min(16, len(raw)) + raw[16:],
    "flipped": lambda raw: (
        raw[: len(raw) // 2] + bytes(x ^ 0x40 for x in raw[len(raw) // 2 :][:1]) + raw[len(raw) // 2 + 1 :]
    ),
    "zeros": lambda raw: bytes(len(raw)),
    "json": lambda _: b'{"a": [1, 2',
    "pickle": lambda _: b"\x80\x04\x95.",
}
_numbers = itertools.count()


def _with(x: Tensor, value: float) -> Tensor:
    if not x.is_floating_point() or not x.numel():
        return x
    changed = x.clone()
    changed.view(-1)[x.numel() // 2] = value
    return changed


def _with_row(x: Tensor, value: float) -> Tensor:
    if not x.is_floating_point() or not x.numel() or not x.dim():
        return x
    changed = x.clone()
    changed[-1] = value
    return changed


@dataclass(frozen=True)
class Target:
    """A public call with good arguments. `spreads`: a NaN or an overflow in the input may show in the result, as in any
    arithmetic; otherwise a result must be finite."""

    name: str
    call: Callable[..., Any]
    good: Callable[[], Mapping[str, Any]]
    spreads: bool = False
    extra: Mapping[str, Sequence[Any]] = dataclasses.field(default_factory=dict)
    """More hostile values of an argument."""
    costly: bool = False
    """Whether a call takes so long that `make test` tries fewer values."""


def variants(value: Any) -> list[tuple[str, Callable[[], Any]]]:
    """The names and makers of hostile values that replace a good one."""
    if isinstance(value, Tensor):
        return [(name, lambda change=change: change(value)) for name, change in TENSORS.items()]
    if isinstance(value, np.ndarray):
        tensors = [
            (name, lambda change=change: _as_array(change(torch.from_numpy(value)))) for name, change in TENSORS.items()
        ]
        return [pair for pair in tensors if pair[0] not in ("meta", "sparse", "requires grad", "bfloat16")]
    if isinstance(value, Path):
        return [*_named(PATHS), *_spoiled_copies(value)]
    kind = OTHERS
    if isinstance(value, bool):
        kind = (*COUNTS, *WORDS)
    elif isinstance(value, int):
        kind = COUNTS
    elif isinstance(value, float):
        kind = NUMBERS
    elif isinstance(value, str):
        kind = WORDS
    return _named(kind)


def _named(values: Sequence[Any]) -> list[tuple[str, Callable[[], Any]]]:
    return [(repr(bad)[:40], lambda bad=bad: bad) for bad in values]


def _spoiled_copies(path: Path) -> list[tuple[str, Callable[[], Any]]]:
    """Makers of copies of a file or folder in which one file is damaged."""
    return [
        (f"{file.name}: {name}", functools.partial(_spoiled, path, file.relative_to(path), change))
        for file in files_of(path)
        for name, change in DAMAGE.items()
    ]


def _spoiled(path: Path, inside: Path, change: Callable[[bytes], bytes]) -> Path:
    copy = Path(f"spoiled {next(_numbers)}") / path.name
    copy.parent.mkdir()
    if path.is_file():
        shutil.copy(path, copy)
    else:
        shutil.copytree(path, copy)
    damaged = copy / inside if path.is_dir() else copy
    damaged.write_bytes(change(damaged.read_bytes()))
    return copy


def files_of(path: Path) -> list[Path]:
    """The file itself, or the files of a folder; an empty list if the path does not exist."""
    return [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())


def substitutions(target: Target) -> list[tuple[str, str, Callable[[], Any]]]:
    """Every argument with every hostile value that may take its place: (argument, name of the value, its maker)."""
    return [
        (name, label, make)
        for name, value in target.good().items()
        for label, make in [*_named(target.extra.get(name, ())), *variants(value)]
    ]


def spread(values: Sequence[Any], most: int) -> list[Any]:
    """At most so many of the values, from everywhere among them."""
    return [values[k * len(values) // most] for k in range(most)] if len(values) > most else list(values)


def fresh_path() -> Path:
    """A path in the working folder that does not exist."""
    return Path(f"file {next(_numbers)}")


def _as_array(x: Any) -> Any:
    return x.numpy() if isinstance(x, Tensor) else x


@contextlib.contextmanager
def in_time(seconds: int = SECONDS) -> Iterator[None]:
    """Raises an AssertionError if the body takes longer."""

    def late(_number: int, _frame: FrameType | None) -> None:
        raise AssertionError(f"still running after {seconds} s")

    previous = [(number, signal.signal(number, late)) for number in (signal.SIGALRM, signal.SIGPROF)]
    signal.alarm(10 * seconds)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        for number, handler in previous:
            signal.signal(number, handler)


def judge(target: Target, arguments: dict[str, Any]) -> str:
    """Calls the target and returns "answer" or "error". An AssertionError tells of an answer
    that is not finite or of an error that is not clear and typed."""
    before = {name: content for name, value in arguments.items() if (content := _bytes_of(value)) is not None}
    warnings.simplefilter("ignore")
    try:
        with in_time():
            result = target.call(**arguments)
    except (ValueError, TypeError, OSError) as error:
        _judge_error(target, error)
        outcome = "error"
    else:
        if not target.spreads:
            assert _sane(result), f"{target.name}: a result that is not finite: {result!r}"
        outcome = "answer"
    after = {name: _bytes_of(arguments[name]) for name in before}
    assert before == after, f"{target.name} changed its input"
    return outcome


def _judge_error(target: Target, error: Exception) -> None:
    frames = [x for x in traceback.extract_tb(error.__traceback__) if not x.filename.endswith("foreign_defaults.py")]
    bound = len(frames) <= 2  # Python itself rejected the arguments
    ours = frames[-1].filename.startswith(PACKAGE)
    message = str(error)
    assert message, f"{target.name}: an error without a message"
    named = isinstance(error, OSError) and error.filename is not None  # an error of the operating system about a path
    assert ours or bound or named, (
        f"{target.name}: raised from {frames[-1].filename}:{frames[-1].lineno}, not by a check: {error!r}"
    )


def _bytes_of(value: Any) -> bytes | None:
    if isinstance(value, Path):
        return b"".join(file.read_bytes() for file in files_of(value)) or None
    if isinstance(value, Tensor) and value.device.type == "cpu" and value.layout == torch.strided:
        flat = value.detach().contiguous().reshape(-1)
        return flat.view(torch.uint8).numpy().tobytes()
    return value.tobytes() if isinstance(value, np.ndarray) and value.dtype != object else None


def _sane(value: Any) -> bool:
    """Whether all numbers in a value are finite."""
    if isinstance(value, Tensor):
        return value.device.type == "meta" or not value.is_floating_point() or bool(torch.isfinite(value).all())
    if isinstance(value, np.ndarray):
        return value.dtype.kind != "f" or bool(np.isfinite(value).all())
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, (list, tuple)):
        return all(map(_sane, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return all(_sane(getattr(value, field.name)) for field in dataclasses.fields(value))
    return True
