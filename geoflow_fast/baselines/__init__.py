"""Other ways to be uncertain about retrieval with frozen embeddings, behind one interface: `Baseline`.

`METHODS` has them by name; `create` makes one for the widths of some pairs, `load` reads back what `save` wrote.
"""

from __future__ import annotations

from pathlib import Path

from geoflow_fast.baselines.base import Baseline, method_of
from geoflow_fast.baselines.references import KNNDistance, Margin, MaxSoftmax, SoftmaxEntropy

METHODS: dict[str, type[Baseline]] = {kind.method: kind for kind in (MaxSoftmax, Margin, SoftmaxEntropy, KNNDistance)}


def find(name: str) -> type[Baseline]:
    """The class of the method `name`."""
    if name not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {name!r}")
    return METHODS[name]


def load(folder: str | Path) -> Baseline:
    """The fitted baseline that is kept in `folder`, whatever its method."""
    return find(method_of(folder)).load(folder)


__all__ = ["METHODS", "Baseline", "KNNDistance", "Margin", "MaxSoftmax", "SoftmaxEntropy", "find", "load"]
