"""Good arguments for every public name, which `test_hostile.py` replaces by hostile ones, one at a time."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch
from PIL import Image
from torch import Tensor

import geoflow_fast as gf
from geoflow_fast import evaluation, geometry, ops
from geoflow_fast.distributed import World
from geoflow_fast.worlds import BumpField, ConceptWorld
from tests.encoders import tiny_clip
from tests.reliability.hostile import Target, fresh_path
from tests.samples import unit
from tests.with_torchvision import import_torchvision

ROWS, IMAGE, TEXT = 6, 5, 4


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu")


# ---- models, pairs, lists and files that the calls need ------------------------------------------------------------


@functools.cache
def small_flow(text_dim: int = TEXT) -> gf.GeoFlow:
    torch.manual_seed(0)
    return gf.GeoFlow(gf.GeoFlowConfig(IMAGE, text_dim, hidden=8, depth=1, heads=2)).eval()


def square_flow() -> gf.GeoFlow:
    """Cosines need images and texts of one width."""
    return small_flow(IMAGE)


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


def some_pairs(rows: int = 40, text_dim: int = TEXT) -> gf.EmbeddingPairs:
    return gf.EmbeddingPairs.from_arrays(unit(rows, IMAGE), unit(rows, text_dim, seed=1))


def square_pairs(rows: int) -> gf.EmbeddingPairs:
    return some_pairs(rows, IMAGE)


def pair() -> dict[str, Tensor]:
    return {"image": unit(ROWS, IMAGE), "text": unit(ROWS, TEXT, seed=1)}


def clouds() -> dict[str, Tensor]:
    noise = {"image0": unit(ROWS, IMAGE), "text0": unit(ROWS, TEXT, seed=1)}
    return {**noise, "image1": unit(ROWS, IMAGE, seed=2), "text1": unit(ROWS, TEXT, seed=3)}


def codes() -> Tensor:
    return torch.arange(ROWS, dtype=torch.int8, device="cpu") % 3


def lists(seed: int = 0) -> dict[str, Tensor]:
    """Result lists of 12 queries, best hit first, and whether the first hit is right."""
    return {"scores": normal(12, 5, seed=seed).sort(1, descending=True).values, "labels": normal(12, seed=3) > 0}


def some_trust() -> gf.Trust:
    return gf.Trust().fit(**lists())


def some_rule() -> gf.Rule:
    """A rule that promises so little that it is certified on few queries."""
    return some_trust().certify(**lists(4), max_error=0.9)


@functools.cache
def _kept() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


def kept(name: str, make: Callable[[Path], object]) -> Path:
    """A good file or folder, made once; it goes with the process."""
    path = Path(_kept().name) / name
    if not path.exists():
        make(path)
    return path


def pictures() -> list[Image.Image]:
    rng = np.random.default_rng(0)
    return [Image.fromarray(rng.integers(0, 256, (20 + k, 30, 3), dtype=np.uint8)) for k in range(3)]


def picture_folder() -> Path:
    """Three pictures with captions, and one file that is none."""

    def make(folder: Path) -> None:
        folder.mkdir()
        for number, picture in enumerate(pictures()):
            picture.save(folder / f"{number}.png")
            (folder / f"{number}.txt").write_text(f"picture {number}")
        (folder / "3.png").write_bytes(b"none")

    return kept("pictures", make)


@functools.cache
def tiny_encoder() -> gf.OpenClipEncoder:
    import_torchvision()
    return gf.OpenClipEncoder.load(f"local-dir:{kept('clip', tiny_clip.save_model)}", device="cpu")


def reranker(**settings: Any) -> gf.BayesReranker:
    return gf.BayesReranker(square_flow(), unit(60, IMAGE), shortlist=60, n_steps=1, **settings)


def calibration_file() -> Path:
    def make(path: Path) -> None:
        made = reranker()
        made.calibrate(square_pairs(60), max_queries=60, progress=False)
        made.save_calibration(path)

    return kept("calibration.json", make)


def flat_index() -> Any:
    """A FAISS index over unit rows."""
    index = faiss.IndexFlatIP(IMAGE)
    index.add(unit(60, IMAGE).numpy())
    return index


# ---- calls of what takes several ------------------------------------------------------------------------------------


def configured(kind: type) -> Callable[..., object]:
    """Makes settings and reads each of them."""
    return lambda **given: repr(kind(**given))


def all_rows(pairs: gf.EmbeddingPairs) -> tuple[Tensor, Tensor]:
    return pairs[np.arange(len(pairs))]


def calibrated(pairs: Any, max_queries: Any) -> float:
    made = reranker()
    return made.calibrate(pairs, max_queries=max_queries, progress=False).alpha


def trained(out: Any = None, resume: Any = True, **settings: Any) -> float:
    with torch.device("cpu"):
        flow = gf.GeoFlow(small_flow().config)
    return gf.train(flow, some_pairs(), gf.TrainConfig(**settings), out=out, resume=resume).best_val_loss


def encoded(encoder: Callable[[], Any], side: str) -> Callable[..., Tensor]:
    """An encoder returns NaN for what has no direction, by contract."""

    def call(items: Any) -> Tensor:
        rows = getattr(encoder(), f"encode_{side}")(items)
        return rows[~rows.isnan().any(1)]

    return call


def embedded(images: Any, **settings: Any) -> gf.EmbedSummary:
    return gf.embed_images(images, gf.ColourEncoder(), progress=False, **settings)


def bump_field(image_centre: Any, text_centre: Any, c: Any) -> tuple[Tensor, ...]:
    field = BumpField(image_centre, text_centre, c)
    return *field.velocity(**pair(), t=0.5, direction="joint"), field.log_density(**pair(), direction="joint")


BAD_IMAGES: tuple[Any, ...] = (
    [], [None], [b"bytes"], ["no such.png"], ["/proc/self/mem"], ["/dev/null"], ["\0"], [torch.zeros(2, 2)],
    [torch.zeros(3, 32, 32), torch.zeros(3, 31, 32)], [torch.full((3, 32, 32), float("nan"))],
    [Image.new("RGB", (1, 1))], [Image.new("RGBA", (3, 700))], [Image.new("I;16", (9, 9))], [Image.new("1", (9, 9))],
    Image.new("RGB", (4, 4)), np.zeros((2, 3, 32, 32), np.float32),
)  # fmt: skip
BAD_TEXTS: tuple[Any, ...] = ([], [""], [None], [b"bytes"], [["a"]], "one text", ["\0"], ["\ud800"], ["word " * 5000])
SHORT_RUN = {"steps": 2, "batch_size": 8, "warmup_steps": 1, "val_every": 1}
NETWORK = {"residual": (6, 5), "d_residual": (2, 6, 5), "gate": (6, 5), "d_gate": (2, 6, 5), "value": (6, 5)}
NETWORK |= {"d_value": (2, 6, 5), "layer_scale": (5,), "x": (6, 5), "dx": (2, 6, 5), "shift": (5,), "scale": (5,)}


def arrays(*names: str, **more: Any) -> Callable[[], dict[str, Any]]:
    """Activations and parameters of a layer by their names."""
    return lambda: {name: normal(*NETWORK[name], seed=seed) for seed, name in enumerate(names)} | more


def sampled(*, bias: bool = False) -> dict[str, Any]:
    biases = {"item_bias": normal(7), "sample_bias": normal(3, 2)} if bias else {}
    return {"samples": unit(3, 2, IMAGE), "gallery": unit(7, IMAGE, seed=1), "kappa": 10.0, "top_k": 2, **biases}


def judged() -> dict[str, Tensor]:
    return {"uncertainty": normal(30), "correct": normal(30, seed=1) > 0}


LAYERS = [
    Target("ops.adaln", ops.adaln, arrays("x", "shift", "scale", eps=1e-6, backend="auto"), True),
    Target("ops.swiglu", ops.swiglu, arrays("gate", "value"), True),
    Target("ops.gate_residual", ops.gate_residual, arrays("residual", "gate", "value", "layer_scale"), True),
    Target(
        "ops.flow_loss",
        ops.flow_loss,
        lambda: {
            **{name: normal(ROWS, d) for name, d in (("v_image", IMAGE), ("v_text", TEXT))},
            **{name: normal(ROWS, d, seed=1) for name, d in (("target_image", IMAGE), ("target_text", TEXT))},
            **pair(),
            "direction": codes(),
        },
        True,
    ),
]
TRANSPORT = [
    Target("ops.couple", ops.couple, lambda: {**clouds(), "coupling": "paper", "eps": 0.05, "max_iter": 50}, True),
    Target(
        "ops.masked_interpolant",
        ops.masked_interpolant,
        lambda: {**clouds(), "t": torch.linspace(0, 1, ROWS), "direction": codes(), "drop": codes() == 1},
    ),
    Target("ops.ot_assign", ops.ot_assign, lambda: {**clouds(), "eps": 0.05, "tol": 1e-3, "max_iter": 50}),
    Target("ops.sinkhorn", ops.sinkhorn, lambda: {"cost": normal(6, 7).abs(), "eps": 0.1, "tol": 1e-3, "max_iter": 50}),
]
ROW_OPERATIONS = [
    Target(
        "ops.counter_noise",
        ops.counter_noise,
        lambda: {"numbers": torch.arange(ROWS, device="cpu"), "width": 4, "seed": 0, "step": 0, "stream": 0},
    ),
    Target("ops.keep_mask", ops.keep_mask, lambda: {"shape": (3, 4), "share": 0.5, "device": "cpu"}),
    Target(
        "ops.tangent_step",
        ops.tangent_step,
        lambda: {"x": unit(6, 5), "v": normal(6, 5), "h": 0.1, "guidance": 0.0},
        True,
    ),
    Target("ops.unit_rows", ops.unit_rows, lambda: {"table": unit(6, 5), "index": torch.arange(6, device="cpu")}, True),
    Target("geometry.normalize", geometry.normalize, lambda: {"x": normal(6, 5)}),
    Target("geometry.check_rows", geometry.check_rows, lambda: {"x": unit(6, 5), "name": "rows"}),
    Target("geometry.geodesic", geometry.geodesic, lambda: {"a": unit(6, 5), "b": unit(6, 5, seed=1), "t": 0.5}, True),
    Target("geometry.log_map", geometry.log_map, lambda: {"x": unit(6, 5), "y": unit(6, 5, seed=1)}, True),
]
GALLERIES = [
    Target(
        "ops.gallery_posterior",
        ops.gallery_posterior,
        lambda: {**sampled(bias=True), "allowed": torch.arange(7) != 2},
        True,
    ),
    Target(
        "ops.gallery_statistics",
        ops.gallery_statistics,
        lambda: {**sampled(), "allowed": torch.arange(7) != 2},
        True,
    ),
    Target(
        "ops.gallery_search",
        ops.gallery_search,
        lambda: {
            "queries": unit(3, IMAGE),
            "gallery": unit(7, IMAGE, seed=1),
            "top_k": 2,
            "allowed": torch.arange(7) != 2,
        },
        True,
    ),
    Target(
        "Gallery",
        lambda source, index, codes: gf.Gallery(source, codes=codes).take(index),
        lambda: {"source": unit(7, 5), "index": torch.tensor([[1, 2], [0, 6]]), "codes": True},
    ),
    Target("Gallery of a file", gf.Gallery, lambda: {"source": kept("rows.npy", lambda p: np.save(p, unit(9, 5)))}),
    Target(
        "stores.FaissStore",
        lambda vectors, k: gf.stores.FaissStore(flat_index()).search(vectors, k),
        lambda: {"vectors": unit(3, IMAGE), "k": 4},
    ),
]
MODELS = [
    Target("GeoFlowConfig", configured(gf.GeoFlowConfig), lambda: small_flow().config.to_json()),
    Target("HeadConfig", configured(gf.HeadConfig), lambda: small_head().config.to_json()),
    Target("TrainConfig", configured(gf.TrainConfig), lambda: dataclasses.asdict(gf.TrainConfig.tiny())),
    Target(
        "SamplingSettings", configured(gf.SamplingSettings), lambda: {"n_samples": 2, "guidance": 1.0, "grid": "late"}
    ),
    Target("DensitySettings", configured(gf.DensitySettings), lambda: {"n_steps": 2, "solver": "rk4", "redraw": True}),
    Target(
        "GeoFlow", small_flow().velocity, lambda: {**pair(), "t": torch.full((ROWS,), 0.5), "direction": "joint"}, True
    ),
    Target(
        "GeoFlow.from_pretrained",
        gf.GeoFlow.from_pretrained,
        lambda: {"folder": kept("model", small_flow().save_pretrained), "device": "cpu"},
    ),
    Target(
        "PosteriorHead.from_pretrained",
        gf.PosteriorHead.from_pretrained,
        lambda: {"folder": kept("head", small_head().save_pretrained), "device": "cpu"},
    ),
    Target("train", trained, lambda: {**SHORT_RUN, "lr": 1e-3, "coupling": "paper", "clip": 1.0}, costly=True),
    Target("train.out", trained, lambda: {**SHORT_RUN, "out": fresh_path(), "resume": True}, costly=True),
    Target(
        "sample",
        functools.partial(gf.sample, small_flow()),
        lambda: {
            "text": unit(3, TEXT),
            "n_samples": 2,
            "n_steps": 2,
            "guidance": 1.0,
            "solver": "euler",
            "batch_size": 2,
        },
    ),
    Target(
        "log_density",
        functools.partial(gf.log_density, small_flow()),
        lambda: {**pair(), "direction": "joint", "n_steps": 2, "n_probes": 1, "solver": "midpoint", "batch_size": 4},
        True,
    ),
    Target(
        "epistemic",
        functools.partial(gf.epistemic, small_flow()),
        lambda: {**pair(), "n_steps": 2, "n_probes": 1, "solver": "midpoint", "batch_size": 4},
        True,
    ),
]
PAIRS = [
    Target(
        "EmbeddingPairs",
        lambda index, **given: gf.EmbeddingPairs.from_arrays(**given)[index],
        lambda: {**pair(), "image_index": torch.arange(ROWS), "normalize": False, "index": torch.arange(3)},
    ),
    Target(
        "EmbeddingPairs.open",
        lambda **given: all_rows(gf.EmbeddingPairs.open(**given)),
        lambda: {"folder": kept("pairs", lambda folder: some_pairs().save(folder)), "normalize": False},
    ),
    Target(
        "EmbeddingPairs.save",
        some_pairs().save,
        lambda: {"folder": fresh_path(), "rows_per_shard": 7, "dtype": np.float32},
    ),
    Target("Embeddings", gf.Embeddings.from_arrays, lambda: {"rows": unit(3, 5), "ids": ["a", "b", "c"]}),
    Target(
        "Qrels",
        lambda path: float(gf.Qrels.open(path).relevant().grade.sum()),
        lambda: {"path": kept("qrels.csv", lambda path: path.write_text("query,item,grade\n0,1,2\n0,2,1\n3,0,1\n"))},
    ),
]
RETRIEVAL = [
    Target(
        "RetrievalEntropy",
        lambda queries, allowed, batch_size, **given: gf.RetrievalEntropy(small_flow(), **given)(
            queries, allowed=allowed, batch_size=batch_size
        ),
        lambda: {
            "queries": unit(3, TEXT), "gallery": unit(7, IMAGE), "direction": "t2i", "n_samples": 2, "kappa": 10.0,
            "guidance": 1.0, "n_steps": 2, "seed": 0, "top_k": 2, "allowed": torch.arange(7) != 2,
            "batch_size": 2,
        },
    ),
    Target(
        "RetrievalEntropy of a head",
        lambda queries, **given: gf.RetrievalEntropy(small_head(), **given)(queries),
        lambda: {"queries": unit(3, TEXT), "gallery": unit(7, IMAGE), "direction": "t2i", "reference": unit(5, TEXT)},
    ),
    Target(
        "BayesReranker",
        lambda queries, allowed, batch_size, **given: gf.BayesReranker(square_flow(), **given)(
            queries, allowed=allowed, batch_size=batch_size
        ),
        lambda: {
            "queries": unit(3, IMAGE, seed=1), "gallery": unit(7, IMAGE), "direction": "t2i", "shortlist": 4,
            "n_steps": 2, "solver": "midpoint", "n_probes": 1, "seed": 0, "allowed": torch.arange(7) != 2,
            "batch_size": 2,
        },
        True,
    ),
    Target("BayesReranker.calibrate", calibrated, lambda: {"pairs": square_pairs(60), "max_queries": 60}, costly=True),
    Target(
        "Calibration",
        gf.Calibration.load,
        lambda: {"path": calibration_file(), "made_for": reranker().made_for},
    ),
    Target(
        "fit_bandwidth",
        functools.partial(gf.fit_bandwidth, small_flow(), some_pairs()),
        lambda: {
            "direction": "t2i", "guidances": (0.0,), "kappas": (1.0, 2.0), "max_queries": 4, "n_samples": 2,
            "n_steps": 1, "seed": 0,
        },
    ),
    Target("risk_lower_bound", gf.risk_lower_bound, lambda: {"entropy": normal(6).abs(), "n_items": 9}),
]  # fmt: skip
DECISIONS = [
    Target("Trust", lambda **given: gf.Trust().fit(**given).predict_proba(lists(4)["scores"]), lists),
    Target(
        "Trust.certify",
        some_trust().certify,
        lambda: {**lists(4), "max_error": 0.9, "confidence": 0.9, "no_match_share": 0.1, "gallery_size": 9},
    ),
    Target("Rule", some_rule(), lambda: {"scores": lists(4)["scores"]}),
    Target("Rule.load", gf.Rule.load, lambda: {"path": kept("rule.json", some_rule().save)}),
    Target(
        "watch",
        functools.partial(gf.watch, some_rule()),
        lambda: {"scores": lists()["scores"], "every": 6, "window": 12, "false_alarms": 0.05},
        True,
    ),
    Target("evaluation.auroc", evaluation.auroc, judged, True),
    Target(
        "evaluation.bootstrap_interval",
        lambda uncertainty, correct, **given: evaluation.bootstrap_interval(
            evaluation.auroc, uncertainty, correct, **given
        ),
        lambda: {**judged(), "resamples": 5, "confidence": 0.9, "seed": 0, "groups": torch.arange(30) // 2},
        True,
    ),
]
ENCODERS = [
    Target("ColourEncoder", encoded(gf.ColourEncoder, "texts"), lambda: {"items": ["red"]}, extra={"items": BAD_TEXTS}),
    Target(
        "ColourEncoder.encode_images",
        encoded(gf.ColourEncoder, "images"),
        lambda: {"items": pictures()},
        extra={"items": BAD_IMAGES},
    ),
    Target(
        "OpenClipEncoder",
        encoded(tiny_encoder, "texts"),
        lambda: {"items": ["a red car", "blue"]},
        extra={"items": BAD_TEXTS},
    ),
    Target(
        "OpenClipEncoder.encode_images",
        encoded(tiny_encoder, "images"),
        lambda: {"items": pictures()},
        extra={"items": BAD_IMAGES},
    ),
    Target(
        "embed_images",
        embedded,
        lambda: {
            "images": picture_folder(), "out": fresh_path(), "batch_size": 2, "workers": 1, "shard_rows": 2,
            "dtype": "float32", "overwrite": False,
        },
        costly=True,
    ),
    Target(
        "embed_texts",
        lambda **given: gf.embed_texts(encoder=gf.ColourEncoder(), progress=False, **given),
        lambda: {"texts": ["red", "blue"], "out": fresh_path(), "ids": [1, 2], "batch_size": 2, "dtype": "float32"},
    ),
    Target(
        "embed_sides",
        lambda questions, answers, **given: gf.embed_sides(
            {"question": (questions, gf.ColourEncoder()), "answer": (answers, gf.ColourEncoder())},
            progress=False,
            **given,
        ),
        lambda: {"questions": ["red"], "answers": ["blue"], "out": fresh_path(), "ids": [1], "batch_size": 2},
    ),
]  # fmt: skip
OTHERS = [
    Target(
        "distributed.World",
        lambda rank, size, count: World(rank, size).own(count),
        lambda: {"rank": 1, "size": 3, "count": 7},
    ),
    Target(
        "worlds.ConceptWorld",
        lambda **given: ConceptWorld(IMAGE).sample(**given),
        lambda: {"n": 4, "concepts": torch.arange(3), "generator": torch.Generator()},
        extra={"concepts": [torch.tensor([32]), torch.tensor([-1])]},
    ),
    Target(
        "worlds.BumpField",
        bump_field,
        lambda: {"image_centre": unit(IMAGE), "text_centre": unit(TEXT, seed=1), "c": 0.8},
        extra={"c": [40.0, -40.0, 41.0]},
    ),
]
TARGETS = [
    *LAYERS,
    *TRANSPORT,
    *ROW_OPERATIONS,
    *GALLERIES,
    *MODELS,
    *PAIRS,
    *RETRIEVAL,
    *DECISIONS,
    *ENCODERS,
    *OTHERS,
]
