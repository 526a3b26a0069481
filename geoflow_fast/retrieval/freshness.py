"""Marks that tell whether tensors may have changed since something was computed from them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from torch import Tensor, nn

from geoflow_fast.flow.model import GeoFlow, flow_digest
from geoflow_fast.head.model import PosteriorHead, head_digest

if TYPE_CHECKING:
    from geoflow_fast.retrieval.gallery import Gallery

T = TypeVar("T")


def marks(tensors: Iterable[Tensor]) -> Hashable:
    """Returns something that differs after any of the tensors was replaced or written to: of each its address, how
    often torch has written to it, and the value in its middle.

    That value is there for writes which torch does not count, such as those through `.data`: they are noticed if they
    change it in at least one of the tensors.
    """
    return tuple(
        (x.data_ptr(), x.dtype, None if x.is_inference() else x._version, _middle(x)) for x in tensors if not x.is_meta
    )


def flow_marks(flow: nn.Module) -> Hashable:
    """The marks of a model's weights and buffers."""
    return marks((*flow.parameters(), *flow.buffers()))


class ModelDigest:
    """The digest of a flow or a head, which is computed again only if it may have changed."""

    def __init__(self) -> None:
        self._known: tuple[Hashable, str] | None = None

    def of(self, model: GeoFlow | PosteriorHead) -> str:
        """The digest of configuration and weights as they are now."""
        current, known = flow_marks(model), self._known
        if known is None or known[0] != current:
            digest = head_digest(model) if isinstance(model, PosteriorHead) else flow_digest(model)
            self._known = known = current, digest
        return known[1]


class OncePerGallery(Generic[T]):
    """Something that is computed once for a gallery, and again after the gallery or the tensors it is made with have
    changed. It is kept in memory, for the last gallery alone, as long as the gallery exists."""

    def __init__(self) -> None:
        self._known: tuple[weakref.ref[Gallery], Hashable, T] | None = None

    def of(self, gallery: Gallery, made_with: Hashable, compute: Callable[[], T]) -> T:
        """What `compute()` gives for this gallery; `made_with` says what else the result depends on."""
        current, known = (gallery.marks(), made_with), self._known
        if known is None or known[0]() is not gallery or known[1] != current:
            self._known = known = weakref.ref(gallery), current, compute()
        return known[2]

    def __getstate__(self) -> dict[str, Any]:
        return {"_known": None}  # a copy computes again, for its own gallery


def _middle(x: Tensor) -> float | None:
    """The value in the middle of a tensor on the CPU. Reading one from a GPU would wait for it."""
    if x.is_cuda or not x.numel():
        return None
    return x.detach()[tuple(size // 2 for size in x.shape)].item()
