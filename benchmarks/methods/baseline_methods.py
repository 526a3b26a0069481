"""The baselines as methods of a comparison."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.methods import baselines
from benchmarks.methods.baselines.bayesvlm import NEEDS_ACTIVATIONS, Activations, BayesVLM, towers
from benchmarks.methods.baselines.trained import SizedBaseline
from geoflow_fast.evaluation.methods import Method, Scores, Study, posterior_scores, right_per_query
from geoflow_fast.retrieval.gallery import Gallery
from geoflow_fast.retrieval.task import RetrievalTask
from geoflow_fast.runtime import hashing
from geoflow_fast.training.config import RunConfig

CHECKED_ROWS = 256


@dataclass(frozen=True)
class BaselineStudy(Study):
    """A study with settings for baselines that train by gradient."""

    configs: Mapping[str, RunConfig] = field(default_factory=dict)
    """How they do so, by method. The others use their own default."""
    folder: Path | None = None
    """Folder in which they keep their runs, so that they can continue after a kill."""

    @classmethod
    def of(cls, study: Study, configs: Mapping[str, RunConfig], folder: Path | None) -> BaselineStudy:
        """The study with these settings."""
        known = {part.name: getattr(study, part.name) for part in dataclasses.fields(study)}
        return cls(**{**known, "configs": configs, "folder": folder})


class BaselineMethod(Method):
    """A method of `benchmarks.methods.baselines`, fitted once for both directions."""

    def __init__(self, study: Study, name: str) -> None:
        super().__init__(study)
        self.kind = baselines.find(name)
        self.name, self.title = name, self.kind.title
        self.baseline = self.kind(study.val.image_dim, study.val.text_dim)
        self.training = "baseline" if self.kind.TRAINED else "none"
        if study.train is None and not self.learns_from_val:
            raise ValueError(f"{name} learns from training pairs: give them, or leave it out of the methods")

    @property
    def learns_from_val(self) -> bool:
        """True if held-out pairs are all it needs."""
        return not self.kind.NEEDS_TRAINING_PAIRS

    def facts(self) -> dict[str, Any]:
        """Its settings, its training run and its training pairs."""
        train = self.study.train
        return {
            "settings": self.baseline.settings,
            "run": dataclasses.asdict(self._config()),
            "train": None if train is None or not self.kind.USES_TRAINING_PAIRS else train.fingerprint(),
        }

    def operations(self, queries: int) -> float:  # noqa: ARG002, scoring costs little beside training
        """Those of its training: a backward pass costs as much as two forward ones."""
        if not isinstance(self.baseline, SizedBaseline):
            return 0.0
        config, weights = self._config(), sum(x.numel() for x in self.baseline.parameters())
        return 6.0 * weights * config.steps * config.batch_size

    def _config(self) -> RunConfig:
        configs = self.study.configs if isinstance(self.study, BaselineStudy) else {}
        config = configs.get(self.name) or self.baseline.default_config()
        return dataclasses.replace(config, seed=self.study.seed)

    def fit(self, task: RetrievalTask) -> None:
        """Fits the baseline the first time, and only prepares the gallery after that."""
        self.task, self.gallery = task, Gallery(task.items.to(self.baseline.device))
        self.right = right_per_query(self.study.val, task.direction)
        if not self.baseline.fitted:
            super().fit(task)

    def _fit(self, task: RetrievalTask) -> None:  # noqa: ARG002
        study = self.study
        folder = study.folder if isinstance(study, BaselineStudy) else None
        out = None if folder is None or self.learns_from_val else folder / self.name
        self.baseline.fit(study.train or study.val, study.val, self._config(), out, progress=study.progress)
        if not self.baseline.fitted:
            raise KeyboardInterrupt  # the run was asked to stop and has saved its state

    def score(self, rows: slice, answers: Tensor) -> Scores:
        """Scores queries, with the probabilities that the method states."""
        queries = self.task.queries[rows].to(self.baseline.device)
        uncertainty = self.baseline.uncertainty(queries, self.gallery, self.task.direction)
        scores = Scores.without_probabilities(uncertainty)
        if self.kind.STATES_RISK:
            return dataclasses.replace(scores, p_answer=1 - scores.uncertainty)
        softmax = self.baseline.softmax(queries, self.gallery, self.task.direction)
        if softmax is None:
            return scores
        own, samples = self.task.own[rows], softmax.queries.unsqueeze(1)
        stated = posterior_scores(samples, softmax.gallery, softmax.scale, own, answers, self.right, softmax.bias)
        return dataclasses.replace(stated, uncertainty=scores.uncertainty)


class ActivationsMethod(BaselineMethod):
    """BayesVLM, which searches the inputs of the last projections. They are stored beside the embeddings of the
    training and the test pairs."""

    baseline: BayesVLM

    def __init__(self, study: Study) -> None:
        super().__init__(study, BayesVLM.method)
        assert study.train is not None  # otherwise the base class has raised an error
        self.baseline.set_activations(activations_of(study.train.folder, "training"))

    def facts(self) -> dict[str, Any]:
        """The facts of the baseline, and a digest of the projections."""
        weights = [x for name, x in sorted(self.baseline.state_dict().items()) if name.endswith(("_weight", "_bias"))]
        return {**super().facts(), "projections": hashing.digest(weights)}

    def check(self, task: RetrievalTask) -> None:
        """Raises an error unless the task has activations that give its embeddings under the projections of the
        training pairs."""
        activations = activations_of(task.folder, "test")
        rows = task.query_row, task.item_row
        for tower, index, embedding in zip(towers(task.direction), rows, (task.queries, task.items)):
            activations.check_rows(tower, index)
            inputs = activations.of(tower, index[:CHECKED_ROWS])
            self.baseline.check_embeddings(tower, inputs, embedding[:CHECKED_ROWS])

    def fit(self, task: RetrievalTask) -> None:
        """Fits the baseline and reads the activations of the task."""
        super().fit(task)
        activations = activations_of(task.folder, "test")
        query_tower, item_tower = towers(task.direction)
        self.queries = activations.of(query_tower, task.query_row)
        self.items = activations.of(item_tower, task.item_row)

    def score(self, rows: slice, answers: Tensor) -> Scores:  # noqa: ARG002
        """Scores activations instead of embeddings."""
        uncertainty = self.baseline.uncertainty(self.queries[rows], self.items, self.task.direction)
        return Scores.without_probabilities(uncertainty)


def activations_of(folder: Path | None, which: str) -> Activations:
    """The activations in the folder that pairs were opened from; `which` names the pairs in an error."""
    if folder is None:
        raise ValueError(f"the {which} pairs do not come from a folder: {NEEDS_ACTIVATIONS}")
    return Activations.open(folder)
