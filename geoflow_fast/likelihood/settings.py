"""Settings of a log-density estimate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from geoflow_fast.flow.solvers import evaluation_times, time_grid
from geoflow_fast.likelihood.probes import ORTHOGONAL, PROBES, TANGENTS
from geoflow_fast.runtime import checks

DIVERGENCES = ("hutchinson", "exact")


PAPER_DENSITY: Mapping[str, Any] = MappingProxyType(
    {"n_steps": 50, "n_probes": 1, "solver": "euler", "probe": "rademacher", "tangents": "combined"}
)
"""The paper's settings, for `log_density(..., **PAPER_DENSITY)` and `epistemic(..., **PAPER_DENSITY)`."""


FAST_DENSITY: Mapping[str, Any] = MappingProxyType({"n_steps": 10, "n_probes": 1, "solver": "ab2", "grid": "early"})
"""Settings for ranking, cheaper than the defaults: steps are shorter where most of the noise arises, at the price of
more bias (on the concept world +.6 nat in the joint log-density, against +.1; see docs/likelihood.md)."""


MEMORY = {"cpu": 64 * 2**20, "cuda": 2**30}
"""Default memory budget of a network's activations, in bytes; on a CPU about what its last-level cache likes."""


@dataclass(frozen=True)
class DensitySettings:
    """How a log-density is estimated; `log_density` describes the fields."""

    n_steps: int = 10
    n_probes: int = 1
    solver: str = "midpoint"
    divergence: str = "hutchinson"
    probe: str | None = None
    redraw: bool = True
    orthogonal: str | None = None
    tangents: str = "separate"
    grid: str = "uniform"
    shared: bool = False

    def __post_init__(self) -> None:
        for count in ("n_steps", "n_probes"):  # plain integers, which go into files
            object.__setattr__(self, count, checks.integer(getattr(self, count), count, 1))
        evaluation_times(time_grid(self.n_steps, kind=self.grid), self.solver)
        own = self.redraw and not self.shared  # otherwise there is nothing to learn from step to step
        if self.probe is None:
            aligned = own and self.orthogonal in (None, "none")
            object.__setattr__(self, "probe", "aligned" if aligned else "gaussian")
        choices = {"divergence": DIVERGENCES, "probe": PROBES, "tangents": TANGENTS}
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {known}, got {getattr(self, name)!r}")
        if self.orthogonal is None:
            object.__setattr__(self, "orthogonal", "steps" if self.probe == "gaussian" else "none")
        if self.orthogonal not in ORTHOGONAL:
            raise ValueError(f"orthogonal must be one of {ORTHOGONAL}, got {self.orthogonal!r}")
        if self.orthogonal != "none" and self.probe != "gaussian":
            raise ValueError(f"orthogonal={self.orthogonal!r} needs probe='gaussian', got {self.probe!r}")
        if self.probe == "aligned" and not own:
            raise ValueError("probe='aligned' follows the path of every row: it needs redraw=True and shared=False")

    @property
    def exact(self) -> bool:
        """Whether the trace is computed instead of estimated."""
        return self.divergence == "exact"

    @property
    def paired(self) -> bool:
        """Whether one tangent moves both streams of the joint solve."""
        return self.tangents != "separate" and not self.exact

    def correction(self, freedom: int) -> float:
        """Variance of the mean of K probes over that of their sample variance / K: below one for probes that are
        orthogonal, whose forms, adding up to the trace over a whole basis, have covariance -variance / (freedom - 1).
        """
        return 1 - self.n_probes / freedom if self.orthogonal == "probes" else 1.0
