"""Same seed, same result: over threads, pieces and restarts. docs/reliability.md says what is equal bit by bit."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import geoflow_fast as gf
from geoflow_fast import ops
from geoflow_fast.directions import DIRECTIONS
from geoflow_fast.likelihood.reverse_ode import density_estimates
from geoflow_fast.likelihood.settings import DensitySettings
from geoflow_fast.noise import sample_uniform
from tests.samples import shaken

WIDTH, QUERIES, ITEMS, ROWS, KAPPA = 16, 9, 301, 64, 20.0
Result = dict[str, Tensor]

CLOSE = 1e-6
"""Largest difference where bits may differ, the rounding of float32: of numbers up to one, and relative to the largest
of the others."""


def unit(rows: int, seed: int) -> Tensor:
    return sample_uniform(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def flow() -> gf.GeoFlow:
    """A network whose velocities are not zero."""
    torch.manual_seed(1)
    return shaken(gf.GeoFlow(gf.GeoFlowConfig(WIDTH, WIDTH, hidden=64, depth=2, layer_scale=0.5)), 0.05)


def train(_: gf.GeoFlow, seed: int = 0, **changes: object) -> Result:
    torch.manual_seed(0)
    flow = gf.GeoFlow(gf.GeoFlowConfig(WIDTH, WIDTH, hidden=32, depth=1))
    settings = {"steps": 8, "batch_size": 48, "val_every": 4, "val_batches": 1, "warmup_steps": 2, "seed": seed}
    pairs = gf.EmbeddingPairs.from_arrays(unit(ROWS, 1), unit(ROWS, 2))
    report = gf.train(flow, pairs, gf.TrainConfig(**{**settings, **changes}), progress=False)
    weights = torch.cat([p.detach().reshape(-1) for p in flow.parameters()])
    return {"weights": weights, "loss": torch.tensor([report.best_val_loss], dtype=torch.float64)}


def scores(flow: gf.GeoFlow, queries: Tensor, gallery: Tensor | Path, seed: int = 0) -> Result:
    posterior = gf.RetrievalEntropy(flow, gallery, n_samples=6, n_steps=5, kappa=KAPPA, seed=seed)(queries)
    names = ("entropy", "map_prob", "risk_lower_bound", "top_index", "top_prob")
    return {name: getattr(posterior, name) for name in names}


def entropy(flow: gf.GeoFlow, seed: int = 0) -> Result:
    return scores(flow, unit(QUERIES, 3), unit(ITEMS, 4), seed)


def log_densities(flow: gf.GeoFlow, rows: slice, seed: int = 0) -> Tensor:
    """[3, 1, rows] of the directions; `rows` of all pairs."""
    settings = DensitySettings(n_steps=3)
    image, text = unit(ROWS, 1)[rows], unit(ROWS, 2)[rows]
    return density_estimates(flow, image, text, DIRECTIONS, settings, seed, first_row=rows.start or 0)


def density(flow: gf.GeoFlow, seed: int = 0) -> Result:
    return {"log_density": log_densities(flow, slice(0, ROWS), seed)}


def reranked(flow: gf.GeoFlow, queries: Tensor, seed: int = 0) -> Result:
    answers = gf.BayesReranker(flow, unit(ITEMS, 4).to(queries), shortlist=6, n_steps=3, seed=seed).rerank(queries)
    return {name: getattr(answers, name) for name in ("index", "prob", "p_answer", "entropy")}


def rerank(flow: gf.GeoFlow, seed: int = 0) -> Result:
    return reranked(flow, unit(QUERIES, 3), seed)


def drawn(flow: gf.GeoFlow, queries: Tensor, seed: int = 0) -> Result:
    generator = torch.Generator().manual_seed(seed)
    return {"image": gf.sample(flow, text=queries, n_samples=6, n_steps=5, generator=generator)[0]}


def sample(flow: gf.GeoFlow, seed: int = 0) -> Result:
    return drawn(flow, unit(QUERIES, 3), seed)


def clouds(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return unit(ITEMS, seed + 5), unit(ITEMS, seed + 6), unit(ITEMS, 7), unit(ITEMS, 8)


def sinkhorn(_: gf.GeoFlow, seed: int = 0) -> Result:
    image0, _, image1, _ = clouds(seed)
    solution = ops.sinkhorn(torch.cdist(image0, image1), 0.02)
    return {"row potential": solution.f, "column potential": solution.g}


def ot_assign(_: gf.GeoFlow, seed: int = 0) -> Result:
    return {"target": ops.ot_assign(*clouds(seed))}


def gallery_statistics(_: gf.GeoFlow, seed: int = 0) -> Result:
    samples = unit(QUERIES * 6, 9 + seed).view(QUERIES, 6, WIDTH)
    posterior = ops.gallery_statistics(samples, unit(ITEMS, 4), KAPPA, top_k=5).posterior(torch.float64)
    return {name: getattr(posterior, name) for name in ("entropy", "log_z", "top_index", "top_prob")}


SUBJECTS: dict[str, Callable[..., Result]] = {
    subject.__name__: subject
    for subject in (train, entropy, density, rerank, sample, sinkhorn, ot_assign, gallery_statistics)
}
SAME_BITS_ON_ANY_THREADS = {"sinkhorn", "ot_assign", "gallery_statistics"}
# What is read off samples moves kappa times as far as they, which hold to 1e-7. Probabilities over a shortlist are
# exponentials of differences of log-densities, tens of nats each of which holds to `CLOSE`.
TOLERANCE = {"entropy": 1e-7 * KAPPA, "rerank": 1e-5}


def on(threads: int, subject: str, flow: gf.GeoFlow, **changes: object) -> Result:
    torch.set_num_threads(threads)  # conftest.py puts it back
    return SUBJECTS[subject](flow, **changes)


@pytest.fixture(scope="module")
def whole(flow: gf.GeoFlow) -> Callable[[int, str], Result]:
    """Results by threads and subject, each computed once."""
    return functools.cache(lambda threads, subject: on(threads, subject, flow))


def assert_same_bits(a: Result, b: Result) -> None:
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def assert_close(a: Result, b: Result, tolerance: float = CLOSE) -> None:
    """Whole numbers are equal; others differ by at most `tolerance`, relative to the largest if that is above one."""
    for name, x in a.items():
        assert x.shape == b[name].shape
        if x.is_floating_point():
            assert float((x - b[name]).abs().max()) <= tolerance * max(1.0, float(b[name].abs().max())), name
        else:
            assert torch.equal(x, b[name]), name


@pytest.mark.parametrize("subject", SUBJECTS)
def test_the_seed_decides(flow, whole, subject):
    """The same bits again, on one thread and on two; other bits with another seed."""
    for threads in (1, 2):
        assert_same_bits(on(threads, subject, flow), whole(threads, subject))
    other = on(1, subject, flow, seed=1)
    assert any(not torch.equal(x, other[name]) for name, x in whole(1, subject).items())


@pytest.mark.parametrize("subject", SUBJECTS)
def test_threads_change_nothing_but_rounding(whole, subject):
    one, two = whole(1, subject), whole(2, subject)
    if subject in SAME_BITS_ON_ANY_THREADS:
        assert_same_bits(one, two)
    assert_close(one, two, TOLERANCE.get(subject, CLOSE))


def joined(parts: list[Result]) -> Result:
    return {name: torch.cat([part[name] for part in parts], -1 if name == "log_density" else 0) for name in parts[0]}


@pytest.mark.parametrize(("rows", "threads"), [(1, 1), (4, 1), (4, 2)])
@pytest.mark.parametrize("subject", ["entropy", "rerank", "sample", "density"])
def test_pieces_change_nothing_but_rounding(flow, whole, monkeypatch, subject, rows, threads):
    """Queries, or eight times as many pairs, in pieces; the rows of the network too."""
    expected = whole(threads, subject)
    torch.set_num_threads(threads)
    monkeypatch.setattr("geoflow_fast.flow.sampling.ROWS_AT_ONCE", 70)
    pieces = unit(QUERIES, 3).split(rows)
    results = {
        "entropy": lambda: [scores(flow, piece, unit(ITEMS, 4)) for piece in pieces],
        "rerank": lambda: [reranked(flow, piece) for piece in pieces],
        "sample": lambda: [drawn(flow, piece) for piece in pieces],
        "density": lambda: [
            {"log_density": log_densities(flow, slice(low, low + 8 * rows))} for low in range(0, ROWS, 8 * rows)
        ],
    }[subject]()
    assert_close(joined(results), expected, TOLERANCE.get(subject, CLOSE))


@pytest.mark.parametrize("subject", ["entropy", "rerank"])
def test_in_float64_posteriors_hold_too(flow, subject):
    """What float32 samples and log-densities move by is rounding: with more digits it is gone."""
    exact, queries, gallery = copy.deepcopy(flow).double(), unit(QUERIES, 3).double(), unit(ITEMS, 4).double()
    find = {"entropy": lambda part: scores(exact, part, gallery), "rerank": lambda part: reranked(exact, part)}[subject]
    torch.set_num_threads(1)
    pieces = joined([find(piece) for piece in queries.split(4)])
    one = find(queries)
    torch.set_num_threads(2)
    assert_close(pieces, one)
    assert_close(find(queries), one)


@pytest.mark.parametrize("block", [7, 300])
def test_blocks_of_a_gallery_on_disk_change_nothing_but_rounding(flow, whole, monkeypatch, tmp_path, block):
    expected = whole(1, "entropy")
    torch.set_num_threads(1)
    np.save(tmp_path / "gallery.npy", unit(ITEMS, 4).numpy())
    monkeypatch.setattr("geoflow_fast.retrieval.gallery.BLOCK_ROWS", block)
    assert_close(scores(flow, unit(QUERIES, 3), tmp_path / "gallery.npy"), expected, TOLERANCE["entropy"])


@pytest.mark.parametrize("threads", [1, 2])
def test_how_batches_are_made_does_not_change_a_bit_of_training(flow, whole, threads):
    assert_same_bits(on(threads, "train", flow, prefetch=False, log_every=1), whole(threads, "train"))
