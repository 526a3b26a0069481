"""FAISS indexes as a vector store."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geoflow_fast.runtime import checks
from geoflow_fast.stores.metrics import metric_of
from geoflow_fast.stores.protocol import CheckedStore, Id, RawHits, listed_ids

METRICS = {0: "METRIC_INNER_PRODUCT", 1: "METRIC_L2"}
"""The numbers that FAISS gives the two metrics from which cosines follow."""


class FaissStore(CheckedStore):
    """A FAISS index over unit rows, searched by inner products or Euclidean distances.

    `ids` [N]: what to call the rows, if not by the numbers that the index has for them. `rows` [N, d]: the vectors in
    the order in which they were added, for indexes that compress them or cannot give them back; without it `fetch`
    reads them from the index. `params` are search parameters of FAISS, such as `faiss.SearchParametersIVF(nprobe=16)`.
    """

    def __init__(
        self, index: Any, *, ids: Sequence[Any] | NDArray[Any] | None = None, rows: Any = None, params: Any = None
    ) -> None:
        if not all(hasattr(index, name) for name in ("search", "metric_type", "ntotal", "d", "reconstruct")):
            raise TypeError(f"index must be a FAISS index over floating-point vectors, got {type(index).__name__}")
        self.name = f"the FAISS {type(index).__name__}"
        self.metric = metric_of("FAISS", METRICS.get(int(index.metric_type), str(index.metric_type)), self.name)
        self.dim, self.index, self._params = int(index.d), index, params
        self._names = None if ids is None else listed_ids(ids)
        self._numbers = None if self._names is None else {name: row for row, name in enumerate(self._names)}
        if self._names is not None and len(self._names) != index.ntotal:
            raise ValueError(f"ids has {len(self._names)} entries, but {self.name} holds {index.ntotal} rows")
        if self._numbers is not None and len(self._numbers) != index.ntotal:
            raise ValueError("ids has the same id for two rows")
        self._rows = None if rows is None else checks.array(rows, "rows")
        if self._rows is not None and self._rows.shape != (index.ntotal, self.dim):
            raise ValueError(f"rows must be [{index.ntotal}, {self.dim}], got {list(self._rows.shape)}")

    @property
    def can_fetch(self) -> bool:
        """Whether vectors can be read back: from `rows`, or from the index, of which some keep none."""
        if self._rows is not None:
            return True
        # An index with numbers of its own need not have a 0: any hit has one that exists.
        _, numbers = self.index.search(np.eye(1, self.dim, dtype=np.float32), 1)
        return self._reconstructed(int(numbers[0, 0])) is not None

    def _reconstructed(self, number: int) -> NDArray[np.float32] | None:
        """The row with this number, if the index has it and can tell."""
        try:
            return np.asarray(self.index.reconstruct(number))
        except RuntimeError:  # how FAISS says either
            return None

    def _hits(self, vectors: NDArray[np.float32], k: int) -> Iterable[RawHits]:
        settings = {} if self._params is None else {"params": self._params}
        scores, numbers = self.index.search(vectors, min(k, max(1, self.index.ntotal)), **settings)
        for score, number in zip(scores, numbers):
            there = number >= 0
            names = number[there].tolist()
            yield score[there], names if self._names is None else [self._names[each] for each in names]

    def _vectors(self, ids: list[Any]) -> Iterable[tuple[Id, Any]]:
        if not self.can_fetch:
            raise ValueError("it does not keep vectors: call index.make_direct_map() first, or pass rows=")
        for key in ids:
            number = key if self._numbers is None else self._numbers.get(key)
            if not isinstance(number, int) or isinstance(number, bool) or number < 0:
                continue
            if self._rows is None:
                row = self._reconstructed(number)
            else:
                row = self._rows[number] if number < len(self._rows) else None
            if row is not None:
                yield key, row
