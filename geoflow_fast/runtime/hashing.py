"""Digests that identify arrays and settings."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from geoflow_fast.runtime.tensors import bytes_of


def digest(parts: Iterable[Tensor | NDArray[Any]]) -> str:
    """Returns a SHA-256 over types, shapes and contents, which only equal arrays in equal order share. Arrays of text
    and of objects, such as ids, count by the type and the text of each value."""
    sha = hashlib.sha256()
    for part in parts:
        if isinstance(part, np.ndarray) and part.dtype.kind not in "biufc":
            sha.update(f"values{part.shape}".encode())
            sha.update(json.dumps([_typed(value) for value in part.reshape(-1).tolist()]).encode())
            continue
        sha.update(f"{part.dtype}{tuple(part.shape)}".encode())
        sha.update(bytes_of(part) if isinstance(part, Tensor) else np.ascontiguousarray(part).data)
    return sha.hexdigest()


def _typed(value: Any) -> list[str]:
    """The type of a value, and its text."""
    return [type(value).__name__, digest([value]) if isinstance(value, (Tensor, np.ndarray)) else str(value)]


def fingerprint(facts: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of facts that can be written as JSON, whatever their order."""
    return hashlib.sha256(json.dumps(dict(facts), sort_keys=True, allow_nan=False).encode()).hexdigest()
