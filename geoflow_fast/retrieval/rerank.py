"""BayesReranker: calibrated probabilities of shortlisted items, from a ladder of evidence about each of them.

The evidence is the cosine, its correction for hubs, the score of a head, and the log-density of the query given the
item under a flow: by Bayes' rule the probability that gallery item j is the one meant is proportional to
p(query | item j), one reverse solve per shortlisted item in the other conditional direction.
"""

from __future__ import annotations

import copy
import dataclasses
import glob
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from geoflow_fast.data.embeddings import Embeddings, named_rows
from geoflow_fast.data.fingerprint import Fingerprint, refuse_other_encoder
from geoflow_fast.data.frames import Framed
from geoflow_fast.data.ids import Ids
from geoflow_fast.data.pairs import EmbeddingPairs
from geoflow_fast.data.qrels import Qrels
from geoflow_fast.data.rows import Array
from geoflow_fast.directions import Direction
from geoflow_fast.flow.model import GeoFlow
from geoflow_fast.geometry import check_rows
from geoflow_fast.head.model import PosteriorHead
from geoflow_fast.likelihood.reverse_ode import density_estimates, pairs_at_once
from geoflow_fast.likelihood.settings import DensitySettings
from geoflow_fast.ops.allowed import Allowed, Mask
from geoflow_fast.retrieval.calibration import (
    ENCODERS,
    UNCALIBRATED,
    UNCALIBRATED_COSINE,
    UNCALIBRATED_HEAD,
    Calibration,
    CheapFit,
    FlowAsked,
    changed_facts,
    close_call,
    fit_calibration,
    probability_right,
    stored_lengths,
    uses_bank,
)
from geoflow_fast.retrieval.copies import first_numbers
from geoflow_fast.retrieval.entropy import smallest_risk
from geoflow_fast.retrieval.evidence import Evidence, Rung, cosines, most_probable
from geoflow_fast.retrieval.features import BankLevel, query_feature_names, query_features
from geoflow_fast.retrieval.freshness import ModelDigest, OncePerGallery, flow_marks
from geoflow_fast.retrieval.gallery import Gallery, GallerySource, Store
from geoflow_fast.retrieval.held_out import HeldOut, KnownItems
from geoflow_fast.retrieval.hubs import MOST_ROWS, Hubs
from geoflow_fast.retrieval.item_bank import ItemBank
from geoflow_fast.retrieval.sources import HeadSource
from geoflow_fast.retrieval.task import RetrievalTask, drawn_rows, judged_items
from geoflow_fast.runtime import checks, hashing
from geoflow_fast.runtime.batches import batch_rows, check_batch_size, in_batches, put_rows
from geoflow_fast.runtime.device import rows_at_once
from geoflow_fast.runtime.progress import Advance, progress_bar
from geoflow_fast.runtime.tensors import load_tensors, save_tensors

PAIRS_AT_ONCE = 2048
"""(query, item) pairs whose embeddings are gathered at a time on a CPU."""
CELL_BYTES = 400
"""What the evidence about a (query, item) pair takes in memory while it is read out: some fifty numbers."""
EMBEDDINGS = 4
"""Copies of a pair's embeddings that are in memory at a time, where a GPU gathers as many pairs as fit."""
SHORTLIST, WHOLE_SHORTLIST, FLOW_ITEMS = 128, 512, 32
"""Items of a shortlist in a large gallery and in one of at most `SMALL_GALLERY` items, and about how many of them the
flow is asked, for which each is a reverse solve."""
SMALL_GALLERY = 20_000
MORE_HITS, LEAST_DISTINCT = 3, 0.9
"""How often twice as many hits are fetched where less than this share of a shortlist would be different items."""
BANK_KIND = "bank of queries"
BANK_SUFFIX, BANK_DIGITS = ".bank.safetensors", 16
HUB_FEATURES = {"hub", "head_hub"}

Candidates = Tensor | NDArray[np.integer]


SHORTLISTS = ("cosine", "head")


@dataclass(frozen=True, repr=False)
class Reranked(Framed):
    """The posterior over the shortlists of Q queries, of K items each; detached tensors on the device of the models.
    `to_pandas`, `to_polars` and `to_arrow` make frames of it."""

    COLUMNS = (
        *("index", "prob", "relevance", "answer", "p_answer", "p_outside", "p_no_match"),
        *("entropy", "risk_lower_bound"),
    )
    ITEM_COLUMNS = ("index", "answer")

    index: Tensor
    """[Q, K] int64, numbers of gallery rows, most probable first and equally probable ones by their number; -1 where a
    shortlist has fewer than K items. Copies of an item are left out: it stands for all of them."""
    prob: Tensor
    """[Q, K], the probability that each item, or a copy of it, is the one meant; a row sums to one together with
    `p_outside` and `p_no_match`."""
    answer: Tensor
    """[Q] int64, the item with the largest cosine, which plain search returns; with shortlists of a head the item with
    its largest score. Of tied ones it is that with the lowest number, in whatever order candidates come."""
    p_answer: Tensor
    """[Q], the probability that `answer` is right: its `prob` times the mean number of right items of a query, after
    the Platt scaling that held-out queries asked for."""
    p_outside: Tensor
    """[Q], the probability that the right item is in the gallery, but not in the shortlist; 0 if uncalibrated."""
    entropy: Tensor
    """[Q], entropy in nats over the items and "outside"."""
    risk_lower_bound: Tensor
    """[Q] float64, the smallest error probability that this entropy allows (Fano)."""
    calibrated: bool
    """Whether the weights were fitted on held-out pairs."""
    asked_flow: Tensor
    """[Q] bool, for which queries the flow was evidence."""
    features: Tensor
    """[Q, f] float64, what the evidence says about a query as a whole: how sure the answer is, how far ahead the most
    probable item is, the level of each kind of evidence. The columns are `feature_names` of the re-ranker; those of the
    flow are 0 for queries about which it was not asked."""
    relevance: Tensor
    """[Q, K], the probability that each item is right. Where several are, as the captions of an image, it may be large
    for each of them, while `prob` divides one among them."""
    p_no_match: Tensor
    """[Q], the probability that nothing in the gallery is right, at the `no_match_share` of the call; 0 if that is 0.
    The other probabilities are smaller by as much."""
    evidence: Tensor
    """[Q, K, e], what each kind of evidence adds to the logit of an item, in nats, measured from the less near half of
    the shortlist. The kinds are `evidence_names` of the re-ranker."""
    query_ids: Ids | None = None
    """The ids of the queries, where they have some."""
    item_ids: Ids | None = None
    """The ids of the gallery's rows, where they have some."""


class BayesReranker(nn.Module):
    """Re-ranks shortlists and gives the probability of every item: `reranker(queries)` returns a `Reranked`.

    `direction="t2i"`: queries are texts and the gallery holds images; "i2t": the other way round. A shortlist contains
    the `shortlist` items with the largest cosine or, with `shortlist_by="head"`, with the
    largest score of the `head`; they are found by a search of the gallery or of its store, or passed in
    (`reranker(queries, candidates)`). Items whose embeddings are the same up to rounding count as one, that with the
    lowest number. By default there are 128 items, or 512 in a gallery of up to 20,000, and the flow is asked about the
    32 that are most probable without it; `shortlist=(K, A)` asks it about A of K, and `shortlist=K` about all.

    `flow`, `head`: the models, each of which may be None. log p(query | item) is estimated under the flow in `n_steps`
    steps of `solver` with `n_probes` probes. All pairs share the probes, which depend on `seed` alone: results do not
    depend on batches, and differences between candidates are less noisy. `bank`: typical queries [R, d], a few hundred
    to 2,000, by which scores are corrected for items that are near to everything; by default those of the calibration.
    `budget`: the flow is asked for at most this share of the queries, those whose answer it is most likely to change.

    `calibrate` decides on held-out pairs which evidence is worth its price (`rungs`), fits its weights, and the
    probability that the right item is not in the shortlist. Without it the posterior is the flow's own (alpha 1, beta
    0, nothing outside), or the head's, with a warning. A calibration belongs to the models' weights as they were: after
    training them further, loading other weights or casting them to another dtype, calls raise a ValueError until
    `calibrate` is called again or `calibration` is set to None. Moving them to another device changes nothing.
    """

    anchor: Tensor

    def __init__(
        self,
        flow: GeoFlow | None,
        gallery: GallerySource | Gallery,
        direction: str = "t2i",
        shortlist: int | tuple[int, int] | None = None,
        n_steps: int = 6,
        solver: str = "midpoint",
        n_probes: int = 1,
        seed: int = 0,
        *,
        head: PosteriorHead | None = None,
        bank: Tensor | Array | None = None,
        budget: float | None = None,
        shortlist_by: str = "cosine",
    ) -> None:
        super().__init__()
        self.direction = Direction.of(direction, conditional=True)
        self.seed = checks.integer(seed, "seed")
        lengths = _checked_lengths(shortlist)
        checks.one_of(shortlist_by, "shortlist_by", SHORTLISTS)
        if shortlist_by == "head" and head is None:
            raise ValueError('shortlist_by="head" needs head=')
        if budget is not None and not 0 <= checks.number(budget, "budget") <= 1:
            raise ValueError(f"budget must be in [0, 1], got {budget}")
        for name, model, kind in (("flow", flow, nn.Module), ("head", head, PosteriorHead)):
            wrong = model is not None and not isinstance(model, kind)
            if wrong or (name == "flow" and isinstance(model, PosteriorHead)):
                raise TypeError(
                    f"{name} must be a {'GeoFlow' if name == 'flow' else 'PosteriorHead'} or None, got "
                    f"{type(model).__name__}" + ("; pass it as head=" if isinstance(model, PosteriorHead) else "")
                )
        if budget is not None and flow is None:
            raise ValueError("budget= limits how often the flow is asked, and there is no flow")
        self.gallery = Gallery.of(gallery)
        self.flow, self.head, self.budget, self.shortlist_by = flow, head, budget, shortlist_by
        self.register_buffer("anchor", torch.empty(0, dtype=torch.float32, device="cpu"), persistent=False)
        self.query_dim = self._checked_widths()
        refuse_other_encoder({**self._made_for(self.direction.items), "the gallery": self.gallery.encoder})
        self.lengths_are_given = lengths is not None
        self._use_lengths(lengths or self._default_lengths)
        self.density = DensitySettings(n_steps, n_probes, solver, shared=True)
        self.source = None if head is None else HeadSource(head, self.direction)
        self.bank: Tensor | None = None
        self.hubs: Hubs | None = None
        self.item_bank: ItemBank | None = None
        self._bank_digest, self.bank_is_given = "", bank is not None
        if bank is not None:
            self._use_bank(self._checked_bank(bank))
        self.calibration: Calibration | None = None
        self._digests = {"flow": ModelDigest(), "head": ModelDigest()}
        self._head_marginals: OncePerGallery[Tensor] = OncePerGallery()
        self._learned: OncePerGallery[Tensor] = OncePerGallery()

    def _checked_widths(self) -> int:
        """The width of the queries. A ValueError says which widths do not fit each other."""
        widths = {}
        if self.flow is not None:
            widths["flow"] = self.flow.config.image_dim, self.flow.config.text_dim
        if self.head is not None:
            widths["head"] = self.head.image_dim, self.head.text_dim
        expected = next(iter(widths.values()), (self.gallery.dim, self.gallery.dim))
        for name, own in widths.items():
            if own != expected:
                raise ValueError(f"the {name} has widths {own} (image, text), but the flow has {expected}")
            if own[0] != own[1] and self.shortlist_by == "cosine":
                raise ValueError(
                    f"cosines need images and texts of one width, but the {name} has {own[0]} and {own[1]}: "
                    'give head= and shortlist_by="head"'
                )
            if self.gallery.dim != self.direction.items(*own):
                item_dim = self.direction.items(*own)
                raise ValueError(f"gallery has width {self.gallery.dim}, but the {name} expects {item_dim}")
        return self.direction.queries(*expected)

    def _made_for(self, side: Callable[..., Any]) -> dict[str, Fingerprint | None]:
        """The encoders for which the models were trained, on one side."""
        models: dict[str, Any] = {"the flow": self.flow, "the head": self.head}
        return {name: side(*model.origin.encoders) for name, model in models.items() if hasattr(model, "origin")}

    def _calibrated_for(self, calibration: Calibration | None = None) -> tuple[Fingerprint | None, Fingerprint | None]:
        """The encoders of queries and items that the calibration was made with, where they are known."""
        facts = calibration or self.calibration
        known = {} if facts is None else facts.made_for.get(ENCODERS, {})
        return Fingerprint.read(known.get("queries")), Fingerprint.read(known.get("items"))

    @property
    def encoders(self) -> tuple[Fingerprint | None, Fingerprint | None]:
        """The encoders of queries and items that the models and the calibration were made for, where they are known."""
        queries, items = self._calibrated_for()
        made_for = self._made_for(self.direction.queries), self._made_for(self.direction.items)
        known = [*made_for[0].values(), queries], [*made_for[1].values(), items]
        return next(filter(None, known[0]), None), next(filter(None, known[1]), None)

    @property
    def _default_lengths(self) -> tuple[int, int]:
        return (WHOLE_SHORTLIST if len(self.gallery) <= SMALL_GALLERY else SHORTLIST), FLOW_ITEMS

    def _use_lengths(self, lengths: tuple[int, int]) -> None:
        self.shortlist, self.flow_items = (min(length, len(self.gallery)) for length in lengths)

    def _checked_bank(self, bank: Tensor | Array) -> Tensor:
        rows = checks.rows(bank, "bank", self.query_dim, self.example, "R")
        if len(rows) < 2:
            raise ValueError(f"bank must be [R, {self.query_dim}], R at least 2, got {tuple(rows.shape)}")
        check_rows(rows, "bank")
        return rows[torch.from_numpy(drawn_rows(len(rows), MOST_ROWS, self.seed)).to(rows.device)]

    @property
    def example(self) -> Tensor:
        """Some tensor with the dtype and the device of the models."""
        if self.flow is not None:
            return next(self.flow.parameters())
        return self.anchor if self.head is None else self.head.example

    def with_gallery(self, gallery: GallerySource | Gallery) -> BayesReranker:
        """The same re-ranker over other items of the same kind: models, bank, lengths of shortlists and calibration are
        shared, none of which is about single items."""
        other = Gallery.of(gallery)
        if other.dim != self.gallery.dim:
            raise ValueError(f"gallery has width {other.dim}, but that of the re-ranker has {self.gallery.dim}")
        twin = copy.copy(self)
        twin.gallery = other.on(self.example.device)
        twin._head_marginals, twin._learned = OncePerGallery(), OncePerGallery()
        twin.hubs = None if self.bank is None else Hubs(self.bank, self.source)
        return twin

    @property
    def store(self) -> Store | None:
        """What searches the gallery, if something else does."""
        return self.gallery.store

    @property
    def rungs(self) -> tuple[Rung, ...]:
        """What each rung of evidence brought on the held-out pairs of the calibration, what it costs, and whether it is
        kept; empty before `calibrate`."""
        return () if self.calibration is None else self.calibration.rungs

    @property
    def evidence_names(self) -> tuple[str, ...]:
        """The kinds of evidence that have a weight: "cosine", "hub", "head", "head_hub" and "flow"."""
        return tuple((self.calibration or self._uncalibrated()).by_feature)

    @property
    def feature_names(self) -> tuple[str, ...]:
        """What the columns of `Reranked.features` are. They belong to the calibration: rungs of evidence that it does
        not use have none."""
        fitted = self.calibration or self._uncalibrated()
        asked = ["flow"] if "flow" in fitted.by_feature else []
        return query_feature_names([*fitted.cheap_features, *asked], with_bank=bool(fitted.items))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> BayesReranker:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.gallery = self.gallery.on(self.example.device)
        if self.bank is not None:
            self._use_bank(self.bank.to(self.example))
        if self.item_bank is not None:
            self.item_bank = ItemBank(self.item_bank.items.to(self.example), self.source, self.hubs)
        return self

    def _use_bank(self, bank: Tensor) -> None:
        self.bank, self.hubs = bank, Hubs(bank, self.source)
        self._bank_digest = hashing.digest([bank.float()])

    def extra_repr(self) -> str:
        """Settings and weights in one line, for `print`."""
        weights = "uncalibrated"
        if self.calibration is not None:
            fitted = {**self.calibration.by_feature, "outside": self.calibration.outside}
            weights = ", ".join(f"{name}={value:.3g}" for name, value in fitted.items())
        return f"{self.direction}, {self.shortlist} of {len(self.gallery)} items, {weights}"

    @property
    def settings(self) -> dict[str, Any]:
        """Everything a posterior depends on besides models, gallery, calibration and query."""
        density = self.density.facts()
        facts = {"direction": str(self.direction), "shortlist": self.shortlist, **density, "seed": self.seed}
        if self.flow is not None and self.flow_items < self.shortlist:
            facts["flow_items"] = self.flow_items
        if self.shortlist_by != "cosine":
            facts["shortlist_by"] = self.shortlist_by
        return facts if self.budget is None else {**facts, "budget": self.budget}

    @property
    def precision(self) -> str:
        """Precision of the flow's matrix products, as in `DensitySettings`; it is set before `calibrate`, whose result
        holds for one precision."""
        return self.density.precision

    @precision.setter
    def precision(self, value: str) -> None:
        self.density = dataclasses.replace(self.density, precision=value)

    @property
    def made_for(self) -> dict[str, Any]:
        """Facts of models, direction, shortlist and solver that a calibration is valid for; any seed and budget will
        do."""
        facts = {name: value for name, value in self.settings.items() if name not in ("seed", "budget")}
        for name, model in (("flow", self.flow), ("head", self.head)):
            if model is not None:
                facts[name] = self._digests[name].of(model)
        return facts

    if TYPE_CHECKING:  # a module's call has no types of its own

        def __call__(
            self,
            queries: Tensor | Array | Embeddings,
            candidates: Candidates | None = None,
            *,
            no_match_share: float = 0.0,
            allowed: Mask | None = None,
            batch_size: int | None = None,
        ) -> Reranked: ...

    def forward(
        self,
        queries: Tensor | Array | Embeddings,
        candidates: Candidates | None = None,
        *,
        no_match_share: float = 0.0,
        allowed: Mask | None = None,
        batch_size: int | None = None,
    ) -> Reranked:
        """Posterior of each of the `queries` [Q, d], unit rows, over its shortlist or over `candidates` [Q, K]: numbers
        of gallery rows, padded with -1. Queries are a tensor or an array in any floating-point type, or
        `gf.Embeddings`, whose ids the result then has.

        K may be any number from 1 on. A calibration is right for the K = `shortlist` items with the largest cosines.
        For other candidates its weights are used too: `p_outside` falls as K grows, but nothing was fitted for that
        length, so calibrate with a `shortlist` of it where the probabilities must be right. A single candidate is
        compared with nothing: its probability is the same for all queries. `no_match_share`: the share of queries for
        which nothing in the gallery is right, from 0 to 1, which `p_no_match` begins with.

        `allowed`: a boolean mask of the items that there are, [N] for all queries or [Q, N]; every query must have one.
        No others are in shortlists, which are found by an exact search of the allowed rows even where the gallery has a
        store, and `candidates` that are not allowed are left out. What an item's scores are corrected by depends on no
        other item, and bank and calibration stay as they are: `p_outside` is that of the whole gallery.

        The evidence about `batch_size` queries is in memory at a time, by default as much as 128 MB or half of a GPU's
        spare memory have room for. Results do not depend on it beyond rounding.
        """
        shared = queries, candidates, None
        reranked = self.rerank(*shared, no_match_share=no_match_share, allowed=allowed, batch_size=batch_size)
        if not reranked.calibrated:
            warnings.warn(
                f"BayesReranker is uncalibrated: {self.plain_weights}. Call calibrate with held-out pairs first",
                stacklevel=4,
            )
        return reranked

    @torch.no_grad()
    def rerank(
        self,
        queries: Tensor | Array | Embeddings,
        candidates: Candidates | None = None,
        advance: Advance | None = None,
        *,
        no_match_share: float = 0.0,
        allowed: Mask | None = None,
        batch_size: int | None = None,
    ) -> Reranked:
        """Same as `forward` without its warning, and calls `advance(n)` whenever n more queries are done."""
        encoders = self._calibrated_for()
        refuse_other_encoder({"the calibration": encoders[1], "the gallery": self.gallery.encoder})
        known = {**self._made_for(self.direction.queries), "the calibration": encoders[0]}
        queries, query_ids = named_rows(queries, known)
        queries = checks.rows(queries, "queries", self.query_dim, self.example, "Q")
        check_rows(queries, "queries")
        made_for = {} if self.calibration is None else self.calibration.made_for
        if made_for and (changed := changed_facts(made_for, self.made_for)):
            raise ValueError(
                f"the calibration was made for another {', '.join(changed)}, which has changed since: calibrate again, "
                "or set calibration to None"
            )
        calibration = self.calibration or self._uncalibrated()
        self._check_bank(calibration)
        if checks.number(no_match_share, "no_match_share", 0, 1) and calibration.no_match is None:
            raise ValueError("no_match_share= needs a calibration: calibrate first")
        if self.budget is not None and calibration.by_feature.get("flow") and calibration.cheap is None:
            raise ValueError("budget= needs a calibration that also has weights without the flow")
        asks_flow = "flow" in calibration.by_feature
        # Without a calibration nothing says which of many items to ask the flow about.
        length = self.flow_items if asks_flow and calibration.cheap is None else self.shortlist
        there = self.gallery.allowed_items(allowed, len(queries), queries.device)
        listed = None if candidates is None else self._checked_candidates(queries, candidates)
        if there is not None and listed is not None:
            listed = listed.masked_fill(~there.has(listed), -1)
            if bool((none := (listed < 0).all(1)).any()):
                raise ValueError(f"allowed leaves no candidate to query {int(none.nonzero()[0])}")
        width = length if listed is None else listed.shape[1]
        size = batch_rows(check_batch_size(batch_size), queries.device, CELL_BYTES * width)
        cheap = None if self.budget is None or not asks_flow else calibration.cheap
        gaps = torch.zeros(len(queries), dtype=torch.float64, device=queries.device)

        def answers(rows: slice | Tensor, asked: bool) -> Reranked:
            """Those to the queries `rows`, with the flow as evidence if it is `asked`."""
            some, items = queries[rows], there and there.of_queries(rows)
            if listed is None:
                numbers = range(len(queries))[rows] if isinstance(rows, slice) else rows.tolist()
                index = self._shortlists(some, length, numbers, items)
            else:
                index = self._without_copies(listed[rows])
            evidence = self._evidence(some, index, calibration.cheap_features, None if asks_flow else advance)
            if cheap is not None and not asked:
                gaps[rows] = close_call(cheap.probabilities(evidence))
            if asks_flow:
                evidence = self._with_flow(some, index, evidence, asked, advance, len(queries) * width)
            bank = self._bank_level(some, calibration)
            choices: int | Tensor = index.shape[1]
            if items is not None:
                choices = items.count(len(some)).clamp(max=width) if listed is None else (listed[rows] >= 0).sum(1)
            return self._read_out(index, evidence, asked, calibration, bank, queries.dtype, no_match_share, choices)

        # Within a budget, all queries are answered without the flow first: that tells which ones to ask it about.
        reranked = in_batches(lambda rows: answers(rows, asks_flow and cheap is None), len(queries), size)
        if cheap is not None:
            chosen = self._closest_calls(gaps, cheap).nonzero().squeeze(1)
            if advance is not None:
                advance(len(queries) - len(chosen))
            if len(chosen):
                with_flow = in_batches(lambda rows: answers(chosen[rows], True), len(chosen), size)
                put_rows(reranked, chosen, with_flow)
        return dataclasses.replace(reranked, query_ids=query_ids, item_ids=self.gallery.ids)

    def _bank_level(self, queries: Tensor, calibration: Calibration) -> BankLevel | None:
        """How high the queries' scores are for a bank of items, if the calibration asks for it."""
        if not calibration.items:
            return None
        if self.item_bank is None or self.item_bank.digest != calibration.items:
            raise ValueError("the calibration was made with another bank of items: load it again, or calibrate again")
        weights = calibration.score_weights
        return BankLevel(weights, self.item_bank.level(queries, weights, calibration.hub_scale))

    def _check_bank(self, calibration: Calibration) -> None:
        """Raises a ValueError if the calibration corrects for hubs by another bank than the re-ranker has."""
        if calibration.bank and (self.bank is None or self._bank_digest != calibration.bank):
            raise ValueError("the calibration was made with another bank of queries: load it again, or calibrate again")

    def _uncalibrated(self) -> Calibration:
        """The weights of the best model there is, as it is."""
        if self.flow is not None:
            return UNCALIBRATED
        return UNCALIBRATED_COSINE if self.head is None else UNCALIBRATED_HEAD

    @property
    def plain_weights(self) -> str:
        """What probabilities are worth without a calibration, in words."""
        own = "a softmax of cosines" if self.head is None else "the head's own"
        own = own if self.flow is None else "the flow's own"
        return f"probabilities are {own} and may be far off, and none is left for items outside the shortlist"

    def _closest_calls(self, gap: Tensor, cheap: CheapFit) -> Tensor:
        """For which queries the flow is asked within the budget: those with the closest calls, the least difference
        `gap` [Q] between the two most probable items. How close was decided on held-out queries; and of the queries of
        one call no more than their share are asked, but one may be."""
        assert self.budget is not None
        level = self.budget * (len(cheap.gaps) - 1)
        low, high = math.floor(level), math.ceil(level)
        limit = cheap.gaps[low] + (level - low) * (cheap.gaps[high] - cheap.gaps[low])
        most = max(1, math.floor(self.budget * len(gap))) if self.budget > 0 else 0
        closest = torch.zeros_like(gap, dtype=torch.bool)
        closest[gap.argsort(stable=True)[:most]] = True
        return closest & (gap <= limit)

    @torch.no_grad()
    def calibrate(
        self,
        pairs: EmbeddingPairs | Qrels,
        *,
        queries: Tensor | Array | None = None,
        least_grade: float | None = None,
        max_queries: int = 1000,
        progress: bool | None = None,
    ) -> Calibration:
        """Fits the weights on held-out `pairs`, stores them in `self.calibration` and returns them.

        At most `max_queries` queries, drawn by the seed, are searched in the gallery with their own items added, so
        that the gallery has its real size; copies of an own item are right as well. All texts of an image count as
        right for it. Judgements (`gf.Qrels`) of `queries` [Q, d] serve as well as pairs: gallery rows whose grade
        is above 0, or at least `least_grade`, are right, and queries without any are left out. If fewer than 50 queries
        have a right item in their shortlist, a ValueError is raised. `progress`: show a progress bar; by default on a
        terminal.
        """
        checks.integer(max_queries, "max_queries", 1)
        if isinstance(pairs, Qrels):
            known, source = self._judged(pairs, queries, least_grade, max_queries), ""
            encoders = {"items": self.gallery.encoder} if self.gallery.encoder is not None else {}
        else:
            if queries is not None:
                raise ValueError("queries= belongs to judgements; pairs have queries of their own")
            known, source = self._paired(pairs, max_queries), pairs.fingerprint()
            encoders = self._common_encoders(pairs)
        if not self.lengths_are_given:
            self._use_lengths(self._default_lengths)
        with progress_bar(len(known), 0, "held-out queries", shown=progress) as advance:
            fitted, bank, item_bank = self._fitted(known, advance)
        self._use_bank(bank)
        digest = self._bank_digest if HUB_FEATURES & set(fitted.by_feature) else ""
        self.item_bank = item_bank if uses_bank(fitted) else None
        items = "" if self.item_bank is None else self.item_bank.digest
        facts = {ENCODERS: {side: each.to_json() for side, each in encoders.items()}} if encoders else {}
        self.calibration = fitted = dataclasses.replace(
            fitted, pairs=source, bank=digest, items=items, made_for={**fitted.made_for, **facts}
        )
        return fitted

    def _common_encoders(self, pairs: EmbeddingPairs) -> dict[str, Fingerprint]:
        """The encoders of queries and items, where they are known. A ValueError says that the held-out pairs come from
        another one than the models or the gallery."""
        encoders = {}
        for side, of in (("queries", self.direction.queries), ("items", self.direction.items)):
            known = {**self._made_for(of), "the set of held-out pairs": of(*pairs.encoders)}
            if side == "items":
                known["the gallery"] = self.gallery.encoder
            refuse_other_encoder(known)
            if told := [each for each in known.values() if each is not None]:
                encoders[side] = told[0]
        return encoders

    def _fitted(self, known: KnownItems, advance: Advance) -> tuple[Calibration, Tensor, ItemBank]:
        """The calibration on these queries, the bank of queries that it corrects for hubs by, and the bank of items by
        which the level of a query's scores is known: those of the queries, and those that a head keeps."""
        held_out = HeldOut(self, known, self.bank if self.bank_is_given else None)
        seen = held_out.evidence((lambda _: None) if self.flow is not None else advance)

        kept = () if self.head is None else (self.head.bank(self.direction.reverse).to(held_out.queries),)
        item_bank = ItemBank(torch.cat((held_out.known_items, *kept)), self.source, Hubs(seen.bank, self.source))

        def log_densities(asked: Tensor) -> Tensor:
            return held_out.log_densities(seen.number, asked, advance)

        fitted = fit_calibration(
            seen.evidence,
            seen.right,
            seen.right_count,
            known.group,
            self.made_for,
            self.seed,
            hubs=seen.hubs,
            costs=held_out.costs,
            absent=seen.absent,
            flow=None if self.flow is None else FlowAsked(self.flow_items, log_densities),
            level=lambda weights, hub_scale: held_out.level(item_bank, weights, hub_scale),
        )
        return fitted, seen.bank, item_bank

    def _paired(self, pairs: EmbeddingPairs, max_queries: int) -> KnownItems:
        """The queries of held-out pairs and their own items."""
        if not isinstance(pairs, EmbeddingPairs):
            raise TypeError(f"pairs must be EmbeddingPairs or Qrels, got {type(pairs).__name__}")
        expected = self.direction.pair(self.query_dim, self.gallery.dim)
        if (pairs.image_dim, pairs.text_dim) != expected:
            widths = f"{pairs.image_dim} and {pairs.text_dim}"
            wanted = f"{expected[0]}" if expected[0] == expected[1] else f"{expected[0]} and {expected[1]}"
            model = "gallery" if self.flow is None and self.head is None else "head" if self.flow is None else "flow"
            raise ValueError(f"held-out pairs have widths {widths}, but the {model} expects {wanted}")
        task = RetrievalTask.of(
            pairs, self.direction, max_queries=max_queries, seed=self.seed, all_items=False, any_widths=True
        )
        return KnownItems.of_task(task)

    def _judged(self, qrels: Qrels, queries: object, least_grade: float | None, max_queries: int) -> KnownItems:
        """Queries with the gallery rows that were judged right for them. Those that share their best item are held out
        together."""
        if queries is None:
            raise ValueError("judgements need queries=, the embeddings of the queries that they number")
        rows = checks.rows(queries, "queries", self.query_dim, self.example, "Q")
        check_rows(rows, "queries")
        asking, right = judged_items(qrels, len(rows), len(self.gallery), least_grade)
        chosen = drawn_rows(len(asking), max_queries, self.seed)
        right = right[chosen]
        items = np.unique(right[right >= 0])
        own = np.where(right < 0, -1, np.searchsorted(items, right))
        return KnownItems(
            rows[torch.from_numpy(asking[chosen]).to(rows.device)],
            self.gallery.take(torch.from_numpy(items), rows.dtype),
            torch.from_numpy(own),
            torch.from_numpy(right[:, 0]),
        )

    def save_calibration(self, path: str | Path) -> Path:
        """Writes the calibration to a JSON file, or into a folder such as the flow's, and returns the file's path."""
        if self.calibration is None:
            raise ValueError("there is no calibration to save: call calibrate first")
        file = self.calibration_file(path)
        self._check_bank(self.calibration)
        bank, tensors = bank_file(file, self.calibration.bank or self.calibration.items), {}
        if self.calibration.bank and self.bank is not None:
            tensors["bank"] = self.bank.float()
        if self.calibration.items and self.item_bank is not None:
            tensors["items"] = self.item_bank.items.float()
        if tensors:
            save_tensors(bank, tensors, kind=BANK_KIND, info={})
        self.calibration.save(file)
        # After a kill before this line, each calibration still has its own bank.
        for earlier in file.parent.glob(f"{glob.escape(file.stem)}.*{BANK_SUFFIX}"):
            if earlier != bank and len(earlier.name) == len(bank.name):
                earlier.unlink(missing_ok=True)
        return file

    def load_calibration(self, path: str | Path) -> Calibration:
        """Loads and uses a calibration of `save_calibration`, with the bank of queries that it was made with. It must
        be for the same models, direction and solver, and for the same shortlist, unless that was left to the
        re-ranker, which then takes the calibration's; otherwise a ValueError is raised."""
        file, lengths = self.calibration_file(path), (self.shortlist, self.flow_items)
        if not file.is_file():
            raise FileNotFoundError(
                f"{file} is missing: calibrate on held-out pairs of your own, as every model needs that was downloaded "
                "without a calibration"
            )
        if not self.lengths_are_given and (own := stored_lengths(file)) is not None:
            self._use_lengths(own)
        try:
            calibration = Calibration.load(file, self.made_for)
            made_for = self._calibrated_for(calibration)[1]
            refuse_other_encoder({"the calibration": made_for, "the gallery": self.gallery.encoder})
        except (ValueError, OSError):
            self._use_lengths(lengths)
            raise
        other = bool(calibration.bank) and calibration.bank != self._bank_digest
        if other and self.bank_is_given:
            raise ValueError(f"{file} was made for another bank; calibrate again, or leave out bank=")
        stored = _stored_banks(file, calibration) if other or calibration.items else {}
        if other:
            self._use_bank(stored["bank"].to(self.example))
        self.item_bank = None
        if calibration.items:
            self.item_bank = ItemBank(stored["items"].to(self.example), self.source, self.hubs)
        self.calibration = calibration
        return calibration

    def calibration_file(self, path: str | Path) -> Path:
        """The file a calibration is stored in: `path` itself, or a file in the folder `path`."""
        path = checks.path(path, "path")
        return path / f"rerank_{self.direction}.json" if path.is_dir() else path

    def _shortlists(
        self,
        queries: Tensor,
        length: int,
        numbers: Sequence[int] | None = None,
        allowed: Allowed | None = None,
    ) -> Tensor:
        """Numbers [Q, K] of the gallery rows in each query's shortlist, `length` different items, -1 where there are
        fewer. Where copies took the room of others, more hits are fetched, a few times. `numbers`: by which errors name
        the queries, if these are some of a call."""
        numbers = range(len(queries)) if numbers is None else numbers
        index, hits = self._without_copies(self._hits(queries, length, numbers, allowed)), length
        most = length if allowed is None else allowed.count(len(queries)).clamp(max=length)
        for _ in range(MORE_HITS):
            few = ((index >= 0).sum(1) < LEAST_DISTINCT * most).nonzero().squeeze(1)
            hits = min(2 * hits, len(self.gallery))
            if not len(few) or hits <= length:
                break
            some, items = [numbers[row] for row in few.tolist()], allowed and allowed.of_queries(few)
            more = self._without_copies(self._hits(queries[few], hits, some, items))
            order = (more < 0).byte().argsort(dim=1, stable=True)[:, :length]
            index[few] = more.gather(1, order)
        return index

    def _without_copies(self, index: Tensor) -> Tensor:
        """The numbers [Q, K], with -1 instead of those of copies of an item with a lower number."""

        def without(rows: slice) -> Tensor:
            some, valid = index[rows], index[rows] >= 0
            items = self.gallery.take(some.clamp(min=0), self.example.dtype)
            return some.masked_fill(valid & (first_numbers(items, some, valid) != some), -1)

        return in_batches(without, len(index), max(1, self._pairs_at_once(4 * PAIRS_AT_ONCE) // index.shape[1]))

    def _hits(self, queries: Tensor, count: int, numbers: Sequence[int], allowed: Allowed | None) -> Tensor:
        """Numbers [Q, K] of the `count` gallery rows that a search finds, -1 where there are fewer."""
        if self.shortlist_by == "head":
            return self._hits_of_head(queries, count, numbers, allowed)
        if self.store is None or allowed is not None:  # stores know of no filter
            return self.gallery.search(queries, count, allowed=allowed)[1]
        return self._checked_candidates(queries, self.store.search(queries.float().cpu().numpy(), count)[1], numbers)

    def pooled(self, queries: Tensor, candidates: Candidates) -> Tensor:
        """The candidates [Q, K], with -1 instead of copies."""
        return self._without_copies(self._checked_candidates(queries, candidates))

    def _checked_candidates(
        self, queries: Tensor, candidates: Candidates, numbers: Sequence[int] | None = None
    ) -> Tensor:
        index = torch.as_tensor(candidates, device=queries.device)
        is_integer = not (index.is_floating_point() or index.is_complex() or index.dtype == torch.bool)
        if not is_integer or index.dim() != 2 or len(index) != len(queries) or index.shape[1] == 0:
            raise ValueError(
                f"candidates must be integers [{len(queries)}, K], K at least 1, got {index.dtype} {tuple(index.shape)}"
            )
        index = index.long()
        ranked = index.sort(1).values
        wrong = {
            f"name rows outside the gallery of {len(self.gallery)}": (index < -1) | (index >= len(self.gallery)),
            "name one row twice": (ranked[:, 1:] == ranked[:, :-1]) & (ranked[:, 1:] >= 0),
            "are all -1": (index < 0).all(1, keepdim=True),
        }
        for what, bad in wrong.items():
            if bool(bad.any()):
                row = int(bad.any(1).nonzero()[0])
                raise ValueError(f"candidates of query {row if numbers is None else numbers[row]} {what}")
        return index

    def _hits_of_head(self, queries: Tensor, count: int, numbers: Sequence[int], allowed: Allowed | None) -> Tensor:
        """The items with the largest scores of the head, from one pass over the gallery or from a search of the store
        for each point of a query."""
        assert self.source is not None
        drawn, marginals = self.source.draw(queries), self.head_marginals()
        if self.store is None or allowed is not None:
            return self.gallery.statistics(
                drawn.samples,
                drawn.kappa,
                count,
                -marginals,
                sample_bias=drawn.bias,
                precision=drawn.precision,
                allowed=allowed,
            ).top_index
        points = torch.nn.functional.normalize(drawn.samples, dim=-1).flatten(0, 1)
        hits = self._checked_rows(self.store.search(points.float().cpu().numpy(), count)[1], numbers, len(points))
        index = hits.to(queries.device).reshape(len(queries), -1).sort(1).values
        again = torch.nn.functional.pad(index[:, 1:] == index[:, :-1], (1, 0))
        index = index.masked_fill(again, -1)
        number = index.clamp(min=0)
        drawn_points = self.source.head.points(queries, self.direction)
        score = self.source.scores(drawn_points, self.gallery.take(number, queries.dtype)) - marginals[number]
        best = score.masked_fill(index < 0, -math.inf).topk(min(count, index.shape[1]), dim=1).indices
        return index.gather(1, best)

    def _checked_rows(self, rows: object, queries: Sequence[int], points: int) -> Tensor:
        """The rows [points, K] of the gallery that a store has found for the points of the queries with these numbers;
        -1 is no row."""
        found = checks.array(rows, "what the store has found")
        if found.dtype.kind not in "iu" or found.ndim != 2 or len(found) != points:
            shape = f"{found.dtype} {list(found.shape)}"
            raise ValueError(f"the store must give row numbers, whole numbers [{points}, K], got {shape}")
        wrong = (found < -1) | (found >= len(self.gallery))
        if wrong.any():
            point, hit = np.argwhere(wrong)[0]
            query = queries[int(point) * len(queries) // points]
            unknown = f"row {found[point, hit]} of a gallery of {len(self.gallery)}"
            raise ValueError(f"the store gave query {query} {unknown}")
        return torch.from_numpy(found.astype(np.int64))

    def head_marginals(self) -> Tensor:
        """What is subtracted from the head's scores of all items when shortlists are chosen by them: [N]."""
        assert self.source is not None
        source = self.source

        def compute() -> Tensor:
            return source.item_marginals(self.gallery, None).float()

        return self._head_marginals.of(self.gallery, flow_marks(source.head), compute).to(self.example)

    def _learned_numbers(self) -> Tensor:
        """What the head has learned about each item: [N]."""
        assert self.source is not None
        source = self.source

        def compute() -> Tensor:
            return source.learned(self.gallery).float().cpu()

        return self._learned.of(self.gallery, flow_marks(source.head), compute)

    def nearness(self, queries: Tensor, items: Tensor, index: Tensor | None) -> Tensor:
        """The score by which shortlists are ordered: [Q, K] float64, of items [Q, K, d] that are the rows `index`
        [Q, K] of the gallery, or others if it is None."""
        if self.shortlist_by == "cosine":
            return cosines(queries, items)
        assert self.source is not None
        if index is None:
            marginals = self.source.item_marginals(Gallery(items.flatten(0, 1)), None).view(items.shape[:2])
        else:
            marginals = self.head_marginals()[index.clamp(min=0)]
        return self.source.scores(self.source.head.points(queries, self.direction), items) - marginals

    def _evidence(self, queries: Tensor, index: Tensor, needed: Collection[str], advance: Advance | None) -> Evidence:
        """The features `needed`, all but the flow's, of the shortlists `index` [Q, K]."""
        parts: defaultdict[str, list[Tensor]] = defaultdict(list)
        numbers, source = self._item_numbers(needed), self.source
        asks_head = source is not None and not {"head", "head_posterior"}.isdisjoint(needed)
        points = source.head.points(queries, self.direction) if source is not None and asks_head else None
        at_once = max(1, self._pairs_at_once(PAIRS_AT_ONCE) // index.shape[1])
        for rows in torch.arange(len(queries), device="cpu").split(at_once):
            number = index[rows].clamp(min=0)
            items = self.gallery.take(number, queries.dtype)
            nearness = self.nearness(queries[rows], items, number)
            parts["nearness"].append(nearness)
            if "cosine" in needed:
                by_cosine = self.shortlist_by == "cosine"
                parts["cosine"].append(nearness if by_cosine else cosines(queries[rows], items))
            of_items = {
                name: values[number.to(values.device)].to(queries.device).double() for name, values in numbers.items()
            }
            if source is not None and points is not None:
                scores = source.scores(points[rows], items)
                parts["head"].append(scores + of_items.pop("learned", 0.0))
                if "head_posterior" in needed:
                    parts["head_posterior"].append(scores - self.head_marginals()[number].double())
            for name, values in of_items.items():
                parts[name].append(values)
            if advance is not None:
                advance(len(rows))
        empty = torch.zeros(0, index.shape[1], dtype=torch.float64, device=queries.device)
        features = {name: torch.cat([empty, *parts[name]]) for name in (*needed, "nearness")}
        return Evidence(features, features.pop("nearness"), index >= 0)

    def _item_numbers(self, needed: Collection[str]) -> dict[str, Tensor]:
        """The numbers [N] of the gallery's items that the calibration uses: features, and what the head has "learned"
        about items, which is a part of its score."""
        numbers = {}
        if "head" in needed:
            numbers["learned"] = self._learned_numbers()
        if HUB_FEATURES & set(needed):
            if self.hubs is None or self.calibration is None:
                raise ValueError("the calibration corrects for hubs, but there is no bank of queries: calibrate again")
            if "hub" in needed:
                numbers["hub"] = self.hubs.cosine_numbers(self.gallery, self.calibration.hub_scale)
            if "head_hub" in needed:
                numbers["head_hub"] = self.hubs.head_numbers(self.gallery)
        return numbers

    def _with_flow(
        self, queries: Tensor, index: Tensor, evidence: Evidence, asked: bool, advance: Advance | None, total: int
    ) -> Evidence:
        """The evidence with log p(query | item) if the flow is `asked`, and zeros if not: of all items or, in two
        tiers, of the most probable ones without the flow."""
        calibration, items = self.calibration, evidence.valid
        has_tiers = calibration is not None and calibration.rest is not None
        if not asked:
            features = {**evidence.features, "flow": torch.zeros_like(evidence.nearness)}
            nothing = torch.zeros_like(items) if has_tiers else None
            return dataclasses.replace(evidence, features=features, asked=nothing)
        if calibration is not None and calibration.cheap is not None and has_tiers:
            items = most_probable(calibration.cheap.logits(evidence)[:, :-1], evidence.valid, self.flow_items)

        def take(number: Tensor) -> Tensor:
            return self.gallery.take(number.clamp(min=0), queries.dtype)

        log_density = self.asked_densities(queries, index, items, take, advance, total)
        features = {**evidence.features, "flow": log_density}
        return dataclasses.replace(evidence, features=features, asked=items if has_tiers else None)

    def asked_densities(
        self,
        queries: Tensor,
        number: Tensor,
        asked: Tensor,
        take: Callable[[Tensor], Tensor],
        advance: Advance | None,
        total: int | None = None,
    ) -> Tensor:
        """log p(query | item) [Q, K] of the items with these numbers [Q, K] that are `asked` [Q, K] about, zero for
        others. `take` gives the items [..., d] with numbers [...]. `total`: the pairs of the whole call, by default
        these."""
        total = number.numel() if total is None else total
        most = max(1, int(asked.sum(1).max())) if len(asked) else 1
        column = asked.byte().argsort(dim=1, descending=True, stable=True)[:, :most]
        at_once = PAIRS_AT_ONCE
        if queries.is_cuda and self.flow is not None:
            at_once = pairs_at_once(self.flow, (self.direction.reverse,), self.density)

        def estimated(rows: slice) -> Tensor:
            chosen = number[rows].gather(1, column[rows])
            there = asked[rows].gather(1, column[rows])
            estimate = self.log_densities(queries[rows], take(chosen), chosen, there, total)
            if advance is not None:
                advance(len(chosen))
            nothing = torch.zeros(asked[rows].shape, dtype=torch.float64, device=queries.device)
            return nothing.scatter_(1, column[rows], estimate)

        return in_batches(estimated, len(queries), max(1, at_once // most))

    def log_densities(self, queries: Tensor, items: Tensor, number: Tensor, valid: Tensor, total: int) -> Tensor:
        """log p(query | item) [Q, K] of items [Q, K, d], zero where they are not `valid` [Q, K]. An item that several
        queries share, as equal `number` [Q, K] tell, is encoded once. The whole call has `total` pairs."""
        assert self.flow is not None
        every = queries.unsqueeze(1).expand(-1, items.shape[1], -1)
        directions = (self.direction.reverse,)
        if queries.is_cuda:
            # Which items are valid, and how many, only the GPU knows: it takes all of them, and solves have one shape.
            image, text = self.direction.pair(every.flatten(0, 1), items.flatten(0, 1))
            estimates = density_estimates(self.flow, image, text, directions, self.density, self.seed, total=total)
            return estimates[0].mean(0).view(valid.shape).masked_fill(~valid, 0.0)
        image, text = self.direction.pair(every[valid], items[valid])
        estimates = density_estimates(
            self.flow, image, text, directions, self.density, self.seed, given_number=number[valid], total=total
        )
        log_density = torch.zeros(valid.shape, dtype=torch.float64, device=queries.device)
        log_density[valid] = estimates[0].mean(0)
        return log_density

    def _pairs_at_once(self, on_cpu: int) -> int:
        """Pairs whose embeddings are gathered at a time."""
        row_bytes = EMBEDDINGS * (self.query_dim + self.gallery.dim) * self.example.element_size()
        return rows_at_once(self.example.device, row_bytes, on_cpu)

    def _read_out(
        self,
        index: Tensor,
        evidence: Evidence,
        asked: bool,
        calibration: Calibration,
        bank: BankLevel | None,
        dtype: torch.dtype,
        no_match_share: float,
        items: int | Tensor,
    ) -> Reranked:
        """The result for queries with so many `items` to choose from."""
        fitted = calibration if asked or calibration.cheap is None else calibration.cheap
        every = fitted.probabilities(evidence)  # "outside" is last
        # Items that tie are in the order of their numbers; those that are missing come after all others.
        nearness = evidence.nearness.masked_fill(~evidence.valid, -math.inf)
        tied = nearness == nearness.amax(1, keepdim=True)
        best = index.masked_fill(~(tied & evidence.valid), len(self.gallery)).argmin(1, keepdim=True)
        meant = every.gather(1, best).squeeze(1)
        p_answer = probability_right(meant, calibration.right_per_query, fitted.platt)
        features = query_features(evidence, every, best.squeeze(1), bank)
        relevance, p_no_match = calibration.item_relevance(every), torch.zeros_like(meant)
        if no_match_share and calibration.no_match is not None:
            p_no_match = (fitted.no_match or calibration.no_match).probability(features, no_match_share)
        matches = (1 - p_no_match).unsqueeze(1)
        number, by_number = index.masked_fill(~evidence.valid, len(self.gallery)).sort(1)
        prob = every.gather(1, by_number).masked_fill(number == len(self.gallery), -1.0)
        order = by_number.gather(1, prob.sort(dim=1, descending=True, stable=True).indices)
        every = every * matches
        entropy = torch.special.entr(every).sum(1) + torch.special.entr(p_no_match)
        kinds = len(calibration.by_feature)
        choices = items + (self.calibration is not None) + (no_match_share > 0)
        return Reranked(
            index.gather(1, order),
            every.gather(1, order).to(dtype),
            index.gather(1, best).squeeze(1),
            (p_answer * (1 - p_no_match)).to(dtype),
            every[:, -1].to(dtype),
            entropy.to(dtype),
            smallest_risk(entropy, choices),
            self.calibration is not None,
            torch.full_like(meant, asked, dtype=torch.bool),
            torch.stack([*features.values()], dim=1),
            (relevance * matches).gather(1, order).to(dtype),
            p_no_match.to(dtype),
            self._parts(evidence, calibration, fitted).gather(1, order.unsqueeze(2).expand(-1, -1, kinds)).to(dtype),
        )

    def _parts(self, evidence: Evidence, calibration: Calibration, fitted: Calibration | CheapFit) -> Tensor:
        """What each kind of evidence adds to the logits of the items [Q, K, e], with the weights that were `fitted`."""
        weights = fitted.weights if isinstance(fitted, CheapFit) else fitted.by_feature
        known = [name for name in calibration.by_feature if name in evidence.features]
        design = evidence.design(known)[:, :-1, : len(known)]
        columns = dict(zip(known, design.unbind(2)))
        zero = torch.zeros_like(evidence.nearness)
        each = [columns.get(name, zero) * weights.get(name, 0.0) for name in calibration.by_feature]
        return torch.stack(each, dim=2)


def _checked_lengths(shortlist: object) -> tuple[int, int] | None:
    """How many items shortlists have, and about how many of them the flow is asked: all if there is one number."""
    if shortlist is None:
        return None
    if not isinstance(shortlist, tuple):
        length = checks.integer(shortlist, "shortlist", 1)
        return length, length
    if len(shortlist) != 2:
        raise ValueError(f"shortlist must be a number of items, or that and how many the flow sees, got {shortlist}")
    length, asked = (checks.integer(each, "shortlist", 1) for each in shortlist)
    if asked > length:
        raise ValueError(f"shortlist asks the flow about {asked} of {length} items")
    return length, asked


def _stored_banks(file: Path, calibration: Calibration) -> dict[str, Tensor]:
    """The banks of queries and of items that a calibration was stored with. A ValueError says which is another."""
    source = bank_file(file, calibration.bank or calibration.items)
    tensors, _ = load_tensors(source, kind=BANK_KIND)
    for name, digest, words in (("bank", calibration.bank, "queries"), ("items", calibration.items, "items")):
        rows = tensors.get(name)
        if digest and (rows is None or hashing.digest([rows]) != digest):
            raise ValueError(f"{source} does not hold the bank of {words} that {file} was made with")
        if rows is not None:
            check_rows(rows, str(source))
    return tensors


def bank_file(calibration: Path, digest: str) -> Path:
    """The file beside a calibration that holds the bank of queries it was made with. A bank has a name of its own, so
    that the next one does not take its place before the next calibration is there."""
    name = "".join(filter(str.isalnum, digest))[:BANK_DIGITS]
    return calibration.with_suffix(f".{name}{BANK_SUFFIX}")
