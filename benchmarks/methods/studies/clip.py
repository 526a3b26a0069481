"""The ladder of evidence and references on the CLIP-like world, with the exact posterior, into docs/benchmarks.md.

10,000 pairs train, 400 calibrate and 1,000 judge; then searches in which the items of some queries are missing. Gate:
no reference is better than the ladder beyond chance, with Holm's correction.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import torch

import geoflow_fast as gf
from benchmarks.methods import registry
from benchmarks.methods.baseline_methods import BaselineStudy
from benchmarks.methods.baselines.adapter import TwoTowerAdapter
from benchmarks.methods.leads import corrected, paired_leads
from benchmarks.methods.results import RESULTS, gate, markdown, report, write_blocks
from benchmarks.methods.studies.comparison import Truth, world_folder
from benchmarks.methods.studies.real import FEW_PAIRS, MEASURES, PAGE, REFERENCES, SURE, HubsOnly, rows_of
from geoflow_fast.demo.clip_world import examine_search
from geoflow_fast.directions import CONDITIONAL, Direction
from geoflow_fast.evaluation.compare import judge, score_queries
from geoflow_fast.evaluation.figures import DIRECTION_TITLES
from geoflow_fast.evaluation.ladder_methods import Ladder
from geoflow_fast.evaluation.methods import Study
from geoflow_fast.evaluation.retrieval import plain_search
from geoflow_fast.retrieval.rerank import BayesReranker
from geoflow_fast.retrieval.task import RetrievalTask, typical_queries
from geoflow_fast.worlds import ClipWorld

PAIRS, CALIBRATION, BANK = 10_000, 400, 2000
POINTS, SHORTLIST = 4, 64
"""Points of the head, which are not chosen by trials here, and items of a shortlist where some are missing."""
QUERIES, ITEMS, MISSING = 1000, 1000, 0.3


def trained(world: ClipWorld) -> tuple[Study, gf.EmbeddingPairs]:
    """A study with a head, which is kept, and the pairs to judge by."""
    folder = world_folder(PAIRS, world, "clip_world")
    train, val, test = (gf.EmbeddingPairs.open(folder / part) for part in ("train", "val", "test"))
    start = time.perf_counter()
    head = gf.PosteriorHead.fit(train, k=POINTS, seed=0, out=RESULTS / "clip_world" / "head")
    own = TwoTowerAdapter(train.image_dim, train.text_dim).default_config()
    configs = {TwoTowerAdapter.method: dataclasses.replace(own, **FEW_PAIRS)}
    return BaselineStudy(
        val.subset(range(CALIBRATION)), train, configs=configs, head=head, head_seconds=time.perf_counter() - start
    ), test


def judged(world: ClipWorld, study: Study, test: gf.EmbeddingPairs) -> dict[str, list[dict[str, Any]]]:
    """A table for each direction, the ladder first and the truth last."""
    references = [registry.create(name, study) for name in REFERENCES]
    methods = [Ladder(study), HubsOnly(study), *references, Truth(study, world)]
    results, leads = [], []
    for direction in CONDITIONAL[::-1]:
        task = RetrievalTask.of(test, direction)
        answers = plain_search(task)
        scored = [score_queries(method, task, answers) for method in methods]
        print(f"{direction} scored", flush=True)
        results += judge(scored)
        leads += paired_leads(scored[0], scored[1:])
    leads = corrected([lead for lead in leads if lead.measure in MEASURES])
    tables = {str(direction): rows_of(results, leads, direction) for direction in CONDITIONAL[::-1]}
    for name, rows in tables.items():
        report(f"clip_{name}", rows, {"pairs": PAIRS})
    for lead in leads:
        gate(
            f"{lead.direction}: {lead.over} is not better in {lead.measure}",
            lead.over == Truth.name or lead.value >= 0 or lead.p_holm > SURE,
        )
    return tables


def missing_items(world: ClipWorld, study: Study) -> list[dict[str, Any]]:
    """How well queries whose item is missing are noticed, by direction and method."""
    assert study.train is not None
    rows = []
    for direction in CONDITIONAL[::-1]:
        generator = torch.Generator().manual_seed(400)
        search = world.sample_search(QUERIES, ITEMS, direction, share=MISSING, generator=generator)
        bank = typical_queries(study.train, Direction.of(direction), BANK, study.seed)
        ladder = BayesReranker(None, search.gallery, direction, SHORTLIST, head=study.head, bank=bank)
        ladder.calibrate(study.val, progress=False)
        examined = examine_search(world, ladder, search, study.val)
        rows += [{"": DIRECTION_TITLES[direction], **row} for row in examined.rows()]
    report("clip_missing", rows, {"share": MISSING})
    return rows


def run() -> str:
    """The study."""
    world = ClipWorld()
    study, test = trained(world)
    print("head trained", flush=True)
    tables = judged(world, study, test)
    tables["missing"] = missing_items(world, study)
    write_blocks(PAGE)
    return "\n\n".join(markdown(rows) for rows in tables.values())
