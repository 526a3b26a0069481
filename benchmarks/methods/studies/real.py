"""The default pipeline against references on real photographs and captions, and on the concept world.

Flickr8k in a small dual encoder (trained on the training images, calibrated on
half of the development images and judged on the others, both ways round), and two sets of 500 photographs in CLIP (five
folds: judged on one, half of the others trains and half calibrates). The pipeline is the ladder of evidence: cosine,
hub correction, a head and a flow, each kept only if held-out pairs show that it helps. Gates: neither a reference nor
the ladder without its flow or its head is better than the pipeline beyond chance, with Holm's correction over the table
of a set; on Flickr8k the pipeline is ahead of tuned softmax by .05 AUROC.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import geoflow_fast as gf
from benchmarks.methods import registry
from benchmarks.methods.baseline_methods import BaselineStudy
from benchmarks.methods.baselines.adapter import TwoTowerAdapter
from benchmarks.methods.leads import Lead, corrected, paired_leads
from benchmarks.methods.results import DOCS, RESULTS, SHARED, gate, report, shared_pairs, write_blocks
from benchmarks.methods.studies.comparison import world_folder
from benchmarks.methods.studies.entropy import trained_flow
from geoflow_fast.directions import CONDITIONAL, Direction
from geoflow_fast.evaluation.compare import ScoredQueries, judge, score_queries
from geoflow_fast.evaluation.ladder_methods import FlowReranker, Ladder
from geoflow_fast.evaluation.methods import Method, Study
from geoflow_fast.evaluation.results import COLUMNS, Result
from geoflow_fast.evaluation.retrieval import plain_search
from geoflow_fast.retrieval.task import RetrievalTask
from geoflow_fast.training.config import RunConfig

PAGE = DOCS / "benchmarks.md"
SETS = {
    "flickr8k": "Flickr8k in a small dual encoder (not CLIP)",
    "photos/coco500": "500 COCO photographs and captions, CLIP ViT-B/16",
    "photos/unsplash500": "500 photographs and descriptions, CLIP",
    "concept_world": "60,000 pairs of the concept world, 1,000 to calibrate and 1,000 to judge by; one seed",
}
REFERENCES = (
    "max_softmax",
    "softmax_entropy",
    "margin",
    "knn",
    "hub_softmax",
    "list_logistic",
    "list_boosting",
    "adapter",
)
FOLDS, CALIBRATION_SHARE = 5, 0.5
FEW_PAIRS = {"steps": 400, "warmup_steps": 20, "val_every": 20}
"""How the adapter trains: its own run is made for many pairs."""
MEASURES = ("nll", "auroc", "recall")
SHOWN = ("nll", "auroc", "aurc", "recall", "ece", "spearman", "r2")
SURE = 0.05
LEAST_LEAD = {"flickr8k": 0.05}
"""By set, how far the pipeline must be ahead of tuned softmax in AUROC, in both directions."""


class HubsOnly(Ladder):
    """The ladder without its head, which shows what the head adds."""

    name, title = "hubs_only", "GeoFlow ladder, hubs only"

    def __init__(self, study: Study) -> None:
        super().__init__(dataclasses.replace(study, head=None, head_seconds=0.0))


def studies(path: str) -> Iterator[tuple[Study, gf.EmbeddingPairs]]:
    """What to fit on, and the pairs to judge by."""
    out = RESULTS / "real" / path
    if path == "concept_world":
        train, val, test = (gf.EmbeddingPairs.open(world_folder() / part) for part in ("train", "val", "test"))
        head = gf.PosteriorHead.fit(train, seed=0, out=out / "head")
        yield Study(val, train, trained_flow(train.image_dim), head=head), test
        return
    if path == "flickr8k":
        study = trained(shared_pairs("flickr8k/train"), out)
        halves = shared_pairs("flickr8k/dev").split(0.5, seed=0)
        for val, test in (halves, halves[::-1]):
            yield dataclasses.replace(study, val=val), test
        return
    pairs = shared_pairs(path)
    fold = np.random.default_rng(0).permutation(len(pairs)) % FOLDS
    for k in range(FOLDS):
        train, val = pairs.subset(fold != k).split(CALIBRATION_SHARE, seed=k)
        yield dataclasses.replace(trained(train, out / str(k), k), val=val), pairs.subset(fold == k)


def trained(pairs: gf.EmbeddingPairs, out: Path, seed: int = 0) -> Study:
    """What `geoflow train` makes of pairs: the head and the flow of the preset "auto", kept in `out`."""
    start = time.perf_counter()
    head = gf.PosteriorHead.fit(pairs, seed=seed, out=out / "head")
    between = time.perf_counter()
    config = gf.GeoFlowConfig.auto(pairs.image_dim, pairs.text_dim, len(pairs))
    torch.manual_seed(seed)
    flow = gf.GeoFlow(config)
    gf.train(flow, pairs, dataclasses.replace(gf.TrainConfig.auto(len(pairs)), seed=seed), out=out / "flow")
    own = TwoTowerAdapter(pairs.image_dim, pairs.text_dim).default_config()
    adapter: RunConfig = dataclasses.replace(own, batch_size=min(512, len(pairs)), **FEW_PAIRS)
    return BaselineStudy(
        pairs,
        pairs,
        flow.eval(),
        time.perf_counter() - between,
        seed,
        configs={TwoTowerAdapter.method: adapter},
        head=head,
        head_seconds=between - start,
    )


def methods_of(study: Study) -> list[Method]:
    """The pipeline first."""
    references = [registry.create(name, study) for name in REFERENCES]
    return [FlowReranker(study), Ladder(study), HubsOnly(study), *references]


def judged(path: str) -> tuple[list[Result], list[Lead]]:
    """The results of all methods in both directions, and the leads of the pipeline over the others."""
    scored: dict[tuple[Direction, int], list[ScoredQueries]] = {}
    for study, test in studies(path):
        methods = methods_of(study)
        for direction in CONDITIONAL[::-1]:
            task = RetrievalTask.of(test, direction)
            answers = plain_search(task)
            for number, method in enumerate(methods):
                scored.setdefault((direction, number), []).append(score_queries(method, task, answers))
    results, leads = [], []
    for direction in CONDITIONAL[::-1]:
        pooled = [ScoredQueries.pooled(folds) for (own, _), folds in scored.items() if own == direction]
        results += judge(pooled)
        leads += paired_leads(pooled[0], pooled[1:])
    return results, corrected([lead for lead in leads if lead.measure in MEASURES])


def rows_of(results: Sequence[Result], leads: Sequence[Lead], direction: str) -> list[dict[str, Any]]:
    """A row for each method: its numbers, and what the pipeline gains over it. The pipeline is the first."""
    rows = []
    for result in results:
        if result.direction != direction:
            continue
        row: dict[str, Any] = {"": result.title}
        row |= {COLUMNS[name][0]: result.numbers[name] for name in SHOWN}
        gains = {lead.measure: lead for lead in leads if (lead.direction, lead.over) == (direction, result.method)}
        for name in MEASURES:
            lead = gains.get(name)
            words = "" if lead is None else f"{lead.value:+.3f} ({lead.low:+.3f} to {lead.high:+.3f})"
            row[f"gain in {COLUMNS[name][0]}"] = words
        rows.append(row)
    return rows


def name_of(path: str, direction: str) -> str:
    """The name under which a table is stored."""
    return f"real_{path.replace('/', '_')}_{direction}"


def check(path: str, leads: Sequence[Lead]) -> None:
    """The gates of a set."""
    for lead in leads:
        gate(
            f"{path}, {lead.direction}: {lead.over} is not better in {lead.measure}",
            lead.value >= 0 or lead.p_holm > SURE,
        )
        if path in LEAST_LEAD and (lead.over, lead.measure) == ("max_softmax", "auroc"):
            words = f"{lead.value:.3f}, {lead.low:.3f} to {lead.high:.3f}"
            gate(f"{path}, {lead.direction}: AUROC over tuned softmax ({words})", lead.value >= LEAST_LEAD[path])


def run() -> str:
    """The study. Gates come after all sets, so that the tables also show what does not hold."""
    parts, every = [], {}
    for path, data in SETS.items():
        if path != "concept_world" and not SHARED.is_dir():
            parts.append(f"{path} is left out: {SHARED} is absent")
            continue
        results, every[path] = judged(path)
        for direction in CONDITIONAL[::-1]:
            rows = rows_of(results, every[path], direction)
            parts.append(report(name_of(path, direction), rows, {"data": data}))
    write_blocks(PAGE)
    for path, leads in every.items():
        check(path, leads)
    return "\n\n".join(parts)
