"""Which methods are compared, under which names and in which colours."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from benchmarks.methods import figures, registry
from benchmarks.methods.baseline_methods import BaselineStudy
from benchmarks.methods.cli import app, with_command
from geoflow_fast.evaluation import registry as installed
from geoflow_fast.evaluation.figures import Series, style_of
from geoflow_fast.evaluation.methods import Study
from tests.evaluation.helpers import is_picture, planted_pairs


def test_long_training_only_by_name_or_all(pairs, held_out, small_flow):
    study = Study(held_out, pairs, small_flow)
    usual, every = registry.default_methods(study), registry.default_methods(study, every=True)
    assert {"rerank", "ladder", "margin", "hub_softmax", "list_boosting", "knn"} <= set(usual)
    trained = {"adapter", "probvlm", "asymvlm_vmf", "asymvlm_ps", "grove", "repvlm", "mc_dropout", "euclidean_flow"}
    assert set(every) - set(usual) == trained
    every.remove("grove")  # these pairs are too narrow for it
    costs = {name: registry.create(name, study).operations(100) for name in every}
    assert all(costs[name] > 0 for name in {*trained, "rerank", "entropy", "epistemic"} - {"grove"})
    assert [name for name in usual if not costs[name]] == [
        "ladder", "max_softmax", "margin", "softmax_entropy", "knn", "hub_softmax", "list_logistic", "list_boosting"
    ]  # fmt: skip


def test_all_asks_for_every_method(held_out, monkeypatch):
    asked = []
    monkeypatch.setattr(registry, "default_methods", lambda _, *, every: asked.append(every) or ["margin"])
    registry.chosen(("all",), Study(held_out))
    registry.chosen(None, Study(held_out))
    assert asked == [True, False]


def test_what_a_study_lacks_is_named(held_out):
    assert registry.default_methods(Study(held_out))[-1] == "hub_softmax"
    for name, message in (("probvlm", "training pairs"), ("none", "must be one of")):
        with pytest.raises(ValueError, match=message):
            registry.create(name, Study(held_out))


def test_settings_of_the_baselines_are_those_of_the_study(tmp_path):
    study = Study(planted_pairs(20, 0), planted_pairs(30, 1), seed=3)
    (method,) = registry.chosen(["probvlm"], study, registry.run_configs(study.val, {"steps": 7}), tmp_path)
    assert isinstance(method.study, BaselineStudy)
    assert (method.study.folder, method.study.seed) == (tmp_path, 3)
    run = method.facts()["run"]
    assert (run["steps"], run["seed"]) == (7, 3)


def test_a_method_looks_the_same_everywhere():
    names = registry.all_methods()
    assert len(names) == len(set(names)) == len(installed.METHODS) + 12
    styles = [style_of(name) for name in names]
    assert styles == [style_of(name) for name in names]
    others = [style["color"] for name, style in zip(names, styles) if name not in installed.FLOW_METHODS]
    assert len(set(others)) == len(others)


def test_figures_of_a_setting(tmp_path):
    curves = {title: {"a": Series([1, 2, 3], [0.1, 0.1, 0.1]), "b": Series([3, 2, 1])} for title in "xy"}
    options = {"xlabel": "steps", "ylabel": "AUROC", "log_x": True}
    assert is_picture(figures.draw_ablation(curves, [1, 10, 100], tmp_path / "ablation.png", **options))


def test_names_of_methods_are_trained_and_scored(tmp_path):
    """Without a command the first argument names methods; finished runs and scores are kept."""
    for seed, (name, count) in enumerate({"train": 120, "val": 90, "test": 60}.items()):
        planted_pairs(count, seed).save(tmp_path / name)
    words = ["mc_dropout,hub_softmax,margin", "--steps", "3", "--batch-size", "16", "--resamples", "0", "--json"]
    words += [f"--{flag}={tmp_path / part}" for flag, part in (("train", "train"), ("held-out", "val"))]
    words += [f"--pairs={tmp_path / 'test'}", f"--out={tmp_path / 'out'}"]
    result = CliRunner().invoke(app, with_command(words))
    assert result.exit_code == 0, f"{result.output}\n{result.exception!r}"
    results = json.loads((tmp_path / "out/results.json").read_text())["results"]
    assert [one["method"] for one in results] == ["mc_dropout", "hub_softmax", "margin"] * 2
    assert (tmp_path / "out/runs/mc_dropout/model.safetensors").is_file()
    for known in (["study", "watch"], ["zero-shot", "--help"], ["--help"], []):
        assert with_command(known) == known
