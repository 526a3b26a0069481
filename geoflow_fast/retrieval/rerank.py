"""BayesReranker: calibrated probabilities of shortlisted items, from the log-density of the query given each of them.

By Bayes' rule the probability that gallery item j is the one meant is proportional to p(query | item j): one reverse
solve per shortlisted item, in the other conditional direction of the same flow.
"""

from __future__ import annotations

import dataclasses
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from geoflow_fast.data.pairs import EmbeddingPairs
from geoflow_fast.data.rows import Array
from geoflow_fast.directions import Direction
from geoflow_fast.flow.model import GeoFlow
from geoflow_fast.geometry import check_rows
from geoflow_fast.likelihood.reverse_ode import density_estimates
from geoflow_fast.likelihood.settings import DensitySettings
from geoflow_fast.retrieval.calibration import UNCALIBRATED, Calibration, Evidence, changed_facts, fit_calibration
from geoflow_fast.retrieval.entropy import risk_lower_bound
from geoflow_fast.retrieval.freshness import FlowDigest
from geoflow_fast.retrieval.gallery import Gallery, GallerySource
from geoflow_fast.retrieval.task import RetrievalTask
from geoflow_fast.runtime import checks
from geoflow_fast.runtime.progress import Advance, progress_bar
from geoflow_fast.runtime.settings import deprecated_attribute

PAIRS_AT_ONCE = 2048
"""(query, item) pairs whose embeddings are gathered at a time."""
SAME_ITEM = 1 - 1e-6
"""Cosine above which two embeddings are the same item; storage in float16 alone leaves about 1e-7."""

Candidates = Tensor | NDArray[np.integer]


class Store(Protocol):
    """The method that a FAISS index has, and anything else that can search the gallery."""

    def search(self, x: NDArray[np.float32], k: int, /) -> tuple[NDArray[Any], NDArray[Any]]:
        """(scores, numbers of gallery rows), each [Q, k]; -1 where there are fewer than k."""


@dataclass(frozen=True)
class Reranked:
    """The posterior over the shortlists of Q queries, of K items each; detached tensors on the device of the flow."""

    index: Tensor
    """[Q, K] int64, numbers of gallery rows, most probable first and equally probable ones by their number; -1 where a
    shortlist has fewer than K items."""
    prob: Tensor
    """[Q, K], the probability that each item is the one meant; a row sums to one together with `p_outside`."""
    answer: Tensor
    """[Q] int64, the item with the largest cosine, which plain search returns; of tied ones that with the lowest
    number, in whatever order candidates come."""
    p_answer: Tensor
    """[Q], the probability that `answer` is right: its `prob` times the mean number of right items of a query."""
    p_outside: Tensor
    """[Q], the probability that the right item is not in the shortlist; 0 if uncalibrated."""
    entropy: Tensor
    """[Q], entropy in nats over the items and "outside"."""
    risk_lower_bound: Tensor
    """[Q] float64, the smallest error probability that this entropy allows (Fano)."""
    calibrated: bool
    """Whether the weights were fitted on held-out pairs."""


class BayesReranker(nn.Module):
    """Re-ranks shortlists and gives the probability of every item: `reranker(queries)` returns a `Reranked`.

    `direction="t2i"`: queries are texts and the gallery holds images; "i2t": the other way round. A shortlist contains
    the `shortlist` items with the largest cosine; they are found by a search of the gallery or of `store` (a FAISS
    index over the same rows), or passed in (`reranker(queries, candidates)`). log p(query | item) is estimated in
    `n_steps` steps of `solver` with `n_probes` probes. All pairs share the probes, which depend on `seed` alone:
    results do not depend on batches, and differences between candidates are less noisy.

    `calibrate` fits the weights of this log-density and of the cosine, and the probability that the right item is not
    in the shortlist. Without it the posterior is the flow's own (alpha 1, beta 0, nothing outside), with a warning. A
    calibration belongs to the flow's weights as they were: after training the flow further, loading other weights or
    casting it to another dtype, calls raise a ValueError until `calibrate` is called again or `calibration` is set to
    None. Moving it to another device changes nothing.
    """

    def __init__(
        self,
        flow: GeoFlow,
        gallery: GallerySource | Gallery,
        direction: str = "t2i",
        shortlist: int = 32,
        n_steps: int = 6,
        solver: str = "midpoint",
        n_probes: int = 1,
        seed: int = 0,
        *,
        store: Store | None = None,
    ) -> None:
        super().__init__()
        self.direction = Direction.of(direction, conditional=True)
        self.shortlist, self.seed = checks.integer(shortlist, "shortlist", 1), checks.integer(seed, "seed")
        self.gallery = Gallery.of(gallery)
        config = flow.config
        if config.image_dim != config.text_dim:
            raise ValueError(
                f"cosines need images and texts of one width, but the flow has {config.image_dim} and {config.text_dim}"
            )
        if self.gallery.dim != config.image_dim:
            raise ValueError(f"gallery has width {self.gallery.dim}, but the flow expects {config.image_dim}")
        rows = getattr(store, "ntotal", len(self.gallery))
        if rows != len(self.gallery):
            raise ValueError(f"store holds {rows} items, not the {len(self.gallery)} rows of the gallery")
        self.flow, self.store, self.query_dim = flow, store, config.text_dim
        self.shortlist = min(self.shortlist, len(self.gallery))
        self.density = DensitySettings(n_steps, n_probes, solver, shared=True)
        self.calibration: Calibration | None = None
        self._flow_digest = FlowDigest()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> BayesReranker:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.gallery = self.gallery.on(next(self.flow.parameters()).device)
        return self

    def __getattr__(self, name: str) -> Any:
        if name == "solve":
            return deprecated_attribute("BayesReranker.solve", "BayesReranker.density", self.density)
        return super().__getattr__(name)

    def extra_repr(self) -> str:
        """Settings and weights in one line, for `print`."""
        weights = "uncalibrated, alpha=1, beta=0"
        if self.calibration is not None:
            weights = "alpha={:.3g}, beta={:.3g}, outside={:.3g}".format(*self.calibration.weights)
        return f"{self.direction}, {self.shortlist} of {len(self.gallery)} items, {weights}"

    @property
    def settings(self) -> dict[str, Any]:
        """Everything a posterior depends on besides flow, gallery, calibration and query."""
        density = self.density.facts()
        return {"direction": str(self.direction), "shortlist": self.shortlist, **density, "seed": self.seed}

    @property
    def made_for(self) -> dict[str, Any]:
        """Facts of flow, direction, shortlist and solver that a calibration is valid for; any seed will do."""
        facts = {name: value for name, value in self.settings.items() if name != "seed"}
        return {**facts, "flow": self._flow_digest.of(self.flow)}

    if TYPE_CHECKING:  # a module's call has no types of its own

        def __call__(self, queries: Tensor | Array, candidates: Candidates | None = None) -> Reranked: ...

    def forward(self, queries: Tensor | Array, candidates: Candidates | None = None) -> Reranked:
        """Posterior of each of the `queries` [Q, d], unit rows, over its shortlist or over `candidates` [Q, K]: numbers
        of gallery rows, padded with -1. Queries are a tensor or an array in any floating-point type.

        K may be any number from 1 on. A calibration is right for the K = `shortlist` items with the largest cosines.
        For other candidates its weights are used too: `p_outside` falls as K grows, but nothing was fitted for that
        length, so calibrate with a `shortlist` of it where the probabilities must be right. A single candidate is
        compared with nothing: its probability is the same for all queries.
        """
        reranked = self.rerank(queries, candidates)
        if not reranked.calibrated:
            warnings.warn("BayesReranker is uncalibrated: alpha=1, beta=0, nothing outside the shortlist", stacklevel=4)
        return reranked

    @torch.no_grad()
    def rerank(
        self, queries: Tensor | Array, candidates: Candidates | None = None, advance: Advance | None = None
    ) -> Reranked:
        """Same as `forward` without its warning, and calls `advance(n)` whenever n more queries are done."""
        queries = checks.rows(queries, "queries", self.query_dim, next(self.flow.parameters()), "Q")
        check_rows(queries, "queries")
        made_for = {} if self.calibration is None else self.calibration.made_for
        if made_for and (changed := changed_facts(made_for, self.made_for)):
            raise ValueError(
                f"the calibration was made for another {', '.join(changed)}, which has changed since: calibrate again, "
                "or set calibration to None"
            )
        index = self._search(queries, candidates)
        return self._read_out(index, self._evidence(queries, index, advance=advance)[0], queries.dtype)

    @torch.no_grad()
    def calibrate(self, pairs: EmbeddingPairs, *, max_queries: int = 1000, progress: bool | None = None) -> Calibration:
        """Fits the weights on held-out `pairs`, stores them in `self.calibration` and returns them.

        At most `max_queries` queries, drawn by the seed, are searched in the gallery with their own items added, so
        that the gallery has its real size; an own item that is already in the gallery counts once, and further copies
        of it are wrong items. All texts of an image count as right for it. If fewer than 50 queries have a right item
        in their shortlist, a ValueError is raised. `progress`: show a progress bar; by default on a terminal.
        """
        if not isinstance(pairs, EmbeddingPairs):
            raise TypeError(f"pairs must be EmbeddingPairs, got {type(pairs).__name__}")
        checks.integer(max_queries, "max_queries", 1)
        if not pairs.image_dim == pairs.text_dim == self.query_dim:
            widths = f"{pairs.image_dim} and {pairs.text_dim}"
            raise ValueError(f"held-out pairs have widths {widths}, but the flow expects {self.query_dim}")
        task = RetrievalTask.of(pairs, self.direction, max_queries=max_queries, seed=self.seed, all_items=False)
        queries = task.queries.to(next(self.flow.parameters()))
        shown = sys.stderr.isatty() if progress is None else progress
        with progress_bar(len(queries), 0, "held-out queries", shown=shown) as advance:
            evidence, right = self._evidence(queries, self._search(queries, None), task, advance)
        counts = (task.own >= 0).sum(1), task.query_image
        fitted = fit_calibration(evidence, right, *counts, self.made_for, self.seed)
        self.calibration = dataclasses.replace(fitted, pairs=pairs.fingerprint())
        return self.calibration

    def save_calibration(self, path: str | Path) -> Path:
        """Writes the calibration to a JSON file, or into a folder such as the flow's, and returns the file's path."""
        if self.calibration is None:
            raise ValueError("there is no calibration to save: call calibrate first")
        file = self.calibration_file(path)
        self.calibration.save(file)
        return file

    def load_calibration(self, path: str | Path) -> Calibration:
        """Loads and uses a calibration of `save_calibration`. It must be for the same flow, direction, shortlist and
        solver; otherwise a ValueError is raised."""
        self.calibration = Calibration.load(self.calibration_file(path), self.made_for)
        return self.calibration

    def calibration_file(self, path: str | Path) -> Path:
        """The file a calibration is stored in: `path` itself, or a file in the folder `path`."""
        path = checks.path(path, "path")
        return path / f"rerank_{self.direction}.json" if path.is_dir() else path

    def _search(self, queries: Tensor, candidates: Candidates | None) -> Tensor:
        """Numbers [Q, K] of the gallery rows in each query's shortlist, -1 where there are fewer."""
        if candidates is None and self.store is None:
            return self.gallery.statistics(queries.unsqueeze(1), 1.0, self.shortlist).top_index
        if candidates is None:
            assert self.store is not None
            candidates = self.store.search(queries.float().cpu().numpy(), self.shortlist)[1]
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
                raise ValueError(f"candidates of query {int(bad.any(1).nonzero()[0])} {what}")
        return index

    def _evidence(
        self, queries: Tensor, index: Tensor, task: RetrievalTask | None = None, advance: Advance | None = None
    ) -> tuple[Evidence, Tensor]:
        """Cosines and log p(query | item) of the shortlists `index` [Q, K], and which of their items are the query's
        own [Q, K]. These are known from the `task` of the queries, whose items are searched together with the gallery;
        without it no item is.

        The log-densities of a batch are estimated at once; an item that several queries share is encoded once.
        """
        parts = []
        for rows in torch.arange(len(queries), device="cpu").split(max(1, PAIRS_AT_ONCE // index.shape[1])):
            number, valid = index[rows], index[rows] >= 0
            items = self.gallery.take(number.clamp(min=0), queries.dtype)
            shortlist, is_own = Shortlist.of(queries[rows], items, valid, number), torch.zeros_like(valid)
            if task is not None:
                items = task.items[task.own[rows].clamp(min=0)].to(queries)
                # Own items are numbered after those of the gallery.
                number = len(self.gallery) + torch.arange(task.own.numel(), device="cpu").view_as(task.own)[rows].to(
                    number
                )
                valid = (task.own[rows] >= 0).to(queries.device)
                shortlist, is_own = shortlist.with_own(Shortlist.of(queries[rows], items, valid, number))
            valid = shortlist.valid
            asked = queries[rows].unsqueeze(1).expand_as(shortlist.items)[valid]
            image, text = self.direction.pair(asked, shortlist.items[valid])
            number, directions = shortlist.number[valid], (self.direction.reverse,)
            estimates = density_estimates(
                self.flow, image, text, directions, self.density, self.seed, given_number=number
            )
            log_density = torch.zeros_like(shortlist.cosine)
            log_density[valid] = estimates[0].mean(0)
            parts.append((log_density, shortlist.cosine, valid, is_own))
            if advance is not None:
                advance(len(rows))
        log_density, cosine, valid, is_own = (torch.cat(column) for column in zip(*parts))
        return Evidence(log_density, cosine, valid), is_own

    def _read_out(self, index: Tensor, evidence: Evidence, dtype: torch.dtype) -> Reranked:
        calibration = self.calibration or UNCALIBRATED
        every = calibration.probabilities(evidence)  # "outside" is last
        # Items that tie are in the order of their numbers; those that are missing come after all others.
        number, by_number = index.masked_fill(~evidence.valid, len(self.gallery)).sort(1)
        prob = every.gather(1, by_number).masked_fill(number == len(self.gallery), -1.0)
        order = by_number.gather(1, prob.sort(dim=1, descending=True, stable=True).indices)
        cosine = evidence.cosine.masked_fill(~evidence.valid, -2.0)
        tied = cosine == cosine.amax(1, keepdim=True)
        best = index.masked_fill(~tied, len(self.gallery)).argmin(1, keepdim=True)
        p_answer = (every.gather(1, best) * calibration.right_per_query).clamp(max=1.0)
        entropy = torch.special.entr(every).sum(1)
        choices = index.shape[1] + (self.calibration is not None)
        return Reranked(
            index.gather(1, order),
            every.gather(1, order).to(dtype),
            index.gather(1, best).squeeze(1),
            p_answer.squeeze(1).to(dtype),
            every[:, -1].to(dtype),
            entropy.to(dtype),
            risk_lower_bound(entropy, choices),
            self.calibration is not None,
        )


@dataclass(frozen=True)
class Shortlist:
    """The items of the shortlists of Q queries, K each."""

    items: Tensor
    """[Q, K, d], their embeddings."""
    cosine: Tensor
    """[Q, K] float64, their cosines with the query."""
    valid: Tensor
    """[Q, K] bool, false where a shortlist is shorter than K."""
    number: Tensor
    """[Q, K] int64; equal numbers stand for the same item."""

    @classmethod
    def of(cls, queries: Tensor, items: Tensor, valid: Tensor, number: Tensor) -> Shortlist:
        """The shortlist of these items, whose cosines with the `queries` [Q, d] are computed."""
        return cls(items, torch.einsum("qd,qkd->qk", queries, items).double(), valid, number)

    def with_own(self, own: Shortlist) -> tuple[Shortlist, Tensor]:
        """The K nearest of these and of the query's own items, and which of them are own [Q, K]. For each own item one
        gallery item that equals it counts as that item; further ones are other items, which nothing tells apart."""
        same = torch.einsum("qkd,qmd->qkm", self.items, own.items) > SAME_ITEM
        same &= self.valid.unsqueeze(2) & own.valid.unsqueeze(1)
        counted = (same & (same.cumsum(1) <= same.sum(2, keepdim=True))).any(2)
        valid = torch.cat((self.valid & ~counted, own.valid), dim=1)
        cosine = torch.cat((self.cosine, own.cosine), dim=1)
        kept = cosine.masked_fill(~valid, -2.0).topk(self.valid.shape[1], dim=1).indices
        items = torch.cat((self.items, own.items), dim=1).take_along_dim(kept.unsqueeze(2), dim=1)
        number = torch.cat((self.number, own.number), dim=1).gather(1, kept)
        nearest = Shortlist(items, cosine.gather(1, kept), valid.gather(1, kept), number)
        return nearest, nearest.valid & (kept >= self.valid.shape[1])
