"""Retrieval tasks with known answers: queries, the items they search, and which of these are right."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from geoflow_fast.data.ids import Ids
from geoflow_fast.data.pairs import EmbeddingPairs
from geoflow_fast.data.qrels import Qrels
from geoflow_fast.data.rows import Array, Index, Rows
from geoflow_fast.directions import Direction
from geoflow_fast.geometry import check_rows
from geoflow_fast.runtime import checks


@dataclass(frozen=True)
class RetrievalTask:
    """A retrieval task: queries, and a gallery of items. `of` builds it from pairs, and `from_qrels` from judgements.

    An item of pairs is right for a query when both are of one image: image-to-text search is right when it returns any
    of the image's own texts.
    """

    direction: Direction
    """"t2i": texts search images; "i2t": images search texts."""
    queries: Tensor
    """[Q, d]: every text, or every image once."""
    items: Tensor
    """[N, d']: every image once, or every text."""
    query_image: Tensor
    """[Q] int64, number of the image that each query belongs to."""
    item_image: Tensor
    """[N] int64, number of the image that each item belongs to."""
    query_row: Index
    """[Q], row of each query in the stored embeddings."""
    item_row: Index
    """[N], row of each item in the stored embeddings."""
    folder: Path | None = None
    """Folder that the pairs were opened from, or None."""
    judged: Tensor | None = None
    """[Q, m] int64, the items that judgements call right for each query, padded with -1; None for pairs."""
    query_ids: Ids | None = None
    """[Q], what files of results call the queries; None for their numbers in this task."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "direction", Direction.of(self.direction, conditional=True))
        if not isinstance(self.folder, (Path, type(None))):
            raise TypeError(f"folder must be a path or None, got {type(self.folder).__name__}")
        for side, rows, image, number in (
            ("queries", self.queries, self.query_image, self.query_row),
            ("items", self.items, self.item_image, self.item_row),
        ):
            check_rows(rows, side, unit=False)
            checks.dense(image, f"the images of {side}", has_values=True)
            if rows.dim() != 2 or image.shape != rows.shape[:1] or image.dtype != torch.int64:
                raise ValueError(
                    f"{side} must be [n, d] and their images int64 [n], got {tuple(rows.shape)} and {image.dtype} "
                    f"{tuple(image.shape)}"
                )
            stored = checks.array(number, f"the rows of {side}")
            if stored.shape != tuple(image.shape) or stored.dtype.kind not in "iu":
                raise ValueError(f"the rows of {side} must be numbers [{len(rows)}], got {stored.dtype} {stored.shape}")

    @classmethod
    def of(
        cls,
        pairs: EmbeddingPairs,
        direction: str,
        *,
        max_queries: int | None = None,
        seed: int = 0,
        all_items: bool = True,
        any_widths: bool = False,
    ) -> RetrievalTask:
        """The task with all queries of the pairs, or with `max_queries` of them drawn by `seed`, in their original
        order. Its items are all those of the pairs, or without `all_items` only those that are right for a query.
        Images and texts must have one width, as plain search needs, unless `any_widths` will do."""
        if not isinstance(pairs, EmbeddingPairs):
            raise TypeError(f"pairs must be EmbeddingPairs, got {type(pairs).__name__}")
        direction = Direction.of(direction, conditional=True)
        if pairs.image_dim != pairs.text_dim and not any_widths:
            widths = f"{pairs.image_dim} and {pairs.text_dim}"
            raise ValueError(f"plain search needs images and texts of one width, got {widths}")
        if max_queries is not None:
            checks.integer(max_queries, "max_queries", 1)
        checks.integer(seed, "seed")
        if len(pairs) == 0:
            raise ValueError("pairs is empty: there is no query to search for")
        _, first, image = np.unique(pairs.group, return_index=True, return_inverse=True)
        sides = (pairs.image_row[first], np.arange(len(first))), (pairs.text_row, image)
        (query_row, query_image), (item_row, item_image) = direction.queries(*sides), direction.items(*sides)
        if max_queries is not None:
            chosen = drawn_rows(len(query_row), max_queries, seed)
            query_row, query_image = query_row[chosen], query_image[chosen]
        if not all_items:
            right = np.isin(item_image, query_image)
            item_row, item_image = item_row[right], item_image[right]
        return cls(
            direction,
            torch.from_numpy(direction.queries(pairs.image, pairs.text)[query_row]),
            torch.from_numpy(direction.items(pairs.image, pairs.text)[item_row]),
            torch.from_numpy(query_image),
            torch.from_numpy(item_image),
            query_row,
            item_row,
            pairs.folder,
        )

    @classmethod
    def from_qrels(
        cls,
        queries: Tensor | Array,
        items: Tensor | Array,
        qrels: Qrels,
        direction: str,
        *,
        least_grade: float | None = None,
        max_queries: int | None = None,
        seed: int = 0,
    ) -> RetrievalTask:
        """The task in which the unit rows `queries` [Q, d] search `items` [N, d], and judgements say what is right:
        items whose grade is above 0 or, if it is given, at least `least_grade`. Queries without a right item are left
        out; of the others at most `max_queries` are drawn by `seed`. Those that share their best item count as queries
        of one image, that is, as dependent."""
        direction = Direction.of(direction, conditional=True)
        if not isinstance(qrels, Qrels):
            raise TypeError(f"qrels must be Qrels, got {type(qrels).__name__}")
        if max_queries is not None:
            checks.integer(max_queries, "max_queries", 1)
        asked, searched = (Rows([checks.array(x, name)], name) for x, name in ((queries, "queries"), (items, "items")))
        if asked.dim != searched.dim:
            raise ValueError(f"plain search needs one width, got queries of {asked.dim} and items of {searched.dim}")
        query_row, right = judged_items(qrels, len(asked), len(searched), least_grade)
        for rows in (asked, searched):
            rows.check(normalize=False)
        chosen = drawn_rows(len(query_row), len(query_row) if max_queries is None else max_queries, seed)
        query_row, right, item_row = query_row[chosen], right[chosen], np.arange(len(searched))
        return cls(
            direction,
            torch.from_numpy(asked[query_row]),
            torch.from_numpy(searched[item_row]),
            torch.from_numpy(right[:, 0].copy()),
            torch.from_numpy(item_row),
            query_row,
            item_row,
            judged=torch.from_numpy(right),
            query_ids=Ids(query_row),
        )

    def __len__(self) -> int:
        return len(self.queries)

    def is_right(self, index: Tensor, rows: slice | Tensor = slice(None)) -> Tensor:
        """Whether the items `index` [Q, ...] are right for the queries `rows`: bool [Q, ...]. -1 stands for no item."""
        self._check_index(index, rows, least=-1)
        index, shape = index.cpu(), (-1, *[1] * (index.dim() - 1))
        if self.judged is None:
            right = self.item_image[index.clamp(min=0)] == self.query_image[rows].reshape(shape)
        else:
            number = torch.arange(len(self), device="cpu")[rows].reshape(shape)
            key = number * len(self.items) + index
            nearest = torch.searchsorted(self._judged_keys, key).clamp(max=len(self._judged_keys) - 1)
            right = self._judged_keys[nearest] == key
        return right & (index >= 0)

    @functools.cached_property
    def _judged_keys(self) -> Tensor:
        """query * N + item of all right items, ascending."""
        key = torch.arange(len(self), device="cpu").unsqueeze(1) * len(self.items) + self.own
        return key[self.own >= 0].sort().values

    @functools.cached_property
    def own(self) -> Tensor:
        """The right items of each query, int64 [Q, m], padded with -1."""
        if self.judged is not None:
            return self.judged
        order = torch.argsort(self.item_image, stable=True)
        ranked = self.item_image[order].contiguous()
        first, last = (torch.searchsorted(ranked, self.query_image, right=right) for right in (False, True))
        position = torch.arange(int((last - first).max()), device="cpu") + first.unsqueeze(1)
        return torch.where(position < last.unsqueeze(1), order[position.clamp(max=len(order) - 1)], -1)

    def pairs_with(self, index: Tensor, rows: slice | Tensor = slice(None)) -> tuple[Tensor, Tensor]:
        """Embeddings (image, text) of the queries `rows`, each paired with its item in `index` [Q]."""
        self._check_index(index, rows)
        if index.dim() != 1:
            raise ValueError(f"index must be one item per query, [Q], got shape {tuple(index.shape)}")
        return self.direction.pair(self.queries[rows], self.items[index])

    def _check_index(self, index: Tensor, rows: slice | Tensor, least: int = 0) -> None:
        if isinstance(rows, Tensor):
            checks.indices(rows, "rows", len(self))
        elif not isinstance(rows, slice):
            raise TypeError(f"rows must be a slice of the queries or their numbers, got {rows!r}")
        checks.indices(index, "index", len(self.items), least)
        count = len(self.query_image[rows])
        if not index.dim() or len(index) != count:
            raise ValueError(f"index must be [{count}, ...], a row for each of the queries, got {tuple(index.shape)}")


def pair_task(pairs: EmbeddingPairs, direction: Direction, max_queries: int, seed: int) -> RetrievalTask:
    """The task in which every pair asks for its own item alone, even if an image has several texts: each item counts
    as an image of its own.

    At most `max_queries` of the pairs, drawn by `seed`, are queries. The items are those of the pairs, each stored
    row once.
    """
    if len(pairs) < 1 or max_queries < 1:
        raise ValueError(f"{len(pairs)} pairs and max_queries={max_queries} leave no query to fit on")
    asking = pairs.subset(drawn_rows(len(pairs), max_queries, seed))
    rows = asking.image_row, asking.text_row
    query_row, item_row = direction.queries(*rows), np.unique(direction.items(pairs.image_row, pairs.text_row))
    return RetrievalTask(
        direction,
        torch.from_numpy(direction.queries(pairs.image, pairs.text)[query_row]),
        torch.from_numpy(direction.items(pairs.image, pairs.text)[item_row]),
        torch.from_numpy(np.searchsorted(item_row, direction.items(*rows))),
        torch.arange(len(item_row), device="cpu"),
        query_row,
        item_row,
        pairs.folder,
    )


def judged_items(qrels: Qrels, queries: int, items: int, least_grade: float | None) -> tuple[Index, Index]:
    """The queries for which an item has a grade above 0, or at least `least_grade`, ascending [Q], and these items
    [Q, m], best grades first, padded with -1."""
    kept = qrels.relevant(least_grade)
    for name, numbers, count in (("query", kept.query, queries), ("item", kept.item, items)):
        if len(numbers) and int(numbers.max()) >= count:
            raise ValueError(f"the judgements name {name} {int(numbers.max())}, but there are {count} rows")
    if not len(kept):
        wanted = "a grade above 0" if least_grade is None else f"at least the grade {least_grade:g}"
        raise ValueError(f"no judgement has {wanted}")
    asking, first, counts = np.unique(kept.query, return_index=True, return_counts=True)
    column = np.arange(counts.max())
    listed = kept.item[(first[:, None] + column).clip(max=len(kept) - 1)]
    return asking, np.where(column < counts[:, None], listed, -1)


def typical_queries(pairs: EmbeddingPairs, direction: Direction, count: int, seed: int) -> Tensor:
    """Queries [R, d] of at most `count` pairs, drawn by `seed`, in their original order."""
    return direction.queries(*pairs[drawn_rows(len(pairs), count, seed)])


def drawn_rows(rows: int, count: int, seed: int) -> Index:
    """At most `count` of the numbers below `rows`, drawn by `seed`, in ascending order."""
    return np.sort(np.random.default_rng(checks.integer(seed, "seed")).permutation(rows)[:count])
