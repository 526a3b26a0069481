"""Calls with many queries: results depend neither on batches nor, beyond their own size, need they memory for all."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

import geoflow_fast as gf
from geoflow_fast.retrieval.calibration import UNCALIBRATED, CheapFit
from geoflow_fast.runtime import batches
from tests.samples import Opaque, seeded, shaken, unit

DIM, ITEMS = 6, 90
DENSITY = gf.DensitySettings(n_steps=2, solver="euler")
CASES = [(1, 1), (7, 3), (7, 5), (129, 1), (129, 50), (1023, 100), (1023, 1022)]
"""Queries, and a batch size."""


def small_flow(text: int = DIM) -> gf.GeoFlow:
    torch.manual_seed(0)
    return shaken(gf.GeoFlow(gf.GeoFlowConfig(DIM, text, hidden=16, depth=1, heads=2, layer_scale=0.5)))


def small_head() -> gf.PosteriorHead:
    torch.manual_seed(0)
    config = gf.HeadConfig(steps=2, batch_size=8, val_every=1, points=3, hidden=8, bias_hidden=3, bank=5)
    head = shaken(gf.PosteriorHead(config, DIM, DIM))
    head.bank_text.copy_(unit(5, DIM, seed=5))
    head.hub_weight.fill_(0.5)
    return head


def budgeted() -> gf.BayesReranker:
    """The flow is asked for the closest calls of all queries of a call."""
    reranker = gf.BayesReranker(small_flow(), unit(ITEMS, DIM), shortlist=(20, 4), n_steps=2, budget=0.3)
    cheap = CheapFit({"cosine": 3.0, "outside": 1.0}, (1.1, 0.2), tuple(np.linspace(0, 1, 101).tolist()))
    weights = {"alpha": 0.3, "beta": 3.0, "outside": 1.0, "cheap": cheap, "rest": 0.7}
    reranker.calibration = dataclasses.replace(UNCALIBRATED, **weights, made_for={})
    return reranker


def posterior(scorer: gf.RetrievalEntropy) -> Callable[..., dict[str, Tensor]]:
    return lambda rows, **size: tensors(scorer(unit(rows, DIM, seed=1), **size))


def reranked(reranker: gf.BayesReranker, **options) -> Callable[..., dict[str, Tensor]]:
    def answer(rows: int, **size) -> dict[str, Tensor]:
        chosen = {name: value[:rows] for name, value in options.items()}
        return tensors(reranker.rerank(unit(rows, DIM, seed=1), **chosen, **size))

    return answer


def tensors(result: object) -> dict[str, Tensor]:
    values = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def drawn(rows: int, **size) -> dict[str, Tensor]:
    image, text = gf.sample(small_flow(), text=unit(rows, DIM), n_samples=3, n_steps=2, generator=seeded(), **size)
    return {"image": image, "text": text}


def drawn_pairs(rows: int, **size) -> dict[str, Tensor]:
    image, text = gf.sample(small_flow(5), n_samples=rows, n_steps=2, generator=seeded(), **size)
    return {"image": image, "text": text}


def densities(field: object, **options) -> Callable[..., dict[str, Tensor]]:
    def estimate(rows: int, **size) -> dict[str, Tensor]:
        pair = unit(rows, DIM), unit(rows, DIM, seed=1)
        settings = dataclasses.replace(DENSITY, **options)
        return {"log p": gf.log_density(field, *pair, generator=seeded(), settings=settings, **size)}

    return estimate


def terms(rows: int, **size) -> dict[str, Tensor]:
    pair, settings = (unit(rows, DIM), unit(rows, DIM, seed=1)), dataclasses.replace(DENSITY, n_probes=2)
    partners = unit(2, DIM, seed=4)
    return tensors(
        gf.epistemic(small_flow(), *pair, text_partners=partners, generator=seeded(), settings=settings, **size)
    )


def images_alone(rows: int, **size) -> dict[str, Tensor]:
    return tensors(gf.epistemic(small_flow(), unit(rows, DIM), generator=seeded(), settings=DENSITY, **size))


SUBJECTS: dict[str, Callable[[], Callable[..., dict[str, Tensor]]]] = {
    "entropy": lambda: posterior(gf.RetrievalEntropy(small_flow(), unit(ITEMS, DIM), n_samples=5, n_steps=2, kappa=20)),
    "entropy of a head": lambda: posterior(gf.RetrievalEntropy(small_head(), unit(ITEMS, DIM))),
    "rerank": lambda: reranked(gf.BayesReranker(small_flow(), unit(ITEMS, DIM), shortlist=(20, 4), n_steps=2)),
    "rerank a head's lists": lambda: reranked(
        gf.BayesReranker(None, unit(ITEMS, DIM), head=small_head(), shortlist=9, shortlist_by="head")
    ),
    "rerank candidates": lambda: reranked(
        gf.BayesReranker(small_flow(), unit(ITEMS, DIM), n_steps=2),
        candidates=torch.rand(1023, ITEMS, generator=seeded()).argsort(1)[:, :4],
    ),
    "rerank within a budget": lambda: reranked(budgeted()),
    "sample": lambda: drawn,
    "sample pairs": lambda: drawn_pairs,
    "density": lambda: densities(small_flow()),
    "density, three probes": lambda: densities(small_flow(), n_probes=3, redraw=False),
    "density of any field": lambda: densities(Opaque(small_flow())),
    "density of any field, exact": lambda: densities(Opaque(small_flow()), divergence="exact"),
    "epistemic": lambda: terms,
    "epistemic of images": lambda: images_alone,
}


@pytest.mark.parametrize("name", SUBJECTS)
def test_results_do_not_depend_on_the_batch_size(name):
    call = SUBJECTS[name]()
    wholes = {rows: call(rows, batch_size=rows) for rows in {rows for rows, _ in CASES}}
    for rows, size in CASES:
        if size == 1 and rows > 7 and name not in ("entropy", "density"):
            continue  # many calls of one query each
        pieces = call(rows, batch_size=size)
        assert pieces.keys() == wholes[rows].keys()
        for key, value in wholes[rows].items():
            close = {"atol": 2e-4, "rtol": 1e-4} if value.is_floating_point() else {"atol": 0, "rtol": 0}
            torch.testing.assert_close(
                pieces[key], value, equal_nan=True, msg=lambda m, key=key: f"{key}: {m}", **close
            )
    if name == "rerank within a budget":
        assert 0 < int(wholes[1023]["asked_flow"].sum()) <= 0.3 * 1023


@pytest.mark.parametrize("subject", ["entropy", "rerank", "sample", "density"])
def test_what_auto_precision_is_does_not_depend_on_the_batch_size(subject, monkeypatch):
    """It depends on the rows of the whole call, as where bfloat16 is faster."""
    monkeypatch.setattr("geoflow_fast.flow.precision.bfloat16_pays", lambda _: True)
    flow, queries = small_flow(), unit(40, DIM, seed=1)
    sampling = gf.SamplingSettings(n_samples=2, n_steps=2, precision="auto")

    def call(precision: str, size: int | None) -> Tensor:
        settings = dataclasses.replace(sampling, precision=precision)
        if subject == "entropy":
            scorer = gf.RetrievalEntropy(flow, unit(ITEMS, DIM), kappa=20.0, settings=settings)
            scorer.precision = "float32"
            return scorer(queries, batch_size=size).entropy
        if subject == "rerank":
            reranker = gf.BayesReranker(flow, unit(ITEMS, DIM), shortlist=4, n_steps=2)
            reranker.precision = precision
            return reranker.rerank(queries, batch_size=size).entropy
        if subject == "sample":
            return gf.sample(flow, text=queries, settings=settings, batch_size=size, generator=seeded())[0]
        density = dataclasses.replace(DENSITY, n_steps=4, precision=precision)
        pair = queries, unit(40, DIM, seed=2)
        return gf.log_density(flow, *pair, settings=density, batch_size=size, generator=seeded())

    whole, single = call("float32", None), call("float32", 1)
    torch.testing.assert_close(single, whole, atol=2e-5, rtol=0)
    rounded = call("auto", None)
    assert float((rounded - whole).abs().max()) > 1e-3
    torch.testing.assert_close(call("auto", 1), rounded, atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", SUBJECTS)
def test_no_rows_are_one_empty_batch(name):
    call = SUBJECTS[name]()
    if name != "sample pairs":
        assert all(len(value) == 0 for value in call(0).values())
        assert all(len(value) == 0 for value in call(0, batch_size=3).values())


@pytest.mark.parametrize("name", SUBJECTS)
@pytest.mark.parametrize("bad", [0, 1.5])
def test_a_bad_batch_size_is_named(name, bad):
    with pytest.raises((ValueError, TypeError), match="batch_size must be"):
        SUBJECTS[name]()(7, batch_size=bad)


@pytest.mark.parametrize("subject", ["entropy", "rerank"])
def test_batches_fit_into_the_memory_of_one(subject, monkeypatch):
    """By default as many queries as the widths leave room for."""
    flow, sizes = small_flow(), []
    monkeypatch.setattr(batches, "CPU_BYTES", 40_000)
    if subject == "entropy":
        scorer = gf.RetrievalEntropy(flow, unit(ITEMS, DIM), n_samples=50, n_steps=1, guidance=0.0)
        draw = scorer.source.draw
        scorer.source.draw = lambda queries, *rest: sizes.append(len(queries)) or draw(queries, *rest)
        scorer(unit(100, DIM, seed=1))
        assert sizes == [25] * 4  # 1200 bytes a query leave room for 33
    else:
        reranker = gf.BayesReranker(flow, unit(ITEMS, DIM), shortlist=(20, 4), n_steps=1)
        shortlists = reranker._shortlists
        reranker._shortlists = lambda queries, *rest: sizes.append(len(queries)) or shortlists(queries, *rest)
        reranker.rerank(unit(60, DIM, seed=1))
        assert sizes == [25, 25, 10]  # 4 items of 400 bytes: without a calibration those that the flow is asked about


def test_an_interrupt_in_a_later_batch_leaves_nothing_behind():
    reranker, queries = budgeted(), unit(40, DIM, seed=1)
    expected, taken = tensors(reranker.rerank(queries)), reranker.gallery.take
    before = {name: value for name, value in vars(reranker).items() if isinstance(value, (int, float, str, tuple))}
    calls = []

    def interrupted(*arguments: object) -> Tensor:
        calls.append(0)
        if len(calls) == 9:
            raise KeyboardInterrupt
        return taken(*arguments)

    reranker.gallery.take = interrupted
    with pytest.raises(KeyboardInterrupt):
        reranker.rerank(queries, batch_size=10)
    reranker.gallery.take = taken
    assert {name: getattr(reranker, name) for name in before} == before
    for name, value in tensors(reranker.rerank(queries)).items():
        assert torch.equal(value, expected[name]), name


def test_errors_name_the_query_of_the_call():
    """And not its place in a batch."""
    image = unit(ITEMS, DIM)

    class Store:
        def search(self, x: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
            found = np.tile(np.arange(k), (len(x), 1))
            found[np.isclose(x, last).all(1)] = -1
            return found.astype(np.float32), found

    queries = unit(9, DIM, seed=1)
    last = queries[7].numpy()
    reranker = gf.BayesReranker(None, gf.Gallery(image, store=Store()), shortlist=5)
    with pytest.raises(ValueError, match="candidates of query 7 are all -1"):
        reranker.rerank(queries, batch_size=4)
    queries[8] *= 2
    scorer = gf.RetrievalEntropy(small_flow(), image, n_samples=2, n_steps=1)
    with pytest.raises(ValueError, match="queries row 8"):
        scorer(queries, batch_size=4)


PEAK = """
import resource, sys, torch
import geoflow_fast as gf
flow = gf.GeoFlow(gf.GeoFlowConfig(512, 512, hidden=16, depth=1, heads=1)).eval()
unit = lambda rows: torch.nn.functional.normalize(torch.randn(rows, 512), dim=1)
queries, scorer = unit(QUERIES), gf.RetrievalEntropy(flow, unit(100), n_steps=1, guidance=0.0)
scorer(queries[:9])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
scorer(queries)
print(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss has other units elsewhere")
def test_samples_of_many_queries_are_never_in_memory_together():
    """50 samples at d = 512 for each of 20,000 queries are 2 GB; a batch has 128 MB of them, and what draws and scores
    them needs about as much again."""
    done = subprocess.run(
        [sys.executable, "-c", PEAK.replace("QUERIES", "20_000")], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 512 * 2**20
