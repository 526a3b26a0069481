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
from geoflow_fast import geometry as g
from geoflow_fast import noise, ops
from geoflow_fast.distributed import ALONE, World
from geoflow_fast.evaluation.retrieval import RetrievalSet, plain_search
from geoflow_fast.plan import plan_scoring
from geoflow_fast.worlds import BumpField, ConceptWorld, PairField
from tests.reliability.hostile import Target

ROWS, IMAGE, TEXT = 6, 5, 4


def unit(*shape: int, seed: int = 0) -> Tensor:
    return functional.normalize(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)), dim=-1)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@functools.cache
def small_flow() -> gf.GeoFlow:
    torch.manual_seed(0)
    return gf.GeoFlow(gf.GeoFlowConfig(IMAGE, TEXT, hidden=8, depth=1, heads=2)).eval()


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
    return torch.arange(ROWS, dtype=torch.int8) % 3


def pair() -> dict[str, Tensor]:
    return {"image": unit(ROWS, IMAGE), "text": unit(ROWS, TEXT, seed=1)}


def judged() -> dict[str, Any]:
    return {"uncertainty": normal(30), "correct": normal(30, seed=1) > 0}


def entropy_of(queries: Any, **settings: Any) -> gf.RetrievalPosterior:
    return gf.RetrievalEntropy(small_flow(), **settings)(queries)


def reranked(queries: Any, **settings: Any) -> gf.Reranked:
    return gf.BayesReranker(square_flow(), **settings)(queries)


def indexed(gallery: Any, width: Any) -> gf.GalleryIndex:
    return gf.GalleryIndex.build(gallery, width)


def pairs_of(image: Any, text: Any, image_index: Any, normalize: Any, index: Any) -> tuple[Tensor, Tensor]:
    return gf.EmbeddingPairs.from_arrays(image, text, image_index, normalize=normalize)[index]


def velocity(image: Any, text: Any, t: Any, direction: Any) -> tuple[Tensor, Tensor]:
    return small_flow().velocity(image, text, t, direction)


def trained(**settings: Any) -> float:
    return gf.train(gf.GeoFlow(small_flow().config), some_pairs(), gf.TrainConfig(**settings)).best_val_loss


def configured(**settings: Any) -> int:
    return gf.GeoFlowConfig(**settings).inner


def panel(**settings: Any) -> Tensor:
    return ops.ot_assign_panel(**settings, world=World())


def structured(n: Any, d: Any, device: Any) -> Tensor:
    return noise.StructuredNoise.draw(n, d, device=device).dense()


def answers(uncertainty: Any) -> Any:
    return ev.abstention_threshold(**judged(), target_risk=0.6, confidence=0.5, share=0.2).answers(uncertainty)


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


def presets(image_dim: Any, text_dim: Any) -> list[int]:
    return [make(image_dim, text_dim).inner for make in (gf.GeoFlowConfig.paper, gf.GeoFlowConfig.small)]


def from_json(**settings: Any) -> int:
    return gf.GeoFlowConfig.from_json(settings).inner


def retrieval_set() -> RetrievalSet:
    return RetrievalSet.of(square_pairs(ROWS), "t2i")


@functools.cache
def concept_world() -> ConceptWorld:
    return ConceptWorld(IMAGE)


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


def claimed(count: Any) -> list[int]:
    return list(World().claims(count))


def world_of(rank: Any, size: Any, count: Any) -> range:
    return World(rank, size).own(count)


def entries(**values: Any) -> Mapping[str, Any]:
    return values


BUMP = BumpField(unit(IMAGE), unit(TEXT, seed=1), 0.8)
TURNED = PairField(some_rotation(), 0.8)


TARGETS = [
    Target(
        "ops.adaln",
        ops.adaln,
        lambda: entries(x=normal(6, 5), shift=normal(2, 5), scale=normal(2, 5), eps=1e-6, backend="auto"),
        True,
    ),
    Target(
        "ops.adaln_jvp",
        ops.adaln_jvp,
        lambda: entries(x=normal(6, 5), dx=normal(2, 6, 5), shift=normal(5), scale=normal(5), eps=1e-6),
        True,
    ),
    Target("ops.swiglu", ops.swiglu, lambda: entries(gate=normal(6, 5), value=normal(6, 5), backend="auto"), True),
    Target(
        "ops.swiglu_jvp",
        ops.swiglu_jvp,
        lambda: entries(gate=normal(6, 5), d_gate=normal(2, 6, 5), value=normal(6, 5), d_value=normal(2, 6, 5)),
        True,
    ),
    Target(
        "ops.gate_residual",
        ops.gate_residual,
        lambda: entries(
            residual=normal(6, 5),
            gate=normal(6, 5),
            value=normal(6, 5),
            layer_scale=normal(5),
            keep=normal(6, 5) > 0,
            dropout=0.1,
        ),
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
    Target("ops.keep_mask", ops.keep_mask, lambda: entries(shape=(3, 4), share=0.5, device="cpu", backend="auto")),
    Target(
        "ops.flow_loss",
        ops.flow_loss,
        lambda: entries(
            v_image=normal(ROWS, IMAGE),
            v_text=normal(ROWS, TEXT),
            target_image=normal(ROWS, IMAGE),
            target_text=normal(ROWS, TEXT),
            image=unit(ROWS, IMAGE),
            text=unit(ROWS, TEXT),
            direction=codes(),
        ),
        True,
    ),
    Target(
        "ops.masked_interpolant",
        ops.masked_interpolant,
        lambda: entries(**clouds(), t=torch.linspace(0, 1, ROWS), direction=codes(), drop=codes() == 1, backend="auto"),
    ),
    Target(
        "ops.tangent_step",
        ops.tangent_step,
        lambda: entries(x=unit(6, 5), v=normal(6, 5), h=0.1, v_free=normal(6, 5), guidance=1.0, retraction="exp"),
        True,
    ),
    Target(
        "ops.transport_cost",
        ops.transport_cost,
        lambda: entries(**clouds(), cost="arc", weights=(1.0, 1.0), backend="auto"),
    ),
    Target(
        "ops.sinkhorn",
        ops.sinkhorn,
        lambda: entries(cost=normal(6, 7).abs(), eps=0.1, tol=1e-3, max_iter=50, storage="float32", backend="auto"),
    ),
    Target(
        "ops.ot_assign",
        ops.ot_assign,
        lambda: entries(
            **clouds(),
            eps=0.05,
            tol=1e-3,
            max_iter=50,
            assignment="argmax",
            cost="arc",
            storage="float32",
            backend="auto",
        ),
    ),
    Target(
        "ops.couple",
        ops.couple,
        lambda: entries(
            **clouds(), coupling="paper", direction="joint", eps=0.05, tol=1e-3, max_iter=50, target_ratio=0.01
        ),
    ),
    Target(
        "ops.gallery_posterior",
        ops.gallery_posterior,
        lambda: entries(
            samples=unit(3, 4, 5),
            gallery=unit(7, 5),
            kappa=20.0,
            top_k=3,
            backend="auto",
            item_bias=normal(7),
            prune="auto",
        ),
    ),
    Target(
        "ops.gallery_statistics",
        ops.gallery_statistics,
        lambda: entries(
            samples=unit(3, 4, 5), gallery=unit(7, 5), kappa=20.0, top_k=3, item_bias=normal(7), first_index=2
        ),
        True,
    ),
    Target("geometry.normalize", g.normalize, lambda: entries(x=normal(6, 5))),
    Target("geometry.angle", g.angle, lambda: entries(a=unit(6, 5), b=unit(6, 5, seed=1)), True),
    Target("geometry.project_tangent", g.project_tangent, lambda: entries(x=unit(6, 5), v=normal(6, 5)), True),
    Target("geometry.interpolate", g.interpolate, lambda: entries(a=unit(6, 5), b=unit(6, 5, seed=1), t=0.3), True),
    Target("geometry.exp_map", g.exp_map, lambda: entries(x=unit(6, 5), v=normal(6, 5)), True),
    Target("geometry.log_map", g.log_map, lambda: entries(x=unit(6, 5), y=unit(6, 5, seed=1)), True),
    Target(
        "geometry.parallel_transport",
        g.parallel_transport,
        lambda: entries(x=unit(6, 5), y=unit(6, 5, seed=1), v=normal(6, 5)),
        True,
    ),
    Target(
        "geometry.sample_uniform",
        noise.sample_uniform,
        lambda: entries(n=4, d=3, dtype=torch.float32, device="cpu", structured=False),
    ),
    Target("geometry.log_area", g.log_area, lambda: entries(d=4)),
    Target("GeoFlowConfig", configured, lambda: small_flow().config.to_json()),
    Target("GeoFlow.velocity", velocity, lambda: entries(**pair(), t=0.5, direction="joint"), True),
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
    Target("Gallery", gf.Gallery, lambda: entries(source=unit(7, 5))),
    Target("GalleryIndex.build", indexed, lambda: entries(gallery=unit(9, 5), width=3)),
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
        "log_density",
        functools.partial(gf.log_density, small_flow()),
        lambda: entries(
            **pair(),
            direction="joint",
            n_steps=2,
            n_probes=1,
            solver="midpoint",
            divergence="hutchinson",
        ),
    ),
    Target(
        "epistemic",
        functools.partial(gf.epistemic, small_flow()),
        lambda: entries(**pair(), n_steps=2, n_probes=1, solver="midpoint"),
    ),
    Target(
        "suggest_steps",
        functools.partial(gf.suggest_steps, small_flow()),
        lambda: entries(**pair(), tolerance=0.5, direction="joint", solver="midpoint", n_probes=1, max_steps=8),
        dear=True,
    ),
    Target("risk_lower_bound", gf.risk_lower_bound, lambda: entries(entropy=normal(6).abs(), n_items=9)),
    Target(
        "fit_bandwidth",
        functools.partial(gf.fit_bandwidth, small_flow(), some_pairs()),
        lambda: entries(
            direction="t2i", guidances=(0.0,), kappas=(1.0, 2.0), max_queries=4, n_samples=2, n_steps=1, seed=0
        ),
    ),
    Target("evaluation.auroc", ev.auroc, judged, True),
    Target("evaluation.aurc", ev.aurc, judged, True),
    Target("evaluation.pearson", ev.pearson, lambda: entries(x=normal(9), y=normal(9, seed=1)), True),
    Target("evaluation.spearman", ev.spearman, lambda: entries(x=normal(9), y=normal(9, seed=1)), True),
    Target("evaluation.ranks", ev.ranks, lambda: entries(values=normal(9))),
    Target(
        "evaluation.reliability",
        ev.reliability,
        lambda: entries(prob=torch.rand(30), correct=judged()["correct"], bins=5, strategy="uniform"),
        True,
    ),
    Target(
        "evaluation.retrieval_calibration",
        ev.retrieval_calibration,
        lambda: entries(**judged(), bins=5, seed=0, resamples=3, confidence=0.9),
        True,
    ),
    Target("evaluation.selective_accuracy", ev.selective_accuracy, judged, True),
    Target(
        "evaluation.abstention_threshold",
        ev.abstention_threshold,
        lambda: entries(**judged(), target_risk=0.6, confidence=0.9, share=0.2, seed=0),
        True,
    ),
    Target("evaluation.clopper_pearson_upper", ev.clopper_pearson_upper, lambda: entries(count=2, n=9, confidence=0.9)),
    Target(
        "ops.ot_assign_panel",
        panel,
        lambda: entries(**clouds(), eps=0.05, tol=1e-3, max_iter=50, uniform=torch.rand(ROWS, dtype=torch.float64)),
    ),
    Target("geometry.check_rows", g.check_rows, lambda: entries(x=unit(6, 5), name="x", unit=True)),
    Target("geometry.dot", g.dot, lambda: entries(a=unit(6, 5), b=unit(6, 5, seed=1)), True),
    Target("geometry.orthogonal_direction", g.orthogonal_direction, lambda: entries(a=unit(6, 5)), True),
    Target("geometry.geodesic", g.geodesic, lambda: entries(a=unit(6, 5), b=unit(6, 5, seed=1), t=0.3), True),
    Target(
        "geometry.geodesic_velocity",
        g.geodesic_velocity,
        lambda: entries(a=unit(6, 5), b=unit(6, 5, seed=1), t=0.3),
        True,
    ),
    Target("geometry.StructuredNoise.draw", structured, lambda: entries(n=4, d=3, device="cpu")),
    Target("geometry.hadamard", noise.hadamard, lambda: entries(order=8, dtype=torch.float32, device="cpu")),
    Target("geometry.hadamard_transform", noise.hadamard_transform, lambda: entries(x=normal(6, 8)), True),
    Target("GeoFlowConfig.paper", presets, lambda: entries(image_dim=8, text_dim=8)),
    Target("GeoFlowConfig.tiny", gf.GeoFlowConfig.tiny, lambda: entries(image_dim=8, text_dim=8)),
    Target("GeoFlowConfig.from_json", from_json, lambda: small_flow().config.to_json()),
    Target("GeoFlow.to_flow", small_flow().to_flow, pair, True),
    Target("GeoFlow.from_flow", small_flow().from_flow, pair, True),
    Target("TrainConfig.learning_rate", gf.TrainConfig.tiny().learning_rate, lambda: entries(step=3)),
    Target("EmbeddingPairs.split", some_pairs().split, lambda: entries(fraction=0.5, seed=0)),
    Target("EmbeddingPairs.subset", some_pairs().subset, lambda: entries(index=torch.arange(3))),
    Target("Gallery.take", taken, lambda: entries(source=unit(7, 5), index=torch.tensor([[1, 2], [0, 6]]))),
    Target("Gallery.blocks", in_blocks, lambda: entries(source=unit(7, 5), device="cpu")),
    Target(
        "Gallery.statistics",
        gf.Gallery(unit(7, 5)).statistics,
        lambda: entries(samples=unit(3, 4, 5), kappa=20.0, top_k=3, item_bias=normal(7)),
        True,
    ),
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
    Target("evaluation.AbstentionThreshold.answers", answers, lambda: entries(uncertainty=normal(9))),
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
    Target(
        "evaluation.retrieval.RetrievalSet.of",
        RetrievalSet.of,
        lambda: entries(pairs=square_pairs(ROWS), direction="t2i", max_queries=3, seed=0),
        extra={"pairs": [some_pairs(), square_pairs(ROWS).subset(torch.arange(0))], "max_queries": [10**30]},
    ),
    Target(
        "evaluation.retrieval.RetrievalSet.is_right",
        retrieval_set().is_right,
        lambda: entries(index=torch.tensor([[0, 1], [2, -1], [5, 0]]), rows=slice(3)),
    ),
    Target(
        "evaluation.retrieval.RetrievalSet.pairs_with",
        retrieval_set().pairs_with,
        lambda: entries(index=torch.tensor([0, 2, 5]), rows=slice(3)),
    ),
    Target(
        "evaluation.retrieval.plain_search",
        plain_search,
        lambda: entries(task=retrieval_set(), top_k=2, device="cpu", progress=False),
        extra={"top_k": [10**9], "device": ["meta", "cuda:99"]},
    ),
    Target(
        "evaluation.retrieval.Answers.recall",
        plain_search(retrieval_set(), 3).recall,
        lambda: entries(k=2),
        extra={"k": [4]},
    ),
    Target("distributed.World", world_of, lambda: entries(rank=1, size=3, count=7)),
    Target("distributed.World.shares", ALONE.shares, lambda: entries(count=7)),
    Target("distributed.World.all_reduce", ALONE.all_reduce, lambda: entries(x=normal(6), operation="max"), True),
    Target("distributed.World.mean", ALONE.mean, lambda: entries(x=normal(6)), True),
    Target("distributed.World.broadcast", ALONE.broadcast, lambda: entries(x=normal(6)), True),
    Target(
        "distributed.World.gather_rows",
        ALONE.gather_rows,
        lambda: entries(x=normal(6, 5), counts=[6]),
        True,
        extra={"counts": [[5], [6, 6], [-6], ["6"], [6.0], torch.tensor([6])]},
    ),
    Target("distributed.World.swap_rows", ALONE.swap_rows, lambda: entries(x=normal(6, 5)), True),
    Target("distributed.World.claims", claimed, lambda: entries(count=7)),
    Target("distributed.World.add_up", ALONE.add_up, lambda: entries(name="rows", amount=7)),
    Target("worlds.ConceptWorld", ConceptWorld, lambda: entries(dim=IMAGE, seed=0), dear=True),
    Target(
        "worlds.ConceptWorld.sample",
        concepts_drawn,
        lambda: entries(n=4, concepts=torch.arange(3), generator=torch.Generator()),
        extra={"concepts": [torch.tensor([32]), torch.tensor([-1])]},
    ),
    *(
        Target(f"worlds.ConceptWorld.{name}", getattr(concept_world(), name), square_pair)
        for name in ("log_joint", "log_text_given_image", "log_image_given_text", "pmi")
    ),
    Target("worlds.ConceptWorld.log_image", concept_world().log_image, lambda: entries(image=unit(ROWS, IMAGE))),
    Target("worlds.ConceptWorld.log_text", concept_world().log_text, lambda: entries(text=unit(ROWS, IMAGE))),
    Target(
        "worlds.ConceptWorld.gallery_posterior",
        concept_world().gallery_posterior,
        lambda: entries(queries=unit(3, IMAGE), gallery=unit(7, IMAGE, seed=1), direction="t2i"),
    ),
    Target(
        "worlds.BumpField",
        bump_field,
        lambda: entries(image_centre=unit(IMAGE), text_centre=unit(TEXT, seed=1), c=0.8),
        extra={"c": [40.0, -40.0, 41.0]},
    ),
    Target("worlds.BumpField.velocity", BUMP.velocity, lambda: entries(**pair(), t=0.5, direction="joint"), True),
    Target("worlds.BumpField.log_density", BUMP.log_density, lambda: entries(**pair(), direction="joint")),
    Target(
        "worlds.PairField",
        pair_field,
        lambda: entries(rotation=some_rotation(), c=0.8),
        extra={"rotation": [2 * some_rotation()], "c": [40.0, -40.0, 41.0]},
    ),
    Target(
        "worlds.PairField.velocity", TURNED.velocity, lambda: entries(**square_pair(), t=0.5, direction="joint"), True
    ),
    Target("worlds.PairField.log_density", TURNED.log_density, lambda: entries(**square_pair(), direction="joint")),
]
