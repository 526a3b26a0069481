"""The gallery posterior without scoring items that provably do not matter.

**Upper bound of a score.** Let x_m be a query's samples with biases w_m, a their mean with weights in proportion to
exp(w_m), e_m = x_m - a, and P [r - 1, d] have orthonormal rows. For an item g, with residuals g' = g - P^T P g and
e_m' = e_m - P^T P e_m,

    <g, x_m> = <g, a> + <P g, P e_m> + <g', e_m'>  <=  <g, a> + <P g, P e_m> + |g'| |e_m'|     (Cauchy-Schwarz)

so u = kappa <g, a> + log mean_m exp(kappa (<P g, P e_m> + |g'| |e_m'|) + w_m) + bias >= s. Only the deviations are
bounded; the mean is exact. The second term is the score of the r-vector (P g, |g'|), which is stored, against
(P e_m, |e_m'|), so the kernel that scores items computes it, at r / d of the price. P is the gallery's leading
principal directions, which makes |g'| small, but any P is right, and so is any a. No row need have unit norm.

**Which items are left out.** The partition function Z is at least the sum of exp(s) over any items, here over the
`SEEDS` that look best by P alone, scored exactly. Items with u < log Z_seeds + log(LEFT_MASS / N) are left out:
together they have less than LEFT_MASS of the posterior. The sum of exp(u) over them, against Z of the items scored, is
what `mass_bound` and `entropy_bound` of the result are made of.

**Bytes.** With few queries the pass over the gallery that gives <g, a> is bound by memory. Where the processor has an
int8 unit and the index the rows' codes, an upper bound from a quarter of the bytes takes its place.

**Rounding.** u is raised by what float arithmetic can have taken from it or added to s: with unit roundoff h, norms
|g| <= G and |x| <= X, inner products of length n are off by at most n h G X, those of the deviations (|e| <= 2 X) by
2 n h G X, and log-mean-exps of M terms by (20 kappa G X + M + 16 + 4 |bias| + 4 |w|) h each. `_slack` adds these up.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from geoflow_fast.ops import native
from geoflow_fast.ops.gallery_search import RowCodes
from geoflow_fast.ops.gallery_statistics import GalleryStatistics

LEFT_MASS = 1e-6


SEEDS = 128


PILOT_ITEMS = 1024


FEWEST_ITEMS = 16_384
"""Galleries below this are scored whole by prune="auto": there is little to save."""


FEWEST_SAMPLES = 512
"""Calls with fewer samples of all queries together are scored whole by prune="auto": a pilot could cost them 5 %."""


LARGEST_BOUND_COST = 0.32
"""Price of a bound in units of a score above which prune="auto" does not try."""


LARGEST_PASS_COST = 0.1
"""Price of the exact inner products with the means, in units of a score, above which bounds from bytes serve."""


ROUNDED_COST = 0.55
"""Price of a score from products in bfloat16, in units of one in float32."""


QUERY_GROUP = 32
"""Queries whose bounds are computed in one pass over the gallery."""


BOUND_ENTRIES = 1 << 24
"""Upper bounds held at once: 64 MB in float32."""


@dataclass(frozen=True)
class PrefixRows:
    """A gallery's rows in few coordinates, for upper bounds of their scores."""

    projection: Tensor
    """[r - 1, d] float64, orthonormal rows."""
    rows: Tensor
    """[N, r] on the gallery's device: the projected item, then the norm of what the projection leaves."""
    largest_norm: float
    """The largest norm of a row of the gallery."""
    codes: RowCodes | None = dataclasses.field(default=None, kw_only=True)
    """The rows in bytes, for bounds of plain inner products."""

    def part(self, first: int, count: int) -> PrefixRows:
        """The index of `count` rows from `first` on."""
        some = slice(first, first + count)
        return dataclasses.replace(self, rows=self.rows[some], codes=None if self.codes is None else self.codes[some])

    def check(self, gallery: Tensor) -> None:
        """Refuses the index of another gallery, as far as size, width and 16 rows tell."""
        count, width = gallery.shape
        if (len(self.rows), self.projection.shape[1]) != (count, width):
            raise ValueError(
                f"the index is of {len(self.rows)} items of width {self.projection.shape[1]}, but the gallery has "
                f"{count} of width {width}"
            )
        if self.rows.device != gallery.device:
            raise ValueError(f"the index is on {self.rows.device}, but the gallery on {gallery.device}")
        some = torch.linspace(0, count - 1, min(count, 16), dtype=torch.float64, device="cpu").long().to(gallery.device)
        expected = gallery[some].double() @ self.projection.T
        wrong = (expected - self.rows[some, :-1]).abs().amax(dim=1) > 1e-4
        if bool(wrong.any()):
            raise ValueError(f"the index is of another gallery: item {int(some[wrong][0])} differs; build it anew")


def reduce_rows(x: Tensor, projection: Tensor) -> Tensor:
    """(P x, |x - P^T P x|) of float64 rows x [..., d], the norm rounded up: [..., r]."""
    kept = x @ projection.T
    whole = x.square().sum(-1, keepdim=True)
    rest = (whole - kept.square().sum(-1, keepdim=True)).clamp_min_(0).add_(whole, alpha=1e-12).sqrt_()
    return torch.cat((kept, rest), dim=-1)


@dataclass(frozen=True)
class WeightedSamples:
    """The samples of Q queries and their biases, if they have any."""

    samples: Tensor
    """[Q, M, d]."""
    bias: Tensor | None = None
    """[Q, M]."""
    elsewhere: Tensor | None = None
    """[Q] float64, log of the partition function over items of other shards, if some have been scored."""

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, some: slice | Tensor) -> WeightedSamples:
        others = (None if x is None else x[some] for x in (self.bias, self.elsewhere))
        return WeightedSamples(self.samples[some], *others)


Score = Callable[[WeightedSamples, Tensor, float, "Tensor | None"], Tensor]


Best = Callable[[Tensor, Tensor, int], Tensor]


Reduce = Callable[[WeightedSamples, Tensor], GalleryStatistics]


Whole = Callable[[WeightedSamples], GalleryStatistics]


Rounded = Callable[[WeightedSamples], "Tensor | None"]


@dataclass(frozen=True)
class _Queries:
    """Samples and what the bounds need of them, in the dtype of the samples."""

    points: WeightedSamples
    mean: Tensor
    """[Q, 1, d]."""
    spread: WeightedSamples
    """[Q, M, r], the deviations from the mean as `reduce_rows` gives them, with the biases of the points."""
    looks: Tensor
    """[Q, 1, r], the projected mean and a zero: a score against it ignores the residual."""

    def select(self, some: Tensor) -> _Queries:
        return _Queries(self.points[some], self.mean[some], self.spread[some], self.looks[some])


@dataclass(frozen=True)
class Pruner:
    """One gallery, index and kappa, and the exact kernels: `score(points, rows, kappa, bias)` -> [Q, N],
    `best(samples, rows, k)` -> [Q, k] int64, and `reduce(points, pick)` over the items `pick`.

    Queries that are not pruned go to `whole(points)`, which scores all items. `rounded(points)` -> [Q] bool says for
    which of them it does so in bfloat16, or None: for none."""

    gallery: Tensor
    prefix: PrefixRows
    kappa: float
    top_k: int
    item_bias: Tensor | None
    score: Score
    best: Best
    reduce: Reduce
    whole: Whole
    rounded: Rounded

    def statistics(self, points: WeightedSamples, *, always: bool) -> GalleryStatistics:
        """Statistics of all queries; those for which pruning does not promise to pay are scored whole."""
        items, samples = len(self.gallery), points.samples
        small = items < FEWEST_ITEMS or samples.shape[0] * samples.shape[1] < FEWEST_SAMPLES
        if not always and (small or self._bound_cost(samples) > LARGEST_BOUND_COST):
            return self.whole(points)
        size = max(1, min(QUERY_GROUP, BOUND_ENTRIES // items))
        groups = [points[first : first + size] for first in range(0, len(points), size)]
        return GalleryStatistics.of_queries([self._group(group, always) for group in groups])

    def _group(self, points: WeightedSamples, always: bool) -> GalleryStatistics:
        price = self._bound_cost(points.samples)
        if not always:
            # Two queries first: where pruning pays for neither, the others are spared the pilot.
            scouts = self._describe(points[:: (len(points) + 1) // 2])
            if not bool(self._pays(scouts, self._floor(scouts), price).any()):
                return self.whole(points)
        queries = self._describe(points)
        floor = self._floor(queries)
        pays = torch.ones_like(floor, dtype=torch.bool) if always else self._pays(queries, floor, price)
        chosen, others = pays.nonzero()[:, 0], (~pays).nonzero()[:, 0]
        parts = []
        if len(chosen):
            parts.append(self._prune(queries.select(chosen), floor[chosen]))
        if len(others):
            parts.append(self.whole(points[others]))
        return GalleryStatistics.of_queries(parts).select(torch.cat((chosen, others)).argsort())

    def _describe(self, points: WeightedSamples) -> _Queries:
        samples, wide = points.samples, points.samples.double()
        if points.bias is None:
            mean = wide.mean(dim=1, keepdim=True)
        else:
            mean = points.bias.double().softmax(dim=1).unsqueeze(1) @ wide
        spread = reduce_rows(wide - mean, self.prefix.projection).to(samples.dtype)
        looks = torch.nn.functional.pad(mean @ self.prefix.projection.T, (0, 1))
        return _Queries(points, mean.to(samples.dtype), WeightedSamples(spread, points.bias), looks.to(samples.dtype))

    def _floor(self, queries: _Queries) -> Tensor:
        """[Q] float64: log Z_seeds + log(LEFT_MASS / N); to Z_seeds belongs what other shards are known to have."""
        seeds = self.best(queries.looks, self.prefix.rows.to(queries.looks), min(SEEDS, len(self.gallery)))
        seeds = seeds.sort(dim=1).values
        log_z = torch.cat([self.reduce(queries.points[q : q + 1], seeds[q]).log_z for q in range(len(seeds))])
        if queries.points.elsewhere is not None:
            log_z = torch.logaddexp(log_z, queries.points.elsewhere)
        return log_z + math.log(LEFT_MASS / len(self.gallery))

    def _pays(self, queries: _Queries, floor: Tensor, price: float) -> Tensor:
        """[Q] bool: whether bounds of that price and the items that remain cost clearly less than all, by a pilot."""
        some = torch.arange(0, len(self.gallery), len(self.gallery) // PILOT_ITEMS, device=floor.device)
        bounds = self._upper_bounds(queries, some)
        share = (bounds >= floor.unsqueeze(1)).double().mean(dim=1)
        return price + 1.2 * share < 0.8 * self._cost_of_whole(queries.points)

    def _prune(self, queries: _Queries, floor: Tensor) -> GalleryStatistics:
        bounds = self._upper_bounds(queries, slice(None))
        fewest = min(max(self.top_k, SEEDS), bounds.shape[1])
        parts = []
        for query, (bound, threshold) in enumerate(zip(bounds, floor.tolist())):
            # Not a plain >=: a NaN comes from the input, and scoring the item reports it.
            keep = ~(bound < threshold) | (bound == -math.inf)
            if int(keep.sum()) < fewest:
                keep[bound.topk(fewest).indices] = True
            pick = keep.nonzero()[:, 0]
            # Beyond the terms of `_slack`: the rounding of a sum of up to 2^24 terms.
            log_left = bound.masked_fill(keep, -math.inf).logsumexp(0, keepdim=True).double() + 1e-3
            part = self.reduce(queries.points[query : query + 1], pick)
            left = torch.full_like(part.left, len(bound) - len(pick))
            parts.append(dataclasses.replace(part, log_left=log_left, left=left))
        return GalleryStatistics.of_queries(parts)

    def _upper_bounds(self, queries: _Queries, some: Tensor | slice) -> Tensor:
        """u of the module's text, [Q, n], for n rows of the gallery."""
        bias = None if self.item_bias is None else self.item_bias[some]
        bounds = self.score(queries.spread, self.prefix.rows[some].to(queries.mean), self.kappa, None)
        codes = self._codes(queries.points.samples)
        if codes is None:
            bounds += self.score(WeightedSamples(queries.mean), self.gallery[some], self.kappa, bias)
        else:
            bounds.add_(codes[some].upper_bounds(queries.mean.squeeze(1)), alpha=self.kappa)
            bounds = bounds if bias is None else bounds.add_(bias)
        return bounds.add_(self._slack(queries.points, bias))

    def _codes(self, samples: Tensor) -> RowCodes | None:
        """The rows in bytes, where bounds from them cost clearly less than exact inner products with the means."""
        served = samples.device.type == "cpu" and samples.dtype == torch.float32 and native.missing_int8() is None
        return self.prefix.codes if served and self._pass_cost(samples) > LARGEST_PASS_COST else None

    def _slack(self, points: WeightedSamples, bias: Tensor | None) -> float:
        samples = points.samples
        _, draws, width = samples.shape
        roundoff = max(torch.finfo(x.dtype).eps for x in (samples, self.prefix.rows))
        length = 2 * width + 2 * self.prefix.rows.shape[1] + 96
        size = self.kappa * self.prefix.largest_norm * float(torch.linalg.vector_norm(samples, dim=-1).max())
        largest_bias = 0.0 if bias is None else float(bias.abs().max())
        if points.bias is not None:  # -inf is exact
            largest_bias += float(points.bias.masked_fill(points.bias == -math.inf, 0.0).abs().max())
        return roundoff * (length * size + 4 * draws + 64 + 8 * largest_bias)

    def _cost_of_whole(self, points: WeightedSamples) -> Tensor:
        """[Q] float64: price of a score of an item if none is left out, in units of one in float32."""
        rounded = self.rounded(points)
        cost = torch.ones(len(points), dtype=torch.float64, device=points.samples.device)
        return cost if rounded is None else cost.masked_fill_(rounded, ROUNDED_COST)

    def _bound_cost(self, samples: Tensor) -> float:
        """Price of a bound in units of a score: r / d of the products, the exponentials, and a pass over the gallery or
        the bytes of its rows."""
        whole = self._pass_cost(samples)
        return (
            self.prefix.rows.shape[1] / samples.shape[2] + 0.07 + (whole if self._codes(samples) is None else whole / 4)
        )

    @staticmethod
    def _pass_cost(samples: Tensor) -> float:
        """Price of the exact inner products with the means: bound by memory when few queries share the pass."""
        queries, draws, _ = samples.shape
        return max(26 / min(queries, QUERY_GROUP), 1.9) / draws
