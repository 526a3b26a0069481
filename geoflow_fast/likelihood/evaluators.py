"""Divergence of velocity fields along paths: random probes, and traces by them in forward mode or by autograd.

On the sphere div v = tr(P grad f P) - (d - 1) <x, f> for v = P f, P the tangent projection at x (Sec. D of the paper).
The second term is exact. The first is e^T (grad f) e on average over tangent probes e of second moment P.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from geoflow_fast.flow.solvers import Field, Streams
from geoflow_fast.geometry import capturing, dot, project_tangent
from geoflow_fast.likelihood.forward_mode import GENERATED, Dual, ForwardMode, Solve
from geoflow_fast.likelihood.probes import STREAMS
from geoflow_fast.manifolds import SPHERE, manifold_of

TANGENT_TOLERANCE = 1e-3
"""Share of a field's velocity that may point off the sphere."""


Products = list[dict[int, Tensor]]
"""Jacobian times probe, [K, B, d] by stream, of each solve: of the field in forward mode, transposed by autograd. Good
until the next evaluation."""


Evaluation = tuple[list[Streams], Tensor | None, Products]
"""Velocities (image, text) of each solve; divergences, one estimate per probe: [solves, K, B] float64; products."""


class Evaluator(Protocol):
    """Velocities of all solves at once and, with probes, their divergences and what the probes became."""

    def __call__(
        self, points: Sequence[Streams], t: float, probes: Sequence[Streams] | None, paired: bool
    ) -> Evaluation:
        """`points` (image, text) and `probes` [K, B, d] of each solve; `paired`: one tangent moves both streams."""


class NetworkEvaluator:
    """A `GeoFlow` in forward mode. `points`: where the solves start; a given stream stays there.

    `exact`: the probes are all tangent directions, whose forms add up, instead of so many estimates. `encoded` [B, H]:
    the given stream's encoding, if it is known already.
    """

    def __init__(
        self,
        network: ForwardMode,
        directions: Sequence[str],
        points: Sequence[Streams],
        exact: bool,
        encoded: Tensor | None = None,
    ) -> None:
        self.network, self.directions, self.exact = network, directions, exact
        self.sphere = network.flow.config.geometry == "sphere"
        self.given = [
            {
                stream: network.encode(pair[stream], stream) if encoded is None else encoded
                for stream in range(2)
                if stream not in GENERATED[direction]
            }
            for direction, pair in zip(directions, points)
        ]

    def __call__(
        self, points: Sequence[Streams], t: float, probes: Sequence[Streams] | None, paired: bool
    ) -> Evaluation:
        solves = []
        for number, (direction, pair) in enumerate(zip(self.directions, points)):
            image, text = (
                (self.given[number].get(stream, x), self._tangents(number, stream, x, probes))
                for stream, x in enumerate(pair)
            )
            solves.append(Solve(direction, image, text, paired and len(GENERATED[direction]) == 2))
        outputs = self.network(t, solves)
        velocities: list[Streams] = []
        traces: list[Tensor] = []
        products: Products = []
        for number, (pair, found) in enumerate(zip(points, outputs)):
            velocities.append((self._velocity(pair[0], found.get(0)), self._velocity(pair[1], found.get(1))))
            if probes is not None:
                forms = [self._trace(pair[stream], probes[number][stream], dual) for stream, dual in found.items()]
                traces.append(torch.stack(forms).sum(0))
                products.append({stream: dual[1] for stream, dual in found.items()})
        return velocities, torch.stack(traces) if traces else None, products

    def _tangents(self, number: int, stream: int, x: Tensor, probes: Sequence[Streams] | None) -> Tensor:
        if probes is None or stream in self.given[number]:
            return x.new_empty(0, *x.shape)
        return probes[number][stream]

    def _velocity(self, x: Tensor, dual: Dual | None) -> Tensor:
        """Tangent velocity of a generated stream, in memory of its own; zero of a given one."""
        if dual is None:
            return torch.zeros_like(x)
        return project_tangent(x, dual[0]) if self.sphere else dual[0].clone()

    def _trace(self, x: Tensor, probe: Tensor, dual: Dual) -> Tensor:
        """e^T (grad f) e - (d - 1) <x, f>: [K, B] float64, [1, B] if exact."""
        form = dot(dual[1].double(), probe.double()).squeeze(-1)
        if self.exact:
            form = form.sum(0, keepdim=True)
        if not self.sphere:
            return form
        return form - (x.shape[1] - 1) * dot(x.double(), dual[0].double()).squeeze(-1)


class FieldEvaluator:
    """Any field with a differentiable `velocity`, by one vector-Jacobian product per probe.

    On the sphere the trace is that of a tangent field alone, so any other is refused. `first_row` names its rows.
    """

    def __init__(self, field: Field, directions: Sequence[str], exact: bool, first_row: int) -> None:
        self.field, self.directions, self.exact, self.first_row = field, directions, exact, first_row
        self.sphere = manifold_of(field) is SPHERE

    def __call__(
        self, points: Sequence[Streams], t: float, probes: Sequence[Streams] | None, paired: bool
    ) -> Evaluation:
        if probes is None:
            with torch.no_grad():
                return [self._velocity(pair, t, name) for name, pair in zip(self.directions, points)], None, []
        velocities: list[Streams] = []
        traces: list[Tensor] = []
        products: Products = []
        for direction, pair, probe in zip(self.directions, points, probes):
            streams = GENERATED[direction]
            with torch.enable_grad():
                inputs = (pair[0].detach().requires_grad_(), pair[1].detach().requires_grad_())
                velocity = self._velocity(inputs, t, direction)
                groups = (streams,) if paired else tuple((stream,) for stream in streams)
                pulled: dict[int, Tensor] = {}
                for group in groups:
                    pulled |= self._pull(group, inputs, velocity, probe)
            forms = [dot(x.double(), probe[stream].double()).squeeze(-1) for stream, x in pulled.items()]
            trace = torch.stack(forms).sum(0)
            velocities.append((velocity[0].detach(), velocity[1].detach()))
            traces.append(trace.sum(0, keepdim=True) if self.exact else trace)
            products.append(pulled)
        return velocities, torch.stack(traces), products

    def _velocity(self, pair: Streams, t: float, direction: str) -> Streams:
        """The field's velocity, its generated streams checked."""
        found = self.field.velocity(*pair, t, direction)
        for stream in GENERATED[direction]:
            x, v = pair[stream].detach(), found[stream].detach()
            if v.shape != x.shape:
                shapes = f"{tuple(v.shape)} at points {tuple(x.shape)}"
                raise ValueError(f"{direction}: the {STREAMS[stream]} velocity has shape {shapes}")
            if self.sphere and not capturing(v):
                self._check_tangent(x, v, f"{direction}: the {STREAMS[stream]} velocity", t)
        return found

    def _check_tangent(self, x: Tensor, v: Tensor, name: str, t: float) -> None:
        """ValueError naming the first row of `v` [B, d] that leaves the tangent space at `x`; NaN is not looked at."""
        rounding = 32 * torch.finfo(v.dtype).eps  # all that is left where a field vanishes by cancellation
        allowed = TANGENT_TOLERANCE * torch.linalg.vector_norm(v, dim=-1) + rounding
        bad = dot(x, v).abs().squeeze(-1) > allowed
        if bool(bad.any()):
            row = self.first_row + int(bad.nonzero()[0])
            raise ValueError(
                f"{name} is not tangent to the sphere in row {row} at t={t:.4g}; "
                "pass it through geoflow_fast.geometry.project_tangent"
            )

    def _pull(
        self, streams: tuple[int, ...], inputs: tuple[Tensor, ...], velocity: Streams, probe: Streams
    ) -> dict[int, Tensor]:
        """(grad v)^T e of the product of these streams, by stream: [K, B, d]."""
        moving = [stream for stream in streams if velocity[stream].requires_grad]
        for stream in streams:
            if stream not in moving and bool(velocity[stream].any()):
                raise ValueError(f"the {STREAMS[stream]} velocity must be differentiable in the points")
        if not moving:  # streams that stand still have no divergence
            return {stream: torch.zeros_like(probe[stream]) for stream in streams}
        pulled = [
            torch.autograd.grad(
                [velocity[stream] for stream in moving],
                [inputs[stream] for stream in streams],
                [probe[stream][k] for stream in moving],
                retain_graph=True,
                materialize_grads=True,
            )
            for k in range(len(probe[streams[0]]))
        ]
        return {stream: torch.stack(found) for stream, found in zip(streams, zip(*pulled))}


def evaluator_of(
    field: Field,
    network: ForwardMode | None,
    directions: Sequence[str],
    points: Sequence[Streams],
    exact: bool,
    first_row: int,
    encoded: Tensor | None = None,
) -> Evaluator:
    """The network in forward mode where there is one, autograd for any other field."""
    if network is not None:
        return NetworkEvaluator(network, directions, points, exact, encoded)
    return FieldEvaluator(field, directions, exact, first_row)
