"""Folders into which nothing may write, not even root."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.link", "os.symlink", "os.truncate"}
FOR_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_folders: list[Path] = []


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Every attempt to write below `folder` is an OSError; in the end its files must be as they were."""
    before = _listing(folder)
    _folders.append(folder.absolute())
    try:
        yield
    finally:
        _folders.pop()
    assert _listing(folder) == before


def _listing(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in (folder, *folder.rglob("*"))}


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if not _folders or not (event in CHANGES or (event == "open" and arguments[2] & FOR_WRITING)):
        return
    for path in arguments[:2]:
        if isinstance(path, (str, Path)) and any(Path(path).absolute().is_relative_to(folder) for folder in _folders):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))


sys.addaudithook(_refuse)  # a hook cannot be removed
