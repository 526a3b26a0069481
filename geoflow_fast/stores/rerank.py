"""The re-ranker over a vector store: the store searches, and the vectors of its hits are evidence."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from geoflow_fast.data.embeddings import Embeddings
from geoflow_fast.data.fingerprint import Fingerprint
from geoflow_fast.data.pairs import EmbeddingPairs
from geoflow_fast.data.rows import Array
from geoflow_fast.decisions.encoders import check_encoder
from geoflow_fast.flow.model import GeoFlow
from geoflow_fast.retrieval.calibration import Calibration
from geoflow_fast.retrieval.gallery import Gallery
from geoflow_fast.retrieval.rerank import (
    FLOW_ITEMS,
    LEAST_DISTINCT,
    MORE_HITS,
    SHORTLIST,
    BayesReranker,
)
from geoflow_fast.retrieval.task import RetrievalTask
from geoflow_fast.runtime import checks
from geoflow_fast.runtime.summary import Summarised
from geoflow_fast.stores.protocol import MOST_HITS, CheckedStore, CustomStore, Hits, VectorStore

QUERIES_AT_ONCE = 512
"""Queries whose hits are in memory at a time."""


@dataclass(frozen=True, repr=False)
class RerankedHits(Summarised):
    """The posterior over the hits of Q queries, K each, as arrays. `gf.Reranked` explains the probabilities."""

    ids: NDArray[np.object_]
    """[Q, K], most probable first; None where there are fewer than K different hits."""
    prob: NDArray[np.float64]
    """[Q, K], the probability that each hit is the one meant."""
    relevance: NDArray[np.float64]
    """[Q, K], the probability that each hit is right; where several are, it does not sum to one."""
    answer: NDArray[np.object_]
    """[Q], the id of the hit with the largest cosine, which the store gives as its answer."""
    p_answer: NDArray[np.float64]
    """[Q], the probability that the answer is right."""
    p_outside: NDArray[np.float64]
    """[Q], the probability that the right item is in the store, but not among the hits."""
    p_no_match: NDArray[np.float64]
    """[Q], the probability that nothing in the store is right, at the `no_match_share` of the call."""
    entropy: NDArray[np.float64]
    """[Q], in nats, over the hits and "outside"."""
    calibrated: bool
    """Whether the weights were fitted on held-out pairs."""


ARRAYS = tuple(field.name for field in dataclasses.fields(RerankedHits) if field.name != "calibrated")


@dataclass(frozen=True)
class Neighbours:
    """What a store knows about the neighbourhood of some queries."""

    reranker: BayesReranker
    """Over the vectors of all hits."""
    queries: Tensor
    """[q, d], those with a hit."""
    index: Tensor
    """[q, K] int64, the row numbers of their hits in the re-ranker's gallery, padded with -1."""
    ids: NDArray[np.object_]
    """[n + 1], the ids of these rows, and None."""
    has_hits: NDArray[np.bool_]
    """[Q], which of all queries have any."""


class StoreReranker:
    """`gf.BayesReranker` for items that live in a vector store: `reranker(queries)` returns `RerankedHits`.

    The `store` finds the `shortlist` items of largest cosine of each query, and their vectors are fetched from it; no
    other vectors are read, not even to calibrate. Without a `flow` and a `head` the evidence is the cosine and its
    correction for hubs. `settings` are those of `gf.BayesReranker`, such as `head`, `bank`, `n_steps` and `seed`.

    Where the store's search is exact, probabilities are those of a `BayesReranker` over all of its vectors: neither the
    calibration nor a posterior depends on items beyond the shortlists. A query without any hit has `p_no_match` 1.

    `encoder`: the one that made the vectors of the store, by its name or as `gf.Embeddings.encoder` has it. Models,
    held-out pairs, calibrations and queries of another one are then refused, and a warning says where it is not known.
    """

    def __init__(
        self,
        store: VectorStore,
        flow: GeoFlow | None = None,
        direction: str = "t2i",
        shortlist: int | tuple[int, int] = (SHORTLIST, FLOW_ITEMS),
        *,
        encoder: Fingerprint | str | None = None,
        **settings: Any,
    ) -> None:
        if not isinstance(store, VectorStore):
            raise TypeError(f"store must have search and fetch, got {type(store).__name__}")
        if settings.get("shortlist_by", "cosine") != "cosine":
            raise ValueError("a store chooses shortlists by cosines: leave out shortlist_by=")
        self.store = checked(store)
        if not self.store.can_fetch:
            raise ValueError(f"the vectors of {self.store.name} are evidence, but they cannot be fetched")
        length = shortlist[0] if isinstance(shortlist, tuple) and shortlist else shortlist
        checks.integer(length, "shortlist", 1, MOST_HITS)
        self.encoder = Fingerprint.named(encoder)
        # Galleries are made of what a search brings. Between searches there is one with as many rows as a shortlist.
        self._nothing = self.gallery_of(
            torch.eye(1, self.store.dim, dtype=torch.float32, device="cpu").expand(length, -1)
        )
        self.reranker = BayesReranker(flow, self._nothing, direction, shortlist, **settings)
        if self.encoder is None:
            _compare("the model", self.reranker.encoders[1], None, "the vectors of the store", stacklevel=4)

    def __call__(
        self,
        queries: Tensor | Array | Embeddings,
        *,
        no_match_share: float = 0.0,
        encoder: Fingerprint | str | None = None,
    ) -> RerankedHits:
        """The posterior of each of the `queries` [Q, d], unit rows, over its hits. `no_match_share`: the share of
        queries for which nothing in the store is right, which `p_no_match` begins with. `encoder`: the one that made
        the queries, by default that of `gf.Embeddings`, where it is known."""
        if isinstance(queries, Embeddings):
            encoder, queries = encoder or queries.encoder, queries.tensor()
        self.check_queries(encoder, stacklevel=5)
        rows = checks.array(queries, "queries")
        checks.number(no_match_share, "no_match_share", 0, 1)
        firsts = range(0, max(1, len(rows) if rows.ndim else 0), QUERIES_AT_ONCE)
        parts = [self._answered(rows[first : first + QUERIES_AT_ONCE], no_match_share) for first in firsts]
        if not parts[0].calibrated:
            warnings.warn(
                f"StoreReranker is uncalibrated: {self.reranker.plain_weights}. Call calibrate with held-out pairs",
                stacklevel=2,
            )
        whole = {name: np.concatenate([getattr(part, name) for part in parts]) for name in ARRAYS}
        return RerankedHits(**whole, calibrated=parts[0].calibrated)

    def _answered(self, queries: NDArray[Any], no_match_share: float) -> RerankedHits:
        near = self._searched(queries)
        ids = np.full((len(near.has_hits), self.reranker.shortlist), None, dtype=object)
        answer = np.full(len(ids), None, dtype=object)
        prob, relevance = np.zeros(ids.shape), np.zeros(ids.shape)
        numbers = {name: np.zeros(len(ids)) for name in ("p_answer", "p_outside", "p_no_match", "entropy")}
        numbers["p_no_match"][~near.has_hits] = 1.0
        if near.has_hits.any():
            posterior = near.reranker.rerank(near.queries, near.index, no_match_share=no_match_share)
            rows = near.has_hits.nonzero()[0]
            ids[rows], answer[rows] = near.ids[posterior.index.cpu()], near.ids[posterior.answer.cpu()]
            prob[rows], relevance[rows] = posterior.prob.double().cpu(), posterior.relevance.double().cpu()
            for name, values in numbers.items():
                values[rows] = getattr(posterior, name).double().cpu()
        return RerankedHits(ids, prob, relevance, answer, **numbers, calibrated=self.reranker.calibration is not None)

    def gallery_of(self, vectors: Tensor) -> Gallery:
        """Vectors of the store as a gallery, by the encoder that made them."""
        gallery = Gallery(vectors)
        gallery.encoder = self.encoder
        return gallery

    def check_queries(self, encoder: Fingerprint | str | None, *, stacklevel: int = 4) -> None:
        """Refuses queries of another encoder than the models, the calibration or the store, and warns if only one of
        the two is known. Without any name nothing is asked for."""
        if self.encoder is not None or encoder is not None:
            own = self.reranker.encoders[0] or self.encoder  # where both sides have their own, the pairs have told
            _compare("this StoreReranker", own, Fingerprint.named(encoder), "these queries", stacklevel=stacklevel)

    def calibrate(
        self,
        pairs: EmbeddingPairs,
        *,
        max_queries: int = 1000,
        progress: bool | None = None,
        encoder: Fingerprint | str | None = None,
    ) -> Calibration:
        """Fits the weights on held-out `pairs`, as `BayesReranker.calibrate` does: their queries are searched in the
        store, with their own items added. `encoder`: the one that made the pairs, if they do not know it."""
        direction = self.reranker.direction
        task = RetrievalTask.of(pairs, direction, max_queries=max_queries, seed=self.reranker.seed, all_items=False)
        pairs = _told(pairs, Fingerprint.named(encoder))
        _compare("this StoreReranker", self.encoder, direction.items(*pairs.encoders), "these pairs", stacklevel=4)
        fitted = self._searched(task.queries.numpy()).reranker
        calibration = fitted.calibrate(pairs, max_queries=max_queries, progress=progress)
        self.reranker = fitted.with_gallery(self._nothing)
        return calibration

    def save_calibration(self, path: str | Path) -> Path:
        """Writes the calibration to a JSON file, or into a folder, and returns the file's path."""
        return self.reranker.save_calibration(path)

    def load_calibration(self, path: str | Path) -> Calibration:
        """Loads and uses a calibration of `save_calibration`, for the same models, direction, shortlist and encoder."""
        calibration = self.reranker.load_calibration(path)
        _compare("the calibration", self.reranker.encoders[1], self.encoder, "the vectors of the store", stacklevel=4)
        return calibration

    def _searched(self, queries: NDArray[Any]) -> Neighbours:
        """What the store finds for the queries [Q, d]. Where copies of an item take the place of others, more hits are
        asked for, a few times."""
        length = asked = self.reranker.shortlist
        for attempts_left in reversed(range(1 + MORE_HITS)):
            hits = self.store.search(queries, asked)
            near = self._neighbours(queries, hits)
            different = (near.index >= 0).sum(1)
            is_all = torch.tensor([row[-1] is None for row in hits.ids[near.has_hits].tolist()], dtype=torch.bool)
            enough = is_all | (different >= LEAST_DISTINCT * length).cpu()
            if not attempts_left or asked == MOST_HITS or bool(enough.all()):
                break
            asked = min(2 * asked, MOST_HITS)
        order = (near.index < 0).byte().argsort(dim=1, stable=True)[:, :length]
        return dataclasses.replace(near, index=near.index.gather(1, order))

    def _neighbours(self, queries: NDArray[Any], hits: Hits) -> Neighbours:
        """The hits with their vectors, and -1 instead of copies."""
        is_hit = np.array([[key is not None for key in row] for row in hits.ids.tolist()], bool).reshape(hits.ids.shape)
        has_hits = is_hit[:, 0]
        keys = sorted(set(hits.ids[is_hit].tolist()), key=_sort_key)
        number = {key: row for row, key in enumerate(keys)} | {None: -1}
        numbers = [[number[key] for key in row] for row in hits.ids[has_hits].tolist()]
        index = torch.tensor(numbers, dtype=torch.int64, device="cpu").reshape(-1, hits.ids.shape[1])
        ids = np.array([*keys, None], dtype=object)
        rows = torch.from_numpy(queries.astype(np.float32)[has_hits])
        if not keys:
            return Neighbours(self.reranker, rows, index, ids, has_hits)
        reranker = self.reranker.with_gallery(self.gallery_of(torch.from_numpy(self.store.fetch(keys))))
        device = self.reranker.example.device
        return Neighbours(reranker, rows, reranker.pooled(rows.to(device), index.to(device)), ids, has_hits)


def checked(store: VectorStore) -> CheckedStore:
    """The store itself if it checks its answers, else one that does."""
    if isinstance(store, CheckedStore):
        return store
    dim = checks.integer(getattr(store, "dim", None), f"dim of the {type(store).__name__}, the width of vectors,", 1)

    def search(vectors: NDArray[np.float32], k: int) -> tuple[Any, Any]:
        scores, ids = store.search(vectors, k)
        counts = [sum(key is not None for key in row) for row in ids]
        return [row[:n] for row, n in zip(scores, counts)], [row[:n] for row, n in zip(ids, counts)]

    def fetch(ids: list[Any]) -> dict[Any, Any]:
        return dict(zip(ids, store.fetch(ids)))

    return CustomStore(search, fetch, dim, name=f"the {type(store).__name__}")


def _compare(what: str, own: Fingerprint | None, given: Fingerprint | None, of: str, *, stacklevel: int) -> None:
    """As `check_encoder` does, for encoders of which more than a name may be known."""
    if own is None or given is None or not own.is_same(given):
        one, other = (None if each is None else str(each) for each in (own, given))
        check_encoder(what, one, other, "embed both with one encoder", of=of, stacklevel=stacklevel)


def _told(pairs: EmbeddingPairs, encoder: Fingerprint | None) -> EmbeddingPairs:
    """The pairs with this encoder for the sides that do not know theirs."""
    twin = copy.copy(pairs)
    twin.image, twin.text = copy.copy(pairs.image), copy.copy(pairs.text)
    for side in (twin.image, twin.text):
        side.encoder = side.encoder or encoder
    return twin


def _sort_key(key: Any) -> tuple[str, Any]:
    """Ids of one type in their own order: of copies the first one stands for all, whatever else is searched for."""
    return type(key).__name__, key
