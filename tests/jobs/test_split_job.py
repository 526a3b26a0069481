"""`geoflow split`: parts by image, ids that go with them, and continued runs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import geoflow_fast as gf
from geoflow_fast.jobs import split
from geoflow_fast.runtime.parquet import read_columns
from tests.jobs.processes import run_geoflow

IMAGES, CAPTIONS = 37, 3


@pytest.fixture
def desk(tmp_path, monkeypatch) -> Path:
    """Two files and an index: images with three captions each, in a shuffled order."""
    monkeypatch.chdir(tmp_path)
    make = torch.Generator().manual_seed(0)
    image = gf.geometry.sample_uniform(IMAGES, 5, generator=make).numpy()
    index = np.random.default_rng(0).permutation(np.repeat(np.arange(IMAGES), CAPTIONS))
    np.save("images.npy", image)
    np.save("texts.npy", gf.geometry.sample_uniform(len(index), 5, generator=make).numpy())
    np.save("index.npy", index)
    Path("ids.txt").write_text("".join(f"text {k}\n" for k in range(len(index))))
    np.save("image_ids.npy", 500 + np.arange(IMAGES))
    return tmp_path


FILES = {"images": "images.npy", "texts": "texts.npy", "image_index": "index.npy", "out": "parts"}


@pytest.mark.usefixtures("desk")
def test_parts_are_disjoint_by_image_and_keep_ids(monkeypatch, capsys):
    ids = {"ids": "ids.txt", "image_ids": "image_ids.npy"}
    assert run_geoflow(monkeypatch, "split", "--json", parts="a=0.5,b=0.3,c=0.2", **FILES, **ids) == 0
    sizes = json.loads(capsys.readouterr().out)
    assert [part["images"] for part in sizes.values()] == [18, 12, 7]
    texts, image_rows = np.load("texts.npy"), np.load("index.npy")
    seen = []
    for name in "abc":
        part = gf.EmbeddingPairs.open(f"parts/{name}")
        rows = [int(x.split()[1]) for x in read_columns(Path(f"parts/{name}/text_ids.parquet"))["id"]]
        images = read_columns(Path(f"parts/{name}/image_ids.parquet"))["id"]
        np.testing.assert_allclose(part[range(len(part))][1], texts[rows], atol=1e-6)
        assert (images[part.image_row] - 500 == image_rows[rows]).all()
        assert len(part) == CAPTIONS * len(images)
        seen.extend(images.tolist())
    assert sorted(seen) == list(range(500, 500 + IMAGES))


@pytest.mark.usefixtures("desk")
def test_a_killed_split_is_continued_and_another_one_refused(monkeypatch, capsys):
    write, parts = split.write_part, []

    def killed(*arguments: object) -> None:
        parts.append(arguments[1])
        if len(parts) == 2:
            raise KeyboardInterrupt
        write(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(split, "write_part", killed)
        assert run_geoflow(patch, "split", **FILES) == 130
        assert run_geoflow(patch, "split", **FILES) == 0
    assert [part.name for part in parts] == ["train", "held_out", "held_out", "ask"]
    capsys.readouterr()
    assert run_geoflow(monkeypatch, "split", seed=1, **FILES) == 2
    assert "differs in seed" in capsys.readouterr().err
    assert run_geoflow(monkeypatch, "split", "--overwrite", seed=1, **FILES) == 0


@pytest.mark.usefixtures("desk")
def test_overwrite_removes_every_part_of_the_earlier_split(monkeypatch):
    assert run_geoflow(monkeypatch, "split", parts="a=0.5,b=0.3", **FILES) == 0
    Path("parts/mine").mkdir()
    Path("outside").mkdir()
    record = json.loads(Path("parts/split.json").read_text())
    Path("parts/split.json").write_text(json.dumps({**record, "parts": {**record["parts"], "../outside": 0.1}}))
    assert run_geoflow(monkeypatch, "split", "--overwrite", parts="a=0.9", **FILES) == 0
    assert sorted(path.name for path in Path("parts").iterdir() if path.is_dir()) == ["a", "mine"]
    assert Path("outside").is_dir()


@pytest.mark.usefixtures("desk")
def test_equal_seeds_give_equal_parts_and_ids_are_rows_by_default(monkeypatch):
    for out in ("one", "two"):
        assert run_geoflow(monkeypatch, "split", **{**FILES, "out": out}) == 0
    one, two = (read_columns(Path(out) / "ask/text_ids.parquet")["id"] for out in ("one", "two"))
    assert one.dtype == np.int64
    assert one.tolist() == two.tolist()


@pytest.mark.usefixtures("desk")
@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ("train", "got 'train'"),
        ("train=0.8,ask", "got 'ask'"),
        ("train=2", "got 'train=2'"),
        ("a/b=0.5", "got 'a/b=0.5'"),
        ("..=0.5", "got '..=0.5'"),
        ("a=0.5,a=0.2", "names a twice"),
        ("a=0.8,b=0.3", "sum to 1.1"),
        ("a=0.9,b=0.001", "part b would be empty"),
    ],
)
def test_bad_parts_are_named(monkeypatch, capsys, parts, words):
    assert run_geoflow(monkeypatch, "split", parts=parts, **FILES) == 2
    assert words in capsys.readouterr().err
    assert not Path("parts").exists()
