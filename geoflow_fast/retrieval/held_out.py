"""The evidence about held-out queries, from which a re-ranker's calibration is fitted.

The queries are searched in the gallery together with their own items, so that the gallery has its real size, and in the
gallery without them, as an example of queries for which nothing is right.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from geoflow_fast.retrieval.copies import SAME_ITEM, are_copies
from geoflow_fast.retrieval.evidence import Evidence, cosines, folds_of
from geoflow_fast.retrieval.hubs import MOST_ROWS, SCALES, Hubs
from geoflow_fast.retrieval.item_bank import ItemBank
from geoflow_fast.retrieval.task import RetrievalTask, drawn_rows
from geoflow_fast.runtime.device import clock, rows_at_once
from geoflow_fast.runtime.progress import Advance

if TYPE_CHECKING:
    from geoflow_fast.retrieval.rerank import BayesReranker

QUERIES_AT_ONCE = 64
NOT_EVIDENCE = ("valid", "right", "absent", "nearness", "number")


@dataclass(frozen=True)
class KnownItems:
    """Queries with items that are known to be right for them."""

    queries: Tensor
    """[Q, d]."""
    items: Tensor
    """[M, d'], every item that is right for some query."""
    own: Tensor
    """[Q, m] int64, the right items of each query, padded with -1."""
    group: Tensor
    """[Q] int64; queries of one group are held out together."""

    @classmethod
    def of_task(cls, task: RetrievalTask) -> KnownItems:
        """Those of a task: an item is right for the queries of its image."""
        return cls(task.queries, task.items, task.own, task.query_image)

    def __len__(self) -> int:
        return len(self.queries)


@dataclass(frozen=True)
class Shortlist:
    """The items of the shortlists of Q queries, K each."""

    items: Tensor
    """[Q, K, d], their embeddings."""
    nearness: Tensor
    """[Q, K] float64, by which shortlists are chosen."""
    valid: Tensor
    """[Q, K] bool, false where a shortlist is shorter than K."""
    number: Tensor
    """[Q, K] int64; equal numbers stand for the same item."""

    def with_own(self, own: Shortlist) -> SearchedTwice:
        """These items and the query's own ones. Copies of an own item are that item."""
        absent = self.valid & ~(are_copies(self.items, own.items) & own.valid.unsqueeze(1)).any(2)
        again = are_copies(own.items, own.items) & own.valid.unsqueeze(1)
        own_valid = own.valid & ~again.tril(-1).any(2)
        width, length = own.valid.shape[1], self.valid.shape[1]
        there = torch.cat((absent, own_valid), dim=1)
        nearness = torch.cat((self.nearness, own.nearness), dim=1)
        nearest = nearness.masked_fill(~there, -torch.inf).topk(length, dim=1).indices
        present = torch.zeros_like(there).scatter_(1, nearest, True) & there
        items, number = torch.cat((self.items, own.items), dim=1), torch.cat((self.number, own.number), dim=1)
        is_own = torch.arange(length + width, device=there.device) >= length
        return SearchedTwice(
            Shortlist(items, nearness, present, number),
            torch.nn.functional.pad(absent, (0, width)),
            present & is_own,
            own_valid.sum(1),
        )


@dataclass(frozen=True)
class SearchedTwice:
    """Items of a query's shortlist in the gallery with its own items and in the gallery without them."""

    near: Shortlist
    """With the own items: valid are the nearest of all."""
    absent: Tensor
    """[Q, K] bool, the shortlist without the own items."""
    right: Tensor
    """[Q, K] bool, which items of the shortlist with them are own."""
    right_count: Tensor
    """[Q], how many different own items there are."""


@dataclass(frozen=True)
class KnownEvidence:
    """What is known about the held-out queries."""

    evidence: Evidence
    """All but the hub correction, whose scale is not chosen yet."""
    right: Tensor
    """[Q, K] bool, which items of the shortlists are the query's own."""
    right_count: Tensor
    """[Q], how many different own items a query has."""
    absent: Tensor
    """[Q, K] bool, the shortlists in the gallery without the own items."""
    number: Tensor
    """[Q, K] int64, numbers of the items: rows of the gallery, then those of the known items."""
    hubs: dict[float, Tensor]
    """The hub correction [Q, K] by its scale; none where images and texts differ in width."""
    bank: Tensor


class HeldOut:
    """Held-out queries of a re-ranker. Without a `bank` the queries of the other folds are the typical queries of each,
    since a query would count against its own item."""

    def __init__(self, reranker: BayesReranker, known: KnownItems, bank: Tensor | None) -> None:
        self.reranker = reranker
        self.queries = known.queries.to(reranker.example)
        self.own, self.group = known.own.to(self.queries.device), known.group.to(self.queries.device)
        self.known_items = known.items.to(self.queries)
        self.fold = folds_of(self.group, reranker.seed)
        self.bank, self.bank_rows = bank, None
        if self.bank is None:
            rows = torch.from_numpy(drawn_rows(len(self.queries), MOST_ROWS, reranker.seed)).to(self.queries.device)
            self.bank, self.bank_rows = self.queries[rows], rows
        self.hubs = Hubs(self.bank, reranker.source)
        self.costs: defaultdict[str, float] = defaultdict(float)
        """Seconds a query by rung of evidence."""

    def evidence(self, advance: Advance) -> KnownEvidence:
        """All evidence about the queries but the flow's."""
        index = self.reranker._shortlists(self.queries, self.reranker.shortlist)
        parts: defaultdict[str, list[Tensor]] = defaultdict(list)
        order = torch.argsort(self.fold, stable=True)  # items have one hub correction for all queries of a fold
        row_bytes = 3 * index.shape[1] * self.known_items.shape[1] * self.queries.element_size()
        for rows in order.split(rows_at_once(order.device, row_bytes, QUERIES_AT_ONCE)):
            for name, values in self._features(rows, index[rows]).items():
                parts[name].append(values)
            advance(len(rows))
        position = torch.argsort(order)
        features = {name: torch.cat(values, dim=-2).index_select(-2, position) for name, values in parts.items()}
        valid, right, absent, nearness, number = (features.pop(name) for name in NOT_EVIDENCE)
        right_count = features.pop("right_count").squeeze(1)
        hubs = dict(zip(SCALES, features.pop("hub", ())))
        assert self.bank is not None
        known = Evidence(features, nearness, valid)
        return KnownEvidence(known, right, right_count, absent, number, hubs, self.bank)

    def _features(self, rows: Tensor, index: Tensor) -> dict[str, Tensor]:
        """All features of the shortlists of the queries `rows`, [..., Q, K], with "valid", "right" and "nearness"."""
        reranker, queries = self.reranker, self.queries[rows]
        number = index.clamp(min=0)
        items = reranker.gallery.take(number, queries.dtype)
        gallery = Shortlist(items, reranker.nearness(queries, items, number), index >= 0, index)
        both = gallery.with_own(self._own(rows, queries))
        near = both.near
        features = {"valid": near.valid, "right": both.right, "absent": both.absent, "nearness": near.nearness}
        features |= {"number": near.number, "right_count": both.right_count.unsqueeze(1)}
        if queries.shape[1] == near.items.shape[2]:
            with self._timed("cosine"):
                features["cosine"] = cosines(queries, near.items)
        if reranker.source is not None:
            with self._timed("head"):
                points = reranker.source.head.points(queries, reranker.direction)
                scores = reranker.source.scores(points, near.items)
                features["head"] = scores + reranker.source.learned_about(near.items)
        return features | self._hub_features(rows, near)

    def level(self, bank: ItemBank, weights: Mapping[str, float], hub_scale: float) -> Tensor:
        """The level [Q] of the queries' scores over a bank of items that begins with the known ones: the own items of a
        query do not count for it."""
        left_out = torch.zeros(len(self.queries), len(bank.items) + 1, dtype=torch.bool, device=self.queries.device)
        left_out.scatter_(1, self.own.masked_fill(self.own < 0, len(bank.items)), True)
        return bank.level(self.queries, weights, hub_scale, left_out[:, :-1])

    def log_densities(self, number: Tensor, asked: Tensor, advance: Advance) -> Tensor:
        """log p(query | item) [Q, K] of the items with these numbers [Q, K] that are `asked` [Q, K] about."""
        with self._timed("flow"):
            return self.reranker.asked_densities(self.queries, number, asked, self._items, advance)

    def _items(self, number: Tensor) -> Tensor:
        """The items [..., d] with these numbers [...]: rows of the gallery, then known items."""
        gallery = self.reranker.gallery
        is_known = (number >= len(gallery)).unsqueeze(-1)
        stored = gallery.take(number.clamp(0, len(gallery) - 1), self.queries.dtype)
        return torch.where(is_known, self.known_items[(number - len(gallery)).clamp(min=0)], stored)

    def _hub_features(self, rows: Tensor, near: Shortlist) -> dict[str, Tensor]:
        """The hub corrections of the shortlists, each computed once for the queries of a fold that share an item."""
        span = int(near.number.max()) + 2
        fold = self.fold[rows] if self.bank_rows is not None else torch.zeros_like(rows)
        keys, member = torch.unique(fold.unsqueeze(1) * span + near.number + 1, return_inverse=True)
        cells = torch.arange(member.numel(), device=member.device)
        cell = torch.zeros_like(keys).scatter_(0, member.flatten(), cells)  # one cell [Q K] of each
        items, queries = near.items.flatten(0, 1)[cell], rows[cell // near.number.shape[1]]
        numbers = self.hubs.of_items(items, self._left_out(queries, items), SCALES)
        return {name: values[..., member] for name, values in numbers.items()}

    def _own(self, rows: Tensor, queries: Tensor) -> Shortlist:
        """The own items of the queries, numbered after those of the gallery."""
        own = self.own[rows]
        number = len(self.reranker.gallery) + own.clamp(min=0)
        items = self.known_items[own.clamp(min=0)]
        return Shortlist(items, self.reranker.nearness(queries, items, None), own >= 0, number)

    def _left_out(self, rows: Tensor, items: Tensor) -> Tensor | None:
        """Which queries of the bank do not count for which of the items [n, d], each of one of the queries `rows` [n]:
        [R, n].

        These are the queries of the same fold, and those that the item is right for: where the gallery holds the items
        of other held-out queries, the bank would count against them, which are all wrong here. If nothing else were
        left, as in a bank of two images, the latter count.
        """
        if self.bank_rows is None:
            return None
        same = self.fold[self.bank_rows].unsqueeze(1) == self.fold[rows]
        cosine, nearest = (items @ self.known_items.T).max(1)
        left_out = same | (self._is_right[:, nearest] & (cosine > SAME_ITEM * torch.linalg.vector_norm(items, dim=1)))
        return torch.where(left_out.all(0), same, left_out)

    @functools.cached_property
    def _is_right(self) -> Tensor:
        """Which known items are right for which queries of the bank: [R, M] bool."""
        assert self.bank_rows is not None
        own = self.own[self.bank_rows]
        member = torch.zeros(len(own), len(self.known_items) + 1, dtype=torch.bool, device=own.device)
        return member.scatter_(1, own.masked_fill(own < 0, len(self.known_items)), True)[:, :-1]

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = clock(self.queries.device)
        yield
        self.costs[name] += (clock(self.queries.device) - start) / len(self.queries)
