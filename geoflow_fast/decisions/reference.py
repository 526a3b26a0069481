"""What a rule keeps of the queries that it was certified on, so that a log can be compared with them later."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geoflow_fast.decisions import lists
from geoflow_fast.decisions.bounds import Bools, Floats
from geoflow_fast.decisions.certify import possible_twins
from geoflow_fast.decisions.inputs import right_of
from geoflow_fast.decisions.model import Model


@dataclass(frozen=True)
class Reference:
    """The n queries of a certificate."""

    heads: Floats
    """[n, L], the first distinct scores of each list, rounded as `lists.rounded` does."""
    twins: Floats
    """[n, L], the same if the right item were missing; where that is not known, the case in which the rule would be
    most willing to answer."""
    features: Floats
    """[n, f], the caller's features."""
    right: Bools
    """[n], whether the first hit is right."""
    row: NDArray[np.int64]
    """[n], the rows of the queries in the file of judged ones."""
    hits: NDArray[Any] | None = None
    """[n, at most `lists.KEPT_HITS`], the ids of the first hits, or the numbers of their rows, if they are known."""

    def __len__(self) -> int:
        return len(self.right)

    def with_missing(self, missing: Bools) -> Reference:
        """The reference if the right items of the queries that are `missing` [n] were not there: their lists are those
        of their twins. Of the hits only a first one is known to be right and goes."""
        gone = (missing & self.right)[:, None]
        hits = self.hits
        if hits is not None:
            none = np.full((len(self), 1), None if hits.dtype == object else -1, hits.dtype)
            hits = np.where(gone, np.concatenate((hits[:, 1:], none), axis=1), hits)
        heads = np.where(missing[:, None], self.twins, self.heads)
        return replace(self, heads=heads, right=self.right & ~missing, hits=hits)

    def as_json(self) -> dict[str, Any]:
        """The reference as plain values."""
        numbers = {name: getattr(self, name).tolist() for name in ("heads", "twins", "features")}
        hits = None if self.hits is None else self.hits.tolist()
        return {**numbers, "right": self.right.astype(int).tolist(), "row": self.row.tolist(), "hits": hits}

    @classmethod
    def from_json(cls, values: Mapping[str, Any], model: Model) -> Reference:
        """The reference that `as_json` has written; a ValueError if the values are not one of this model."""
        n = len(values["right"])
        shapes = {"heads": (n, lists.depth_of(model.k)), "features": (n, model.features)}
        shapes["twins"] = shapes["heads"]
        numbers = {name: np.array(values[name], np.float64).reshape(n, -1) for name in shapes}
        for name, shape in shapes.items():
            if numbers[name].shape != shape or not np.isfinite(numbers[name]).all():
                raise ValueError(f"the {name} of its queries are damaged")
        row, hits = np.array(values["row"], np.int64), values["hits"]
        if row.shape != (n,):
            raise ValueError("the rows of its queries are damaged")
        named = None if hits is None else np.array(hits, object if _is_text(hits) else np.int64)
        if named is not None and (named.ndim != 2 or len(named) != n):
            raise ValueError("the hits of its queries are damaged")
        return cls(**numbers, right=right_of(np.array(values["right"]), "right"), row=row, hits=named)


def reference_of(
    model: Model,
    scores: Floats,
    features: Floats,
    first: Bools,
    relevant: Bools | None,
    *,
    share: float,
) -> Reference:
    """Keeps what is needed of judged lists [n, k]; the rule's probabilities are computed for the `share`."""
    variants = [model.heads(twin) for twin in possible_twins(model, scores, first, relevant)]
    boldest = np.stack([model.p_answer_of(heads, features, share) for heads in variants]).argmax(0)
    twins = np.stack(variants)[boldest, np.arange(len(scores))]
    heads = lists.rounded(model.heads(scores))
    return Reference(heads, lists.rounded(twins), lists.rounded(features), first, np.arange(len(scores)))


def _is_text(hits: Any) -> bool:
    return any(isinstance(hit, str) for row in hits for hit in row)
