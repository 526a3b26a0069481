"""Distilled scorers: what the network learns, its agreement with the flow, files, exact resume and bad input."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

import geoflow_fast as gf
from benchmarks.flows import row_flops
from geoflow_fast import noise
from geoflow_fast.head.sampler import DistilledSampler
from geoflow_fast.retrieval import distillation
from geoflow_fast.retrieval.distillation import agreement
from geoflow_fast.retrieval.sources import FlowSource, ScoringPoints
from geoflow_fast.runtime.tensors import load_tensors, save_tensors
from geoflow_fast.training.loop import CHECKPOINT_FILE, Run
from geoflow_fast.worlds import ConceptWorld

SETTINGS = {"n_samples": 6, "n_steps": 3, "kappa": 12.0, "seed": 4, "top_k": 3}
SHORT = gf.DistilConfig(steps=12, batch_size=16, hidden=16, warmup_steps=2, val_every=4, checkpoint_every=4)


def unit(rows: int, dim: int, seed: int) -> Tensor:
    return noise.sample_uniform(rows, dim, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def scorer(flow) -> gf.RetrievalEntropy:
    """Texts of width 7 search images of width 10."""
    return gf.RetrievalEntropy(flow, unit(129, 10, 0), **SETTINGS)


@pytest.fixture
def student(scorer) -> gf.RetrievalEntropy:
    return scorer.distil(unit(60, 7, 1), conf=SHORT)


def known_samples(queries: Tensor) -> Tensor:
    """A smooth function of the query in the name of the flow: [Q, 6, 10]."""
    generator = torch.Generator().manual_seed(7)
    base, centre, bend = (torch.randn(*shape, generator=generator) for shape in ((10, 7), (6, 10), (6, 7)))
    wave = torch.sin(2 * queries @ bend.T).unsqueeze(2)
    return torch.nn.functional.normalize((queries @ base.T).unsqueeze(1) + centre + wave * centre.roll(1, 0), dim=-1)


def answers(scorer: gf.RetrievalEntropy, queries: Tensor) -> list[Tensor]:
    return [x for x in vars(scorer(queries)).values() if isinstance(x, Tensor)]


def test_learns_a_known_function_of_the_query(scorer, monkeypatch):
    monkeypatch.setattr(FlowSource, "draw", lambda self, q, *_: ScoringPoints(known_samples(q), self.kappa))
    conf = gf.DistilConfig(steps=300, batch_size=64, hidden=64, warmup_steps=20, dropout=0.0)
    held_out = unit(100, 7, 2)
    student = scorer.distil(unit(600, 7, 1), held_out, conf=conf)
    drawn, expected = student.draw(held_out), known_samples(held_out)
    torch.testing.assert_close(drawn.norm(dim=-1), torch.ones(100, 6))
    near = (drawn * expected).sum(-1)
    mean = torch.nn.functional.normalize(known_samples(unit(600, 7, 1)).mean(0), dim=-1)
    without_query = (mean * expected).sum(-1)
    assert float(without_query.mean()) < 0.8
    assert float(near.mean()) > 0.99
    assert student.agreement.spearman > 0.97


def test_the_agreement_is_that_of_the_entropies_of_held_out_queries(scorer):
    held_out = unit(31, 7, 2)
    student = scorer.distil(unit(60, 7, 1), held_out, conf=SHORT)
    ours, theirs = student(held_out).entropy.numpy(), scorer(held_out).entropy.numpy()
    assert student.agreement == gf.DistilAgreement(
        pytest.approx(stats.spearmanr(ours, theirs).statistic), pytest.approx(np.abs(ours - theirs).mean()), 31, 129
    )
    assert scorer.agreement is None


def test_a_tenth_of_the_queries_is_held_out_and_serves_for_nothing_else(scorer, monkeypatch):
    trained, asked = [], []
    draw, score = distillation.draw_lessons, gf.RetrievalEntropy.forward

    def watch_draw(source, queries, *rest, **options):
        trained.append(queries)
        return draw(source, queries, *rest, **options)

    def watch_score(self, queries, advance=None):
        asked.append(queries)
        return score(self, queries, advance)

    monkeypatch.setattr(distillation, "draw_lessons", watch_draw)
    monkeypatch.setattr(gf.RetrievalEntropy, "forward", watch_score)
    queries = unit(60, 7, 1)
    assert scorer.distil(queries, conf=SHORT).agreement.queries == 6
    assert torch.equal(asked[0], asked[1])
    both = torch.cat((trained[0], asked[0]))
    assert torch.equal(both[both[:, 0].argsort()], queries[queries[:, 0].argsort()])
    scorer.distil(queries, conf=SHORT, seed=1)
    assert not torch.equal(asked[0], asked[2])


def test_an_entropy_that_never_changes_has_no_rank_correlation(tmp_path, flow):
    student = gf.RetrievalEntropy(flow, unit(1, 10, 0), **SETTINGS).distil(unit(40, 7, 1), conf=SHORT, out=tmp_path)
    assert math.isnan(student.agreement.spearman)
    assert student.agreement.difference == 0
    read = gf.RetrievalEntropy.from_pretrained(tmp_path, unit(1, 10, 0)).agreement
    assert math.isnan(read.spearman)
    assert json.loads((tmp_path / "config.json").read_text())["agreement"]["spearman"] is None


def test_agreement_counts_ties_as_scipy_does():
    ours, theirs = torch.tensor([1.0, 2.0, 2.0, 4.0]), torch.tensor([1.0, 1.0, 3.0, 2.0])
    expected = stats.spearmanr(ours, theirs).statistic
    assert agreement(ours, theirs, 9) == gf.DistilAgreement(pytest.approx(expected), 1.0, 4, 9)


@pytest.mark.parametrize("direction", ["t2i", "i2t"])
@pytest.mark.parametrize("posterior", ["likelihood", "bayes"])
def test_a_saved_scorer_gives_the_same_bits(flow, tmp_path, direction, posterior):
    query, item = (7, 10) if direction == "t2i" else (10, 7)
    gallery, reference = unit(50, item, 0), unit(9, query, 5) if posterior == "bayes" else None
    scorer = gf.RetrievalEntropy(flow, gallery, direction, posterior=posterior, reference=reference, **SETTINGS)
    student = scorer.distil(unit(40, query, 1), conf=SHORT)
    assert (student.kappa, student.top_k, student.posterior) == (12.0, 3, posterior)
    student.kappa = 9.0
    student.save_pretrained(tmp_path)
    loaded = gf.RetrievalEntropy.from_pretrained(tmp_path, gallery)
    queries = unit(11, query, 3)
    for ours, theirs in zip(answers(loaded, queries), answers(student, queries)):
        assert torch.equal(ours, theirs)
    assert loaded.settings == student.settings
    assert loaded.agreement == student.agreement
    assert loaded.source.digest() == student.source.digest()
    other = gf.RetrievalEntropy.from_pretrained(tmp_path, unit(7, item, 8), top_k=2, kappa=3.0)
    assert (other.kappa, other(queries).top_index.shape) == (3.0, (11, 2))


def test_bayes_divides_by_the_scores_of_reference_queries(student):
    queries, reference = unit(5, 7, 3), unit(9, 7, 5)
    scorer = gf.RetrievalEntropy(student.sampler, student.gallery, posterior="bayes", reference=reference)
    items = student.gallery.rows.double()

    def scores(rows: Tensor) -> Tensor:
        return (12.0 * student.draw(rows).double() @ items.T).logsumexp(1)

    pi = (scores(queries) - scores(reference).logsumexp(0)).softmax(1)
    torch.testing.assert_close(scorer(queries).entropy.double(), torch.special.entr(pi).sum(1), atol=1e-4, rtol=0)
    with pytest.raises(ValueError, match=r"marginals need reference= queries \[R, d\]$"):
        gf.RetrievalEntropy(student.sampler, student.gallery, posterior="bayes")
    with pytest.raises(ValueError, match=r"reference must be queries \[R, 7\], got 'density'"):
        gf.RetrievalEntropy(student.sampler, student.gallery, posterior="bayes", reference="density")


def test_the_call_is_that_of_its_teacher(student):
    """Mode, threads, blocks of queries and the order of the items change nothing, an empty batch is one."""
    queries = unit(513, 7, 3)
    expected = answers(student, queries)
    student.train()
    for ours, theirs in zip(answers(student, queries), expected):
        assert torch.equal(ours, theirs)
    with ThreadPoolExecutor(4) as pool:
        for answered in pool.map(lambda _: answers(student, queries), range(8)):
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(answered, expected))
    torch.testing.assert_close(student(queries[3:4]).entropy, expected[0][3:4])
    torch.testing.assert_close(student(queries.repeat_interleave(2, 1)[:, ::2]).entropy, expected[0])
    order = torch.randperm(129, generator=torch.Generator().manual_seed(1))
    permuted = gf.RetrievalEntropy(student.sampler, student.gallery.rows[order], top_k=3)(queries)
    torch.testing.assert_close(permuted.entropy, expected[0], atol=1e-5, rtol=0)
    assert torch.equal(order[permuted.map_index], expected[1])
    assert student(queries[:0]).entropy.shape == (0,)
    done = []
    student(queries, advance=done.append)
    assert sum(done) == 513
    assert student.double()(queries.double()).entropy.dtype == torch.float64
    assert set(student.state_dict()) == {f"sampler.{name}" for name in student.sampler.state_dict()}


class Killed(Exception):
    pass


def test_a_killed_run_continues_with_the_same_bits(scorer, tmp_path, monkeypatch):
    queries = unit(60, 7, 1)
    scorer.distil(queries, conf=SHORT, out=tmp_path / "whole")
    optimise, draw = Run.optimise, FlowSource.draw

    def die(self, batch):
        if self.step == 6:
            raise Killed
        return optimise(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "optimise", die)
        with pytest.raises(Killed):
            scorer.distil(queries, conf=SHORT, out=tmp_path / "killed")
    with pytest.warns(
        UserWarning, match=r"the distilled scorer in .*killed is not finished: .* call of distil"
    ) as caught:
        assert gf.RetrievalEntropy.from_pretrained(tmp_path / "killed", unit(5, 10, 0)).agreement is None
    assert [Path(warning.filename) for warning in caught] == [Path(__file__)]
    drawn = []
    monkeypatch.setattr(
        FlowSource, "draw", lambda self, q, advance=None: drawn.append(len(q)) or draw(self, q, advance)
    )
    scorer.distil(queries, conf=SHORT, out=tmp_path / "killed")
    assert drawn == [6]  # the flow's samples of the other 54 were kept
    for name in ("model.safetensors", "config.json", CHECKPOINT_FILE):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_an_interrupted_student_is_not_finished(scorer, tmp_path, monkeypatch):
    optimise = Run.optimise

    def interrupt(self, batch):
        if self.step == 6:
            os.kill(os.getpid(), signal.SIGINT)
        return optimise(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "optimise", interrupt)
        student = scorer.distil(unit(60, 7, 1), conf=SHORT, out=tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    best = min((line for line in lines if "val_loss" in line), key=lambda line: line["val_loss"])
    assert student.sampler.report == {"finished": False, "steps": 7, "best_step": best["step"]}
    with pytest.warns(UserWarning, match="is not finished"):
        loaded = gf.RetrievalEntropy.from_pretrained(tmp_path, student.gallery)
    assert loaded.sampler.report == student.sampler.report
    assert loaded.agreement == student.agreement
    assert scorer.distil(unit(60, 7, 1), conf=SHORT, out=tmp_path).sampler.report["finished"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert gf.RetrievalEntropy.from_pretrained(tmp_path, student.gallery).sampler.report["finished"]


def test_a_folder_belongs_to_one_teacher_and_its_queries(scorer, flow, tmp_path):
    queries = unit(60, 7, 1)
    first = scorer.distil(queries, conf=SHORT, out=tmp_path)
    # Another concentration is another use of the same samples.
    scorer.kappa = 5.0
    again = scorer.distil(queries, conf=SHORT, out=tmp_path)
    assert again.kappa == 5.0
    assert again.source.digest() == first.source.digest()
    with pytest.raises(ValueError, match="run on other queries"):
        scorer.distil(unit(60, 7, 2), conf=SHORT, out=tmp_path)
    with torch.no_grad():
        next(flow.parameters()).add_(0.1)
    with pytest.raises(ValueError, match=r"run with another configuration \(teacher"):
        scorer.distil(queries, conf=SHORT, out=tmp_path)
    other = scorer.distil(queries, conf=SHORT, out=tmp_path, resume=False)
    assert other.source.digest() != first.source.digest()
    assert other.sampler.teacher["flow"] == scorer.source.digest()


def test_distilling_leaves_the_random_state_alone(scorer):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, second = (scorer.distil(unit(40, 7, 1), conf=SHORT, seed=seed) for seed in (0, 0))
    assert torch.equal(torch.get_rng_state(), before)
    assert first.source.digest() == second.source.digest()


def test_the_seed_is_that_of_the_settings_unless_one_is_given(scorer):
    config = dataclasses.replace(SHORT, steps=2, seed=3)
    own, same, other = (
        scorer.distil(unit(40, 7, 1), conf=conf, seed=seed)
        for conf, seed in ((config, None), (dataclasses.replace(config, seed=0), 3), (config, 0))
    )
    assert own.sampler.config.seed == 3
    assert own.source.digest() == same.source.digest()
    assert other.sampler.config.seed == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"queries": unit(40, 6, 1)}, r"queries must be \[Q, 7\]"),
        ({"queries": 2 * unit(40, 7, 1)}, "queries row 0 has norm 2"),
        ({"queries": unit(4, 7, 1)}, "queries must be at least 5"),
        ({"queries": unit(1, 7, 1), "held_out": unit(5, 7, 2)}, "queries must be at least 2"),
        ({"held_out": unit(2, 7, 2)}, "held_out must be at least 3 queries, got 2"),
        ({"held_out": unit(5, 10, 2)}, r"held_out must be \[Q, 7\]"),
        ({"held_out": unit(5, 7, 2) * math.nan}, "held_out row 0 is not finite"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"conf": gf.HeadConfig()}, "conf must be a DistilConfig, got HeadConfig"),
        ({"out": 3}, "out must be a path"),
    ],
)
def test_bad_arguments(scorer, tmp_path, changes, words):
    before = set(tmp_path.iterdir())
    with pytest.raises((ValueError, TypeError), match=words):
        scorer.distil(**{"queries": unit(40, 7, 1), "conf": SHORT, "out": tmp_path, **changes})
    assert set(tmp_path.iterdir()) == before


def test_what_cannot_be_distilled(scorer, student, flow, monkeypatch):
    queries = unit(40, 7, 1)
    with pytest.raises(TypeError, match="only a flow's scorer can be distilled: a sampler takes one call"):
        student.distil(queries)
    head = gf.PosteriorHead(gf.HeadConfig(hidden=4, bank=3), 10, 7)
    head_scorer = gf.RetrievalEntropy(head, scorer.gallery)
    with pytest.raises(TypeError, match="only a flow's scorer can be distilled: a head takes one call"):
        head_scorer.distil(queries)
    for other, name in ((scorer, "flow"), (head_scorer, "head")):
        with pytest.raises(TypeError, match=f"only a distilled scorer is saved; .* of the {name}"):
            other.save_pretrained("folder")
    by_density = gf.RetrievalEntropy(flow, scorer.gallery, posterior="bayes", reference="density")
    with pytest.raises(ValueError, match="has no density"):
        by_density.distil(queries)
    flat = gf.GeoFlow(gf.GeoFlowConfig(10, 7, hidden=32, depth=2, geometry="euclidean"))
    with pytest.raises(ValueError, match="Euclidean flow cannot be distilled"):
        gf.RetrievalEntropy(flat, scorer.gallery).distil(queries)
    monkeypatch.setattr(distillation, "MOST_BYTES", 20 * 6 * 10 * 4)
    with pytest.raises(ValueError, match=r"samples of 36 queries take .* pass at most 20 queries"):
        scorer.distil(queries)


def test_settings_of_flows_are_refused_by_a_sampler(student):
    flow_only = {"n_samples": 3, "n_steps": 3, "guidance": 1.0, "seed": 0, "settings": gf.FAST_SAMPLING}
    for name, value in flow_only.items():
        with pytest.raises(TypeError, match=f"{name}= is a setting of flows; a DistilledSampler has none"):
            gf.RetrievalEntropy(student.sampler, student.gallery, **{name: value})
    with pytest.raises(ValueError, match="the sampler has learned t2i, but direction is i2t"):
        gf.RetrievalEntropy(student.sampler, student.gallery, "i2t")
    with pytest.raises(ValueError, match="gallery has width 9, but the sampler expects 10"):
        gf.RetrievalEntropy(student.sampler, unit(5, 9, 0))
    with pytest.raises(TypeError, match="not drawn from a flow"):
        _ = student.sampling


def spoil(folder: Path, name: str, value: object) -> None:
    """Replaces a tensor of a saved scorer or a value of its configuration; None takes it away."""
    path = folder / "model.safetensors"
    tensors, info = load_tensors(path, kind="distilled sampler")
    *groups, last = name.split(".")
    owner = tensors if name in ("number", "reference") else info
    for group in groups:
        owner = owner[group]
    owner.pop(last, None)
    if value is not None:
        owner[last] = value
    save_tensors(path, tensors, kind="distilled sampler", info=info)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("number", None, "holds nothing as number"),
        ("number", torch.ones(6, 16, dtype=torch.float64), "one floating-point dtype"),
        ("reference", torch.ones(3, 7), "as reference"),
        ("reference_rows", 2, "holds nothing as reference"),
        ("reference_rows", "2", "reference_rows must be an integer"),
        ("n_samples", 1 << 40, "n_samples must be at most"),
        ("query_dim", -7, "query_dim must be at least"),
        ("teacher", 3, "is damaged"),
        ("agreement", {"spearman": 1.0}, "is damaged"),
        ("config.hidden", None, "settings differ"),
        ("config.hidden", 1 << 30, "hidden must be at most"),
        ("scoring", None, "is damaged"),
        ("scoring.kappa", -1, "kappa must be finite"),
        ("scoring.direction", "joint", "direction"),
        ("scoring.posterior", "mean", "posterior must be one of"),
        ("scoring.top_k", 0, "top_k must be at least 1"),
    ],
)
def test_a_file_that_does_not_fit_its_configuration(student, tmp_path, name, value, words):
    student.save_pretrained(tmp_path)
    spoil(tmp_path, name, value)
    with pytest.raises(ValueError, match=words) as caught:
        gf.RetrievalEntropy.from_pretrained(tmp_path, student.gallery)
    assert str(tmp_path / "model.safetensors") in str(caught.value)


def test_a_file_of_another_kind(flow, student, tmp_path):
    flow.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="holds a 'model', but a 'distilled sampler' was expected"):
        gf.RetrievalEntropy.from_pretrained(tmp_path, student.gallery)
    with pytest.raises(FileNotFoundError):
        DistilledSampler.from_pretrained(tmp_path / "nothing")


@pytest.mark.slow
def test_the_student_ranks_queries_of_the_concept_world_as_its_teacher_does():
    """With a hundredth of the multiply-adds of sampling."""
    world, config = ConceptWorld(), gf.GeoFlowConfig.tiny()
    image, text, _ = world.sample(60_000, generator=torch.Generator().manual_seed(0))
    flow = gf.GeoFlow(config)
    gf.train(flow, gf.EmbeddingPairs.from_arrays(image, text), gf.TrainConfig.tiny())
    items, _, _ = world.sample(1000, generator=torch.Generator().manual_seed(51))
    queries, held_out = (
        world.sample(count, generator=torch.Generator().manual_seed(seed))[1] for count, seed in ((1500, 52), (400, 53))
    )
    scorer = gf.RetrievalEntropy.fast(flow, items, kappa=18.0)
    student = scorer.distil(queries, held_out)
    assert student.agreement.spearman >= 0.95, student.agreement
    how, network = scorer.sampling, student.sampler
    rows = (2 * how.n_steps - 1) * how.n_samples  # the unguided velocity at t=0 is the same for all queries
    once, each = (
        sum(layer.weight.numel() for layer in layers)
        for layers in ((network.inner, network.trunk, network.base), (network.mix, network.move))
    )
    assert once + how.n_samples * each <= rows * row_flops(config, "t2i") / 2 / 100
