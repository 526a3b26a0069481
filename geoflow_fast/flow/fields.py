"""Velocity fields: the one method that users must write, and the interface that samplers and densities work with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor, nn

from geoflow_fast.directions import Direction
from geoflow_fast.manifolds import Sphere, manifold_of
from geoflow_fast.runtime.graphs import CapturedCall, Compute, Graphs

if TYPE_CHECKING:
    from geoflow_fast.flow.model import GeoFlow

Streams = tuple[Tensor, Tensor]
"""What belongs to the image and what belongs to the text, [B, d_I] and [B, d_T]."""

VelocityFunction = Callable[[Tensor, Tensor, float], Streams]
"""velocity(image, text, t) -> (v_image, v_text), for one direction."""


class Field(Protocol):
    """A velocity field on pairs of points; a `GeoFlow` is one, the oracles of `worlds` are others."""

    def velocity(self, image: Tensor, text: Tensor, t: float | Tensor, direction: str, /) -> Streams:
        """Returns (v_image, v_text) at time `t`, tangent at the points, and zero on the given stream."""


class FlowField(Field, Protocol):
    """A field together with all that samplers and densities ask of it. A `GeoFlow` is one, and `as_flow` makes one of
    any other field.

    Points live in the flow's coordinates, into which `stream_to_flow` maps embeddings; streams are numbered 0 (image)
    and 1 (text).
    """

    manifold: Sphere
    """The space of each stream."""

    @property
    def flow_dims(self) -> tuple[int, int]:
        """Widths (image, text) of points in the flow's coordinates."""

    @property
    def example(self) -> Tensor:
        """Some tensor with the dtype and the device that the field works in."""

    @property
    def network(self) -> GeoFlow | None:
        """The network, if the field is one whose derivatives can be computed layer by layer."""

    def velocity_at(
        self, times: Sequence[float], direction: Direction, precision: str = "float32", rows: int | None = None
    ) -> contextlib.AbstractContextManager[VelocityFunction]:
        """Lends the velocity, without dropout, as a function that may be called at these times. It may return the
        generated streams before their tangent projection, and leave the given one out. `precision`: that of a network's
        matrix products, for so many `rows` in all."""

    def captured(
        self, key: Hashable, prepare: Callable[[contextlib.ExitStack], Compute], precision: str, rows: int
    ) -> CapturedCall:
        """The solve that `prepare` makes, of what it borrows for the stack. A network on a GPU replays those of one
        `key`, which names all that they depend on besides the network, the products of `precision` that `rows` rows in
        all have there, and their inputs."""

    def stream_to_flow(self, x: Tensor, stream: int) -> Tensor:
        """Maps embeddings [B, d] of one stream to the flow's coordinates; returns `x` itself if they are the same."""

    def stream_from_flow(self, x: Tensor, stream: int) -> Tensor:
        """Maps points [B, d] of one stream back to embeddings."""

    def check_embeddings(self, x: Tensor, stream: int) -> None:
        """Raises a ValueError unless the embeddings `x` of one stream have the field's width, dtype and device."""


class PlainField:
    """The `FlowField` of a field that has a `velocity` and nothing else: embeddings are points, and every time is
    evaluated on its own. `dims` are the widths (image, text), if they are known."""

    network = None

    def __init__(self, field: Field, dims: tuple[int, int] | None = None) -> None:
        self.field, self.dims = field, dims
        self.velocity, self.manifold = field.velocity, manifold_of(field)

    @property
    def flow_dims(self) -> tuple[int, int]:
        if self.dims is None:
            raise ValueError(f"dims=(image, text) is needed to sample from a {type(self.field).__name__}")
        return self.dims

    @property
    def example(self) -> Tensor:
        if isinstance(self.field, nn.Module):
            return next(self.field.parameters())
        return torch.empty(0, dtype=torch.float32, device="cpu")

    @contextlib.contextmanager
    def velocity_at(
        self,
        times: Sequence[float],  # noqa: ARG002
        direction: Direction,
        precision: str = "float32",  # noqa: ARG002
        rows: int | None = None,  # noqa: ARG002
    ) -> Iterator[VelocityFunction]:
        with evaluated(self.field):
            yield lambda image, text, t: self.velocity(image, text, t, direction)

    def captured(
        self,
        key: Hashable,
        prepare: Callable[[contextlib.ExitStack], Compute],
        precision: str,  # noqa: ARG002
        rows: int,  # noqa: ARG002
    ) -> CapturedCall:
        return CapturedCall(Graphs(), key, prepare, "only networks are captured")

    def stream_to_flow(self, x: Tensor, stream: int) -> Tensor:  # noqa: ARG002
        return x

    def stream_from_flow(self, x: Tensor, stream: int) -> Tensor:  # noqa: ARG002
        return x

    def check_embeddings(self, x: Tensor, stream: int) -> None:
        """Checks nothing: only the field itself knows what it accepts."""


@contextlib.contextmanager
def evaluated(field: Field) -> Iterator[None]:
    """Sets the modules of a field that is a module to eval mode for a while; then each has its own mode back."""
    modules = list(field.modules()) if isinstance(field, nn.Module) else []
    modes = [module.training for module in modules]
    try:
        for module in modules:
            module.training = False
        yield
    finally:
        for module, mode in zip(modules, modes):
            module.training = mode


def as_flow(field: Field, dims: tuple[int, int] | None = None) -> FlowField:
    """Returns the field itself if it has the whole interface, and otherwise a `PlainField` of widths `dims`."""
    return cast(FlowField, field) if hasattr(field, "velocity_at") else PlainField(field, dims)
