"""Embeddings of two sides are returned or continued only if their items and functions are known to be the same."""

from __future__ import annotations

import functools
import io
import os
import statistics
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

import geoflow_fast as gf
from geoflow_fast.jobs import identity
from geoflow_fast.jobs.embed_columns import embed_sides

TEXTS = ["one", "two", "three"]


def pictures(shift: int) -> list[Any]:
    return [Image.new("RGB", (4, 4), (10 * k + shift, 0, 0)) for k in range(3)]


def paletted(shift: int) -> list[Any]:
    made = []
    for k in range(3):
        image = Image.new("P", (2, 2), 0)
        image.putpalette([k + shift, 0, 0])
        made.append(image)
    return made


def objects(shift: int) -> np.ndarray:
    items = np.empty(3, object)
    items[:] = [[k, shift] for k in range(3)]
    return items


ITEMS: dict[str, Callable[[int], Any]] = {
    "pictures": pictures,
    "pictures with a palette": paletted,
    "arrays": lambda shift: [np.full(3, k + shift, np.float32) for k in range(3)],
    "rows of an array": lambda shift: list(np.arange(6, dtype=np.float64).reshape(3, 2) + shift),
    "arrays of objects": lambda shift: [objects(0), objects(shift), objects(0)],
    "tensors": lambda shift: [torch.full((3,), float(k + shift)) for k in range(3)],
    "texts": lambda shift: [f"text {k + shift}" for k in range(3)],
    "numbers": lambda shift: [k + shift for k in range(3)],
    "bytes": lambda shift: [bytes([k + shift]) for k in range(3)],
    "lists": lambda shift: [[k, [shift]] for k in range(3)],
    "dictionaries": lambda shift: [{"a": k, "b": {"c": shift}} for k in range(3)],
    "sets": lambda shift: [{"a", f"b{shift}", k} for k in range(3)],
    "tuples of pictures": lambda shift: [(k, picture) for k, picture in enumerate(pictures(shift))],
}


class Calls:
    """An encoder of anything, which counts its calls."""

    def __init__(self) -> None:
        self.count = 0

    def facts(self) -> dict[str, Any]:
        return {"encoder": "calls"}

    def __call__(self, items: list[Any]) -> np.ndarray:
        self.count += 1
        return np.eye(4, dtype=np.float32)[np.arange(len(items)) % 4]


def embed(items: Any, encode: Any, out: Path, **more: Any) -> bytes:
    assert embed_sides({"a": (items, encode), "b": (TEXTS, gf.ColourEncoder())}, out, progress=False, **more) == 3
    return out.read_bytes()


@pytest.mark.parametrize("kind", ITEMS)
def test_items_count_by_their_contents(tmp_path, kind):
    encode = Calls()
    first = embed(ITEMS[kind](0), encode, tmp_path / "x.parquet")
    assert embed(ITEMS[kind](0), encode, tmp_path / "x.parquet") == first
    assert encode.count == 1
    with pytest.raises(FileExistsError, match="not the result of this job"):
        embed(ITEMS[kind](1), encode, tmp_path / "x.parquet")
    embed(ITEMS[kind](1), encode, tmp_path / "x.parquet", overwrite=True)
    assert encode.count == 2


@pytest.mark.parametrize("kind", [str, Path])
def test_files_count_by_name_size_and_time(tmp_path, kind):
    encode, items = Calls(), []
    for k in range(3):
        (tmp_path / f"{k}.bin").write_bytes(b"same")
        items.append(kind(tmp_path / f"{k}.bin"))
    embed(items, encode, tmp_path / "x.parquet")
    embed(items, encode, tmp_path / "x.parquet")
    assert encode.count == 1
    os.utime(tmp_path / "1.bin", ns=(1, 1))
    with pytest.raises(FileExistsError):
        embed(items, encode, tmp_path / "x.parquet")


class Own:
    """Items of a class that the library does not know."""

    def __init__(self, value: int) -> None:
        self.value = value


@pytest.mark.parametrize("others", [[Own(1)] * 3, [Own(2)] * 3, [1, 2, 3]])
def test_a_finished_file_of_unknown_items_is_kept(tmp_path, others):
    encode, out = Calls(), tmp_path / "x.parquet"
    first = embed([Own(1)] * 3, encode, out)
    with pytest.raises(FileExistsError, match=r"known: the items of a_embedding cannot .* `facts`.*overwrite"):
        embed(others, encode, out)
    assert encode.count == 1
    assert out.read_bytes() == first
    embed(others, encode, out, overwrite=True)
    assert encode.count == 2


def test_a_finished_file_of_known_items_is_kept_from_unknown_ones(tmp_path):
    embed([1, 2, 3], Calls(), tmp_path / "x.parquet")
    with pytest.raises(FileExistsError, match="the items of a_embedding cannot be identified"):
        embed([Own(1)] * 3, Calls(), tmp_path / "x.parquet")


class Killed(Calls):
    """The same encoder, which is killed in its second batch unless it is told otherwise."""

    killed = True

    def __call__(self, items: list[Any]) -> np.ndarray:
        if self.killed and self.count:
            raise KeyboardInterrupt
        return super().__call__(items)


@pytest.mark.parametrize("items", [[Own(1)] * 3, [1, 2, 3]])
def test_blocks_of_unknown_items_are_computed_again(tmp_path, monkeypatch, items):
    monkeypatch.setattr("geoflow_fast.jobs.embed_columns.BLOCK_ROWS", 1)
    encode, out = Killed(), tmp_path / "x.parquet"
    with pytest.raises(KeyboardInterrupt):
        embed([Own(1)] * 3, encode, out, batch_size=1)
    assert list((tmp_path / "x.parquet.blocks").glob("*.parquet"))
    encode.killed = False
    embed(items, encode, out, batch_size=1)
    assert encode.count == 1 + 3
    assert not (tmp_path / "x.parquet.blocks").exists()


def test_blocks_of_unknown_items_do_not_replace_another_file(tmp_path, monkeypatch):
    monkeypatch.setattr("geoflow_fast.jobs.embed_columns.BLOCK_ROWS", 1)
    encode, out = Killed(), tmp_path / "x.parquet"
    with pytest.raises(KeyboardInterrupt):
        embed([Own(1)] * 3, encode, out, batch_size=1)
    out.write_bytes(b"of mine")
    with pytest.raises(FileExistsError, match="not the result of this job"):
        embed([Own(1)] * 3, encode, out, batch_size=1)
    assert out.read_bytes() == b"of mine"


def test_a_function_that_imports_when_it_is_called(tmp_path, monkeypatch):
    """It is not known before its module is loaded, and known afterwards."""
    monkeypatch.delitem(sys.modules, "this", raising=False)
    monkeypatch.setattr("sys.stdout", io.StringIO())

    def encode(items: list[Any]) -> Any:
        import this

        return np.ones((len(items), len(this.d)))

    first = embed([1, 2, 3], encode, tmp_path / "x.parquet")
    with pytest.raises(FileExistsError, match="cannot be known: the function of a_embedding cannot be identified"):
        embed([1, 2, 3], encode, tmp_path / "x.parquet")
    embed([1, 2, 3], encode, tmp_path / "x.parquet", overwrite=True)
    again = (tmp_path / "x.parquet").stat().st_mtime_ns
    assert embed([1, 2, 3], encode, tmp_path / "x.parquet") != first
    assert (tmp_path / "x.parquet").stat().st_mtime_ns == again


SOURCE = """
import numpy as np
scale = {scale}
table = {{"a": np.array([{entry}.0])}}
def helper(x):
    return x + {helper}
def outer():
    inside = {inside}
    def encode(items, default={default}, *, keyword={keyword}):
        def nested(x):
            return x * {nested}
        rows = np.array([[1.0, 2.0, len(items)]] * len(items)) * scale + table["a"] + inside
        return nested(helper(rows)) + default + keyword + {constant}
    return encode
encode = outer()
"""
NUMBERS = dict.fromkeys(("scale", "entry", "helper", "inside", "default", "keyword", "nested", "constant"), 1)


def function(**changes: int) -> Any:
    """A function of the same name, whatever is changed in it."""
    module = types.ModuleType("theirs")
    exec(SOURCE.format(**{**NUMBERS, **changes}), module.__dict__)
    return module.encode


@pytest.mark.parametrize("edited", NUMBERS)
def test_an_edited_function_is_another_encoder(tmp_path, edited):
    embed([1, 2, 3], function(), tmp_path / "x.parquet")
    before = (tmp_path / "x.parquet").stat().st_mtime_ns
    embed([1, 2, 3], function(), tmp_path / "x.parquet")
    assert (tmp_path / "x.parquet").stat().st_mtime_ns == before
    with pytest.raises(FileExistsError, match="not the result of this job"):
        embed([1, 2, 3], function(**{edited: 2}), tmp_path / "x.parquet")
    embed([1, 2, 3], function(**{edited: 2}), tmp_path / "x.parquet", overwrite=True)
    rows = pq.read_table(tmp_path / "x.parquet")["a_embedding"].to_pylist()
    embed([1, 2, 3], function(**{edited: 2}), tmp_path / "y.parquet")
    assert rows == pq.read_table(tmp_path / "y.parquet")["a_embedding"].to_pylist()


def test_a_file_that_a_function_names_is_part_of_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("w.npy", np.eye(3))
    encode: Any = lambda items: np.load("w.npy")[items]  # noqa: E731
    embed([0, 1, 2], encode, tmp_path / "x.parquet")
    embed([0, 1, 2], encode, tmp_path / "x.parquet")
    np.save("w.npy", -np.eye(3))
    os.utime("w.npy", ns=(1, 1))
    with pytest.raises(FileExistsError, match="not the result of this job"):
        embed([0, 1, 2], encode, tmp_path / "x.parquet")


def test_partial_functions_count_by_their_arguments():
    parts = [functools.partial(function(), default=value) for value in (1, 1, 2)]
    first, again, other = map(identity.of_function, parts)
    assert first == again != other


def calls_itself(items: list[Any]) -> Any:
    return items and calls_itself(items[1:])


def uses_a_library(items: list[Any]) -> Any:
    import json

    return np.array([np.mean(json.loads(item)) for item in items])


def uses_random_numbers(items: list[Any]) -> Any:
    return GENERATOR.random((len(items), 3))


def uses_an_object(_: list[Any]) -> Any:
    return OBJECT.value


def uses_a_class(_: list[Any]) -> Any:
    return Own(1)


def reads_globals(_: list[Any]) -> Any:
    return globals()["TEXTS"]


def evaluates(_: list[Any]) -> Any:
    return (lambda: eval("TEXTS"))()


@functools.wraps(statistics.mean)
def disguised(_: list[Any]) -> Any:
    return OBJECT.value


GENERATOR, OBJECT = np.random.default_rng(0), Own(3)


def test_functions_that_are_known():
    for known in (calls_itself, uses_a_library, statistics.mean, np.abs, len):
        assert identity.of_function(known) == identity.of_function(known)


@pytest.mark.parametrize(
    "encode",
    [
        *(uses_random_numbers, uses_an_object, uses_a_class, disguised, GENERATOR.random, Own(1).__init__, Calls()),
        *(reads_globals, evaluates, eval, functools.partial(map, vars)),
    ],
)
def test_functions_that_cannot_be_known(encode):
    with pytest.raises(identity.Unknown):
        identity.of_function(encode)


def test_a_function_that_cannot_be_known_is_asked_again(tmp_path):
    embed([1, 2, 3], uses_random_numbers, tmp_path / "x.parquet")
    first = (tmp_path / "x.parquet").read_bytes()
    with pytest.raises(FileExistsError, match="the function of a_embedding cannot be identified"):
        embed([1, 2, 3], uses_random_numbers, tmp_path / "x.parquet")
    assert embed([1, 2, 3], uses_random_numbers, tmp_path / "x.parquet", overwrite=True) != first
