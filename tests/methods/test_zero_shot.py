"""Zero-shot classification: prompts, and scores of single images."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import geoflow_fast as gf
from benchmarks.methods.cli import app
from benchmarks.methods.zero_shot import class_prompts, encode_prompts, tuned_scale, zero_shot
from benchmarks.methods.zero_shot_page import labelled
from geoflow_fast.geometry import normalize
from geoflow_fast.noise import sample_uniform
from tests.evaluation.helpers import DIM, is_picture, labelled_images
from tests.evaluation.test_ties import assert_is_mean, mean_hit
from tests.reliability.arguments import unit


def test_prompts_are_means_over_templates():
    rows = sample_uniform(6, DIM).reshape(3, 2, DIM)
    prompts = class_prompts(rows)
    torch.testing.assert_close(prompts, normalize(rows.sum(1)))
    assert torch.equal(class_prompts([rows[0], rows[1], rows[2, :1]])[2], rows[2, 0])
    asked: list[str] = []

    def encode(texts: list[str]) -> Tensor:
        asked.extend(texts)
        return 3 * rows[len(asked) // 2 - 1]

    torch.testing.assert_close(encode_prompts(encode, ["cat", "dog", "owl"], ["a {}", "the {}."]), prompts)
    assert asked == ["a cat", "the cat.", "a dog", "the dog.", "a owl", "the owl."]


def test_scores_are_those_of_their_definitions(small_flow, pairs):
    image, label, prompts = labelled_images()
    outcome = zero_shot(small_flow, image, label, prompts, scale=20.0, train=pairs, resamples=10)
    cosine = image @ prompts.T
    assert torch.equal(outcome.prediction, cosine.argmax(1))
    assert outcome.accuracy == pytest.approx(float((cosine.argmax(1) == label).double().mean()))
    pi = (20 * cosine.double()).softmax(1)
    best = cosine.topk(2).values.double()
    torch.testing.assert_close(outcome.scores["max_softmax"], 1 - pi.amax(1), atol=1e-5, rtol=0)
    torch.testing.assert_close(outcome.scores["margin"], best[:, 1] - best[:, 0], atol=1e-5, rtol=0)
    torch.testing.assert_close(outcome.scores["softmax_entropy"], torch.special.entr(pi).sum(1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(outcome.scores["sum"], outcome.scores["image"] + outcome.scores["text"])
    assert [part.name for part in outcome.components] == list(outcome.scores)
    for part in outcome.components:
        assert part.numbers["auroc"] == gf.evaluation.auroc(outcome.scores[part.name], outcome.correct)


def test_training_free_scores_need_no_flow():
    outcome = zero_shot(None, *labelled_images(), resamples=0)
    assert list(outcome.scores) == ["max_softmax", "margin", "softmax_entropy"]


def test_scale_has_the_least_loss_on_held_out_images():
    image, label, prompts = labelled_images(1)
    best = tuned_scale(image, label, prompts)
    loss = [
        float(-(s * image @ prompts.T).log_softmax(1).gather(1, label[:, None]).mean())
        for s in (best / 1.4, best, best * 1.4)
    ]
    assert loss[1] == min(loss)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"label": torch.full((80,), 6)}, "row 0 is 6"),
        ({"label": torch.zeros(80)}, "integers"),
        ({"prompts": torch.eye(DIM + 1)}, "one width"),
        ({"image": torch.zeros(80, DIM)}, "row 0"),
    ],
)
def test_bad_input_is_refused(change, message):
    given = dict(zip(("image", "label", "prompts"), labelled_images()))
    with pytest.raises(ValueError, match=message):
        zero_shot(None, **{**given, **change})


def test_prompts_that_cancel_are_refused():
    row = sample_uniform(1, DIM)
    with pytest.raises(ValueError, match="class 0 cancel"):
        class_prompts(torch.stack((row, -row), dim=1))
    with pytest.raises(ValueError, match="no classes"):
        class_prompts([])
    with pytest.raises(ValueError, match="template"):
        encode_prompts(lambda _: row, ["cat"], ["no place"])


def test_accuracy_of_classes_with_one_prompt_is_the_mean_over_their_orders():
    generator = np.random.default_rng(0)
    kind = torch.tensor([0, 0, 1, 2, 2, 2, 3])
    image, label = unit(60, DIM), torch.from_numpy(generator.integers(7, size=60))
    prompts, outcomes = unit(4, DIM, seed=1), []
    for seed in range(3):
        order = torch.from_numpy(np.random.default_rng(seed).permutation(7))
        outcome = zero_shot(None, image, order.argsort()[label], prompts[kind[order]], scale=5.0, resamples=0)
        outcomes.append([outcome.accuracy, *(part.numbers["auroc"] for part in outcome.components)])
    np.testing.assert_allclose(outcomes, outcomes[:1] * 3, rtol=1e-9)
    expected = mean_hit((image @ prompts.T)[:, kind].numpy(), (label[:, None] == torch.arange(7)).numpy(), 1)
    assert_is_mean(outcomes[0][0], expected.mean())


@pytest.fixture
def folders(tmp_path, pairs, small_flow):
    pairs.save(tmp_path / "test")
    small_flow.save_pretrained(tmp_path / "model")
    return tmp_path


def test_the_command_writes_its_components(folders):
    image, label, prompts = labelled_images()
    for name, rows in (("image", image), ("label", label), ("prompts", prompts.unsqueeze(1))):
        np.save(folders / f"{name}.npy", rows.numpy())
    given = [f"--{name}={folders / file}" for name, file in (("model", "model"), ("images", "image.npy"))]
    given += [f"--labels={folders / 'label.npy'}", f"--prompts={folders / 'prompts.npy'}"]
    given += [f"--out={folders / 'zero'}", "--resamples=9", "--json"]
    result = CliRunner().invoke(app, ["zero-shot", *given])
    assert result.exit_code == 0, f"{result.output}\n{result.exception!r}"
    assert [part["name"] for part in json.loads(result.stdout)["components"]][:4] == ["image", "text", "pmi", "sum"]
    assert is_picture(folders / "zero/components.png")
    page = (folders / "zero/report.html").read_text()
    assert "-PMI(image, text)" in page
    opening = page[page.index("Which to doubt</h2>") : page.index("Components</h2>")]
    assert opening.count('<div class="card"') == 2
    assert opening.count('class="interval chosen"') == 1
    assert opening.count("<polyline") == 3
    assert not re.sub(r"<details>.*?</details>", "", page, flags=re.DOTALL).count("<table>")


def test_labels_must_fit_the_images(folders):
    np.save(folders / "label.npy", np.zeros(3, dtype=np.int64))
    with pytest.raises(ValueError, match="3 entries, but there are"):
        labelled(folders / "test/img_emb", folders / "label.npy")
