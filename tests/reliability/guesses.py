"""Good arguments for the functions that `surface.py` finds, and all targets of `test_fuzz.py` together.

A new public function needs no entry here: its arguments are guessed from the tables of names and types.
"""

from __future__ import annotations

import importlib.util
import inspect
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import geoflow_fast as gf
from geoflow_fast.distributed import ALONE
from geoflow_fast.evaluation.retrieval import plain_search
from geoflow_fast.runtime.pages import charts
from tests.reliability.file_targets import (
    BASELINES,
    ENCODERS,
    FILES,
    calibrated,
    fitted,
    report,
    reranker,
    threshold,
    tiny_encoder,
)
from tests.reliability.hostile import Target, fresh_path
from tests.reliability.surface import guessed, surface
from tests.reliability.targets import (
    BUMP,
    IMAGE,
    ROWS,
    TARGETS,
    TEXT,
    TURNED,
    clip_world,
    codes,
    concept_world,
    normal,
    retrieval_set,
    small_flow,
    small_head,
    some_pairs,
    square_pairs,
    unit,
)


def result_scores() -> torch.Tensor:
    """Result lists of 12 queries, best hit first."""
    return normal(12, 5).sort(1, descending=True).values


def tested_scores() -> torch.Tensor:
    """Those of 12 other queries."""
    return normal(12, 5, seed=4).sort(1, descending=True).values


def some_trust() -> gf.Trust:
    """A fitted one."""
    return gf.Trust().fit(result_scores(), normal(12, seed=3) > 0)


def some_rule() -> gf.Rule:
    """A rule that promises so little that it is certified on few queries."""
    return some_trust().certify(tested_scores(), normal(12, seed=3) > 0, 0.9)


def flat_index() -> Any:
    """A FAISS index over unit rows."""
    import faiss

    index = faiss.IndexFlatIP(IMAGE)
    index.add(unit(60, IMAGE).numpy())
    return index


def some_store() -> gf.stores.FaissStore:
    """A store with these rows."""
    return gf.stores.FaissStore(flat_index())


def found_nothing(vectors: Any, k: int) -> tuple[Any, Any]:  # noqa: ARG001
    """A search of an empty store."""
    return [[] for _ in vectors], [[] for _ in vectors]


def saved(made: gf.Trust | gf.Rule) -> Path:
    """The file of one of these."""
    path = Path(tempfile.mkdtemp()) / "saved.json"
    made.save(path)
    return path


def some_table() -> Any:
    """Six pairs of embeddings in a table, with ids."""
    import pyarrow

    image, text = (unit(6, 5, seed=seed).tolist() for seed in (0, 1))
    return pyarrow.table({"id": list("abcdef"), "image": image, "text": text})


def table_file() -> Path:
    """One side of them in a Parquet file."""
    import pyarrow.parquet

    path = Path(tempfile.mkdtemp()) / "table.parquet"
    pyarrow.parquet.write_table(some_table().drop_columns("text"), path)
    return path


def some_epistemic() -> gf.Epistemic:
    """Densities of three pairs."""
    return gf.epistemic(small_flow(), unit(3, IMAGE), unit(3, TEXT, seed=1), n_steps=1)


EXAMPLES: dict[str, Callable[[], Any]] = {
    "x": lambda: unit(6, 5),
    "y": lambda: unit(6, 5, seed=1),
    "a": lambda: unit(6, 5),
    "b": lambda: unit(6, 5, seed=1),
    "v": lambda: normal(6, 5),
    "dx": lambda: normal(2, 6, 5),
    "t": lambda: 0.3,
    "t: Tensor": lambda: torch.linspace(0, 1, ROWS),
    "n": lambda: 4,
    "d": lambda: 3,
    "h": lambda: 0.1,
    "shift": lambda: normal(5),
    "scale": lambda: normal(5),
    "layer_scale: Tensor": lambda: normal(5),
    "keep": lambda: normal(6, 5) > 0,
    "drop": lambda: codes() == 1,
    **{name: lambda: normal(6, 5) for name in ("gate", "value", "residual")},
    **{name: lambda: normal(2, 6, 5) for name in ("d_gate", "d_value", "d_residual")},
    **{name: lambda: normal(ROWS, IMAGE) for name in ("v_image", "target_image")},
    **{name: lambda: normal(ROWS, TEXT) for name in ("v_text", "target_text")},
    "image": lambda: unit(ROWS, IMAGE),
    "text": lambda: unit(ROWS, TEXT, seed=1),
    "image0": lambda: unit(ROWS, IMAGE),
    "text0": lambda: unit(ROWS, TEXT, seed=1),
    "image1": lambda: unit(ROWS, IMAGE, seed=2),
    "text1": lambda: unit(ROWS, TEXT, seed=3),
    "image_index": lambda: torch.arange(ROWS),
    "direction": lambda: "t2i",
    "direction: Tensor": codes,
    "v_free": lambda: normal(6, 5),
    "weights": lambda: (1.0, 1.0),
    "samples": lambda: unit(3, 4, 5),
    "gallery": lambda: unit(7, 5),
    "item_bias": lambda: normal(7),
    "source": lambda: unit(7, 5),
    "queries": lambda: unit(3, IMAGE),
    "kappa": lambda: 20.0,
    "top_k": lambda: 3,
    "width": lambda: 3,
    "pairs": lambda: square_pairs(40),
    "flow": small_flow,
    "field": small_flow,
    "config: GeoFlowConfig": lambda: small_flow().config,
    "config: HeadConfig": lambda: small_head().config,
    "image_dim": lambda: 5,
    "text_dim": lambda: 5,
    "n_steps": lambda: 2,
    "n_probes": lambda: 1,
    "n_samples": lambda: 2,
    "max_steps": lambda: 8,
    "max_queries": lambda: 4,
    "max_iter": lambda: 50,
    "resamples": lambda: 3,
    "guidance": lambda: 1.0,
    "solver": lambda: "midpoint",
    "divergence": lambda: "hutchinson",
    "settings: DensitySettings | None": gf.DensitySettings,
    "seed": lambda: 0,
    "tol": lambda: 1e-3,
    "eps": lambda: 0.05,
    "uncertainty": lambda: normal(30),
    "correct": lambda: normal(30, seed=1) > 0,
    "prob": lambda: torch.rand(30),
    "values": lambda: normal(9),
    "entropy": lambda: normal(6).abs(),
    "n_items": lambda: 9,
    "count": lambda: 7,
    "folder": fresh_path,
    "path": fresh_path,
    "out: str | Path": fresh_path,
    "device": lambda: "cpu",
    "dtype": lambda: torch.float32,
    "shape": lambda: (3, 4),
    "progress": lambda: False,
    # By type, for parameters of other names.
    "Tensor": lambda: unit(6, 5),
    "int": lambda: 3,
    "float": lambda: 0.5,
    "str": lambda: "auto",
    "bool": lambda: False,
    "Path": fresh_path,
}
"""A good value by the name of a parameter, or by its name and annotation."""
ARGUMENTS: dict[str, dict[str, Callable[[], Any]]] = {
    "evaluation.": {"x": lambda: normal(9), "y": lambda: normal(9, seed=1)},
    "evaluation.clopper_pearson_upper": {"count": lambda: 2, "n": lambda: 9},
    "evaluation.abstention_threshold": {"target_risk": lambda: 0.6, "confidence": lambda: 0.9},
    "worlds.": {"text": lambda: unit(ROWS, IMAGE, seed=1)},
    "worlds.ClipWorld": {"dim": lambda: IMAGE},
    "worlds.PairWorld.sample_search": {"queries": lambda: 3, "items": lambda: 5},
    "distributed.World": {"counts": lambda: [6]},
    "GeoFlow.": {"direction": lambda: "joint"},
    "RetrievalEntropy.": {"queries": lambda: unit(3, TEXT)},
    "PosteriorHead.": {"queries": lambda: unit(3, TEXT)},
    "evaluation.retrieval.RetrievalSet.": {"index": lambda: torch.tensor([0, 2, 5]), "rows": lambda: slice(3)},
    "evaluation.retrieval.RetrievalSet": {
        "queries": lambda: unit(3, IMAGE),
        "items": lambda: unit(6, IMAGE, seed=1),
        "query_image": lambda: torch.arange(3),
        "item_image": lambda: torch.arange(6),
        "query_row": lambda: np.arange(3),
        "item_row": lambda: np.arange(6),
    },
    "evaluation.retrieval.RetrievalSet.from_qrels": {
        "items": lambda: unit(7, IMAGE, seed=1),
        "qrels": lambda: gf.Qrels([0, 2, 2], [6, 0, 5], [1.0, 1.0, 2.0]),
    },
    "evaluation.retrieval.plain_search": {"task": retrieval_set},
    "baselines.GroVE": {"latent": lambda: 2},
    "baselines.find": {"name": lambda: "probvlm"},
    "suggest_steps": {"tolerance": lambda: 0.5},
    "HeadConfig.from_json": {"value": lambda: small_head().config.to_json()},
    "PosteriorHead.fit": {"conf": lambda: small_head().config},
    "Gallery.take": {"index": lambda: torch.tensor([[1, 2], [0, 6]])},
    "EmbeddingPairs.subset": {"index": lambda: torch.arange(3)},
    **{
        name: {"scores": result_scores, "labels": lambda: normal(12, seed=3) > 0, "features": lambda: None}
        for name in ("Trust.", "Rule.")
    },
    "Trust.p_no_match": {"no_match_share": lambda: 0.3},
    "Qrels.relevant": {"least": lambda: 1.0},
    "BayesReranker.calibrate": {"least_grade": lambda: 1.0},
    "Trust.certify": {
        "scores": tested_scores,
        "precision": lambda: None,
        "encoder": lambda: "clip",
        "gallery_size": lambda: 9,
    },
    "watch": {
        "rule": some_rule,
        "scores": result_scores,
        "features": lambda: None,
        "every": lambda: 6,
        "window": lambda: 12,
    },
    "evaluation.Report.": {
        "tiles": lambda: [("queries", "12", "judged")],
        "summary": lambda: "more",
    },
    "evaluation.Report.risk": {"chart": lambda: charts.risk_coverage({"error": ([0.5, 1.0], [0.1, 0.2])})},
    "evaluation.Report.intervals": {"chart": lambda: charts.whiskers([("margin", 0.8, 0.7, 0.9)])},
    "Rule.with_hits": {"hits": lambda: torch.arange(60).view(12, 5), "rows": lambda: torch.arange(12)},
    "Rule.with_rows": {"rows": lambda: torch.arange(12)},
    "Trust.save": {"path": fresh_path},
    "Trust.load": {"path": lambda: saved(some_trust())},
    "Rule.load": {"path": lambda: saved(some_rule())},
    "GeoFlowConfig.auto": {"pairs": lambda: 100},
    "TrainConfig.auto": {"pairs": lambda: 100},
    "plan.plan_training": {"pairs": lambda: 100},
    "ops.counter_noise": {"numbers": lambda: torch.arange(ROWS, device="cpu"), "width": lambda: IMAGE},
    "ops.unit_rows": {"table": lambda: unit(ROWS, IMAGE), "index": lambda: torch.arange(ROWS, device="cpu")},
    "stores.": {
        "vectors": lambda: unit(3, IMAGE),
        "k": lambda: 4,
        "dim": lambda: IMAGE,
    },
    "stores.FaissStore": {"index": flat_index, "ids": lambda: list(range(60))},
    "stores.FaissStore.": {"ids": lambda: [3, 1, 1]},
    "stores.CustomStore": {"search": lambda: found_nothing, "fetch": lambda: None},
    "stores.CustomStore.": {"ids": list},
    "stores.StoreReranker": {"store": some_store, "shortlist": lambda: 60, "pairs": lambda: square_pairs(60)},
    "GalleryIndex.check": {"gallery": lambda: unit(9, 5)},
    "EmbeddingPairs.from_table": {
        "table": some_table,
        "image": lambda: "image",
        "text": lambda: "text",
        "id_column": lambda: "id",
        "image_id_column": lambda: "id",
        "sides": lambda: ("sound", "words"),
    },
    "Embeddings.from_table": {"table": some_table, "column": lambda: "text", "id_column": lambda: "id"},
    "Embeddings.from_arrays": {"rows": lambda: unit(3, 5), "ids": lambda: ["a", "b", "c"]},
    "Embeddings.open": {"path": table_file, "ids": lambda: list(range(6))},
    "embed_texts": {
        "texts": lambda: ["red", "blue"],
        "encoder": gf.ColourEncoder,
        "ids": lambda: [1, 2],
        "dtype": lambda: "float32",
    },
    "embed_sides": {
        "sides": lambda: {name: (["red", "blue"], gf.ColourEncoder()) for name in ("question", "answer")},
        "ids": lambda: [1, 2],
        "dtype": lambda: "float32",
    },
    **{name: {"ids": lambda: ["a", "b", "c"]} for name in ("Reranked.", "RetrievalPosterior.", "Epistemic.")},
}
"""Values for parameters whose names mean something else in one function, or in those under a name."""
INSTANCES: dict[str, Callable[[], Any]] = {
    "AbstentionThreshold": threshold,
    "Answers": lambda: plain_search(retrieval_set(), 3),
    "Baseline": lambda: fitted("margin"),
    "BayesReranker": reranker,
    "BayesVLM": lambda: fitted("bayesvlm"),
    "BumpField": lambda: BUMP,
    "Calibration": lambda: calibrated().calibration,
    "ClipWorld": clip_world,
    "ColourEncoder": gf.ColourEncoder,
    "ConceptWorld": concept_world,
    "EmbeddingPairs": some_pairs,
    "Epistemic": some_epistemic,
    "Reranked": lambda: reranker().rerank(unit(3, IMAGE)),
    "RetrievalPosterior": lambda: INSTANCES["RetrievalEntropy"]()(unit(3, TEXT)),
    "Gallery": lambda: gf.Gallery(unit(7, 5)),
    "GalleryIndex": lambda: gf.GalleryIndex.build(unit(9, 5), 3),
    "FaissStore": some_store,
    "GeoFlow": small_flow,
    "OpenClipEncoder": tiny_encoder,
    "PairField": lambda: TURNED,
    "PairWorld": clip_world,
    "PosteriorHead": small_head,
    "Report": report,
    "RetrievalEntropy": lambda: gf.RetrievalEntropy(small_flow(), unit(7, IMAGE), "t2i", n_samples=2, n_steps=2),
    "RetrievalSet": retrieval_set,
    "Rule": some_rule,
    "TrainConfig": gf.TrainConfig.tiny,
    "Trust": some_trust,
    "World": lambda: ALONE,
}
"""Objects whose methods are called; one of another class is made from guessed arguments."""
SPREADING = ("geometry.", "ops.", "distributed.World.", "evaluation.", "GeoFlow.", "Gallery.statistics")
SPREADING += ("worlds.BumpField.velocity", "worlds.PairField.velocity", "watch")
"""Functions that turn a NaN into a NaN, as arithmetic does, or give one where a measure is not defined."""
STRICT = ("geometry.check_rows", "geometry.normalize", "geometry.log_area", "ops.ot_assign", "ops.couple")
STRICT += ("ops.transport_cost", "ops.gallery_posterior", "ops.keep_mask", "evaluation.AbstentionThreshold.")
STRICT += ("evaluation.clopper_pearson_upper", "evaluation.ranks", "evaluation.Report", "evaluation.retrieval.")
"""Exceptions to these: they never give a NaN."""
COSTLY = ("suggest_steps", "worlds.ConceptWorld", "PosteriorHead.fit")
EXTRA: dict[str, dict[str, Sequence[Any]]] = {
    "evaluation.retrieval.RetrievalSet.of": {
        "pairs": [some_pairs(), square_pairs(ROWS).subset(torch.arange(0))],
        "max_queries": [10**30],
    },
    "evaluation.retrieval.RetrievalSet.from_qrels": {
        "queries": [unit(2, IMAGE), unit(3, TEXT)],
        "items": [unit(6, IMAGE), unit(7, TEXT)],
        "qrels": [gf.Qrels([], [], []), gf.Qrels([0], [0], [0.0])],
    },
    "evaluation.retrieval.plain_search": {"top_k": [10**9], "device": ["meta", "cuda:99"]},
    "evaluation.retrieval.Answers.recall": {"k": [4]},
    "distributed.World.gather_rows": {"counts": [[5], [6, 6], [-6], ["6"], [6.0], torch.tensor([6])]},
}
"""More hostile values of arguments."""


def guessed_target(name: str, function: Callable[..., Any]) -> Target:
    """The target of a public function or method with guessed arguments."""
    examples = dict(EXAMPLES)
    for owner, values in ARGUMENTS.items():
        if f"{name}.".startswith(owner if owner.endswith(".") else f"{owner}."):
            examples |= values
    instance = None
    if next(iter(inspect.signature(function).parameters)) == "self":
        owner, _, _ = name.rpartition(".")
        made = guessed_target(owner, surface()[owner]) if owner.rpartition(".")[2] not in INSTANCES else None
        instance = INSTANCES[owner.rpartition(".")[2]] if made is None else lambda: made.call(**made.good())
    return guessed(
        name,
        function,
        examples,
        instance,
        spreads=name.startswith(SPREADING) and not name.startswith(STRICT),
        extra=EXTRA.get(name, {}),
        dear=name in COSTLY,
    )


GIVEN = [*TARGETS, *FILES, *ENCODERS, *BASELINES]
"""Targets whose arguments cannot be guessed."""
ENGINES = {
    "stores.LanceReranker": "lancedb",
    "stores.LanceStore": "lancedb",
    "stores.QdrantStore": "qdrant_client",
    "stores.ChromaStore": "chromadb",
    "stores.MilvusStore": "pymilvus",
    "stores.PgvectorStore": "psycopg",
}
"""Packages without which nothing of these names can be made; tests/stores sees that errors name them."""
ABSENT = tuple(name for name, package in ENGINES.items() if importlib.util.find_spec(package) is None)
GUESSED = [
    guessed_target(name, function)
    for name, function in surface().items()
    if name not in {target.name for target in GIVEN}
    and not inspect.isabstract(function)
    and not name.startswith(ABSENT)
]
