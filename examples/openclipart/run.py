"""Embeddings of clip art and captions -> uncertainties, a table and figures, through the public commands.

    python examples/openclipart/run.py --out runs/openclipart

Needs `pip install '.[eval]'` in a checkout and nothing that is not in this folder. Every command that runs is printed;
a run that was stopped goes on with the same command.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from PIL import Image

import geoflow_fast as gf
from geoflow_fast import baselines
from geoflow_fast.evaluation import (
    auroc,
    bootstrap_interval,
    reliability,
    retrieval_calibration,
    selective_accuracy,
)
from geoflow_fast.runtime import plots
from geoflow_fast.runtime.files import write_json

HERE = Path(__file__).parent
DATA = HERE / "data"
TITLES = {"t2i": "captions search pictures", "i2t": "pictures search captions"}
TRAINING = (
    "--preset tiny --centre --pca 64 --steps 600 --lr 1e-3 --warmup-steps 50 --ema-decay 0.99 --val-every 50 --no-head"
)
"""Few pairs: a small network on leading directions, averaged weights, the best of them by the held-out pairs."""
REFERENCES = (baselines.MaxSoftmax, baselines.Margin, baselines.SoftmaxEntropy, baselines.KNNDistance)
RERANKED, ENTROPY = "re-ranker, 1 - p_answer", "the paper's entropy"
THUMBNAIL, PER_ROW = 56, 32
COLOURS = {RERANKED: "#0b6e4f", ENTROPY: "#c8553d"}
OTHERS = "#8a8f98"

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class SearchTask:
    """What is asked of the test part in one direction: which of `items` is of the image of each query."""

    direction: str
    queries: Path
    gallery: Path
    query_image: NDArray[np.int64]
    item_image: NDArray[np.int64]

    @classmethod
    def of(cls, direction: str, pairs: gf.EmbeddingPairs) -> SearchTask:
        """All texts as queries over all images, or all images over all texts."""
        images, texts = DATA / "test" / "img_emb", DATA / "test" / "text_emb"
        numbers = np.arange(len(pairs.image))
        if direction == "t2i":
            return cls(direction, texts, images, pairs.image_row, numbers)
        return cls(direction, images, texts, numbers, pairs.image_row)

    def share_right(self, index: NDArray[np.int64]) -> Floats:
        """The share [Q] of right ones among all items that equal item `index` [Q], such as captions with the same
        words: which of them comes first is chance."""
        _, kind = np.unique(load(self.gallery), axis=0, return_inverse=True)
        equal = kind[index][:, None] == kind
        right = self.query_image[:, None] == self.item_image
        share: Floats = (equal & right).sum(1) / equal.sum(1)
        return share


def geoflow(command: str, **paths: object) -> None:
    """Runs a command of `geoflow`, with `--name path` for each of the `paths`."""
    words = shlex.split(command) + [word for name, path in paths.items() for word in (f"--{name}", str(path))]
    print("geoflow", shlex.join(words), flush=True)
    subprocess.run([sys.executable, "-m", "geoflow_fast", *words], check=True)


def columns(path: Path, *names: str) -> list[NDArray[Any]]:
    """Columns of a Parquet file; those that hold lists come as [Q, K]."""
    table = pq.read_table(path, columns=list(names))
    return [np.stack(x) if x.dtype == object else x for x in (table[name].to_numpy() for name in names)]


def bandwidth(model: Path, direction: str) -> str:
    """kappa and guidance of the entropy, fitted on held-out pairs once and kept with the model."""
    kept = model / f"bandwidth_{direction}.json"
    if not kept.exists():
        flow, held_out = gf.GeoFlow.from_pretrained(model), gf.EmbeddingPairs.open(DATA / "held_out")
        fitted = gf.fit_bandwidth(flow, held_out, direction, guidances=(1.0, 3.0), max_queries=128)
        write_json(kept, {"kappa": fitted.kappa, "guidance": fitted.guidance})
    chosen = json.loads(kept.read_text(encoding="utf-8"))
    return f"--kappa {chosen['kappa']:.6g} --guidance {chosen['guidance']:.6g}"


def score(out: Path, seed: int, tasks: Sequence[SearchTask], training: str) -> Path:
    """Trains the flow of one seed and scores the test part with it; the folder of the results."""
    model = out / f"flow_{seed}"
    geoflow(f"train {training} --seed {seed}", pairs=DATA / "flow", val=DATA / "held_out", out=model)
    for task in tasks:
        files = {"model": model, "queries": task.queries, "gallery": task.gallery}
        held_out = {"held-out": DATA / "held_out", "out": model / f"ranked_{task.direction}.parquet"}
        geoflow(f"rerank --direction {task.direction}", **files, **held_out)
        settings = f"--direction {task.direction} {bandwidth(model, task.direction)}"
        geoflow(f"entropy --fast {settings}", **files, out=model / f"entropy_{task.direction}.parquet")
    geoflow("density", model=model, pairs=DATA / "test", out=model / "density.parquet")
    return model


def evaluate(out: Path, model: Path) -> None:
    """The page that `geoflow evaluate` makes of one flow and the references."""
    parts = {"pairs": DATA / "test", "held-out": DATA / "held_out", "train": DATA / "flow"}
    methods = ",".join(("rerank", "entropy", "epistemic", *(kind.method for kind in REFERENCES)))
    geoflow(f"evaluate --methods {methods}", model=model, **parts, out=out / "evaluation")


def references(task: SearchTask) -> dict[str, Floats]:
    """Uncertainties that need no flow; temperatures are tuned on the held-out pairs."""
    flow, held_out = (gf.EmbeddingPairs.open(DATA / part) for part in ("flow", "held_out"))
    queries = torch.from_numpy(load(task.queries))
    uncertainties = {}
    for kind in REFERENCES:
        method = kind(flow.image_dim, flow.text_dim)
        method.fit(flow, held_out)
        uncertainties[kind.title] = method.uncertainty(queries, load(task.gallery), task.direction).numpy()
    return uncertainties


def load(folder: Path) -> NDArray[np.float32]:
    """The rows of a folder with a single shard."""
    (path,) = folder.glob("*.npy")
    rows = np.load(path, allow_pickle=False).astype(np.float32)
    unit_rows: NDArray[np.float32] = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return unit_rows


class Results:
    """All scores of one direction, and what they are worth."""

    def __init__(self, task: SearchTask, models: Sequence[Path]) -> None:
        self.task = task
        answer, *_ = columns(models[0] / f"ranked_{task.direction}.parquet", "answer")
        self.correct = task.share_right(answer)  # of plain search
        self.stated = [
            columns(m / f"ranked_{task.direction}.parquet", "p_answer")[0].astype(np.float64) for m in models
        ]
        best = [columns(m / f"ranked_{task.direction}.parquet", "index")[0][:, 0] for m in models]
        self.recall = [float(task.share_right(index).mean()) for index in best]
        entropy = [columns(m / f"entropy_{task.direction}.parquet", "entropy")[0].astype(np.float64) for m in models]
        self.scores: dict[str, list[Floats]] = {RERANKED: [1 - p for p in self.stated], ENTROPY: entropy}
        self.scores |= {name: [values] for name, values in references(task).items()}

    def aurocs(self, name: str) -> list[float]:
        """Of "plain search's answer is wrong", one per seed."""
        return [auroc(values, self.correct) for values in self.scores[name]]

    @property
    def best_reference(self) -> str:
        """The one without training that has the highest AUROC."""
        return max((name for name in self.scores if name not in COLOURS), key=lambda name: self.aurocs(name)[0])

    def row(self, name: str) -> dict[str, Any]:
        """Means over seeds, their standard deviation, and the interval of the mean over resampled pictures."""
        aurocs, score = self.aurocs(name), np.stack(self.scores[name], axis=1)

        def mean_auroc(values: Floats, right: Floats) -> float:
            return statistics.fmean(auroc(column, right) for column in values.T)

        interval = bootstrap_interval(mean_auroc, score, self.correct, resamples=500, groups=self.task.query_image)
        aurc = statistics.fmean(retrieval_calibration(values, self.correct).aurc for values in self.scores[name])
        deviation = statistics.stdev(aurocs) if len(aurocs) > 1 else None
        mean = statistics.fmean(aurocs)
        return {"auroc": mean, "sd": deviation, "low": interval.low, "high": interval.high, "aurc": aurc}

    def lead(self) -> dict[str, float]:
        """AUROC of the re-ranker minus that of the best reference, over the same resamples."""
        score = np.stack((*self.scores[RERANKED], *self.scores[self.best_reference]), axis=1)

        def difference(values: Floats, right: Floats) -> float:
            *ours, theirs = (auroc(column, right) for column in values.T)
            return statistics.fmean(ours) - theirs

        interval = bootstrap_interval(difference, score, self.correct, resamples=500, groups=self.task.query_image)
        return {"value": interval.value, "low": interval.low, "high": interval.high}

    def summary(self) -> dict[str, Any]:
        """Every number of the table."""
        errors = [reliability(p, self.correct).ece for p in self.stated]
        return {
            "queries": len(self.correct),
            "items": len(self.task.item_image),
            "recall_cosine": float(self.correct.mean()),
            "recall_reranked": statistics.fmean(self.recall),
            "recall_reranked_seeds": self.recall,
            "ece": statistics.fmean(errors),
            "stated_recall": statistics.fmean(float(p.mean()) for p in self.stated),
            "methods": {name: self.row(name) for name in self.scores},
            "lead_over": self.best_reference,
            "lead": self.lead(),
        }


def print_table(direction: str, summary: dict[str, Any]) -> None:
    """As Markdown."""
    print(f"\n{TITLES[direction]}: {summary['queries']} queries over {summary['items']} items")
    print("\n| AUROC of a wrong answer | mean | sd over seeds | 95 % | AURC |\n|---|---|---|---|---|")
    for name, row in summary["methods"].items():
        sd = "" if row["sd"] is None else f"{row['sd']:.3f}"
        print(f"| {name} | {row['auroc']:.3f} | {sd} | {row['low']:.3f} to {row['high']:.3f} | {row['aurc']:.3f} |")
    lead = summary["lead"]
    ahead = f"{lead['value']:+.3f} (95 % {lead['low']:+.3f} to {lead['high']:+.3f})"
    print(f"\nre-ranker minus {summary['lead_over']}: {ahead}")
    print(f"Recall@1 {summary['recall_reranked']:.3f} re-ranked, {summary['recall_cosine']:.3f} by cosine; ", end="")
    print(f"ECE of p_answer {summary['ece']:.3f}")


def draw_curves(results: dict[str, Results], path: Path) -> None:
    """Accuracy over coverage, and stated against observed probabilities."""
    figure, axes = plots.subplots(2, 2, figsize=(10, 8), layout="constrained")
    for (direction, result), (left, right) in zip(results.items(), axes):
        for name, runs in result.scores.items():
            curves = [selective_accuracy(values, result.correct) for values in runs]
            heights = np.mean([curve.accuracy for curve in curves], axis=0)
            own = name in COLOURS or name == result.best_reference
            style = {"color": COLOURS.get(name, OTHERS), "lw": 2 if own else 1, "ls": "-" if own else ":"}
            left.plot(curves[0].coverage, heights, label=name, **style)
        left.set(
            title=TITLES[direction],
            xlabel="share of queries answered",
            ylabel="share of right answers",
            xlim=(0, 1),
        )
        left.legend(frameon=False, fontsize=8)
        stated = np.concatenate(result.stated)
        bins = reliability(stated, np.tile(result.correct, len(result.stated)), strategy="quantile")
        limit = 1.05 * float(max(np.nanmax(bins.confidence), np.nanmax(bins.accuracy)))
        right.plot([0, limit], [0, limit], color=OTHERS, lw=1)
        right.plot(bins.confidence, bins.accuracy, "o-", color=COLOURS[RERANKED])
        right.set(title=f"p_answer, ten equally filled bins, ECE {bins.ece:.3f}", xlim=(0, limit), ylim=(0, limit))
        right.set(xlabel="stated probability of being right", ylabel="share of right answers")
    plots.save_figure(figure, path)


def draw_gallery(result: Results, model: Path, path: Path, rows: int = 5, items: int = 6) -> None:
    """Captions whose answer is most and least certain, with the most probable pictures; the right one is framed."""
    index, prob, outside = columns(model / "ranked_t2i.parquet", "index", "prob", "p_outside")
    parts = json.loads((DATA / "pictures.json").read_text(encoding="utf-8"))
    captions = [caption for picture in parts["test"] for caption in picture["captions"]]
    order = np.argsort(result.scores[RERANKED][0], kind="stable")
    fresh = list(dict.fromkeys(result.task.query_image[order].tolist()))  # one caption per picture
    first = {image: int(query) for query in order[::-1] for image in [int(result.task.query_image[query])]}
    last = {image: int(query) for query in order for image in [int(result.task.query_image[query])]}
    unsure = list(dict.fromkeys(result.task.query_image[order[::-1]].tolist()))
    blocks = {"most certain": [first[i] for i in fresh[:rows]], "least certain": [last[i] for i in unsure[:rows]]}
    figure = plots.new_figure(figsize=(12, 1.15 * rows + 0.5), layout="constrained")
    for part, (title, queries) in zip(figure.subfigures(1, 2), blocks.items()):
        part.suptitle(f"{title} captions")
        axes = part.subplots(rows, items + 1, width_ratios=[2.2] + [1] * items)
        for line, query in zip(axes, queries):
            line[0].axis("off")
            line[0].text(0, 0.5, wrap(captions[query]), fontsize=7, va="center", transform=line[0].transAxes)
            for axis, item, p in zip(line[1:], index[query], prob[query]):
                axis.imshow(thumbnail(int(item)))
                axis.set(xticks=[], yticks=[])
                axis.set_xlabel(f"{p:.2f}", fontsize=7, labelpad=3)
                right = item == result.task.query_image[query]
                for spine in axis.spines.values():
                    spine.set(color=COLOURS[RERANKED] if right else "#dddddd", linewidth=2.5 if right else 0.8)
            line[0].text(
                0, 0.02, f"outside {outside[query]:.2f}", fontsize=6, color=OTHERS, transform=line[0].transAxes
            )
    plots.save_figure(figure, path)


def wrap(caption: str, width: int = 22, lines: int = 4) -> str:
    """Broken into lines, cut after some."""
    return "\n".join(textwrap.wrap(caption, width, max_lines=lines, placeholder=" ..."))


def thumbnail(number: int) -> Image.Image:
    """Picture `number` of the test part."""
    left, top = number % PER_ROW * THUMBNAIL, number // PER_ROW * THUMBNAIL
    with Image.open(DATA / "test.jpg") as sheet:
        return sheet.crop((left, top, left + THUMBNAIL, top + THUMBNAIL))


def run(out: Path, seeds: int, training: str = TRAINING) -> dict[str, Any]:
    """Everything; the summary by direction, which is also written to `summary.json`."""
    out.mkdir(parents=True, exist_ok=True)
    pairs = gf.EmbeddingPairs.open(DATA / "test")
    tasks = {direction: SearchTask.of(direction, pairs) for direction in TITLES}
    models = [score(out, seed, list(tasks.values()), training) for seed in range(seeds)]
    results = {direction: Results(task, models) for direction, task in tasks.items()}
    summaries = {direction: result.summary() for direction, result in results.items()}
    write_json(out / "summary.json", summaries)
    draw_curves(results, out / "curves.png")
    draw_gallery(results["t2i"], models[0], out / "gallery.png")
    evaluate(out, models[0])
    return summaries


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3, help="flows that are trained; results are their means")
    given = parser.parse_args()
    for direction, summary in run(given.out, given.seeds).items():
        print_table(direction, summary)
    print(f"\nWrote {given.out}/summary.json, curves.png, gallery.png and evaluation/")


if __name__ == "__main__":
    main()
