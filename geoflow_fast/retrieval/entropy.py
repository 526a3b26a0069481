"""Retrieval entropy: how ambiguous a query is over a gallery, from samples of the conditional flow (Sec. 4.1)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from geoflow_fast.data.rows import Array
from geoflow_fast.directions import Direction
from geoflow_fast.flow.model import GeoFlow, flow_digest
from geoflow_fast.flow.sampling import FAST_SAMPLING, SamplingSettings, StartingPoints, sample_conditional
from geoflow_fast.geometry import check_rows
from geoflow_fast.ops.gallery_posterior import check_kappa
from geoflow_fast.retrieval import marginals
from geoflow_fast.retrieval.freshness import flow_marks, marks
from geoflow_fast.retrieval.gallery import Gallery, GallerySource
from geoflow_fast.runtime import checks, hashing
from geoflow_fast.runtime.progress import Advance
from geoflow_fast.runtime.settings import deprecated_attribute, deprecated_keyword, settings_from

POSTERIORS = ("likelihood", "bayes")
MARGINALS = ("scores", "density")


@dataclass(frozen=True)
class RetrievalPosterior:
    """The posterior over the gallery of each of Q queries; detached tensors on the device of the flow."""

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
    """[Q, k] int64, the k most probable items, most probable first."""
    top_prob: Tensor
    """[Q, k], their probabilities."""
    entropy_bound: Tensor
    """[Q] float64, how much pruning can have changed `entropy` at most; 0 for queries scored against all items."""


def risk_lower_bound(entropy: Tensor, n_items: int) -> Tensor:
    """Lower bound of the 0/1 risk of any choice among `n_items` items, given the posterior's entropy (Eq. 3).

    `entropy` [...] is in nats; the result is float64 of the same shape. Inverts f(r) = H2(r) + r log(N - 1), which
    rises from 0 to log N on [0, (N - 1)/N], by bisection to 1e-12, and returns the lower end of the last interval, so
    that rounding cannot break the bound.
    """
    checks.integer(n_items, "n_items", least=1)
    entropy = checks.floating(entropy, "entropy").detach().double()
    low = torch.zeros_like(entropy)
    if n_items == 1:
        return low
    high = torch.full_like(entropy, (n_items - 1) / n_items)
    log_rest = torch.log(torch.tensor(n_items - 1.0, dtype=torch.float64, device=entropy.device))
    for _ in range(40):
        middle = (low + high) / 2
        value = torch.special.entr(middle) + torch.special.entr(1 - middle) + middle * log_rest
        below = value <= entropy
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return low


class RetrievalEntropy(nn.Module):
    """Retrieval entropy of queries over a gallery: `scorer(queries)` returns a `RetrievalPosterior`.

    `direction="t2i"`: queries are texts and the gallery holds images; "i2t": the other way round. `gallery`: a tensor,
    an array, a `.npy` file, a folder of shards or a `Gallery`. For each query, `n_samples` embeddings of the other
    modality are drawn from the conditional flow in `n_steps` steps with `guidance`; `settings` has these and the rest
    of what `sample` can be told, and a keyword that is given overrides it. All queries share the same noise, drawn by
    `seed`. Each item is scored by the mean of von Mises-Fisher kernels with concentration `kappa`, at most 1e5,
    around the samples, and normalising the scores over the gallery gives the posterior, of which the `top_k` most
    probable items are listed. The defaults are the paper's; `fast` has a cheaper setting.

    `posterior="likelihood"` (the paper) normalises p(item | query); "bayes" first divides by p(item), which gives the
    probability that the item is the one meant. The marginals p(item) are computed once per gallery, and again after a
    change of the flow's weights: from the scores that items have for typical `reference` queries [R, d], a few hundred;
    or with `reference="density"` from the flow's log-density, which needs no queries and is far more expensive.

    If the gallery has an index, scoring on a CPU skips items that provably do not matter, and `risk_lower_bound`
    accounts for the possible change. The state dict contains the flow, not the gallery; moving the scorer to a device
    leaves a `Gallery` that it was given where it is.
    """

    start_generated: Tensor
    start_condition: Tensor
    reference: Tensor | None
    log_marginal: Tensor | None

    def __init__(
        self,
        flow: GeoFlow,
        gallery: GallerySource | Gallery,
        direction: str = "t2i",
        n_samples: int | None = None,
        kappa: float = 100.0,
        guidance: float | None = None,
        n_steps: int | None = None,
        seed: int = 0,
        *,
        top_k: int = 10,
        posterior: str = "likelihood",
        reference: Tensor | Array | str | None = None,
        settings: SamplingSettings | None = None,
        **deprecated: Any,
    ) -> None:
        super().__init__()
        call = "RetrievalEntropy"
        index = deprecated_keyword(deprecated, "index", call, "a Gallery(..., index=...)")
        prune = deprecated_keyword(deprecated, "prune", call, "a Gallery(..., prune=...)")
        marginal = deprecated_keyword(deprecated, "marginal", call, 'reference="density", or queries as the reference')
        self.direction = Direction.of(direction, conditional=True)
        self.sampling = settings_from(
            SamplingSettings(), settings, deprecated, call, n_samples=n_samples, n_steps=n_steps, guidance=guidance
        )
        self.top_k, self.seed = checks.integer(top_k, "top_k", 1), checks.integer(seed, "seed")
        for name, value, known in (("posterior", posterior, POSTERIORS), ("marginal", marginal or "scores", MARGINALS)):
            if value not in known:
                raise ValueError(f"{name} must be one of {known}, got {value!r}")
        self.flow, self.kappa, self.posterior = flow, check_kappa(kappa), posterior
        self.gallery = Gallery.of(gallery)
        if index is not None or prune is not None:
            self.gallery = self.gallery.with_index(index, prune or "auto")
        config = flow.config
        widths = config.image_dim, config.text_dim
        self.query_dim, item_dim = self.direction.queries(*widths), self.direction.items(*widths)
        if self.gallery.dim != item_dim:
            raise ValueError(f"gallery has width {self.gallery.dim}, but the flow generates width {item_dim}")
        generator = torch.Generator().manual_seed(self.seed)
        start = StartingPoints.draw(self.sampling, config.flow_dims, self.direction, generator, config.manifold)
        self.register_buffer("start_generated", start.generated, persistent=False)
        self.register_buffer("start_condition", start.condition, persistent=False)
        self.register_buffer("log_marginal", None, persistent=False)
        self._marginal_marks: Hashable = None
        self._marginal_facts: dict[str, Any] = {}
        self._set_reference("density" if marginal == "density" else reference)

    def __getattr__(self, name: str) -> Any:
        if name in ("n_samples", "noise"):
            value, now = getattr(self.sampling, name), f"RetrievalEntropy.sampling.{name}"
        elif name in ("index", "prune"):
            value, now = getattr(self.gallery, name), f"RetrievalEntropy.gallery.{name}"
        elif name == "solve":
            value, now = self.sampling, "RetrievalEntropy.sampling"
        else:
            return super().__getattr__(name)
        return deprecated_attribute(f"RetrievalEntropy.{name}", now, value)

    def _set_reference(self, reference: Tensor | Array | str | None) -> None:
        self.marginal = "density" if isinstance(reference, str) else "scores"
        if isinstance(reference, str):
            if reference != "density":
                raise ValueError(f'reference must be queries [R, {self.query_dim}] or "density", got {reference!r}')
            reference = None
        elif reference is not None:
            reference = checks.rows(reference, "reference", self.query_dim, self.start_generated, "R")
            if len(reference) == 0:
                raise ValueError(f"reference must be [R, {self.query_dim}], got {tuple(reference.shape)}")
            check_rows(reference, "reference")
        self.register_buffer("reference", reference, persistent=False)
        if self.posterior == "bayes" and self.marginal == "scores":
            self._reference_queries()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RetrievalEntropy:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.gallery = self.gallery.on(self.start_generated.device)
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
        """Everything a score depends on besides flow, gallery and query."""
        return {
            "direction": str(self.direction),
            "n_samples": self.sampling.n_samples,
            "kappa": self.kappa,
            "seed": self.seed,
            "noise": self.sampling.noise,
            "posterior": self.posterior,
            "marginal": self.marginal if self.posterior == "bayes" else None,
            "prune": "never" if self.gallery.index is None else self.gallery.prune,
            "n_steps": self.sampling.n_steps,
            "solver": self.sampling.solver,
            "grid": self.sampling.grid,
            "guidance": self.sampling.guidance,
        }

    @property
    def marginal_settings(self) -> dict[str, Any]:
        """Everything the items' marginals depend on besides flow and gallery."""
        facts: dict[str, Any] = {"marginal": self.marginal, "direction": str(self.direction), "seed": self.seed}
        facts |= {"format": marginals.FORMAT, "n_steps": marginals.DENSITY_STEPS}
        if self.marginal == "scores":
            facts |= {**self.settings, "posterior": "bayes", "marginal": "scores", "prune": "never"}
            facts["reference"] = hashing.digest([self._reference_queries()])
        return facts

    def item_marginals(self) -> Tensor:
        """Log-marginals [N] of the gallery items, up to a constant. They are computed once, and stored beside a gallery
        on disk. They are computed again after the flow, the gallery, the reference or a setting has changed."""
        own = self.start_generated, *(() if self.reference is None else (self.reference,))
        current = (flow_marks(self.flow), self.gallery.marks(), marks(own), self.kappa, self.sampling, self.seed)
        if self.log_marginal is None or current != self._marginal_marks:
            facts = {**self.marginal_settings, "flow": flow_digest(self.flow), "gallery": self.gallery.digest()}
            if self.log_marginal is None or facts != self._marginal_facts:
                computed = marginals.computed_once(self.gallery.index_folder, facts, self._compute_marginals)
                self.log_marginal = computed.to(self.start_generated)
            self._marginal_marks, self._marginal_facts = current, facts
        return self.log_marginal

    def _compute_marginals(self) -> Tensor:
        if self.marginal == "density":
            return marginals.log_flow_density(self.flow, self.gallery, self.direction, seed=self.seed)
        return marginals.log_mean_scores(self.draw(self._reference_queries()), self.gallery, self.kappa)

    def _reference_queries(self) -> Tensor:
        if self.reference is None:
            raise ValueError('the items\' marginals need reference= queries [R, d], or reference="density"')
        return self.reference

    if TYPE_CHECKING:  # a module's call has no types of its own

        def __call__(self, queries: Tensor | Array, advance: Advance | None = None) -> RetrievalPosterior: ...

    @torch.no_grad()
    def forward(self, queries: Tensor | Array, advance: Advance | None = None) -> RetrievalPosterior:
        """Posterior over the gallery for each of the `queries` [Q, d], unit rows: a tensor or an array in any
        floating-point type. `advance(n)`, if given, is called whenever the samples of n more queries are drawn."""
        queries = checks.rows(queries, "queries", self.query_dim, next(self.flow.parameters()), "Q")
        draw = self._draw_among_ranks if self.gallery.is_divided else self.draw
        samples = draw(queries, advance)
        bias = -self.item_marginals().to(samples) if self.posterior == "bayes" else None
        statistics = self.gallery.statistics(samples, self.kappa, self.top_k, bias, use_index=True)
        post = statistics.posterior(torch.float64)  # the bound on the risk is taken before rounding
        surely = (post.entropy - post.entropy_bound).clamp_min(0)
        top_prob = post.top_prob.to(samples.dtype)
        return RetrievalPosterior(
            post.entropy.to(samples.dtype),
            post.top_index[:, 0],
            top_prob[:, 0],
            risk_lower_bound(surely, len(self.gallery)).to(samples.device),
            post.top_index,
            top_prob,
            post.entropy_bound,
        )

    score = forward

    def divide_among_ranks(self) -> None:
        """Divides the gallery's items among the ranks of its world. From then on all ranks must call the scorer
        together with the same queries; each receives the whole posterior."""
        self.gallery = self.gallery.divided_among_ranks()

    def spread(self) -> None:
        """Deprecated name of `divide_among_ranks`."""
        warnings.warn("RetrievalEntropy.spread is deprecated; use divide_among_ranks", DeprecationWarning, stacklevel=2)
        self.divide_among_ranks()

    # unchecked: score calls it with queries that it has checked
    def draw(self, queries: Tensor, advance: Advance | None = None) -> Tensor:
        """Samples [Q, M, d] of the gallery's modality for each of the `queries` [Q, d']."""
        start = StartingPoints(self.start_generated, self.start_condition).to(next(self.flow.parameters()))
        queries = queries.to(start.generated)
        return sample_conditional(self.flow, queries, self.direction, start, self.sampling, advance)

    def _draw_among_ranks(self, queries: Tensor, advance: Advance | None) -> Tensor:
        """Draws the same samples as `draw`; each rank draws those of its share of the queries."""
        world = self.gallery.world
        shares = world.shares(len(queries))
        own = shares[world.rank]
        drawn = self.draw(queries[own.start : own.stop])
        if advance is not None:
            advance(len(queries))
        return world.gather_rows(drawn, [len(share) for share in shares])
