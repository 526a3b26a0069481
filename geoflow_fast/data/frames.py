"""Results as tables: of Arrow, pandas or polars, with ids in place of the numbers of rows."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from geoflow_fast.data.ids import Ids, row_numbers
from geoflow_fast.runtime.extras import needs
from geoflow_fast.runtime.summary import Summarised


class Framed(Summarised):
    """Base of results with one row for each query or pair, which become frames with the columns of the files that the
    commands write. Lists stay lists; `frame.explode([...])` of pandas and polars gives each item a row of its own."""

    NUMBERED: ClassVar[str] = "query"
    """The first column: the id of the query or pair, or its number."""
    COLUMNS: ClassVar[tuple[str, ...]] = ()
    """The fields that become columns; those that are None are left out."""
    ITEM_COLUMNS: ClassVar[tuple[str, ...]] = ()
    """Fields that hold numbers of items, or -1 for none."""
    query_ids: Ids | None
    item_ids: Ids | None = None

    def to_arrow(self, ids: Any = None) -> Any:
        """The result as a table of Arrow. `ids` are those of the queries, if they came without."""
        import pyarrow

        known = {name: getattr(self, name) for name in self.COLUMNS if getattr(self, name) is not None}
        count = len(known[self.COLUMNS[0]])
        names = self.query_ids or row_numbers(count) if ids is None else Ids.given(ids, count, "ids")
        columns = {self.NUMBERED: names.column(np.arange(count))}
        for name, value in known.items():
            array = value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)
            if name in self.ITEM_COLUMNS and self.item_ids is not None:
                columns[name] = self.item_ids.column(array)
            elif array.ndim == 2:
                flat = pyarrow.array(array.reshape(-1))
                columns[name] = pyarrow.FixedSizeListArray.from_arrays(flat, array.shape[1])
            else:
                columns[name] = pyarrow.array(array)
        return pyarrow.table(columns)

    def to_pandas(self, ids: Any = None) -> Any:
        """The result as a `pandas.DataFrame`, in which UUIDs stay UUIDs. `ids` are those of the queries, if they came
        without."""
        try:
            import pandas
        except ImportError as error:
            raise ValueError(needs("to_pandas", "pandas", "data")) from error
        from geoflow_fast.runtime.parquet import as_array

        table = self.to_arrow(ids)
        columns = {name: as_array(table[name]) for name in table.column_names}
        return pandas.DataFrame(
            {name: column.tolist() if column.dtype == object else column for name, column in columns.items()}
        )

    def to_polars(self, ids: Any = None) -> Any:
        """The result as a `polars.DataFrame`, with UUIDs as text. `ids` are those of the queries, if they came
        without."""
        try:
            import polars
        except ImportError as error:
            raise ValueError(needs("to_polars", "polars", "data")) from error
        from geoflow_fast.runtime.parquet import as_array

        table = self.to_arrow(ids)
        frame = {}
        for name in table.column_names:
            holds_uuids = "uuid" in str(table.schema.field(name).type)
            frame[name] = _as_text(as_array(table[name])) if holds_uuids else polars.from_arrow(table[name])
        return polars.DataFrame(frame)


def _as_text(column: Any) -> list[Any]:
    """UUIDs, or lists of them, as text."""

    def text(value: Any) -> Any:
        return None if value is None else str(value)

    return [[text(x) for x in value] if isinstance(value, np.ndarray) else text(value) for value in column]
