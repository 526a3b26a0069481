"""Retrieval entropy: how ambiguous a query is over a gallery, from samples of the conditional flow (Sec. 4.1)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from geoflow_fast import ops
from geoflow_fast.gallery import Gallery, GallerySource
from geoflow_fast.jobs import Advance
from geoflow_fast.model import GeoFlow
from geoflow_fast.ops.gallery_posterior import GalleryStatistics
from geoflow_fast.sampling import Solve, StartingPoints, sample_conditional

CONDITIONAL = ("i2t", "t2i")
FAST: dict[str, Any] = {"n_samples": 16, "n_steps": 10, "solver": "ab2", "noise": "antithetic"}
"""Settings of `RetrievalEntropy.fast`."""


@dataclass(frozen=True)
class RetrievalPosterior:
    """The posterior over the gallery for each of Q queries, on the device of the queries, detached."""

    entropy: Tensor
    """[Q], nats: 0 for a query with one possible answer, log N for one that fits all items alike."""
    map_index: Tensor
    """[Q] int64, the most probable item."""
    map_prob: Tensor
    """[Q], its probability."""
    risk_lower_bound: Tensor
    """[Q] float64, the least probability of error that this entropy allows (Fano)."""
    top_index: Tensor
    """[Q, k] int64, most probable first."""
    top_prob: Tensor
    """[Q, k]."""


def risk_lower_bound(entropy: Tensor, n_items: int) -> Tensor:
    """Least 0/1 risk of the best guess among `n_items` given the posterior's entropy [...] in nats (Eq. 3): float64.

    Inverts f(r) = H2(r) + r log(N - 1), which rises from 0 to log N on [0, (N - 1)/N], by bisection to 1e-12; the lower
    end of the last interval is returned, so the bound holds whatever the rounding.
    """
    if n_items < 1:
        raise ValueError(f"n_items must be at least 1, got {n_items}")
    entropy = entropy.detach().double()
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
    """Scores queries against a gallery: `scorer(queries)` -> `RetrievalPosterior`.

    `direction="t2i"`: queries are texts, the gallery images; "i2t" the other way round. Per query, `n_samples`
    embeddings of the missing side are drawn from the conditional flow (`n_steps` steps of `solver` under `guidance`,
    all queries from the same noise, a function of `seed`), and each gallery item is scored by a von Mises-Fisher kernel
    of concentration `kappa` around them; the softmax over the gallery is the posterior. Defaults are the paper's.

    `gallery`: tensor, array, `.npy` file or folder of shards. The state dict holds the flow, not the gallery.
    """

    start_generated: Tensor
    start_condition: Tensor

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
    ) -> None:
        super().__init__()
        if direction not in CONDITIONAL:
            raise ValueError(f"direction must be one of {CONDITIONAL}, got {direction!r}")
        if n_samples < 1 or top_k < 1:
            raise ValueError(f"n_samples={n_samples} and top_k={top_k} must be at least 1")
        if not 0 <= kappa < float("inf"):
            raise ValueError(f"kappa must be finite and not negative, got {kappa}")
        self.gallery = gallery if isinstance(gallery, Gallery) else Gallery(gallery)
        config = flow.config
        self.query_dim, item_dim = config.text_dim, config.image_dim
        if direction == "i2t":
            self.query_dim, item_dim = item_dim, self.query_dim
        if self.gallery.dim != item_dim:
            raise ValueError(f"gallery has width {self.gallery.dim}, but the flow generates width {item_dim}")
        self.flow = flow
        self.direction, self.kappa, self.top_k = direction, kappa, top_k
        self.n_samples, self.noise, self.seed = n_samples, noise, seed
        self.solve = Solve(n_steps, solver, grid, guidance)
        generator = torch.Generator().manual_seed(seed)
        start = StartingPoints.draw(n_samples, config.flow_dims, direction, noise, generator, config.geometry)
        self.register_buffer("start_generated", start.generated, persistent=False)
        self.register_buffer("start_condition", start.condition, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RetrievalEntropy:
        super()._apply(fn, recurse)
        self.gallery.to(self.start_generated.device)
        return self

    @classmethod
    def fast(
        cls, flow: GeoFlow, gallery: GallerySource | Gallery, direction: str = "t2i", **settings: Any
    ) -> RetrievalEntropy:
        """The cheapest setting that ranks queries no worse than the paper's (docs/entropy.md has the measurement):
        few samples from antithetic noise, few Adams-Bashforth steps. `settings` override single ones."""
        return cls(flow, gallery, direction, **{**FAST, **settings})

    @property
    def settings(self) -> dict[str, Any]:
        """All that a score depends on besides flow, gallery and query."""
        return {
            "direction": self.direction,
            "n_samples": self.n_samples,
            "kappa": self.kappa,
            "seed": self.seed,
            "noise": self.noise,
            **dataclasses.asdict(self.solve),
        }

    def forward(self, queries: Tensor) -> RetrievalPosterior:
        """Posterior of each of the queries [Q, d], unit rows."""
        return self.score(queries)

    @torch.no_grad()
    def score(self, queries: Tensor, advance: Advance = lambda _: None) -> RetrievalPosterior:
        """`forward`, telling `advance` of queries whose samples are drawn."""
        if queries.dim() != 2 or queries.shape[1] != self.query_dim:
            raise ValueError(f"queries must be [Q, {self.query_dim}], got {tuple(queries.shape)}")
        start = StartingPoints(self.start_generated, self.start_condition)
        queries = queries.to(start.generated)
        samples = sample_conditional(self.flow, queries, self.direction, start, self.solve, advance)
        return self._read_out(self._score(samples), queries)

    def _score(self, samples: Tensor) -> GalleryStatistics:
        running: GalleryStatistics | None = None
        for first, items in self.gallery.blocks(samples.device, samples.dtype):
            part = ops.gallery_statistics(samples, items, self.kappa, self.top_k, first_index=first)
            running = part if running is None else running.merge(part)
        assert running is not None
        return running

    def _read_out(self, statistics: GalleryStatistics, like: Tensor) -> RetrievalPosterior:
        post = statistics.posterior(like.dtype)
        return RetrievalPosterior(
            post.entropy,
            post.top_index[:, 0],
            post.top_prob[:, 0],
            risk_lower_bound(post.entropy, len(self.gallery)).to(like.device),
            post.top_index,
            post.top_prob,
        )
