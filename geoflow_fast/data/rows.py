"""Rows of embeddings in memory or in memory-mapped files, read without loading what is not asked for."""

from __future__ import annotations

import hashlib
import json
import mmap
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from geoflow_fast.distributed import ALONE, World
from geoflow_fast.geometry import UNIT_TOLERANCE

BLOCK_ROWS = 8192


# Pages of a mapped file count as resident memory once touched, so they are released after each read; the kernel's cache
# keeps them. A fault also maps the cached pages around it, up to a huge page: random rows are read so many at a time.
RANDOM_ROWS = 64


NPY_HEADER_BYTES = 10_000
"""Longest header of a `.npy` file that is read; numpy parses no longer one either."""


Array = NDArray[np.floating]


Index = NDArray[np.int64]


class Rows:
    """Rows of one or several 2-D arrays read as one: `rows[index]` gives float32 [len(index), d]."""

    def __init__(self, parts: Sequence[Array], name: str) -> None:
        if not parts:
            raise ValueError(f"{name}: no arrays")
        for number, part in enumerate(parts):
            if part.ndim != 2 or part.dtype.kind != "f":
                raise ValueError(
                    f"{name} part {number} must be a 2-D floating-point array, got {part.dtype} {part.shape}"
                )
            if part.shape[1] != parts[0].shape[1]:
                raise ValueError(f"{name} part {number} has width {part.shape[1]}, but part 0 has {parts[0].shape[1]}")
        self.name = name
        self.parts = list(parts)
        self.dim = int(parts[0].shape[1])
        self.starts = np.cumsum([0, *(len(part) for part in parts)])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, index: Index) -> NDArray[np.float32]:
        """Rows `index` [B] in the order asked for, of unit norm to float32 rounding."""
        out = np.empty((len(index), self.dim), np.float32)
        # Ascending reads keep a mapped file's access sequential within each shard.
        order = np.argsort(index, kind="stable")
        ranked = index[order]
        bounds = np.searchsorted(ranked, self.starts)
        for part, start, low, high in zip(self.parts, self.starts, bounds[:-1], bounds[1:]):
            chunk = RANDOM_ROWS if _mapping(part) is not None else max(1, high - low)
            for begin in range(low, high, chunk):
                end = min(begin + chunk, high)
                out[order[begin:end]] = part[ranked[begin:end] - start]
                _advise(part, "MADV_DONTNEED")
        out /= np.linalg.norm(out, axis=1, keepdims=True)
        return out

    def blocks(self, rows: int = BLOCK_ROWS, within: range | None = None) -> Iterator[tuple[int, Array]]:
        """All rows as stored, or those `within` a stretch, in blocks of at most `rows`: (first row's index, block)."""
        within = range(len(self)) if within is None else within
        for part, start in zip(self.parts, self.starts.tolist()):
            end = min(within.stop - start, len(part))
            for low in range(max(within.start - start, 0), end, rows):
                block = part[low : min(low + rows, end)]
                yield start + low, np.asarray(block)
                _advise(part, "MADV_DONTNEED")

    def tensors(self, rows: int = BLOCK_ROWS, within: range | None = None) -> Iterator[tuple[int, Tensor]]:
        """`blocks` as float32 tensors, each for reading only and until the next is asked for.

        float32 rows share the file's memory. float16 and float64 rows are converted into one buffer: fresh memory for
        every block would cost ten times as much as the conversion.
        """
        buffer: Tensor | None = None
        for first, block in self.blocks(rows, within):
            stored = _as_tensor(block)
            if stored.dtype != torch.float32:
                if buffer is None:
                    buffer = torch.empty(min(rows, len(self)), self.dim)
                stored = buffer[: len(stored)].copy_(stored)
            yield first, stored

    def check(self, *, normalize: bool, world: World = ALONE) -> None:
        """Every row finite and, unless `normalize`, of unit norm within 1e-3; an error names the first bad row. Each
        rank of a `world` reads its share."""
        for first, block in self.tensors(within=world.own(len(self))):
            norm = torch.linalg.vector_norm(block, dim=1).numpy()
            bad = ~(np.isfinite(norm) & (norm > 0)) if normalize else ~(np.abs(norm - 1) <= UNIT_TOLERANCE)
            # guard: rows on disk are finite and of unit norm
            if bad.any():
                row = int(bad.argmax())
                if not np.isfinite(norm[row]):
                    raise ValueError(f"{self.name} row {first + row} is not finite")
                hint = (
                    "it has no direction" if norm[row] == 0 else "scale rows to unit norm (normalize=True, for pairs)"
                )
                raise ValueError(f"{self.name} row {first + row} has norm {norm[row]:.6g}, not 1; {hint}")

    def digest(self, world: World = ALONE) -> str:
        """SHA-256 of how the rows are cut into parts and of the SHA-256 of each block of them as they are stored: the
        same for any number of ranks, each of which reads its share of the blocks."""
        shapes = [(part.dtype.str, part.shape) for part in self.parts]
        blocks = [(k, low) for k, part in enumerate(self.parts) for low in range(0, len(part), BLOCK_ROWS)]
        shares = world.shares(len(blocks))
        own = bytearray()
        for k, low in blocks[shares[world.rank].start : shares[world.rank].stop]:
            own += hashlib.sha256(np.ascontiguousarray(self.parts[k][low : low + BLOCK_ROWS]).data).digest()
            _advise(self.parts[k], "MADV_DONTNEED")
        digests = torch.tensor(own, dtype=torch.uint8).view(-1, hashlib.sha256().digest_size)
        found = hashlib.sha256(json.dumps(shapes).encode())
        found.update(world.gather_rows(digests, [len(share) for share in shares]).numpy().tobytes())
        return found.hexdigest()

    def expect_random_reads(self) -> None:
        """Tells the kernel not to read ahead in mapped parts: shuffled rows have no use for their neighbours."""
        for part in self.parts:
            _advise(part, "MADV_RANDOM")


def _mapping(part: Array) -> mmap.mmap | None:
    """The file mapping behind an array, if its pages can be released: a copy-on-write one (mode "c") holds its owner's
    edits in them."""
    mapping = getattr(part, "_mmap", None)
    return mapping if isinstance(mapping, mmap.mmap) and getattr(part, "mode", None) in ("r", "r+") else None


def _as_tensor(rows: Array) -> Tensor:
    """Rows as a tensor that shares memory where torch knows their type, else as float32; of a file mapped for reading
    too, about which torch would warn."""
    known = rows.dtype.isnative and rows.dtype.itemsize <= np.dtype(np.float64).itemsize
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(np.ascontiguousarray(rows, dtype=None if known else np.float32))


def _advise(part: Array, advice: str) -> None:
    """Passes advice about a mapped array to the kernel, where both exist."""
    mapping = _mapping(part)
    if mapping is not None and hasattr(mmap, advice):
        mapping.madvise(getattr(mmap, advice))


def _open_shards(folder: Path, name: str) -> Rows:
    """Memory-mapped `{name}_{number}.npy` of `folder`, in numeric order without a gap."""
    shards = in_shard_order(path for path in folder.glob(f"{name}_*.npy") if re.search(r"_\d+\.npy$", path.name))
    if not shards:
        raise FileNotFoundError(f"{folder} holds no {name}_0.npy")
    return Rows([load_npy(path, mapped=True) for path in shards], f"{folder}")


def open_rows(path: Path, name: str) -> Rows:
    """A `.npy` file, or all `.npy` files of a folder in the order of the numbers in their names, memory-mapped.

    Several files whose names differ in the number at their end alone are shards, counted from 0 without a gap.
    """
    if path.is_file():
        return Rows([load_npy(path, mapped=True)], f"{name} {path}")
    if not path.is_dir():
        raise FileNotFoundError(f"{name} {path} is neither a .npy file nor a folder")
    files = sorted(path.glob("*.npy"), key=lambda file: ([int(n) for n in re.findall(r"\d+", file.stem)], file.name))
    if not files:
        raise FileNotFoundError(f"{name} folder {path} holds no .npy file")
    series: dict[str, list[Path]] = {}
    for file in files:
        series.setdefault(re.sub(r"\d+$", "#", file.stem), []).append(file)
    for shards in series.values():
        if len(shards) > 1:
            in_shard_order(shards, from_one=True)
    return Rows([load_npy(file, mapped=True) for file in files], f"{name} {path}")


def in_shard_order(paths: Iterable[Path], *, from_one: bool = False) -> list[Path]:
    """Files whose names differ in the number at their end alone, in its order. Two of one number, or one missing in the
    count from 0 (or, with `from_one`, from 1), are errors: rows would be doubled, or lost and those after them
    misnumbered."""
    shards: dict[int, Path] = {}
    for path in sorted(paths):
        number = int(re.findall(r"\d+", path.stem)[-1])
        other = shards.setdefault(number, path)
        if other != path:
            raise ValueError(f"{other} and {path} are both shard {number}; keep one of them")
    first = 1 if from_one and 0 not in shards else 0
    for expected, number in enumerate(sorted(shards), first):
        # guard: no shard is missing between others
        if number != expected:
            lost = re.sub(r"\d+(?=\.npy$)", str(expected), shards[number].name)
            raise FileNotFoundError(f"{shards[number].with_name(lost)} is missing between other shards")
    return [shards[number] for number in sorted(shards)]


def load_npy(path: Path, *, mapped: bool = False) -> NDArray[Any]:
    """The array of a `.npy` file; never unpickles. A file that is cut short is a ValueError that names it."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist or is not a file")
    _check_npy_start(path)
    try:
        # Mapping comes first: a header that claims more than the file holds is refused before anything is allocated.
        # guard: arrays are never unpickled
        array: NDArray[Any] = np.lib.format.open_memmap(path, mode="r")
    except (ValueError, EOFError, OverflowError, TypeError, SyntaxError, MemoryError, TokenError) as error:
        raise ValueError(f"{path} is truncated or not a .npy file: {error}") from error
    return array if mapped else np.array(array)


def _check_npy_start(path: Path) -> None:
    """Magic bytes, and a header no longer than numpy's own are."""
    with open(path, "rb") as file:
        start = file.read(12)
    if start[:2] == b"PK":
        raise ValueError(f"{path} is not a .npy file but an archive of several arrays")
    if start[:6] != b"\x93NUMPY" or len(start) < 12:
        raise ValueError(f"{path} is truncated or not a .npy file: it does not begin as one")
    length = int.from_bytes(start[8:10] if start[6] == 1 else start[8:12], "little")
    if length > NPY_HEADER_BYTES:
        raise ValueError(f"{path} is damaged: its header claims {length} bytes")
