"""Files that appear whole or not at all, locks on folders, and small JSON and TOML files."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LOCK_FILE = ".lock"


JSON_BYTES = 1 << 24
"""Largest JSON or TOML file that is read: what is kept in one here takes kilobytes."""


def temporary_of(path: Path) -> Path:
    """Where `path` is written before it gets its name. One per target: what a killed writer leaves behind, the next one
    overwrites."""
    return path.with_name(f".{path.name}.tmp")


def write_atomic(path: Path, fill: Callable[[BinaryIO], object]) -> None:
    """Writes `path` through a temporary neighbour: `fill(file)`, fsync, rename. On failure the old file stays."""
    if not path.name:
        raise IsADirectoryError(f"{path} is a folder; name a file in it")
    temporary = temporary_of(path)
    try:
        temporary.unlink(missing_ok=True)
        # A fresh file of our own: a link that someone put under this name is not followed.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(temporary, flags, 0o666), "wb") as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):  # a disk that takes no file may not give one back: the next writer will
            temporary.unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise
        why = error.strerror or error
        raise OSError(error.errno, f"could not write {path} ({why}); what was there before is untouched") from error
    sync_folder(path.parent)


@contextlib.contextmanager
def locked(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Keeps other processes out of `folder` by an advisory lock, which ends with the process. If it is taken: OSError,
    or `wait` for its end. OSError if its last holder has removed it meanwhile: then it keeps nobody out."""
    handle = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    with os.fdopen(handle, "r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OSError(error.errno, f"another run is writing to {folder}; wait for it or use a new folder") from None
        except OSError as error:
            raise OSError(error.errno, f"could not lock {folder} ({error.strerror})") from error
        if not os.path.samestat(os.fstat(file.fileno()), os.stat(folder / LOCK_FILE)):
            raise OSError(errno.EBUSY, f"another run has just begun to write to {folder}; wait for it")
        yield


def sync_folder(folder: Path) -> None:
    """Makes a rename durable: the entry lives in the folder, not in the file."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        raise OSError(
            error.errno, f"what was written to {folder} may not outlast a power cut ({error.strerror})"
        ) from error
    finally:
        os.close(handle)


def write_json(path: Path, value: Any) -> None:
    """Writes `value` as indented JSON, atomically."""
    text = json.dumps(value, indent=2) + "\n"
    write_atomic(path, lambda file: file.write(text.encode()))


def write_npy(path: Path, array: NDArray[Any]) -> None:
    """Writes a `.npy` file, atomically. Not by `np.save`, which hands the end of an array to the C library's buffer and
    does not hear of a disk that had no room for it."""
    plain = np.ascontiguousarray(array)

    def fill(file: BinaryIO) -> None:
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(plain))
        file.write(plain.reshape(-1).view(np.uint8).data)

    write_atomic(path, fill)


@contextlib.contextmanager
def contents_of(path: Path) -> Iterator[None]:
    """Around code that takes the contents of a file apart: what is missing there, of another type, out of range or
    nested without end is a ValueError that names the file."""
    try:
        yield
    except ValueError as error:
        if str(path) in str(error):
            raise
        raise ValueError(f"{path} is damaged or was not written by geoflow_fast: {error}") from error
    except (LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, RuntimeError) as error:
        raise ValueError(f"{path} is damaged or was not written by geoflow_fast: {error!r}") from error


def read_json(path: Path, what: str = "JSON") -> Any:
    """The value of a JSON file that should hold `what`. One that is not JSON, nested without end or beyond `JSON_BYTES`
    is a ValueError."""
    text = read_small(path)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged or not {what}: {error}") from error


def read_small(path: Path) -> bytes:
    """The bytes of a regular file of at most `JSON_BYTES`; a pipe or a device is not waited for."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist or is not a file")
    try:
        with open(path, "rb") as file:
            text = file.read(JSON_BYTES + 1)
    except OSError as error:
        raise OSError(error.errno, f"could not read {path} ({error.strerror})") from error
    if len(text) > JSON_BYTES:
        raise ValueError(f"{path} is larger than {JSON_BYTES} bytes, which nothing that is kept in such a file needs")
    return text


def read_toml(path: Path) -> dict[str, Any]:
    """The tables and values of a TOML file; ValueError naming it if it is none."""
    try:
        return tomllib.loads(read_small(path).decode())
    except (ValueError, RecursionError) as error:  # not TOML, not text, or nested without end
        raise ValueError(f"{path} is not a TOML file: {error}") from error


def truncate_jsonl(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Rewrites a JSONL file to the whole lines that `keep` accepts; a line cut short by a kill is dropped."""
    if path.is_file():
        kept = "".join(line for line in _whole_lines(path) if keep(json.loads(line)))
        write_atomic(path, lambda file: file.write(kept.encode()))


def _whole_lines(path: Path) -> Iterable[str]:
    with open(path, encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                yield line
