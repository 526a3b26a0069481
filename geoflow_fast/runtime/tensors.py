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
CHECKSUM = "sha256"
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

    The header's metadata holds the format version, `kind` (what the file is for), `info` and a checksum, the SHA-256 of
    these, of names, types and shapes, and of all values.
    """
    names = sorted(tensors)
    metadata = {"geoflow_version": str(FORMAT_VERSION), "kind": kind, "info": json.dumps(dict(info))}
    entries: dict[str, Any] = {}
    offset = 0
    for name in names:
        x = tensors[name]
        end = offset + x.numel() * x.element_size()
        entries[name] = {"dtype": _DTYPE_NAMES[x.dtype], "shape": list(x.shape), "data_offsets": [offset, end]}
        offset = end

    def header(checksum: str) -> bytes:
        raw = json.dumps({"__metadata__": {**metadata, CHECKSUM: checksum}, **entries}).encode()
        raw += b" " * (-len(raw) % 8)
        return len(raw).to_bytes(8, "little") + raw

    def fill(file: BinaryIO) -> None:
        digest = hashlib.sha256(_described(metadata, tensors))
        file.write(header(digest.hexdigest()))
        for name in names:
            data = bytes_of(tensors[name])
            digest.update(data)
            file.write(data)
        # A checksum has a fixed width, so the header with the final one fits where the first one was.
        file.seek(0)
        file.write(header(digest.hexdigest()))

    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, fill)


def load_tensors(
    path: Path, *, kind: str, device: torch.device | str = "cpu"
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Reads what `save_tensors` wrote: (tensors, info). A file that is damaged, of another version or of another kind
    is a ValueError that names it."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    # safetensors opens its path twice, and a writer may replace the file between: that of an open file stays the same.
    with contents_of(path, "truncated or not a safetensors file"), path.open("rb") as opened:
        same = Path(f"/dev/fd/{opened.fileno()}")
        return _read(same if same.exists() else path, path, kind, device)


def _read(name: Path, path: Path, kind: str, device: torch.device | str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    with safe_open(name, framework="pt") as file:
        metadata = file.metadata() or {}
        version = metadata.get("geoflow_version")
        if version is None:
            raise ValueError(f"{path} was not written by geoflow_fast: it carries no format version")
        if version != str(FORMAT_VERSION):
            raise ValueError(f"{path} has format version {version}; this release reads version {FORMAT_VERSION}")
        if metadata.get("kind") != kind:
            raise ValueError(f"{path} holds a {metadata.get('kind')!r}, but a {kind!r} was expected")
        # Copies, since safetensors returns views of the mapped file.
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118, not a dict
        digest = hashlib.sha256(_described(metadata, tensors))
        for name in sorted(tensors):
            digest.update(bytes_of(tensors[name]))
        if digest.hexdigest() != metadata.get(CHECKSUM):
            raise ValueError(f"{path} is corrupt: its contents do not match its checksum")
        return {name: x.to(device) for name, x in tensors.items()}, {**json.loads(metadata["info"])}


def _described(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> bytes:
    """What a checksum covers besides the values."""
    kinds = [[name, str(tensors[name].dtype), list(tensors[name].shape)] for name in sorted(tensors)]
    return json.dumps([metadata["geoflow_version"], metadata["kind"], metadata["info"], kinds]).encode()


def kind_of(path: Path) -> str:
    """What a file of `save_tensors` is for; its contents are not checked."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    with contents_of(path, "truncated or not a safetensors file"), safe_open(path, framework="pt") as file:
        return str((file.metadata() or {}).get("kind"))


def bytes_of(x: Tensor) -> memoryview:
    """Returns the contents of a tensor of any type, row by row."""
    flat = x.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
