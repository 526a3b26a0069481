"""Recipes: every file runs from folders to a page, in small; a bad one is refused by name and key."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import geoflow_fast as gf
from benchmarks.methods import recipe as module
from benchmarks.methods import registry
from benchmarks.methods.ablation import ABLATIONS
from benchmarks.methods.cli import app
from benchmarks.methods.recipe import Recipe, RecipeData, load_recipe, run_recipe
from geoflow_fast.flow.config import MANY_CORES
from geoflow_fast.worlds import ConceptWorld
from tests.evaluation.helpers import DIM, noisy_pairs, planted_pairs

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "benchmarks/methods/recipes").glob("*.toml"))
CLIP_ART = ROOT / "examples" / "openclipart" / "data"
CLASSES = 5


def of_demo_world(part: str, count: int) -> gf.EmbeddingPairs:
    generator = torch.Generator().manual_seed(("flow", "held_out", "test").index(part))
    return gf.EmbeddingPairs.from_arrays(*ConceptWorld(DIM).sample(count, generator=generator)[:2])


def of_clip_art(part: str, count: int) -> gf.EmbeddingPairs:
    return gf.EmbeddingPairs.open(CLIP_ART / part).subset(np.arange(count))


SOURCES = {"demo_world": of_demo_world, "clip_art": of_clip_art}


def make_data(recipe: Recipe, base: Path, source: str) -> None:
    """Writes small stand-ins for all folders and files of a recipe. Captions of a few images serve as class prompts."""
    draw = SOURCES[source]
    sizes = {"flow": 200, "held_out": 240 if recipe.methods else 40, "test": 60}  # the re-ranker needs 50 images
    for part in recipe.data:
        for name, (kind, count) in zip((part.train, part.held_out, part.test), sizes.items()):
            if name is not None and not (base / name).exists():
                draw(kind, count).save(base / name)
        if part.images is not None:
            folder = (base / part.images).parent
            folder.mkdir(parents=True)
            image, text = draw("test", 40)[np.arange(40)]
            np.save(folder / "images.npy", image.numpy())
            np.save(folder / "prompts.npy", text[:CLASSES].numpy())
            np.save(folder / "labels.npy", np.arange(40) % CLASSES)


SMALL = ["--preset", "tiny", "--seeds", "1", "--steps", "2", "--batch-size", "32", "--device", "cpu"]


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("path", RECIPES, ids=[path.stem for path in RECIPES])
def test_every_recipe_runs_in_small(path, source, tmp_path):
    recipe = load_recipe(path)
    make_data(recipe, tmp_path / "data", source)
    words = ["recipe", str(path), "--data", str(tmp_path / "data"), "--out", str(tmp_path / "out"), *SMALL]
    words += ["--only", recipe.data[0].name, "--max-queries", "20"]
    if recipe.methods is not None:  # baselines that train have tests of their own
        words += ["--methods", "entropy,rerank,margin"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, f"{result.output}\n{result.exception!r}"
    page = html.unescape((tmp_path / "out" / "report.html").read_text())
    assert recipe.title in page
    assert "data:image/png;base64" in page
    assert page.index('<div class="card"') < page.index("<img ")
    assert not re.sub(r"<details>.*?</details>", "", page, flags=re.DOTALL).count("<table>")


def test_the_recipes_are_those_of_the_paper_and_of_every_ablation():
    known = {path.stem for path in RECIPES}
    assert {"calibration", "selective", "backbone"} <= known
    assert {load_recipe(path).ablation for path in RECIPES} - {None} == set(ABLATIONS)


BASE = 'title = "x"\npreset = "tiny"\n'
SET = '[[data]]\nname = "a"\ntrain = "t"\nheld_out = "v"\ntest = "x"\n'


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (BASE, "at least one data set"),
        (BASE + SET + SET, "different names"),
        (BASE + "colour = 1\n" + SET, "unknown keys .*colour"),
        (BASE + SET + "colour = 1\n", "unknown keys .*colour"),
        (BASE + 'methods = ["magic"]\n' + SET, "magic"),
        (BASE + 'ablation = "magic"\n' + SET, "magic"),
        (BASE + 'ablation = "steps"\nmethods = ["entropy"]\n' + SET, "leave methods out"),
        (BASE + SET.replace('test = "x"\n', 'images = "x"\n'), "either test, or images"),
        (BASE + SET + 'images = "x"\nlabels = "y"\nprompts = "z"\n', "either test, or images"),
        (BASE + SET.replace('"t"', "3"), "must be a string"),
        (BASE + SET.replace('"a"', '"a, b"'), "'a, b' must not have a comma or slash"),
        ("title =", "not a TOML file"),
    ],
)
def test_bad_recipes_name_the_file_and_the_key(text, word, tmp_path):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=word) as error:
        load_recipe(path)
    assert str(path) in str(error.value)


def test_auto_counts_a_gpu_as_many_cores(tmp_path, monkeypatch):
    """So a recipe trains the flow that `geoflow train` trains."""
    recipe = Recipe("x", [RecipeData("a", train="t", held_out="v", test="x")], preset="auto")
    for name in ("t", "v"):
        noisy_pairs(100, 0).save(tmp_path / name)
    asked = []
    monkeypatch.setattr(module, "usable_device", torch.device)
    settings = module.preset_settings
    monkeypatch.setattr(
        module, "preset_settings", lambda *a, cores, **k: asked.append(cores) or settings(*a, cores=cores, **k)
    )
    for device in ("cpu", "cuda"):
        recipe.training(recipe.data[0], tmp_path, device)
    assert asked == [None, MANY_CORES]


def test_missing_folders_are_named_before_any_work(tmp_path):
    recipe = Recipe("x", [RecipeData("a", "train", "val", test="test")], methods=["margin"], preset="tiny")
    with pytest.raises(FileNotFoundError, match="train does not exist"):
        run_recipe(recipe, tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_changed_runs_begin_with_the_same_weights(tmp_path, monkeypatch):
    """A flow's seed decides the initial weights of the baselines, whether or not the recipe changes their runs."""
    for seed, (name, count) in enumerate({"t": 120, "v": 90, "x": 60}.items()):
        planted_pairs(count, seed).save(tmp_path / name)
    part, made, chosen = RecipeData("a", train="t", held_out="v", test="x"), [], registry.chosen

    def kept(names, study, *settings):
        made.extend(chosen(["adapter", "probvlm", "mc_dropout"], study, *settings))
        return chosen(names, study)

    monkeypatch.setattr(registry, "chosen", kept)
    usual = Recipe("x", [part], ["margin"], seeds=(0, 1), preset="tiny", flow={"steps": 2, "batch_size": 32})
    for name, recipe in {"usual": usual, "changed": usual.changed(baselines={"steps": 3})}.items():
        run_recipe(recipe, tmp_path, tmp_path / name, device="cpu")
    assert [method.facts()["run"]["steps"] == 3 for method in made] == [False] * 6 + [True] * 6
    for method, changed in zip(made[:6], made[6:]):
        torch.testing.assert_close(
            dict(changed.baseline.named_parameters()), dict(method.baseline.named_parameters()), rtol=0, atol=0
        )


def test_backbones_side_by_side(tmp_path):
    for name, seed in (("clip", 0), ("siglip", 10)):
        for part, count in (("train", 200), ("val", 120), ("test", 60)):
            noisy_pairs(count, seed).save(tmp_path / name / part)
            seed += 1
    out = tmp_path / "out"
    words = ["backbone", str(tmp_path / "clip"), str(tmp_path / "siglip"), "--out", str(out), *SMALL]
    result = CliRunner().invoke(app, [*words, "--methods", "max_softmax,margin"])
    assert result.exit_code == 0, f"{result.output}\n{result.exception!r}"
    for name in ("clip", "siglip"):
        assert len(json.loads((out / name / "results.json").read_text())["results"]) == 4
