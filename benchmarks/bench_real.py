"""The default pipeline against references on real photographs and captions.

`python -m benchmarks --study real`: Flickr8k in a small dual encoder (trained on the training images, calibrated on
half of the development images and judged on the others, both ways round), and two sets of 500 photographs in CLIP
(five folds: judged on one, calibrated and trained on the others). The pipeline is the re-ranker with a head, and with a
flow as its last rung; it keeps of these what held-out pairs show to help. Gates: no reference is better beyond chance.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import geoflow_fast as gf
from benchmarks.common import gate, report
from geoflow_fast.baselines.adapter import TwoTowerAdapter
from geoflow_fast.directions import CONDITIONAL, Direction
from geoflow_fast.evaluation import registry
from geoflow_fast.evaluation.compare import hits_of
from geoflow_fast.evaluation.methods import Study
from geoflow_fast.evaluation.metrics import aurc, auroc, reliability, retrieval_calibration
from geoflow_fast.evaluation.paired import Gain, gains
from geoflow_fast.evaluation.retrieval import plain_search
from geoflow_fast.retrieval.task import RetrievalTask
from geoflow_fast.runtime.parquet import Columns
from geoflow_fast.training.config import RunConfig

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
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
FOLDS = 5
CALIBRATION_SHARE = 0.5
"""Of the pairs that are not judged, in the sets without a part to train on."""
CALIBRATION_QUERIES = 5000
OURS = "pipeline"
FEW_PAIRS = {"steps": 400, "warmup_steps": 20, "val_every": 20}
"""How the adapter trains: its own run is made for many pairs."""


def pairs_of(path: str) -> gf.EmbeddingPairs:
    """The pairs of a shared file."""
    with np.load(SHARED / f"{path}.npz", allow_pickle=False) as file:
        image, text = (file[name].astype(np.float32) for name in ("image_emb", "text_emb"))
        index = file["text_image_index"].astype(np.int64) if "text_image_index" in file else None
    return gf.EmbeddingPairs.from_arrays(image, text, index, normalize=True)


def studies(path: str) -> Iterator[tuple[Study, gf.EmbeddingPairs]]:
    """What to fit on, and the pairs to judge by."""
    if path == "flickr8k":
        train, halves = pairs_of("flickr8k/train"), pairs_of("flickr8k/dev").split(0.5, seed=0)
        head, flow, seconds = trained(train)
        for val, test in (halves, halves[::-1]):
            yield Study(val, train, flow=flow, configs=configs(train), head=head, head_seconds=seconds), test
        return
    pairs = pairs_of(path)
    fold = np.random.default_rng(0).permutation(len(pairs)) % FOLDS
    for k in range(FOLDS):
        train, val = pairs.subset(fold != k).split(CALIBRATION_SHARE, seed=k)
        head, flow, seconds = trained(train, seed=k)
        study = Study(val, train, flow=flow, seed=k, configs=configs(train), head=head, head_seconds=seconds)
        yield study, pairs.subset(fold == k)


def trained(pairs: gf.EmbeddingPairs, seed: int = 0) -> tuple[gf.PosteriorHead, gf.GeoFlow | None, float]:
    """What `geoflow train` makes of pairs, and the seconds it takes."""
    start = time.perf_counter()
    head = gf.PosteriorHead.fit(pairs, seed=seed)
    return head, None, time.perf_counter() - start


def configs(pairs: gf.EmbeddingPairs) -> dict[str, RunConfig]:
    """The runs of baselines that train."""
    own = TwoTowerAdapter(pairs.image_dim, pairs.text_dim).default_config()
    return {TwoTowerAdapter.method: dataclasses.replace(own, batch_size=min(512, len(pairs)), **FEW_PAIRS)}


def columns_of(study: Study, test: gf.EmbeddingPairs, direction: Direction) -> tuple[dict[str, Columns], Columns]:
    """What every method says about every query; whether plain search was right, and the queries' images."""
    task = RetrievalTask.of(test, direction)
    answers = plain_search(task)
    said = {}
    for name in ("ladder", *REFERENCES):
        method = registry.create(name, study)
        method.fit(task)
        scores = method.score(slice(0, len(task)), answers.index[:, 0])
        ranked = bool((scores.top >= 0).all())
        said[OURS if name == "ladder" else method.title] = {
            "uncertainty": scores.uncertainty.numpy(),
            "p_answer": scores.p_answer.numpy(),
            "nll": scores.nll.numpy(),
            "hit": hits_of(task, scores.top.numpy()) if ranked else answers.first_right.numpy(),
        }
    return said, {"right": answers.first_right.numpy(), "image": task.query_image.numpy()}


def pooled(parts: Sequence[Columns]) -> Columns:
    """The columns of all folds, one after the other."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def row_of(
    name: str, said: Columns, right: NDArray[Any], image: NDArray[Any], against: Sequence[Gain]
) -> dict[str, Any]:
    """The numbers of a method, and the pipeline's gains over it."""
    bins = retrieval_calibration(said["uncertainty"], right, resamples=0, groups=image)
    stated = not np.isnan(said["p_answer"]).any()
    numbers = {
        "method": name,
        "NLL": float(said["nll"].mean()),
        "AUROC": auroc(said["uncertainty"], right),
        "AURC": aurc(said["uncertainty"], right),
        "Recall@1": float(said["hit"].mean()),
        "ECE": reliability(said["p_answer"], right, strategy="quantile").ece if stated else float("nan"),
        "Spearman": bins.spearman,
        "R^2": bins.r2,
    }
    for gain in against:
        numbers[f"gain in {gain.measure}"] = (
            f"{gain.interval.value:+.3f} ({gain.interval.low:+.3f} to {gain.interval.high:+.3f})"
        )
    return numbers


def judged(path: str) -> list[dict[str, Any]]:
    """A table for both directions of a set."""
    rows = []
    parts = list(studies(path))
    for direction in CONDITIONAL[::-1]:
        columns = [columns_of(study, test, direction) for study, test in parts]
        facts = pooled([{**own, "image": own["image"] + 1_000_000 * k} for k, (_, own) in enumerate(columns)])
        said = {name: pooled([one[name] for one, _ in columns]) for name in columns[0][0]}
        others = {name: column for name, column in said.items() if name != OURS}
        against = gains(said[OURS], others, facts["right"], facts["image"])
        for name, column in said.items():
            own = [gain for gain in against if gain.other == name]
            rows.append({"direction": str(direction), **row_of(name, column, facts["right"], facts["image"], own)})
        for gain in against:
            gate(f"{path}, {direction}: {gain.other} is not better in {gain.measure}", gain.p_worse > 0.025)
    return rows


def run() -> str:
    """The study."""
    return "\n\n".join(
        report(f"real_{name.replace('/', '_')}", judged(name), {})
        for name in ("flickr8k", "photos/coco500", "photos/unsplash500")
    )
