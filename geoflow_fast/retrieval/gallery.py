"""Galleries of any size: in memory, or memory-mapped shards that are streamed a block at a time."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from geoflow_fast import geometry, ops
from geoflow_fast.data.embeddings import Embeddings, open_rows
from geoflow_fast.data.fingerprint import Fingerprint
from geoflow_fast.data.ids import Ids
from geoflow_fast.data.rows import Array, Rows
from geoflow_fast.distributed import ALONE, World
from geoflow_fast.geometry import check_rows
from geoflow_fast.ops import extension
from geoflow_fast.ops.allowed import Allowed, Mask, check_finite, kept_blocks
from geoflow_fast.ops.gallery_posterior import block_statistics, check_filtered, check_sample_bias, masked_statistics
from geoflow_fast.ops.gallery_search import Hits, RowCodes, allowed_hits, best_hits, codes_pay
from geoflow_fast.ops.gallery_statistics import GalleryStatistics
from geoflow_fast.retrieval.freshness import marks
from geoflow_fast.runtime import checks, hashing

BLOCK_ROWS = 16_384
GPU_BLOCK_ROWS = 131_072
"""Rows that are copied to a GPU and scored together: with fewer, starting kernels would take as long as they run."""
SOME_ROWS = 64
"""At least this many rows tell whether a gallery in memory or a block has changed, unless it has fewer."""

GallerySource = Tensor | Array | Embeddings | str | Path


class Store(Protocol):
    """The method that a FAISS index has, and anything else that can search the gallery."""

    def search(self, x: NDArray[np.float32], k: int, /) -> tuple[NDArray[Any], NDArray[Any]]:
        """(scores, numbers of gallery rows), each [Q, k]; -1 where there are fewer than k."""


class Gallery:
    """The items to retrieve from: N unit rows of width `dim`, held in memory or read from files block by block.

    `source`: a tensor or an array [N, d], `gf.Embeddings`, a `.npy` file, a Parquet or Arrow file, or a folder of such
    shards, read in the order of the numbers in their names. A tensor stays on its device; `.npy` and Arrow files are
    memory-mapped and never loaded whole, Parquet is unpacked into memory. `ids` name the rows: strings, integers or
    UUIDs, by default those that a table or `gf.Embeddings` brings; results then name items by them. Half precision is
    read as it is stored on CPUs, and converted elsewhere. Rows that are not finite or not of unit norm raise a
    ValueError; with `normalize` they are scaled to unit norm as they are read, a tensor at once, and in float32 if they
    are stored in half precision.

    A tensor may be overwritten: its rows are checked again before the next use. Of an array, about a hundred rows are
    checked whenever it is used, since nothing tells of writes to it: do not change one that a gallery was made from,
    nor the files of a gallery that is open.

    With `codes`, the first search on a CPU with AVX512-VNNI also stores the rows in bytes, a quarter of their size in
    float32, and from then on scores only what bounds from integers do not exclude. Results are the same to the last
    bit. Other processors ignore it. The bytes are made again after a write to a tensor that torch counts. A write that
    it does not count, through `.data` or a NumPy array that shares the memory, is noticed only if it changes one of
    about a hundred evenly spaced rows of each block, the first row among them; after any other, make a new gallery.

    A `store` is a FAISS index over the same rows, or anything with its `search`; shortlists are then found by it.

    The ranks of a `world` share the reading for checks and digests, and after `divided_among_ranks` the scoring.
    """

    def __init__(
        self,
        source: GallerySource,
        world: World = ALONE,
        *,
        codes: bool = False,
        store: Store | None = None,
        normalize: bool = False,
        ids: Any = None,
    ) -> None:
        self.world, self.is_divided = world, False
        self._digest: tuple[Hashable, str] | None = None
        self._checked: Hashable = None
        self._codes: dict[int, tuple[Tensor, RowCodes]] | None = {} if checks.boolean(codes, "codes") else None
        self.path = checks.path(source, "gallery") if isinstance(source, (str, Path)) else None
        self.rows: Tensor | Rows
        if isinstance(source, Tensor):
            if source.dim() != 2 or not source.is_floating_point():
                raise ValueError(f"gallery must be a floating-point [N, d], got {source.dtype} {tuple(source.shape)}")
            self.rows = source.detach()
            if normalize:
                check_rows(self.rows, "gallery", unit=False)
                self.rows = geometry.unit_rows(self.rows)
        elif isinstance(source, np.ndarray):
            checks.unmasked(source, "gallery")
            self.rows = Rows([source], "gallery", normalize=normalize)
        elif isinstance(source, Embeddings):
            self.rows = source.rows
        elif self.path is not None:
            self.rows = open_rows(self.path, "gallery", normalize=normalize)
        else:
            raise TypeError(f"gallery must be a tensor, an array, Embeddings or a path, got {type(source).__name__}")
        if len(self) == 0:
            raise ValueError("the gallery is empty: there is nothing to retrieve")
        self.ids: Ids | None = getattr(self.rows, "ids", None) if ids is None else Ids.given(ids, len(self), "ids")
        self.encoder: Fingerprint | None = getattr(self.rows, "encoder", None)
        if isinstance(self.rows, Rows):
            self.rows.check(normalize=normalize or self.rows.normalize, world=world)
        else:
            check_rows(self.rows, "gallery")
            self._checked = marks([self.rows])
        self._use_store(store)

    @classmethod
    def of(cls, source: GallerySource | Gallery) -> Gallery:
        """`source` itself if it is a gallery already, else the gallery made from it."""
        return source if isinstance(source, Gallery) else cls(source)

    def _use_store(self, store: Store | None) -> None:
        rows = getattr(store, "ntotal", len(self))
        if rows != len(self):
            raise ValueError(f"store holds {rows} items, not the {len(self)} rows of the gallery")
        self.store = store

    def with_store(self, store: Store | None) -> Gallery:
        """The same gallery, searched by another store; the rows are shared."""
        twin = copy.copy(self)
        twin._use_store(store)
        return twin

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def dim(self) -> int:
        """Width d of the rows."""
        return self.rows.dim if isinstance(self.rows, Rows) else self.rows.shape[1]

    def to(self, device: torch.device | str) -> None:
        """Moves a gallery made from a tensor to `device`. Others are copied there block by block as they are read."""
        device = checks.device(device)
        if isinstance(self.rows, Tensor):
            is_checked = self._checked == marks([self.rows])
            self.rows = self.rows.to(device)
            self._checked = marks([self.rows]) if is_checked else None
            self._codes = None if self._codes is None else {}

    def on(self, device: torch.device | str) -> Gallery:
        """This gallery, or a copy on `device` if it was made from a tensor on another one, which stays there."""
        if isinstance(self.rows, Rows) or self.rows.device == checks.device(device):
            return self
        twin = copy.copy(self)
        twin.to(device)
        return twin

    def digest(self) -> str:
        """Hash of all rows, which identifies the gallery. Files are read once for it, shared among the ranks."""
        if isinstance(self.rows, Tensor):
            return hashing.digest([self.rows])
        current, known = self.marks(), self._digest
        if known is None or known[0] != current:
            self._digest = known = current, self.rows.digest(self.world)
        return known[1]

    def marks(self) -> Hashable:
        """Something that differs after the rows in memory have changed, as far as some of them tell. It is the same for
        all galleries on disk."""
        some = self._some_rows()
        return (
            None
            if some is None
            else (marks([self.rows] if isinstance(self.rows, Tensor) else []), hashing.digest([some]))
        )

    def _some_rows(self) -> Tensor | None:
        """About a hundred evenly spaced rows of a gallery in memory, or all if there are fewer; None for files."""
        if self.path is not None:
            return None
        step = max(1, len(self) // SOME_ROWS)
        if isinstance(self.rows, Tensor):
            return self.rows[::step]
        part = self.rows.parts[0][::step]
        return checks.rows(part, "gallery", self.dim, torch.empty(0, device="cpu", dtype=torch.float32))

    def _check_again(self) -> None:
        """Checks the rows of a gallery in memory again if they have changed, as far as that can be known cheaply."""
        some = self._some_rows()
        if some is None or some.is_meta:
            return
        if isinstance(self.rows, Rows):
            if not has_unit_rows(some):
                self.rows.check(normalize=self.rows.normalize)
            return
        current = marks([self.rows])
        if current != self._checked or not has_unit_rows(some):
            check_rows(self.rows, "gallery")
            self._codes = None if self._codes is None else {}
            self._checked = current

    def divided_among_ranks(self) -> Gallery:
        """The same gallery, whose items are divided among the ranks: all ranks must call its `statistics` together with
        the same samples; each scores its own share and receives the statistics of all items."""
        twin = copy.copy(self)
        twin.is_divided = True
        return twin

    def blocks(
        self, device: torch.device | str, dtype: torch.dtype = torch.float32, within: range | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """Yields the rows in order as (index of the first row, rows [n, d] on `device`); `within` restricts the range.

        A gallery made from a tensor comes as one block. Rows of files share the file's memory or one buffer: treat a
        block as read-only, and do not keep it beyond the next one.
        """
        device = device if isinstance(device, torch.device) else checks.device(device)
        for first, block in self._stored(within, BLOCK_ROWS, (torch.float32,)):
            yield first, block.to(device, dtype)

    def _stored(
        self, within: range | None, rows: int | None, kept: tuple[torch.dtype, ...]
    ) -> Iterator[tuple[int, Tensor]]:
        """As `blocks`, where the rows are: in their own dtype if it is one of `kept` or they are a tensor, and in whole
        parts where these share the memory of files, unless `rows` says how many to take."""
        within = range(len(self)) if within is None else within
        self._check_again()
        if isinstance(self.rows, Rows):
            yield from self.rows.tensors(rows, within, kept)
        elif within:
            yield within.start, self.rows[within.start : within.stop]

    def _scored_blocks(
        self, queries: Tensor, within: range | None = None, *, whole: bool = False
    ) -> Iterator[tuple[int, Tensor]]:
        """(number of the first row, rows) as kernels for `queries` or samples take them: half precision as it is stored
        where compiled code reads it, in blocks or in whole parts."""
        compiled = queries.device.type == "cpu" and queries.dtype == torch.float32 and extension.missing() is None
        kept = tuple(extension.STORAGES) if compiled else (torch.float32,)
        rows = GPU_BLOCK_ROWS if queries.device.type == "cuda" else BLOCK_ROWS
        for first, block in self._stored(within, None if whole else rows, kept):
            yield first, block if compiled and block.dtype in kept else block.to(queries.device, queries.dtype)

    def _codes_of(self, first: int, items: Tensor, queries: Tensor) -> RowCodes | None:
        """The codes of the block of items from `first` on, made when it is first searched, and again if some of its
        rows differ since; None for a search without them."""
        if self._codes is None or not codes_pay(queries, items):
            return None
        some, known = items[:: max(1, len(items) // SOME_ROWS)], self._codes.get(first)
        if known is None or not torch.equal(known[0], some):
            self._codes[first] = known = some.clone(), RowCodes.encode(items)
        return known[1]

    def allowed_items(self, mask: Mask | None, queries: int, device: torch.device) -> Allowed | None:
        """The filter that a `mask` is for so many queries, or None if there is none."""
        if mask is not None and self.is_divided and self.world.size > 1:
            raise ValueError("allowed= is not for a gallery whose items are divided among ranks")
        return Allowed.of(mask, queries, len(self), device)

    def _kept_blocks(self, queries: Tensor, kept: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """(numbers, rows) of the items with the numbers `kept`, ascending, as kernels for `queries` take them."""
        for first, items in self._scored_blocks(queries, whole=queries.device.type == "cpu"):
            yield from kept_blocks(items, first, kept)

    @torch.no_grad()
    def search(
        self, queries: Tensor | Array, count: int = 10, *, allowed: Mask | Allowed | None = None
    ) -> tuple[Tensor, Tensor]:
        """The `count` items, or all if there are fewer, of the largest inner product with each of the `queries` [Q, d]:
        (scores, numbers of rows), each [Q, count], the largest first, equal ones by number. The search is exact.

        `allowed`: a boolean mask of the items that there are, [N] for all queries or [Q, N]. Where these are fewer than
        `count`, lists end with number -1 and score -inf.
        """
        is_tensor = isinstance(queries, Tensor)
        dtype = torch.float64 if is_tensor and queries.dtype == torch.float64 else torch.float32
        example = torch.empty(0, dtype=dtype, device=queries.device if is_tensor else "cpu")
        queries = checks.rows(queries, "queries", self.dim, example, "Q")
        count = min(checks.integer(count, "count", 1), len(self))
        if not isinstance(allowed, Allowed):
            allowed = self.allowed_items(allowed, len(queries), queries.device)
        if allowed is not None:
            check_finite(queries, "queries")

            def among(some: Tensor, kept: Tensor) -> Hits:
                return best_hits(some, ((*block, None) for block in self._kept_blocks(some, kept)), count)

            hits = allowed_hits(allowed, queries, len(self), count, among, lambda *asked: Hits(*self.search(*asked)))
            return hits.score, hits.index
        if self.is_divided and self.world.size > 1:
            merged = self.statistics(queries.unsqueeze(1), 1.0, count)
            return merged.top_score.to(queries.dtype), merged.top_index
        stored = self._scored_blocks(queries, whole=self._codes is not None and queries.device.type == "cpu")
        hits = best_hits(queries, ((*block, self._codes_of(*block, queries)) for block in stored), count)
        return hits.score, hits.index

    def take(self, index: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """The rows with the given numbers: [..., d] for an integer tensor `index` [...], on the device of `index`."""
        checks.indices(index, "index", len(self))
        self._check_again()
        if isinstance(self.rows, Tensor):
            return self.rows[index.to(self.rows.device)].to(index.device, dtype)
        kept, position = np.unique(index.cpu().numpy(), return_inverse=True)  # each row is read once
        rows = torch.from_numpy(self.rows[kept]).to(index.device, dtype)
        return rows[torch.from_numpy(position.reshape(index.shape)).to(index.device)]

    def statistics(
        self,
        samples: Tensor,
        kappa: float,
        top_k: int,
        item_bias: Tensor | None = None,
        *,
        sample_bias: Tensor | None = None,
        precision: str = "float32",
        allowed: Mask | Allowed | None = None,
    ) -> GalleryStatistics:
        """`ops.gallery_statistics` of all items, computed block by block, for `samples` [Q, M, d] and an optional
        `item_bias` [N] and `sample_bias` [Q, M], with inner products in `precision`; with a boolean mask `allowed`, [N]
        or [Q, N], of those items alone."""
        checks.with_values(samples, "samples")
        if item_bias is not None and checks.with_values(item_bias, "item_bias").shape != (len(self),):
            raise ValueError(f"item_bias must be [{len(self)}], got {tuple(item_bias.shape)}")
        check_sample_bias(sample_bias, samples)  # here already: a rank without items would not notice
        checks.precision(precision)
        if not isinstance(allowed, Allowed):
            allowed = self.allowed_items(allowed, len(samples), samples.device)
        if allowed is not None:
            check_filtered(samples, item_bias, allowed)

            def copied(some: slice | Tensor, kept: Tensor) -> GalleryStatistics:
                weights = None if sample_bias is None else sample_bias[some]
                shared = kappa, top_k, "auto", item_bias, weights, precision
                statistics = block_statistics(self._kept_blocks(samples, kept), samples[some], *shared)
                return statistics.padded(min(top_k, len(self)))

            def scored(some: slice | Tensor, mask: Tensor) -> GalleryStatistics:
                weights = None if sample_bias is None else sample_bias[some]
                shared = kappa, top_k, "auto", item_bias, weights
                return masked_statistics(self._scored_blocks(samples), mask, samples[some], *shared)

            return allowed.serve(len(samples), copied, scored)
        divided = self.is_divided and self.world.size > 1
        running: GalleryStatistics | None = None
        rows = self.world.own(len(self)) if divided else None  # no rows for some ranks, if there are fewer items
        for first, items in self._scored_blocks(samples, rows):
            bias = None if item_bias is None else item_bias[first : first + len(items)]
            part = ops.gallery_statistics(
                samples,
                items,
                kappa,
                top_k,
                item_bias=bias,
                sample_bias=sample_bias,
                precision=precision,
                first_index=first,
            )
            running = part if running is None else running.merge(part)
        if divided:
            return merge_over_ranks(running, self.world, len(samples), len(self), top_k, samples.device)
        assert running is not None
        return running


def has_unit_rows(rows: Tensor) -> bool:
    """Whether all rows are finite and of unit norm."""
    try:
        check_rows(rows, "rows")
    except ValueError:
        return False
    return True


def merge_over_ranks(
    mine: GalleryStatistics | None, world: World, queries: int, items: int, top_k: int, device: torch.device
) -> GalleryStatistics:
    """Returns the statistics of all items on every rank, from those of the rank's own share, which are None if it has
    no items: an all-reduce whose operation is the exact merge.

    Each rank merges its share of the queries and sends the result to the others, so each sends and receives
    O(queries top_k) bytes, whatever the number of items or ranks.
    """
    columns = min(top_k, items)
    width = 3 + 2 * columns
    packed = torch.zeros(queries, width, dtype=torch.float64, device=device) if mine is None else mine.pack(columns)
    parts = world.swap_rows(packed)
    shards = [GalleryStatistics.unpack(part, top_k) for part, share in zip(parts, world.shares(items)) if share]
    merged = functools.reduce(GalleryStatistics.merge, shards)
    top_score, top_index = merged.top_score[:, :columns], merged.top_index[:, :columns]  # without the padding
    merged = dataclasses.replace(merged, top_score=top_score, top_index=top_index)
    counts = [len(share) for share in world.shares(queries)]
    return GalleryStatistics.unpack(world.gather_rows(merged.pack(columns), counts), top_k)
