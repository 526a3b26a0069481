"""Retrieval entropy: how ambiguous a query is over a gallery, from samples of the conditional flow (Sec. 4.1)."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from geoflow_fast import ops
from geoflow_fast.directions import Direction
from geoflow_fast.flow.model import GeoFlow, flow_digest
from geoflow_fast.flow.sampling import SamplingSettings, StartingPoints, sample_conditional
from geoflow_fast.geometry import check_rows
from geoflow_fast.ops.gallery_statistics import GalleryStatistics
from geoflow_fast.retrieval import marginals
from geoflow_fast.retrieval.gallery import Gallery, GallerySource
from geoflow_fast.retrieval.index import GalleryIndex
from geoflow_fast.runtime import checks, hashing
from geoflow_fast.runtime.progress import Advance

POSTERIORS = ("likelihood", "bayes")


CHOICES = {"posterior": POSTERIORS, "marginal": marginals.MARGINALS, "prune": ops.PRUNE}


FAST: dict[str, Any] = {"n_samples": 40, "n_steps": 8, "solver": "ab2", "grid": "late", "noise": "antithetic"}
"""Settings of `RetrievalEntropy.fast`."""


@dataclass(frozen=True)
class RetrievalPosterior:
    """The posterior over the gallery of each of Q queries; detached tensors on the device of the queries."""

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
    log_rest = torch.log(torch.tensor(n_items - 1.0, dtype=torch.float64))
    for _ in range(40):
        middle = (low + high) / 2
        value = torch.special.entr(middle) + torch.special.entr(1 - middle) + middle * log_rest
        below = value <= entropy
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return low


class RetrievalEntropy(nn.Module):
    """Retrieval entropy of queries over a gallery: `scorer(queries)` returns a `RetrievalPosterior`.

    `direction="t2i"`: queries are texts and the gallery holds images; "i2t": the other way round. `gallery`: a tensor,
    an array, a `.npy` file or a folder of shards. For each query, `n_samples` embeddings of the other modality are
    drawn from the conditional flow (`n_steps`, `solver`, `grid`, `noise` and `guidance` as in `sample`; all queries
    share the same noise, drawn by `seed`). Each item is scored by the mean of von Mises-Fisher kernels with
    concentration `kappa` around the samples, and normalising the scores over the gallery gives the posterior. The
    defaults are the paper's; `fast` has a cheaper setting.

    `posterior="likelihood"` (the paper) normalises p(item | query); "bayes" first divides by p(item), which gives the
    probability that the item is the one meant. The marginals p(item) are computed once per gallery:
    `marginal="scores"` averages the scores over typical `reference` queries [R, d], a few hundred; "density" uses the
    flow's log-density, which needs no reference and is far more expensive.

    With the `index` of a gallery tensor, scoring on a CPU skips items that provably do not matter, as `prune` says (see
    `ops.gallery_posterior`); `risk_lower_bound` accounts for the possible change. The state dict contains the flow, not
    the gallery.
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
        n_samples: int = 50,
        kappa: float = 100.0,
        guidance: float = 3.0,
        n_steps: int = 50,
        seed: int = 0,
        *,
        solver: str = "euler",
        grid: str = "uniform",
        noise: str = "iid",
        top_k: int = 10,
        posterior: str = "likelihood",
        reference: Tensor | None = None,
        marginal: str = "scores",
        index: GalleryIndex | None = None,
        prune: str = "auto",
    ) -> None:
        super().__init__()
        direction = Direction.of(direction, conditional=True)
        _check_settings(n_samples, kappa, top_k, posterior=posterior, marginal=marginal, prune=prune)
        if prune == "always" and index is None:
            raise ValueError('prune="always" needs the index= of the gallery; see gf.GalleryIndex.build')
        self.gallery = gallery if isinstance(gallery, Gallery) else Gallery(gallery)
        config = flow.config
        self.query_dim, item_dim = config.text_dim, config.image_dim
        if direction == "i2t":
            self.query_dim, item_dim = item_dim, self.query_dim
        if self.gallery.dim != item_dim:
            raise ValueError(f"gallery has width {self.gallery.dim}, but the flow generates width {item_dim}")
        if index is not None:
            if not self.gallery.in_memory:
                raise ValueError("index= needs a gallery in memory: pass it as a tensor")
            index.check_digest(self.gallery)
        self.flow, self.index, self.prune = flow, index, prune
        self.direction, self.kappa, self.top_k = direction, float(kappa), top_k
        self.n_samples, self.noise, self.seed = n_samples, noise, seed
        self.posterior, self.marginal = posterior, marginal
        self.solve = SamplingSettings(n_samples, n_steps, guidance, solver, grid, noise)
        generator = torch.Generator().manual_seed(checks.integer(seed, "seed"))
        start = StartingPoints.draw(self.solve, config.flow_dims, direction, generator, config.manifold)
        self.register_buffer("start_generated", start.generated, persistent=False)
        self.register_buffer("start_condition", start.condition, persistent=False)
        self.register_buffer("reference", None if reference is None else reference.detach(), persistent=False)
        self.register_buffer("log_marginal", None, persistent=False)
        self._check_reference()

    def _check_reference(self) -> None:
        if self.posterior == "bayes" and self.marginal == "scores":
            self._reference()
        if self.reference is None:
            return
        if self.reference.dim() != 2 or self.reference.shape[1] != self.query_dim or len(self.reference) == 0:
            raise ValueError(f"reference must be [R, {self.query_dim}], got {tuple(self.reference.shape)}")
        check_rows(self.reference, "reference")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RetrievalEntropy:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.gallery.to(self.start_generated.device)
        return self

    @classmethod
    def fast(
        cls, flow: GeoFlow, gallery: GallerySource | Gallery, direction: str = "t2i", **settings: Any
    ) -> RetrievalEntropy:
        """A scorer with the cheapest setting that ranks queries no worse than the paper's (measured in
        docs/entropy.md): few samples from antithetic noise and few Adams-Bashforth steps. `settings` override it."""
        return cls(flow, gallery, direction, **{**FAST, **settings})

    @property
    def settings(self) -> dict[str, Any]:
        """Everything a score depends on besides flow, gallery and query."""
        return {
            "direction": self.direction,
            "n_samples": self.n_samples,
            "kappa": self.kappa,
            "seed": self.seed,
            "noise": self.noise,
            "posterior": self.posterior,
            "marginal": self.marginal if self.posterior == "bayes" else None,
            "prune": "never" if self.index is None else self.prune,
            **dataclasses.asdict(self.solve),
        }

    @property
    def marginal_settings(self) -> dict[str, Any]:
        """Everything the items' marginals depend on besides flow and gallery."""
        facts: dict[str, Any] = {"marginal": self.marginal, "direction": self.direction, "seed": self.seed}
        facts |= {"format": marginals.FORMAT, "n_steps": marginals.DENSITY_STEPS}
        if self.marginal == "scores":
            facts |= {**self.settings, "posterior": "bayes", "marginal": "scores", "prune": "never"}
            facts["reference"] = hashing.digest([self._reference()])
        return facts

    def item_marginals(self) -> Tensor:
        """Log-marginals [N] of the gallery items, up to a constant. Computed once, and stored beside a gallery on
        disk."""
        if self.log_marginal is None:
            facts = {**self.marginal_settings, "flow": flow_digest(self.flow), "gallery": self.gallery.digest()}
            found = marginals.computed_once(self.gallery.index_folder, facts, self._compute_marginals)
            self.log_marginal = found.to(self.start_generated)
        return self.log_marginal

    def _compute_marginals(self) -> Tensor:
        if self.marginal == "density":
            return marginals.log_flow_density(self.flow, self.gallery, self.direction, seed=self.seed)
        return marginals.log_mean_scores(self.draw(self._reference()), self.gallery, self.kappa)

    def _reference(self) -> Tensor:
        if self.reference is None:
            raise ValueError("the items' marginals need reference= queries [R, d], or marginal='density'")
        return self.reference

    if TYPE_CHECKING:  # a module's call has no types of its own

        def __call__(self, queries: Tensor) -> RetrievalPosterior: ...

    def forward(self, queries: Tensor) -> RetrievalPosterior:
        """Posterior over the gallery for each of the `queries` [Q, d], unit rows."""
        return self.score(queries)

    @torch.no_grad()
    def score(self, queries: Tensor, advance: Advance = lambda _: None) -> RetrievalPosterior:
        """Same as `forward`, and calls `advance(n)` whenever the samples of n more queries are drawn."""
        if checks.with_values(queries, "queries").dim() != 2 or queries.shape[1] != self.query_dim:
            raise ValueError(f"queries must be [Q, {self.query_dim}], got {tuple(queries.shape)}")
        samples = self._draw_spread(queries, advance) if self.gallery.is_spread else self.draw(queries, advance)
        return self._read_out(self._statistics(samples), samples)

    def spread(self) -> None:
        """Divides the gallery's items among the ranks of its world. From then on all ranks must call the scorer
        together with the same queries; each receives the whole posterior."""
        if self.index is not None:
            raise ValueError("a gallery whose items are spread over ranks is not pruned; leave out index=")
        self.gallery.spread()

    def _draw_spread(self, queries: Tensor, advance: Advance) -> Tensor:
        """`draw`, each rank its share of the queries."""
        world = self.gallery.world
        shares = world.shares(len(queries))
        own = shares[world.rank]
        drawn = self.draw(queries[own.start : own.stop], lambda _: None)
        advance(len(queries))
        return world.gather_rows(drawn, [len(share) for share in shares])

    def draw(self, queries: Tensor, advance: Advance = lambda _: None) -> Tensor:
        """Samples [Q, M, d] of the gallery's modality for each of the `queries` [Q, d']."""
        start = StartingPoints(self.start_generated, self.start_condition).to(next(self.flow.parameters()))
        queries = queries.to(start.generated)
        return sample_conditional(self.flow, queries, self.direction, start, self.solve, advance)

    def _statistics(self, samples: Tensor) -> GalleryStatistics:
        bias = -self.item_marginals().to(samples) if self.posterior == "bayes" else None
        index = self.index if samples.device.type == "cpu" else None
        prune = "auto" if index is None else self.prune
        return self.gallery.statistics(samples, self.kappa, self.top_k, bias, index=index, prune=prune)

    def _read_out(self, statistics: GalleryStatistics, like: Tensor) -> RetrievalPosterior:
        post = statistics.posterior(torch.float64)  # the bound on the risk is taken before rounding
        entropy, top_prob = post.entropy.to(like.dtype), post.top_prob.to(like.dtype)
        return RetrievalPosterior(
            entropy,
            post.top_index[:, 0],
            top_prob[:, 0],
            risk_lower_bound((post.entropy - post.entropy_bound).clamp_min(0), len(self.gallery)).to(like.device),
            post.top_index,
            top_prob,
            post.entropy_bound,
        )


def _check_settings(n_samples: int, kappa: float, top_k: int, **chosen: str) -> None:
    for name, value in chosen.items():
        if value not in CHOICES[name]:
            raise ValueError(f"{name} must be one of {CHOICES[name]}, got {value!r}")
    for name, count in (("n_samples", n_samples), ("top_k", top_k)):
        if not isinstance(count, numbers.Integral):
            raise TypeError(f"{name} must be an integer, got {count!r}")
    if n_samples < 1 or top_k < 1:
        raise ValueError(f"n_samples={n_samples} and top_k={top_k} must be at least 1")
    if not 0 <= kappa < float("inf"):
        raise ValueError(f"kappa must be finite and not negative, got {kappa}")
