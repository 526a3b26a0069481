"""Embeddings in columns: Parquet, Arrow, datasets and frames, with the ids beside them."""

from __future__ import annotations

import uuid

import numpy as np
import pandas
import polars
import pyarrow
import pyarrow.parquet
import pytest
import torch

import geoflow_fast as gf
from geoflow_fast.data.embeddings import open_rows
from geoflow_fast.data.ids import Ids
from geoflow_fast.noise import sample_uniform

ROWS = 37
IDS = {
    "strings": [f"item/{k} ü\u2028" for k in range(ROWS)],
    "integers": [10**12 - k for k in range(ROWS)],
    "hashes": (2**64 - 1 - np.arange(ROWS, dtype=np.uint64)).tolist(),
    "UUIDs": [uuid.UUID(int=k << 64 | 7) for k in range(ROWS)],
}


def unit_rows(count: int = ROWS, dim: int = 8, seed: int = 0) -> np.ndarray:
    return sample_uniform(count, dim, generator=torch.Generator().manual_seed(seed)).numpy()


def list_column(rows: np.ndarray, kind: str) -> pyarrow.Array:
    flat = pyarrow.array(rows.reshape(-1))
    if kind == "fixed":
        return pyarrow.FixedSizeListArray.from_arrays(flat, rows.shape[1])
    make = pyarrow.LargeListArray if kind == "large" else pyarrow.ListArray
    offsets = np.arange(len(rows) + 1, dtype=np.int64 if kind == "large" else np.int32) * rows.shape[1]
    return make.from_arrays(pyarrow.array(offsets), flat)


@pytest.mark.parametrize("kind", ["fixed", "list", "large"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("form", ["parquet", "arrow", "stream", "folder"])
def test_every_form_of_a_column_gives_the_rows(form, dtype, kind, tmp_path):
    rows = unit_rows().astype(dtype)
    table = pyarrow.table({"name": [f"n{k}" for k in range(ROWS)], "vector": list_column(rows, kind)})
    path = tmp_path / "x.parquet"
    if form == "parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=10)
    elif form == "folder":
        path = tmp_path / "shards"
        path.mkdir()
        for number, low in enumerate(range(0, ROWS, 10)):
            pyarrow.parquet.write_table(table.slice(low, 10), path / f"part_{number}.parquet")
    else:
        path = tmp_path / "x.arrow"
        opened = pyarrow.ipc.new_stream if form == "stream" else pyarrow.ipc.new_file
        with pyarrow.OSFile(str(path), "wb") as file, opened(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=10)
    read = open_rows(path, "rows")
    expected = rows.astype(np.float32) / np.linalg.norm(rows.astype(np.float32), axis=1, keepdims=True)
    np.testing.assert_allclose(read[np.arange(ROWS)], expected, atol=1e-6)
    assert read.ids is None


@pytest.mark.parametrize("kind", IDS)
def test_datasets_and_frames_give_the_same_rows_and_ids(kind, tmp_path):
    import datasets

    ids, rows = IDS[kind], unit_rows()
    stored = [str(x) for x in ids] if kind == "UUIDs" else ids  # datasets and polars have no type for UUIDs
    held = np.array(stored, np.uint64) if kind == "hashes" else stored
    dataset = datasets.Dataset.from_dict({"id": held, "embedding": rows.tolist()})
    dataset = dataset.cast_column("embedding", datasets.Sequence(datasets.Value("float32"), length=8))
    dataset.save_to_disk(tmp_path / "saved")
    order = np.random.default_rng(0).permutation(ROWS)
    sources = {
        "dataset": gf.Embeddings.from_table(dataset),
        "saved": gf.Embeddings.open(tmp_path / "saved"),
        "chosen": gf.Embeddings.from_table(dataset.select(order)),
        "polars": gf.Embeddings.from_table(polars.DataFrame({"id": held, "embedding": rows})),
        "pandas": gf.Embeddings.from_table(pandas.DataFrame({"id": ids, "embedding": list(rows)})),
    }
    for name, embeddings in sources.items():
        where = order if name == "chosen" else np.arange(ROWS)
        wanted = ids if name == "pandas" else stored
        assert embeddings.ids.tolist() == [wanted[k] for k in where], name
        torch.testing.assert_close(embeddings.tensor(), torch.from_numpy(rows[where]), atol=1e-6, rtol=0)


def test_a_column_is_named_where_there_are_several(tmp_path):
    one, two = unit_rows(seed=1), unit_rows(dim=5, seed=2)
    path = tmp_path / "pairs.parquet"
    columns = {"id": IDS["strings"], "image": list_column(one, "fixed"), "text": list_column(two, "list")}
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    with pytest.raises(ValueError, match=r"several columns of embeddings, image, text; name one"):
        open_rows(path, "gallery")
    assert open_rows(tmp_path / "pairs.parquet:text", "gallery").dim == 5
    pairs = gf.EmbeddingPairs.open(path)
    assert (pairs.image_dim, pairs.text_dim) == (8, 5)
    assert pairs.ids.tolist() == IDS["strings"]
    again = gf.EmbeddingPairs.open_files(f"{path}:image", f"{path}:text")
    assert again.fingerprint() == pairs.fingerprint()
    with pytest.raises(ValueError, match=r"no column 'nothing'; its columns are id, image, text"):
        open_rows(tmp_path / "pairs.parquet:nothing", "gallery")
    with pytest.raises(ValueError, match=r"column 'id' holds string, not lists of floating-point numbers"):
        open_rows(tmp_path / "pairs.parquet:id", "gallery")


@pytest.mark.parametrize(
    ("lists", "said"),
    [
        ([[1.0, 0.0], None, [0.0, 1.0]], "has no embedding in row 1"),
        ([[1.0, 0.0], [1.0, 0.0], [1.0]], "has 1 numbers in row 2, but 2 in row 0"),
        ([[1.0, 0.0], [1.0, None], [0.0, 1.0]], "lacks a number in row 1"),
        ([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]], "row 1 has norm 2, not 1"),
    ],
)
def test_a_bad_row_is_named(lists, said, tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"vector": lists}), tmp_path / "x.parquet")
    with pytest.raises(ValueError, match=said):
        gf.Embeddings.open(tmp_path / "x.parquet")


def test_what_is_no_table_is_refused(tmp_path):
    with pytest.raises(TypeError, match="must be a path, a table of Arrow, a dataset that is not a stream"):
        gf.Embeddings.from_table([1, 2, 3])
    (tmp_path / "x.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(ValueError, match=r"x\.parquet is damaged or not Parquet"):
        gf.Embeddings.open(tmp_path / "x.parquet")
    (tmp_path / "x.arrow").write_bytes(b"nonsense")
    with pytest.raises(ValueError, match=r"x\.arrow is damaged or not Arrow"):
        gf.Embeddings.open(tmp_path / "x.arrow")
    (tmp_path / "d").mkdir()
    (tmp_path / "d/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(ValueError, match="holds the splits train, test of a dataset"):
        gf.Embeddings.open(tmp_path / "d")
    (tmp_path / "e").mkdir()
    (tmp_path / "e/state.json").write_text('{"_data_files": [{"filename": "../../x.arrow"}]}')
    with pytest.raises(ValueError, match="names files outside its folder"):
        gf.Embeddings.open(tmp_path / "e")


def test_images_with_several_rows_are_one_group():
    rows = unit_rows(6)
    table = pyarrow.table(
        {"image": list_column(rows, "fixed"), "text": list_column(rows, "fixed"), "photo": list("aabbbc")}
    )
    pairs = gf.EmbeddingPairs.from_table(table, image_id_column="photo")
    assert np.unique(pairs.group, return_counts=True)[1].tolist() == [2, 3, 1]
    assert pairs.image_ids.tolist() == list("aabbbc")
    assert pairs.ids is None


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([1, "a"], "that of row 1 is 'a'"),
        (["a", 1], "that of row 1 is 1"),
        ([True, False], "that of row 0 is True"),
        ([None, "a"], "that of row 0 is None"),
        ([1.5, 2.5], "that of row 0 is 1.5"),
        (["a", "\ud800"], "row 1 is .* not text"),
        ([-1, 2**64 - 1], "64 bits"),
        ([1, 2, 3], "3 ids, but there are 2 rows"),
    ],
)
def test_ids_are_of_one_kind(values, said):
    with pytest.raises(ValueError, match=said):
        Ids.given(values, 2, "ids")


def test_sides_may_be_of_any_kind(tmp_path):
    rows = unit_rows()
    table = pyarrow.table({"audio_embedding": list_column(rows, "fixed"), "text": list_column(rows, "list")})
    pairs = gf.EmbeddingPairs.from_table(table, sides=("audio", "text"))
    assert repr(pairs) == "EmbeddingPairs(37 pairs, audio width 8, text width 8)"
    pairs.split(0.3, seed=0)[0].save(tmp_path / "kept")
    assert gf.EmbeddingPairs.open(tmp_path / "kept").sides == ("audio", "text")
    with pytest.raises(ValueError, match="two different names"):
        gf.EmbeddingPairs.from_table(table, sides=("text", "text"))


def test_saving_says_its_precision_and_keeps_it(tmp_path):
    pairs = gf.EmbeddingPairs.from_arrays(unit_rows(), unit_rows(seed=1))
    pairs.save(tmp_path / "half")
    pairs.save(tmp_path / "whole", dtype=np.float32)
    assert {x.dtype for x in gf.EmbeddingPairs.open(tmp_path / "half").image.parts} == {np.dtype(np.float16)}
    again = gf.EmbeddingPairs.open(tmp_path / "whole")
    torch.testing.assert_close(again[range(ROWS)], pairs[range(ROWS)], atol=1e-6, rtol=0)
    assert "float16" in gf.EmbeddingPairs.save.__doc__
