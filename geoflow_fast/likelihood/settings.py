"""How a log-density is estimated: the steps of the reverse ODE and the probes of the divergence."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from geoflow_fast.flow.precision import check_precision
from geoflow_fast.flow.solvers import GRIDS, SOLVERS
from geoflow_fast.runtime import checks

DIVERGENCES = ("hutchinson", "exact")
PROBES = ("aligned", "gaussian", "rademacher")
ORTHOGONAL = ("steps", "probes", "none")
TANGENTS = ("separate", "combined", "alternating")


@dataclass(frozen=True)
class DensitySettings:
    """Settings of `log_density`, `epistemic` and `suggest_steps`.

    `n_steps`, `solver`, `grid`: the ODE is solved from t = 1 to t = 0 in so many steps of "euler", "midpoint", "rk4" or
    "ab2". The steps are "uniform", or shorter near the noise ("early") or near the data ("late").

    `divergence`: "hutchinson" estimates it by the mean over `n_probes` random probes. "exact" needs one tangent per
    coordinate and is meant for small d.

    `probe`: "gaussian" probes have a fixed norm in the tangent space. "aligned" ones, the default where they are
    applicable, remove the noise along the direction in which the Jacobian acted most in earlier steps. "rademacher"
    probes are the paper's. `redraw`: draw new probes at every step instead of keeping them along the path.
    `orthogonal`: whether Gaussian probes are orthogonal to those of earlier "steps" (the default, which makes
    `n_probes` independent sets), to the other "probes" of the same step, or neither ("none"). `shared`: use the same
    probes for all rows, which makes differences between rows less noisy.

    `tangents`, for the joint direction: "separate" moves one stream at a time, which removes the Jacobian blocks
    between the streams, the source of most of the noise. "combined" moves both at once, which costs less.
    "alternating" does too, but flips the sign of the text at every other step, so that those blocks cancel.

    `precision` of a network's matrix products: "float32"; "tf32" on GPUs that have it; "bfloat16", about twice as fast
    on processors and GPUs with units for it; or "auto", which is bfloat16 where that is faster, else float32. All the
    rest is float32, and traces are summed in float64.
    """

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
    precision: str = "float32"
    probe_kind: str = field(init=False, repr=False)
    """What `probe` stands for if it is None."""
    orthogonal_to: str = field(init=False, repr=False)
    """What `orthogonal` stands for if it is None."""
    exact: bool = field(init=False, repr=False)
    """Whether the trace is computed instead of estimated."""
    paired_tangents: bool = field(init=False, repr=False)
    """Whether one tangent moves both streams of the joint solve."""

    def __post_init__(self) -> None:
        for name in ("n_steps", "n_probes"):
            object.__setattr__(self, name, checks.integer(getattr(self, name), name, 1))  # plain ones, for files
        for name in ("redraw", "shared"):
            checks.boolean(getattr(self, name), name)
        can_align = self.redraw and not self.shared  # otherwise there is nothing to learn from step to step
        aligned = can_align and self.orthogonal in (None, "none")
        probe = ("aligned" if aligned else "gaussian") if self.probe is None else self.probe
        orthogonal = ("steps" if probe == "gaussian" else "none") if self.orthogonal is None else self.orthogonal
        object.__setattr__(self, "probe_kind", probe)
        object.__setattr__(self, "orthogonal_to", orthogonal)
        object.__setattr__(self, "exact", self.divergence == "exact")
        object.__setattr__(self, "paired_tangents", self.tangents != "separate" and not self.exact)
        for name, value, known in (
            ("solver", self.solver, SOLVERS),
            ("grid", self.grid, GRIDS),
            ("divergence", self.divergence, DIVERGENCES),
            ("probe", probe, PROBES),
            ("tangents", self.tangents, TANGENTS),
            ("orthogonal", orthogonal, ORTHOGONAL),
        ):
            if value not in known:
                raise ValueError(f"{name} must be one of {known}, got {value!r}")
        check_precision(self.precision)
        if orthogonal != "none" and probe != "gaussian":
            raise ValueError(f"orthogonal={orthogonal!r} needs probe='gaussian', got {probe!r}")
        if probe == "aligned" and not can_align:
            raise ValueError("probe='aligned' follows the path of every row: it needs redraw=True and shared=False")

    def facts(self) -> dict[str, Any]:
        """Everything that the numbers depend on, by which a job or a calibration is recognised."""
        names = ("n_steps", "n_probes", "solver", "divergence", "probe", "redraw", "orthogonal", "tangents", "grid")
        values = {name: getattr(self, name) for name in (*names, "shared", "precision")}
        return values | {"probe": self.probe_kind, "orthogonal": self.orthogonal_to}

    def correction(self, freedom: int) -> float:
        """The variance of the mean of K probes over that of K independent ones. It is below one for probes that are
        orthogonal to each other: their forms add up to the trace over a whole basis of `freedom` vectors, so that they
        have covariance -variance / (freedom - 1)."""
        return 1 - self.n_probes / freedom if self.orthogonal_to == "probes" else 1.0


PAPER_DENSITY = DensitySettings(n_steps=50, n_probes=1, solver="euler", probe="rademacher", tangents="combined")
"""The paper's settings, for `log_density(..., settings=PAPER_DENSITY)` and `epistemic(..., settings=PAPER_DENSITY)`."""


FAST_DENSITY = DensitySettings(n_steps=10, n_probes=1, solver="ab2", grid="early")
"""Settings for ranking, cheaper than the defaults: steps are shorter where most of the noise arises, at the price of
more bias (on the concept world +.6 nat in the joint log-density, against +.1; see docs/likelihood.md)."""
