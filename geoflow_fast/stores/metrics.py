"""From the metrics of vector stores to cosines: the one place where a distance becomes a similarity."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Metric:
    """What a store's scores are, and how a cosine follows from them."""

    name: str
    to_cosine: Callable[[Floats], Floats]
    needs_unit_rows: bool
    """Whether the scores are those of cosines for unit rows only."""


COSINE = Metric("cosine similarity", lambda score: score, False)
COSINE_DISTANCE = Metric("cosine distance", lambda score: 1 - score, False)
INNER_PRODUCT = Metric("inner product", lambda score: score, True)
MINUS_INNER_PRODUCT = Metric("negative inner product", lambda score: -score, True)
ONE_MINUS_INNER_PRODUCT = Metric("one minus the inner product", lambda score: 1 - score, True)
SQUARED_L2 = Metric("squared Euclidean distance", lambda score: 1 - score / 2, True)
L2 = Metric("Euclidean distance", lambda score: 1 - score * np.abs(score) / 2, True)  # a negative one stays too large

ENGINES: Mapping[str, Mapping[str, Metric]] = {
    "FAISS": {"METRIC_INNER_PRODUCT": INNER_PRODUCT, "METRIC_L2": SQUARED_L2},
    "LanceDB": {"cosine": COSINE_DISTANCE, "dot": ONE_MINUS_INNER_PRODUCT, "l2": SQUARED_L2},
    "Qdrant": {"Cosine": COSINE, "Dot": INNER_PRODUCT, "Euclid": L2},
    "Chroma": {"cosine": COSINE_DISTANCE, "ip": ONE_MINUS_INNER_PRODUCT, "l2": SQUARED_L2},
    "Milvus": {"COSINE": COSINE, "IP": INNER_PRODUCT, "L2": SQUARED_L2},
    "pgvector": {"cosine": COSINE_DISTANCE, "ip": MINUS_INNER_PRODUCT, "l2": L2},
    "custom": {"cosine": COSINE, "ip": INNER_PRODUCT, "l2": L2},
}
"""What each engine's metrics mean by the scores that it returns."""


def metric_of(engine: str, name: object, what: str) -> Metric:
    """The metric that an engine calls `name`; a ValueError says which ones `what` may have if it gives no cosine."""
    known = ENGINES[engine]
    if not isinstance(name, str) or name not in known:
        raise ValueError(
            f"{what} has the metric {name!r}, from which no cosine follows: it must be one of {', '.join(known)}"
        )
    return known[name]
