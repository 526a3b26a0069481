"""Everything that can be compared on retrieval, behind one interface: the flow's uncertainties and every baseline.

Whatever is tuned (temperatures, kappa, guidance, calibrations) is tuned on held-out pairs, never on those it is judged
by.
"""

from __future__ import annotations

import dataclasses
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from geoflow_fast import baselines
from geoflow_fast.baselines.bayesvlm import NEEDS_ACTIVATIONS, Activations, BayesVLM, towers
from geoflow_fast.baselines.untrained import CosineBaseline, CosineSoftmax
from geoflow_fast.data.pairs import EmbeddingPairs
from geoflow_fast.directions import CONDITIONAL, DIRECTIONS
from geoflow_fast.evaluation.retrieval import RetrievalSet
from geoflow_fast.flow.model import GeoFlow, flow_digest
from geoflow_fast.flow.sampling import FAST_SAMPLING, SamplingSettings
from geoflow_fast.likelihood.density import chain_rule
from geoflow_fast.likelihood.reverse_ode import density_estimates
from geoflow_fast.likelihood.settings import DensitySettings
from geoflow_fast.retrieval.bandwidth import fit_bandwidth
from geoflow_fast.retrieval.entropy import RetrievalEntropy
from geoflow_fast.retrieval.gallery import Gallery
from geoflow_fast.retrieval.rerank import BayesReranker
from geoflow_fast.retrieval.task import typical_queries
from geoflow_fast.runtime import hashing
from geoflow_fast.training.config import RunConfig

SAMPLER = ("n_samples", "n_steps", "solver", "grid", "noise")
"""Settings of the sampler that methods do not fit."""
FAST, PAPER_ENTROPY = (
    MappingProxyType({name: settings[name] for name in SAMPLER}) for settings in (FAST_SAMPLING, SamplingSettings())
)
REFERENCE_QUERIES = 256
CHECKED_ROWS = 256
UNKNOWN = math.nan


@dataclass(frozen=True)
class Study:
    """What methods are made of and fitted on."""

    val: EmbeddingPairs
    """Held out from all training; tunes every method."""
    train: EmbeddingPairs | None = None
    """For methods that learn; the pairs that the flow has seen."""
    flow: GeoFlow | None = None
    flow_seconds: float = 0.0
    """What training the flow took: part of its methods' time to fit."""
    seed: int = 0
    configs: Mapping[str, RunConfig] = field(default_factory=dict)
    """How baselines that train by gradient do so, by method; else by their own default."""
    folder: Path | None = None
    """Where those keep their runs, to go on after a kill."""
    progress: bool | None = None

    def __post_init__(self) -> None:
        widths = [
            (name, part.image_dim, part.text_dim)
            for name, part in (("val", self.val), ("train", self.train))
            if part is not None
        ]
        if self.flow is not None:
            widths.append(("flow", self.flow.config.image_dim, self.flow.config.text_dim))
        if len({width for _, *both in widths for width in both}) > 1:
            raise ValueError(f"val, train and flow must be of one width, got (name, image, text) {widths}")


@dataclass(frozen=True)
class Scores:
    """What a method says of Q queries; NaN, or -1, for what it does not say."""

    uncertainty: Tensor
    """[Q] float64, higher is less certain."""
    p_answer: Tensor
    """[Q] float64, stated probability that plain search's answer is right."""
    nll: Tensor
    """[Q] float64, minus the mean log-probability of the right items among all of the gallery, nats."""
    top: Tensor
    """[Q] int64, the item that the method itself finds most probable."""

    @classmethod
    def plain(cls, uncertainty: Tensor) -> Scores:
        """Of a method that states no probabilities."""
        uncertainty = uncertainty.detach().double().cpu()
        unknown = torch.full_like(uncertainty, UNKNOWN)
        return cls(uncertainty, unknown, unknown, torch.full(uncertainty.shape, -1))


class Method(ABC):
    """One way to be uncertain: `fit(task)`, then `score(rows, answers)` of queries of that task."""

    name: str
    title: str
    """As tables show it."""

    def __init__(self, study: Study) -> None:
        self.study = study
        self.fit_seconds = 0.0

    def fit(self, task: RetrievalSet) -> None:
        """Makes the method ready for the queries of `task`, and notes the time that took."""
        begin = time.perf_counter()
        self._fit(task)
        self.fit_seconds = time.perf_counter() - begin

    def check(self, task: RetrievalSet) -> None:  # noqa: B027, most methods can serve any
        """ValueError or OSError if the method cannot serve `task`: asked before anything is computed."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """All that its scores depend on besides the task, the held-out pairs and the seed."""

    @abstractmethod
    def _fit(self, task: RetrievalSet) -> None:
        """`fit`, untimed."""

    @abstractmethod
    def score(self, rows: slice, answers: Tensor) -> Scores:
        """Scores of the queries `rows` of the task it was fitted for; `answers` [Q] is what plain search found."""


class FlowMethod(Method):
    """A method that needs a trained flow."""

    task: RetrievalSet

    def __init__(self, study: Study) -> None:
        super().__init__(study)
        if study.flow is None:
            raise ValueError(f"{self.name} needs a trained flow")
        self.flow = study.flow

    def fit(self, task: RetrievalSet) -> None:
        """The time is that of the flow's training, if known, and of what is tuned."""
        self.task = task
        super().fit(task)
        self.fit_seconds += self.study.flow_seconds

    def facts(self) -> dict[str, Any]:
        """The flow, by its digest."""
        return {"flow": flow_digest(self.flow)}

    @property
    def device(self) -> torch.device:
        """The flow's."""
        return next(self.flow.parameters()).device

    def queries(self, rows: slice) -> Tensor:
        """Of the task, on the flow's device."""
        return self.task.queries[rows].to(self.device)


class FlowEntropy(FlowMethod):
    """Retrieval entropy with the kappa and guidance that suit the held-out pairs, unless `settings` have them."""

    name, title = "entropy", "GeoFlow entropy"
    settings: Mapping[str, Any] = FAST

    def facts(self) -> dict[str, Any]:
        """The flow and the sampler."""
        return {**super().facts(), **self.settings}

    def _fit(self, task: RetrievalSet) -> None:
        study, way = self.study, task.direction
        settings: dict[str, Any] = {**self.settings, "seed": study.seed}
        sampler = {name: settings.pop(name) for name in SAMPLER if name in settings}
        settings["settings"] = SamplingSettings(**sampler)
        # What is given is a grid of one.
        fixed: dict[str, Any] = {
            f"{name}s": (settings.pop(name),) for name in ("kappa", "guidance") if name in settings
        }
        best = fit_bandwidth(self.flow, study.val, way, **settings, **fixed)
        if settings.get("posterior") == "bayes":
            settings["reference"] = typical_queries(study.val, way, REFERENCE_QUERIES, study.seed)
        settings |= {"kappa": best.kappa, "guidance": best.guidance}
        self.gallery = Gallery(task.items.to(self.device))
        self.scorer = RetrievalEntropy(self.flow, self.gallery, way, **settings).to(self.device)
        self.right = right_per_query(study.val, way)
        self.bias = -self.scorer.item_marginals() if self.scorer.posterior == "bayes" else None

    def score(self, rows: slice, answers: Tensor) -> Scores:
        """From samples of what each query looks for."""
        samples = self.scorer.draw(self.queries(rows))
        own = self.task.own[rows]
        return posterior_scores(samples, self.gallery, self.scorer.kappa, own, answers, self.right, self.bias)


class BayesEntropy(FlowEntropy):
    """Retrieval entropy of the posterior that the items' marginals are divided out of."""

    name, title = "entropy_bayes", "GeoFlow entropy, Bayes"
    settings = MappingProxyType({**FAST, "posterior": "bayes"})


class PaperEntropy(FlowEntropy):
    """Retrieval entropy with the paper's sampler."""

    name, title = "entropy_paper", "GeoFlow entropy, paper's sampler"
    settings = PAPER_ENTROPY


class FlowReranker(FlowMethod):
    """One minus the calibrated probability that plain search's answer is right."""

    name, title = "rerank", "GeoFlow re-ranker"

    def _fit(self, task: RetrievalSet) -> None:
        items = task.items.to(self.device)
        self.reranker = BayesReranker(self.flow, items, task.direction, seed=self.study.seed).to(self.device)
        self.reranker.calibrate(self.study.val, progress=self.study.progress)

    def score(self, rows: slice, answers: Tensor) -> Scores:  # noqa: ARG002, the re-ranker searches itself
        """Items outside the shortlist share the probability of "outside" equally."""
        found = self.reranker.rerank(self.queries(rows))
        index, prob = found.index.cpu(), found.prob.double().cpu()
        right = self.task.is_right(index, rows).double()
        count = (self.task.own[rows] >= 0).sum(1)
        beyond = max(1, len(self.task.items) - index.shape[1])
        left = (found.p_outside.double().cpu() / beyond).log()
        inside = torch.where(right > 0, prob.log(), 0.0).sum(1)
        missed = count - right.sum(1)
        nll = -(inside + torch.where(missed > 0, missed * left, 0.0)) / count
        p_answer = found.p_answer.double().cpu()
        return Scores(1 - p_answer, p_answer, nll, index[:, 0])


class FlowEpistemic(FlowMethod):
    """-log p(image) - log p(text) of the query with plain search's answer."""

    name, title = "epistemic", "GeoFlow epistemic"
    settings = DensitySettings()

    def facts(self) -> dict[str, Any]:
        """The flow and the solver."""
        return {**super().facts(), **self.settings.facts()}

    def _fit(self, task: RetrievalSet) -> None:
        """There is nothing to tune."""

    def score(self, rows: slice, answers: Tensor) -> Scores:
        """One joint and two conditional solves per query."""
        image, text = (x.to(self.device) for x in self.task.pairs_with(answers, rows))
        first = rows.start or 0
        found = density_estimates(self.flow, image, text, DIRECTIONS, self.settings, self.study.seed, first_row=first)
        return Scores.plain(chain_rule(found).score)


class BaselineMethod(Method):
    """A method of `geoflow_fast.baselines`, fitted once for both directions."""

    def __init__(self, study: Study, name: str) -> None:
        super().__init__(study)
        self.kind = baselines.find(name)
        self.name, self.title = name, self.kind.title
        self.baseline = self.kind(study.val.image_dim, study.val.text_dim)
        if study.train is None and not self.learns_from_val:
            raise ValueError(f"{name} learns from training pairs: give them, or leave it out of the methods")

    @property
    def learns_from_val(self) -> bool:
        """Whether held-out pairs are all it needs."""
        return isinstance(self.baseline, CosineBaseline)

    def facts(self) -> dict[str, Any]:
        """Settings, run and training pairs."""
        train = self.study.train
        return {
            "settings": self.baseline.settings,
            "run": dataclasses.asdict(self._config()),
            "train": None if train is None or self.learns_from_val else train.fingerprint(),
        }

    def _config(self) -> RunConfig:
        found = self.study.configs.get(self.name) or self.baseline.default_config()
        return dataclasses.replace(found, seed=self.study.seed)

    def fit(self, task: RetrievalSet) -> None:
        """Only the first time; it serves both directions."""
        self.task, self.gallery = task, Gallery(task.items.to(self.baseline.device))
        self.right = right_per_query(self.study.val, task.direction)
        if not self.baseline.fitted:
            super().fit(task)

    def _fit(self, task: RetrievalSet) -> None:  # noqa: ARG002
        study = self.study
        out = None if study.folder is None or self.learns_from_val else study.folder / self.name
        self.baseline.fit(study.train or study.val, study.val, self._config(), out, progress=study.progress)
        if not self.baseline.fitted:
            raise KeyboardInterrupt  # the run was asked to stop and has saved its state

    def score(self, rows: slice, answers: Tensor) -> Scores:
        """With probabilities where the method is a softmax over the gallery."""
        queries = self.task.queries[rows].to(self.baseline.device)
        found = Scores.plain(self.baseline.uncertainty(queries, self.gallery, self.task.direction))
        if not isinstance(self.baseline, CosineSoftmax):
            return found
        scale = float(self.baseline.scale[CONDITIONAL.index(self.task.direction)])
        own = self.task.own[rows]
        stated = posterior_scores(queries.unsqueeze(1), self.gallery, scale, own, answers, self.right)
        return dataclasses.replace(stated, uncertainty=found.uncertainty)


class ActivationsMethod(BaselineMethod):
    """BayesVLM: searches what goes into the last projections, which lies beside the embeddings of train and test."""

    baseline: BayesVLM

    def __init__(self, study: Study) -> None:
        super().__init__(study, BayesVLM.method)
        assert study.train is not None  # or the baseline has refused
        self.baseline.set_activations(activations_of(study.train.folder, "training"))

    def facts(self) -> dict[str, Any]:
        """With the projections."""
        weights = [x for name, x in sorted(self.baseline.state_dict().items()) if name.endswith(("_weight", "_bias"))]
        return {**super().facts(), "projections": hashing.digest(weights)}

    def check(self, task: RetrievalSet) -> None:
        """Activations of the task are there, and give its embeddings under the projections of the training pairs."""
        found = activations_of(task.folder, "test")
        rows = task.query_row, task.item_row
        for tower, index, embedding in zip(towers(task.direction), rows, (task.queries, task.items)):
            found.check_rows(tower, index)
            self.baseline.check_embeddings(tower, found.of(tower, index[:CHECKED_ROWS]), embedding[:CHECKED_ROWS])

    def fit(self, task: RetrievalSet) -> None:
        """Reads the activations of the task, too."""
        super().fit(task)
        found = activations_of(task.folder, "test")
        asks, searched = towers(task.direction)
        self.queries, self.items = found.of(asks, task.query_row), found.of(searched, task.item_row)

    def score(self, rows: slice, answers: Tensor) -> Scores:  # noqa: ARG002
        """Of activations in place of embeddings."""
        return Scores.plain(self.baseline.uncertainty(self.queries[rows], self.items, self.task.direction))


def activations_of(folder: Path | None, which: str) -> Activations:
    """Of pairs by the folder that they were opened from."""
    if folder is None:
        raise ValueError(f"the {which} pairs are not of a folder: {NEEDS_ACTIVATIONS}")
    return Activations.open(folder)


def right_per_query(pairs: EmbeddingPairs, direction: str) -> float:
    """Mean number of right items that a query of these pairs has."""
    if direction == "t2i":
        return 1.0
    return len(pairs) / len(torch.unique(torch.from_numpy(pairs.group)))


def posterior_scores(
    samples: Tensor,
    gallery: Gallery,
    kappa: float,
    own: Tensor,
    answers: Tensor,
    right: float,
    bias: Tensor | None = None,
) -> Scores:
    """Scores of the softmax over the gallery of log mean_m exp(kappa cos(item, sample m)) (+ `bias` [N]).

    `samples` [Q, M, d], right items `own` [Q, m] (-1: none), plain `answers` [Q], of which queries have `right` each
    that share the probability.
    """
    found = gallery.statistics(samples, kappa, 1, bias).posterior(torch.float64)

    def log_prob(index: Tensor) -> Tensor:
        """Of the items `index` [Q, k]."""
        index = index.to(samples.device)
        cosine = torch.einsum("qmd,qkd->qkm", samples, gallery.take(index, samples.dtype)).double()
        score = (kappa * cosine).logsumexp(2) - math.log(samples.shape[1])
        score = score if bias is None else score + bias[index].double()
        return (score - found.log_z.unsqueeze(1)).cpu()

    there = own >= 0
    nll = -torch.where(there, log_prob(own.clamp(min=0)), 0.0).sum(1) / there.sum(1)
    p_answer = (log_prob(answers.unsqueeze(1)).squeeze(1).exp() * right).clamp(max=1.0)
    return Scores(found.entropy.cpu(), p_answer, nll, found.top_index[:, 0].cpu())


FLOW_METHODS: dict[str, Callable[[Study], Method]] = {
    kind.name: kind for kind in (FlowReranker, FlowEntropy, BayesEntropy, PaperEntropy, FlowEpistemic)
}
EXTRA = ("entropy_bayes", "entropy_paper")
"""Not among the defaults: the one is for probabilities, the other costs thirty times as much for the same ranking."""


def all_methods() -> list[str]:
    """Names that `create` knows."""
    return [*FLOW_METHODS, *baselines.METHODS]


def default_methods(study: Study) -> list[str]:
    """All that can be made of what the study has, without `EXTRA` and baselines that need more than pairs."""
    flow = [name for name in FLOW_METHODS if name not in EXTRA] if study.flow is not None else []
    ready = {name: kind for name, kind in baselines.METHODS.items() if kind.missing() is None}
    fit = [name for name, kind in ready.items() if study.train is not None or issubclass(kind, CosineBaseline)]
    return [*flow, *fit]


def create(name: str, study: Study) -> Method:
    """The method of that name; ValueError if there is none, or if the study lacks what it needs."""
    if name in FLOW_METHODS:
        return FLOW_METHODS[name](study)
    if name not in baselines.METHODS:
        raise ValueError(f"method must be one of {', '.join(all_methods())}, got {name!r}")
    if name == BayesVLM.method:
        return ActivationsMethod(study)
    return BaselineMethod(study, name)
