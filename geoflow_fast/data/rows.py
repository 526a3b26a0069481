"""Rows of embeddings in memory or in memory-mapped files. Only the rows that are asked for are read."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import mmap
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from geoflow_fast.distributed import ALONE, World
from geoflow_fast.geometry import check_rows, unit_rows
from geoflow_fast.runtime.files import contents_of, need_file

if TYPE_CHECKING:
    from geoflow_fast.data.fingerprint import Fingerprint
    from geoflow_fast.data.ids import Ids

BLOCK_ROWS = 8192
RANDOM_ROWS = 64
"""Random rows that are read from a mapped file before its pages are released. Pages count as resident memory once they
are touched, and a page fault also maps the cached pages around it, up to a huge page. The kernel's cache keeps them."""
NPY_HEADER_BYTES = 10_000
"""Length of the longest `.npy` header that is read; numpy itself parses none that is longer."""
MOST_COLUMNS = 1 << 31
"""Width of the widest array without rows that is read."""

SHARD_NUMBER = re.compile(r"(?P<number>\d+)(?P<of>[-_]of[-_](?P<total>\d+))?$")
"""The number of a shard in the name of its file, without suffix, and the number of all shards if the name has it."""

Array = NDArray[np.floating]
Index = NDArray[np.int64]


class Rows:
    """Rows of one or several 2-D arrays, read as one: `rows[index]` returns float32 [len(index), d].

    With `normalize`, `tensors` yields rows of unit norm too, instead of rows as stored. `ids` are what the rows are
    called, and `encoder` is the one that made them, where these are known.
    """

    ids: Ids | None = None
    encoder: Fingerprint | None = None

    def __init__(self, parts: Sequence[Array], name: str, *, normalize: bool = False) -> None:
        if not parts:
            raise ValueError(f"{name}: no arrays")
        for number, part in enumerate(parts):
            if part.ndim != 2 or part.dtype.kind != "f":
                raise ValueError(
                    f"{name} part {number} must be a 2-D floating-point array, got {part.dtype} {part.shape}"
                )
            if part.shape[1] != parts[0].shape[1]:
                raise ValueError(f"{name} part {number} has width {part.shape[1]}, but part 0 has {parts[0].shape[1]}")
        self.name, self.normalize = name, normalize
        self.parts = list(parts)
        self.dim = int(parts[0].shape[1])
        self.starts = np.cumsum([0, *(len(part) for part in parts)])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, index: Index) -> NDArray[np.float32]:
        """Returns the rows `index` [B] in the order asked for, scaled to unit norm."""
        unit: NDArray[np.float32] = unit_rows(torch.from_numpy(self.stored(index))).float().numpy()
        return unit

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type that holds all rows as they are stored: float16, float32 or float64."""
        kinds = (np.dtype(f"f{min(part.dtype.itemsize, 8)}") for part in self.parts)
        return max(kinds, key=lambda kind: kind.itemsize)

    def stored(self, index: Index) -> NDArray[Any]:
        """Returns the rows `index` [B] in the order asked for, as they are stored, in `dtype`."""
        out = np.empty((len(index), self.dim), self.dtype)
        # Rows are read in ascending order, so that access to a mapped file is sequential.
        order = np.argsort(index, kind="stable")
        ranked = index[order]
        bounds = np.searchsorted(ranked, self.starts)
        for part, start, low, high in zip(self.parts, self.starts, bounds[:-1], bounds[1:]):
            mapped = isinstance(part, np.memmap)
            chunk = RANDOM_ROWS if mapped else max(1, high - low)
            for begin in range(low, high, chunk):
                end = min(begin + chunk, high)
                out[order[begin:end]] = part[ranked[begin:end] - start]
                if mapped:
                    _advise(part, "MADV_DONTNEED")
        return out

    def tensors(
        self,
        rows: int | None = BLOCK_ROWS,
        within: range | None = None,
        kept: tuple[torch.dtype, ...] = (torch.float32,),
    ) -> Iterator[tuple[int, Tensor]]:
        """Yields the rows as stored, or those of the range `within`, in blocks of at most `rows`: (number of the first
        row, float32 tensor). Blocks must not be written to, and each is valid until the next one is asked for. Without
        `rows`, parts that share the file's memory come whole.

        Rows of a dtype that is `kept` share the file's memory. Rows of other types are converted into one buffer: fresh
        memory for every block would cost ten times as much as the conversion.
        """
        within = range(len(self)) if within is None else within
        buffer: Tensor | None = None
        for part, start in zip(self.parts, self.starts.tolist()):
            end = min(within.stop - start, len(part))
            known_to_torch = part.dtype.isnative and part.dtype.itemsize <= np.dtype(np.float64).itemsize
            shared = part.flags.c_contiguous and part.dtype.isnative and not self.normalize
            shared = shared and f"torch.{part.dtype.name}" in map(str, kept)
            step = max(1, end) if rows is None and shared else rows or BLOCK_ROWS
            for low in range(max(within.start - start, 0), end, step):
                stored = np.ascontiguousarray(
                    part[low : min(low + step, end)], dtype=None if known_to_torch else self.dtype
                )
                with warnings.catch_warnings():  # torch warns about memory that is mapped for reading only
                    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
                    block = torch.from_numpy(stored)
                if self.normalize:
                    block = unit_rows(block).float()
                elif block.dtype != torch.float32 and block.dtype not in kept:
                    if buffer is None:
                        buffer = torch.empty(min(step, len(self)), self.dim, dtype=torch.float32, device="cpu")
                    block = buffer[: len(block)].copy_(block)
                yield start + low, block
                _advise(part, "MADV_DONTNEED")

    def check(self, *, normalize: bool, world: World = ALONE) -> None:
        """Raises a ValueError that names the first row which is not finite or, unless `normalize` is set, not of unit
        norm within 1e-3. Each rank of a `world` reads its share of the rows."""
        kept = (torch.float32, torch.float64)
        remedy = "scale rows to unit norm, as normalize=True does"
        for first, block in Rows(self.parts, self.name).tensors(within=world.own(len(self)), kept=kept):
            check_rows(block, self.name, unit=not normalize, first=first, remedy=remedy)

    def digest(self, world: World = ALONE) -> str:
        """Returns a SHA-256 of the shapes of the parts and of the SHA-256 of each block of rows as stored.

        It does not depend on the number of ranks of a `world`, each of which reads its share of the blocks.
        """
        shapes = [(part.dtype.str, part.shape) for part in self.parts]
        blocks = [(number, low) for number, part in enumerate(self.parts) for low in range(0, len(part), BLOCK_ROWS)]
        shares = world.shares(len(blocks))
        own = bytearray()
        for number, low in blocks[shares[world.rank].start : shares[world.rank].stop]:
            own += hashlib.sha256(np.ascontiguousarray(self.parts[number][low : low + BLOCK_ROWS]).data).digest()
            _advise(self.parts[number], "MADV_DONTNEED")
        digests = torch.tensor(own, dtype=torch.uint8, device="cpu").view(-1, hashlib.sha256().digest_size)
        whole = hashlib.sha256(json.dumps(shapes).encode())
        whole.update(world.gather_rows(digests, [len(share) for share in shares]).numpy().tobytes())
        return whole.hexdigest()

    def expect_random_reads(self) -> None:
        """Tells the kernel not to read ahead in mapped parts: shuffled rows have no use for their neighbours."""
        for part in self.parts:
            _advise(part, "MADV_RANDOM")


def _advise(part: Array, advice: str) -> None:
    """Passes advice about a mapped array to the kernel, where that takes any. The pages of a copy-on-write mapping
    (mode "c") hold their owner's edits and must not be released, so it gets none."""
    mapping = getattr(part, "_mmap", None)
    if mapping is not None and getattr(part, "mode", None) in ("r", "r+") and hasattr(mmap, advice):
        mapping.madvise(getattr(mmap, advice))


def open_shards(folder: Path, name: str) -> Rows:
    """Opens the files `{name}_{number}.npy` of a folder, counted from 0 without a gap, memory-mapped."""
    files = [path for path in folder.glob(f"{name}_*.npy") if re.search(r"_\d+\.npy$", path.name)]
    shards = in_shard_order(files)
    if not shards:
        raise FileNotFoundError(f"{folder} holds no {name}_0.npy")
    return Rows([load_npy(path, mapped=True) for path in shards], f"{folder}")


def in_shard_order(paths: Iterable[Path], *, from_one: bool = False) -> list[Path]:
    """The files of one series in the order of their rows.

    Their names differ in the number at their end alone, which may have the number of all shards behind it, as in
    `train-00000-of-00003`. It counts from 0 (or, with `from_one`, from 1). Or the names end in ranges of rows that
    touch, as in `rows_0_999` and `rows_1000_1999`. A ValueError names two files that differ in more, because they hold
    different things, or that have the same number, because rows would be doubled. A FileNotFoundError names a shard
    that is missing, because all rows after it would get wrong numbers.
    """
    files = sorted(paths)
    series: dict[str, Path] = {}
    for path in files:
        series.setdefault(SHARD_NUMBER.sub(r"#\g<of>", path.stem) + path.suffix, path)
    if len(series) > 1:
        ranges = _touching_ranges(files)
        if ranges is not None:
            return ranges
        one, other, *_ = series.values()
        raise ValueError(
            f"{one.parent} holds several series of files, of which {one.name} and {other.name} are two; keep each in a "
            "folder of its own"
        )
    known = [match for match in (SHARD_NUMBER.search(path.stem) for path in files) if match is not None]
    total = None if not known or known[0]["total"] is None else int(known[0]["total"])
    if len(known) < len(files) or (len(files) == 1 and total is None):
        return files
    shards: dict[int, Path] = {}
    for path, match in zip(files, known):
        other = shards.setdefault(int(match["number"]), path)
        if other != path:
            raise ValueError(f"{other} and {path} are both shard {int(match['number'])}; keep one of them")
    first = 1 if from_one and 0 not in shards and (total is None or total in shards) else 0
    end = first + total if total is not None else max(shards, default=first - 1) + 1
    width = min((len(match["number"]) for match in known), default=1)
    for number in range(first, end):
        if number not in shards:
            missing = SHARD_NUMBER.sub(rf"{number:0{width}}\g<of>", files[0].stem) + files[0].suffix
            raise FileNotFoundError(f"{files[0].with_name(missing)} is missing between other shards")
    if max(shards, default=-1) >= end:
        raise ValueError(f"{shards[max(shards)]} has a number that is too large for {total} shards")
    return [shards[number] for number in range(first, end)]


def _touching_ranges(files: Sequence[Path]) -> list[Path] | None:
    """Files whose names end in ranges of rows from the first one on, each of which begins where another ends, in order;
    None for other files."""
    known = [re.fullmatch(r"(.*?)(\d+)[-_](\d+)", path.stem) for path in files]
    if len({(match and match[1], path.suffix) for match, path in zip(known, files)}) > 1:
        return None
    ranges = sorted((int(match[2]), int(match[3]), path) for match, path in zip(known, files) if match is not None)
    for step in (0, 1):  # the end is the row behind the last one, or the last one
        touch = all(low[1] + step == high[0] for low, high in itertools.pairwise(ranges))
        if ranges and ranges[0][0] <= step and touch and all(low < high + step for low, high, _ in ranges):
            return [path for *_, path in ranges]
    return None


def load_npy(path: Path, *, mapped: bool = False) -> NDArray[Any]:
    """Returns the array of a `.npy` file, never unpickling anything.

    A ValueError names a file that is cut short, that holds no plain values, or whose header claims more than the file
    holds. Nothing is allocated before that is known, so a file costs no more memory than its size.
    """
    need_file(path)
    with open(path, "rb") as file, contents_of(path, "truncated or not a .npy file"):
        start = file.read(12)
        if start[:2] == b"PK":
            raise ValueError(f"{path} is not a .npy file but an archive of several arrays")
        if start[:6] != b"\x93NUMPY" or len(start) < 12:
            raise ValueError(f"{path} is truncated or not a .npy file: it does not begin as one")
        short = start[6] == 1
        length = int.from_bytes(start[8:10] if short else start[8:12], "little")
        if start[6] not in (1, 2, 3) or length > NPY_HEADER_BYTES:
            raise ValueError(f"{path} is damaged: version {start[6]}, and its header claims {length} bytes")
        file.seek(8)
        read_header = np.lib.format.read_array_header_1_0 if short else np.lib.format.read_array_header_2_0
        shape, by_columns, dtype = read_header(file)
        offset = file.tell()
        _check_claims(path, shape, dtype, os.fstat(file.fileno()).st_size - offset)
        order: Literal["F", "C"] = "F" if by_columns else "C"
        if not math.prod(shape):
            return np.empty(shape, dtype, order)  # the system maps no empty range
        array: NDArray[Any] = np.memmap(file, dtype, "r", offset, shape, order)
    return array if mapped else np.array(array)


def _check_claims(path: Path, shape: tuple[int, ...], dtype: np.dtype[Any], held: int) -> None:
    """Raises a ValueError unless a file that holds so many bytes of values can have this shape and type."""
    if dtype.hasobject or dtype.names is not None or dtype.subdtype is not None:
        raise ValueError(f"{path} holds {dtype}, not plain numbers or text")
    if any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"{path} is damaged: its header claims the shape {shape}")
    claimed = dtype.itemsize * math.prod(shape)
    # Rows without a byte would cost nothing in the file and something in memory.
    hollow = claimed == 0 and (shape[0] > 0 or max(shape) > MOST_COLUMNS)
    if dtype.itemsize == 0 or hollow or claimed > held:
        raise ValueError(
            f"{path} is truncated or damaged: it claims {shape} of {dtype.str}, {claimed} bytes, but it holds {held}"
        )
