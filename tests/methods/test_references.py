"""Strong references: hub-corrected softmax, classifiers of the result list, the two-tower adapter."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor

import geoflow_fast as gf
from benchmarks.methods import baselines
from benchmarks.methods.baselines import adapter, result_list
from benchmarks.methods.baselines.hub import fit_hub_weights
from benchmarks.methods.baselines.result_list import FEATURES, SCALES, labelled_apart
from benchmarks.methods.baselines.untrained import MaxSoftmax
from geoflow_fast.decisions.logistic import fit_logistic
from geoflow_fast.directions import CONDITIONAL, Direction
from geoflow_fast.evaluation.retrieval import nearest
from geoflow_fast.geometry import normalize
from geoflow_fast.noise import sample_uniform
from geoflow_fast.retrieval.task import RetrievalTask
from geoflow_fast.training.config import RunConfig
from geoflow_fast.worlds import ConceptWorld

DIM = 12
NAMES = ("hub_softmax", "list_logistic", "list_boosting", "adapter")
RUN = RunConfig(steps=40, batch_size=64, lr=2e-3, warmup_steps=5, val_every=20, val_batches=1, weight_decay=1e-2)
FLICKR = Path(__file__).resolve().parents[3] / "shared" / "data" / "flickr8k"


def captioned(images: int, seed: int, captions: int = 2) -> gf.EmbeddingPairs:
    """Images, a third of them near one direction, which are hubs, with several vague captions each."""
    generator = torch.Generator().manual_seed(seed)
    image = sample_uniform(images, DIM, generator=generator)
    image[::3] = normalize(image[::3] + 1.5 * torch.eye(DIM)[0])
    index = torch.arange(images).repeat_interleave(captions)
    text = normalize(image[index] + 0.25 * torch.randn(len(index), DIM, generator=generator))
    return gf.EmbeddingPairs.from_arrays(image, text, index)


@pytest.fixture(scope="module")
def fitted() -> dict[str, baselines.Baseline]:
    torch.manual_seed(0)
    methods = {name: baselines.find(name)(DIM, DIM) for name in NAMES}
    for method in methods.values():
        method.fit(captioned(300, 0), captioned(150, 1), RUN, progress=False)
    return methods


def sides(images: int, seed: int, direction: str) -> tuple[Tensor, Tensor]:
    task = RetrievalTask.of(captioned(images, seed), direction)
    return task.queries, task.items


def dense_hub(method: baselines.HubSoftmax, queries: Tensor, items: Tensor, direction: str) -> Tensor:
    """Log-probabilities [Q, N] by the formula itself, in float64."""
    b, w = method.weights[CONDITIONAL.index(direction)].tolist()
    bank = Direction.of(direction).queries(method.image, method.text).double()
    hub = torch.log(torch.exp(b * bank @ items.double().T).mean(0))
    return (b * queries.double() @ items.double().T - w * hub).log_softmax(1)


@pytest.mark.parametrize("direction", ["t2i", "i2t"])
class TestHubSoftmax:
    @pytest.mark.parametrize("images", [1, 7, 129])
    def test_against_the_formula(self, fitted, direction, images):
        queries, items = sides(images, 2, direction)
        method = fitted["hub_softmax"]
        truth = dense_hub(method, queries, items, direction)
        answer = (queries @ items.T).argmax(1, keepdim=True)
        uncertainty = method.uncertainty(queries, items, direction)
        torch.testing.assert_close(uncertainty, 1 - truth.exp().gather(1, answer).squeeze(1), atol=2e-5, rtol=0)
        own_ranking = method.softmax(queries, gf.Gallery(items), Direction.of(direction)).posterior().top_prob[:, 0]
        torch.testing.assert_close(own_ranking, truth.exp().amax(1), atol=2e-5, rtol=0)

    def test_no_other_weights_suit_the_held_out_pairs_better(self, fitted, direction):
        method, val = fitted["hub_softmax"], captioned(150, 1)
        queries, items = (Direction.of(direction).queries(*val[np.arange(300)]), sides(150, 1, direction)[1])
        own = torch.arange(300) if direction == "i2t" else torch.arange(300) // 2
        row, before = CONDITIONAL.index(direction), method.weights.clone()

        def loss(b: float, w: float) -> float:
            method.weights[row] = before[row] * torch.tensor([b, w])
            return float(-dense_hub(method, queries, items, direction).gather(1, own.unsqueeze(1)).mean())

        try:
            losses = [loss(b, w) for b, w in ((1, 1), (0.9, 1), (1.1, 1), (1, 0.85), (1, 1.15))]
        finally:
            method.weights.copy_(before)
        assert min(losses) == losses[0]
        assert 0 < float(before[row, 1]) < 1.5


def test_planted_hub_weights_are_recovered():
    """Own items are drawn from the law itself, with known b and w."""
    generator = torch.Generator().manual_seed(3)
    centre = 0.8 * torch.eye(6)[0]
    items, queries, bank = (normalize(sample_uniform(n, 6, generator=generator) + centre) for n in (300, 6000, 500))
    b, w = 12.0, 0.7
    hub = torch.log(torch.exp(b * bank.double() @ items.double().T).mean(0))
    law = (b * queries.double() @ items.double().T - w * hub).softmax(1)
    own = torch.multinomial(law, 1, generator=generator).squeeze(1)
    fitted_b, fitted_w = fit_hub_weights(queries, items, own, bank)
    assert fitted_b == pytest.approx(b, rel=0.05)
    assert fitted_w == pytest.approx(w, abs=0.05)


def test_hub_bank_and_tuning_are_of_different_images_if_one_set_of_pairs_serves_for_both():
    pairs = captioned(100, 4)
    method = baselines.HubSoftmax(DIM, DIM)
    method.fit(pairs, pairs)
    assert len(method.image) == 100  # half of the images, two captions each
    apart = baselines.HubSoftmax(DIM, DIM)
    apart.fit(*pairs.split(0.5, 0))
    assert torch.equal(method.weights, apart.weights)


def test_correction_follows_the_gallery_and_the_bank():
    """What is kept of a gallery is not used after its rows or the bank have changed."""
    method = baselines.HubSoftmax(DIM, DIM)
    method.fit(captioned(300, 0), captioned(150, 1))
    queries, items = sides(60, 5, "t2i")
    other = sides(60, 6, "t2i")[1]
    gallery = gf.Gallery(items.clone())
    first = method.uncertainty(queries, gallery, "t2i")
    assert torch.equal(first, method.uncertainty(queries, gallery, "t2i"))
    gallery.rows.copy_(other)
    torch.testing.assert_close(
        method.uncertainty(queries, gallery, "t2i"), method.uncertainty(queries, other, "t2i"), atol=0, rtol=0
    )
    method.fit(captioned(300, 7), captioned(150, 8))
    torch.testing.assert_close(
        method.uncertainty(queries, gallery, "t2i"), method.uncertainty(queries, other.clone(), "t2i"), atol=0, rtol=0
    )


class TestEveryReference:
    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize("direction", ["t2i", "i2t"])
    def test_shards_and_blocks_of_queries_change_nothing(self, fitted, name, direction, tmp_path, monkeypatch):
        monkeypatch.setattr(adapter, "TILE_ITEMS", 11)
        queries, items = sides(51, 9, direction)
        for number, part in enumerate(items.split(17)):
            np.save(tmp_path / f"part_{number}.npy", part.numpy())
        method = fitted[name]
        whole = method.uncertainty(queries, items, direction)
        assert whole.dtype == torch.float64
        assert bool(((whole >= 0) & (whole <= 1)).all())
        torch.testing.assert_close(whole, method.uncertainty(queries, tmp_path, direction), atol=1e-5, rtol=0)
        gallery = gf.Gallery(items)
        parts = torch.cat([method.uncertainty(part, gallery, direction) for part in queries.split(7)])
        torch.testing.assert_close(whole, parts, atol=1e-5, rtol=0)

    @pytest.mark.parametrize("name", NAMES)
    def test_a_loaded_method_gives_the_same_scores(self, fitted, name, tmp_path):
        fitted[name].save(tmp_path)
        assert {path.name for path in tmp_path.iterdir()} == {"model.safetensors", "config.json"}
        back = baselines.load(tmp_path)
        for direction in CONDITIONAL:
            queries, items = sides(23, 10, direction)
            expected = fitted[name].uncertainty(queries, items, direction)
            assert torch.equal(back.uncertainty(queries, items, direction), expected)

    @pytest.mark.parametrize("name", NAMES)
    def test_one_item_and_no_query(self, fitted, name):
        queries, items = sides(3, 11, "t2i")
        assert fitted[name].uncertainty(queries, items[:1], "t2i").shape == (6,)
        assert fitted[name].uncertainty(queries[:0], items, "t2i").shape == (0,)

    @pytest.mark.parametrize("name", NAMES)
    def test_items_that_are_all_alike_are_equally_probable(self, fitted, name):
        queries, items = sides(4, 12, "t2i")
        uncertainty = fitted[name].uncertainty(queries, items[:1].repeat(5, 1), "t2i")
        assert bool(torch.isfinite(uncertainty).all())
        if fitted[name].softmax(queries, gf.Gallery(items), Direction.T2I) is not None:
            torch.testing.assert_close(uncertainty, torch.full_like(uncertainty, 0.8), atol=1e-5, rtol=0)


class TestResultLists:
    def test_features_against_dense_cosines(self, fitted):
        method, hub = fitted["list_logistic"], fitted["list_logistic"].hub
        queries, items = sides(70, 13, "t2i")
        cosine = queries.double() @ items.double().T
        best, index = cosine.topk(2)
        scale = float(method.plain.scale[CONDITIONAL.index("t2i")])
        plain, corrected = (scale * cosine).log_softmax(1), dense_hub(hub, queries, items, "t2i")
        own = corrected.gather(1, index[:, :1]).squeeze(1)
        others = corrected.scatter(1, index[:, :1], -torch.inf).amax(1)
        near, row = (queries.double() @ method.near.text.double().T).topk(10)
        agreement = torch.einsum("qkd,qd->qk", method.near.image[row].double(), items[index[:, 0]].double())
        entropies = [torch.special.entr((s * cosine).softmax(1)).sum(1) for s in (*SCALES, scale)]
        logs = plain.gather(1, index[:, :1]).squeeze(1), own, own - others
        truth = (best[:, 0], best[:, 0] - best[:, 1], *entropies, *logs, 1 - near.mean(1), agreement.mean(1))
        features = method.features(queries, gf.Gallery(items), Direction.T2I)
        assert features.shape[1] == len(FEATURES)
        for name, column, expected in zip(FEATURES, features.T, truth):
            torch.testing.assert_close(column, expected, atol=5e-5, rtol=1e-5, msg=name)

    @pytest.mark.parametrize("seed", [0, 1])
    def test_logistic_regression_is_that_of_scikit_learn(self, seed):
        rng = np.random.default_rng(seed)
        x = rng.normal(size=(300, 5)) * (1, 10, 0.01, 1, 0) + 3
        y = rng.random(300) < 1 / (1 + np.exp(-(x[:, 0] - 3) - 0.2 * (x[:, 1] - 3)))
        truth = make_pipeline(StandardScaler(), LogisticRegression(C=1.0, tol=1e-10, max_iter=1000)).fit(x, y)
        weights = fit_logistic(x, y)
        logit = x @ weights[:-1] + weights[-1]
        np.testing.assert_allclose(logit, truth.decision_function(x), atol=1e-5)

    def test_answers_that_are_all_alike_give_a_constant(self):
        features = np.random.default_rng(0).normal(size=(20, 3))
        weights = fit_logistic(features, np.ones(20, bool))
        assert not weights[:-1].any()
        assert 1 / (1 + np.exp(-weights[-1])) == pytest.approx(20.5 / 21)

    def test_features_that_only_rounding_varies_have_no_weight(self):
        rng = np.random.default_rng(0)
        x = np.column_stack((rng.normal(size=200), np.log(36) + rng.choice((-4e-7, 0.0, 4e-7), 200)))
        y = rng.random(200) < 1 / (1 + np.exp(-x[:, 0]))
        weights = fit_logistic(x, y)
        assert weights[1] == 0
        np.testing.assert_allclose(weights[[0, 2]], fit_logistic(x[:, :1], y), rtol=1e-6)

    def test_captions_that_are_all_alike_are_known_to_be_guesses(self):
        """Among fewer of them the entropies are other constants, by far more than what rounding varied them before."""
        train, val, test = (
            gf.EmbeddingPairs.from_arrays(
                sample_uniform(n, DIM, generator=torch.Generator().manual_seed(n)), normalize(torch.ones(n, DIM))
            )
            for n in (108, 36, 30)
        )
        method = baselines.find("list_logistic")(DIM, DIM)
        method.fit(train, val)
        for direction in CONDITIONAL:
            task = RetrievalTask.of(test, direction)
            risk = method.uncertainty(task.queries, task.items, direction)
            assert float(risk.mean()) == pytest.approx(29 / 30, abs=0.03)

    def test_labelled_images_are_not_those_compared_with(self):
        pairs, few, many = captioned(200, 14), captioned(10, 15), captioned(60, 16)
        known, labelled = labelled_apart(pairs, few, 0)
        assert not set(known.group) & set(labelled.group)
        assert len(np.unique(labelled.group)) == 40
        assert labelled_apart(pairs, many, 0) == (pairs, many)
        known, labelled = labelled_apart(pairs, pairs, 0)
        assert not set(known.group) & set(labelled.group)

    def test_stated_risks_are_those_observed(self, fitted):
        """Over queries that nothing was fitted on, the mean risk is the share of wrong answers, and risks tell."""
        task = RetrievalTask.of(captioned(150, 17), "t2i")
        right = task.is_right(nearest(task.queries, gf.Gallery(task.items))[1][:, 0])
        for name in ("list_logistic", "list_boosting"):
            risk = fitted[name].uncertainty(task.queries, task.items, "t2i")
            assert float(risk.mean()) == pytest.approx(float((~right).double().mean()), abs=0.08)
            assert gf.evaluation.auroc(risk, right) > 0.7

    def test_a_file_with_too_many_queries_is_refused(self, fitted, tmp_path, monkeypatch):
        fitted["list_boosting"].save(tmp_path)
        monkeypatch.setattr(result_list, "QUERIES", 20)
        with pytest.raises(ValueError, match="more than 20 queries"):
            baselines.load(tmp_path)

    def test_without_scikit_learn_the_error_says_what_to_install(self, monkeypatch):
        monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
        with pytest.raises(ValueError, match=r"scikit-learn: pip install '.*\[test\]'"):
            baselines.ListBoosting(DIM, DIM)


class TestAdapter:
    def test_softmax_against_dense_towers(self, fitted):
        method = fitted["adapter"]
        queries, items = sides(45, 18, "i2t")
        with torch.no_grad():
            logits = method.scale[CONDITIONAL.index("i2t")] * method.image(queries) @ method.text(items).T
        answer = (queries @ items.T).argmax(1, keepdim=True)
        truth = 1 - logits.double().softmax(1).gather(1, answer).squeeze(1)
        torch.testing.assert_close(method.uncertainty(queries, items, "i2t"), truth, atol=2e-5, rtol=0)

    def test_starts_as_plain_cosine(self):
        method = baselines.TwoTowerAdapter(DIM, DIM).eval()
        x = sample_uniform(5, DIM)
        torch.testing.assert_close(method.image(x), x)

    def test_pairs_of_the_same_image_are_no_negatives(self):
        method = baselines.TwoTowerAdapter(DIM, DIM).eval()
        image, text = sample_uniform(2, DIM), sample_uniform(3, DIM)
        group = torch.tensor([0, 0, 1])
        losses = method.losses(image[group], text, group)
        logits = (20 * image[group] @ text.T).double()
        ahead = [logits[0, [0, 2]], logits[1, [1, 2]], logits[2]], [logits[[0, 2], 0], logits[[1, 2], 1], logits[:, 2]]
        own = (0, 0, -1)
        truth = [-(a.log_softmax(0)[k] + b.log_softmax(0)[k]) / 2 for a, b, k in zip(*ahead, own)]
        torch.testing.assert_close(losses.double(), torch.stack(truth), atol=1e-5, rtol=1e-5)

    def test_beats_plain_softmax_on_the_concept_world(self):
        world = ConceptWorld()
        image, text, _ = world.sample(9000, generator=torch.Generator().manual_seed(20))
        parts = [gf.EmbeddingPairs.from_arrays(image[a:b], text[a:b]) for a, b in ((0, 8000), (8000, 8500))]
        torch.manual_seed(0)
        adapted, plain = baselines.TwoTowerAdapter(24, 24), MaxSoftmax(24, 24)
        adapted.fit(*parts, dataclasses.replace(adapted.default_config(), steps=200, val_every=100), progress=False)
        plain.fit(*parts)
        test = gf.EmbeddingPairs.from_arrays(image[8500:], text[8500:])
        for direction in CONDITIONAL:
            task = RetrievalTask.of(test, direction)
            right = task.is_right(nearest(task.queries, gf.Gallery(task.items))[1][:, 0])
            scores = [m.uncertainty(task.queries, task.items, direction) for m in (adapted, plain)]
            ours, theirs = (gf.evaluation.auroc(score, right) for score in scores)
            assert ours > theirs + 0.02, direction

    def test_bad_dropout_is_refused(self):
        with pytest.raises(ValueError, match="dropout"):
            baselines.TwoTowerAdapter(DIM, DIM, dropout=1.0)


def flickr(part: str) -> gf.EmbeddingPairs:
    path = FLICKR / f"{part}.npz"
    if not path.is_file():
        pytest.skip(f"there are no Flickr8k embeddings at {FLICKR}")
    with np.load(path, allow_pickle=False) as file:
        image, text = (torch.from_numpy(file[f"{name}_emb"].astype(np.float32)) for name in ("image", "text"))
        return gf.EmbeddingPairs.from_arrays(normalize(image), normalize(text), file["text_image_index"])


@pytest.mark.slow
def test_hub_correction_beats_tuned_softmax_on_flickr8k():
    """Flickr8k in a small dual encoder (not CLIP); tuned on a fifth of the training images, judged on others."""
    pairs, val = flickr("train").split(0.2, 0)
    test = flickr("dev")
    methods = MaxSoftmax(256, 256), baselines.HubSoftmax(256, 256)
    for method in methods:
        method.fit(pairs, val)
    for direction in CONDITIONAL:
        task = RetrievalTask.of(test, direction)
        gallery = gf.Gallery(task.items)
        right = task.is_right(nearest(task.queries, gallery)[1][:, 0])
        plain, hub = (gf.evaluation.auroc(m.uncertainty(task.queries, gallery, direction), right) for m in methods)
        assert hub > plain + 0.02, direction
        assert hub > 0.75, direction
        first = methods[1].softmax(task.queries, gallery, direction).posterior().top_index[:, 0]
        assert task.is_right(first).double().mean() > right.double().mean()
