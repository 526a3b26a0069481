"""Retrieval entropy: how ambiguous a query is over a gallery, from samples of the conditional flow (Sec. 4.1) or from
the points of a head."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from geoflow_fast.data.embeddings import Embeddings, named_rows
from geoflow_fast.data.fingerprint import refuse_other_encoder
from geoflow_fast.data.frames import Framed
from geoflow_fast.data.ids import Ids
from geoflow_fast.data.rows import Array
from geoflow_fast.directions import Direction
from geoflow_fast.flow.model import GeoFlow
from geoflow_fast.flow.sampling import FAST_SAMPLING, SamplingSettings
from geoflow_fast.geometry import check_rows
from geoflow_fast.head.model import PosteriorHead
from geoflow_fast.ops.allowed import Allowed, Mask
from geoflow_fast.ops.gallery_posterior import check_kappa
from geoflow_fast.retrieval.freshness import OncePerGallery, flow_marks, marks
from geoflow_fast.retrieval.gallery import Gallery, GallerySource
from geoflow_fast.retrieval.sources import FlowSource, HeadSource, ScoringPoints, Source
from geoflow_fast.runtime import checks, hashing
from geoflow_fast.runtime.batches import batch_rows, check_batch_size, in_batches
from geoflow_fast.runtime.progress import Advance
from geoflow_fast.runtime.settings import settings_from

PAPER_KAPPA = 100.0


@dataclass(frozen=True, repr=False)
class RetrievalPosterior(Framed):
    """The posterior over the gallery of each of Q queries; detached tensors on the device of the model. `to_pandas`,
    `to_polars` and `to_arrow` make frames of it."""

    COLUMNS = ("entropy", "map_index", "map_prob", "risk_lower_bound", "top_index", "top_prob")
    ITEM_COLUMNS = ("map_index", "top_index")

    entropy: Tensor
    """[Q], retrieval entropy in nats: 0 if one item has all the probability, log N if all N items are equally
    likely."""
    map_index: Tensor
    """[Q] int64, the most probable item."""
    map_prob: Tensor
    """[Q], its probability."""
    risk_lower_bound: Tensor
    """[Q] float64, the smallest error probability that this entropy allows (Fano)."""
    top_index: Tensor
    """[Q, k] int64, the k most probable items, most probable first; -1 where fewer are allowed."""
    top_prob: Tensor
    """[Q, k], their probabilities; 0 where there is no item."""
    query_ids: Ids | None = None
    """The ids of the queries, where they have some."""
    item_ids: Ids | None = None
    """The ids of the gallery's rows, where they have some."""


def risk_lower_bound(entropy: Tensor, n_items: int) -> Tensor:
    """Lower bound of the 0/1 risk of any choice among `n_items` items, given the posterior's entropy (Eq. 3).

    `entropy` [...] is in nats; the result is float64 of the same shape. Inverts f(r) = H2(r) + r log(N - 1), which
    rises from 0 to log N on [0, (N - 1)/N], by bisection to 1e-12, and returns the lower end of the last interval, so
    that rounding cannot break the bound.
    """
    checks.integer(n_items, "n_items", least=1)
    return smallest_risk(checks.floating(entropy, "entropy").detach().double(), n_items)


def smallest_risk(entropy: Tensor, n_items: int | Tensor) -> Tensor:
    """`risk_lower_bound` of float64 `entropy`, which each query may have over a number of items of its own."""
    if entropy.is_cuda:  # some 300 kernels for a few numbers take longer than the way to the host and back
        bound = smallest_risk(entropy.cpu(), n_items.cpu() if isinstance(n_items, Tensor) else n_items)
        return bound.pin_memory().to(entropy.device, non_blocking=True)
    items = torch.as_tensor(n_items, dtype=torch.float64, device=entropy.device)
    low = torch.zeros_like(entropy)
    high = ((items - 1) / items).expand_as(entropy)  # zero for a single item, and so is the bound
    log_rest = torch.log((items - 1).clamp(min=1))
    for _ in range(40):
        middle = (low + high) / 2
        value = torch.special.entr(middle) + torch.special.entr(1 - middle) + middle * log_rest
        below = value <= entropy
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return low


class RetrievalEntropy(nn.Module):
    """Retrieval entropy of queries over a gallery: `scorer(queries)` returns a `RetrievalPosterior`.

    `model`: a flow or a head. `direction="t2i"`: queries are texts and the gallery holds images; "i2t": the other way
    round. `gallery`: a tensor, an array, a `.npy` file, a folder of shards or a `Gallery`.

    With a `PosteriorHead`, one call of its network gives the Bayes posterior of "which item is it", in calibrated nats.
    Typical `reference` queries replace the bank of queries that the head keeps to correct for items that are near to
    everything; a head that corrects for none refuses them. The settings that follow are those of a flow. Where the
    processor multiplies in bfloat16, all but the best items are scored in it, if that costs less than .01 nats; the
    attribute `precision` can be set to "float32".

    For each query, `n_samples` embeddings of the other modality are drawn from the conditional flow in `n_steps` steps
    with `guidance`; `settings` has these and the rest of what `sample` can be told, and a keyword that is given
    overrides it. All queries share the same noise, drawn by `seed` (0 by default). Each item is scored by the mean of
    von Mises-Fisher kernels with concentration `kappa` (100 by default, at most 1e5) around the samples, and
    normalising the scores over the gallery gives the posterior, of which the `top_k` most probable items are listed.
    The defaults are the paper's; `fast` has a cheaper setting.

    The state dict contains the model, not the gallery; moving the scorer to a device leaves a `Gallery` that it was
    given where it is.
    """

    reference: Tensor | None

    def __init__(
        self,
        model: GeoFlow | PosteriorHead,
        gallery: GallerySource | Gallery,
        direction: str = "t2i",
        n_samples: int | None = None,
        kappa: float | None = None,
        guidance: float | None = None,
        n_steps: int | None = None,
        seed: int | None = None,
        *,
        top_k: int = 10,
        reference: Tensor | Array | None = None,
        settings: SamplingSettings | None = None,
    ) -> None:
        super().__init__()
        self.direction = Direction.of(direction, conditional=True)
        self.top_k, self.seed = checks.integer(top_k, "top_k", 1), checks.integer(0 if seed is None else seed, "seed")
        steered = {"n_samples": n_samples, "n_steps": n_steps, "guidance": guidance}
        self.source: Source
        if isinstance(model, PosteriorHead):
            _refuse(model, **steered, kappa=kappa, seed=seed, settings=settings)
            self.head = model
            self.source = HeadSource(model, self.direction)
        elif isinstance(model, GeoFlow):
            sampling = settings_from(SamplingSettings(), settings, **steered)
            self.flow = model
            checked = check_kappa(PAPER_KAPPA if kappa is None else kappa)
            self.source = FlowSource(model, self.direction, sampling, checked, self.seed)
        else:
            raise TypeError(f"RetrievalEntropy needs a GeoFlow or a PosteriorHead, got {type(model).__name__}")
        self.query_dim = self.source.query_dim
        self.gallery = Gallery.of(gallery)
        if self.gallery.dim != self.source.item_dim:
            raise ValueError(
                f"gallery has width {self.gallery.dim}, but the {self.source.NAME} expects {self.source.item_dim}"
            )
        made_for = self.direction.items(*self.source.origin.encoders)
        refuse_other_encoder({f"the {self.source.NAME}": made_for, "the gallery": self.gallery.encoder})
        self._marginals: OncePerGallery[Tensor] = OncePerGallery()
        self.register_buffer("reference", self._checked_reference(reference), persistent=False)

    @property
    def sampling(self) -> SamplingSettings:
        """How samples are drawn from the flow."""
        return self._flow_source.sampling

    @property
    def kappa(self) -> float:
        """Concentration of the kernels around the samples of the flow."""
        return self._flow_source.kappa

    @kappa.setter
    def kappa(self, kappa: float) -> None:
        self._flow_source.kappa = check_kappa(kappa)

    @property
    def precision(self) -> str:
        """In which points are multiplied by the items: "auto", "float32" or "bfloat16", as `ops.gallery_posterior`
        explains. It can be set; at first it is "auto" for heads, and for flows that are sampled in "auto" or
        "bfloat16"; otherwise "float32"."""
        return self.source.precision

    @precision.setter
    def precision(self, precision: str) -> None:
        self.source.precision = checks.precision(precision)

    @property
    def _flow_source(self) -> FlowSource:
        if not isinstance(self.source, FlowSource):
            raise TypeError(f"the points of a {self.source.NAME} are not drawn from a flow")
        return self.source

    @property
    def _head_source(self) -> HeadSource:
        if not isinstance(self.source, HeadSource):
            raise TypeError("the scores of a flow are not corrected by typical queries; those of a head are")
        return self.source

    def _checked_reference(self, reference: Tensor | Array | None) -> Tensor | None:
        if reference is None:
            return None
        source = self._head_source
        rows = checks.rows(reference, "reference", self.query_dim, source.example, "R")
        if len(rows) == 0:
            raise ValueError(f"reference must be [R, {self.query_dim}], got {tuple(rows.shape)}")
        check_rows(rows, "reference")
        if not source.uses_reference:
            raise ValueError(
                f"reference= would change nothing: this head corrects no {self.direction} scores for hubs (its "
                "hub_weight is 0, as it is without a bank); leave it out"
            )
        return rows

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RetrievalEntropy:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.gallery = self.gallery.on(self.source.example.device)
        return self

    @classmethod
    def fast(
        cls, flow: GeoFlow, gallery: GallerySource | Gallery, direction: str = "t2i", **settings: Any
    ) -> RetrievalEntropy:
        """A scorer with the cheapest setting that ranks queries no worse than the paper's (measured in
        docs/entropy.md): few samples from antithetic noise and few Adams-Bashforth steps. `settings` are keywords of
        `RetrievalEntropy` that override it."""
        return cls(flow, gallery, direction, **{"settings": FAST_SAMPLING, **settings})

    @property
    def settings(self) -> dict[str, Any]:
        """Everything a score depends on besides the model, the gallery and the query."""
        return {
            **self.source.settings,
            **({} if self.reference is None else {"reference": hashing.digest([self.reference])}),
            **self.source.solver_settings,
        }

    def item_marginals(self) -> Tensor:
        """Log-marginals [N] of the gallery items, up to a constant, which are subtracted from a head's scores. They are
        computed once, and again after the head, the gallery or the reference has changed."""
        source, reference = self._head_source, self.reference
        made_with = flow_marks(source.head), marks(() if reference is None else (reference,))

        def compute() -> Tensor:
            return source.item_marginals(self.gallery, reference).float()

        return self._marginals.of(self.gallery, made_with, compute).to(source.example)

    if TYPE_CHECKING:  # a module's call has no types of its own

        def __call__(
            self,
            queries: Tensor | Array | Embeddings,
            advance: Advance | None = None,
            *,
            allowed: Mask | None = None,
            batch_size: int | None = None,
        ) -> RetrievalPosterior: ...

    @torch.no_grad()
    def forward(
        self,
        queries: Tensor | Array | Embeddings,
        advance: Advance | None = None,
        *,
        allowed: Mask | None = None,
        batch_size: int | None = None,
    ) -> RetrievalPosterior:
        """Posterior over the gallery for each of the `queries` [Q, d], unit rows: a tensor or an array in any
        floating-point type, or `gf.Embeddings`, whose ids the result then has. `advance(n)`, if given, is called
        whenever the samples of n more queries are drawn.

        `allowed`: a boolean mask of the items that there are, [N] for all queries or [Q, N]; every query must have one.
        The result is that of a gallery of these items alone, by their numbers in this one: probabilities sum to one
        over them, and entropy and risk count no others. Lists of fewer than `top_k` items end with index -1 and
        probability 0. The marginals of a head's items, which depend on no other item, are those of the whole gallery.

        The samples of `batch_size` queries are in memory at a time, by default those that 128 MB or half of a GPU's
        spare memory have room for. Each batch is one pass over the gallery. Results do not depend on it beyond
        rounding.
        """
        made_for = self.direction.queries(*self.source.origin.encoders)
        queries, query_ids = named_rows(queries, {f"the {self.source.NAME}": made_for})
        rows = checks.rows(queries, "queries", self.query_dim, self.source.example, "Q")
        check_rows(rows, "queries")
        there = self.gallery.allowed_items(allowed, len(rows), rows.device)
        bias = -self.item_marginals() if isinstance(self.source, HeadSource) else None
        size = batch_rows(check_batch_size(batch_size), rows.device, self.source.point_bytes)
        size = max(1, -(-len(rows) // max(1, -(-len(rows) // size))))  # batches of about the same size
        if self.gallery.is_divided:
            size = self.gallery.world.share(size)  # ranks draw and score together

        def scored(some: slice) -> RetrievalPosterior:
            return self._scored(rows[some], len(rows), bias, there and there.of_queries(some), advance)

        return dataclasses.replace(in_batches(scored, len(rows), size), query_ids=query_ids, item_ids=self.gallery.ids)

    def _scored(
        self, queries: Tensor, total: int, bias: Tensor | None, allowed: Allowed | None, advance: Advance | None
    ) -> RetrievalPosterior:
        """The posterior for one batch of `total` queries, with the `bias` [N] of items, among those `allowed`."""
        draw = self._draw_among_ranks if self.gallery.is_divided else self.source.draw
        drawn = draw(queries, advance, total)
        samples = drawn.samples
        statistics = self.gallery.statistics(
            samples,
            drawn.kappa,
            self.top_k,
            bias,
            sample_bias=drawn.bias,
            precision=drawn.precision,
            allowed=allowed,
        )
        items = len(self.gallery) if allowed is None else allowed.count(len(queries))
        post = statistics.posterior(torch.float64)  # the bound on the risk is taken before rounding
        top_prob = post.top_prob.to(samples.dtype)
        return RetrievalPosterior(
            post.entropy.to(samples.dtype),
            post.top_index[:, 0],
            top_prob[:, 0],
            smallest_risk(post.entropy, items).to(samples.device),
            post.top_index,
            top_prob,
        )

    score = forward

    def divide_among_ranks(self) -> None:
        """Divides the gallery's items among the ranks of its world. From then on all ranks must call the scorer
        together with the same queries; each receives the whole posterior."""
        self.gallery = self.gallery.divided_among_ranks()

    def draw(self, queries: Tensor, advance: Advance | None = None) -> Tensor:
        """Samples [Q, M, d] of the gallery's modality for each of the `queries` [Q, d'], drawn from the flow."""
        check_rows(queries, "queries")
        return self._flow_source.draw(queries, advance).samples

    def _draw_among_ranks(self, queries: Tensor, advance: Advance | None, total: int) -> ScoringPoints:
        """Draws the same points as the source does; each rank draws those of its share of the queries."""
        world = self.gallery.world
        shares = world.shares(len(queries))
        own, counts = shares[world.rank], [len(share) for share in shares]
        drawn = self.source.draw(queries[own.start : own.stop], None, total)
        if advance is not None:
            advance(len(queries))
        bias = None if drawn.bias is None else world.gather_rows(drawn.bias, counts)
        return ScoringPoints(world.gather_rows(drawn.samples, counts), drawn.kappa, bias, drawn.precision)


def _refuse(model: nn.Module, **flow_only: Any) -> None:
    """Raises a TypeError that names a setting of flows which was passed with another model."""
    for name, value in flow_only.items():
        if value is not None:
            raise TypeError(f"{name}= is a setting of flows; a {type(model).__name__} has none")
