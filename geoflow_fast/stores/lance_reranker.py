"""Calibrated probabilities as a re-ranker of LanceDB's own kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from geoflow_fast.decisions.encoders import check_encoder
from geoflow_fast.decisions.rules import Rule
from geoflow_fast.decisions.trust import Trust
from geoflow_fast.runtime import checks, extras
from geoflow_fast.stores.metrics import metric_of
from geoflow_fast.stores.protocol import checked_list, filled
from geoflow_fast.stores.rerank import StoreReranker

try:
    from lancedb.rerankers import Reranker
except ModuleNotFoundError:  # the class can be looked at without LanceDB, but none can be made
    Reranker = object

RELEVANCE, NO_MATCH = "_relevance_score", "_p_no_match"
Floats = NDArray[np.float64]


class LanceReranker(Reranker):
    """Gives each hit of a LanceDB search the probability that it is right: `table.search(v).rerank(reranker, "words")`.

    `model`: a fitted `gf.Trust`, which looks at the distances of a vector search, or a `StoreReranker`, which looks at
    the vectors of any search, hybrid ones too. The latter needs `encode`, which turns the words of a query into its
    vector [d], and results that contain the vector `column`. `metric` is the `distance_type` of the search; LanceDB's
    own default is "l2".

    `_relevance_score` is the probability. With a `no_match_share`, the share of queries for which nothing is right,
    `_p_no_match` is the probability that this is one of them. A `rule` of the same trust keeps only what it shows:
    a table without rows says that nothing here is sure enough. Lists must be as long as those that the trust was
    fitted on; with `short_lists` they may be shorter, as under a filter.

    `encoder` names the encoder that made the vectors of the table and of the queries: a model or a rule of another one
    is refused, and if only one of them names its encoder, a warning is given.
    """

    def __init__(
        self,
        model: Trust | StoreReranker,
        metric: str = "l2",
        *,
        encode: Callable[[str], Any] | None = None,
        column: str = "vector",
        rule: Rule | None = None,
        no_match_share: float = 0.0,
        short_lists: bool = False,
        return_score: str = "relevance",
        encoder: str | None = None,
    ) -> None:
        if Reranker is object:
            raise ImportError(extras.needs("LanceReranker", "lancedb", "lancedb"))
        if not isinstance(model, (Trust, StoreReranker)):
            raise TypeError(f"model must be a fitted Trust or a StoreReranker, got {type(model).__name__}")
        if isinstance(model, StoreReranker) and not callable(encode):
            raise TypeError("a StoreReranker needs encode=, which turns the words of a query into its vector")
        if rule is not None and (not isinstance(rule, Rule) or not isinstance(model, Trust)):
            raise TypeError(f"rule must be a gf.Rule beside a Trust, got {type(rule).__name__}")
        if isinstance(model, StoreReranker):
            model.check_queries(encoder)
        else:
            check_trust(model, rule, encoder)
        super().__init__(return_score)
        self.metric = metric_of("LanceDB", metric, "the search")
        self.model, self.rule, self._encode = model, rule, encode
        self._column, self._short_lists = checks.words(column, "column"), bool(short_lists)
        self._share = checks.number(no_match_share, "no_match_share", 0, 0.99)

    def rerank_vector(self, query: str, vector_results: pa.Table) -> pa.Table:
        """The hits of a vector search, most probable first."""
        if not len(vector_results):
            return self._scored(vector_results, np.zeros(0), 1.0)
        if isinstance(self.model, StoreReranker):
            return self._of_vectors(self.model, query, vector_results)
        return self._of_distances(self.model, vector_results)

    def rerank_fts(self, query: str, fts_results: pa.Table) -> pa.Table:
        """The hits of a full-text search, most probable first."""
        if not isinstance(self.model, StoreReranker):
            raise ValueError("a Trust is about the distances of a vector search: use a StoreReranker for other hits")
        return self.rerank_vector(query, fts_results)

    def rerank_hybrid(self, query: str, vector_results: pa.Table, fts_results: pa.Table) -> pa.Table:
        """The hits of both searches, most probable first."""
        return self.rerank_fts(query, self.merge_results(vector_results, fts_results))

    def _of_distances(self, trust: Trust, hits: pa.Table) -> pa.Table:
        k = trust.k
        if len(hits) > k or (len(hits) < k and not self._short_lists):
            raise ValueError(
                f"the search found {len(hits)} hits, but the trust was fitted on lists of {k}: search with limit({k})"
                + ("" if len(hits) > k else ", or pass short_lists=True if a filter or a small table leaves fewer")
            )
        if "_distance" not in hits.column_names:
            raise ValueError("the hits have no column _distance: they are not those of a vector search")
        answer = hits["_distance"].to_pylist(), list(range(len(hits)))
        cosines, order = checked_list("the search", self.metric, answer, 0, k)
        lists = filled(cosines, k)[None]
        shown = (
            np.ones(len(hits), bool) if self.rule is None else self.rule.show(lists, self.rule.encoder)[0, : len(hits)]
        )
        missing = trust.p_no_match(lists, self._share, encoder=trust.encoder_)[0] if self._share else 0.0
        relevance = trust.relevance(lists, encoder=trust.encoder_)[0, : len(hits)]
        return self._scored(hits.take(np.array(order)[shown]), relevance[shown], missing)

    def _of_vectors(self, model: StoreReranker, query: str, hits: pa.Table) -> pa.Table:
        if self._column not in hits.column_names:
            raise ValueError(f"the hits have no column {self._column!r}, whose vectors are the evidence: select it")
        assert self._encode is not None
        words = np.asarray(checks.array(self._encode(query), "what encode returned"), np.float32).reshape(1, -1)
        rows = enumerate(hits[self._column].to_pylist())
        vectors = np.stack([model.store.unit_vector(number, row) for number, row in rows])
        reranker = model.reranker.with_gallery(model.gallery_of(torch.from_numpy(vectors)))
        posterior = reranker(words, torch.arange(len(hits))[None], no_match_share=self._share)
        there = posterior.index[0] >= 0  # copies of an item are one
        order, relevance = (each[0][there].cpu().numpy() for each in (posterior.index, posterior.relevance))
        return self._scored(hits.take(order), relevance.astype(np.float64), float(posterior.p_no_match[0]))

    def _scored(self, hits: pa.Table, relevance: Floats, p_no_match: float) -> pa.Table:
        """The hits with their probabilities, most probable first."""
        if self.score == "relevance":
            hits = hits.drop_columns([name for name in ("_distance", "_score") if name in hits.column_names])
        hits = hits.append_column(RELEVANCE, pa.array(relevance, pa.float32()))
        if self._share:
            hits = hits.append_column(NO_MATCH, pa.array(np.full(len(hits), p_no_match), pa.float32()))
        return hits.take(np.argsort(-relevance, kind="stable"))


def check_trust(trust: Trust, rule: Rule | None, encoder: str | None) -> None:
    """Refuses a trust and a rule of different encoders, or of another one than the given one."""
    check_encoder("the Trust", trust.encoder_, encoder, "fit one for it", stacklevel=4)
    if rule is None:
        return
    if trust.encoder_ is not None and rule.encoder is not None:
        check_encoder("the rule", rule.encoder, trust.encoder_)
    check_encoder("the rule", rule.encoder, encoder, stacklevel=4)
