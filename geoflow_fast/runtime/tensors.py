"""Named tensors on disk: safetensors files with a version and a checksum, written atomically and without pickle."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import safe_open
from torch import Tensor

from geoflow_fast.runtime.files import contents_of, write_atomic

FORMAT_VERSION = 1
"""Version of the files. A file with another version is refused."""

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
    """Reads what `save_tensors` wrote: (tensors, info). A file that is damaged, of another version or of another kind
    is a ValueError that names it.

    The file is opened twice, for its checksum and for its tensors. Where a writer replaces it meanwhile, it is read
    again.
    """
    while True:
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist")
        before = _identity(path)
        try:
            loaded = _load(path, kind, device)
        except ValueError:
            if _identity(path) == before:
                raise
            continue
        if _identity(path) == before:
            return loaded


def _identity(path: Path) -> tuple[int, ...]:
    """What tells a file from the one that replaces it."""
    state = path.stat()
    return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns


def _load(path: Path, kind: str, device: torch.device | str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    with (
        contents_of(path, "truncated or not a safetensors file"),
        safe_open(path, framework="pt", device=str(device)) as file,
    ):
        metadata = file.metadata() or {}
        version = metadata.get("geoflow_version")
        if version is None:
            raise ValueError(f"{path} was not written by geoflow_fast: it carries no format version")
        if version != str(FORMAT_VERSION):
            raise ValueError(f"{path} has format version {version}; this release reads version {FORMAT_VERSION}")
        if metadata.get("kind") != kind:
            raise ValueError(f"{path} holds a {metadata.get('kind')!r}, but a {kind!r} was expected")
        _check_digest(path, metadata.get("sha256", ""))
        # Copies, since safetensors returns views of the mapped file.
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118, not a dict
        return tensors, {**json.loads(metadata["info"])}


def kind_of(path: Path) -> str:
    """What a file of `save_tensors` is for; its contents are not checked."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    with contents_of(path, "truncated or not a safetensors file"), safe_open(path, framework="pt") as file:
        return str((file.metadata() or {}).get("kind"))


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
    """Returns the contents of a tensor of any type, row by row."""
    flat = x.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
