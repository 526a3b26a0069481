"""The Euclidean twin of GeoFlow: straight lines and a Gaussian base instead of geodesics on spheres."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from benchmarks.methods.baselines.base import FitTask
from benchmarks.methods.baselines.trained import SizedBaseline
from benchmarks.methods.euclidean import twin_of
from geoflow_fast.directions import CONDITIONAL, Direction
from geoflow_fast.flow.config import GeoFlowConfig
from geoflow_fast.flow.model import GeoFlow
from geoflow_fast.retrieval.bandwidth import fit_bandwidth
from geoflow_fast.retrieval.entropy import RetrievalEntropy
from geoflow_fast.retrieval.gallery import Gallery
from geoflow_fast.training.config import RunConfig, TrainConfig
from geoflow_fast.training.flow_matching import FlowMatching
from geoflow_fast.training.loop import Run, TrainReport, complete


class EuclideanFlow(SizedBaseline):
    """Retrieval entropy of a flow in Euclidean space, without projections, geodesics or normalisation: the paper's
    ablation of the geometry.

    Network, curriculum and coupling are those of a GeoFlow of the same size. As for GeoFlow, kappa and guidance of each
    direction are fitted on the validation pairs, and queries are scored with the settings of `RetrievalEntropy.fast`.
    """

    method: ClassVar[str] = "euclidean_flow"
    title: ClassVar[str] = "Euclidean flow"
    bandwidth: Tensor

    def __init__(self, image_dim: int, text_dim: int, size: str = "auto", seed: int = 0) -> None:
        super().__init__(image_dim, text_dim, size, seed=seed)
        self.seed = seed
        shape = getattr(GeoFlowConfig, self.size)(image_dim, text_dim)
        self.flow = GeoFlow(twin_of(shape))
        self.register_buffer(
            "bandwidth", torch.zeros(len(CONDITIONAL), 2, dtype=torch.float32)
        )  # kappa and guidance, by direction

    def default_config(self) -> RunConfig:
        """The run of `gf.train` for this size."""
        config: TrainConfig = getattr(TrainConfig, self.size)()
        return config

    def _fit(self, task: FitTask) -> TrainReport:
        config = task.config if isinstance(task.config, TrainConfig) else TrainConfig(**dataclasses.asdict(task.config))
        run = Run(_TwinMatching(self, task, config))
        report = complete(run, task.out, resume=task.resume, progress=task.progress)
        if report.finished:
            for row, direction in enumerate(CONDITIONAL):
                fitted = fit_bandwidth(self.flow, task.val, direction, seed=self.seed)
                self.bandwidth[row] = torch.tensor(
                    [fitted.kappa, fitted.guidance], device=self.bandwidth.device, dtype=torch.float32
                )
            if task.out is not None:
                self.write(task.out, self.state_dict())
        return report

    def _score(self, queries: Tensor, gallery: Gallery, direction: Direction) -> Tensor:
        kappa, guidance = self.bandwidth[CONDITIONAL.index(direction)].tolist()
        chosen = {"kappa": kappa, "guidance": guidance, "seed": self.seed}
        scorer = RetrievalEntropy.fast(self.flow, gallery, direction, **chosen).to(self.device)
        return scorer(queries).entropy


class _TwinMatching(FlowMatching):
    """Flow matching that exports its weights as those of a baseline."""

    def __init__(self, method: EuclideanFlow, task: FitTask, config: TrainConfig) -> None:
        super().__init__(method.flow, task.pairs, task.val, config)
        self.method = method
        self.facts = method.facts

    def export(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        """Writes what `Baseline.load` reads, before the bandwidth is fitted."""
        named = {f"flow.{name}": x for name, x in weights.items()}
        self.method.write(folder, {**named, "bandwidth": self.method.bandwidth})
