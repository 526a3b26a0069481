"""Files that appear whole or not at all, locks on folders, and small JSON and TOML files."""

from __future__ import annotations

import contextlib
import errno
import glob
import itertools
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tokenize import TokenError
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOCK_FILE = ".lock"
WRITERS_AT_ONCE = 8
"""Of so many writers of one file that are killed at the same time, the next writer removes what they left."""
_TEMPORARY = r"\..+\.\d{12}\.tmp"
JSON_BYTES = 1 << 24
"""Size of the largest JSON or TOML file that is read; those of geoflow_fast take kilobytes."""

_OPEN_FLAGS = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_CLOEXEC", "O_BINARY"))
"""Each system has some of these."""

_CONTENT_ERRORS = (
    *(ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError, EOFError, SyntaxError),
    *(MemoryError, TokenError, SafetensorError),
)
"""What parsers raise about the contents of a file."""


def write_atomic(path: Path, content: bytes | Callable[[BinaryIO], object]) -> None:
    """Writes a file under a temporary name, syncs it to disk and renames it, so that the old file stays on failure.

    `content` is what the file shall hold, or a function that writes it into an open file. Each writer has a temporary
    file of its own in the same folder, which it locks: several may write one file at the same time, the last rename
    counts, and every reader sees a whole file. What killed writers left behind is not locked, and the next writer of
    the same file removes it.
    """
    if not path.name:
        raise IsADirectoryError(f"{path} is a folder; name a file in it")
    temporary: Path | None = None
    try:
        _remove_left_behind(path)
        temporary, file = _new_temporary(path)
        with file:
            try:
                if callable(content):
                    content(file)
                else:
                    file.write(content)
                file.flush()
                os.fsync(file.fileno())
                if fcntl is not None:
                    os.replace(temporary, path)
            except BaseException:  # also when the user interrupts; raised again
                if fcntl is not None:
                    _discard(temporary)
                raise
            finally:
                # Once the lock ends, another writer may have a file of this name.
                temporary = temporary if fcntl is None else None
        if temporary is not None:  # Windows renames only files that are closed
            os.replace(temporary, path)
    except BaseException as error:
        if temporary is not None:
            _discard(temporary)
        if not isinstance(error, OSError):
            raise
        why = error.strerror or error
        raise OSError(error.errno, f"could not write {path} ({why}); what was there before is untouched") from error
    sync_folder(path.parent)


def _discard(temporary: Path) -> None:
    with contextlib.suppress(OSError):  # a failing disk may refuse this too; the next writer then removes it
        temporary.unlink(missing_ok=True)


def temporaries_of(path: Path) -> list[Path]:
    """The temporary files of writers of a file, at work or killed."""
    return sorted(path.parent.glob(f".{glob.escape(path.name)}.*.tmp"))


def _temporary(path: Path, number: int) -> Path:
    return path.with_name(f".{path.name}.{number:012d}.tmp")


def _new_temporary(path: Path) -> tuple[Path, BinaryIO]:
    """A temporary file that did not exist before, locked where the file system has locks. It has the first number that
    is free, so that what a killed writer left is found without a search of the folder."""
    for number in itertools.count():
        temporary = _temporary(path, number)
        # The file is always created here, so a link that someone put under this name is not followed.
        try:
            handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _OPEN_FLAGS, 0o666)
        except FileExistsError:
            continue
        file = os.fdopen(handle, "wb")
        if fcntl is None:
            return temporary, file
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ours = os.fstat(handle).st_nlink > 0
        except BlockingIOError:
            ours = False
        except OSError:  # a file system without locks, where nothing is removed
            ours = True
        if ours:
            return temporary, file
        file.close()  # another writer took the file for left behind before it was locked
    raise AssertionError("numbers do not end")


def _remove_left_behind(path: Path) -> None:
    """Removes the temporary files of a path that no writer holds locked, because their writers were killed."""
    for number in range(WRITERS_AT_ONCE) if fcntl is not None else ():
        temporary = _temporary(path, number)
        if not temporary.is_file():
            continue
        with contextlib.suppress(OSError):  # locked, finished meanwhile, a link, or in a folder that refuses
            handle = os.open(temporary, os.O_WRONLY | os.O_NONBLOCK | _OPEN_FLAGS)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Its writer may have finished meanwhile, and the next one have a new file of this number.
                if os.path.samestat(os.fstat(handle), os.lstat(temporary)):
                    temporary.unlink()
            finally:
                os.close(handle)


def sync_folder(folder: Path) -> None:
    """Makes renames in a folder durable: the name of a file is stored in its folder, not in the file. Windows, which
    has no such call, stores them with the file."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        raise OSError(
            error.errno, f"what was written to {folder} may not outlast a power cut ({error.strerror})"
        ) from error
    finally:
        os.close(handle)


@contextlib.contextmanager
def locked(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Keeps other processes out of `folder` by a lock that ends with this process.

    A lock that another process holds is an OSError, unless `wait` is set. So is a link in place of the lock file, which
    filelock does not follow. A lock file that its last holder has removed meanwhile does not count as locked.
    """
    from filelock import FileLock, Timeout

    try:
        lock = FileLock(folder / LOCK_FILE, blocking=wait).acquire()
    except Timeout:
        raise OSError(errno.EAGAIN, f"another run is writing to {folder}; wait for it or use a new folder") from None
    except OSError as error:
        raise OSError(error.errno, f"could not lock {folder} ({error.strerror})") from error
    with lock:
        yield


def foreign_file(folder: Path, own: str) -> Path | None:
    """The first file or link below a folder whose path inside it does not match the pattern `own`; temporary files of
    writers count as own. A link in place of the folder is foreign itself."""
    if folder.is_symlink():
        return folder
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder).as_posix()
        is_folder = path.is_dir() and not path.is_symlink()
        if not is_folder and not re.fullmatch(own, inside) and not re.fullmatch(_TEMPORARY, path.name):
            return path
    return None


def refuse_foreign(folder: Path, own: str) -> None:
    """Raises a FileExistsError that names a file below a folder which does not match the pattern `own`."""
    foreign = foreign_file(folder, own)
    if foreign is not None:
        raise FileExistsError(errno.EEXIST, f"{foreign} is in the way, and was not made here; move it")


def remove_own(folder: Path, own: str, last: str) -> None:
    """Removes a folder whose files all match the pattern `own`; a FileExistsError names one that does not, before
    anything is removed. The file `last`, which tells whose folder it is, goes last."""
    refuse_foreign(folder, own)
    found = sorted(folder.rglob("*"), reverse=True)  # what is in a folder comes before it
    for path in [*(path for path in found if path != folder / last), folder / last]:
        if path.is_dir():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
    folder.rmdir()


def write_json(path: Path, value: Any, *, indent: int | None = 2) -> None:
    """Writes `value` as JSON, atomically; with `indent=None` on one line, which is shorter."""
    write_atomic(path, (json.dumps(value, indent=indent) + "\n").encode())


def write_npy(path: Path, array: NDArray[Any]) -> None:
    """Writes a `.npy` file, atomically. `np.save` would do it through a buffer of the C library, which hides the error
    of a disk that is full."""
    plain = np.ascontiguousarray(array)

    def fill(file: BinaryIO) -> None:
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(plain))
        file.write(plain.reshape(-1).view(np.uint8).data)

    write_atomic(path, fill)


@contextlib.contextmanager
def contents_of(path: Path, verdict: str = "damaged or was not written by geoflow_fast") -> Iterator[None]:
    """Turns errors about the contents of a file into a ValueError that says the file is `verdict`.

    Errors of the operating system pass unchanged, and so does our own ValueError that already names the file.
    """
    try:
        yield
    except OSError as error:
        if error.errno is not None:
            raise
        raise ValueError(f"{path} is {verdict}: {error}") from error  # pyarrow reports damaged files in this way
    except ValueError as error:
        if type(error) is ValueError and str(path) in str(error):
            raise
        raise ValueError(f"{path} is {verdict}: {error}") from error
    except _CONTENT_ERRORS as error:
        raise ValueError(f"{path} is {verdict}: {error!r}") from error


def need_file(path: Path) -> None:
    """Raises a FileNotFoundError unless `path` is a regular file."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is {'not a file' if path.exists() else 'missing'}")


def read_small(path: Path) -> bytes:
    """Returns the bytes of a regular file of at most `JSON_BYTES`; pipes and devices are refused."""
    need_file(path)
    try:
        with open(path, "rb") as file:
            data = file.read(JSON_BYTES + 1)
    except OSError as error:
        raise OSError(error.errno, f"could not read {path} ({error.strerror})") from error
    if len(data) > JSON_BYTES:
        raise ValueError(f"{path} is larger than {JSON_BYTES} bytes, more than any file of its kind needs")
    return data


def read_json(path: Path, what: str = "JSON") -> Any:
    """Returns the value of a small JSON file that should hold `what`; a ValueError names a file that does not."""
    data = read_small(path)
    with contents_of(path, f"damaged or not {what}"):
        return json.loads(data)


def read_toml(path: Path) -> dict[str, Any]:
    """Returns the tables and values of a small TOML file; a ValueError names a file that is not TOML."""
    data = read_small(path)
    with contents_of(path, "not a TOML file"):
        return tomllib.loads(data.decode())


def truncate_jsonl(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Rewrites a JSONL file to the lines that `keep` accepts; a last line that a kill cut short is dropped."""
    if path.is_file():
        with open(path, encoding="utf-8") as file:
            kept = "".join(line for line in file if line.endswith("\n") and keep(json.loads(line)))
        write_atomic(path, kept.encode())
