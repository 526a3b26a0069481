"""Retrieval with several captions per image, comparisons, zero-shot classification, figures and `geoflow evaluate`."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import geoflow_fast as gf
from geoflow_fast.cli.app import app
from geoflow_fast.evaluation import figures, job, methods
from geoflow_fast.evaluation.compare import Comparison, aggregate, compare
from geoflow_fast.evaluation.methods import Scores, Study, posterior_scores
from geoflow_fast.evaluation.retrieval import RetrievalSet, plain_search, recall_at
from geoflow_fast.evaluation.zero_shot import class_prompts, encode_prompts, tuned_scale, zero_shot
from geoflow_fast.geometry import normalize
from geoflow_fast.noise import sample_uniform
from geoflow_fast.retrieval.gallery import Gallery
from geoflow_fast.runtime import parquet

DIM = 8


def captioned(images: int, captions: int, seed: int, noise: float = 0.5) -> gf.EmbeddingPairs:
    """Images with several captions each, in shuffled order, and one image without any."""
    generator = torch.Generator().manual_seed(seed)
    image = sample_uniform(images + 1, DIM, generator=generator)
    index = torch.arange(images).repeat(captions)[torch.randperm(images * captions, generator=generator)]
    vague = noise * torch.rand(images, 1, generator=generator)[index]
    text = normalize(image[index] + vague * torch.randn(len(index), DIM, generator=generator))
    return gf.EmbeddingPairs.from_arrays(image, text, index)


@pytest.fixture(scope="module")
def pairs() -> gf.EmbeddingPairs:
    return captioned(40, 3, 0)


@pytest.fixture(scope="module")
def held_out() -> gf.EmbeddingPairs:
    return captioned(90, 3, 1)


@pytest.fixture(scope="module")
def small_flow() -> gf.GeoFlow:
    torch.manual_seed(1)
    flow = gf.GeoFlow(gf.GeoFlowConfig(DIM, DIM, hidden=16, depth=1, layer_scale=0.5))
    with torch.no_grad():
        for parameter in flow.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return flow.eval()


@pytest.mark.parametrize("direction", ["t2i", "i2t"])
@pytest.mark.parametrize("k", [1, 5])
def test_recall_against_all_cosines(pairs, direction, k):
    image, text = pairs.image[np.arange(40)], pairs.text[np.arange(120)]
    cosine = text @ image.T if direction == "t2i" else image @ text.T
    right = pairs.image_row[:, None] == np.arange(40)
    right = right if direction == "t2i" else right.T
    best = np.argsort(-cosine, axis=1)[:, :k]
    expected = np.take_along_axis(right, best, axis=1).any(1).mean()
    assert recall_at(pairs, direction, (k,)) == {k: pytest.approx(expected)}
    task = RetrievalSet.of(pairs, direction)
    answers = plain_search(task, k)
    assert np.array_equal(answers.index.numpy(), best)
    for query, own in enumerate(task.own):
        assert set(own[own >= 0].tolist()) == set(np.flatnonzero(right[query]))


def test_images_stored_once_per_text_are_one_item():
    """As clip-retrieval stores them: rows repeat, and the group says which are of one image."""
    once = captioned(20, 3, 3)
    again = gf.EmbeddingPairs.from_arrays(once.image[once.image_row], once.text[np.arange(60)])
    again.group = once.group
    for way, items in (("t2i", 20), ("i2t", 60)):
        assert len(RetrievalSet.of(again, way).items) == items
        assert recall_at(again, way) == recall_at(once, way)


def test_queries_are_drawn_by_the_seed(pairs):
    few = [RetrievalSet.of(pairs, "t2i", max_queries=7, seed=seed) for seed in (0, 0, 1)]
    assert len(few[0]) == 7
    assert len(few[0].items) == 40
    assert torch.equal(few[0].queries, few[1].queries)
    assert not torch.equal(few[0].queries, few[2].queries)


@pytest.mark.parametrize("bias", [None, torch.linspace(-1, 1, 40)])
def test_scores_of_a_posterior_against_the_dense_softmax(pairs, bias):
    task = RetrievalSet.of(pairs, "t2i")
    samples = normalize(task.queries.unsqueeze(1) + 0.3 * torch.randn(120, 4, DIM))
    score = (9 * (samples.double() @ task.items.double().T)).logsumexp(1) - math.log(4)
    pi = (score if bias is None else score + bias).softmax(1)
    answers = plain_search(task).index[:, 0]
    found = posterior_scores(samples, Gallery(task.items), 9.0, task.own, answers, 1.5, bias)
    own = pi.gather(1, task.own).squeeze(1)
    torch.testing.assert_close(found.uncertainty, torch.special.entr(pi).sum(1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.nll, -own.log(), atol=1e-5, rtol=1e-5)
    expected = (1.5 * pi.gather(1, answers[:, None]).squeeze(1)).clamp(max=1)
    torch.testing.assert_close(found.p_answer, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(found.top, pi.argmax(1))


def test_several_right_items_share_the_likelihood(pairs):
    task = RetrievalSet.of(pairs, "i2t")
    pi = (5 * task.queries.double() @ task.items.double().T).log_softmax(1)
    found = posterior_scores(task.queries.unsqueeze(1), Gallery(task.items), 5.0, task.own, task.own[:, 0], 3.0)
    torch.testing.assert_close(found.nll, -pi.gather(1, task.own).mean(1), atol=1e-5, rtol=1e-5)


class TestComparison:
    REFERENCES = ("max_softmax", "margin", "softmax_entropy")

    def test_numbers_are_those_of_the_metrics(self, pairs, held_out):
        study = Study(held_out)
        found = compare(study, pairs, self.REFERENCES, resamples=20)
        assert [(r.method, r.direction) for r in found.results] == [
            (name, way) for way in ("t2i", "i2t") for name in self.REFERENCES
        ]
        method = methods.create("max_softmax", study)
        task = RetrievalSet.of(pairs, "i2t")
        method.fit(task)
        answers = plain_search(task)
        scores = method.score(slice(None), answers.index[:, 0])
        result = found.of("i2t")[0]
        assert result.numbers["auroc"] == gf.evaluation.auroc(scores.uncertainty, answers.correct)
        assert result.numbers["aurc"] == gf.evaluation.aurc(scores.uncertainty, answers.correct)
        assert result.numbers["nll"] == pytest.approx(float(scores.nll.mean()))
        assert result.numbers["ece"] == gf.evaluation.reliability(scores.p_answer, answers.correct).ece
        assert result.plain_recall == result.numbers["recall"] == answers.recall(1)
        assert math.isnan(found.of("i2t")[1].numbers["nll"])  # the margin states no probabilities
        low, high = result.intervals["auroc"]
        assert low <= result.numbers["auroc"] <= high

    def test_results_come_back_from_disk(self, pairs, held_out, tmp_path):
        found = compare(Study(held_out), pairs, ("margin", "softmax_entropy"), resamples=10)
        found.save(tmp_path)
        assert str(Comparison.load(tmp_path)) == str(found)  # NaN is not equal to itself
        json.loads((tmp_path / "results.json").read_text(), parse_constant=lambda name: pytest.fail(name))
        columns = parquet.read_columns(tmp_path / "results.parquet")
        assert columns["method"].tolist() == [result.method for result in found.results]
        assert columns["auroc"].tolist() == [result.numbers["auroc"] for result in found.results]
        (tmp_path / "results.json").write_text("{}")
        with pytest.raises(ValueError, match=r"results\.json is damaged"):
            Comparison.load(tmp_path)

    def test_mean_and_deviation_over_seeds(self, pairs, held_out):
        runs = [compare(Study(held_out, seed=s), pairs, ("margin",), resamples=0, max_queries=30) for s in range(3)]
        found = aggregate(runs)
        values = [run.results[0].numbers["auroc"] for run in runs]
        assert len(set(values)) > 1
        assert found.results[0].numbers["auroc"] == pytest.approx(np.mean(values))
        assert found.results[0].spread["auroc"] == pytest.approx(np.std(values, ddof=1))
        assert found.results[0].seeds == [0, 1, 2]
        assert found.results[0].accuracy == pytest.approx(np.mean([run.results[0].accuracy for run in runs], axis=0))
        assert math.isnan(found.results[0].numbers["ece"])
        with pytest.raises(ValueError, match="comparison 1 has other methods"):
            aggregate([runs[0], Comparison([])])
        with pytest.raises(ValueError, match="nothing"):
            aggregate([])

    def test_scores_that_are_there_are_not_computed_again(self, pairs, held_out, tmp_path, monkeypatch):
        first = compare(Study(held_out), pairs, ("margin",), resamples=0, folder=tmp_path)
        monkeypatch.setattr(methods.BaselineMethod, "score", lambda *_: pytest.fail("computed again"))
        again = compare(Study(held_out), pairs, ("margin",), resamples=0, folder=tmp_path)
        assert str(first) == str(again)
        with pytest.raises(FileExistsError, match="margin_t2i"):
            compare(Study(held_out, seed=1), pairs, ("margin",), folder=tmp_path)

    def test_what_a_study_lacks_is_said_before_the_work(self, pairs, held_out, small_flow):
        assert methods.default_methods(Study(held_out)) == list(self.REFERENCES)
        assert set(methods.default_methods(Study(held_out, pairs, small_flow))) >= {"rerank", "entropy", "knn"}
        for name, message in (
            ("rerank", "needs a trained flow"),
            ("knn", "training pairs"),
            ("none", "must be one of"),
        ):
            with pytest.raises(ValueError, match=message):
                compare(Study(held_out), pairs, ("margin", name))
        with pytest.raises(ValueError, match="bins"):
            compare(Study(held_out), pairs, ("margin",), max_queries=5)
        with pytest.raises(ValueError, match="one width"):
            Study(held_out, flow=gf.GeoFlow(gf.GeoFlowConfig(10, 10, hidden=16, depth=1)))


@pytest.mark.parametrize("direction", ["t2i", "i2t"])
class TestFlowMethods:
    def scores(self, name: str, study: Study, task: RetrievalSet) -> tuple[methods.Method, Scores]:
        method = methods.create(name, study)
        method.fit(task)
        return method, method.score(slice(None), plain_search(task).index[:, 0])

    def test_entropy_is_that_of_the_scorer(self, small_flow, pairs, held_out, direction, monkeypatch):
        monkeypatch.setattr(methods.FlowEntropy, "settings", {"n_samples": 4, "n_steps": 2})
        task = RetrievalSet.of(pairs, direction)
        method, found = self.scores("entropy", Study(held_out, flow=small_flow), task)
        post = method.scorer(task.queries)
        torch.testing.assert_close(found.uncertainty.float(), post.entropy, atol=1e-4, rtol=1e-4)
        assert torch.equal(found.top, post.map_index)
        fitted = gf.fit_bandwidth(small_flow, held_out, direction, n_samples=4, n_steps=2)
        assert (method.scorer.kappa, method.scorer.sampling.guidance) == (fitted.kappa, fitted.guidance)

    def test_rerankers_likelihood_sums_to_one_over_the_gallery(self, small_flow, pairs, held_out, direction):
        task = RetrievalSet.of(pairs, direction)
        method, found = self.scores("rerank", Study(held_out, flow=small_flow), task)
        post = method.reranker(task.queries)
        torch.testing.assert_close(found.uncertainty, 1 - post.p_answer.double(), atol=1e-6, rtol=0)
        every = (post.p_outside.double() / (len(task.items) - 32)).unsqueeze(1).repeat(1, len(task.items))
        every.scatter_(1, post.index, post.prob.double())
        assert bool(((every.sum(1) - 1).abs() < 1e-5).all())
        expected = torch.stack([-row[own[own >= 0]].log().mean() for row, own in zip(every, task.own)])
        torch.testing.assert_close(found.nll, expected, atol=1e-5, rtol=1e-5)

    def test_epistemic_score_is_of_the_query_with_its_answer(self, small_flow, pairs, held_out, direction, monkeypatch):
        exact = dataclasses.replace(methods.FlowEpistemic.settings, divergence="exact", n_steps=2)
        monkeypatch.setattr(methods.FlowEpistemic, "settings", exact)
        task = RetrievalSet.of(pairs, direction, max_queries=9)
        _, found = self.scores("epistemic", Study(held_out, flow=small_flow), task)
        items = task.items[plain_search(task).index[:, 0]]
        pair = (items, task.queries) if direction == "t2i" else (task.queries, items)
        expected = gf.epistemic(small_flow, *pair, settings=gf.DensitySettings(n_steps=2, divergence="exact")).score
        torch.testing.assert_close(found.uncertainty, expected, atol=1e-4, rtol=1e-4)


class TestZeroShot:
    def world(self, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Images around class centres, some far from any."""
        generator = torch.Generator().manual_seed(seed)
        prompts = sample_uniform(6, DIM, generator=torch.Generator().manual_seed(5))
        label = torch.randint(6, (80,), generator=generator)
        spread = 0.9 * torch.rand(80, 1, generator=generator)
        return normalize(prompts[label] + spread * torch.randn(80, DIM, generator=generator)), label, prompts

    def test_prompts_are_means_of_templates(self):
        rows = sample_uniform(6, DIM).reshape(3, 2, DIM)
        found = class_prompts(rows)
        torch.testing.assert_close(found, normalize(rows.sum(1)))
        assert torch.equal(class_prompts([rows[0], rows[1], rows[2, :1]])[2], rows[2, 0])
        asked: list[str] = []

        def encode(texts: list[str]) -> Tensor:
            asked.extend(texts)
            return 3 * rows[len(asked) // 2 - 1]

        torch.testing.assert_close(encode_prompts(encode, ["cat", "dog", "owl"], ["a {}", "the {}."]), found)
        assert asked == ["a cat", "the cat.", "a dog", "the dog.", "a owl", "the owl."]

    def test_terms_and_references(self, small_flow, pairs):
        image, label, prompts = self.world()
        found = zero_shot(small_flow, image, label, prompts, scale=20.0, train=pairs, resamples=10)
        cosine = image @ prompts.T
        assert torch.equal(found.prediction, cosine.argmax(1))
        assert found.accuracy == pytest.approx(float((cosine.argmax(1) == label).double().mean()))
        pi = (20 * cosine.double()).softmax(1)
        best = cosine.topk(2).values.double()
        torch.testing.assert_close(found.scores["max_softmax"], 1 - pi.amax(1), atol=1e-5, rtol=0)
        torch.testing.assert_close(found.scores["margin"], best[:, 1] - best[:, 0], atol=1e-5, rtol=0)
        torch.testing.assert_close(found.scores["softmax_entropy"], torch.special.entr(pi).sum(1), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(found.scores["sum"], found.scores["image"] + found.scores["text"])
        assert [part.name for part in found.components] == list(found.scores)
        for part in found.components:
            assert part.numbers["auroc"] == gf.evaluation.auroc(found.scores[part.name], found.correct)

    def test_references_stand_without_a_flow(self):
        found = zero_shot(None, *self.world(), resamples=0)
        assert list(found.scores) == ["max_softmax", "margin", "softmax_entropy"]

    def test_scale_has_the_least_loss_on_held_out_images(self):
        image, label, prompts = self.world(1)
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
    def test_bad_input_is_refused(self, change, message):
        given = dict(zip(("image", "label", "prompts"), self.world()))
        with pytest.raises(ValueError, match=message):
            zero_shot(None, **{**given, **change})

    def test_prompts_that_cancel_are_refused(self):
        row = sample_uniform(1, DIM)
        with pytest.raises(ValueError, match="class 0 cancel"):
            class_prompts(torch.stack((row, -row), dim=1))
        with pytest.raises(ValueError, match="no classes"):
            class_prompts([])
        with pytest.raises(ValueError, match="template"):
            encode_prompts(lambda _: row, ["cat"], ["no place"])


def is_picture(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG")


def test_figures_of_one_and_of_several_data_sets(pairs, held_out, tmp_path):
    runs = [compare(Study(held_out, seed=s), pairs, ("margin", "max_softmax"), resamples=9) for s in range(2)]
    two = {"first": aggregate(runs), "second": runs[0]}
    drawers = (figures.draw_calibration, figures.draw_selective, figures.draw_auroc, figures.draw_reliability)
    for number, draw in enumerate(drawers):
        assert is_picture(draw({"only": runs[0]}, tmp_path / f"one{number}.png"))
        assert is_picture(draw(two, tmp_path / f"two{number}.png"))
    curves = {way: {"a": figures.Series([1, 2, 3], [0.1, 0.1, 0.1]), "b": figures.Series([3, 2, 1])} for way in "xy"}
    options = {"xlabel": "steps", "ylabel": "AUROC", "log_x": True}
    assert is_picture(figures.draw_ablation(curves, [1, 10, 100], tmp_path / "ablation.png", **options))


class TestAbstentionFigure:
    """Uncertainty u is wrong with probability u."""

    @pytest.fixture
    def drawn(self, monkeypatch):
        """The figure that would be saved."""
        found = []
        save = figures.plots.save_figure

        def keep(figure, path):
            found.append(figure)
            save(figure, path)

        monkeypatch.setattr(figures.plots, "save_figure", keep)
        return found

    def answers(self, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        generator = np.random.default_rng(seed)
        score = generator.random(count)
        return score, generator.random(count) > score

    def test_threshold_and_points_are_where_the_numbers_say(self, drawn, tmp_path):
        (score, right), (later, later_right) = self.answers(2000, 0), self.answers(777, 1)
        act = gf.evaluation.abstention_threshold(score, right, target_risk=0.2)
        path = figures.draw_abstention(act, score, right, tmp_path / "a.png", new=(later, later_right))
        assert is_picture(path)
        parted, risk = drawn[0].axes
        assert any(np.allclose(line.get_xdata(), act.threshold) for line in parted.lines)
        assert sum(patch.get_height() for patch in parted.patches) > 0
        marked = [line.get_xydata()[0] for line in risk.lines if line.get_marker() in ("o", "X")]
        for place, (u, ok) in zip(marked, ((score, right), (later, later_right)), strict=True):
            np.testing.assert_allclose(place, [(u <= act.threshold).mean(), (~ok[u <= act.threshold]).mean()])
        coverage, wrong = risk.lines[0].get_data()
        assert wrong[-1] == pytest.approx(1 - right.mean())
        assert coverage[-1] == 1

    @pytest.mark.parametrize("count", [2, 7, 129])
    def test_nothing_certified_is_said(self, count, drawn, tmp_path):
        act = gf.evaluation.abstention_threshold(np.zeros(count), np.zeros(count), target_risk=0.1)
        assert is_picture(figures.draw_abstention(act, np.zeros(count), np.zeros(count), str(tmp_path / "a.png")))
        assert any("abstain always" in text.get_text() for text in drawn[0].axes[1].texts)

    def test_bad_input_is_refused_before_anything_is_drawn(self, tmp_path):
        act = gf.evaluation.abstention_threshold(*self.answers(200, 0), target_risk=0.3)
        with pytest.raises(ValueError, match="row 1 is 3"):
            figures.draw_abstention(act, [0.1, 0.2], [1, 3], tmp_path / "a.png")
        with pytest.raises(ValueError, match="entries"):
            figures.draw_abstention(act, [0.1, 0.2], [1, 0], tmp_path / "a.png", new=([1.0], [1, 1]))
        assert not list(tmp_path.iterdir())


def test_a_method_looks_the_same_everywhere():
    names = methods.all_methods()
    styles = [figures.style_of(name) for name in names]
    assert styles == [figures.style_of(name) for name in names]
    colours = [style["color"] for style in styles]
    assert len(set(colours[:5])) == 5


class TestCommand:
    @pytest.fixture
    def folders(self, tmp_path, pairs, held_out, small_flow):
        pairs.save(tmp_path / "test")
        held_out.save(tmp_path / "val")
        small_flow.save_pretrained(tmp_path / "model")
        return tmp_path

    def run(self, *arguments: object) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["evaluate", *map(str, arguments)])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.stdout

    def test_retrieval(self, folders):
        out = folders / "report"
        given = ("--pairs", folders / "test", "--held-out", folders / "val", "--out", out, "--resamples", 9)
        code, printed = self.run(*given, "--methods", "max_softmax, margin", "--json")
        assert code == 0
        facts = json.loads(printed)
        assert [result["method"] for result in facts["results"]] == ["max_softmax", "margin"] * 2
        names = {path.name for path in out.iterdir()}
        assert names == {
            "results.json", "results.parquet", "report.html", "scores",
            "auroc.png", "calibration.png", "selective.png", "reliability.png",
        }  # fmt: skip
        page = (out / "report.html").read_text()
        assert page.count("data:image/png") == 4
        assert "cosine margin" in page
        assert self.run(*given, "--methods", "max_softmax,margin", "--direction", "t2i")[0] == 0

    def test_zero_shot(self, folders):
        image, label, prompts = TestZeroShot().world()
        for name, rows in (("image", image), ("label", label), ("prompts", prompts.unsqueeze(1))):
            np.save(folders / f"{name}.npy", rows.numpy())
        given = [f"--{name}={folders / file}" for name, file in (("model", "model"), ("images", "image.npy"))]
        given += [f"--labels={folders / 'label.npy'}", f"--prompts={folders / 'prompts.npy'}"]
        code, printed = self.run("zero-shot", *given, "--out", folders / "zero", "--resamples", 9, "--json")
        assert code == 0
        assert [part["name"] for part in json.loads(printed)["components"]][:4] == ["image", "text", "pmi", "sum"]
        assert is_picture(folders / "zero/components.png")
        assert "-PMI(image, text)" in (folders / "zero/report.html").read_text()

    def test_bad_flags_are_said_before_anything_is_written(self, folders):
        out = folders / "report"
        given = ("--pairs", folders / "test", "--held-out", folders / "val", "--out", out)
        with pytest.raises(ValueError, match="needs --held-out, --out"):
            self.run("--pairs", folders / "test")
        with pytest.raises(ValueError, match="must be one of"):
            self.run(*given, "--methods", "no such")
        with pytest.raises(FileNotFoundError):
            self.run(*given, "--train", folders / "nowhere")
        assert not out.exists()
        np.save(folders / "label.npy", np.zeros(3, dtype=np.int64))
        with pytest.raises(ValueError, match="3 entries, but there are"):
            job.labelled(folders / "test/img_emb", folders / "label.npy")
