"""Velocity and divergence of a field at the points of several solves: in forward mode for a network, else by autograd.

On the sphere div v = tr(P grad f P) - (d - 1) <x, f> for v = P f, where P is the tangent projection at x (Sec. D of the
paper). The second term is exact. The first is the mean of e^T (grad f) e over tangent probes e with second moment P. In
flat space P is the identity and there is no second term. The streams that move are listed solve by solve, image first;
points, probes and velocities are tuples in this order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from geoflow_fast.directions import STREAMS, Direction
from geoflow_fast.flow.fields import FlowField, Streams
from geoflow_fast.flow.inference import InferenceNetwork, Solve
from geoflow_fast.flow.solvers import Points
from geoflow_fast.geometry import capturing
from geoflow_fast.likelihood.settings import DensitySettings

TANGENT_TOLERANCE = 1e-3
"""Share of a field's velocity that may point off the sphere."""


Evaluation = tuple[Points, Points]
"""Velocities [B, d] of the streams that move, whose tangent parts are to be followed, and what the Jacobian made of the
probes, [K, B, d] for each stream that moves: the Jacobian of the network in forward mode, that of any other field
transposed. The last are good until the next evaluation; without probes there are none."""


class Evaluator(Protocol):
    """Evaluates the velocities of all solves at once and, if there are probes, what the Jacobian makes of them."""

    curved: bool
    """Whether the velocities are not yet tangent, so that the curvature of the sphere belongs to the divergence."""

    def __call__(self, points: Points, t: float, probes: Points | None = None) -> Evaluation:
        """`points` [B, d] and `probes` [K, B, d] of the streams that move."""


class NetworkEvaluator:
    """Evaluates a network in forward mode.

    `pair`: where all solves start; a given stream stays there. `encoded` [B, H]: the encoding of the given stream, if
    it is already known.
    """

    def __init__(
        self,
        network: InferenceNetwork,
        directions: Sequence[Direction],
        pair: Streams,
        settings: DensitySettings,
        encoded: Tensor | None = None,
    ) -> None:
        self.network, self.directions, self.settings = network, directions, settings
        self.curved = True
        self.moving = [(solve, stream) for solve, direction in enumerate(directions) for stream in direction.generated]
        self.still = [x.new_empty(0, *x.shape) for x in pair]  # no tangents
        self.start = [list(pair) for _ in directions]
        for points, direction in zip(self.start, directions):
            given = direction.given
            if given is not None:
                points[given] = network.encode(pair[given], given) if encoded is None else encoded
        # The prediction of a given stream never changes, and no tangent moves it.
        self.anchor = network.flow.anchor
        self.predictions: list[Tensor | None] = [
            None
            if self.anchor is None or (given := directions[solve].given) is None
            else self.anchor.predict(pair[given], stream)
            for solve, stream in self.moving
        ]

    def __call__(self, points: Points, t: float, probes: Points | None = None) -> Evaluation:
        everywhere, tangents = [list(pair) for pair in self.start], [list(self.still) for _ in self.start]
        for k, (solve, stream) in enumerate(self.moving):
            everywhere[solve][stream] = points[k]
            if probes is not None:
                tangents[solve][stream] = probes[k]
        paired = self.settings.paired_tangents
        rows = [Solve(*solve, paired) for solve in zip(self.directions, everywhere, tangents)]
        outputs = self.network(t, rows)
        f, products = zip(*(outputs[key] for key in self.moving))
        if self.anchor is not None:
            anchor, moving = self.anchor, [(*key, p) for key, p in zip(self.moving, self.predictions)]
            f = tuple(
                y if p is None else anchor.shares[stream] * y + p * anchor.weight(t, stream)
                for y, (_, stream, p) in zip(f, moving)
            )
            products = tuple(
                y if p is None else anchor.shares[stream] * y for y, (_, stream, p) in zip(products, moving)
            )
        return f, products if probes is not None else ()


class FieldEvaluator:
    """Evaluates any field with a differentiable `velocity`, with one vector-Jacobian product per probe.

    The trace is the divergence only for velocities that are tangent, so others are refused; `first_row` is the number
    by which an error names the first row. `pair`: where all solves start; a given stream stays there.
    """

    def __init__(
        self,
        field: FlowField,
        directions: Sequence[Direction],
        pair: Streams,
        settings: DensitySettings,
        first_row: int,
    ) -> None:
        self.field, self.directions, self.pair, self.settings = field, directions, pair, settings
        self.manifold, self.first_row = field.manifold, first_row
        self.curved = False
        self.moving = [(solve, stream) for solve, direction in enumerate(directions) for stream in direction.generated]

    def __call__(self, points: Points, t: float, probes: Points | None = None) -> Evaluation:
        velocities: list[Tensor] = []
        products: list[Tensor] = []
        for direction in self.directions:
            own = slice(len(velocities), len(velocities) + len(direction.generated))
            pair = list(self.pair)
            for stream, x in zip(direction.generated, points[own]):
                pair[stream] = x
            if probes is None:
                velocities += self._velocity(pair, t, direction)
                continue
            with torch.enable_grad():
                leaves = [x.detach().requires_grad_() for x in pair]
                velocity = self._velocity(leaves, t, direction)
                products += self._products([leaves[s] for s in direction.generated], velocity, probes[own], direction)
            velocities += [v.detach() for v in velocity]
        return tuple(velocities), tuple(products)

    def _velocity(self, pair: Sequence[Tensor], t: float, direction: Direction) -> list[Tensor]:
        """The field's velocities in the streams that are generated. A ValueError names the first row of one that leaves
        the tangent space; NaN is left to the solver."""
        image, text = pair
        both = self.field.velocity(image, text, t, direction)
        for stream in direction.generated:
            x, v, name = pair[stream].detach(), both[stream].detach(), f"{direction}: the {STREAMS[stream]} velocity"
            if v.shape != x.shape:
                raise ValueError(f"{name} has shape {tuple(v.shape)} at points {tuple(x.shape)}")
            if capturing(v):
                continue
            off = torch.linalg.vector_norm(v - self.manifold.project(x, v), dim=-1)
            rounding = 32 * torch.finfo(v.dtype).eps  # all that is left where a field vanishes by cancellation
            bad = off > TANGENT_TOLERANCE * torch.linalg.vector_norm(v, dim=-1) + rounding
            if bool(bad.any()):
                row = self.first_row + int(bad.nonzero()[0])
                raise ValueError(
                    f"{name} is not tangent to the sphere in row {row} at t={t:.4g}; "
                    "pass it through geoflow_fast.geometry.project_tangent"
                )
        return [both[stream] for stream in direction.generated]

    def _products(
        self, points: Sequence[Tensor], velocity: Sequence[Tensor], probes: Sequence[Tensor], direction: Direction
    ) -> list[Tensor]:
        """(grad v)^T e, [K, B, d] for each stream that is generated: of the streams together if one tangent moves both,
        else of each alone."""
        for stream, v in zip(direction.generated, velocity):
            if not v.requires_grad and bool(v.any()):
                raise ValueError(f"the {STREAMS[stream]} velocity must be differentiable in the points")
        products = [torch.zeros_like(e) for e in probes]  # what a stream that stands still has
        every = range(len(points))
        for group in [every] if self.settings.paired_tangents else [[k] for k in every]:
            moving = [k for k in group if velocity[k].requires_grad]
            if moving:
                outputs, inputs = [velocity[k] for k in moving], [points[k] for k in group]
                pulled = [
                    torch.autograd.grad(outputs, inputs, along, retain_graph=True, materialize_grads=True)
                    for along in zip(*(probes[k] for k in moving))
                ]
                for k, product in zip(group, zip(*pulled)):
                    products[k] = torch.stack(product)
        return products
