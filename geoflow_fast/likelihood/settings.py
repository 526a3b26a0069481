"""How a log-density is estimated: the steps of the reverse ODE and the probes of the divergence."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from geoflow_fast.flow.precision import TF32
from geoflow_fast.flow.solvers import GRIDS, SOLVERS
from geoflow_fast.runtime import checks

DIVERGENCES = ("hutchinson", "exact")
PROBES = ("aligned", "rademacher")
TANGENTS = ("separate", "combined")


@dataclass(frozen=True)
class DensitySettings:
    """Settings of `log_density` and `epistemic`.

    `n_steps`, `solver`, `grid`: the ODE is solved from t = 1 to t = 0 in so many steps of "euler", "midpoint", "rk4" or
    "ab2". The steps are "uniform", or shorter near the noise ("early") or near the data ("late").

    `divergence`: "hutchinson" estimates it by the mean over `n_probes` random probes. "exact" needs one tangent per
    coordinate and is meant for small d.

    `probe`: "aligned" probes have a fixed norm in the tangent space and size one along the direction in which the
    Jacobian acted most in earlier steps, which removes the noise of that direction. "rademacher" probes are the
    paper's. `redraw`: draw new probes at every step instead of keeping them along the path. `shared`: use the same
    probes for all rows, which makes differences between rows less noisy; "aligned" ones are then orthogonal to those
    of earlier steps instead. Kept probes follow no direction.

    `tangents`, for the joint direction: "separate" moves one stream at a time, which removes the Jacobian blocks
    between the streams, the source of most of the noise. "combined" moves both at once, which costs less.

    `precision` of a network's matrix products: "float32"; "tf32" on GPUs that have it; "bfloat16", about twice as fast
    on processors and GPUs with units for it; or "auto", which is bfloat16 where that is faster, else float32. All the
    rest is float32, and traces are summed in float64.
    """

    n_steps: int = 10
    n_probes: int = 1
    solver: str = "midpoint"
    divergence: str = "hutchinson"
    probe: str = "aligned"
    redraw: bool = True
    tangents: str = "separate"
    grid: str = "uniform"
    shared: bool = False
    precision: str = "float32"

    def __post_init__(self) -> None:
        for name in ("n_steps", "n_probes"):
            object.__setattr__(self, name, checks.integer(getattr(self, name), name, 1))  # plain ones, for files
        for name in ("redraw", "shared"):
            checks.boolean(getattr(self, name), name)
        for name, known in (
            ("solver", SOLVERS),
            ("grid", GRIDS),
            ("divergence", DIVERGENCES),
            ("probe", PROBES),
            ("tangents", TANGENTS),
        ):
            checks.one_of(getattr(self, name), name, known)
        checks.precision(self.precision, TF32)

    @property
    def exact(self) -> bool:
        """Whether the trace is computed instead of estimated."""
        return self.divergence == "exact"

    @property
    def learns(self) -> bool:
        """Whether probes follow a direction that they learn along the path of each row."""
        return self.probe == "aligned" and self.redraw and not self.shared

    @property
    def paired_tangents(self) -> bool:
        """Whether one tangent moves both streams of the joint solve."""
        return self.tangents == "combined" and not self.exact

    def facts(self) -> dict[str, Any]:
        """Everything that the numbers depend on, by which a job or a calibration is recognised."""
        return dataclasses.asdict(self)


PAPER_DENSITY = DensitySettings(n_steps=50, n_probes=1, solver="euler", probe="rademacher", tangents="combined")
"""The paper's settings, for `log_density(..., settings=PAPER_DENSITY)` and `epistemic(..., settings=PAPER_DENSITY)`."""


FAST_DENSITY = DensitySettings(n_steps=10, n_probes=1, solver="ab2", grid="early")
"""Settings for ranking, cheaper than the defaults: steps are shorter where most of the noise arises, at the price of
more bias (on the concept world +.6 nat in the joint log-density, against +.1; see docs/likelihood.md)."""
