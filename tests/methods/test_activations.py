"""The inputs of an encoder's last projections, written beside its embeddings."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import geoflow_fast as gf
from benchmarks.methods import baselines
from benchmarks.methods.activations import write_activations
from benchmarks.methods.cli import app
from geoflow_fast.encoders.open_clip import OpenClipEncoder
from tests.encoders import tiny_clip

COUNT, BROKEN = 11, (0, 4)


@pytest.fixture
def world(tmp_path, _torchvision_operators) -> Path:
    """Photos of which two cannot be read, their captions, a tiny model, and the embeddings of the photos by it."""
    tiny_clip.save_model(tmp_path / "model")
    (tmp_path / "photos").mkdir()
    rng = np.random.default_rng(0)
    for number in range(COUNT):
        path = tmp_path / f"photos/{number:02d}.png"
        Image.fromarray(rng.integers(0, 255, (40, 40, 3), dtype=np.uint8)).save(path)
        if number in BROKEN:
            path.write_bytes(b"broken")
        path.with_suffix(".txt").write_text(f"picture {number}\nthe same, {number}\n")
    gf.embed_images(tmp_path / "photos", encoder(tmp_path), tmp_path / "out", shard_rows=4, batch_size=3, workers=1)
    return tmp_path


def encoder(folder: Path) -> OpenClipEncoder:
    return OpenClipEncoder.load(f"local-dir:{folder / 'model'}", device="cpu")


def test_they_give_the_embeddings_row_by_row(world):
    words = ["activations", f"--images={world / 'photos'}", f"--embedded={world / 'out'}", "--batch-size=4"]
    result = CliRunner().invoke(app, [*words, f"--model=local-dir:{world / 'model'}", "--device=cpu"])
    assert result.exit_code == 0, f"{result.output}\n{result.exception!r}"
    pairs, found = gf.EmbeddingPairs.open(world / "out"), baselines.Activations.open(world / "out")
    known, weights = (pairs.image, pairs.text), found.projections
    for tower, rows, embedded in zip(("image", "text"), (found.image, found.text), known):
        phi = torch.from_numpy(rows[np.arange(len(rows))])
        assert len(phi) == len(embedded) == (COUNT - len(BROKEN)) * (1 if tower == "image" else 2)
        projected = torch.nn.functional.normalize(phi @ weights[f"{tower}.weight"].T)
        expected = torch.from_numpy(embedded[np.arange(len(embedded))])
        torch.testing.assert_close(projected, expected, rtol=1e-4, atol=1e-5)
    fitted = baselines.BayesVLM(pairs.image_dim, pairs.text_dim).set_activations(world / "out")
    fitted.fit(pairs, pairs)
    assert fitted.fitted


def test_an_image_that_is_gone_is_named(world):
    (world / "photos/07.png").unlink()
    with pytest.raises(ValueError, match=r"has no image 07\.png"):
        write_activations(encoder(world), world / "photos", world / "out")


def test_a_folder_without_tables_is_refused(world):
    with pytest.raises(FileNotFoundError, match="holds no tables"):
        write_activations(encoder(world), world / "photos", world / "photos")
