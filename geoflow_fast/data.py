"""Paired embeddings in memory or on disk, read by row without loading what is not asked for.

On disk the layout is clip-retrieval's: `img_emb/img_emb_0.npy`, `text_emb/text_emb_0.npy`, ... with rows in shard
order, float16 or float32. `image_index.npy` gives the image row of each text where an image is stored once for several
texts; else a column `image_index` or `image_path` of `metadata/*.parquet` tells which rows are of one image.
`image_group.npy`, a number per text that the texts of one image share, takes precedence over both for that question.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import mmap
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from tokenize import TokenError
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from geoflow_fast import checks, jobs
from geoflow_fast.checkpoint import write_atomic, write_npy
from geoflow_fast.distributed import ALONE, World
from geoflow_fast.geometry import UNIT_TOLERANCE

IMAGE_FOLDER, TEXT_FOLDER, METADATA_FOLDER = "img_emb", "text_emb", "metadata"
INDEX_FILE, GROUP_FILE = "image_index.npy", "image_group.npy"
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


class EmbeddingPairs:
    """Paired image and text embeddings; an image may have several texts, each of which makes a pair.

    Create it with `from_arrays`, `open` or `open_files`. `len(pairs)` is the number of pairs, and `pairs[index]`
    returns (image [B, d_I], text [B, d_T]) as float32 unit rows, for integers [B] or a boolean mask over all pairs.
    `folder` is the folder that `open` read, else None.
    """

    folder: Path | None = None

    def __init__(self, image: Rows, text: Rows, image_row: Index, text_row: Index, group: Index) -> None:
        self.image, self.text = image, text
        self.image_row, self.text_row, self.group = image_row, text_row, group

    @classmethod
    def from_arrays(
        cls,
        image: Array | Tensor,
        text: Array | Tensor,
        image_index: Index | Tensor | Sequence[int] | None = None,
        *,
        normalize: bool = False,
    ) -> EmbeddingPairs:
        """Pairs from arrays `image` [N, d_I] and `text` [M, d_T].

        Text row k belongs to image row `image_index[k]`, or to image row k without an `image_index`. Rows must be
        finite and, unless `normalize` is set, of unit norm within 1e-3; otherwise a ValueError names the first bad row.
        """
        rows = [Rows([checks.array(x, name)], name) for x, name in ((image, "image"), (text, "text"))]
        for part in rows:
            part.check(normalize=normalize)
        index = None if image_index is None else checks.array(image_index, "image_index")
        return cls._pair(rows[0], rows[1], index, index, "image_index")

    @classmethod
    def open(cls, folder: str | Path, *, normalize: bool = False, world: World = ALONE) -> EmbeddingPairs:
        """Pairs from a folder in clip-retrieval's layout (`img_emb/*.npy`, `text_emb/*.npy`), memory-mapped.

        `image_index.npy`, if present, gives the image row of each text. All rows are checked as in `from_arrays`, in
        one pass over the files that the ranks of a `world` share.
        """
        folder = checks.path(folder, "folder")
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder} is not a folder of embeddings")
        image, text = (_open_shards(folder / name, name) for name in (IMAGE_FOLDER, TEXT_FOLDER))
        for part in (image, text):
            part.check(normalize=normalize, world=world)
            part.expect_random_reads()
        index, group = (
            load_npy(path) if (path := folder / name).is_file() else None for name in (INDEX_FILE, GROUP_FILE)
        )
        if index is None:
            _check_same_shards(image, text)
        if group is None:
            group = index if index is not None else _metadata_groups(folder / METADATA_FOLDER)
        found = cls._pair(image, text, index, group, str(folder / INDEX_FILE))
        found.folder = folder
        return found

    @classmethod
    def open_files(
        cls,
        images: str | Path,
        texts: str | Path,
        image_index: str | Path | None = None,
        *,
        normalize: bool = False,
        world: World = ALONE,
    ) -> EmbeddingPairs:
        """Pairs from two `.npy` files or folders of `.npy` shards, memory-mapped and checked as in `open`.

        `image_index`: a `.npy` file with the image row of each text, as in `from_arrays`.
        """
        image, text = (open_rows(checks.path(x, name), name) for x, name in ((images, "images"), (texts, "texts")))
        for part in (image, text):
            part.check(normalize=normalize, world=world)
            part.expect_random_reads()
        index = None if image_index is None else load_npy(checks.path(image_index, "image_index"))
        return cls._pair(image, text, index, index, str(image_index))

    @classmethod
    def _pair(cls, image: Rows, text: Rows, index: Index | None, group: Index | None, name: str) -> EmbeddingPairs:
        count = len(text)
        if index is None:
            if len(image) != count:
                raise ValueError(
                    f"{len(image)} images and {count} texts: give image_index to say which image each text is of"
                )
            index = np.arange(count)
        if index.shape != (count,) or index.dtype.kind not in "iu":
            raise ValueError(f"{name} must hold {count} integers, one per text, got {index.dtype} {index.shape}")
        bad = (index < 0) | (index >= len(image))
        if bad.any():
            row = int(bad.argmax())
            raise ValueError(f"{name} row {row} is {index[row]}, but there are {len(image)} images")
        if group is not None and group.shape != (count,):
            raise ValueError(f"metadata or {GROUP_FILE} have {len(group)} rows, but there are {count} texts")
        index = index.astype(np.int64)
        return cls(image, text, index, np.arange(count), index if group is None else group.astype(np.int64))

    def __len__(self) -> int:
        return len(self.text_row)

    def __repr__(self) -> str:
        return f"EmbeddingPairs({len(self)} pairs, image width {self.image_dim}, text width {self.text_dim})"

    @property
    def image_dim(self) -> int:
        """Width of the image embeddings."""
        return self.image.dim

    @property
    def text_dim(self) -> int:
        """Width of the text embeddings."""
        return self.text.dim

    def __getitem__(self, index: Tensor | NDArray[Any] | Sequence[int]) -> tuple[Tensor, Tensor]:
        where = _as_index(index, len(self))
        return torch.from_numpy(self.image[self.image_row[where]]), torch.from_numpy(self.text[self.text_row[where]])

    def subset(self, index: Tensor | NDArray[Any] | Sequence[int]) -> EmbeddingPairs:
        """The pairs that `index` selects (integers, or a mask over all pairs). Embeddings are shared, not copied."""
        where = _as_index(index, len(self))
        found = EmbeddingPairs(self.image, self.text, self.image_row[where], self.text_row[where], self.group[where])
        found.folder = self.folder
        return found

    def split(self, fraction: float, seed: int) -> tuple[EmbeddingPairs, EmbeddingPairs]:
        """Splits off a share of the images with all their texts and returns (rest, held out).

        The images held out are drawn by `seed`: `fraction` of them, rounded, and at least one.
        """
        checks.integer(seed, "seed")
        if not 0 < fraction < 1:
            raise ValueError(f"fraction must be between 0 and 1, got {fraction}")
        images, member = np.unique(self.group, return_inverse=True)
        if len(images) < 2:
            raise ValueError("cannot hold out pairs of a set with a single image; pass val= to choose them yourself")
        held = np.zeros(len(images), bool)
        held[np.random.default_rng(seed).permutation(len(images))[: max(1, round(fraction * len(images)))]] = True
        return self.subset(np.flatnonzero(~held[member])), self.subset(np.flatnonzero(held[member]))

    def fingerprint(self) -> str:
        """Hash of the pairing and of up to 64 of the pairs: cheap, and enough to tell different sets of pairs apart."""
        digest = hashlib.sha256(json.dumps([len(self), self.image_dim, self.text_dim]).encode())
        digest.update(self.image_row.tobytes())
        digest.update(self.text_row.tobytes())
        for x in self[np.linspace(0, len(self) - 1, min(len(self), 64)).astype(np.int64)]:
            digest.update(x.numpy().tobytes())
        return digest.hexdigest()

    def save(
        self, folder: str | Path, *, rows_per_shard: int = 1_000_000, dtype: type[np.floating] = np.float16
    ) -> None:
        """Writes the pairs to a folder that `open` reads, in shards of `rows_per_shard` rows stored as `dtype`.

        A folder that already holds embeddings raises a FileExistsError.
        """
        folder = checks.path(folder, "folder")
        checks.integer(rows_per_shard, "rows_per_shard", 1)
        if (folder / IMAGE_FOLDER).exists() or (folder / TEXT_FOLDER).exists():
            raise FileExistsError(f"{folder} already holds embeddings")
        images, index = np.unique(self.image_row, return_inverse=True)
        _save_shards(folder / IMAGE_FOLDER, self.image, images, rows_per_shard, dtype)
        _save_shards(folder / TEXT_FOLDER, self.text, self.text_row, rows_per_shard, dtype)
        if len(images) != len(self) or not np.array_equal(index, np.arange(len(self))):
            write_npy(folder / INDEX_FILE, index.astype(np.int64))
        group = np.unique(self.group, return_inverse=True)[1]
        if not np.array_equal(group, index):
            write_npy(folder / GROUP_FILE, group.astype(np.int64))


def open_pairs(
    folder: Path | None,
    images: Path | None,
    texts: Path | None,
    image_index: Path | None,
    *,
    normalize: bool,
    world: World = ALONE,
) -> EmbeddingPairs:
    """Pairs as the flags of a command name them: a folder, or files of images and of texts."""
    files = {"--images": images, "--texts": texts, "--image-index": image_index}
    given = [flag for flag, path in files.items() if path is not None]
    if folder is not None:
        if given:
            raise ValueError(f"--pairs {folder} is a folder of both sides; leave out {', '.join(given)}")
        return EmbeddingPairs.open(folder, normalize=normalize, world=world)
    if images is None or texts is None:
        raise ValueError("give --pairs, a folder of paired embeddings, or --images and --texts, two .npy files")
    return EmbeddingPairs.open_files(images, texts, image_index, normalize=normalize, world=world)


class ShuffledBatches:
    """Endless shuffled batches as a function of the step alone, so that a run resumes mid-epoch exactly.

    Epochs follow each other without a gap: a batch may end one and begin the next.
    """

    def __init__(self, count: int, batch_size: int, seed: int) -> None:
        if not 1 <= batch_size <= count:
            raise ValueError(f"batch_size={batch_size} needs at least as many pairs, got {count}")
        self.count, self.batch_size, self.seed = count, batch_size, seed
        self._epochs: dict[int, Index] = {}

    def __getitem__(self, step: int) -> Index:
        """Pair indices [batch_size] of 0-based step `step`."""
        first = step * self.batch_size
        last = first + self.batch_size
        low, high = first // self.count, (last - 1) // self.count
        self._epochs = {e: self._epochs[e] if e in self._epochs else self._shuffle(e) for e in (low, high)}
        if low == high:
            return self._epochs[low][first - low * self.count : last - low * self.count]
        return np.concatenate(
            (self._epochs[low][first - low * self.count :], self._epochs[high][: last - high * self.count])
        )

    def _shuffle(self, epoch: int) -> Index:
        return np.random.default_rng((self.seed, epoch)).permutation(self.count)


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


def _check_same_shards(image: Rows, text: Rows) -> None:
    """Rows that are paired by their place must be stored in equal shards; otherwise some were lost on one side."""
    sizes = (map(len, rows.parts) for rows in (image, text))
    for number, (images, texts) in enumerate(itertools.zip_longest(*sizes, fillvalue=0)):
        if images != texts:
            raise ValueError(
                f"shard {number} holds {images} images, but {texts} texts: {INDEX_FILE} must say which belong together"
            )


def _as_index(index: Tensor | NDArray[Any] | Sequence[int], count: int) -> Index:
    """Integers [B] in [0, count), also from a mask over all `count` pairs."""
    where = checks.array(index, "index")
    if where.dtype == bool and where.shape == (count,):
        return np.flatnonzero(where)
    if where.ndim != 1 or (where.size and where.dtype.kind not in "iu"):
        raise ValueError(f"index must be 1-D integers or a mask of {count} entries, got {where.dtype} {where.shape}")
    bad = (where < 0) | (where >= count)
    if bad.any():
        row = int(bad.argmax())
        raise ValueError(f"index entry {row} is {where[row]}, but there are {count} pairs")
    return where.astype(np.int64)


def _metadata_groups(folder: Path) -> Index | None:
    """Which image each row is of, from a column `image_index` or `image_path` of the metadata; None without one."""
    files = sorted(folder.glob("*.parquet"), key=lambda path: [int(x) for x in re.findall(r"\d+", path.name)])
    if not files:
        return None
    for column in ("image_index", "image_path"):
        if all(column in jobs.column_names(path) for path in files):
            values = np.concatenate([jobs.read_columns(path, [column])[column] for path in files])
            return np.unique(values, return_inverse=True)[1]
    return None


def _save_shards(folder: Path, rows: Rows, index: Index, rows_per_shard: int, dtype: type[np.floating]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, low in enumerate(range(0, len(index), rows_per_shard)):
        shard = functools.partial(_save_rows, rows, index[low : low + rows_per_shard], np.dtype(dtype))
        write_atomic(folder / f"{folder.name}_{number}.npy", shard)


def _save_rows(rows: Rows, index: Index, dtype: np.dtype[Any], file: BinaryIO) -> None:
    """The rows `index` as one .npy file, without holding them all in memory."""
    shape = (len(index), rows.dim)
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    for low in range(0, len(index), BLOCK_ROWS):
        file.write(rows[index[low : low + BLOCK_ROWS]].astype(dtype).tobytes())
