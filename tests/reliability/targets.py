"""Every public function with good arguments, for `tests/reliability/test_fuzz.py` to spoil."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import geoflow_fast as gf
from geoflow_fast import evaluation as ev
from geoflow_fast import noise, ops
from geoflow_fast.distributed import World
from geoflow_fast.evaluation.retrieval import RetrievalSet
from geoflow_fast.plan import plan_scoring
from geoflow_fast.worlds import BumpField, ClipWorld, ConceptWorld, PairField
from tests.reliability.hostile import Target

ROWS, IMAGE, TEXT = 6, 5, 4


def unit(*shape: int, seed: int = 0) -> Tensor:
    return functional.normalize(normal(*shape, seed=seed), dim=-1)


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu")


@functools.cache
def small_flow() -> gf.GeoFlow:
    torch.manual_seed(0)
    return gf.GeoFlow(gf.GeoFlowConfig(IMAGE, TEXT, hidden=8, depth=1, heads=2)).eval()


@functools.cache
def small_head() -> gf.PosteriorHead:
    torch.manual_seed(0)
    config = gf.HeadConfig(steps=2, batch_size=8, val_every=1, points=2, hidden=4, bias_hidden=3, bank=4)
    with torch.device("cpu"):
        head = gf.PosteriorHead(config, IMAGE, TEXT).eval()
    head.bank_image.copy_(unit(4, IMAGE))
    head.bank_text.copy_(unit(4, TEXT))
    head.hub_weight.fill_(0.5)
    return head


@functools.cache
def square_flow() -> gf.GeoFlow:
    """Cosines need images and texts of one width."""
    torch.manual_seed(0)
    return gf.GeoFlow(gf.GeoFlowConfig(IMAGE, IMAGE, hidden=8, depth=1, heads=2)).eval()


def square_pairs(rows: int) -> gf.EmbeddingPairs:
    return gf.EmbeddingPairs.from_arrays(unit(rows, IMAGE), unit(rows, IMAGE, seed=1))


def some_pairs() -> gf.EmbeddingPairs:
    return gf.EmbeddingPairs.from_arrays(unit(40, IMAGE), unit(40, TEXT, seed=1))


def clouds() -> dict[str, Tensor]:
    return {
        "image0": unit(ROWS, IMAGE),
        "text0": unit(ROWS, TEXT, seed=1),
        "image1": unit(ROWS, IMAGE, seed=2),
        "text1": unit(ROWS, TEXT, seed=3),
    }


def codes() -> Tensor:
    return torch.arange(ROWS, dtype=torch.int8, device="cpu") % 3


def pair() -> dict[str, Tensor]:
    return {"image": unit(ROWS, IMAGE), "text": unit(ROWS, TEXT, seed=1)}


def entropy_of(queries: Any, **settings: Any) -> gf.RetrievalPosterior:
    return gf.RetrievalEntropy(small_flow(), **settings)(queries)


def head_entropy_of(queries: Any, **settings: Any) -> gf.RetrievalPosterior:
    return gf.RetrievalEntropy(small_head(), **settings)(queries)


def reranked(queries: Any, **settings: Any) -> gf.Reranked:
    return gf.BayesReranker(square_flow(), **settings)(queries)


def pairs_of(image: Any, text: Any, image_index: Any, normalize: Any, index: Any) -> tuple[Tensor, Tensor]:
    return gf.EmbeddingPairs.from_arrays(image, text, image_index, normalize=normalize)[index]


def velocity(image: Any, text: Any, t: Any, direction: Any) -> tuple[Tensor, Tensor]:
    return small_flow().velocity(image, text, t, direction)


def trained(**settings: Any) -> float:
    with torch.device("cpu"):
        flow = gf.GeoFlow(small_flow().config)
    return gf.train(flow, some_pairs(), gf.TrainConfig(**settings)).best_val_loss


def configured(**settings: Any) -> int:
    return gf.GeoFlowConfig(**settings).inner


def panel(**settings: Any) -> Tensor:
    return ops.ot_assign_panel(**settings, world=World())


def structured(n: Any, d: Any, device: Any) -> Tensor:
    return noise.StructuredNoise.draw(n, d, device=device).dense()


def interval(values: Any, correct: Any, **settings: Any) -> ev.Interval:
    return ev.bootstrap_interval(ev.auroc, values, correct, **settings)


def taken(source: Any, index: Any) -> Tensor:
    return gf.Gallery(source).take(index)


def in_blocks(source: Any, device: Any) -> Tensor:
    gallery = gf.Gallery(source)
    gallery.to(device)
    return torch.cat([rows.clone() for _, rows in gallery.blocks(device)])


def fast_entropy_of(queries: Any, **settings: Any) -> gf.RetrievalPosterior:
    return gf.RetrievalEntropy.fast(small_flow(), **settings)(queries)


def calibrated(pairs: Any, max_queries: Any, shortlist: Any) -> float:
    reranker = gf.BayesReranker(square_flow(), unit(60, IMAGE), shortlist=shortlist, n_steps=1)
    return reranker.calibrate(pairs, max_queries=max_queries, progress=False).alpha


def from_json(**settings: Any) -> int:
    return gf.GeoFlowConfig.from_json(settings).inner


def retrieval_set() -> RetrievalSet:
    return RetrievalSet.of(square_pairs(ROWS), "t2i")


@functools.cache
def concept_world() -> ConceptWorld:
    return ConceptWorld(IMAGE)


@functools.cache
def clip_world() -> ClipWorld:
    return ClipWorld(IMAGE, groups=2, styles=3)


def concepts_drawn(n: Any, concepts: Any, generator: Any) -> tuple[Tensor, ...]:
    return concept_world().sample(n, concepts=concepts, generator=generator)


def bump_field(image_centre: Any, text_centre: Any, c: Any) -> tuple[Tensor, ...]:
    field = BumpField(image_centre, text_centre, c)
    return *field.velocity(**pair(), t=0.5, direction="joint"), field.log_density(**pair(), direction="joint")


def pair_field(rotation: Any, c: Any) -> tuple[Tensor, ...]:
    field = PairField(rotation, c)
    return *field.velocity(**square_pair(), t=0.5, direction="i2t"), field.log_density(**square_pair(), direction="i2t")


def some_rotation() -> Tensor:
    return torch.linalg.qr(normal(IMAGE, IMAGE)).Q.contiguous()


def square_pair() -> dict[str, Tensor]:
    return {"image": unit(ROWS, IMAGE), "text": unit(ROWS, IMAGE, seed=1)}


def world_of(rank: Any, size: Any, count: Any) -> range:
    return World(rank, size).own(count)


def entries(**values: Any) -> Mapping[str, Any]:
    return values


BUMP = BumpField(unit(IMAGE), unit(IMAGE, seed=1), 0.8)
TURNED = PairField(some_rotation(), 0.8)


TARGETS = [
    Target(
        "ops.adaln_jvp",
        ops.adaln_jvp,
        lambda: entries(x=normal(6, 5), dx=normal(2, 6, 5), shift=normal(5), scale=normal(5), eps=1e-6),
        True,
    ),
    Target(
        "ops.swiglu_jvp",
        ops.swiglu_jvp,
        lambda: entries(gate=normal(6, 5), d_gate=normal(2, 6, 5), value=normal(6, 5), d_value=normal(2, 6, 5)),
        True,
    ),
    Target(
        "ops.gate_residual_jvp",
        ops.gate_residual_jvp,
        lambda: entries(
            residual=normal(6, 5),
            d_residual=normal(2, 6, 5),
            gate=normal(6, 5),
            d_gate=normal(2, 6, 5),
            value=normal(6, 5),
            d_value=normal(2, 6, 5),
            layer_scale=normal(5),
        ),
        True,
    ),
    Target(
        "ops.masked_interpolant",
        ops.masked_interpolant,
        lambda: entries(**clouds(), t=torch.linspace(0, 1, ROWS), direction=codes(), drop=codes() == 1, backend="auto"),
    ),
    Target(
        "ops.sinkhorn",
        ops.sinkhorn,
        lambda: entries(cost=normal(6, 7).abs(), eps=0.1, tol=1e-3, max_iter=50, storage="float32", backend="auto"),
    ),
    Target(
        "geometry.sample_uniform",
        noise.sample_uniform,
        lambda: entries(n=4, d=3, dtype=torch.float32, device="cpu", structured=False),
    ),
    Target("GeoFlowConfig", configured, lambda: small_flow().config.to_json()),
    Target(
        "train",
        trained,
        lambda: entries(
            steps=2,
            batch_size=8,
            lr=1e-3,
            warmup_steps=1,
            seed=0,
            coupling="paper",
            conditional_coupling="independent",
            val_every=1,
            weight_decay=0.0,
            clip=1.0,
            accumulate=1,
        ),
        dear=True,
    ),
    Target(
        "EmbeddingPairs",
        pairs_of,
        lambda: entries(**pair(), image_index=torch.arange(ROWS), normalize=False, index=torch.arange(3)),
    ),
    Target(
        "sample",
        functools.partial(gf.sample, small_flow()),
        lambda: entries(
            text=unit(3, TEXT), n_samples=2, n_steps=2, guidance=1.0, solver="euler", grid="uniform", noise="iid"
        ),
    ),
    Target(
        "RetrievalEntropy",
        entropy_of,
        lambda: entries(
            queries=unit(3, TEXT),
            gallery=unit(7, IMAGE),
            direction="t2i",
            n_samples=2,
            kappa=10.0,
            guidance=1.0,
            n_steps=2,
            seed=0,
            solver="euler",
            noise="iid",
            top_k=2,
            posterior="likelihood",
        ),
    ),
    Target(
        "RetrievalEntropy of a head",
        head_entropy_of,
        lambda: entries(
            queries=unit(3, TEXT), gallery=unit(7, IMAGE), direction="t2i", top_k=2, reference=unit(5, TEXT)
        ),
    ),
    Target(
        "BayesReranker",
        reranked,
        lambda: entries(
            queries=unit(3, IMAGE, seed=1),
            gallery=unit(7, IMAGE),
            direction="t2i",
            shortlist=4,
            n_steps=2,
            solver="midpoint",
            n_probes=1,
            seed=0,
        ),
        True,
    ),
    Target(
        "fit_bandwidth",
        functools.partial(gf.fit_bandwidth, small_flow(), some_pairs()),
        lambda: entries(
            direction="t2i", guidances=(0.0,), kappas=(1.0, 2.0), max_queries=4, n_samples=2, n_steps=1, seed=0
        ),
    ),
    Target(
        "ops.ot_assign_panel",
        panel,
        lambda: entries(**clouds(), eps=0.05, tol=1e-3, max_iter=50, uniform=torch.rand(ROWS, dtype=torch.float64)),
    ),
    Target("geometry.StructuredNoise.draw", structured, lambda: entries(n=4, d=3, device="cpu")),
    Target("geometry.hadamard", noise.hadamard, lambda: entries(order=8, dtype=torch.float32, device="cpu")),
    Target("geometry.hadamard_transform", noise.hadamard_transform, lambda: entries(x=normal(6, 8)), True),
    Target("GeoFlowConfig.from_json", from_json, lambda: small_flow().config.to_json()),
    Target("Gallery.take", taken, lambda: entries(source=unit(7, 5), index=torch.tensor([[1, 2], [0, 6]]))),
    Target("Gallery.blocks", in_blocks, lambda: entries(source=unit(7, 5), device="cpu")),
    Target(
        "RetrievalEntropy.fast",
        fast_entropy_of,
        lambda: entries(queries=unit(3, TEXT), gallery=unit(7, IMAGE), direction="t2i", n_samples=2, kappa=9.0, seed=0),
    ),
    Target(
        "BayesReranker.calibrate",
        calibrated,
        lambda: entries(pairs=square_pairs(60), max_queries=60, shortlist=60),
        dear=True,
    ),
    Target(
        "evaluation.bootstrap_interval",
        interval,
        lambda: entries(
            values=normal(30),
            correct=normal(30, seed=1) > 0,
            resamples=5,
            confidence=0.9,
            seed=0,
            groups=torch.arange(30) // 2,
        ),
        True,
    ),
    Target(
        "plan.plan_scoring",
        plan_scoring,
        lambda: entries(
            items=10**6, dim=64, queries=1000, device="h100", devices=8, block=64, fast=False, layout="auto"
        ),
        extra={"dim": [2**40], "items": [10**30, 2**62], "devices": [2**62], "layout": ["rows"]},
    ),
    Target("distributed.World", world_of, lambda: entries(rank=1, size=3, count=7)),
    Target(
        "worlds.ConceptWorld.sample",
        concepts_drawn,
        lambda: entries(n=4, concepts=torch.arange(3), generator=torch.Generator()),
        extra={"concepts": [torch.tensor([32]), torch.tensor([-1])]},
    ),
    Target(
        "worlds.BumpField",
        bump_field,
        lambda: entries(image_centre=unit(IMAGE), text_centre=unit(TEXT, seed=1), c=0.8),
        extra={"c": [40.0, -40.0, 41.0]},
    ),
    Target(
        "worlds.PairField",
        pair_field,
        lambda: entries(rotation=some_rotation(), c=0.8),
        extra={"rotation": [2 * some_rotation()], "c": [40.0, -40.0, 41.0]},
    ),
]
