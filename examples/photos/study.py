"""The study itself: folds of the images, what is trained and calibrated in each, and what all folds together show."""

from __future__ import annotations

import dataclasses
import math
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from inputs import Photos
from numpy.typing import NDArray

import geoflow_fast as gf
from geoflow_fast import baselines
from geoflow_fast.directions import CONDITIONAL, Direction
from geoflow_fast.evaluation import registry
from geoflow_fast.evaluation.compare import ScoredQueries, judge, score_queries
from geoflow_fast.evaluation.ladder_methods import FlowReranker, HubsOnly, Ladder
from geoflow_fast.evaluation.leads import Lead, corrected, paired_leads
from geoflow_fast.evaluation.methods import Study
from geoflow_fast.evaluation.results import Comparison, without_nan
from geoflow_fast.evaluation.retrieval import plain_search
from geoflow_fast.retrieval.evidence import Rung
from geoflow_fast.retrieval.task import RetrievalTask
from geoflow_fast.runtime.files import locked, read_json, write_json
from geoflow_fast.training.config import RunConfig

REFERENCES = ("max_softmax", "hub_softmax", "list_logistic", "list_boosting", "adapter")
SMALL_SET, FOLDS = 2000, 5
"""With fewer images than this every image is judged once, in one of so many folds."""
CALIBRATION_SHARE, LEAST_CALIBRATION, MOST_CALIBRATION = 0.25, 60, 1000
"""Share of the images that are not judged by which probabilities are calibrated; at least and at most so many."""
MANY_PAIRS = 5000
"""With fewer pairs the adapter's best weights come early."""


@dataclass(frozen=True)
class Settings:
    """How the study is done."""

    flow: bool = True
    steps: int | None = None
    """Training steps of the flow; by default those of `geoflow train`."""
    seed: int = 0
    quick: bool = False
    """Short runs that show whether everything works, but not how well."""

    @property
    def resamples(self) -> int:
        """Resamples of the images for intervals."""
        return 50 if self.quick else 1000

    @property
    def head(self) -> dict[str, Any]:
        """What `PosteriorHead.fit` is told about the head; nothing, unless it has to be quick."""
        return {"conf": gf.HeadConfig(steps=20, batch_size=64, val_every=10, hidden=32), "k": 1} if self.quick else {}

    def adapter(self, pairs: gf.EmbeddingPairs) -> RunConfig:
        """The run of the adapter, whose default is made for more pairs than most folders of photographs hold."""
        default = baselines.find("adapter")(pairs.image_dim, pairs.text_dim).default_config()
        rows, steps = min(512, len(pairs)), 20 if self.quick else 1500 if len(pairs) > MANY_PAIRS else 300
        return dataclasses.replace(
            default, batch_size=rows, steps=steps, warmup_steps=steps // 15, val_every=steps // 20
        )


@dataclass(frozen=True)
class Fold:
    """Pairs of three sets of images: models learn from the first, probabilities from the second; the third judges."""

    train: gf.EmbeddingPairs
    calibration: gf.EmbeddingPairs
    test: gf.EmbeddingPairs


def make_folds(
    pairs: gf.EmbeddingPairs, train: gf.EmbeddingPairs | None, folds: int, judged: NDArray[np.bool_] | None, seed: int
) -> list[Fold]:
    """Divides the images of `pairs` by `seed`; all captions of an image stay together.

    With `train`, pairs of other images, the models learn from these, and each of the folds is judged by the others'
    calibration. With `judged`, a mask over the stored images, there is one fold, which those judge.
    """
    if train is not None:
        if folds < 2:
            raise ValueError(
                "with --train the pairs are divided into those that calibrate and those that judge: two folds"
            )
        parts = _parts(pairs, folds, seed)
        return [Fold(train, pairs.subset(parts != number), pairs.subset(parts == number)) for number in range(folds)]
    if judged is not None:
        is_test = [judged[pairs.image_row]]
    elif folds == 1:
        is_test = [_parts(pairs, FOLDS, seed) == 0]
    else:
        parts = _parts(pairs, folds, seed)
        is_test = [parts == number for number in range(folds)]
    made = []
    for chosen in is_test:
        rest = pairs.subset(~chosen)
        images = len(np.unique(rest.group))
        count = min(max(round(CALIBRATION_SHARE * images), LEAST_CALIBRATION), MOST_CALIBRATION)
        if images < 2 * LEAST_CALIBRATION:
            needed = math.ceil(2 * LEAST_CALIBRATION * len(np.unique(pairs.group)) / images)
            raise ValueError(
                f"{images} images besides those to judge by are too few: {LEAST_CALIBRATION} are needed to calibrate "
                f"and as many to learn from, so divided like this there must be {needed} images"
            )
        made.append(Fold(*rest.split(count / images, seed), pairs.subset(chosen)))
    return made


def _parts(pairs: gf.EmbeddingPairs, count: int, seed: int) -> NDArray[np.int64]:
    """The part [pairs], below `count`, of every pair; the images of the parts are drawn by the seed."""
    images, member = np.unique(pairs.group, return_inverse=True)
    return (np.random.default_rng(seed).permutation(len(images)) % count)[member]


@dataclass(frozen=True)
class Judged:
    """What one fold showed in one direction."""

    pipeline: Ladder
    """Calibrated."""
    rungs: list[Rung]
    """Those of the pipeline, and the flow if there is one."""
    scored: list[ScoredQueries]
    """The pipeline first, then what it is compared with."""


def run_fold(
    fold: Fold, folder: Path, models: Path, settings: Settings, references: Sequence[str]
) -> dict[Direction, Judged]:
    """Trains, calibrates and scores. What an earlier run finished in the folders is not done again."""
    print(f"  head: {models / 'head'}", flush=True)
    head = gf.PosteriorHead.fit(fold.train, seed=settings.seed, out=models / "head", **settings.head)
    if not head.report["finished"]:
        raise KeyboardInterrupt  # it was asked to stop and has saved its state
    flow = train_flow(fold.train, models / "flow", settings) if settings.flow else None
    configs = {"adapter": settings.adapter(fold.train)}
    runs = folder / "runs"
    study = Study(fold.calibration, fold.train, flow, seed=settings.seed, configs=configs, folder=runs, head=head)
    others = [registry.create(name, study) for name in references]
    judged = {}
    for direction in CONDITIONAL[::-1]:
        task = RetrievalTask.of(fold.test, direction)
        pipeline, full = Ladder(study), FlowReranker(study) if flow is not None else None
        answers, scored = plain_search(task), []
        for method in (pipeline, *([] if full is None else [full]), HubsOnly(study), *others):
            print(f"  {direction}: {method.title}", flush=True)
            scored.append(score_queries(method, task, answers, folder))
        judged[direction] = Judged(calibrated(pipeline, task), rungs_of(full or pipeline, task, folder), scored)
    return judged


def calibrated(method: Ladder, task: RetrievalTask) -> Ladder:
    """The method with its re-ranker, which it lacks if an earlier run scored the queries."""
    if not hasattr(method, "reranker"):
        method.fit(task)
    return method


def rungs_of(method: Ladder, task: RetrievalTask, folder: Path) -> list[Rung]:
    """What each rung brought. It is kept in the folder, since a calibration with a flow takes long."""
    file = folder / f"rungs_{task.direction}.json"
    if not file.is_file():
        write_json(file, [dataclasses.asdict(rung) for rung in calibrated(method, task).reranker.rungs])
    return [Rung(**rung) for rung in read_json(file)]


def train_flow(pairs: gf.EmbeddingPairs, folder: Path, settings: Settings) -> gf.GeoFlow:
    """Runs `geoflow train` with its defaults."""
    stored, part = folder.with_name("train_pairs"), folder.with_name("train_pairs.part")
    if not stored.is_dir():
        shutil.rmtree(part, ignore_errors=True)
        pairs.save(part, dtype=np.float32)
        part.rename(stored)
    words = ["train", "--no-head", "--pairs", str(stored), "--out", str(folder), "--seed", str(settings.seed)]
    words += [] if settings.steps is None else ["--steps", str(settings.steps)]
    print("  geoflow " + " ".join(words), flush=True)
    if code := subprocess.run([sys.executable, "-m", "geoflow_fast", *words]).returncode:
        raise ValueError(f"geoflow train ended with code {code}; if it was stopped, the same command goes on")
    return gf.GeoFlow.from_pretrained(folder)


@dataclass(frozen=True)
class Findings:
    """Everything that tables, figures and the page show."""

    photos: Photos
    comparison: Comparison
    leads: list[Lead]
    """Those of the pipeline over every other method, Holm-corrected over all of them."""
    folds: dict[Direction, list[Judged]]


def run_study(
    photos: Photos, folds: Sequence[Fold], out: Path, settings: Settings, references: Sequence[str] = REFERENCES
) -> Findings:
    """Runs all folds in folders of `out` and judges them together."""
    by_direction: dict[Direction, list[Judged]] = {}
    with locked(out):
        for number, fold in enumerate(folds):
            sizes = f"{len(fold.train)} pairs learn, {len(fold.calibration)} calibrate, {len(fold.test)} judge"
            print(f"fold {number + 1} of {len(folds)}: {sizes}", flush=True)
            folder = out / f"fold_{number}"
            folder.mkdir(exist_ok=True)
            models = out / "models" if _one_training(folds) else folder
            for direction, judged in run_fold(fold, folder, models, settings, references).items():
                by_direction.setdefault(direction, []).append(judged)
    results, leads = [], []
    for judged in by_direction.values():
        pooled = [ScoredQueries.pooled(same) for same in zip(*(fold.scored for fold in judged))]
        results += judge(pooled, resamples=settings.resamples)
        leads += paired_leads(pooled[0], pooled[1:], resamples=settings.resamples, seed=settings.seed)
    facts = {"folds": len(folds), "seed": settings.seed, "flow": settings.flow, "quick": settings.quick}
    facts["learned_elsewhere"] = len(folds[0].train) if _one_training(folds) else 0
    comparison = Comparison(results, facts)
    comparison.save(out)
    findings = Findings(photos, comparison, corrected(leads), by_direction)
    write_json(out / "leads.json", without_nan([dataclasses.asdict(lead) for lead in findings.leads]))
    return findings


def _one_training(folds: Sequence[Fold]) -> bool:
    """Whether all of several folds learn from the same pairs, those of other images."""
    return len(folds) > 1 and all(fold.train is folds[0].train for fold in folds)


def usable_references() -> list[str]:
    """The references that can be made here; those that cannot are named, with the reason."""
    missing = {name: baselines.find(name).missing() for name in REFERENCES}
    for name, reason in missing.items():
        if reason is not None:
            print(f"left out: {name}: {reason}")
    return [name for name, reason in missing.items() if reason is None]
