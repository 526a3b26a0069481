"""The evidence about held-out queries, from which a re-ranker's calibration is fitted.

The queries are searched in the gallery together with their own items, so that the gallery has its real size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from geoflow_fast.retrieval.evidence import Evidence, cosines, folds_of
from geoflow_fast.retrieval.hubs import MOST_ROWS, SCALES, Hubs
from geoflow_fast.retrieval.task import RetrievalTask, drawn_rows
from geoflow_fast.runtime.device import clock
from geoflow_fast.runtime.progress import Advance

if TYPE_CHECKING:
    from geoflow_fast.retrieval.rerank import BayesReranker

QUERIES_AT_ONCE = 64
SAME_ITEM = 1 - 1e-6
"""Cosine above which two embeddings are the same item; storage in float16 alone leaves about 1e-7."""


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

    def with_own(self, own: Shortlist) -> tuple[Shortlist, Tensor]:
        """The K nearest of these and of the query's own items, and which of them are own [Q, K]. For each own item one
        gallery item that equals it counts as that item; further ones are other items, which nothing tells apart."""
        same = torch.einsum("qkd,qmd->qkm", self.items, own.items) > SAME_ITEM
        same &= self.valid.unsqueeze(2) & own.valid.unsqueeze(1)
        counted = (same & (same.cumsum(1) <= same.sum(2, keepdim=True))).any(2)
        valid = torch.cat((self.valid & ~counted, own.valid), dim=1)
        nearness = torch.cat((self.nearness, own.nearness), dim=1)
        kept = nearness.masked_fill(~valid, -torch.inf).topk(self.valid.shape[1], dim=1).indices
        items = torch.cat((self.items, own.items), dim=1).take_along_dim(kept.unsqueeze(2), dim=1)
        number = torch.cat((self.number, own.number), dim=1).gather(1, kept)
        nearest = Shortlist(items, nearness.gather(1, kept), valid.gather(1, kept), number)
        return nearest, nearest.valid & (kept >= self.valid.shape[1])


@dataclass(frozen=True)
class KnownEvidence:
    """What is known about the held-out queries."""

    evidence: Evidence
    """All but the hub correction, whose scale is not chosen yet."""
    right: Tensor
    """[Q, K] bool, which items of the shortlists are the query's own."""
    hubs: dict[float, Tensor]
    """The hub correction [Q, K] by its scale; none where images and texts differ in width."""
    bank: Tensor
    costs: dict[str, float]
    """Seconds a query by rung of evidence."""


class HeldOut:
    """Held-out queries of a re-ranker. Without a `bank` the queries of the other folds are the typical queries of each,
    since a query would count against its own item."""

    def __init__(self, reranker: BayesReranker, task: RetrievalTask, bank: Tensor | None) -> None:
        self.reranker, self.task = reranker, task
        self.queries = task.queries.to(reranker.example)
        self.query_image, self.item_image = (x.to(self.queries.device) for x in (task.query_image, task.item_image))
        self.known_items = task.items.to(self.queries)
        self.fold = folds_of(self.query_image, reranker.seed)
        self.bank, self.bank_rows = bank, None
        if self.bank is None:
            rows = torch.from_numpy(drawn_rows(len(self.queries), MOST_ROWS, reranker.seed)).to(self.queries.device)
            self.bank, self.bank_rows = self.queries[rows], rows
        self.hubs = Hubs(self.bank, reranker.source)
        self.seconds: defaultdict[str, float] = defaultdict(float)

    # unchecked: calibrate calls it after its own checks
    def evidence(self, advance: Advance) -> KnownEvidence:
        """All evidence that the re-ranker's models can give about the queries."""
        index = self.reranker._search(self.queries, None)
        parts: defaultdict[str, list[Tensor]] = defaultdict(list)
        order = torch.argsort(self.fold, stable=True)  # items have one hub correction for all queries of a fold
        for rows in order.split(QUERIES_AT_ONCE):
            for name, values in self._features(rows, index[rows]).items():
                parts[name].append(values)
            advance(len(rows))
        position = torch.argsort(order)
        features = {name: torch.cat(values, dim=-2).index_select(-2, position) for name, values in parts.items()}
        valid, right, nearness = (features.pop(name) for name in ("valid", "right", "nearness"))
        hubs = dict(zip(SCALES, features.pop("hub", ())))
        assert self.bank is not None
        costs = {name: seconds / len(self.queries) for name, seconds in self.seconds.items()}
        return KnownEvidence(Evidence(features, nearness, valid), right, hubs, self.bank, costs)

    def _features(self, rows: Tensor, index: Tensor) -> dict[str, Tensor]:
        """All features of the shortlists of the queries `rows`, [..., Q, K], with "valid", "right" and "nearness"."""
        reranker, queries = self.reranker, self.queries[rows]
        number = index.clamp(min=0)
        items = reranker.gallery.take(number, queries.dtype)
        gallery = Shortlist(items, reranker.nearness(queries, items, number), index >= 0, index)
        near, right = gallery.with_own(self._own(rows, queries))
        features = {"valid": near.valid, "right": right, "nearness": near.nearness}
        if queries.shape[1] == near.items.shape[2]:
            with self._timed("cosine"):
                features["cosine"] = cosines(queries, near.items)
        if reranker.source is not None:
            with self._timed("head"):
                points = reranker.source.head.points(queries, reranker.direction)
                scores = reranker.source.scores(points, near.items)
                features["head"] = scores + reranker.source.learned_about(near.items)
        features |= self._hub_features(rows, near)
        if reranker.flow is not None:
            with self._timed("flow"):
                features["flow"] = reranker.log_densities(queries, near.items, near.number, near.valid)
        return features

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
        own = self.task.own[rows.cpu()]
        items = self.task.items[own.clamp(min=0)].to(queries)
        number = (len(self.reranker.gallery) + own.clamp(min=0)).to(queries.device)
        return Shortlist(items, self.reranker.nearness(queries, items, None), (own >= 0).to(queries.device), number)

    def _left_out(self, rows: Tensor, items: Tensor) -> Tensor | None:
        """Which queries of the bank do not count for which of the items [n, d], each of one of the queries `rows` [n]:
        [R, n].

        These are the queries of the same fold, and those of the item's own image: where the gallery holds the items of
        other held-out queries, the bank would count against them, which are all wrong here. If nothing else were left,
        as in a bank of two images, the latter count.
        """
        if self.bank_rows is None:
            return None
        same = self.fold[self.bank_rows].unsqueeze(1) == self.fold[rows]
        cosine, nearest = (items @ self.known_items.T).max(1)
        image = torch.where(cosine > SAME_ITEM, self.item_image[nearest], -1)
        left_out = same | (self.query_image[self.bank_rows].unsqueeze(1) == image)
        return torch.where(left_out.all(0), same, left_out)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = clock(self.queries.device)
        yield
        self.seconds[name] += clock(self.queries.device) - start
