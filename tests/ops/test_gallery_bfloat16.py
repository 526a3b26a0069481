"""The gallery posterior from bfloat16 products against float64, against float32 and against its plain torch twin."""

from __future__ import annotations

import importlib
import itertools
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import geoflow_fast as gf
from geoflow_fast import geometry, ops
from geoflow_fast.ops import extension
from geoflow_fast.ops.gallery_posterior import ROUNDING_LIMIT, _scores_of_listed
from tests.head.test_model import random_head
from tests.samples import dyadic

module = importlib.import_module("geoflow_fast.ops.gallery_posterior")  # which has the name of its function
CLIP = Path(__file__).resolve().parents[3] / "shared" / "data" / "imagenet" / "vitb32.npz"
needs_unit = pytest.mark.skipif(extension.missing_bfloat16() is not None, reason=str(extension.missing_bfloat16()))


@pytest.fixture(params=["reference", pytest.param("cpu", marks=needs_unit)])
def backend(request) -> str:
    return request.param


def largest_concentration(width: int) -> float:
    """Of the points that "auto" still multiplies in bfloat16."""
    return 0.999 * ROUNDING_LIMIT * 512 * math.sqrt(width)


def rows(count: int, width: int, uneven: float = 0.0) -> Tensor:
    """Unit rows that share a direction; with `uneven`, a few coordinates are that much larger than the others, as in
    the embeddings of CLIP."""
    scale = torch.ones(width)
    scale[:: max(1, width // 4)] += uneven
    return geometry.normalize(scale * (torch.randn(count, width) + 0.3))


def problem(
    queries: int, points: int, items: int, width: int, uneven: float = 0.0, concentration: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted points near some of the items, the gallery, and the biases, a few of them -inf."""
    gallery = rows(items, width, uneven)
    most = largest_concentration(width) if concentration is None else concentration
    near = gallery[torch.arange(queries * points) % items] + 2 * rows(queries * points, width, uneven)
    length = most * (0.2 + 0.8 * torch.rand(queries, points, 1))
    bias = torch.randn(queries, points)
    bias[::2, 1::3] = -math.inf
    return geometry.normalize(near).view(queries, points, width) * length, gallery, bias


def scores_of(samples: Tensor, gallery: Tensor, bias: Tensor, item_bias: Tensor | float = 0.0) -> Tensor:
    """[Q, N] in float64."""
    logits = torch.einsum("qmd,nd->qmn", samples.double(), gallery.double()) + bias.double().unsqueeze(2)
    return torch.logsumexp(logits, dim=1) - math.log(samples.shape[1]) + item_bias


def entropy_of(scores: Tensor) -> Tensor:
    log_p = scores.log_softmax(1)
    return -(log_p.exp() * log_p).sum(1)


def scored(
    samples: Tensor, gallery: Tensor, bias: Tensor | None, backend: str = "cpu", **options
) -> ops.GalleryStatistics:
    options = {"precision": "bfloat16", "top_k": 5, **options}
    return ops.gallery_statistics(samples, gallery, 1.0, backend=backend, sample_bias=bias, **options)


def entropy(statistics: ops.GalleryStatistics) -> Tensor:
    return statistics.posterior(torch.float64).entropy


def close(value: Tensor, expected: Tensor, atol: float) -> None:
    torch.testing.assert_close(value.double(), expected.double(), rtol=0, atol=atol)


def equal(one: ops.GalleryStatistics, two: ops.GalleryStatistics) -> bool:
    names = ("peak", "weight", "moment", "top_score", "top_index")
    return all(torch.equal(getattr(one, name), getattr(two, name)) for name in names)


def assert_posterior(result: ops.GalleryStatistics, scores: Tensor) -> None:
    """Sums within what is allowed for rounding, and the best items as float32 has them."""
    close(result.log_z, scores.logsumexp(1), ROUNDING_LIMIT)
    close(entropy(result), entropy_of(scores), ROUNDING_LIMIT)
    best = scores.topk(min(5, scores.shape[1])).values
    close(result.top_score, best, 1e-4)
    close(scores.gather(1, result.top_index), best, 1e-4)


# ---- against float64 ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("points", [1, 3, 8])
@pytest.mark.parametrize("items", [1, 7, 129, 1023])
def test_agrees_with_float64(points, items, backend):
    torch.manual_seed(0)
    # 9 queries are an interleaved group and one more; the second strip of 9 x 3 columns is narrow
    for queries, width in itertools.product((1, 9), (1, 7, 24, 129, 512, 1024)):
        samples, gallery, bias = problem(queries, points, items, width)
        spaced = torch.empty(queries, 2 * points, 2 * width)[:, ::2, ::2].copy_(samples)
        result = scored(spaced, gallery.T.contiguous().T, bias.T.contiguous().T, backend)
        assert_posterior(result, scores_of(samples, gallery, bias))


def test_agrees_over_several_tiles_and_blocks_of_queries(backend):
    torch.manual_seed(1)
    samples, gallery, bias = problem(45, 50, 300, 40)  # 2250 columns
    item_bias = torch.randn(300)
    result = scored(samples, gallery, bias, backend, item_bias=item_bias)
    assert_posterior(result, scores_of(samples, gallery, bias, item_bias.double()))


@pytest.mark.parametrize(("uneven", "concentration"), [(0.0, 40.0), (10.0, 60.0), (30.0, 40.0)])
def test_entropies_are_within_the_limit_of_float32(uneven, concentration, backend):
    torch.manual_seed(2)
    samples, gallery, bias = problem(64, 8, 4000, 512, uneven, concentration)
    single = scored(samples, gallery, bias, "auto", precision="float32", top_k=10)
    result = scored(samples, gallery, bias, backend, top_k=10)
    assert entropy(single).max() > 4  # so that the items that are not scored again matter
    close(entropy(result), entropy(single), ROUNDING_LIMIT / 2)
    ranks = torch.stack((entropy(result), entropy(single))).argsort(1).argsort(1).double()
    assert torch.corrcoef(ranks)[0, 1] >= 0.999
    assert torch.equal(result.top_index, single.top_index)


@needs_unit
@pytest.mark.skipif(not CLIP.exists(), reason=f"needs the embeddings {CLIP}")
@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_entropies_over_real_embeddings_are_within_the_limit(share):
    torch.manual_seed(3)
    with np.load(CLIP, allow_pickle=False) as file:
        images, texts = (geometry.normalize(torch.tensor(file[k]).float()) for k in ("image_emb", "class_text_emb"))
    near = images[torch.randint(len(images), (48 * 8,))].view(48, 8, -1)
    mixed = torch.linspace(0, 1, 48).view(-1, 1, 1)  # from texts to images
    points = geometry.normalize((1 - mixed) * texts[:48].unsqueeze(1) + mixed * near)
    samples = largest_concentration(512) * share * (0.3 + 0.7 * torch.rand(48, 8, 1)) * points
    bias = torch.randn(48, 8)
    truth = scores_of(samples, images, bias)
    result = scored(samples, images, bias, precision="auto", top_k=10)
    close(entropy(result), entropy_of(truth), ROUNDING_LIMIT)
    close(truth.gather(1, result.top_index), truth.topk(10).values, 1e-4)


def test_large_coordinates_need_their_second_part(monkeypatch):
    """Without it the limit is missed by far, which the test above would see."""
    torch.manual_seed(2)
    samples, gallery, bias = problem(64, 8, 4000, 512, 30.0, 40.0)
    truth = entropy_of(scores_of(samples, gallery, bias))
    error = (entropy(scored(samples, gallery, bias, "reference")) - truth).abs().max()
    monkeypatch.setattr(module, "_rounded_rows", lambda *both: [module._rounded(x) for x in both])
    plain = (entropy(scored(samples, gallery, bias, "reference")) - truth).abs().max()
    assert 100 * error < 2 * ROUNDING_LIMIT < plain


@needs_unit
@pytest.mark.parametrize(("items", "width"), [(1, 3), (1023, 129), (2000, 600)])
def test_rounds_as_the_reference_does(items, width):
    torch.manual_seed(3)
    samples, gallery, bias = problem(9, 8, items, width, 5.0, 30.0)
    result, expected = scored(samples, gallery, bias), scored(samples, gallery, bias, "reference")
    rounding = (entropy(expected) - entropy_of(scores_of(samples, gallery, bias))).abs().max()
    close(result.log_z, expected.log_z, 1e-5)
    close(entropy(result), entropy(expected), 1e-5)
    assert torch.equal(result.top_index, expected.top_index)
    assert items == 1 or rounding > 1e-4  # so that it would be seen if one did not round alike


# ---- ties, storage, threads, files --------------------------------------------------------------------------------


def test_equal_scores_are_listed_by_index(backend):
    exact = dyadic if backend == "reference" else torch.clone
    item = exact(rows(1, 24))
    alike = scored(8 * item.unsqueeze(0), item.repeat(1000, 1), None, backend)
    assert alike.top_index.tolist() == [[0, 1, 2, 3, 4]]
    close(entropy(alike), torch.tensor([math.log(1000)]), 1e-5)
    samples, gallery, bias = problem(9, 3, 500, 24)
    samples, gallery = exact(samples), exact(gallery)
    twice = scored(samples, gallery.repeat(2, 1), bias, backend)
    once = scored(samples, gallery, bias, backend)
    assert torch.equal(twice.top_index[:, ::2], once.top_index[:, :3])
    assert torch.equal(twice.top_index[:, 1::2], once.top_index[:, :2] + 500)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_in_half_precision(dtype, backend):
    torch.manual_seed(4)
    samples, gallery, bias = problem(9, 3, 129, 64)
    samples, gallery = samples.to(dtype), gallery.to(dtype)
    assert_posterior(scored(samples, gallery, bias.to(dtype), backend), scores_of(samples, gallery, bias.to(dtype)))


@needs_unit
def test_galleries_in_half_precision_and_mapped_shards(tmp_path, monkeypatch):
    torch.manual_seed(5)
    samples, gallery, bias = problem(9, 8, 1023, 65)
    gallery = geometry.normalize(gallery).half()
    options = {"sample_bias": bias, "precision": "bfloat16"}
    assert_posterior(gf.Gallery(gallery).statistics(samples, 1.0, 5, **options), scores_of(samples, gallery, bias))
    for number, shard in enumerate(gallery.split(400)):
        np.save(tmp_path / f"{number}.npy", shard.numpy())
    monkeypatch.setattr("geoflow_fast.retrieval.gallery.BLOCK_ROWS", 100)
    mapped = gf.Gallery(tmp_path).statistics(samples, 1.0, 5, **options)
    assert_posterior(mapped, scores_of(samples, gallery, bias))


@needs_unit
def test_result_does_not_depend_on_threads():
    samples, gallery, bias = problem(19, 3, 3000, 40)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(scored(samples, gallery, bias, top_k=20))
    finally:
        torch.set_num_threads(before)
    assert all(equal(results[0], other) for other in results[1:])


def test_no_queries(backend):
    samples, gallery, bias = problem(2, 3, 50, 10)
    for precision in ("bfloat16", "auto"):
        empty = scored(samples[:0], gallery, bias[:0], backend, precision=precision)
        assert empty.peak.shape == (0,)
        assert empty.top_index.shape == (0, 5)


def test_one_item_has_no_entropy(backend):
    samples, gallery, bias = problem(9, 3, 1, 129)
    post = scored(samples, gallery, bias, backend).posterior(torch.float64)
    assert post.entropy.tolist() == [0.0] * 9
    assert post.top_prob.tolist() == [[1.0]] * 9


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["samples", "gallery", "item_bias"])
def test_a_value_that_is_not_finite_is_never_swallowed(where, value, backend):
    samples, gallery, _ = problem(3, 9, 200, 17)
    arguments = {"samples": samples, "gallery": gallery, "item_bias": torch.zeros(200)}
    arguments[where].view(-1)[-1] = value
    with pytest.raises(ValueError, match="not finite"):
        ops.gallery_posterior(**arguments, kappa=5.0, backend=backend, precision="bfloat16")


# ---- the choice ---------------------------------------------------------------------------------------------------


@needs_unit
def test_auto_rounds_the_queries_that_lose_little_whatever_their_neighbours():
    samples, gallery, bias = problem(9, 3, 300, 129)
    samples[::2] *= 10
    chosen = scored(samples, gallery, bias, "auto", precision="auto")
    for precision, some in (("float32", slice(0, None, 2)), ("bfloat16", slice(1, None, 2))):
        alone = scored(samples[some], gallery, bias[some], precision=precision)
        assert equal(chosen.select(torch.arange(9)[some]), alone), precision
    one = scored(samples[1:2], gallery, bias[1:2], precision="auto")
    assert equal(one, chosen.select(torch.tensor([1])))


def test_auto_is_full_precision_elsewhere(monkeypatch):
    samples, gallery, bias = problem(5, 3, 300, 129)
    double = samples.double(), gallery.double(), bias.double()
    exact = scored(*double, "auto", precision="float32")
    assert equal(scored(*double, "auto", precision="auto"), exact)
    monkeypatch.setattr(extension, "missing_bfloat16", lambda: "no bfloat16 unit")
    single = scored(samples, gallery, bias, "auto", precision="float32")
    assert equal(scored(samples, gallery, bias, "auto", precision="auto"), single)


def test_auto_names_the_query_whose_scores_are_not_finite():
    """Queries are scored in two groups, but messages use the caller's numbers."""
    samples, gallery, bias = problem(9, 3, 300, 129)
    samples[6, 0, 0] = math.nan
    with pytest.raises(ValueError, match="scores of query 6 are not finite"):
        scored(samples, gallery, bias, "auto", precision="auto")


@pytest.mark.own_default("dtype", reason="torch.compile does not trace changes of the default dtype")
def test_auto_can_be_traced():
    samples, gallery, bias = problem(9, 3, 300, 129)

    def entropy(samples: Tensor) -> Tensor:
        return ops.gallery_posterior(samples, gallery, 1.0, 5, sample_bias=bias, precision="auto").entropy

    traced = torch.compile(entropy, backend="eager", fullgraph=True)(samples)
    single = ops.gallery_posterior(samples, gallery, 1.0, 5, sample_bias=bias).entropy
    assert torch.equal(traced, single)


def test_a_processor_without_the_unit_says_so():
    code = (
        "import torch; from geoflow_fast import ops; from geoflow_fast.ops import extension; print(extension.isa());"
        "ops.gallery_posterior(torch.ones(1, 1, 2), torch.ones(3, 2), 1.0, precision='bfloat16')"
    )
    environment = {**os.environ, "GEOFLOW_ISA": extension.supported_isas()[0]}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert "avx512" not in result.stdout
    assert (
        f'precision="bfloat16": the kernels for {extension.supported_isas()[0]} have no bfloat16 unit (AVX512-BF16)'
        in result.stderr
    )


def test_errors_name_the_argument():
    samples, gallery, bias = problem(2, 3, 50, 40)
    with pytest.raises(ValueError, match="precision must be one of"):
        scored(samples, gallery, bias, precision="float16")
    with pytest.raises(ValueError, match="precision must be one of"):
        gf.Gallery(gallery).statistics(samples, 1.0, 5, precision="half")


def test_items_of_a_list_are_scored_with_their_biases():
    """As GPUs score them again after a search in bfloat16."""
    samples, gallery = rows(7 * 3, 33).view(7, 3, 33), rows(50, 33)
    listed = torch.randint(0, 50, (7, 4))
    item_bias, sample_bias = torch.randn(50), torch.randn(7, 3)
    scores = _scores_of_listed(samples, gallery, 9.0, listed, item_bias, sample_bias)
    logits = 9.0 * samples.double() @ gallery.double().T + sample_bias.double().unsqueeze(2)
    expected = logits.exp().mean(1).log() + item_bias.double()
    torch.testing.assert_close(scores.double(), expected.gather(1, listed), atol=1e-5, rtol=0)


# ---- heads --------------------------------------------------------------------------------------------------------


def test_scorers_of_heads_choose_and_can_be_told():
    torch.manual_seed(6)
    head = random_head(gf.HeadConfig(points=3, hidden=8, bank=11), 256, 256)
    scorer = gf.RetrievalEntropy(head, rows(300, 256), "t2i")
    queries = rows(9, 256)
    assert scorer.precision == scorer.settings["precision"] == "auto"
    by_choice = scorer(queries).entropy
    scorer.precision = "float32"
    single = scorer(queries).entropy
    close(by_choice, single, ROUNDING_LIMIT)
    assert torch.equal(by_choice, single) == (extension.missing_bfloat16() is not None)
    with pytest.raises(ValueError, match="precision must be one of"):
        scorer.precision = "half"


def test_scorers_of_flows_take_float32_and_can_be_told():
    flow = gf.GeoFlow(gf.GeoFlowConfig(image_dim=8, text_dim=6, hidden=16, depth=1))
    scorer = gf.RetrievalEntropy(flow, rows(20, 8), "t2i", n_samples=2, n_steps=1)
    assert scorer.precision == "float32"
    queries = rows(3, 6)
    in_float32 = scorer(queries).entropy
    scorer.precision = "auto"
    assert torch.equal(scorer(queries).entropy, in_float32)  # rows of 8 coordinates gain nothing by bfloat16
    with pytest.raises(ValueError, match="precision must be one of"):
        scorer.precision = "half"
