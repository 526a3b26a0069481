"""Every code block of the README and of docs/ runs, and every command in them is one that exists."""

from __future__ import annotations

import dataclasses
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import geoflow_fast as gf
from geoflow_fast.cli import app

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
# What makes a documented command small; the last of two equal flags wins.
SMALLER = {
    "train": "--steps 2 --batch-size 32 --preset tiny --device cpu",
    "entropy": "--samples 4 --steps 2",
    "density": "--steps 2",
    "rerank": "--steps 2 --shortlist 8",
    "evaluate": "--methods margin,max_softmax --resamples 9",
}


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the pages speak of: embeddings, held-out pairs, queries, a gallery, photos, a trained
    flow."""
    folder = tmp_path_factory.mktemp("desk")
    image, text = (gf.geometry.sample_uniform(400, 16, generator=torch.Generator().manual_seed(s)) for s in (0, 1))
    text = gf.geometry.normalize(image + 0.1 * text)
    for name, rows in (
        ("embeddings", slice(0, 300)),
        ("held_out", slice(300, 400)),
        ("val", slice(300, 400)),
        ("test", slice(0, 60)),
    ):
        gf.EmbeddingPairs.from_arrays(image[rows], text[rows]).save(folder / name)
    np.save(folder / "texts.npy", text[:64].numpy())
    np.save(folder / "images.npy", image[:64].numpy())
    (folder / "img_emb").mkdir()
    np.save(folder / "img_emb/img_emb_0.npy", image[:64].numpy())
    (folder / "photos").mkdir()
    for colour in ("red", "green", "blue"):
        Image.new("RGB", (40, 30), colour).save(folder / f"photos/{colour}.jpg")
        (folder / f"photos/{colour}.txt").write_text(f"something {colour}")
    torch.manual_seed(0)
    gf.GeoFlow(gf.GeoFlowConfig(16, 16, hidden=16, depth=1)).save_pretrained(folder / "runs/first")
    return folder


@pytest.fixture
def page_names(desk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Names that pages take for granted, in a process that stands in a copy of `desk`."""
    shutil.copytree(desk, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    small = gf.TrainConfig.tiny()
    monkeypatch.setattr(gf.TrainConfig, "small", lambda: dataclasses.replace(small, steps=2, batch_size=32))
    # Large weights, which cannot be had here: the flags are read, and another encoder does the work.
    monkeypatch.setattr(gf.OpenClipEncoder, "load", lambda *_, **__: gf.ColourEncoder())
    return {
        "gf": gf,
        "flow": gf.GeoFlow.from_pretrained("runs/first"),
        "pairs": gf.EmbeddingPairs.open("embeddings"),
        "image": torch.from_numpy(np.load("img_emb/img_emb_0.npy")),
        "text": torch.from_numpy(np.load("texts.npy")).repeat(20, 1)[:64],
        "images": torch.from_numpy(np.load("img_emb/img_emb_0.npy")),
        "texts": torch.from_numpy(np.load("texts.npy")),
        "held_out_pairs": gf.EmbeddingPairs.open("held_out"),
    }


def blocks(page: Path, *languages: str) -> list[str]:
    return [code for language, code in BLOCK.findall(page.read_text()) if language in languages]


def commands(page: Path) -> list[str]:
    """Lines of unmarked and shell blocks, continued ones joined, without comments."""
    text = "\n".join(blocks(page, "", "sh", "bash", "console")).replace("\\\n", " ")
    return [line.split("  #")[0].strip() for line in text.splitlines() if line.strip()]


def ids(pages: list[Path]) -> list[str]:
    return [page.stem for page in pages]


WITH_PYTHON = [page for page in PAGES if blocks(page, "python")]


@pytest.mark.parametrize("page", WITH_PYTHON, ids=ids(WITH_PYTHON))
def test_python_blocks_run_in_order(page, page_names):
    for number, block in enumerate(blocks(page, "python")):
        exec(compile(block, f"{page.name}, block {number}", "exec"), page_names)


WITH_COMMANDS = [page for page in PAGES if any(line.startswith("geoflow ") for line in commands(page))]


@pytest.mark.usefixtures("page_names")
@pytest.mark.parametrize("page", WITH_COMMANDS, ids=ids(WITH_COMMANDS))
def test_geoflow_commands_run(page):
    for line in commands(page):
        if line.startswith("geoflow "):
            words = shlex.split(line)[1:]
            result = CliRunner().invoke(app, [*words, *shlex.split(SMALLER.get(words[0], ""))])
            assert result.exit_code == 0, f"{line}\n{result.output}\n{result.exception!r}"


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    named = {word for page in PAGES for word in re.findall(r"`?make ([a-z][a-z-]+)", "\n".join(commands(page)))}
    assert {"demo", "test"} <= named
    assert [target for target in sorted(named) if not re.search(rf"^{target}:", makefile, re.MULTILINE)] == []


def test_first_screen_of_the_readme_shows_the_two_commands():
    first_screen = PAGES[0].read_text().splitlines()[:40]
    assert any(line.startswith("make demo") for line in first_screen)
    assert any(line.startswith("make test") for line in first_screen)
