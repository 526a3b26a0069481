"""Paired embeddings: their layouts on disk, checks, splits and shuffling."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

import geoflow_fast as gf
from geoflow_fast.data import rows
from geoflow_fast.data.embeddings import open_rows
from geoflow_fast.runtime import parquet
from geoflow_fast.training.batches import ShuffledBatches


def unit(n: int, d: int, seed: int = 0) -> np.ndarray:
    x = np.random.default_rng(seed).standard_normal((n, d)).astype(np.float32)
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def write_folder(folder, image, text, shards=3, dtype=np.float16):
    for name, x in (("img_emb", image), ("text_emb", text)):
        (folder / name).mkdir(parents=True)
        for number, part in enumerate(np.array_split(x, shards)):
            np.save(folder / name / f"{name}_{number}.npy", part.astype(dtype))
    return folder


def test_pairs_from_arrays_in_any_order():
    image, text = unit(7, 5), unit(10, 4, 1)
    index = np.array([0, 0, 1, 2, 3, 3, 3, 4, 5, 6])
    pairs = gf.EmbeddingPairs.from_arrays(image, torch.from_numpy(text), image_index=index)
    assert (len(pairs), pairs.image_dim, pairs.text_dim) == (10, 5, 4)
    wanted = torch.tensor([9, 0, 4, 4])
    got = pairs[wanted]
    np.testing.assert_allclose(got[0], image[index[wanted]], atol=1e-6)
    np.testing.assert_allclose(got[1], text[wanted], atol=1e-6)
    assert all(x.dtype == torch.float32 for x in got)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_folder_of_shards_is_mapped_and_renormalised(tmp_path, dtype):
    image, text = unit(130, 33), unit(130, 17, 1)
    pairs = gf.EmbeddingPairs.open(write_folder(tmp_path, image, text, shards=11, dtype=dtype))
    assert isinstance(pairs.image.parts[10], np.memmap)
    order = np.random.default_rng(0).permutation(130)
    got = pairs[order]
    np.testing.assert_allclose(got[0], image[order], atol=1e-3)
    np.testing.assert_allclose(got[1].norm(dim=1), 1, atol=1e-6)


def test_save_and_open_round_trip(tmp_path):
    index = np.array([3, 0, 0, 2, 3, 5])
    pairs = gf.EmbeddingPairs.from_arrays(unit(6, 8), unit(6, 9, 1), image_index=index)
    pairs.save(tmp_path / "out", rows_per_shard=2, dtype=np.float32)
    again = gf.EmbeddingPairs.open(tmp_path / "out")
    for a, b in zip(pairs[np.arange(6)], again[np.arange(6)]):
        np.testing.assert_allclose(a, b, atol=1e-6)
    assert len(again.image) == 4
    with pytest.raises(FileExistsError, match="already holds"):
        pairs.save(tmp_path / "out")


def test_groups_survive_save_and_open(tmp_path, monkeypatch):
    """Rows of one image stay on one side of a split after they were saved in several shards and opened again."""
    monkeypatch.setattr(rows, "BLOCK_ROWS", 3)
    pairs = gf.EmbeddingPairs.from_arrays(unit(40, 5), unit(40, 4, 1))
    pairs.group = np.arange(40) // 4
    pairs.save(tmp_path, rows_per_shard=16, dtype=np.float32)
    again = gf.EmbeddingPairs.open(tmp_path)
    assert [len(part) for part in again.text.parts] == [16, 16, 8]
    np.testing.assert_allclose(again[np.arange(40)][1], unit(40, 4, 1), atol=1e-6)
    rest, held = again.split(0.3, seed=0)
    assert set(rest.text_row // 4).isdisjoint(held.text_row // 4)


def test_metadata_keeps_captions_of_one_image_together(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as parquet

    folder = write_folder(tmp_path, unit(60, 5), unit(60, 5, 1), shards=1)
    (folder / "metadata").mkdir()
    names = [f"image{k // 3}.jpg" for k in range(60)]
    parquet.write_table(pa.table({"image_path": names}), folder / "metadata" / "metadata_0.parquet")
    rest, held = gf.EmbeddingPairs.open(folder).split(0.2, seed=1)
    groups = [set(part.group.tolist()) for part in (rest, held)]
    assert groups[0].isdisjoint(groups[1])
    assert (len(rest), len(held)) == (48, 12)


@pytest.mark.parametrize(
    ("held_out", "images"), [(0.02, 1), (0.3, 15), (0.001, 1), (15, 15), (np.int64(49), 49), (1, 1)]
)
def test_split_is_seeded_and_by_image(held_out, images):
    """Rows are in no order, and images have one to three texts, all of which stay together."""
    index = np.random.default_rng(0).permutation(np.repeat(np.arange(50), np.arange(50) % 3 + 1))
    names = {"ids": np.arange(len(index)), "image_ids": [f"image {k}" for k in range(50)]}
    pairs = gf.EmbeddingPairs.from_arrays(unit(50, 4), unit(len(index), 4, 1), index, **names)
    rest, held = pairs.split(held_out, seed=3)
    assert len(set(held.image_ids)) == images
    assert set(rest.image_ids).isdisjoint(held.image_ids)
    assert sorted([*rest.ids, *held.ids]) == list(range(len(index)))
    again, other = (pairs.split(held_out, seed=seed)[1] for seed in (3, 4))
    assert held.ids.tolist() == again.ids.tolist() != other.ids.tolist()


@pytest.mark.parametrize("held_out", [0.0, 1.0, 1.5, -0.1, float("nan"), 0, 10, -1])
def test_a_share_or_number_that_leaves_nothing_is_refused(held_out):
    pairs = gf.EmbeddingPairs.from_arrays(unit(10, 4), unit(10, 4, 1))
    with pytest.raises(ValueError, match="held_out must be"):
        pairs.split(held_out, seed=0)


@pytest.mark.parametrize("held_out", ["0.1", None, [0.1], True])
def test_a_share_of_another_type_is_named(held_out):
    pairs = gf.EmbeddingPairs.from_arrays(unit(10, 4), unit(10, 4, 1))
    with pytest.raises(TypeError, match="held_out must be a"):
        pairs.split(held_out, seed=0)


@pytest.mark.parametrize(("count", "batch"), [(10, 3), (7, 7), (129, 64), (1, 1)])
def test_shuffling_covers_every_epoch_and_starts_anywhere(count, batch):
    batches = ShuffledBatches(count, batch, seed=5)
    stream = np.concatenate([batches[step] for step in range(3 * count)])
    for epoch in range(3 * batch):
        assert sorted(stream[epoch * count : (epoch + 1) * count]) == list(range(count))
    fresh = ShuffledBatches(count, batch, seed=5)
    for step in (2 * count, 1, count):
        np.testing.assert_array_equal(fresh[step], batches[step])


def test_shuffling_differs_between_epochs_and_seeds():
    batches = ShuffledBatches(100, 100, seed=0)
    assert not np.array_equal(batches[0], batches[1])
    assert not np.array_equal(batches[0], ShuffledBatches(100, 100, seed=1)[0])


def resident(folder) -> int:
    """Returns the kilobytes of the folder's mapped files that count as this process's memory."""
    total, counted = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            counted = str(folder) in line
        elif counted and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs the kernel's account of mapped pages")
def test_pages_are_released(tmp_path, monkeypatch):
    image = unit(50, 640)
    pairs = gf.EmbeddingPairs.open(write_folder(tmp_path, image, image, dtype=np.float32))
    assert resident(tmp_path) == 0
    assert float(pairs.image.parts[0][3, 5]) == image[3, 5]
    assert resident(tmp_path) > 0
    monkeypatch.setattr(rows, "RANDOM_ROWS", 3)
    for _ in range(2):
        np.testing.assert_allclose(pairs[np.arange(50)][0], image, atol=1e-6)
        assert resident(tmp_path) == 0


def test_edits_of_a_copy_on_write_map_survive_reading(tmp_path):
    np.save(tmp_path / "x.npy", unit(40, 512))
    edited = np.load(tmp_path / "x.npy", mmap_mode="c")
    edited[7] = np.eye(512, dtype=np.float32)[3]
    pairs = gf.EmbeddingPairs.from_arrays(edited, unit(40, 4))
    for _ in range(2):
        assert pairs[[7]][0].argmax() == 3
    gf.Gallery(edited).digest()
    assert edited[7, 3] == 1


def test_bad_rows_are_named(tmp_path):
    good, bad = unit(20, 6), unit(20, 6)
    bad[13] *= 1.01
    with pytest.raises(ValueError, match=r"text row 13 has norm 1\.01.*normalize=True"):
        gf.EmbeddingPairs.from_arrays(good, bad)
    assert len(gf.EmbeddingPairs.from_arrays(good, bad, normalize=True)) == 20
    bad[13] = 0
    with pytest.raises(ValueError, match="text row 13"):
        gf.EmbeddingPairs.from_arrays(good, bad, normalize=True)
    bad[13, 2] = np.nan
    with pytest.raises(ValueError, match="row 13 is not finite"):
        gf.EmbeddingPairs.open(write_folder(tmp_path, good, bad))


def test_bad_pairings():
    image, text = unit(4, 3), unit(6, 3)
    with pytest.raises(ValueError, match="4 images and 6 texts"):
        gf.EmbeddingPairs.from_arrays(image, text)
    with pytest.raises(ValueError, match="row 5 is 4, but there are 4 images"):
        gf.EmbeddingPairs.from_arrays(image, text, image_index=[0, 1, 2, 3, 3, 4])
    with pytest.raises(ValueError, match="6 integers"):
        gf.EmbeddingPairs.from_arrays(image, text, image_index=[0, 1])
    with pytest.raises(ValueError, match="2-D floating-point"):
        gf.EmbeddingPairs.from_arrays(image[0], text)


def test_indices_and_masks():
    pairs = gf.EmbeddingPairs.from_arrays(torch.from_numpy(unit(5, 3)).requires_grad_(), unit(5, 4, 1))
    mask = np.array([True, False, True, False, True])
    for index in (mask, torch.from_numpy(mask), mask.tolist()):
        assert torch.equal(pairs[index][1], pairs[[0, 2, 4]][1])
        assert len(pairs.subset(index)) == 3
    assert len(pairs[[]][0]) == 0
    for bad, message in (
        ([True, False], "mask of 5 entries"),
        ([0.0, 1.0], "1-D integers"),
        (2, "1-D integers"),
        ([[0, 1]], "1-D integers"),
        ([0, 5], "entry 1 is 5, but there are 5 pairs"),
        ([-1], "entry 0 is -1"),
    ):
        with pytest.raises(ValueError, match=message):
            pairs[bad]
        with pytest.raises(ValueError, match=message):
            pairs.subset(bad)


def test_shards_that_do_not_match(tmp_path):
    folder = write_folder(tmp_path, unit(9, 3), unit(9, 3))
    first = folder / "img_emb" / "img_emb_0.npy"
    np.save(folder / "img_emb" / "img_emb_00.npy", unit(3, 3))
    with pytest.raises(ValueError, match=r"are both shard 0"):
        gf.EmbeddingPairs.open(folder)
    (folder / "img_emb" / "img_emb_00.npy").unlink()
    (folder / "img_emb" / "img_emb_1.npy").unlink()
    with pytest.raises(FileNotFoundError, match=r"img_emb_1\.npy is missing between"):
        gf.EmbeddingPairs.open(folder)
    np.save(first, unit(2, 3))
    np.save(folder / "img_emb" / "img_emb_1.npy", unit(4, 3))
    with pytest.raises(ValueError, match="shard 0 holds 2 images, but 3 texts"):
        gf.EmbeddingPairs.open(folder)
    np.save(folder / "image_index.npy", np.arange(9))
    assert len(gf.EmbeddingPairs.open(folder)) == 9
    with open(first, "wb") as file:
        np.savez(file, unit(2, 3))
    with pytest.raises(ValueError, match=r"img_emb_0\.npy is not a \.npy file"):
        gf.EmbeddingPairs.open(folder)


def save_matrix(path: Path) -> None:
    np.save(path, unit(2, 3))


def save_column(path: Path) -> None:
    parquet.write_columns(path, {"embedding": unit(2, 3)}, 2)


@pytest.mark.parametrize(
    ("save", "names"),
    [
        (save_matrix, ("images_0.npy", "texts_0.npy")),
        (save_matrix, ("images_0.npy", "images_1.npy", "texts_2.npy")),
        (save_matrix, ("cats.npy", "dogs.npy")),
        (save_matrix, ("vit_b16_0.npy", "vit_b32_0.npy")),
        (save_matrix, ("vit_b16_0.npy", "vit_b16_1.npy", "vit_b32_0.npy")),
        (save_matrix, ("worker0_part0.npy", "worker0_part1.npy", "worker1_part0.npy")),
        (save_matrix, ("rows_0_999.npy", "rows_1001_1999.npy")),
        (save_column, ("model1_0.parquet", "model2_0.parquet")),
        (save_column, ("train-00000-of-00002.parquet", "train-00000-of-00003.parquet")),
        (save_column, ("images_0.parquet", "texts_1.parquet")),
        (save_column, ("test-00000-of-00001.parquet", "train-00000-of-00001.parquet")),
    ],
)
def test_a_folder_holds_one_series_of_files(tmp_path, save, names):
    """Rows of images and of texts would otherwise be read as one gallery."""
    for name in names:
        save(tmp_path / name)
    with pytest.raises(ValueError, match=f"{re.escape(names[0])} and {re.escape(names[-1])}"):
        gf.Embeddings.open(tmp_path)
    with pytest.raises(ValueError, match=f"{re.escape(names[0])} and {re.escape(names[-1])}"):
        gf.Gallery(tmp_path)


@pytest.mark.parametrize(
    ("save", "names"),
    [
        (save_matrix, ("images_0.npy", "images_1.npy")),
        (save_matrix, ("vit_b16_0.npy", "vit_b16_1.npy")),
        (save_matrix, ("rows_0_999.npy", "rows_1000_1999.npy")),
        (save_column, ("rows-0-10.parquet", "rows-10-20.parquet", "rows-20-30.parquet")),
        (save_matrix, ("part_0_of_2.npy", "part_1_of_2.npy")),
        (save_column, ("images_1.parquet", "images_2.parquet")),
        (save_column, ("train-00000-of-00002.parquet", "train-00001-of-00002.parquet")),
    ],
)
def test_files_of_one_series_are_shards(tmp_path, save, names):
    for name in names:
        save(tmp_path / name)
    assert len(gf.Embeddings.open(tmp_path)) == 2 * len(names)


@pytest.mark.parametrize("save", [save_matrix, save_column])
@pytest.mark.parametrize(("numbers", "missing"), [((0, 2), 1), ((0, 1), 2), ((1, 2), 0), ((2,), 0), ((0, 1, 3), 2)])
def test_every_shard_of_a_known_number_is_there(tmp_path, save, numbers, missing):
    suffix = "npy" if save is save_matrix else "parquet"
    for number in numbers:
        save(tmp_path / f"train-{number:05}-of-00003.{suffix}")
    with pytest.raises(FileNotFoundError, match=rf"train-{missing:05}-of-00003\.{suffix} is missing"):
        gf.Embeddings.open(tmp_path)


def test_a_shard_beyond_the_number_of_shards(tmp_path):
    for number in range(3):
        save_column(tmp_path / f"train-{number}-of-2.parquet")
    with pytest.raises(ValueError, match=r"train-2-of-2\.parquet has a number that is too large for 2 shards"):
        gf.Embeddings.open(tmp_path)


def test_shards_are_read_in_the_order_of_their_numbers(tmp_path):
    for low in range(0, 30, 10):
        np.save(tmp_path / f"rows_{low}_{low + 10}.npy", np.full((1, 2), low + 1.0))
    assert open_rows(tmp_path, "rows").stored(np.arange(3))[:, 0].tolist() == [1, 11, 21]


@pytest.mark.parametrize("side", ["img_emb", "text_emb"])
def test_a_set_of_pairs_has_one_series_for_each_side(tmp_path, side):
    folder = write_folder(tmp_path, unit(9, 3), unit(9, 3))
    np.save(folder / side / f"{side}_old_7.npy", unit(3, 3))
    with pytest.raises(ValueError, match=rf"{side}_0\.npy and {side}_old_7\.npy"):
        gf.EmbeddingPairs.open(folder)


def test_metadata_has_one_series(tmp_path):
    folder = write_folder(tmp_path, unit(4, 3), unit(4, 3))
    (folder / "metadata").mkdir()
    for name in ("metadata_0", "other_1"):
        parquet.write_columns(folder / "metadata" / f"{name}.parquet", {"image_index": np.arange(2)}, 2)
    with pytest.raises(ValueError, match=r"metadata_0\.parquet and other_1\.parquet"):
        gf.EmbeddingPairs.open(folder)


def test_bad_folders(tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing is missing"):
        gf.EmbeddingPairs.open(tmp_path / "nothing")
    folder = write_folder(tmp_path / "gap", unit(9, 3), unit(9, 3))
    shard = folder / "img_emb" / "img_emb_1.npy"
    raw = shard.read_bytes()
    shard.write_bytes(raw[:-4])
    with pytest.raises(ValueError, match=r"img_emb_1\.npy is truncated"):
        gf.EmbeddingPairs.open(folder)
    shard.unlink()
    with pytest.raises(FileNotFoundError, match=r"img_emb_1\.npy is missing"):
        gf.EmbeddingPairs.open(folder)
    np.save(shard, unit(3, 4))
    with pytest.raises(ValueError, match="width 4"):
        gf.EmbeddingPairs.open(folder)
