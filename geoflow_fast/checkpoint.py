"""Tensors on disk: safetensors files that appear whole or not at all, with a version and a checksum, without pickle."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FORMAT_VERSION = 1
"""Raised when a file written today could no longer be read by the code of yesterday."""

LOCK_FILE = ".lock"
JSON_BYTES = 1 << 24
"""Largest JSON or TOML file that is read: what is kept in one here takes kilobytes."""
_BLANK_DIGEST = "0" * 64
_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


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


def save_tensors(path: Path, tensors: Mapping[str, Tensor], *, kind: str, info: Mapping[str, Any]) -> None:
    """Writes named tensors and a JSON-serialisable `info` to one safetensors file, atomically.

    The header's metadata holds the format version, `kind` (what the file is for), `info` and the SHA-256 of the
    whole file with the digest itself blanked.
    """
    names = sorted(tensors)
    entries: dict[str, Any] = {}
    offset = 0
    for name in names:
        x = tensors[name]
        end = offset + x.numel() * x.element_size()
        entries[name] = {"dtype": _DTYPE_NAMES[x.dtype], "shape": list(x.shape), "data_offsets": [offset, end]}
        offset = end

    def header(digest: str) -> bytes:
        metadata = {
            "geoflow_version": str(FORMAT_VERSION),
            "kind": kind,
            "info": json.dumps(dict(info)),
            "sha256": digest,
        }
        raw = json.dumps({"__metadata__": metadata, **entries}).encode()
        raw += b" " * (-len(raw) % 8)
        return len(raw).to_bytes(8, "little") + raw

    def fill(file: BinaryIO) -> None:
        blank = header(_BLANK_DIGEST)
        file.write(blank)
        digest = hashlib.sha256(blank)
        for name in names:
            data = bytes_of(tensors[name])
            digest.update(data)
            file.write(data)
        # The digest has a fixed width, so the header with the real one fits where the blank one was.
        file.seek(0)
        file.write(header(digest.hexdigest()))

    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, fill)


def load_tensors(
    path: Path, *, kind: str, device: torch.device | str = "cpu"
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Reads what `save_tensors` wrote: (tensors, info). Another version, kind or a damaged file is a ValueError."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            metadata = file.metadata() or {}
            _check_metadata(path, metadata, kind)
            _check_digest(path, metadata.get("sha256", ""))
            # Cloned: what safetensors returns is a view of the mapped file, which the next checkpoint replaces.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118, not a dict
    except SafetensorError as error:
        raise ValueError(f"{path} is truncated or not a safetensors file: {error}") from error
    with contents_of(path):
        info = json.loads(metadata["info"])
        return tensors, {**info}


def _check_metadata(path: Path, metadata: Mapping[str, str], kind: str) -> None:
    version = metadata.get("geoflow_version")
    if version is None:
        raise ValueError(f"{path} was not written by geoflow_fast: it carries no format version")
    if version != str(FORMAT_VERSION):
        raise ValueError(f"{path} has format version {version}; this release reads version {FORMAT_VERSION}")
    if metadata.get("kind") != kind:
        raise ValueError(f"{path} holds a {metadata.get('kind')!r}, but a {kind!r} was expected")


def _check_digest(path: Path, expected: str) -> None:
    with open(path, "rb") as file:
        length = file.read(8)
        header = file.read(int.from_bytes(length, "little"))
        digest = hashlib.sha256(length + header.replace(expected.encode(), _BLANK_DIGEST.encode(), 1))
        while block := file.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != expected:
        raise ValueError(f"{path} is corrupt: its contents do not match its checksum")


def bytes_of(x: Tensor) -> memoryview:
    """The contents of a tensor of any type, row by row."""
    flat = x.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


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
