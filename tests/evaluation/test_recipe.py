"""Recipes and ablations: every file in recipes/ runs from folders to a page, in small; a stopped one goes on."""

from __future__ import annotations

import html
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import geoflow_fast as gf
from geoflow_fast.cli.app import app
from geoflow_fast.evaluation import ablation
from geoflow_fast.evaluation.ablation import ABLATIONS, Setup, Variant
from geoflow_fast.evaluation.compare import Comparison
from geoflow_fast.evaluation.methods import Study
from geoflow_fast.evaluation.recipe import Data, Recipe, labelled_images, load_recipe, run_recipe
from geoflow_fast.evaluation.retrieval import RetrievalSet
from geoflow_fast.worlds import ConceptWorld

ROOT = Path(__file__).parents[2]
RECIPES, CLIP_ART = sorted((ROOT / "recipes").glob("*.toml")), ROOT / "examples" / "openclipart" / "data"
DIM, CLASSES = 8, 5


def pairs(count: int, seed: int) -> gf.EmbeddingPairs:
    generator = torch.Generator().manual_seed(seed)
    image = gf.geometry.sample_uniform(count, DIM, generator=generator)
    return gf.EmbeddingPairs.from_arrays(
        image, gf.geometry.normalize(image + 0.3 * torch.randn(count, DIM, generator=generator))
    )


def write_classes(folder: Path) -> None:
    folder.mkdir(parents=True)
    prompts = gf.geometry.sample_uniform(CLASSES, DIM, generator=torch.Generator().manual_seed(5))
    label = np.arange(40) % CLASSES
    noise = 0.4 * torch.randn(40, DIM, generator=torch.Generator().manual_seed(6))
    np.save(folder / "images.npy", gf.geometry.normalize(prompts[label] + noise).numpy())
    np.save(folder / "labels.npy", label)
    np.save(folder / "prompts.npy", prompts.numpy())


def of_demo_world(part: str, count: int) -> gf.EmbeddingPairs:
    generator = torch.Generator().manual_seed(("flow", "held_out", "test").index(part))
    return gf.EmbeddingPairs.from_arrays(*ConceptWorld(DIM).sample(count, generator=generator)[:2])


def of_clip_art(part: str, count: int) -> gf.EmbeddingPairs:
    return gf.EmbeddingPairs.open(CLIP_ART / part).subset(np.arange(count))


SOURCES = {"demo_world": of_demo_world, "clip_art": of_clip_art}


def make_data(recipe: Recipe, base: Path, source: str) -> None:
    """Small stand-ins for all that a recipe speaks of: pairs; pictures, of which some captions stand for classes."""
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
    words = ["evaluate", "recipe", str(path), "--data", str(tmp_path / "data"), "--out", str(tmp_path / "out"), *SMALL]
    words += ["--only", recipe.data[0].name, "--max-queries", "20"]
    if recipe.methods is not None:  # baselines that train have tests of their own
        words += ["--methods", "entropy,rerank,margin"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, f"{result.output}\n{result.exception!r}"
    page = html.unescape((tmp_path / "out" / "report.html").read_text())
    assert recipe.title in page
    assert "data:image/png;base64" in page


def test_the_recipes_are_those_of_the_paper_and_of_every_ablation():
    known = {path.stem for path in RECIPES}
    assert {"calibration", "selective", "backbone"} <= known
    assert {load_recipe(path).ablation for path in RECIPES} - {None} == set(ABLATIONS)


@pytest.fixture
def setup() -> Setup:
    run = gf.TrainConfig(steps=2, batch_size=32, lr=1e-3, val_every=2)
    return Setup(pairs(200, 0), pairs(120, 1), gf.GeoFlowConfig(DIM, DIM, hidden=16, depth=1), run, seeds=(0, 1))


def test_fixed_settings_are_used_and_others_tuned(setup, tmp_path):
    flow, _ = setup.flow(tmp_path, 0)
    study = Study(setup.val, flow=flow)
    task = RetrievalSet.of(pairs(30, 3), "t2i")
    for settings in ({"kappa": 7.0, "guidance": 2.0}, {"guidance": 2.0}):
        method = Variant("x", ablation.entropy_with(**settings)).method(study)
        method.fit(task)
        for name, value in settings.items():
            found = method.scorer.kappa if name == "kappa" else method.scorer.sampling.guidance
            assert found == pytest.approx(value)


def test_a_stopped_ablation_goes_on(setup, tmp_path, monkeypatch):
    made = [Variant(f"kappa {x:g}", ablation.entropy_with(kappa=x, guidance=0.0)) for x in (5.0, 20.0)]
    chosen = ablation.Ablation("Two widths", "kappa", made)
    whole = ablation.ablate(setup, pairs(40, 2), chosen, tmp_path / "whole")
    plain, calls = ablation.compare, []

    def stops(*arguments, **options):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return plain(*arguments, **options)

    monkeypatch.setattr(ablation, "compare", stops)
    with pytest.raises(KeyboardInterrupt):
        ablation.ablate(setup, pairs(40, 2), chosen, tmp_path / "stopped")
    monkeypatch.setattr(ablation, "compare", plain)
    again = ablation.ablate(setup, pairs(40, 2), chosen, tmp_path / "stopped")
    for one, two in zip(whole.results, again.results):
        assert one.numbers["auroc"] == two.numbers["auroc"]
        assert one.runs == 2


@pytest.mark.slow
def test_geometry_trains_a_twin_of_its_own(setup, tmp_path):
    chosen = ablation.find("geometry")
    found = ablation.ablate(setup, pairs(40, 2), chosen, tmp_path)
    assert [result.title for result in found.of("t2i")] == [variant.label for variant in chosen.variants]
    assert len(list((tmp_path / ablation.FLOWS_FOLDER).iterdir())) == 2 * len(setup.seeds)
    shapes = {gf.GeoFlow.from_pretrained(x).config.geometry for x in (tmp_path / ablation.FLOWS_FOLDER).iterdir()}
    assert shapes == {"sphere", "euclidean"}
    page = ablation.write_ablation(chosen, found, tmp_path, "noise")
    assert page.is_file()
    loaded = Comparison.load(tmp_path)
    assert all(math.isfinite(result.numbers["auroc"]) for result in loaded.results)


def test_zero_shot_ablation_compares_settings_of_the_density(setup, tmp_path):
    write_classes(tmp_path / "classes")
    part = Data("classes", "-", "-", images="images.npy", labels="labels.npy", prompts="prompts.npy")
    recipe = Recipe("Steps", [part], ablation="steps")
    found = ablation.ablate_zero_shot(
        setup, labelled_images(part, tmp_path / "classes"), ablation.find("steps"), tmp_path
    )
    assert set(found) == {variant.label for variant in ablation.find(str(recipe.ablation)).variants}
    assert all(len(values) == 2 and all(0 <= x <= 1 for x in values) for values in found.values())
    with pytest.raises(ValueError, match="guidance is about retrieval"):
        ablation.ablate_zero_shot(setup, (None, None, None), ablation.find("guidance"), tmp_path)


BASE = 'title = "x"\npreset = "tiny"\n'
SET = '[[data]]\nname = "a"\ntrain = "t"\nheld_out = "v"\ntest = "x"\n'


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (BASE, "at least one data set"),
        (BASE + SET + SET, "names of their own"),
        (BASE + "colour = 1\n" + SET, "unknown keys .*colour"),
        (BASE + SET + "colour = 1\n", "unknown keys .*colour"),
        (BASE + 'methods = ["magic"]\n' + SET, "magic"),
        (BASE + 'ablation = "magic"\n' + SET, "magic"),
        (BASE + 'ablation = "steps"\nmethods = ["entropy"]\n' + SET, "leave methods out"),
        (BASE + SET.replace('test = "x"\n', 'images = "x"\n'), "either test, or images"),
        (BASE + SET + 'images = "x"\nlabels = "y"\nprompts = "z"\n', "either test, or images"),
        (BASE + SET.replace('"t"', "3"), "must be a string"),
        (BASE + SET.replace('"a"', '"a, b"'), "'a, b' must be without comma and slash"),
        ("title =", "not a TOML file"),
    ],
)
def test_bad_recipes_name_the_file_and_the_key(text, word, tmp_path):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=word) as error:
        load_recipe(path)
    assert str(path) in str(error.value)


def test_missing_folders_are_named_before_any_work(tmp_path):
    recipe = Recipe("x", [Data("a", "train", "val", test="test")], methods=["margin"], preset="tiny")
    with pytest.raises(FileNotFoundError, match="train does not exist"):
        run_recipe(recipe, tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_backbones_side_by_side(tmp_path):
    for name, seed in (("clip", 0), ("siglip", 10)):
        for part, count in (("train", 200), ("val", 120), ("test", 60)):
            pairs(count, seed).save(tmp_path / name / part)
            seed += 1
    out = tmp_path / "out"
    words = ["evaluate", "backbone", str(tmp_path / "clip"), str(tmp_path / "siglip"), "--out", str(out), *SMALL]
    result = CliRunner().invoke(app, [*words, "--methods", "max_softmax,margin"])
    assert result.exit_code == 0, f"{result.output}\n{result.exception!r}"
    for name in ("clip", "siglip"):
        assert len(json.loads((out / name / "results.json").read_text())["results"]) == 4
