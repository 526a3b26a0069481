"""The flow's uncertainties as methods of a comparison: retrieval entropy and the epistemic score."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from geoflow_fast.directions import DIRECTIONS
from geoflow_fast.evaluation.methods import Method, Scores, Study, posterior_scores, right_per_query
from geoflow_fast.flow.model import flow_digest
from geoflow_fast.flow.sampling import FAST_SAMPLING, SamplingSettings
from geoflow_fast.flow.solvers import EVALUATIONS
from geoflow_fast.likelihood.density import chain_rule
from geoflow_fast.likelihood.reverse_ode import density_estimates
from geoflow_fast.likelihood.settings import DensitySettings
from geoflow_fast.retrieval.bandwidth import fit_bandwidth
from geoflow_fast.retrieval.entropy import RetrievalEntropy
from geoflow_fast.retrieval.gallery import Gallery
from geoflow_fast.retrieval.task import RetrievalTask

TUNING_QUERIES = 256
"""Queries that tuning takes besides those that are scored."""


class FlowMethod(Method):
    """A method that needs a trained flow."""

    training = "flow"
    task: RetrievalTask

    def __init__(self, study: Study) -> None:
        super().__init__(study)
        if study.flow is None:
            raise ValueError(f"{self.name} needs a trained flow")
        self.flow = study.flow

    def fit(self, task: RetrievalTask) -> None:
        """Tunes the method. Its time to fit includes that of the flow's training, where it is known."""
        self.task = task
        super().fit(task)
        self.fit_seconds += self.study.flow_seconds

    def facts(self) -> dict[str, Any]:
        """The digest of the flow."""
        return {"flow": flow_digest(self.flow)}

    def operations(self, queries: int) -> float:
        """Those of the network, which is evaluated `evaluations` times for a query."""
        return 2.0 * sum(x.numel() for x in self.flow.parameters()) * self.evaluations * (queries + TUNING_QUERIES)

    @property
    @abstractmethod
    def evaluations(self) -> float:
        """Evaluations of the network for one query; one with its derivative counts three times."""

    @property
    def device(self) -> torch.device:
        """The device of the flow."""
        return next(self.flow.parameters()).device

    def queries(self, rows: slice) -> Tensor:
        """Queries of the task on the flow's device."""
        return self.task.queries[rows].to(self.device)


class FlowEntropy(FlowMethod):
    """Retrieval entropy. Kappa and guidance are those that suit the held-out pairs, unless they are set here."""

    name, title = "entropy", "GeoFlow entropy"
    sampling: SamplingSettings = FAST_SAMPLING
    kappa: float | None = None
    guidance: float | None = None

    def facts(self) -> dict[str, Any]:
        """The flow, the settings of the sampler, and what is set instead of tuned."""
        sampler = {name: getattr(self.sampling, name) for name in ("n_samples", "n_steps", "solver", "grid", "noise")}
        return {**super().facts(), **sampler, **self._given("kappa", "guidance")}

    @property
    def evaluations(self) -> float:
        """Those of its samples, with and without the condition."""
        return 2.0 * self.sampling.n_samples * self.sampling.n_steps * EVALUATIONS[self.sampling.solver]

    def _given(self, *names: str) -> dict[str, Any]:
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def _fit(self, task: RetrievalTask) -> None:
        study, direction = self.study, task.direction
        # A value that is set becomes a grid with one point.
        grids: dict[str, Any] = {f"{name}s": (value,) for name, value in self._given("kappa", "guidance").items()}
        options: dict[str, Any] = {"settings": self.sampling, "seed": study.seed}
        best = fit_bandwidth(self.flow, study.val, direction, **grids, **options)
        self.gallery = Gallery(task.items.to(self.device))
        self.scorer = RetrievalEntropy(
            self.flow, self.gallery, direction, kappa=best.kappa, guidance=best.guidance, **options
        ).to(self.device)
        self.right = right_per_query(study.val, direction)

    def score(self, rows: slice, answers: Tensor) -> Scores:
        """Scores queries by samples of what each of them looks for."""
        samples = self.scorer.draw(self.queries(rows))
        own = self.task.own[rows]
        return posterior_scores(samples, self.gallery, self.scorer.kappa, own, answers, self.right)


class PaperEntropy(FlowEntropy):
    """Retrieval entropy with the paper's sampler."""

    name, title = "entropy_paper", "GeoFlow entropy, paper's sampler"
    sampling = SamplingSettings()


class FlowEpistemic(FlowMethod):
    """-log p(image) - log p(text) of the query together with plain search's answer."""

    name, title = "epistemic", "GeoFlow epistemic"
    settings = DensitySettings()

    def facts(self) -> dict[str, Any]:
        """The flow and the settings of the log-densities."""
        return {**super().facts(), **self.settings.facts()}

    @property
    def evaluations(self) -> float:
        """Those of three log-densities."""
        return 3.0 * len(DIRECTIONS) * self.settings.n_steps * EVALUATIONS[self.settings.solver]

    def _fit(self, task: RetrievalTask) -> None:
        """Does nothing, because there is nothing to tune."""

    def score(self, rows: slice, answers: Tensor) -> Scores:
        """Scores queries by one joint and two conditional log-densities each."""
        image, text = (x.to(self.device) for x in self.task.pairs_with(answers, rows))
        first = rows.start or 0
        estimates = density_estimates(
            self.flow, image, text, DIRECTIONS, self.settings, self.study.seed, first_row=first
        )
        return Scores.without_probabilities(chain_rule(estimates).score)
