"""Ablations: each value is trained or tuned as it says, and a stopped ablation continues."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import geoflow_fast as gf
from benchmarks.methods import ablation
from benchmarks.methods.ablation import FlowTraining, Variant
from benchmarks.methods.recipe import Recipe, RecipeData
from geoflow_fast.evaluation.methods import Study
from geoflow_fast.evaluation.results import Comparison
from geoflow_fast.geometry import normalize
from geoflow_fast.noise import sample_uniform
from geoflow_fast.retrieval.task import RetrievalTask
from geoflow_fast.runtime.files import read_json
from tests.evaluation.helpers import DIM, noisy_pairs

CLASSES = 5


def write_classes(folder: Path) -> None:
    folder.mkdir(parents=True)
    prompts = sample_uniform(CLASSES, DIM, generator=torch.Generator().manual_seed(5))
    label = np.arange(40) % CLASSES
    noise = 0.4 * torch.randn(40, DIM, generator=torch.Generator().manual_seed(6))
    np.save(folder / "images.npy", normalize(prompts[label] + noise).numpy())
    np.save(folder / "labels.npy", label)
    np.save(folder / "prompts.npy", prompts.numpy())


@pytest.fixture
def training() -> FlowTraining:
    run = gf.TrainConfig(steps=2, batch_size=32, lr=1e-3, val_every=2)
    return FlowTraining(
        noisy_pairs(200, 0), noisy_pairs(120, 1), gf.GeoFlowConfig(DIM, DIM, hidden=16, depth=1), run, seeds=(0, 1)
    )


def test_fixed_settings_are_used_and_others_tuned(training, tmp_path):
    flow, _ = training.flow(tmp_path, 0)
    study = Study(training.val, flow=flow)
    task = RetrievalTask.of(noisy_pairs(30, 3), "t2i")
    for settings in ({"kappa": 7.0, "guidance": 2.0}, {"guidance": 2.0}):
        method = Variant("x", ablation.entropy_with(**settings)).method(study)
        method.fit(task)
        for name, value in settings.items():
            used = method.scorer.kappa if name == "kappa" else method.scorer.sampling.guidance
            assert used == pytest.approx(value)


def test_a_stopped_ablation_continues(training, tmp_path, monkeypatch):
    variants = [Variant(f"kappa {x:g}", ablation.entropy_with(kappa=x, guidance=0.0)) for x in (5.0, 20.0)]
    chosen = ablation.Ablation("Two widths", "kappa", variants)
    whole = ablation.ablate(training, noisy_pairs(40, 2), chosen, tmp_path / "whole")
    plain, calls = ablation.compare, []

    def stops(*arguments, **options):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return plain(*arguments, **options)

    monkeypatch.setattr(ablation, "compare", stops)
    with pytest.raises(KeyboardInterrupt):
        ablation.ablate(training, noisy_pairs(40, 2), chosen, tmp_path / "stopped")
    monkeypatch.setattr(ablation, "compare", plain)
    again = ablation.ablate(training, noisy_pairs(40, 2), chosen, tmp_path / "stopped")
    for one, two in zip(whole.results, again.results):
        assert one.numbers["auroc"] == two.numbers["auroc"]
        assert one.runs == 2


@pytest.mark.slow
def test_geometry_trains_a_twin_of_its_own(training, tmp_path):
    chosen = ablation.find("geometry")
    comparison = ablation.ablate(training, noisy_pairs(40, 2), chosen, tmp_path)
    assert [result.title for result in comparison.of("t2i")] == [variant.label for variant in chosen.variants]
    assert len(list((tmp_path / ablation.FLOWS_FOLDER).iterdir())) == 2 * len(training.seeds)
    shapes = [read_json(x / "config.json") for x in (tmp_path / ablation.FLOWS_FOLDER).iterdir()]
    assert {shape.get("geometry", "sphere") for shape in shapes} == {"sphere", "euclidean"}
    page = ablation.write_ablation(chosen, comparison, tmp_path, "noise")
    written = page.read_text()
    assert written.index('<div class="card"') < written.index("<img ")
    assert not re.sub(r"<details>.*?</details>", "", written, flags=re.DOTALL).count("<table>")
    assert written.count("<table>") == len(comparison.directions)
    loaded = Comparison.load(tmp_path)
    assert all(math.isfinite(result.numbers["auroc"]) for result in loaded.results)


def test_zero_shot_ablation_compares_settings_of_the_density(training, tmp_path):
    write_classes(tmp_path / "classes")
    part = RecipeData("classes", "-", "-", images="images.npy", labels="labels.npy", prompts="prompts.npy")
    recipe = Recipe("Steps", [part], ablation="steps")
    images = part.labelled_images(tmp_path / "classes")
    ausac = ablation.ablate_zero_shot(training, images, ablation.find("steps"), tmp_path)
    assert set(ausac) == {variant.label for variant in ablation.find(str(recipe.ablation)).variants}
    assert all(len(values) == 2 and all(0 <= x <= 1 for x in values) for values in ausac.values())
    with pytest.raises(ValueError, match="guidance is about retrieval"):
        ablation.ablate_zero_shot(training, (None, None, None), ablation.find("guidance"), tmp_path)
