"""Files for decisions about result lists: scores, what is known about the hits, probabilities, and which to answer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geoflow_fast.data.pairs import EmbeddingPairs
from geoflow_fast.data.qrels import Qrels, judged_columns
from geoflow_fast.data.rows import Rows, load_npy
from geoflow_fast.decisions import inputs
from geoflow_fast.decisions.rules import ITEMS, Rule
from geoflow_fast.decisions.trust import Trust
from geoflow_fast.runtime import parquet
from geoflow_fast.runtime.files import contents_of
from geoflow_fast.runtime.words import words_of

SMALLEST = 1e-12
"""Probabilities below this count as this, before their logarithm is taken."""
QUERY, HITS, PROBABILITIES = "query", "index", "prob"
"""Columns of the files that `geoflow rerank` writes."""
ROW_NAMES = ("id", "ids", "row", "item", QUERY, HITS)
"""Columns of these names, and of names that end in `_id`, name rows: they are neither scores nor labels."""

Array = NDArray[Any]


@dataclass(frozen=True)
class ResultLists:
    """Result lists of n queries, k hits each, best first."""

    path: Path
    scores: Array
    """[n, k]."""
    query: Array
    """[n], the ids of the queries, or the numbers of their rows."""
    hits: Array | None
    """[n, k], the ids of the hits, or the numbers of their rows; None if the file does not name them."""
    log_prob: bool = False
    """Whether scores are logarithms of probabilities."""


def open_lists(path: Path, column: str | None = None) -> ResultLists:
    """Reads result lists: a `.npy` file [n, k]; a Parquet file with lists of scores, in the named `column`,
    in `scores` or in `prob`; or a Parquet or `.csv` file with a column of numbers for each hit. Columns `query` and
    `index` name the queries and the hits; other columns of ids are left alone. Probabilities (`prob`) count by their
    logarithms."""
    columns = table_of(path)
    query = columns.pop(QUERY, None)
    hits = columns.pop(HITS, None)
    listed = next((name for name in (column, "scores", PROBABILITIES) if name is not None and name in columns), None)
    if column is not None and listed != column:
        raise ValueError(f"{path} has no column {column!r}; it has {', '.join(columns)}")
    scores = _matrix(columns[listed], path, listed) if listed is not None else _joined(columns, path)
    if listed == PROBABILITIES:
        scores = np.log(np.maximum(scores, SMALLEST))
    names = np.arange(len(scores)) if query is None else query
    named = None if hits is None else _matrix(hits, path, HITS)
    return ResultLists(path, scores, names, named, log_prob=listed == PROBABILITIES)


def open_trust(path: Path, lists: ResultLists) -> Trust:
    """Reads what `geoflow trust` has learned; a ValueError if it was learned from another kind of lists."""
    judge = Trust.load(path)
    if judge.log_prob != lists.log_prob:
        kinds = ["probabilities" if each else "scores" for each in (judge.log_prob, lists.log_prob)]
        raise ValueError(
            f"{path} was learned from {kinds[0]}, and {lists.path} holds {kinds[1]}, for which a missing item means "
            "something else: learn again from lists of the same kind"
        )
    return judge


def open_labels(path: Path, lists: ResultLists) -> Array:
    """Reads what is known about the hits: bool [n], whether the first is right, or bool [n, k], which have a grade
    above 0. The file is as for scores, with a column `labels` or one or k columns of numbers; labels [n] are true and
    false, or 1 and 0."""
    columns = table_of(path)
    values = columns.get("labels")
    known = _joined(columns, path) if values is None else values
    known = _matrix(known, path, "labels") if known.dtype == object else known
    k = lists.scores.shape[-1]
    if known.ndim == 2 and known.shape[1] not in (1, k):
        raise ValueError(
            f"{path} has {known.shape[1]} labels in each row, but one is needed, of the first hit, or {k}, one of each "
            "hit: leave other columns of numbers out, or name the one that counts `labels`"
        )
    known = known[:, 0] if known.ndim == 2 and known.shape[1] == 1 else known
    if len(known) != len(lists.scores):
        raise ValueError(f"{path} has {len(known)} rows, but {lists.path} has {len(lists.scores)} queries")
    return inputs.right_of(known, str(path)) if known.ndim == 1 else inputs.relevant_of(known, str(path))


def labels_from_pairs(lists: ResultLists, pairs: EmbeddingPairs, direction: str) -> tuple[Array, Array]:
    """Which hits belong to the image of their query, bool [n, k], and the number [n] of that image. Queries and hits
    are the ids of the pairs' texts and images or, if these have none, numbers of their rows, and the `direction` says
    which are which. A query without a pair is an image of its own, with a negative number."""
    asking, offered = (pairs.text, pairs.image) if direction == "t2i" else (pairs.image, pairs.text)
    query, hits = _row_numbers(lists, QUERY, lists.query, asking), _row_numbers(lists, HITS, _needed(lists), offered)
    of_image = np.full(len(pairs.image), -1)
    of_image[pairs.image_row] = pairs.group
    of_text = np.full(len(pairs.text), -1)
    of_text[pairs.text_row] = pairs.group
    asked, items = (of_text, of_image) if direction == "t2i" else (of_image, of_text)
    for name, values, count in ((QUERY, query, len(asked)), (HITS, hits, len(items))):
        wrong = (values >= count) | ((values < 0) & (name == QUERY))  # hits may be missing, which -1 says
        if wrong.any():
            raise ValueError(f"{lists.path}: {name} {values[wrong][0]} is not one of the {count} rows of the pairs")
    own = asked[query]
    right = (items[np.maximum(hits, 0)] == own[:, None]) & (hits >= 0) & (own >= 0)[:, None]
    return right, np.where(own >= 0, own, -1 - np.arange(len(own)))


def _row_numbers(lists: ResultLists, name: str, values: Array, rows: Rows) -> Array:
    """The numbers of the rows that a column names, by ids if the rows have some; -1 for hits that are missing."""
    if rows.ids is not None:
        known = np.array([value is not None for value in values.reshape(-1)]).reshape(values.shape)
        numbers = np.full(values.shape, -1)
        numbers[known] = rows.ids.rows(values[known], str(lists.path))
        return numbers
    if values.dtype.kind not in "iu":
        raise ValueError(f"{lists.path}: {name} holds ids, but pairs know rows by number; give --qrels with ids")
    return values


def tested_queries(image: Array, fit_share: float, seed: int) -> tuple[Array, Array]:
    """Rows to fit on, which are all queries of a share of the images, and rows to test: one query of each other image,
    because those of one image are not independent. `image` [n] numbers the image of each query."""
    rng = np.random.default_rng(seed)
    number = np.unique(image, return_inverse=True)[1].reshape(-1)
    count = int(number.max(initial=-1)) + 1
    order = rng.permutation(count)
    position = np.empty(count, np.int64)
    position[order] = np.arange(count)
    rows = np.lexsort((rng.random(len(image)), position[number]))
    fitted = position[number][rows] < round(fit_share * count)
    rest = rows[~fitted]
    first = np.unique(number[rest], return_index=True)[1]
    return rows[fitted], np.sort(rest[first])


def labels_from_qrels(lists: ResultLists, path: Path) -> Array:
    """The grades [n, k] that a Parquet or CSV file of judgements (`query`, `item`, `grade`) gives the hits; 0 where it
    gives none."""
    hits, columns = _needed(lists), judged_columns(path)
    queries, query_code = _coded(columns[QUERY], lists.query)
    items, item_code = _coded(columns["item"], hits.reshape(-1))
    with contents_of(path, "no file of judgements"):
        grade = Qrels(queries, items, columns["grade"]).grade
    span = max(items.max(initial=0), item_code.max(initial=0)) + 1
    judged = queries * span + items
    wanted = query_code[:, None] * span + item_code.reshape(hits.shape)
    order = np.argsort(judged, kind="stable")
    if not len(order):
        raise ValueError(f"{path} holds no judgements")
    position = np.searchsorted(judged[order], wanted).clip(max=len(order) - 1)
    known = judged[order][position] == wanted
    return np.where(known, grade[order][position], 0.0)


def _coded(judged: Array, wanted: Array) -> tuple[Array, Array]:
    """Numbers for the ids of both arrays, equal for equal ids. Ids of different types are compared as text."""
    if (judged.dtype.kind in "iu") != (wanted.dtype.kind in "iu"):
        judged, wanted = words_of(judged), words_of(wanted)
    both = np.concatenate((judged, wanted))
    code = np.unique(words_of(both) if both.dtype == object else both, return_inverse=True)[1]
    return code[: len(judged)], code[len(judged) :]


def _needed(lists: ResultLists) -> Array:
    if lists.hits is None:
        raise ValueError(f"{lists.path} does not name its hits in a column {HITS!r}; give --labels for them")
    return lists.hits


def table_of(path: Path) -> dict[str, Array]:
    """The columns of a Parquet or CSV file, or the array of a `.npy` file as columns of numbers."""
    if path.suffix == ".npy":
        array = load_npy(path)
        if array.ndim not in (1, 2):
            raise ValueError(f"{path} must be [n] or [n, k], got {array.shape}")
        return {str(number): column for number, column in enumerate(np.atleast_2d(array.T))}
    if path.suffix.lower() == ".csv":
        return parquet.read_csv(path, parquet.csv_names(path))
    return parquet.read_columns(path)


def _matrix(column: Array, path: Path, name: str | None) -> Array:
    """A column of lists as an array [n, k]."""
    no_list = np.array([not isinstance(row, (list, tuple, np.ndarray)) for row in column], bool)
    if no_list.all():
        return column
    if no_list.any():
        row = int(no_list.argmax())
        raise ValueError(f"{path}: row {row} of {name} is {column[row]!r} and not a list, as others are")
    lengths = {len(row) for row in column}
    if len(lengths) != 1:
        raise ValueError(
            f"{path}: lists of {name} have {min(lengths)} to {max(lengths)} entries; all must have as many"
        )
    return np.stack([np.asarray(row) for row in column])


def _joined(columns: dict[str, Array], path: Path) -> Array:
    """Columns of numbers side by side, [n, k], without those that name rows."""
    numbers = [column for name, column in columns.items() if column.dtype.kind in "iufb" and not _names_rows(name)]
    if not numbers:
        raise ValueError(f"{path} has no column of numbers")
    return np.column_stack(numbers)


def _names_rows(column: str) -> bool:
    return column.lower() in ROW_NAMES or column.lower().endswith("_id")


def write_probabilities(
    trust: Trust, lists: ResultLists, out: Path, share: float, encoder: str | None = None
) -> dict[str, Array]:
    """Writes what is believed about each list: `query`, `p_right` (of the first hit), `p_no_match` for a `share` of
    queries without a right item, and the list `relevance` of all hits. `encoder`: the one that made the lists. Returns
    the columns."""
    first = trust.predict_proba(lists.scores, encoder=encoder)[:, 1]  # it has said what there is to say about encoders
    columns = {
        QUERY: lists.query,
        **({} if lists.hits is None else {"hit": lists.hits[:, 0]}),
        "p_right": first,
        "p_no_match": trust.p_no_match(lists.scores, share, encoder=trust.encoder_),
        "relevance": trust.relevance(lists.scores, encoder=trust.encoder_),
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_columns(out, columns, len(lists.query))
    return columns


def write_answers(rule: Rule, lists: ResultLists, out: Path, **made_with: Any) -> float:
    """Writes which queries the rule answers: `query`, `answer` and, for a rule about items, the list `show`. Returns
    the share that is answered."""
    answered = rule(lists.scores, **made_with)
    columns = {QUERY: lists.query, **({} if lists.hits is None else {"hit": lists.hits[:, 0]}), "answer": answered}
    if rule.unit == ITEMS:
        columns["show"] = rule.show(lists.scores, **made_with)
    out.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_columns(out, columns, len(lists.query))
    return float(answered.mean())
