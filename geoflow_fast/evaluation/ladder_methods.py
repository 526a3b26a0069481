"""The re-ranker as a method of a comparison, with and without a flow as its last rung of evidence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from geoflow_fast.evaluation.methods import Method, Scores, Study
from geoflow_fast.flow.model import GeoFlow, flow_digest
from geoflow_fast.flow.solvers import EVALUATIONS
from geoflow_fast.head.model import head_digest
from geoflow_fast.retrieval.copies import first_numbers
from geoflow_fast.retrieval.hubs import MOST_ROWS
from geoflow_fast.retrieval.rerank import FLOW_ITEMS, BayesReranker
from geoflow_fast.retrieval.task import RetrievalTask, typical_queries

RERANK_STEPS = 6
"""The default of the re-ranker, for estimates of its cost."""


class Ladder(Method):
    """One minus the calibrated probability that plain search's answer is right: cosine, hub correction and, if the
    study has one, a head, as far as held-out pairs show that each of them helps."""

    name, title = "ladder", "GeoFlow ladder without flow"
    calibration_queries = 1000

    def __init__(self, study: Study) -> None:
        super().__init__(study)
        self.flow: GeoFlow | None = None
        self.training = "none" if study.head is None else "baseline"

    def facts(self) -> dict[str, Any]:
        """The digests of the models, and the training pairs that the bank of queries is drawn from."""
        head, flow, train = self.study.head, self.flow, self.study.train
        return {
            **({} if flow is None else {"flow": flow_digest(flow)}),
            **({} if head is None else {"head": head_digest(head)}),
            **({} if train is None else {"train": train.fingerprint()}),
        }

    @property
    def device(self) -> torch.device:
        """The device of the models."""
        model = self.study.head if self.flow is None else self.flow
        return torch.device("cpu") if model is None else next(model.parameters()).device

    def fit(self, task: RetrievalTask) -> None:
        """Calibrates the re-ranker. Its time to fit includes that of the models' training, where it is known."""
        self.task = task
        number = torch.arange(len(task.items), device="cpu").unsqueeze(0)
        self.first_copy = first_numbers(task.items.unsqueeze(0), number, number >= 0).squeeze(0)
        self.copies = torch.bincount(self.first_copy, minlength=len(task.items))
        super().fit(task)
        self.fit_seconds += self.study.head_seconds

    def _fit(self, task: RetrievalTask) -> None:
        study, items = self.study, task.items.to(self.device)
        bank = None if study.train is None else typical_queries(study.train, task.direction, MOST_ROWS, study.seed)
        self.reranker = BayesReranker(self.flow, items, task.direction, seed=study.seed, head=study.head, bank=bank).to(
            self.device
        )
        self.reranker.calibrate(study.val, max_queries=self.calibration_queries, progress=study.progress)

    def score(self, rows: slice, answers: Tensor) -> Scores:  # noqa: ARG002, the re-ranker searches itself
        """Scores queries by re-ranking. Items outside the shortlist share the probability of "outside" equally, and
        copies that of their item."""
        reranked = self.reranker.rerank(self.task.queries[rows].to(self.device))
        index, own = reranked.index.cpu(), self.task.own[rows]
        listed = torch.where(own >= 0, self.first_copy[own.clamp(min=0)], -1).unsqueeze(1)
        right = ((index.unsqueeze(2) == listed) & (listed >= 0)).sum(2).double()
        prob = reranked.prob.double().cpu() / self.copies[index.clamp(min=0)].clamp(min=1)
        count = (own >= 0).sum(1)
        items_outside = (len(self.task.items) - self.copies[index.clamp(min=0)].where(index >= 0, 0).sum(1)).clamp(
            min=1
        )
        log_outside = (reranked.p_outside.double().cpu() / items_outside).log()
        log_inside = torch.where(right > 0, right * prob.log(), 0.0).sum(1)
        missed = count - right.sum(1)
        nll = -(log_inside + torch.where(missed > 0, missed * log_outside, 0.0)) / count
        p_answer = reranked.p_answer.double().cpu()
        return Scores(1 - p_answer, p_answer, nll, index[:, 0])


class FlowReranker(Ladder):
    """The re-ranker with a flow, and with a head if the study has one."""

    name, title, training = "rerank", "GeoFlow re-ranker", "flow"
    calibration_queries = 400  # each takes a reverse solve for some 32 items

    def __init__(self, study: Study) -> None:
        super().__init__(study)
        if study.flow is None:
            raise ValueError(f"{self.name} needs a trained flow")
        self.flow, self.training = study.flow, "flow"

    def operations(self, queries: int) -> float:
        """Those of one log-density, which takes three evaluations at a time, for every item of a shortlist."""
        evaluations = 3.0 * EVALUATIONS["midpoint"] * RERANK_STEPS * FLOW_ITEMS
        weights = 0 if self.flow is None else sum(x.numel() for x in self.flow.parameters())
        return 2.0 * weights * evaluations * (queries + min(len(self.study.val), self.calibration_queries))

    def fit(self, task: RetrievalTask) -> None:
        """Calibrates the re-ranker, and counts the flow's training too."""
        super().fit(task)
        self.fit_seconds += self.study.flow_seconds
