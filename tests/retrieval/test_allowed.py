"""Filtered search: calls with `allowed=` give what they give in a gallery of the allowed items alone."""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import geoflow_fast as gf
from geoflow_fast import ops
from geoflow_fast.ops import allowed as filtering
from geoflow_fast.retrieval import gallery as galleries
from geoflow_fast.retrieval.calibration import UNCALIBRATED, CheapFit
from tests.retrieval.test_batch_size import budgeted, small_flow, small_head, tensors
from tests.samples import seeded, unit

DIM, ITEMS, QUERIES = 6, 90, 13
KAPPA = 20.0


def masks(items: int = ITEMS, queries: int = QUERIES) -> dict[str, Tensor]:
    """Masks over the items, of all queries and of each."""
    scattered = torch.rand(queries, items, generator=seeded(3)) < 0.4
    scattered[:, 5] = True
    few = torch.zeros(queries, items, dtype=torch.bool)
    few[torch.arange(queries), torch.arange(queries) * 5 % items] = True
    return {
        "all": torch.ones(items, dtype=torch.bool),
        "one item": torch.arange(items) == 7,
        "a stretch": (torch.arange(items) >= 20) & (torch.arange(items) < 61),
        "scattered": scattered[0],
        "by query": scattered,
        "by query, some alike": scattered[torch.arange(queries) % 3],
        "by query, one item each": few,
    }


MASKS = list(masks())
POSTERIOR, SEARCH = (importlib.import_module(f"geoflow_fast.ops.gallery_{name}") for name in ("posterior", "search"))
BACKENDS = ["reference", "cpu"]
WAYS = {"copies of rows": 0, "scores of all": 10**9}
"""The two ways in which queries can be served."""


def rows_of(mask: Tensor, query: int) -> Tensor:
    """Numbers of the items that a query may have."""
    return (mask if mask.dim() == 1 else mask[query]).nonzero().squeeze(1)


def check_lists(index: Tensor, value: Tensor, wanted: Tensor, its_value: Tensor, numbers: Tensor, empty: float) -> None:
    """A list is that of the smaller gallery, by the numbers of the larger one, and then empty."""
    kept = wanted.shape[-1]
    assert index[:kept].tolist() == numbers[wanted].tolist()
    assert index[kept:].tolist() == [-1] * (len(index) - kept)
    torch.testing.assert_close(value[:kept], its_value, atol=2e-6, rtol=0)
    assert value[kept:].tolist() == [empty] * (len(index) - kept)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_posteriors_of_samples(name, dtype, way, backend, monkeypatch):
    monkeypatch.setattr(filtering, "COPY_COST", WAYS[way])
    monkeypatch.setattr(filtering, "ROWS_AT_ONCE", 7)
    monkeypatch.setattr(POSTERIOR, "_MASKED_SCORES", {"cpu": 200})
    mask, rows = masks()[name], unit(ITEMS, DIM).to(dtype)
    if dtype == torch.float64 and backend == "cpu":
        dtype, rows = torch.float32, rows.float()  # compiled code has no other
    samples = unit(QUERIES, 4, DIM, seed=1).to(torch.float64 if dtype == torch.float64 else torch.float32)
    bias = {"item_bias": torch.randn(ITEMS, generator=seeded(4)), "sample_bias": torch.randn(QUERIES, 4)}
    post = ops.gallery_posterior(samples, rows, KAPPA, top_k=5, backend=backend, allowed=mask, **bias)
    for query in range(QUERIES):
        numbers = rows_of(mask, query)
        alone = {"item_bias": bias["item_bias"][numbers], "sample_bias": bias["sample_bias"][query : query + 1]}
        one = samples[query : query + 1]
        wanted = ops.gallery_posterior(one, rows[numbers], KAPPA, top_k=5, backend=backend, **alone)
        torch.testing.assert_close(post.entropy[query], wanted.entropy[0], atol=5e-6, rtol=0)
        torch.testing.assert_close(post.log_z[query], wanted.log_z[0], atol=5e-6, rtol=0)
        lists = post.top_index[query], post.top_prob[query], wanted.top_index[0], wanted.top_prob[0]
        check_lists(*lists, numbers, 0.0)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_hits_of_a_search(name, dtype, way, backend, monkeypatch):
    monkeypatch.setattr(filtering, "COPY_COST", WAYS[way])
    mask, rows, queries = masks()[name], unit(ITEMS, DIM).to(dtype), unit(QUERIES, DIM, seed=1)
    score, index = ops.gallery_search(queries, rows, 5, backend, allowed=mask)
    for query in range(QUERIES):
        numbers = rows_of(mask, query)
        one = queries[query : query + 1]
        scores, wanted = ops.gallery_search(one, rows[numbers], min(5, len(numbers)), backend)
        check_lists(index[query], score[query], wanted[0], scores[0], numbers, -math.inf)


@pytest.mark.parametrize("most", [1, 1024])
def test_items_that_are_allowed_and_far_away_are_found(most, monkeypatch):
    """Where a search for rather more hits than are asked for does not meet them."""
    monkeypatch.setattr(SEARCH, "_MOST_HITS", most)
    rows, queries = unit(3000, DIM), unit(QUERIES, DIM, seed=1)
    cosine = queries @ rows.T
    mask = cosine < cosine.quantile(0.3, dim=1, keepdim=True)
    mask[4] = True
    score, index = ops.gallery_search(queries, rows, 5, allowed=mask)
    wanted = cosine.masked_fill(~mask, -math.inf).topk(5, 1)
    assert torch.equal(index, wanted.indices)
    torch.testing.assert_close(score, wanted.values, atol=2e-6, rtol=0)


def test_shards_keep_their_numbers():
    """And lists of a filter can be merged."""
    rows, samples, mask = unit(ITEMS, DIM), unit(QUERIES, 4, DIM, seed=1), masks()["by query"]
    whole = ops.gallery_statistics(samples, rows, KAPPA, 7, allowed=mask)
    parts = [
        ops.gallery_statistics(
            samples, rows[low:high], KAPPA, 7, first_index=low, allowed=mask[:, low:high] | (low == 0)
        )
        for low, high in ((40, 90), (0, 40))
    ]
    merged = parts[0].merge(parts[1])
    mask = torch.cat((torch.ones(QUERIES, 40, dtype=torch.bool), mask[:, 40:]), 1)
    wanted = ops.gallery_statistics(samples, rows, KAPPA, 7, allowed=mask)
    torch.testing.assert_close(merged.log_z, wanted.log_z, atol=1e-6, rtol=0)
    assert torch.equal(merged.top_index, wanted.top_index)
    assert not torch.equal(whole.top_index, wanted.top_index)


def stored(kind: str, rows: Tensor, folder: Path) -> gf.Gallery:
    """A gallery of the same rows, in one of its forms."""
    if kind == "tensor":
        return gf.Gallery(rows)
    if kind == "codes":
        return gf.Gallery(rows, codes=True)
    if kind == "bfloat16":
        return gf.Gallery(rows.bfloat16())
    if kind == "array":
        return gf.Gallery(rows.numpy())
    if kind == "scaled array":
        return gf.Gallery((3 * rows).numpy(), normalize=True)
    if kind == "folder":
        (folder / "parts").mkdir()
        for number, part in enumerate(rows.split(37)):
            np.save(folder / "parts" / f"gallery_{number}.npy", part.numpy())
        return gf.Gallery(folder / "parts")
    np.save(folder / "rows.npy", rows.numpy().astype({"float64 file": "f8", "float16 file": "f2"}.get(kind, "f4")))
    return gf.Gallery(folder / "rows.npy")


KINDS = ["tensor", "codes", "bfloat16", "array", "scaled array", "folder", "file", "float16 file", "float64 file"]


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("kind", KINDS)
def test_galleries_of_every_kind(name, kind, tmp_path, monkeypatch):
    monkeypatch.setattr(galleries, "BLOCK_ROWS", 17)
    mask, rows = masks()[name], unit(ITEMS, DIM)
    whole = stored(kind, rows, tmp_path)
    queries, samples = unit(QUERIES, DIM, seed=1), unit(QUERIES, 4, DIM, seed=2)
    score, index = whole.search(queries, 5, allowed=mask)
    statistics = whole.statistics(samples, KAPPA, 5, torch.arange(ITEMS) / 50, allowed=mask)
    post = statistics.posterior(torch.float64)
    for query in range(QUERIES):
        numbers = rows_of(mask, query)
        (tmp_path / str(query)).mkdir()
        part = stored(kind, rows[numbers], tmp_path / str(query))
        scores, wanted = part.search(queries[query : query + 1], 5)
        check_lists(index[query], score[query], wanted[0], scores[0], numbers, -math.inf)
        alone = part.statistics(samples[query : query + 1], KAPPA, 5, (torch.arange(ITEMS) / 50)[numbers])
        of_part = alone.posterior(torch.float64)
        torch.testing.assert_close(post.entropy[query], of_part.entropy[0], atol=5e-6, rtol=0)
        lists = post.top_index[query], post.top_prob[query], of_part.top_index[0], of_part.top_prob[0]
        check_lists(*lists, numbers, 0.0)


def test_many_items_in_codes_and_blocks():
    """Codes serve galleries of 4,096 items or more; filtered searches read the rows."""
    rows, queries = unit(9000, 32), unit(5, 32, seed=1)
    mask = torch.rand(5, 9000, generator=seeded(3)) < 0.7
    coded, plain = gf.Gallery(rows, codes=True), gf.Gallery(rows)
    coded.search(queries)
    for one, other in zip(coded.search(queries, 20, allowed=mask), plain.search(queries, 20, allowed=mask)):
        assert torch.equal(one, other)
    dense = (queries @ rows.T).masked_fill(~mask, -math.inf).topk(20, 1)
    assert torch.equal(plain.search(queries, 20, allowed=mask)[1], dense.indices)


SCORERS: dict[str, Callable[[object], gf.RetrievalEntropy]] = {
    "flow": lambda gallery: gf.RetrievalEntropy(small_flow(), gallery, n_samples=5, n_steps=2, kappa=KAPPA, top_k=5),
    "head": lambda gallery: gf.RetrievalEntropy(small_head(), gallery, top_k=5),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("model", SCORERS)
@pytest.mark.parametrize("size", [None, 4])
def test_entropy(name, model, size):
    mask, rows, queries = masks()[name], unit(ITEMS, DIM), unit(QUERIES, DIM, seed=1)
    post = SCORERS[model](rows)(queries, allowed=mask, batch_size=size)
    assert post.top_index.shape == post.top_prob.shape == (QUERIES, 5)
    for query in range(QUERIES):
        numbers = rows_of(mask, query)
        wanted = SCORERS[model](rows[numbers])(queries[query : query + 1])
        torch.testing.assert_close(post.entropy[query], wanted.entropy[0], atol=2e-5, rtol=0)
        torch.testing.assert_close(post.risk_lower_bound[query], wanted.risk_lower_bound[0], atol=2e-5, rtol=0)
        assert int(post.map_index[query]) == int(numbers[wanted.map_index[0]])
        kept = wanted.top_index.shape[1]
        assert post.top_index[query].tolist() == numbers[wanted.top_index[0]].tolist() + [-1] * (5 - kept)
        torch.testing.assert_close(post.top_prob[query, :kept], wanted.top_prob[0], atol=2e-5, rtol=0)
        assert post.top_prob[query, kept:].tolist() == [0.0] * (5 - kept)
        if len(numbers) <= 5:
            assert float(post.top_prob[query].sum()) == pytest.approx(1, abs=1e-6)
    if name == "by query, one item each":
        assert post.entropy.tolist() == post.risk_lower_bound.tolist() == [0.0] * QUERIES


def fitted(reranker: gf.BayesReranker) -> gf.BayesReranker:
    cheap = CheapFit({"cosine": 3.0, "outside": 1.0}, (1.1, 0.2), (0.0, 1.0))
    weights = {"alpha": 0.3, "beta": 3.0, "outside": 1.0, "cheap": cheap, "rest": 0.7}
    reranker.calibration = dataclasses.replace(UNCALIBRATED, **weights, made_for={})
    return reranker


class Brute:
    """A store whose search is exact."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def search(self, x: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        score, index = (torch.from_numpy(x) @ self.rows.T).topk(k, 1)
        return score.numpy(), index.numpy()


RERANKERS: dict[str, Callable[[Tensor], gf.BayesReranker]] = {
    "cosine": lambda rows: gf.BayesReranker(None, rows, shortlist=20),
    "flow": lambda rows: gf.BayesReranker(small_flow(), rows, shortlist=(20, 4), n_steps=2),
    "fitted": lambda rows: fitted(gf.BayesReranker(small_flow(), rows, shortlist=(20, 4), n_steps=2)),
    "budget": lambda rows: budgeted().with_gallery(rows),
    "head": lambda rows: gf.BayesReranker(None, rows, head=small_head(), shortlist=9, shortlist_by="head"),
    "store": lambda rows: gf.BayesReranker(None, gf.Gallery(rows, store=Brute(rows)), shortlist=20),
    "head and store": lambda rows: gf.BayesReranker(
        None, gf.Gallery(rows, store=Brute(rows)), head=small_head(), shortlist=9, shortlist_by="head"
    ),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("kind", RERANKERS)
@pytest.mark.parametrize("size", [None, 4])
def test_reranking(name, kind, size):
    mask, rows, queries = masks()[name], unit(ITEMS, DIM), unit(QUERIES, DIM, seed=1)
    reranked = RERANKERS[kind](rows).rerank(queries, allowed=mask, batch_size=size)
    groups = {}
    for query in range(QUERIES):
        groups.setdefault(tuple(rows_of(mask, query).tolist()), []).append(query)
    if kind == "budget" and len(groups) > 1:
        groups = {}  # the budget is that of the whole call
        for query in range(QUERIES):
            found = reranked.index[query][reranked.index[query] >= 0]
            assert set(found.tolist()) <= set(rows_of(mask, query).tolist())
    for numbers, its_queries in groups.items():
        number, its_rows = torch.tensor(numbers), torch.tensor(its_queries)
        # The points of a head find more items in a store than one search for each of them.
        part = RERANKERS["head" if kind == "head and store" else kind](rows[number])
        part.shortlist = min(part.shortlist, len(number))
        wanted = part.rerank(queries[its_rows])
        kept = wanted.index.shape[1]
        for field, value in tensors(wanted).items():
            mine = getattr(reranked, field)[its_rows]
            if field in ("index", "prob", "relevance", "evidence"):
                assert bool((mine[:, kept:] == (-1 if field == "index" else 0)).all()), field
                mine = mine[:, :kept]
            if field in ("index", "answer"):
                value = number[value]
            torch.testing.assert_close(mine, value, atol=2e-5, rtol=1e-5, msg=lambda m, field=field: f"{field}: {m}")


def test_candidates_that_are_not_allowed_are_left_out():
    rows, queries, mask = unit(ITEMS, DIM), unit(QUERIES, DIM, seed=1), masks()["by query"]
    candidates = torch.rand(QUERIES, ITEMS, generator=seeded()).argsort(1)[:, :30]
    candidates[:, 7] = -1
    reranker = gf.BayesReranker(small_flow(), rows, n_steps=2)
    reranked = reranker.rerank(queries, candidates, allowed=mask)
    for query in range(QUERIES):
        own = candidates[query][candidates[query] >= 0]
        own = own[mask[query][own]]
        wanted = reranker.rerank(queries[query : query + 1], own[None])
        kept = len(own)
        assert reranked.index[query].tolist() == wanted.index[0].tolist() + [-1] * (30 - kept)
        torch.testing.assert_close(reranked.prob[query, :kept], wanted.prob[0], atol=1e-5, rtol=0)
        torch.testing.assert_close(reranked.risk_lower_bound[query], wanted.risk_lower_bound[0], atol=1e-5, rtol=0)
    mask[4] = False
    mask[4, candidates[4, 7 - 1] - 1] = True
    candidates[4] = -1
    candidates[4, 0] = (mask[4].nonzero()[0] + 1) % ITEMS
    with pytest.raises(ValueError, match="allowed leaves no candidate to query 4"):
        reranker.rerank(queries, candidates, allowed=mask)


def test_a_copy_stands_in_for_an_item_that_is_not_allowed():
    rows = unit(20, DIM).repeat(2, 1)
    mask = torch.arange(40) >= 20
    reranked = gf.BayesReranker(None, rows, shortlist=20).rerank(unit(3, DIM, seed=1), allowed=mask)
    assert int(reranked.index.min()) >= 20


CALLS: dict[str, Callable[..., object]] = {
    "ops.gallery_posterior": lambda q, **mask: ops.gallery_posterior(q.unsqueeze(1), unit(ITEMS, DIM), KAPPA, **mask),
    "ops.gallery_search": lambda q, **mask: ops.gallery_search(q, unit(ITEMS, DIM), **mask),
    "search": lambda q, **mask: gf.Gallery(unit(ITEMS, DIM)).search(q, **mask),
    "statistics": lambda q, **mask: gf.Gallery(unit(ITEMS, DIM)).statistics(q.unsqueeze(1), KAPPA, 5, **mask),
    "entropy": lambda q, **mask: SCORERS["head"](unit(ITEMS, DIM))(q, **mask),
    "rerank": lambda q, **mask: RERANKERS["cosine"](unit(ITEMS, DIM)).rerank(q, **mask),
}


@pytest.mark.parametrize("call", CALLS)
def test_bad_masks_are_named(call):
    queries = unit(QUERIES, DIM, seed=1)
    none = masks()["by query"]
    none[[6, 11]] = False
    for error, words, mask in (
        (ValueError, "allowed leaves no item to query 6", none),
        (ValueError, "allowed leaves no item to any query", torch.zeros(ITEMS, dtype=torch.bool)),
        (ValueError, r"allowed must be \[90\] or \[13, 90\], got \(89,\)", torch.ones(89, dtype=torch.bool)),
        (ValueError, r"allowed must be \[90\] or \[13, 90\], got \(1, 90\)", torch.ones(1, 90, dtype=torch.bool)),
        (TypeError, "allowed must be a boolean mask over the items, got torch.int64", torch.arange(ITEMS)),
        (TypeError, "allowed must be a boolean mask over the items, got torch.float64", np.ones(ITEMS)),
        (TypeError, "allowed must be a tensor", [True] * ITEMS),
        (TypeError, "allowed must be a tensor", "all"),
    ):
        with pytest.raises(error, match=words):
            CALLS[call](queries, allowed=mask)
    nothing = torch.ones(0, ITEMS, dtype=torch.bool)
    CALLS[call](queries[:0], allowed=nothing)
    CALLS[call](queries[:0], allowed=masks()["scattered"])


@pytest.mark.parametrize("call", CALLS)
def test_masks_of_numpy_and_with_strides(call):
    queries, mask = unit(QUERIES, DIM, seed=1), masks()["by query"]
    backwards, fixed = mask.numpy()[::-1].copy()[::-1], mask.numpy().copy()
    fixed.setflags(write=False)
    results = [
        CALLS[call](queries, allowed=each) for each in (mask, mask.numpy(), mask.T.contiguous().T, backwards, fixed)
    ]
    values = [list(tensors(x).values()) if dataclasses.is_dataclass(x) else list(x) for x in results]
    for other in values[1:]:
        for mine, wanted in zip(other, values[0]):
            torch.testing.assert_close(mine, wanted, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bias_of_minus_infinity_points_to_allowed(backend):
    dtype = torch.float64 if backend == "reference" else torch.float32
    samples, rows, bias = unit(3, 4, DIM, seed=1).to(dtype), unit(ITEMS, DIM).to(dtype), torch.zeros(ITEMS, dtype=dtype)
    bias[[8, 30]] = -math.inf
    with pytest.raises(ValueError, match=r"item_bias of item 8 is -inf; allowed= leaves items out"):
        ops.gallery_posterior(samples, rows, KAPPA, backend=backend, item_bias=bias)
    bias[[8, 30]] = math.nan
    with pytest.raises(ValueError, match="hold a NaN or infinity"):
        ops.gallery_posterior(samples, rows, KAPPA, backend=backend, item_bias=bias)


@pytest.mark.parametrize("way", WAYS)
def test_a_bias_that_is_not_finite_matters_for_allowed_items_alone(way, monkeypatch):
    monkeypatch.setattr(filtering, "COPY_COST", WAYS[way])
    samples, rows, bias = unit(QUERIES, 4, DIM, seed=1), unit(ITEMS, DIM), torch.zeros(ITEMS)
    each, plain = masks()["by query"], torch.zeros(ITEMS)
    each[:, 30] = False
    bias[30] = -math.inf
    for mask in (each, each[0]):
        post, wanted = (
            ops.gallery_posterior(samples, rows, KAPPA, item_bias=own, allowed=mask) for own in (bias, plain)
        )
        assert torch.equal(post.entropy, wanted.entropy)
    each[8, 30] = True
    for call in (
        lambda: ops.gallery_posterior(samples, rows, KAPPA, item_bias=bias, allowed=each),
        lambda: gf.Gallery(rows).statistics(samples, KAPPA, 5, bias, allowed=each),
    ):
        with pytest.raises(ValueError, match="item_bias of item 30 is -inf, and the item is allowed"):
            call()


def test_a_sample_that_is_not_finite_is_named_by_its_query():
    samples = unit(QUERIES, 4, DIM, seed=1)
    samples[9, 2, 1] = math.nan
    with pytest.raises(ValueError, match="samples row 9 is not finite"):
        ops.gallery_posterior(samples, unit(ITEMS, DIM), KAPPA, allowed=masks()["by query"])
