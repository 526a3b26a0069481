"""The ladder of evidence: which rungs are kept, hub correction, shortlists of a head, and the budget of the flow."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from scipy import optimize, stats
from torch import Tensor

import geoflow_fast as gf
from geoflow_fast import noise
from geoflow_fast.directions import Direction
from geoflow_fast.retrieval import held_out
from geoflow_fast.retrieval.calibration import UNCALIBRATED_HEAD, close_call, fit_calibration, probability_right
from geoflow_fast.retrieval.evidence import Evidence, climb, folds_of, grouped_mean, with_best_hub
from geoflow_fast.retrieval.hubs import SCALES, Hubs, log_mean, log_means
from geoflow_fast.retrieval.item_bank import ItemBank
from geoflow_fast.retrieval.sources import HeadSource
from geoflow_fast.retrieval.task import RetrievalTask
from geoflow_fast.runtime.device import clock

DIM, K = 8, 10


def unit(rows: int, seed: int, width: int = DIM) -> Tensor:
    return noise.sample_uniform(rows, width, generator=torch.Generator().manual_seed(seed))


def unit_sum(*parts: Tensor) -> Tensor:
    return torch.nn.functional.normalize(torch.stack(parts).sum(0), dim=1)


def hub_world(count: int, seed: int, push: float = 1.0) -> tuple[Tensor, Tensor]:
    """Images with a common direction of varying strength, and texts that see them through noise: items that lean
    towards the common direction are near to every text."""
    generator = torch.Generator().manual_seed(seed)
    own = torch.randn(count, DIM, generator=generator)
    lean = push * torch.randn(count, 1, generator=generator).exp() * torch.eye(DIM)[0]
    text = own + 0.7 * torch.randn(count, DIM, generator=generator) + 2 * torch.eye(DIM)[0]
    return torch.nn.functional.normalize(own + lean, dim=1), torch.nn.functional.normalize(text, dim=1)


def hub_pairs(count: int, seed: int) -> gf.EmbeddingPairs:
    return gf.EmbeddingPairs.from_arrays(*hub_world(count, seed))


@pytest.fixture(scope="module")
def head() -> gf.PosteriorHead:
    config = gf.HeadConfig(steps=60, batch_size=128, points=2, hidden=32, val_every=20, bank=64)
    return gf.PosteriorHead.fit(hub_pairs(1000, 5), config, k=2)


class ExactStore:
    """A store that finds the rows with the largest products."""

    def __init__(self, items: Tensor) -> None:
        self.items, self.ntotal = items.numpy(), len(items)

    def search(self, x: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        score = x @ self.items.T
        index = np.argsort(-score, axis=1)[:, :k]
        return np.take_along_axis(score, index, 1), index


def evidence_with(**features: Tensor) -> Evidence:
    nearness = next(iter(features.values()))
    return Evidence(features, nearness, torch.ones_like(nearness, dtype=torch.bool))


def drawn_choice(logits: Tensor, seed: int) -> Tensor:
    """Which item is right, [Q, K] bool, under these logits of items and of "outside", which is 0."""
    every = torch.cat((logits, torch.zeros(len(logits), 1)), dim=1).softmax(1)
    choice = torch.multinomial(every, 1, generator=torch.Generator().manual_seed(seed))
    return (choice == torch.arange(logits.shape[1] + 1))[:, :-1]


class TestClimb:
    """Simulated queries, whose right items are drawn from known logits."""

    def simulated(self, weights: dict[str, float], queries: int = 600, seed: int = 0) -> tuple[Evidence, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        names = ("cosine", "hub", "head", "head_hub", "flow")
        features = {name: torch.randn(queries, K, generator=generator).double() for name in names}
        logits = sum(weights.get(name, 0.0) * values for name, values in features.items())
        return evidence_with(**features), drawn_choice(torch.as_tensor(logits), seed)

    def rungs(self, evidence: Evidence, right: Tensor) -> dict[str, gf.retrieval.evidence.Rung]:
        queries = len(right)
        target = torch.cat((right, ~right.any(1, keepdim=True)), dim=1).double()
        group = torch.arange(queries)
        return {rung.name: rung for rung in climb(evidence, target, group, folds_of(group, 0), {"flow": 2.0})}

    @pytest.mark.parametrize("useful", ["hub", "head", "flow"])
    def test_a_rung_is_kept_if_it_helps(self, useful):
        rungs = self.rungs(*self.simulated({"cosine": 1.0, useful: 1.0}))
        assert rungs[useful].kept
        assert rungs[useful].gain > 3 * rungs[useful].stderr > 0
        assert rungs["flow"].cost == 2.0

    def test_useless_rungs_are_kept_about_as_often_as_chance_exceeds_one_standard_error(self):
        kept = [
            rung.kept
            for seed in range(8)
            for name, rung in self.rungs(*self.simulated({"cosine": 1.0}, 200, seed)).items()
            if name != "cosine"
        ]
        assert np.mean(kept) < 0.3

    def test_the_first_rung_stays_without_any_gain(self):
        rungs = self.rungs(*self.simulated({}))
        assert rungs["cosine"].kept

    def test_missing_evidence_is_no_rung(self):
        evidence, right = self.simulated({"cosine": 1.0})
        few = dataclasses.replace(evidence, features={"cosine": evidence.features["cosine"]})
        assert list(self.rungs(few, right)) == ["cosine"]

    def test_the_standard_error_counts_groups(self):
        values = torch.randn(50, dtype=torch.float64)
        mean, alone = grouped_mean(values, torch.arange(50))
        assert mean == pytest.approx(float(values.mean()))
        assert alone == pytest.approx(float(values.std(correction=0)) / math.sqrt(50))
        copied = values.repeat_interleave(4)
        assert grouped_mean(copied, torch.arange(50).repeat_interleave(4))[1] == pytest.approx(alone)

    def test_gains_are_those_of_scipys_optimum(self):
        """One feature: the same weight and constant by another optimiser, without the prior."""
        evidence, right = self.simulated({"cosine": 1.5}, 2000)
        fitted = fit_calibration(
            dataclasses.replace(evidence, features={"cosine": evidence.features["cosine"]}),
            right,
            torch.ones(2000),
            torch.arange(2000),
            {},
        )
        design = evidence.design(["cosine"]).numpy()
        target = torch.cat((right, ~right.any(1, keepdim=True)), dim=1).numpy()

        def loss(weights: np.ndarray) -> float:
            logits = design @ weights
            return float((np.logaddexp.reduce(logits, axis=1) - logits[target]).mean())

        best = optimize.minimize(loss, np.zeros(2))
        assert [fitted.beta, fitted.outside] == pytest.approx(best.x.tolist(), rel=2e-3)


class TestCosts:
    def test_costs_are_read_from_the_clock_of_the_device(self, head, monkeypatch):
        """A second passes from one look at the clock to the next; 100 queries come in two blocks."""
        devices = []
        monkeypatch.setattr(held_out, "clock", lambda device: devices.append(device) or float(len(devices)))
        reranker = gf.BayesReranker(None, unit(90, 0), head=head)
        reranker.calibrate(hub_pairs(100, 8))
        assert {rung.name: rung.cost for rung in reranker.rungs} == {"cosine": 0.02, "hub": 0.0, "head": 0.02}
        assert set(devices) == {torch.device("cpu")}

    def test_the_clock_waits_for_a_gpu(self, monkeypatch):
        waited = []
        monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
        monkeypatch.setattr("time.perf_counter", lambda: float(len(waited)))
        gpu = torch.device("cuda", 1)
        assert [clock(torch.device("cpu")), clock(gpu), clock(gpu)] == [0.0, 1.0, 2.0]
        assert waited == [gpu, gpu]


class TestChoiceOfScale:
    """The scale of the hub correction is chosen among several, and a fold has no say in what it is judged by."""

    QUERIES, SCALES = 200, 40

    def simulated(self, seed: int, useful: float | None = None) -> tuple[Evidence, Tensor, dict[float, Tensor]]:
        """Corrections that are noise, of which one may be useful; queries with the cosine as their evidence."""
        generator = torch.Generator().manual_seed(seed)
        hubs = {
            float(scale): torch.randn(self.QUERIES, K, generator=generator).double() for scale in range(self.SCALES)
        }
        cosine = torch.randn(self.QUERIES, K, generator=generator).double()
        logits = cosine if useful is None else cosine - hubs[useful]
        return evidence_with(cosine=cosine), drawn_choice(logits, seed), hubs

    def fitted(self, evidence: Evidence, right: Tensor, hubs: dict[float, Tensor]) -> gf.Calibration:
        return fit_calibration(evidence, right, torch.ones(len(right)), torch.arange(len(right)), {}, hubs=hubs)

    def test_noise_that_was_chosen_shows_no_gain(self):
        """The best of 40 is better by chance on the queries that chose it: if all folds chose together, each of these
        runs would show a gain, of .010 nats in the mean."""
        gains = []
        for seed in range(4):
            fitted = self.fitted(*self.simulated(seed))
            gains.append(next(rung.gain for rung in fitted.rungs if rung.name == "hub"))
        assert np.mean(gains) < 0

    def test_a_useful_scale_is_found_and_kept(self):
        evidence, right, hubs = self.simulated(0, useful=7.0)
        fitted = self.fitted(evidence, right, hubs)
        assert fitted.hub_scale == 7.0
        alone = self.fitted(evidence, right, {7.0: hubs[7.0]})
        assert fitted == alone

    def test_each_fold_is_judged_by_the_choice_of_the_others(self):
        evidence, right, hubs = self.simulated(1)
        target = torch.cat((right, ~right.any(1, keepdim=True)), dim=1).double()
        fold = folds_of(torch.arange(self.QUERIES), 0)
        scale, chosen = with_best_hub(evidence, hubs, target, fold)
        assert torch.equal(chosen.features["hub"], hubs[scale])
        assert len(chosen.by_fold) == int(fold.max()) + 1
        for number, seen in enumerate(chosen.by_fold):
            rest = fold != number
            few = {name: values[rest] for name, values in hubs.items()}
            alone, _ = with_best_hub(evidence.rows(rest), few, target[rest], torch.zeros(int(rest.sum())))
            assert torch.equal(seen.features["hub"], hubs[alone])


class TestPlatt:
    def test_overconfident_probabilities_are_corrected(self):
        """Two right items of three: an answer is right more often than it is the one meant."""
        prob = torch.tensor([0.1, 0.5, 1.0], dtype=torch.float64)
        assert probability_right(prob, 2.0, None).tolist() == [0.2, 1.0, 1.0]
        expected = stats.logistic.cdf(2.0 * np.log(np.array([0.1, 0.5]) / np.array([0.9, 0.5])) + 0.5)
        assert probability_right(prob[:2], 1.0, (2.0, 0.5)).numpy() == pytest.approx(expected)

    def test_probabilities_of_answers_are_calibrated_with_several_right_items(self):
        image, text = hub_world(300, 1)
        second = torch.nn.functional.normalize(text + 0.3 * unit(300, 3), dim=1)
        index = torch.arange(300).repeat(2)
        pairs = gf.EmbeddingPairs.from_arrays(image, torch.cat((text, second)), index)
        held, test = pairs.split(0.5, 0)
        task = RetrievalTask.of(test, "i2t")
        reranker = gf.BayesReranker(None, task.items, "i2t")
        reranker.calibrate(held)
        result = reranker(task.queries)
        right = task.is_right(result.answer).double()
        assert abs(float(result.p_answer.mean()) - float(right.mean())) < 3.5 * float(right.std()) / math.sqrt(
            len(right)
        )


class TestHubs:
    def test_numbers_are_those_of_the_formula(self, head):
        bank, items = unit(30, 1), unit(50, 2)
        source = HeadSource(head, Direction.T2I)
        hubs, gallery = Hubs(bank, source), gf.Gallery(items)
        expected = (20 * (bank.double() @ items.double().T)).logsumexp(0) - math.log(30)
        torch.testing.assert_close(hubs.cosine_numbers(gallery, 20.0).double(), expected, atol=1e-4, rtol=0)
        points = head.points(bank, Direction.T2I)
        each = torch.einsum("rkd,nd->rkn", points.points.double(), items.double()) + points.log_weights.unsqueeze(2)
        expected = each.logsumexp(1).logsumexp(0) - math.log(30) + head.item_bias(items, Direction.T2I)
        torch.testing.assert_close(hubs.head_numbers(gallery).double(), expected.double(), atol=1e-4, rtol=0)
        some = hubs.of_items(items, None, (20.0,))
        torch.testing.assert_close(some["hub"][0], hubs.cosine_numbers(gallery, 20.0).double(), atol=1e-4, rtol=0)
        torch.testing.assert_close(some["head_hub"], hubs.head_numbers(gallery).double(), atol=1e-4, rtol=0)

    def test_queries_that_are_left_out_do_not_count(self):
        scores = torch.randn(7, 5, dtype=torch.float64)
        left_out = torch.rand(7, 5) < 0.4
        left_out[0] = False
        for item in range(5):
            kept = scores[~left_out[:, item], item]
            expected = kept.logsumexp(0) - math.log(len(kept))
            assert float(log_mean(scores, left_out)[item]) == pytest.approx(float(expected))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_one_exponential_serves_all_scales(self, dtype):
        """Where cosines are as far apart as they can be, powers vanish; the largest of an item never does."""
        cosine = torch.linspace(-1, 1, 7 * 5, dtype=dtype)[torch.randperm(35)].view(7, 5)
        left_out = torch.rand(7, 5) < 0.4
        left_out[0] = False
        for left in (None, left_out):
            expected = torch.stack([log_mean(scale * cosine.double(), left) for scale in SCALES])
            torch.testing.assert_close(log_means(cosine, left, SCALES), expected, atol=1e-4, rtol=0)

    def test_corrections_computed_once_for_an_item_are_those_of_every_cell(self, head):
        """Queries that share items, some of them in other folds, and own items that are in the gallery already."""
        image, text = hub_world(70, 3)
        pairs = gf.EmbeddingPairs.from_arrays(image[:35], text, np.arange(70) % 35)
        task = held_out.KnownItems.of_task(RetrievalTask.of(pairs, "t2i"))
        reranker = gf.BayesReranker(None, image, head=head, shortlist=20)
        for bank in (None, unit(9, 4)):
            known = held_out.HeldOut(reranker, task, bank)
            rows = torch.arange(70).flip(0)[::2]
            index = reranker._shortlists(known.queries[rows], 20)
            items = reranker.gallery.take(index, torch.float32)
            shortlist = held_out.Shortlist(items, torch.ones(35, 20).double(), index >= 0, index)
            near = shortlist.with_own(known._own(rows, known.queries[rows])).near
            shared = known._hub_features(rows, near)
            assert set(shared) == {"hub", "head_hub"}
            for query in range(35):
                left_out = known._left_out(rows[query].expand(21), near.items[query])
                plain = known.hubs.of_items(near.items[query], left_out, SCALES)
                for name, values in plain.items():
                    torch.testing.assert_close(shared[name][..., query, :], values, atol=1e-4, rtol=0)

    def test_two_images_whose_items_are_in_the_gallery(self):
        """Without one fold and the item's own queries, no query of the bank would be left."""
        image, text = hub_world(80, 6)
        pairs = gf.EmbeddingPairs.from_arrays(image[:2], text, np.arange(80) % 2)
        reranker = gf.BayesReranker(None, image[:30])
        fitted = reranker.calibrate(pairs)
        assert all(math.isfinite(weight) for weight in fitted.by_feature.values())
        assert all(math.isfinite(rung.gain) for rung in reranker.rungs)

    def test_the_correction_finds_more_in_a_world_with_hubs(self):
        image, text = hub_world(800, 7)
        reranker = gf.BayesReranker(None, image, "t2i", shortlist=64)
        fitted = reranker.calibrate(hub_pairs(600, 8))
        assert next(rung for rung in reranker.rungs if rung.name == "hub").kept
        assert fitted.others["hub"] < 0
        result, own = reranker(text), torch.arange(800)
        assert float((result.index[:, 0] == own).double().mean()) > 1.1 * float((result.answer == own).double().mean())

    def test_a_bank_of_the_callers(self):
        image, text = hub_world(300, 7)
        bank = hub_world(200, 9)[1]
        reranker = gf.BayesReranker(None, image, bank=bank.numpy().astype(np.float16))
        reranker.calibrate(hub_pairs(300, 8))
        torch.testing.assert_close(reranker.bank, bank, atol=1e-3, rtol=0)
        reranker(text[:5])

    @pytest.mark.parametrize(
        ("bank", "words"),
        [(torch.ones(3, DIM), "bank"), (torch.zeros(0, DIM), "R at least 2"), (torch.eye(DIM + 1), "bank must be")],
    )
    def test_bad_banks(self, bank, words):
        with pytest.raises(ValueError, match=words):
            gf.BayesReranker(None, unit(20, 0), bank=bank)

    def test_a_stored_calibration_brings_its_bank(self, tmp_path):
        image, text = hub_world(300, 7)
        reranker = gf.BayesReranker(None, image)
        reranker.calibrate(hub_pairs(300, 8))
        path = reranker.save_calibration(tmp_path / "weights.json")
        other = gf.BayesReranker(None, image)
        assert other.load_calibration(path) == reranker.calibration
        for name in ("index", "prob", "p_answer"):
            assert torch.equal(getattr(other(text), name), getattr(reranker(text), name)), name
        with pytest.raises(ValueError, match="another bank"):
            gf.BayesReranker(None, image, bank=text).load_calibration(path)
        (bank,) = tmp_path.glob("weights.*.bank.safetensors")
        bank.unlink()
        with pytest.raises(FileNotFoundError, match="bank"):
            gf.BayesReranker(None, image).load_calibration(path)
        other._use_bank(text)
        with pytest.raises(ValueError, match="another bank"):
            other(text)

    def test_a_kill_between_bank_and_weights_leaves_the_earlier_calibration_whole(self, tmp_path, monkeypatch):
        image, text = hub_world(60, 7)
        banks = unit(30, 8), text
        made = [gf.BayesReranker(None, image, bank=bank) for bank in banks]
        for reranker in made:
            reranker.calibration = dataclasses.replace(
                reranker._uncalibrated(), outside=0.0, bank=reranker._bank_digest, made_for=reranker.made_for
            )
        path = made[0].save_calibration(tmp_path / "weights.json")

        def kill(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(type(made[0].calibration), "save", kill)
            with pytest.raises(KeyboardInterrupt):
                made[1].save_calibration(path)
        assert gf.BayesReranker(None, image).load_calibration(path).bank == made[0].calibration.bank
        made[1].save_calibration(path)
        assert gf.BayesReranker(None, image).load_calibration(path).bank == made[1].calibration.bank
        assert len(list(tmp_path.glob("*.bank.safetensors"))) == 1

    def test_held_out_items_that_are_in_the_gallery_do_not_look_like_hubs(self):
        """The world has no hubs: other queries' own items must not seem to be any because their queries are the
        bank."""
        generator = torch.Generator().manual_seed(0)
        image = noise.sample_uniform(400, DIM, generator=generator)
        text = torch.nn.functional.normalize(image + 0.3 * torch.randn(400, DIM, generator=generator), dim=1)
        reranker = gf.BayesReranker(None, image)
        reranker.calibrate(gf.EmbeddingPairs.from_arrays(image, text))
        hub = next(rung for rung in reranker.rungs if rung.name == "hub")
        assert hub.gain < 2 * hub.stderr


class TestOwnItems:
    """Queries have different numbers of own items, and the shorter rows are padded."""

    @pytest.fixture
    def known(self) -> held_out.KnownItems:
        own = torch.tensor([[k, -1] if k % 3 else [k, k + 1] for k in range(60)])
        own[59] = torch.tensor([59, -1])
        items = unit(60, 2)
        return held_out.KnownItems(unit_sum(items, 0.5 * unit(60, 1)), items, own, torch.arange(60))

    def padded(self, known: held_out.KnownItems) -> held_out.KnownItems:
        """The same with two more columns, which hold nothing."""
        return dataclasses.replace(known, own=torch.nn.functional.pad(known.own, (0, 2), value=-1))

    def test_padding_is_no_item(self, head, known):
        reranker = gf.BayesReranker(None, unit(90, 3), shortlist=7, head=head)
        plain, padded = (
            held_out.HeldOut(reranker, each, None).evidence(lambda _: None) for each in (known, self.padded(known))
        )
        assert torch.equal(plain.right_count, (known.own >= 0).sum(1))
        assert torch.equal(padded.right_count, plain.right_count)
        assert bool((plain.evidence.valid.sum(1) == 7).all())
        assert int(plain.right.sum()) > 50
        for name in ("right", "absent", "number"):
            wide, narrow = getattr(padded, name), getattr(plain, name)
            assert torch.equal(wide[:, : narrow.shape[1]], narrow), name
        assert not padded.right[:, -2:].any()
        assert not padded.evidence.valid[:, -2:].any()
        for name, values in plain.evidence.features.items():
            wide = padded.evidence.features[name][:, : values.shape[1]]
            valid = plain.evidence.valid
            torch.testing.assert_close(wide[valid], values[valid], msg=name)
        for scale, values in plain.hubs.items():
            wide = padded.hubs[scale][:, : values.shape[1]]
            torch.testing.assert_close(wide[plain.evidence.valid], values[plain.evidence.valid])

    def test_padding_leaves_out_no_item_of_the_bank(self, known):
        """The own items of a query do not count in its level over a bank of items; item 0 is not everyone's own."""
        reranker = gf.BayesReranker(None, unit(90, 3), shortlist=7)
        bank = ItemBank(known.items, None, None)
        levels = held_out.HeldOut(reranker, known, None).level(bank, {"cosine": 5.0}, 1.0)
        cosine = known.queries.double() @ known.items.double().T
        for query, own in enumerate(known.own.tolist()):
            others = [k for k in range(60) if k not in own]
            expected = (5.0 * cosine[query, others]).exp().mean().log()
            assert float(levels[query]) == pytest.approx(float(expected), abs=1e-5)

    def test_queries_of_which_item_zero_is_not_right_count_in_its_hub_correction(self, known):
        reranker = gf.BayesReranker(None, unit(90, 3), shortlist=7)
        held = held_out.HeldOut(reranker, self.padded(known), None)
        assert int(held._is_right.sum()) == int((known.own >= 0).sum())
        assert held._is_right[:, 0].nonzero().squeeze(1).tolist() == [
            row for row, query in enumerate(held.bank_rows.tolist()) if query == 0
        ]


class TestHead:
    def test_uncalibrated_probabilities_are_the_heads_own(self, head):
        items, queries = unit(40, 1), unit(6, 2)
        reranker = gf.BayesReranker(None, items, head=head, shortlist=40)
        with pytest.warns(UserWarning, match="uncalibrated"):
            result = reranker(queries)
        scorer = gf.RetrievalEntropy(head, items, top_k=40)(queries)
        assert torch.equal(result.index, scorer.top_index)
        torch.testing.assert_close(result.prob, scorer.top_prob, atol=1e-5, rtol=1e-4)

    @pytest.mark.parametrize("direction", ["t2i", "i2t"])
    def test_the_ladder_takes_the_head_where_it_helps(self, head, direction):
        held = hub_pairs(600, 8)
        task = RetrievalTask.of(hub_pairs(400, 7), direction)
        plain, with_head = (gf.BayesReranker(None, task.items, direction, head=model) for model in (None, head))
        before, after = plain.calibrate(held), with_head.calibrate(held)
        rung = next(rung for rung in with_head.rungs if rung.name == "head")
        assert after.nll <= before.nll + 1e-9
        assert rung.kept == (rung.gain > rung.stderr)
        assert set(after.by_feature) >= {"head", "head_hub"} or not rung.kept

    def test_unequal_widths_have_shortlists_of_the_head(self):
        image, text = hub_world(500, 1)
        pairs = gf.EmbeddingPairs.from_arrays(image, torch.nn.functional.normalize(text[:, :6], dim=1))
        config = gf.HeadConfig(steps=40, batch_size=128, points=1, hidden=16, val_every=20, bank=32)
        head = gf.PosteriorHead.fit(pairs.subset(np.arange(300)), config, k=1)
        with pytest.raises(ValueError, match="one width"):
            gf.BayesReranker(None, image[300:], head=head)
        reranker = gf.BayesReranker(None, image[300:], head=head, shortlist_by="head")
        reranker.calibrate(pairs.subset(np.arange(150, 300)))
        assert [rung.name for rung in reranker.rungs] == ["head"]
        result = reranker(pairs[np.arange(300, 500)][1])
        scorer = gf.RetrievalEntropy(head, image[300:])
        assert torch.equal(result.answer, scorer(pairs[np.arange(300, 500)][1]).map_index)

    def test_items_of_the_gallery_are_as_near_as_the_same_items_elsewhere(self, head):
        """Numbers that are kept for the gallery's rows, the first one included, are those computed for the items."""
        items, queries = unit(30, 6), unit(4, 7)
        reranker = gf.BayesReranker(None, items, head=head, shortlist_by="head", shortlist=30)
        index = torch.arange(30).repeat(4, 1)
        known, new = (reranker.nearness(queries, items.expand(4, -1, -1), which) for which in (index, None))
        torch.testing.assert_close(known, new)
        assert float(known.std()) > 0.1

    @pytest.mark.parametrize(
        ("spoil", "words"),
        [
            (lambda rows: np.where(rows == rows[0, 0], 500, rows), "query 0 .*row 500 of a gallery of 50"),
            (lambda rows: np.where(rows == rows[-1, 0], -2, rows), "row -2 of a gallery of 50"),
            (lambda rows: rows.astype(float), "whole numbers"),
            (lambda rows: rows * np.nan, "whole numbers"),
            (lambda rows: rows[:-1], "whole numbers"),
            (lambda rows: rows.ravel(), "whole numbers"),
            (lambda _: None, "whole numbers"),
        ],
    )
    def test_a_store_that_answers_nonsense_for_the_points_of_a_head(self, head, spoil, words):
        rows = unit(50, 6)

        class Spoiled:
            ntotal, d = 50, DIM

            def search(self, x: np.ndarray, k: int) -> tuple[np.ndarray, object]:
                cosine = x @ rows.numpy().T
                order = np.argsort(-cosine, axis=1)[:, :k]
                return np.take_along_axis(cosine, order, 1), spoil(order)

        reranker = gf.BayesReranker(
            None, gf.Gallery(rows, store=Spoiled()), head=head, shortlist_by="head", shortlist=10
        )
        with pytest.raises(ValueError, match=words):
            reranker.rerank(unit(4, 7))

    def test_shortlists_of_a_store_are_those_of_a_whole_pass(self, head):
        items, queries = unit(200, 3), unit(9, 4)
        whole, stored = (
            gf.BayesReranker(None, gallery, head=head, shortlist_by="head", shortlist=20)
            for gallery in (items, gf.Gallery(items, store=ExactStore(items)))
        )
        both = [reranker.rerank(queries) for reranker in (whole, stored)]
        assert torch.equal(both[0].answer, both[1].answer)
        shared = [len(set(a.tolist()) & set(b.tolist())) for a, b in zip(both[0].index, both[1].index)]
        assert np.mean(shared) > 18

    def test_the_first_row_of_a_store_may_be_the_answer(self, head):
        items, queries = unit(60, 3), unit(5, 4)
        plain = gf.BayesReranker(None, items, head=head, shortlist_by="head", shortlist=8).rerank(queries).answer
        for query, best in zip(queries.split(1), plain.tolist()):
            moved = items.roll(-best, 0)
            gallery = gf.Gallery(moved, store=ExactStore(moved))
            stored = gf.BayesReranker(None, gallery, head=head, shortlist_by="head", shortlist=8)
            assert stored.rerank(query).answer.tolist() == [0]

    def test_a_head_of_another_dtype(self, head):
        flow = gf.GeoFlow(gf.GeoFlowConfig(DIM, DIM, hidden=32, depth=1)).double()
        reranker = gf.BayesReranker(flow, unit(90, 0), head=head, n_steps=1)
        reranker.calibrate(hub_pairs(120, 8))
        assert reranker(unit(3, 1)).prob.dtype == torch.float64

    def test_settings_that_do_not_fit(self, head):
        with pytest.raises(ValueError, match="shortlist_by"):
            gf.BayesReranker(None, unit(9, 0), shortlist_by="head")
        with pytest.raises(ValueError, match="shortlist_by must be"):
            gf.BayesReranker(None, unit(9, 0), head=head, shortlist_by="flow")
        with pytest.raises(ValueError, match="budget must be"):
            gf.BayesReranker(None, unit(9, 0), budget=1.5)
        with pytest.raises(ValueError, match="there is no flow"):
            gf.BayesReranker(None, unit(9, 0), budget=0.5)
        with pytest.raises(TypeError, match="pass it as head="):
            gf.BayesReranker(head, unit(9, 0))
        with pytest.raises(TypeError, match="head must be a PosteriorHead or None, got str"):
            gf.BayesReranker(None, unit(9, 0), head="x")
        with pytest.raises(ValueError, match="gallery has width"):
            gf.BayesReranker(None, unit(9, 0, 5), head=head)
        with pytest.raises(TypeError, match="unexpected keyword argument 'stores'"):
            gf.BayesReranker(None, unit(9, 0), stores=1)

    def test_a_changed_head_is_noticed(self, head):
        changed = gf.PosteriorHead(head.config, DIM, DIM)
        changed.load_state_dict(head.state_dict())
        reranker = gf.BayesReranker(None, unit(60, 0), head=changed)
        reranker.calibration = dataclasses.replace(UNCALIBRATED_HEAD, made_for=reranker.made_for)
        with torch.no_grad():
            changed.towers["t2i"].log_concentration += 1
        with pytest.raises(ValueError, match="another head"):
            reranker(unit(3, 1))


class TestBudget:
    @pytest.fixture
    def reranker(self) -> gf.BayesReranker:
        torch.manual_seed(0)
        flow = gf.GeoFlow(gf.GeoFlowConfig(DIM, DIM, hidden=32, depth=1, layer_scale=0.5)).eval()
        reranker = gf.BayesReranker(flow, hub_world(300, 7)[0], n_steps=1, budget=0.2)
        fitted = reranker.calibrate(hub_pairs(200, 8))
        # Whatever the untrained flow brought, it is kept here, to see who is asked.
        weights = {"cosine": fitted.beta, **fitted.others, "outside": fitted.outside}
        gaps = tuple(np.linspace(0, 1, 101).tolist())
        cheap = gf.retrieval.calibration.CheapFit(weights, None, gaps)
        reranker.calibration = dataclasses.replace(fitted, alpha=0.1, cheap=cheap)
        return reranker

    def test_close_calls_are_asked_first_and_no_more_than_the_share(self, reranker):
        text = hub_world(300, 7)[1]
        whole = reranker(text)
        assert 0 < int(whole.asked_flow.sum()) <= 60
        cheap = gf.BayesReranker(None, reranker.gallery, shortlist=reranker.shortlist)
        cheap.calibration = dataclasses.replace(reranker.calibration, alpha=0.0, cheap=None, made_for={})
        cheap._use_bank(reranker.bank)
        cheap.item_bank = reranker.item_bank
        plain = cheap(text)
        gap = plain.prob[:, 0] - plain.prob[:, 1]
        closest = gap.argsort(stable=True).argsort(stable=True) < 60
        assert torch.equal(whole.asked_flow, closest & (gap <= 0.2))
        torch.testing.assert_close(whole.prob[~whole.asked_flow], plain.prob[~whole.asked_flow])

    @pytest.mark.parametrize("tiers", [True, False])
    def test_queries_that_were_not_asked_about_have_the_probabilities_of_the_fit_without_the_flow(
        self, reranker, tiers
    ):
        """Without tiers the flow is asked about all items of a query or about none."""
        fitted, text = reranker.calibration, hub_world(300, 7)[1]
        fitted = fitted if tiers else dataclasses.replace(fitted, rest=None)
        sharper = {name: 1.5 * weight for name, weight in fitted.cheap.weights.items()}
        reranker.calibration = dataclasses.replace(fitted, cheap=dataclasses.replace(fitted.cheap, weights=sharper))
        whole = reranker(text)
        assert 0 < int(whole.asked_flow.sum()) < len(text)
        plain = gf.BayesReranker(None, reranker.gallery, shortlist=reranker.shortlist)
        others = {name: sharper[name] for name in fitted.others}
        weights = {"alpha": 0.0, "beta": sharper["cosine"], "others": others, "outside": sharper["outside"]}
        plain.calibration = dataclasses.replace(fitted, **weights, cheap=None, made_for={})
        plain._use_bank(reranker.bank)
        plain.item_bank = reranker.item_bank
        expected = plain(text)
        torch.testing.assert_close(whole.prob[~whole.asked_flow], expected.prob[~whole.asked_flow])

    def test_no_budget_asks_all_and_none_nobody(self, reranker):
        text = hub_world(300, 7)[1][:30]
        for budget, asked in ((None, 30), (0.0, 0)):
            reranker.budget = budget
            assert int(reranker(text).asked_flow.sum()) == asked
        reranker.budget = 0.2

    def test_close_call(self):
        prob = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.8, 0.1]], dtype=torch.float64)
        torch.testing.assert_close(close_call(prob), torch.tensor([0.2, 0.7], dtype=torch.float64))

    @pytest.mark.parametrize(("budget", "asked"), [(0.2, [1]), (0.7, [1, 2]), (1.0, [0, 1, 2])])
    def test_who_is_asked_of_three(self, budget, asked):
        """One may be asked however small the share is, and the whole budget asks all."""
        gap = torch.tensor([0.95, 0.05, 0.3], dtype=torch.float64)
        flow = gf.GeoFlow(gf.GeoFlowConfig(DIM, DIM, hidden=16, depth=1))
        reranker = gf.BayesReranker(flow, unit(9, 0), n_steps=1, budget=budget)
        cheap = gf.retrieval.calibration.CheapFit({"cosine": 1.0, "outside": 0.0}, None, (0.0, 0.9, 1.0))
        assert reranker._closest_calls(gap, cheap).nonzero().flatten().tolist() == asked

    @pytest.mark.parametrize(("budget", "asked"), [(0.5, [2]), (0.75, [2, 3]), (0.8, [0, 2, 3]), (1.0, [0, 1, 2, 3])])
    def test_calls_are_as_close_as_the_closest_share_of_those_held_out(self, budget, asked):
        """Gaps of held-out queries are spread evenly from 0 to 1, so that a share of them lies below just that gap."""
        gap = torch.tensor([0.78, 0.9, 0.05, 0.74], dtype=torch.float64)
        flow = gf.GeoFlow(gf.GeoFlowConfig(DIM, DIM, hidden=16, depth=1))
        reranker = gf.BayesReranker(flow, unit(9, 0), n_steps=1, budget=budget)
        for gaps in ((0.0, 1.0), (0.0, 0.5, 1.0), tuple(np.linspace(0, 1, 8).tolist())):
            cheap = gf.retrieval.calibration.CheapFit({"cosine": 1.0, "outside": 0.0}, None, gaps)
            assert reranker._closest_calls(gap, cheap).nonzero().flatten().tolist() == asked


@pytest.mark.parametrize("rows", [0, 1, 7])
def test_any_number_of_queries(head, rows):
    reranker = gf.BayesReranker(None, unit(30, 0), head=head)
    result = reranker.rerank(unit(rows, 1))
    assert result.prob.shape == (rows, 30)
    assert result.asked_flow.tolist() == [False] * rows
