"""Divergence of velocity fields along paths: random probes, and traces by them in forward mode or by autograd.

On the sphere div v = tr(P grad f P) - (d - 1) <x, f> for v = P f, P the tangent projection at x (Sec. D of the paper).
The second term is exact. The first is e^T (grad f) e on average over tangent probes e of second moment P.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from geoflow_fast.forward_mode import GENERATED, Dual, ForwardMode, Solve
from geoflow_fast.geometry import capturing, dot, project_tangent
from geoflow_fast.integrate import Field, Streams, geometry_of

PROBES = ("aligned", "gaussian", "rademacher")
ORTHOGONAL = ("steps", "probes", "none")
TANGENTS = ("separate", "combined", "alternating")
STREAMS = ("image", "text")

TANGENT_TOLERANCE = 1e-3
"""Share of a field's velocity that may point off the sphere."""

Products = list[dict[int, Tensor]]
"""Jacobian times probe, [K, B, d] by stream, of each solve: of the field in forward mode, transposed by autograd. Good
until the next evaluation."""

Evaluation = tuple[list[Streams], Tensor | None, Products]
"""Velocities (image, text) of each solve; divergences, one estimate per probe: [solves, K, B] float64; products."""

# splitmix64, whose outputs pass the usual test batteries; as signed 64-bit integers, which wrap as unsigned ones do.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
_LOW = 2**32 - 1


def _mix(z: Tensor) -> Tensor:
    """Finaliser of splitmix64 on int64; the masks make arithmetic shifts logical ones."""
    z = (z ^ ((z >> 30) & (2**34 - 1))) * _FIRST
    z = (z ^ ((z >> 27) & (2**37 - 1))) * _SECOND
    return z ^ ((z >> 31) & (2**33 - 1))


class Probes:
    """Probes as a function of seed, row, draw and stream, aligned ones of the path too; batches do not change them.

    `kind` "gaussian": tangent, rescaled to norm sqrt(d - 1), so exact on the isotropic part of the trace. "aligned":
    the same, but of size one along a direction in which the Jacobian was seen to act most in the draws before (see
    `learn`), which takes that eigenvalue out of the noise; the rest is uniform. That direction being settled before the
    draw, the second moment stays the projection. "rademacher": random signs, projected. `orthogonal` "steps": a probe
    is orthogonal to those of the draws before it, in frames of up to `FRAME` draws; along a path the Jacobian changes
    slowly, so what one direction has seen the next need not. "probes": the K probes of a draw are orthogonal to each
    other. `exact`: all tangent directions, whose forms add up to the trace. `rows` [B]: numbers of the rows, or [1] for
    all. `seed`: int, or 0-d on the device.
    """

    FRAME = 32
    MEMORY = 0.8
    """What the direction of aligned probes keeps of itself from draw to draw."""
    CLEAR = 1e-3
    """Length that a unit direction must have left in the tangent space to be followed there."""

    def __init__(
        self, seed: int | Tensor, rows: Tensor, count: int, kind: str, orthogonal: str, exact: bool, geometry: str
    ) -> None:
        self.seed, self.rows, self.count = seed, rows, count
        self.kind, self.orthogonal, self.exact, self.geometry = kind, orthogonal, exact, geometry
        self._drawn: dict[int, tuple[int, Tensor]] = {}
        self._frames: dict[int, list[Tensor]] = {0: [], 1: []}
        self._seen: dict[int, Tensor] = {}
        self._leads: dict[int, Tensor] = {}

    def draw(self, number: int, stream: int, x: Tensor) -> Tensor:
        """Probes [K, B, d] of draw `number` for the points `x` [B, d] of a stream, tangent on the sphere. Draws are
        asked for in order; one may be asked for again, at other points."""
        if self.exact:
            basis = torch.eye(x.shape[1], dtype=x.dtype, device=x.device).unsqueeze(1)
            return project_tangent(x, basis) if self.geometry == "sphere" else basis.expand(-1, len(x), -1)
        e = self._directions(number, stream, x).expand(-1, len(x), -1)
        if self.geometry == "sphere":
            e = project_tangent(x, e)
        if self.orthogonal == "probes":
            e = torch.stack(_orthogonalise(list(e), []))
        if self.kind == "rademacher":
            return e
        freedom = x.shape[1] - (self.geometry == "sphere")
        plain = torch.nn.functional.normalize(e, dim=-1) * math.sqrt(freedom)
        if stream not in self._leads:
            return plain
        lead = self._leads[stream]
        if self.geometry == "sphere":
            lead = project_tangent(x, lead)
        length = torch.linalg.vector_norm(lead, dim=-1, keepdim=True)
        lead = lead / length.clamp_min(self.CLEAR)
        rest = torch.nn.functional.normalize(e - dot(lead, e) * lead, dim=-1) * math.sqrt(freedom - 1)
        return torch.where(length > self.CLEAR, lead + rest, plain)

    def learn(self, stream: int, x: Tensor, e: Tensor, product: Tensor) -> None:
        """Takes what the Jacobian made of the probes `e` [K, B, d] at `x` [B, d] into account in later draws.

        Without its part along e, which the isotropic Jacobian has too, J e leans towards the eigenvectors of the
        largest eigenvalues: a step of power iteration, averaged over probes and draws, whose signs are arbitrary.
        """
        if self.kind != "aligned":
            return
        if self.geometry == "sphere":
            product = project_tangent(x, product)
        r = product - dot(e, product) / dot(e, e) * e
        before = self._seen.get(stream)
        along = torch.nn.functional.normalize(r.select(0, 0) if before is None else before, dim=-1)
        new = (r * dot(torch.nn.functional.normalize(r, dim=-1), along)).mean(0)
        self._seen[stream] = new if before is None else torch.add(new, before, alpha=self.MEMORY)

    def _directions(self, number: int, stream: int, like: Tensor) -> Tensor:
        """Directions [K, B, d] of a draw before they meet a point: the same for all solves."""
        if stream in self._drawn and self._drawn[stream][0] == number:
            return self._drawn[stream][1]
        e = self._normals(number, stream, like.shape[1]).to(like.dtype)
        if self.kind == "rademacher":
            e = torch.where(e < 0, -1.0, 1.0).to(like.dtype)
        if self.orthogonal == "steps":
            frame = self._frames[stream]
            if len(frame) == min(self.FRAME, like.shape[1]):
                frame.clear()
            (e,) = _orthogonalise([e], frame)
            frame.append(torch.nn.functional.normalize(e, dim=-1))
        if stream in self._seen:  # with the sign that the probe has along it, at whatever points
            lead = torch.nn.functional.normalize(self._seen[stream], dim=-1)
            self._leads[stream] = lead * dot(lead, e).sign()
        self._drawn[stream] = number, e
        return e

    def _normals(self, number: int, stream: int, d: int) -> Tensor:
        """Standard normals [K, B, d], float32, by Box-Muller from a hash of their place."""
        lanes = torch.arange(self.count, device=self.rows.device) * 2 + stream + (number << 32)
        keys = _mix(_mix(self.rows * _GOLDEN + self.seed) + lanes.unsqueeze(1) * _GOLDEN)
        half = torch.arange(1, (d + 1) // 2 + 1, device=self.rows.device)
        bits = _mix(keys.unsqueeze(-1) + half * _GOLDEN)
        uniform = (((bits >> 32) & _LOW).float() + 0.5) * 2.0**-32
        radius = torch.sqrt(-2 * torch.log(uniform))
        turn = (bits & _LOW).float() * (2 * math.pi * 2.0**-32)
        return torch.cat((radius * turn.cos(), radius * turn.sin()), dim=-1).narrow(-1, 0, d)


def _orthogonalise(vectors: list[Tensor], frame: Sequence[Tensor]) -> list[Tensor]:
    """Vectors [..., d] made orthogonal to the unit vectors of `frame` and to those before them; twice when little is
    left of a vector then, because once leaves rounding behind."""
    frame, done = list(frame), []
    for vector in vectors:
        for _ in range(1 if 2 * len(frame) < vector.shape[-1] else 2):
            for other in frame:
                vector = vector - dot(other, vector) * other
        frame.append(torch.nn.functional.normalize(vector, dim=-1))
        done.append(vector)
    return done


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
        self.sphere = geometry_of(field) == "sphere"

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
