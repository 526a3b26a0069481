"""Judgements of relevance: what is read from files, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import geoflow_fast as gf
from geoflow_fast.runtime import parquet

QUERY, ITEM, GRADE = [3, 0, 3, 1, 3], [7, 2, 1, 2, 4], [1.0, 2.0, 3.0, 0.0, 1.0]


def same(one: gf.Qrels, other: gf.Qrels) -> bool:
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in ("query", "item", "grade"))


@pytest.mark.parametrize("kind", [np.array, torch.tensor, tuple])
def test_any_sequence_becomes_arrays(kind):
    qrels = gf.Qrels(kind(QUERY), kind(ITEM), kind(GRADE))
    assert len(qrels) == 5
    assert (qrels.query.dtype, qrels.item.dtype, qrels.grade.dtype) == (np.int64, np.int64, np.float64)
    assert len(gf.Qrels([], [], [])) == 0


@pytest.mark.parametrize("name", ["judged.csv", "judged.parquet"])
@pytest.mark.parametrize("graded", [True, False])
def test_files_are_read(tmp_path, name, graded):
    path, extra = tmp_path / name, ["a", "b", "c", "d", "e"]
    columns = {"note": np.array(extra), "item": np.array(ITEM), "query": np.array(QUERY)}
    columns |= {"grade": np.array(GRADE)} if graded else {}
    if name.endswith("csv"):
        lines = [",".join(columns), *(",".join(map(str, row)) for row in zip(*columns.values()))]
        path.write_text("\n".join(lines) + "\n")
    else:
        parquet.write_columns(path, columns, 5)
    assert same(gf.Qrels.open(path), gf.Qrels(QUERY, ITEM, GRADE if graded else np.ones(5)))


def test_relevant_ones_are_sorted():
    kept = gf.Qrels(QUERY, ITEM, GRADE).relevant()
    assert same(kept, gf.Qrels([0, 3, 3, 3], [2, 1, 7, 4], [2.0, 3.0, 1.0, 1.0]))
    assert len(kept.relevant(3)) == 1
    assert len(gf.Qrels(QUERY, ITEM, GRADE).relevant(0)) == 5
    assert gf.Qrels([0, 0, 1], [1, 2, 1], [0.5, 0.0, -1.0]).relevant().item.tolist() == [1]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"query": [[1]]}, "query must be one number for each row"),
        ({"item": [1, 2]}, r"item must be one number for each row, \(5,\), got shape \(2,\)"),
        ({"query": [0, 1, -1, 2, 3]}, "query of row 2 is -1"),
        ({"grade": [0, 1, 2, 3, np.nan]}, "grade of row 4 is nan"),
        ({"item": [7, 2, 7, 2, 4]}, "row 2 judges the query and the item of row 0 a second time"),
    ],
)
def test_wrong_rows_are_named(changes, words):
    with pytest.raises(ValueError, match=words):
        gf.Qrels(**{"query": QUERY, "item": ITEM, "grade": GRADE} | changes)


def test_wrong_types_are_named():
    with pytest.raises(TypeError, match="item must be integers"):
        gf.Qrels(QUERY, [0.5] * 5, GRADE)
    with pytest.raises(TypeError, match="grade must be numbers"):
        gf.Qrels(QUERY, ITEM, ["a"] * 5)


@pytest.mark.parametrize("name", ["a.csv", "a.parquet"])
def test_files_that_are_none(tmp_path, name):
    with pytest.raises(FileNotFoundError):
        gf.Qrels.open(tmp_path / name)
    (tmp_path / name).write_bytes(b"query,thing\n1,2\n" if name == "a.csv" else b"none")
    with pytest.raises(ValueError, match=name):
        gf.Qrels.open(tmp_path / name)


def test_words_for_numbers_are_named(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("query,item\na,1\n")
    with pytest.raises(ValueError, match=r"a\.csv is no file of judgements.*query must be integers"):
        gf.Qrels.open(path)
    path.write_text("query,item,grade\n1,2,\n")
    with pytest.raises(ValueError, match=r"a\.csv"):
        gf.Qrels.open(path)
