"""Exact search: against float64, in every storage, with ties; by codes the same to the last bit."""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import geoflow_fast as gf
from geoflow_fast.ops import extension
from tests.ops.counting import answers, watch_border
from tests.samples import dyadic

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CLIP = Path(__file__).resolve().parents[3] / "shared" / "data" / "imagenet" / "vitb32.npz"
needs_int8 = pytest.mark.skipif(extension.missing_int8() is not None, reason=str(extension.missing_int8()))


def unit_rows(*shape: int, huge: int = 0) -> Tensor:
    """Unit rows, of which `huge` coordinates are far larger than the others, as those of CLIP are."""
    rows = torch.randn(*shape)
    rows[..., :huge] *= 4 * math.sqrt(shape[-1])
    return gf.geometry.normalize(rows)


def exact(queries: Tensor, gallery: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    scores = queries.double() @ gallery.double().T
    values, index = scores.sort(dim=1, descending=True, stable=True)
    return values[:, :top_k], index[:, :top_k]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("queries", "items", "width", "top_k"), [
    (1, 1, 1, 1),
    (2, 7, 3, 7),
    (3, 129, 16, 5),
    (7, 1023, 129, 10),
    (64, 700, 100, 33),
    (1, 5000, 64, 512),
    (5, 300, 1024, 3),
])  # fmt: skip
def test_finds_what_float64_finds(dtype, queries, items, width, top_k):
    torch.manual_seed(0)
    gallery, x = unit_rows(items, width).to(dtype), unit_rows(queries, width)
    score, index = gf.ops.gallery_search(x, gallery, top_k)
    wanted, _ = exact(x, gallery, top_k)
    assert score.shape == index.shape == (queries, top_k)
    assert torch.allclose(score.double(), wanted, rtol=0, atol=1e-6)
    of_index = (x.double() @ gallery.double().T).gather(1, index)
    assert torch.allclose(of_index, wanted, rtol=0, atol=1e-6)
    assert all(len(set(row)) == top_k for row in index.tolist())


def test_threads_do_not_share_their_scores():
    torch.manual_seed(0)
    gallery, x = unit_rows(20_000, 64), unit_rows(33, 64)
    answers = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)  # conftest.py puts it back
        answers += [gf.ops.gallery_search(x, gallery, 10) for _ in range(5)]
    for score, index in answers:
        assert torch.equal(score, answers[0][0])
        assert torch.equal(index, answers[0][1])


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_equal_scores_go_by_index(backend):
    torch.manual_seed(1)
    one = unit_rows(1, 33)
    if backend == "reference":
        one = dyadic(one)
    gallery = torch.cat((unit_rows(40, 33), one.expand(600, -1), unit_rows(40, 33), one.expand(5, -1)))
    index = gf.ops.gallery_search(one, gallery, 603, backend)[1]
    assert index.tolist() == [[*range(40, 640), 680, 681, 682]]


def tied_items(d: int = 33) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """A query, items that come in ties of growing nearness, and the order of the best. Each better item pushes one of
    several tied ones out of a full list."""
    torch.manual_seed(4)
    query, away = torch.eye(2, d)
    level = torch.tensor([0.1, 0.1, 0.5, 0.5, 0.5, 0.2, 0.5, 0.7, 0.5, 0.7, 0.9, 0.1, 0.9, 0.5, 0.7, 0.7])
    level = level.repeat_interleave(torch.tensor([9, 40, 3, 2, 5, 7, 1, 1, 4, 2, 1, 50, 1, 3, 1, 2]))
    items = level.unsqueeze(1) * query + (1 - level.unsqueeze(1) ** 2).sqrt() * away
    return query.unsqueeze(0), items, sorted(range(len(level)), key=lambda k: (-float(level[k]), k))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("top_k", [1, 2, 3, 5, 7, 11, 16, 40])
@pytest.mark.parametrize("threads", [1, 3])
def test_of_tied_items_the_last_leaves_the_list(backend, top_k, threads, monkeypatch):
    monkeypatch.setattr(extension, "usable_threads", lambda: threads)
    query, items, order = tied_items()
    assert gf.ops.gallery_search(query, items, top_k, backend)[1].tolist() == [order[:top_k]]
    for precision in ("float32", "auto"):
        posterior = gf.ops.gallery_posterior(
            query.unsqueeze(1), items, 5.0, top_k=top_k, backend=backend, precision=precision
        )
        assert posterior.top_index.tolist() == [order[:top_k]]
    assert gf.Gallery(items).search(query, top_k)[1].tolist() == [order[:top_k]]
    halves = [
        gf.Gallery(items[part]).statistics(query.unsqueeze(1), 5.0, top_k) for part in (slice(60), slice(60, None))
    ]
    later = dataclasses.replace(halves[1], top_index=halves[1].top_index + 60)
    assert later.merge(halves[0]).top_index.tolist() == [order[:top_k]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_codes_serve_float32_alone(dtype):
    """Queries in float64 are searched in float64, with codes or without."""
    gallery, queries = unit_rows(6000, 33).to(dtype), unit_rows(5, 33).double()
    codes = gf.ops.RowCodes.encode(gallery.float())
    scores, index = gf.ops.gallery_search(queries, gallery, 7, codes=codes)
    wanted = exact(queries, gallery, 7)
    assert scores.dtype == torch.float64
    assert torch.equal(index, wanted[1])
    assert torch.allclose(scores, wanted[0], rtol=0, atol=1e-14)


def test_of_tied_items_the_last_leaves_a_list_by_codes():
    """Codes serve galleries of some size; the ties stand among many worse items."""
    query, items, order = tied_items()
    far = torch.nn.functional.normalize(torch.randn(6000, items.shape[1]) - 4 * query, dim=1)
    gallery = torch.cat((far[:4000], items, far[4000:]))
    codes = gf.ops.RowCodes.encode(gallery)
    for top_k in (1, 3, 7, 16):
        posterior = gf.ops.gallery_search(query, gallery, top_k, codes=codes)[1]
        assert posterior.tolist() == [[4000 + k for k in order[:top_k]]]


@pytest.mark.parametrize("threads", [1, 3])
def test_a_query_has_one_result_beside_any_others(threads, monkeypatch):
    monkeypatch.setattr(extension, "usable_threads", lambda: threads)
    torch.manual_seed(2)
    gallery, x = unit_rows(3000, 100), unit_rows(21, 100)
    together = gf.ops.gallery_search(x, gallery, 20)
    for first, count in ((0, 1), (3, 2), (4, 7), (17, 4)):
        alone = gf.ops.gallery_search(x[first : first + count], gallery, 20)
        assert all(torch.equal(a, b[first : first + count]) for a, b in zip(alone, together))


def test_strided_and_other_dtypes():
    torch.manual_seed(3)
    gallery, x = unit_rows(200, 20), unit_rows(8, 20)
    wanted = gf.ops.gallery_search(x[::2].contiguous(), gallery[::3].contiguous(), 4)
    ours = gf.ops.gallery_search(x[::2], gallery[::3], 4)
    assert all(torch.equal(a, b) for a, b in zip(ours, wanted))
    wide = gf.ops.gallery_search(x.double(), gallery.double(), 4)
    assert wide[0].dtype == torch.float64
    assert torch.equal(wide[1], gf.ops.gallery_search(x, gallery, 4)[1])
    assert gf.ops.gallery_search(x[:0], gallery, 4)[1].shape == (0, 4)


@pytest.mark.parametrize(("change", "message"), [
    ({"queries": torch.zeros(2, 3)}, "queries must be"),
    ({"queries": torch.full((2, 8), math.nan)}, "queries row 0 is not finite"),
    ({"gallery": torch.zeros(0, 8)}, "N, d > 0"),
    ({"top_k": 0}, "top_k"),
    ({"top_k": 41}, "top_k"),
    ({"backend": "cuda"}, "backend"),
])  # fmt: skip
def test_errors(change, message):
    arguments = {"queries": unit_rows(2, 8), "gallery": unit_rows(40, 8), "top_k": 3} | change
    with pytest.raises(ValueError, match=message):
        gf.ops.gallery_search(**arguments)


# ---- codes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 5, 64, 100, 512, 768])
@pytest.mark.parametrize("huge", [0, 3])
def test_the_error_of_a_code_is_what_it_says(width, huge):
    torch.manual_seed(4)
    gallery = unit_rows(50, width, huge=min(huge, width))
    codes = gf.ops.RowCodes.encode(gallery)
    assert codes.code.shape == (50, -(-width // 64) * 64)
    assert (codes.code[:, width:] == 128).all()
    # The rotation leaves inner products as they are, so those of the coded rows are off by what the errors allow.
    coded = codes.scale[:, None].double() * (codes.code[:, :width].double() - 128)
    gap = (coded @ coded.T - gallery.double() @ gallery.double().T).abs()
    error = codes.error.double()
    assert (gap <= error[:, None] * 1.2 + error[None, :] * 1.2).all()
    if width >= 512:
        assert float(codes.error.max()) < 0.011  # .04 for rows with huge coordinates that are not rotated


@needs_int8
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("queries", [1, 2, 3, 4, 5, 6, 7, 16, 33, 64])
@pytest.mark.parametrize(("items", "width", "huge", "top_k"), [(5000, 96, 0, 10), (4500, 130, 3, 100)])
def test_codes_change_nothing(dtype, queries, items, width, huge, top_k):
    torch.manual_seed(5)
    gallery, x = unit_rows(items, width, huge=huge).to(dtype), unit_rows(queries, width, huge=huge)
    gallery[items // 2 : items // 2 + 40] = gallery[7]  # ties
    x[0] = gallery[7].float()
    codes = gf.ops.RowCodes.encode(gallery)
    ours, wanted = gf.ops.gallery_search(x, gallery, top_k, codes=codes), gf.ops.gallery_search(x, gallery, top_k)
    assert all(torch.equal(a, b) for a, b in zip(ours, wanted))


@needs_int8
def test_codes_are_used_and_exclude_most(monkeypatch):
    torch.manual_seed(6)
    gallery, x = unit_rows(20_000, 256, huge=2), unit_rows(20, 256, huge=2)
    codes = gf.ops.RowCodes.encode(gallery)
    seen = answers(monkeypatch, "search_codes")
    gf.ops.gallery_search(x, gallery, 10, codes=codes)
    kept = seen[0][1][2]
    assert (kept >= 10).all()
    assert float(kept.double().mean()) < 1000


@needs_int8
@pytest.mark.parametrize("gallery", [
    torch.eye(64)[torch.zeros(5000, dtype=torch.int64)],
    torch.eye(64)[torch.arange(5000) % 64],
    torch.zeros(5000, 64),
])  # fmt: skip
def test_bounds_that_exclude_nothing_change_nothing(gallery):
    x = gf.geometry.normalize(torch.ones(3, 64))
    ours = gf.ops.gallery_search(x, gallery, 20, codes=gf.ops.RowCodes.encode(gallery))
    assert ours[1].tolist() == [list(range(20))] * 3 or torch.equal(ours[1], gf.ops.gallery_search(x, gallery, 20)[1])
    assert torch.equal(ours[0], gf.ops.gallery_search(x, gallery, 20)[0])


@needs_int8
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("largest", [1e-45, 1e-38, 1e37, 3e38])
def test_queries_at_the_ends_of_floats_are_searched_with_codes_as_without(queries, largest):
    """Their bounds are no numbers, or exclude nothing."""
    gallery, x = unit_rows(5000, 64), unit_rows(queries, 64)
    x = x / x.abs().amax() * largest
    codes = gf.ops.RowCodes.encode(gallery)
    ours, wanted = gf.ops.gallery_search(x, gallery, 5, codes=codes), gf.ops.gallery_search(x, gallery, 5)
    assert all(torch.equal(a, b) for a, b in zip(ours, wanted, strict=True))


@functools.cache
def rotation(width: int) -> Tensor:
    """The rotation of rows before they are rounded to bytes, in float64."""
    axes = gf.ops.RowCodes.encode(torch.eye(width))
    return axes.scale.double()[:, None] * (axes.code.double() - 128)  # all entries have one magnitude


def rotated(rows: Tensor) -> Tensor:
    """Rows [..., d] in float64 whose codes are made of these: the rotation's inverse, as float32."""
    return rows @ rotation(rows.shape[-1]).T


def best_by_codes(queries: Tensor, gallery: Tensor, narrower: float = 1.0) -> Tensor:
    """The best item of each query by bounds that are, or are not, as wide as they have to be."""
    codes = gf.ops.RowCodes.encode(gallery)
    arrays = codes.code, codes.scale, narrower * codes.error, narrower * codes.largest_norm
    _, index, kept = extension.required().search_codes(queries, gallery, *arrays, 1)
    assert (kept > 0).all()
    return index[:, 0]


@needs_int8
@pytest.mark.parametrize("margin", [1e-3, 1e-6])
@pytest.mark.parametrize(("queries", "width"), [(1, 4096), (2, 4096), (3, 4096), (4, 64), (6, 256), (7, 64), (40, 256)])
def test_bounds_hold_where_the_rounding_of_a_query_attains_them(queries, width, margin):
    """Two rows that bytes hold exactly, and a query of which they lose `lost`. The inequality of Cauchy and Schwarz is
    an equality for both rows: the best is at its upper bound, the other, nearly as good, at its lower bound."""
    first = torch.eye(width, dtype=torch.float64)[0]
    step = 127 * 254 if queries <= 3 else 127  # few queries are rounded to a 254th of a byte
    rest = width - 1
    large = min(127, int(127 * step / (0.98 * rest)))
    along = int(0.98 * large * rest / step)
    assert 0 < along <= 127
    norm = math.sqrt(along**2 + large**2 * rest)
    share = (1 + margin) * along * step / (large * rest + math.sqrt(rest) * norm)
    assert 0.4 < share < 0.5
    wrong = 0
    for seed in range(8):
        lost = torch.randint(2, (width,), generator=torch.Generator().manual_seed(seed)).double() * 2 - 1
        lost[0] = 0
        x = gf.geometry.normalize(rotated(step * first + share * lost)).float().expand(queries, -1).contiguous()
        rows = gf.geometry.normalize(rotated(torch.stack((along * first - large * lost, lost)))).float()
        best = extension.required().gallery_search(x, rows, 1)[1][:, 0]
        assert torch.equal(best_by_codes(x, rows), best)
        assert bool((best == 1).all()) or margin < 1e-4
        wrong += int((best_by_codes(x, rows, 0.9 / (1 + math.sqrt(width) / 254)) != best).sum())
    # The bound takes a code for longer than its row by sqrt(width) / 254 at the most. A tenth less does not hold.
    assert wrong >= 4 * queries or margin < 1e-4


@needs_int8
@pytest.mark.parametrize("margin", [1e-3, 1e-6])
@pytest.mark.parametrize("queries", [1, 2, 3, 4, 6, 7, 40])
@pytest.mark.parametrize("width", [64, 256])
def test_bounds_hold_where_the_rounding_of_rows_attains_them(queries, width, margin):
    """A query that bytes hold exactly, along what they lose of two rows: the best is at its upper bound, the other,
    nearly as good, at its lower bound."""
    generator = torch.Generator().manual_seed(width)
    first = torch.eye(width, dtype=torch.float64)[0]
    lost = torch.randint(2, (queries, width), generator=generator).double() * 2 - 1
    lost[:, 0] = 0
    x = gf.geometry.normalize(rotated(lost)).float()
    up, down = 127 * first + 0.49 * lost, 127 * first + 0.51 * lost
    rows = rotated(torch.cat(((1 - margin) * 0.49 / 0.51 * down, up)) / 127).float()
    best = extension.required().gallery_search(x, rows, 1)[1][:, 0]
    assert torch.equal(best_by_codes(x, rows), best)
    if margin > 1e-4:
        assert best.tolist() == [queries + query for query in range(queries)]
        assert (best_by_codes(x, rows, 0.99) != best).all()  # a hundredth less does not hold


def test_codes_of_another_gallery_are_refused():
    gallery = unit_rows(5000, 70)
    with pytest.raises(ValueError, match="codes are"):
        gf.ops.gallery_search(unit_rows(1, 70), gallery, 3, codes=gf.ops.RowCodes.encode(gallery[:-1]))


# ---- galleries -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
@pytest.mark.parametrize("kind", ["tensor", "array", "file", "shards"])
@pytest.mark.parametrize("codes", [False, True])
def test_gallery_search(tmp_path, dtype, kind, codes):
    torch.manual_seed(8)
    rows, x = unit_rows(9000, 96, huge=2).numpy().astype(dtype), unit_rows(5, 96, huge=2)
    rows[8000:8010] = rows[3]
    source = torch.from_numpy(rows) if kind == "tensor" else rows
    if kind == "file":
        np.save(tmp_path / "gallery.npy", rows)
        source = tmp_path / "gallery.npy"
    elif kind == "shards":
        for number, part in enumerate(np.array_split(rows, 2)):
            np.save(tmp_path / f"part_{number}.npy", part)
        source = tmp_path
    gallery = gf.Gallery(source, codes=codes)
    score, number = gallery.search(x, 20)
    wanted = gf.ops.gallery_search(x, torch.from_numpy(rows).to(torch.float32), 20)
    assert torch.equal(number, wanted[1])
    assert torch.allclose(score, wanted[0], rtol=0, atol=1e-6)
    assert gallery.search(x.numpy(), 10**6)[1].shape == (5, 9000)


@pytest.fixture
def by_codes(monkeypatch) -> list[int]:
    """The sizes of the galleries that are searched by codes."""
    return sizes_of(monkeypatch, "search_codes", 1)


@pytest.fixture
def encoded(monkeypatch) -> list[int]:
    """The sizes of the galleries that codes are made of."""
    return sizes_of(monkeypatch, "encode_rows", 0)


def sizes_of(monkeypatch, wanted: str, argument: int) -> list[int]:
    """Rows of an argument in each call of a compiled function."""
    sizes: list[int] = []
    watch_border(monkeypatch, lambda name, inputs, _: name == wanted and sizes.append(len(inputs[argument])))
    return sizes


@needs_int8
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
@pytest.mark.parametrize("kind", ["tensor", "array", "shards", "normalize"])
@pytest.mark.parametrize("queries", [1, 5, 40])
def test_a_gallery_with_codes_gives_the_same_bits(tmp_path, dtype, kind, queries, by_codes, encoded):
    """With rows that occur twice, within a shard and in two, rows that differ in one last digit, and more hits than
    copies."""
    torch.manual_seed(queries)
    rows, x = unit_rows(13_000, 70, huge=2).numpy().astype(dtype), unit_rows(queries, 70, huge=2)
    rows[1000:1030] = rows[6000:6030] = rows[9000] = x[0].numpy().astype(dtype)
    rows[10_000:10_020] = rows[17]
    rows[10_020:10_040] = rows[17]
    rows[10_020:10_040, 5] = np.nextafter(rows[17, 5], dtype(2))
    source, options = torch.from_numpy(rows) if kind == "tensor" else rows, {}
    if kind == "normalize":
        source, options = rows * dtype(0.5), {"normalize": True}
    elif kind == "shards":
        for number, part in enumerate(np.split(rows, [5000])):
            np.save(tmp_path / f"part_{number}.npy", part)
        source = tmp_path
    plain, coded = gf.Gallery(source, **options), gf.Gallery(source, codes=True, **options)
    assert not encoded
    for count in (1, 45, 100):
        wanted, ours = plain.search(x, count), coded.search(x, count)
        assert torch.equal(ours[0], wanted[0])
        assert torch.equal(ours[1], wanted[1])
    assert wanted[1][0, :61].tolist() == [*range(1000, 1030), *range(6000, 6030), 9000]
    assert sum(encoded) == 13_000  # each row once
    assert sum(by_codes) == 3 * 13_000


@needs_int8
def test_codes_belong_to_the_rows_of_a_gallery(by_codes, encoded):
    """A gallery that shares the rows shares the codes; small galleries, float64 queries and posteriors need none."""
    rows, x = unit_rows(5000, 24), unit_rows(3, 24)
    gallery = gf.Gallery(rows, codes=True)
    gallery.search(x.double())
    gallery.statistics(x.unsqueeze(1), 10.0, 3)
    gf.Gallery(rows[:4000], codes=True).search(x)
    assert not encoded
    wanted = gallery.search(x)
    assert torch.equal(gallery.with_store(None).search(x)[0], wanted[0])
    assert torch.equal(gallery.on("cpu").search(x)[0], wanted[0])
    assert encoded == [5000]
    assert by_codes == 3 * [5000]


@needs_int8
@pytest.mark.parametrize("way", ["counted", "data", "numpy", "array"])
def test_codes_follow_rows_that_were_overwritten(way, encoded):
    """By torch, past its count of writes, or through an array: a search never uses the codes of the former rows."""
    rows, x = unit_rows(5000, 24), unit_rows(40, 24)
    shared = rows.numpy()
    gallery = gf.Gallery(shared if way == "array" else rows, codes=True)
    twin = gallery.with_store(None)
    gallery.search(x)
    twin.search(x)
    assert encoded == [5000]
    if way == "counted":
        rows[1:11] = x[:10]
    elif way == "data":
        rows.data[:10] = x[:10]
    else:
        shared[:10] = x[:10].numpy()
    for each in (gallery, twin):
        score, number = each.search(x)
        wanted = gf.Gallery(rows).search(x)
        assert torch.equal(score, wanted[0])
        assert torch.equal(number, wanted[1])


def test_codes_are_asked_for_by_a_boolean():
    with pytest.raises(TypeError, match="codes"):
        gf.Gallery(unit_rows(3, 4), codes="yes")


@needs_int8
@pytest.mark.filterwarnings("ignore:BayesReranker is uncalibrated")
def test_shortlists_of_a_re_ranker_are_found_by_codes(by_codes):
    flow = gf.GeoFlow(gf.GeoFlowConfig(24, 24, hidden=16, depth=1)).eval()
    rows, queries = unit_rows(5000, 24), unit_rows(3, 24)
    settings = {"shortlist": 4, "n_steps": 2}
    plain = gf.BayesReranker(flow, gf.Gallery(rows), "t2i", **settings)(queries)
    assert not by_codes
    coded = gf.BayesReranker(flow, gf.Gallery(rows, codes=True), "t2i", **settings)(queries)
    assert by_codes
    assert torch.equal(coded.index, plain.index)
    assert torch.equal(coded.prob, plain.prob)


# ---- real embeddings -----------------------------------------------------------------------------------------------


@needs_int8
@pytest.mark.skipif(not CLIP.exists(), reason=f"needs the embeddings {CLIP}")
@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_of_clip_exclude_most_and_change_nothing(dtype, monkeypatch):
    """A few coordinates of these rows are far larger than the others; the bounds are narrow nevertheless."""
    with np.load(CLIP, allow_pickle=False) as file:
        images, texts = (gf.geometry.normalize(torch.tensor(file[k]).float()) for k in ("image_emb", "class_text_emb"))
    gallery = images[:6000].to(dtype)
    codes, seen = gf.ops.RowCodes.encode(gallery), answers(monkeypatch, "search_codes")
    assert float(codes.error.max()) < 0.015
    for count in (1, 3, 16, 64):
        queries = torch.cat((texts[: count // 2], images[6000 : 6000 + count - count // 2]))
        ours, wanted = (gf.ops.gallery_search(queries, gallery, 10, codes=some) for some in (codes, None))
        assert all(torch.equal(a, b) for a, b in zip(ours, wanted, strict=True))
    kept = torch.cat([result[2] for _, result in seen])
    assert len(kept) == 84
    assert (kept >= 10).all()
    assert float(kept.double().mean()) < 600
