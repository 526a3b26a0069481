"""All methods side by side, on the concept world (five seeds) and on clip art, into docs/benchmarks.md.

Also: how the comparison changes with the number of training pairs, and the sphere against straight lines. A study that
was stopped continues.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import geoflow_fast as gf
from benchmarks.methods.figures import draw_ablation
from benchmarks.methods.recipe import Recipe, RecipeData, run_recipe
from benchmarks.methods.results import DOCS, RESULTS, ROOT, report, write_blocks
from geoflow_fast.evaluation import figures
from geoflow_fast.evaluation.compare import compare
from geoflow_fast.evaluation.methods import Method, Scores, Study
from geoflow_fast.evaluation.results import COLUMNS, Comparison, Result
from geoflow_fast.retrieval.task import RetrievalTask
from geoflow_fast.worlds import ConceptWorld, PairWorld

PAGE, PICTURES = DOCS / "benchmarks.md", DOCS / "images"
CLIP_ART = ROOT / "examples" / "openclipart" / "data"
FOLDER = RESULTS / "methods"
SEEDS = range(5)
PAIRS, HELD_OUT, QUERIES = 60_000, 1_000, 1_000
SIZES = (1_000, 3_000, 10_000, 30_000, 100_000)
FEW = ["rerank", "entropy", "max_softmax", "margin", "softmax_entropy", "knn"]
SHOWN = ("auroc", "aurc", "spearman", "r2", "r2_value", "recall", "fit_seconds", "score_ms")
QUALITY = ("auroc", "aurc", "spearman", "r2", "r2_value")
FLOW = ("rerank", "entropy")
TRUTH = "truth"
CONCEPTS = ConceptWorld()
FEW_PAIRS = {"network": {"centre": True, "pca_dim": 64}, "flow": {"steps": 600, "lr": 1e-3, "warmup_steps": 50}}
"""For clip art: a small network on leading directions, averaged weights, the best of them by the held-out pairs."""


def world_folder(pairs: int = PAIRS, world: PairWorld = CONCEPTS, name: str = "world") -> Path:
    """Pairs of a world: `train`, `val`, `test`; the last two do not depend on how many are to train on."""
    folder = FOLDER / f"{name}_{pairs}"
    for part, count, seed in (("train", pairs, 100), ("val", HELD_OUT, 200), ("test", QUERIES, 300)):
        if not (folder / part).exists():
            image, text, _ = world.sample(count, generator=torch.Generator().manual_seed(seed))
            gf.EmbeddingPairs.from_arrays(image, text).save(folder / part)
    return folder


def parts_of(name: str, folder: Path, train: str = "train", val: str = "val") -> RecipeData:
    return RecipeData(name, str(folder / train), str(folder / val), test=str(folder / "test"))


def compared(recipe: Recipe, out: Path) -> Comparison:
    """The comparison that the recipe makes of its one data set."""
    run_recipe(recipe, Path(), out, announce=lambda words: print(words, flush=True))
    return Comparison.load(out / recipe.data[0].name)


class Truth(Method):
    """Not a method: the exact probability, under the distribution of a world, that plain search is wrong."""

    name, title, training = TRUTH, "true posterior", TRUTH

    def __init__(self, study: Study, world: PairWorld) -> None:
        super().__init__(study)
        self.world = world

    def facts(self) -> dict[str, Any]:
        return {}

    def _fit(self, task: RetrievalTask) -> None:
        self.task = task

    def score(self, rows: slice, answers: Tensor) -> Scores:
        posterior = self.world.gallery_posterior(self.task.queries[rows], self.task.items, self.task.direction)
        p_answer = posterior.gather(1, answers.unsqueeze(1)).squeeze(1)
        own = posterior.gather(1, self.task.own[rows, :1]).squeeze(1)
        return Scores(1 - p_answer, p_answer, -own.log(), posterior.argmax(1))


def concept_world() -> Comparison:
    """All methods, and the truth as one more row."""
    folder = world_folder()
    recipe = Recipe("All methods on the concept world", [parts_of("concept world", folder)], seeds=SEEDS, preset="tiny")
    comparison = compared(recipe, FOLDER / "concepts")
    study, test = (gf.EmbeddingPairs.open(folder / part) for part in ("val", "test"))
    truth = compare(Study(study), test, [Truth(Study(study), CONCEPTS)], resamples=0)
    return Comparison([*comparison.results, *truth.results], comparison.facts)


def clip_art() -> Comparison:
    data = parts_of("clip art", CLIP_ART, "flow", "held_out")
    run = {**FEW_PAIRS["flow"], "ema_decay": 0.99, "val_every": 50}
    recipe = Recipe("All methods on clip art", [data], preset="tiny", network=FEW_PAIRS["network"], flow=run)
    # Embeddings 128 wide and some 1,500 pairs: the longer runs of wide baselines would only overfit.
    return compared(
        dataclasses.replace(recipe, baselines={"steps": 600, "batch_size": 256, "val_every": 50}), FOLDER / "clip_art"
    )


def more_pairs() -> dict[int, Comparison]:
    comparisons = {}
    for count in SIZES:
        data = parts_of(f"{count} pairs", world_folder(count))
        recipe = Recipe("More pairs", [data], methods=FEW, preset="tiny")
        comparisons[count] = compared(recipe, FOLDER / f"pairs_{count}")
    return comparisons


def geometry() -> Comparison:
    data = parts_of("geometry", world_folder())
    recipe = Recipe("Sphere and Euclidean twin", [data], ablation="geometry", seeds=range(3), preset="tiny")
    return compared(recipe, FOLDER / "geometry")


def rows_of(comparison: Comparison, direction: str) -> list[dict[str, Any]]:
    """A row per method, the best of a column bold, standard deviations over seeds behind the point."""
    results = sorted(comparison.of(direction), key=lambda result: -result.numbers["auroc"])
    return [
        {"": result.title, **{COLUMNS[name][0]: cell(result, name, results) for name in SHOWN}} for result in results
    ]


def cell(result: Result, name: str, results: Sequence[Result]) -> str:
    value = result.numbers[name]
    if name in ("fit_seconds", "score_ms"):
        return f"{value:.3g}"
    words = f"{value:.3f}" + (f" ± {result.spread[name]:.3f}" if result.runs > 1 else "")
    best = result.method != TRUTH and place_of(result, name, results) == 1
    return f"**{words}**" if best else words


def place_of(result: Result, name: str, results: Iterable[Result]) -> int:
    """1 for the best of a column, the truth not counted."""
    sign = -1 if COLUMNS[name][1] == "max" else 1
    others = [other.numbers[name] for other in results if other.method != TRUTH]
    return 1 + sum(sign * other < sign * result.numbers[name] for other in others)


def rank_rows(comparison: Comparison) -> list[dict[str, Any]]:
    """The better rank of the flow's two scores in every column of quality, by direction."""
    rows = []
    for direction in comparison.directions:
        results = comparison.of(direction)
        own = [result for result in results if result.method in FLOW]
        ranks = {COLUMNS[name][0]: min(place_of(result, name, results) for result in own) for name in QUALITY}
        rows.append({"": figures.DIRECTION_TITLES[direction], **ranks})
    return rows


def pair_rows(comparisons: dict[int, Comparison]) -> list[dict[str, Any]]:
    """AUROC by number of training pairs, as rows and as a picture."""
    panels, rows = {}, []
    for direction in ("t2i", "i2t"):
        title = figures.DIRECTION_TITLES[direction]
        lines = {
            result.title: [comparisons[count].of(direction)[k].numbers["auroc"] for count in SIZES]
            for k, result in enumerate(comparisons[SIZES[0]].of(direction))
        }
        panels[title] = {name: figures.Series(values) for name, values in lines.items()}
        for name, values in lines.items():
            cells = {f"{count:,}": f"{value:.3f}" for count, value in zip(SIZES, values)}
            rows.append({"": title, "method": name, **cells})
    picture = PICTURES / "benchmark_pairs.png"
    draw_ablation(panels, SIZES, picture, xlabel="training pairs", ylabel="AUROC", log_x=True)
    return rows


def geometry_rows(comparison: Comparison) -> list[dict[str, Any]]:
    """Differences between the two geometries, and whether they are larger than the variation between seeds."""
    rows = []
    for direction in comparison.directions:
        for sphere, flat in zip(comparison.of(direction)[:2], comparison.of(direction)[2:]):
            gap = sphere.numbers["auroc"] - flat.numbers["auroc"]
            noise = float(np.hypot(sphere.spread["auroc"], flat.spread["auroc"]))
            rows.append(
                {
                    "": figures.DIRECTION_TITLES[direction],
                    "score": sphere.title.partition(": ")[2],
                    "AUROC, sphere minus Euclidean": f"{gap:+.3f}",
                    "two standard deviations over seeds": f"{2 * noise:.3f}",
                }
            )
    return rows


def run() -> str:
    """The study."""
    comparisons = {"world": concept_world(), "clip_art": clip_art(), "geometry": geometry()}
    tables = {"pairs": pair_rows(more_pairs()), "geometry_gaps": geometry_rows(comparisons["geometry"])}
    for name, comparison in comparisons.items():
        figures.draw_auroc({name: comparison}, PICTURES / f"benchmark_{name}.png")
        tables |= {f"{name}_{direction}": rows_of(comparison, direction) for direction in comparison.directions}
        tables[f"{name}_ranks"] = rank_rows(comparison)
    parts = [report(f"comparison_{name}", rows, {}) for name, rows in tables.items()]
    write_blocks(PAGE)
    return "\n\n".join(parts)
