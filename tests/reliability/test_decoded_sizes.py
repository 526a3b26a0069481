"""Decoded sizes: a file that would unpack to far more memory than its size is refused before it is unpacked, by every
reader, with the names of the file and the column; files of honest content are read, however often it repeats."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from geoflow_fast.data import tables
from geoflow_fast.data.embeddings import Embeddings
from geoflow_fast.data.ids import Ids, open_ids
from geoflow_fast.data.qrels import Qrels
from geoflow_fast.encoders.sources import open_images
from geoflow_fast.jobs.decisions import open_lists
from geoflow_fast.jobs.embed_columns import read_texts
from geoflow_fast.runtime import parquet

MEGABYTE = 1 << 20
LIMIT = 300 * MEGABYTE
"""A file that is refused may cost so much memory at most."""


def groups(array: pa.Array, count: int, **settings: Any) -> Callable[[Path], None]:
    """Writes a Parquet file with so many row groups of the same column."""

    def write(path: Path) -> None:
        table = pa.table({"x": array})
        with pq.ParquetWriter(path, table.schema, **{"compression": "zstd", **settings}) as writer:
            for _ in range(count):
                writer.write_table(table)

    return write


def repeated(value: Any, kind: pa.DataType, count: int) -> pa.Array:
    """The same value so many times, without the memory of so many."""
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, np.int32)), pa.array([value], kind))


def feather(array: pa.Array, compression: str | None) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        pyarrow.feather.write_feather(pa.table({"x": array}), path, compression=compression)

    return write


def stream(array: pa.Array, count: int, compression: str | None) -> Callable[[Path], None]:
    """Writes a stream of Arrow with so many batches."""

    def write(path: Path) -> None:
        batch = pa.record_batch({"x": array})
        options = pa.ipc.IpcWriteOptions(compression=compression)
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
            for _ in range(count):
                writer.write_batch(batch)

    return write


WORD = "a" * MEGABYTE
ZEROS = np.zeros(2 * MEGABYTE, np.float32)
BOMBS: dict[str, Callable[[], Callable[[Path], None]]] = {
    "text.parquet": lambda: groups(repeated(WORD, pa.string(), 4700), 1),
    "text in groups.parquet": lambda: groups(repeated(WORD, pa.string(), 2), 3000),
    "text without a schema.parquet": lambda: groups(repeated(WORD, pa.string(), 4700), 1, store_schema=False),
    "large text.parquet": lambda: groups(repeated(WORD, pa.large_string(), 4700), 1),
    "bytes.parquet": lambda: groups(repeated(WORD.encode(), pa.binary(), 4700), 1),
    "bytes of one length.parquet": lambda: groups(pa.array([bytes(MEGABYTE)] * 10, pa.binary(MEGABYTE)), 200),
    "a long dictionary.parquet": lambda: groups(
        pa.array([WORD * 100 + str(k) for k in range(2)]), 2, dictionary_pagesize_limit=1 << 30
    ),
    "lists of text.parquet": lambda: groups(pa.array([[WORD] * 40], pa.list_(pa.string())), 60),
    "lists of one length of text.parquet": lambda: groups(pa.array([[WORD] * 40], pa.list_(pa.string(), 40)), 60),
    "plain text.parquet": lambda: groups(pa.array([WORD] * 50), 50, use_dictionary=False),
    "lengths before text.parquet": lambda: groups(
        pa.array([WORD] * 50), 50, use_dictionary=False, column_encoding={"x": "DELTA_LENGTH_BYTE_ARRAY"}
    ),
    "shared prefixes.parquet": lambda: groups(
        pa.array([WORD] * 200), 6, use_dictionary=False, column_encoding={"x": "DELTA_BYTE_ARRAY"}
    ),
    "lists of shared prefixes.parquet": lambda: groups(
        pa.array([[WORD] * 200], pa.list_(pa.string())),
        6,
        use_dictionary=False,
        column_encoding={"x.list.element": "DELTA_BYTE_ARRAY"},
    ),
    "runs of doubles.parquet": lambda: groups(pa.array(np.zeros(MEGABYTE)), 100),
    "deltas.parquet": lambda: groups(
        pa.array(np.arange(MEGABYTE)), 100, use_dictionary=False, column_encoding={"x": "DELTA_BINARY_PACKED"}
    ),
    "missing numbers.parquet": lambda: groups(pa.nulls(MEGABYTE, pa.float64()), 200),
    "compressed zeros.parquet": lambda: groups(pa.array(ZEROS), 100, use_dictionary=False, compression="brotli"),
    "one list.parquet": lambda: groups(pa.ListArray.from_arrays([0, len(ZEROS)], pa.array(ZEROS)), 50),
    "vectors.parquet": lambda: groups(pa.FixedSizeListArray.from_arrays(pa.array(ZEROS), 512), 50),
    "half vectors.parquet": lambda: groups(
        pa.FixedSizeListArray.from_arrays(pa.array(ZEROS.astype(np.float16)), 512), 100
    ),
    "missing vectors.parquet": lambda: groups(pa.nulls(1, pa.list_(pa.float32(), MEGABYTE)), 200),
    "compressed.arrow": lambda: stream(pa.array(ZEROS), 100, "zstd"),
    "compressed vectors.arrow": lambda: stream(pa.FixedSizeListArray.from_arrays(pa.array(ZEROS), 512), 100, "zstd"),
    "compressed.feather": lambda: feather(pa.array(np.zeros(100 * MEGABYTE, np.float32)), "zstd"),
    "text.arrow": lambda: stream(repeated(WORD, pa.string(), 1 << 20), 2, "zstd"),
    "rows of nothing.arrow": lambda: stream(pa.nulls(1 << 24), 100, None),
}
"""What writes a file that unpacks to hundreds of megabytes at least."""

READERS: dict[str, Callable[[Path], Any]] = {
    "columns": parquet.read_columns,
    "one column": lambda path: parquet.read_columns(path, ["x"]),
    "a table": tables.open_table,
    "as stored": lambda path: parquet.read_table(path, as_stored=True),
    "batches": lambda path: list(parquet.batches(path, ["x"])),
    "embeddings": Embeddings.open,
    "ids": lambda path: open_ids(path, 3, "rows"),
    "named ids": lambda path: open_ids(Path(f"{path}:x"), 3, "rows"),
    "texts": lambda path: read_texts(path, ["x"]),
    "images": lambda path: open_images(path, path_column="x", caption_column=""),
    "captions": lambda path: open_images(path, path_column="x", caption_column="x"),
    "lists": open_lists,
}
ANY = ("a table", "texts")
PARQUET = ("columns", "one column", "as stored", "batches", "ids")
BY_KIND = {"text": ("named ids", "lists"), "without a schema": ("images", "captions"), "vectors": ("embeddings",)}


def readers_of(name: str) -> tuple[str, ...]:
    """The readers that take a file as what it is."""
    only = PARQUET if name.endswith(".parquet") else ()
    kinds = [reader for kind, some in BY_KIND.items() if kind in name for reader in some]
    return (*ANY, *only, *(reader for reader in kinds if only or reader == "embeddings"))


CASES = [(name, reader) for name in BOMBS for reader in readers_of(name)]


def _serve() -> None:
    """Reads files that the lines of the standard input name, and tells the error and the peak of memory of each."""
    for line in sys.stdin:
        reader, path = json.loads(line)
        Path("/proc/self/clear_refs").write_text("5")  # from here on the peak is counted
        before, words = _memory("VmRSS"), "read"
        try:
            READERS[reader](Path(path))
        except ValueError as error:
            words = f"ValueError {error}"
        except BaseException as error:  # noqa: BLE001, told to the test
            words = f"{type(error).__name__} {error}"
        print(json.dumps([words, _memory("VmHWM") - before]), flush=True)


def _memory(name: str) -> int:
    found = re.search(rf"{name}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


@pytest.fixture(scope="module")
def serving() -> Iterator[Callable[[str, Path], tuple[str, int]]]:
    """Reads a file in another process and returns how that ended and how much memory it took."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    command = [sys.executable, "-m", "tests.reliability.test_decoded_sizes"]
    with subprocess.Popen(command, text=True, cwd=Path(__file__).parents[2], **pipes) as process:

        def read(reader: str, path: Path) -> tuple[str, int]:
            process.stdin.write(json.dumps([reader, str(path)]) + "\n")
            process.stdin.flush()
            words, peak = json.loads(process.stdout.readline())
            return words, peak

        yield read
        process.stdin.close()


@pytest.fixture(scope="module")
def bombs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Writes each file once."""
    folder = tmp_path_factory.mktemp("bombs")

    def path_of(name: str) -> Path:
        if not (folder / name).exists():
            BOMBS[name]()(folder / name)
        return folder / name

    return path_of


@pytest.mark.parametrize(("name", "reader"), CASES)
def test_a_small_file_with_a_large_content_is_refused(serving, bombs, name, reader):
    path = bombs(name)
    assert path.stat().st_size < 800_000
    words, peak = serving(reader, path)
    assert words.startswith("ValueError"), words[:300]
    assert "unpack" in words
    assert name in words
    assert ("'x" in words) or name.endswith((".arrow", ".feather"))
    assert peak < LIMIT


WORDS = ["a photo of a dog", "a photo of a cat", None, "a drawing of a house with a garden"]


def many(count: int) -> list[Any]:
    return [WORDS[k] for k in np.random.default_rng(0).integers(len(WORDS), size=count)]


SETTINGS: dict[str, dict[str, Any]] = {
    "as they come": {},
    "gzip": {"compression": "gzip"},
    "second version of pages": {"data_page_version": "2.0"},
    "small pages": {"data_page_size": 512, "write_batch_size": 64},
    "small groups": {"row_group_size": 7_000},
    "without a dictionary": {"use_dictionary": False},
    "a dictionary that overflows": {"dictionary_pagesize_limit": 16},
    "without a schema": {"store_schema": False},
    "with an index of pages": {"write_page_index": True},
    "lengths before text": {"use_dictionary": False, "column_encoding": "DELTA_LENGTH_BYTE_ARRAY"},
    "shared prefixes": {"use_dictionary": False, "column_encoding": "DELTA_BYTE_ARRAY"},
}
KINDS: dict[str, pa.DataType] = {
    "string": pa.string(),
    "large string": pa.large_string(),
    "view": pa.string_view(),
    "dictionary": pa.dictionary(pa.int32(), pa.string()),
    "list": pa.list_(pa.string()),
    "fixed list": pa.list_(pa.string(), 2),
}


UNREADABLE = {
    *((settings, "dictionary") for settings in ("lengths before text", "shared prefixes")),  # pyarrow decodes neither
    *(
        ("shared prefixes", kind) for kind in ("list", "fixed list")
    ),  # their length is not known before they are decoded
}


@pytest.mark.parametrize(
    ("settings", "kind"), [(name, kind) for name in SETTINGS for kind in KINDS if (name, kind) not in UNREADABLE]
)
def test_captions_that_repeat_are_read(tmp_path, settings, kind):
    words = many(20_000)
    lists = "list" in kind
    values = [[word, "b"] for word in words] if lists else words
    path = tmp_path / "captions.parquet"
    more = dict(SETTINGS[settings])
    if "column_encoding" in more:
        more["column_encoding"] = {"x.list.element" if lists else "x": more["column_encoding"]}
    pq.write_table(pa.table({"x": pa.array(values, KINDS[kind])}), path, **more)
    read = parquet.read_columns(path)["x"]
    assert [list(value) if lists else value for value in read] == values
    stored = parquet.read_table(path, as_stored=True)["x"]
    assert not pa.types.is_dictionary(stored.type)
    assert stored.to_pylist() == values
    batches = [parquet.as_array(batch["x"]) for batch in parquet.batches(path, ["x"])]
    assert [list(value) if lists else value for batch in batches for value in batch] == values


def test_equal_captions_are_stored_once(serving, tmp_path):
    """Ten million rows of four captions, 230 MB of text, whose strings alone would take over 700 MB."""
    path = tmp_path / "captions.parquet"
    index = pa.array(np.arange(10_000_000, dtype=np.int32) // 2_500_000)
    words = pa.array([*WORDS[:2], *WORDS[3:], "d"])
    pq.write_table(pa.table({"x": pa.DictionaryArray.from_arrays(index, words)}), path)
    assert path.stat().st_size < 50_000
    for reader in ("columns", "one column", "a table"):
        words, peak = serving(reader, path)
        assert words == "read"
        assert peak < LIMIT


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
@pytest.mark.parametrize("suffix", [".arrow", ".feather"])
def test_honest_files_of_arrow_are_read(tmp_path, suffix, compression):
    path = tmp_path / f"x{suffix}"
    rows = np.random.default_rng(0).standard_normal((500, 16)).astype(np.float32)
    array = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), 16)
    (stream(array, 3, compression) if suffix == ".arrow" else feather(array, compression or "uncompressed"))(path)
    table = tables.open_table(path)
    assert len(table) == (1500 if suffix == ".arrow" else 500)
    assert table["x"].to_pylist()[:500] == rows.tolist()


def test_files_of_a_folder_may_spell_strings_in_different_ways(tmp_path):
    """One keeps its words in a dictionary, the other stores lengths before text."""
    words = many(500)
    for number, more in enumerate(SETTINGS[name] for name in ("as they come", "lengths before text")):
        encoding = {"x": more["column_encoding"]} if "column_encoding" in more else None
        table = pa.table({"x": pa.array(words)})
        pq.write_table(table, tmp_path / f"p_{number}.parquet", **{**more, "column_encoding": encoding})
    assert tables.open_table(tmp_path)["x"].to_pylist() == 2 * words


def test_every_numeric_type_is_read(tmp_path):
    rng = np.random.default_rng(0)
    kinds = (bool, np.int8, np.uint16, np.int64)
    columns: dict[str, Any] = {kind.__name__: rng.integers(0, 2, 3000).astype(kind) for kind in kinds}
    columns |= {"f4": rng.random(3000, np.float32), "f8": rng.random(3000), "f2": rng.random(3000).astype(np.float16)}
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table(columns), path, row_group_size=1000)
    for name, column in parquet.read_columns(path).items():
        assert column.dtype == columns[name].dtype
        np.testing.assert_array_equal(column, columns[name])


def test_one_long_id_costs_its_own_length_alone():
    """As an array of text of one length, a million ids would take as much as the longest each."""
    names = np.array([f"id {k}" for k in range(50_000)], object)
    names[7] = "a" * 1_000_000
    assert Ids(names).rows(names[[9, 7]], "ids").tolist() == [9, 7]
    assert Ids(np.arange(50_000)).rows(np.array(["7", "9"], object), "ids").tolist() == [7, 9]


def invalid(kind: pa.DataType) -> pa.Array:
    """Three strings, of which row 2 is not text."""
    good = pa.array([b"a", b"b", b"\xff\xfe"], pa.binary())
    if pa.types.is_dictionary(kind):
        return pa.DictionaryArray.from_arrays(pa.array([0, 1, 2], pa.int32()), invalid(pa.string()))
    return pa.Array.from_buffers(pa.string(), 3, good.buffers())


@pytest.mark.parametrize("kind", [pa.string(), pa.dictionary(pa.int32(), pa.string())], ids=str)
@pytest.mark.parametrize("name", ["bad.parquet", "bad.arrow"])
def test_text_that_is_not_utf8_names_file_and_row(tmp_path, name, kind):
    rows = pa.FixedSizeListArray.from_arrays(pa.array(np.eye(3, dtype=np.float32).reshape(-1)), 3)
    table = pa.table({"id": invalid(kind), "embedding": rows})
    path = tmp_path / name
    if name.endswith(".parquet"):
        pq.write_table(table, path)
    else:
        pyarrow.feather.write_feather(table, path, compression="uncompressed")
    readers: list[Callable[[], Any]] = [lambda: Embeddings.open(path), lambda: read_texts(path, ["id"])]
    if name.endswith(".parquet"):
        readers += [
            lambda: parquet.read_columns(path, ["id"]),
            lambda: open_ids(path, 3, "rows"),
            lambda: open_lists(path),
        ]
        if not pa.types.is_dictionary(kind):
            readers.append(lambda: open_images(path, path_column="id", caption_column=""))
    for reader in readers:
        with pytest.raises(ValueError, match=rf"{re.escape(name)}.*'id'.*row 2 is not text in UTF-8"):
            reader()
    with pytest.raises(ValueError, match=r"table: column 'id': row 2 is not text in UTF-8"):
        Embeddings.from_table(table)


def test_judgements_name_file_and_row(tmp_path):
    path = tmp_path / "judged.parquet"
    pq.write_table(pa.table({"query": invalid(pa.string()), "item": ["a", "b", "c"], "grade": [1, 1, 1]}), path)
    with pytest.raises(ValueError, match=r"judged\.parquet.*'query'.*row 2 is not text in UTF-8"):
        Qrels.open(path)


if __name__ == "__main__":
    _serve()
