"""All methods side by side, on the concept world (five seeds) and on clip art, into docs/benchmarks.md.

`python -m benchmarks methods` makes the page and its figures; stopped, it goes on. Also: how the comparison changes
with the number of training pairs, and the sphere against its Euclidean twin.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import geoflow_fast as gf
from benchmarks.common import RESULTS
from benchmarks.page import BLOCK, filled
from geoflow_fast.evaluation import figures
from geoflow_fast.evaluation.compare import compare
from geoflow_fast.evaluation.methods import Method, Scores, Study
from geoflow_fast.evaluation.recipe import Recipe, RecipeData, run_recipe
from geoflow_fast.evaluation.results import COLUMNS, Comparison, Result
from geoflow_fast.retrieval.task import RetrievalTask
from geoflow_fast.worlds import ConceptWorld, PairWorld

ROOT = Path(__file__).parents[1]
PAGE, PICTURES = ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "images"
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


def table(comparison: Comparison, direction: str) -> str:
    """Markdown: a row per method, the best of a column bold, standard deviations over seeds behind the point."""
    results = sorted(comparison.of(direction), key=lambda result: -result.numbers["auroc"])
    head = ["", *(COLUMNS[name][0] for name in SHOWN)]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for result in results:
        cells = [cell(result, name, results) for name in SHOWN]
        lines.append(f"| {result.title} | {' | '.join(cells)} |")
    return "\n".join(lines)


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


def standing(comparison: Comparison, direction: str) -> dict[str, int]:
    """The better rank of the flow's two scores in every column of quality."""
    results = comparison.of(direction)
    own = [result for result in results if result.method in FLOW]
    return {name: min(place_of(result, name, results) for result in own) for name in QUALITY}


def section(title: str, comparison: Comparison, picture: str) -> str:
    figures.draw_auroc({title: comparison}, PICTURES / picture)
    parts = []
    for direction in comparison.directions:
        recall = comparison.of(direction)[0].plain_recall
        words = f"### {title}, {figures.DIRECTION_TITLES[direction]}\n\nPlain search has Recall@1 {recall:.3f}."
        parts.append(f"{words}\n\n{table(comparison, direction)}")
    return "\n\n".join((*parts, f"![AUROC of every method]({os.path.join('images', picture)})"))


def pairs_section(comparisons: dict[int, Comparison]) -> str:
    panels, rows = {}, []
    for direction in ("t2i", "i2t"):
        title = figures.DIRECTION_TITLES[direction]
        first = comparisons[SIZES[0]].of(direction)
        lines = {
            result.title: [comparisons[count].of(direction)[k].numbers["auroc"] for count in SIZES]
            for k, result in enumerate(first)
        }
        panels[title] = {name: figures.Series(values) for name, values in lines.items()}
        rows += [
            f"| {title} | {name} | " + " | ".join(f"{x:.3f}" for x in values) + " |" for name, values in lines.items()
        ]
    figures.draw_ablation(
        panels, SIZES, PICTURES / "benchmark_pairs.png", xlabel="training pairs", ylabel="AUROC", log_x=True
    )
    head = "| | method | " + " | ".join(f"{count:,}" for count in SIZES) + " |\n" + "|---" * (2 + len(SIZES)) + "|"
    return "\n".join((head, *rows)) + "\n\n![AUROC over training pairs](images/benchmark_pairs.png)"


def ordinal(rank: int) -> str:
    """1st, 2nd, 3rd, 4th, ..., 11th, ..."""
    ending = {1: "st", 2: "nd", 3: "rd"}.get(rank % 10, "th") if rank // 10 % 10 != 1 else "th"
    return f"{rank}{ending}"


def words_on_ranks(comparison: Comparison) -> str:
    lines = []
    for direction in comparison.directions:
        standings = standing(comparison, direction)
        words = "; ".join(f"{COLUMNS[name][0]} {ordinal(rank)}" for name, rank in standings.items())
        lines.append(f"- {figures.DIRECTION_TITLES[direction]}: {words}")
    return "\n".join(lines)


def words_on_twins(comparison: Comparison) -> str:
    """Differences between the two geometries, and whether they are larger than the variation between seeds."""
    lines = []
    for direction in comparison.directions:
        for sphere, twin in zip(comparison.of(direction)[:2], comparison.of(direction)[2:]):
            gap = sphere.numbers["auroc"] - twin.numbers["auroc"]
            noise = float(np.hypot(sphere.spread["auroc"], twin.spread["auroc"]))
            verdict = "within" if abs(gap) < 2 * noise else "beyond"
            score = sphere.title.partition(": ")[2]
            lines.append(
                f"- {figures.DIRECTION_TITLES[direction]}, {score}: {gap:+.3f}, {verdict} two standard deviations over "
                "seeds"
            )
    return "\n".join(lines)


def run() -> str:
    world, real, sizes, twins = concept_world(), clip_art(), more_pairs(), geometry()
    page = f"""# Methods side by side

All methods that need nothing but pairs, in both directions, judged by how well their uncertainty separates wrong
answers of plain cosine search from right ones. Temperatures, kappa, guidance and calibrations are tuned on held-out
pairs. GeoFlow's fitting time includes training and tuning. Times are for one thread of a busy machine, so compare
orders of magnitude only. This page is written by `python -m benchmarks methods`.

## Which to use when

- Without training, from about a hundred queries whose item is known: `gf.BayesReranker(None, gallery)`, calibrated on
  them. It is the ladder of evidence without models, cosine and hub correction, and states probabilities.
- From a few hundred pairs on: a head beside it (`geoflow train --head`, minutes). Held-out pairs decide whether it is
  used, so it can be left to them.
- With tens of thousands of pairs like those you will search: try the flow as a last rung. On the concept world it
  makes held-out answers likelier beside a head ([head](head.md#results)); on the photographs below it adds
  little.
- For a gallery that changes, or captions that fit many images: the retrieval entropy of a head. It measures how many
  items fit, not whether the first one is right.
- For queries that may be unlike the training data: the epistemic score, or `knn`. They recognise unfamiliar input
  ([likelihood](likelihood.md)) but, as the tables show, are an unreliable sign of retrieval errors.

Whichever you choose, evaluate it on held-out pairs of your own (`geoflow evaluate`), then choose a threshold with a
guarantee ([abstention](abstention.md)).

## Real photographs and captions

The pipeline is the [ladder of evidence](rerank.md#the-ladder-of-evidence): cosine, hub correction, a [head](head.md)
and a flow of the preset `auto`, each kept only if held-out pairs show that it helps. Shortlists have 512 items (128 in
galleries of more than 20,000), and the flow is asked about the 32 most probable ones. "Without flow" and "hubs only"
leave rungs out. The pipeline is the first row. The last columns say what the pipeline gains over each method, positive
where it is better, with paired 95 % intervals over images. `python -m benchmarks --study real` writes the tables and
fails if any reference is better than the pipeline beyond chance in NLL, AUROC or Recall@1, with Holm's correction over
a set. Rows without NLL state no probabilities of items. NLL is over the whole gallery, in nats; the
Spearman and R^2 columns are the paper's, over ten bins of the uncertainty.

### Flickr8k in a small dual encoder (not CLIP)

1,000 development images with five captions each. Head and flow learned from 2,091 other images; half of the
development images calibrate and the other half judge, both ways round.

Texts search images:

<!-- bench: real flickr8k t2i -->
<!-- bench: end -->

Images search texts:

<!-- bench: real flickr8k i2t -->
<!-- bench: end -->

### 500 COCO photographs and captions, CLIP ViT-B/16

Five folds: 100 pairs judge, 200 train and 200 calibrate, and each query searches the 100 items of its fold.

Texts search images:

<!-- bench: real photos/coco500 t2i -->
<!-- bench: end -->

Images search texts:

<!-- bench: real photos/coco500 i2t -->
<!-- bench: end -->

### 500 photographs with descriptions, CLIP

The same five folds.

Texts search images:

<!-- bench: real photos/unsplash500 t2i -->
<!-- bench: end -->

Images search texts:

<!-- bench: real photos/unsplash500 i2t -->
<!-- bench: end -->

### What these tables say

- No reference is better than the pipeline beyond chance on any of the three sets.
- The hub correction, which needs no training, brings most of the gain over the tuned softmax on all of them.
- The head adds to it: with the flow, NLL .069 to .111 and .061 to .094 nats on Flickr8k, AUROC .005 to .021 and -.004
  to .019, texts and images searching; on the 500 photographs with descriptions NLL .028 to .093 and .033 to .120; none
  on COCO, where calibration seldom keeps it.
- Of this, the flow makes right items of Flickr8k likelier by .003 to .021 nats (texts searching) and -.002 to .009
  (images searching). AUROC and Recall@1 stay as they are, within chance.
- The logistic regression and the boosting on result lists learned from galleries of 200 items and were judged in
  galleries of 100 on the small sets, and their probabilities did not survive that. On Flickr8k both are of one size.
- Flickr8k's encoder was fitted on photographs of the same kind, and its development images chose some of the encoder's
  settings; 500 pairs are few. Judge by your own pairs too.

## Where the truth is known

The [concept world](method.md#the-concept-world): width {CONCEPTS.dim}, {PAIRS:,} training pairs,
{HELD_OUT:,} held-out pairs, {QUERIES:,} queries; means and standard deviations over {len(SEEDS)} seeds.

{section("Concept world", world, "benchmark_world.png")}

Rank of the better of GeoFlow's two scores, entropy and re-ranker, in each column of quality, the true
posterior not counted:

{words_on_ranks(world)}

**How to read the columns.** The row "true posterior" has the exact probability that plain search is wrong, which no
uncertainty can improve on. Yet it is not first in Spearman or in R^2 over the bin number ("R^2"): bins without errors
are tied, and an uncertainty that separates right from wrong sharply makes a step rather than a line, so that a weaker
one, whose errors grow evenly, looks better there. AUROC and AURC do not have
this flaw, and R^2 over the uncertainty itself ("R^2, value") has little of it: compare methods by them.

### The ladder and strong references on the concept world

The same methods as on the [real sets](#real-photographs-and-captions), on the pairs of the tables above, one seed,
with what the whole ladder gains over each (`python -m benchmarks --study real`).

Texts search images:

<!-- bench: real concept_world t2i -->
<!-- bench: end -->

Images search texts:

<!-- bench: real concept_world i2t -->
<!-- bench: end -->

## Where the truth is known, with the statistics of CLIP

The [CLIP-like world](method.md#the-clip-like-world): width 512, 10,000 pairs to learn from, 400 to calibrate on,
1,000 queries, one seed. The ladder, with a head of four points, and strong references as on the
[real sets](#real-photographs-and-captions), and the true posterior; no flow was trained. `python -m benchmarks
--study clip` writes this section, and fails if any reference is better than the ladder beyond chance.

Texts search images:

<!-- bench: clip t2i -->
<!-- bench: end -->

Images search texts:

<!-- bench: clip i2t -->
<!-- bench: end -->

No reference is better than the ladder beyond chance, but the two-tower adapter is as good: its AUROC is higher by .007
and .008, within the intervals. To the exact posterior .05 and .08 of AUROC and .4 nats are missing. The logistic
regression and the boosting on result lists learned from galleries of 400 items and were judged in galleries of 1,000,
which their probabilities did not survive. Four points were chosen over one by the head's own held-out share of the
training pairs; trials with eight points were not finished.

The same with galleries of 1,000 items in which those of 30 % of 1,000 queries are missing. The ladder's score of a
missing item is `p_no_match`, the probability that no item of the gallery is right.

<!-- bench: clip missing -->
<!-- bench: end -->

## Real images, few pairs

Clip art and its captions (`examples/openclipart`): about 1,500 pairs, which is little for a flow to learn from, and
plain search is wrong for most queries. One seed; the bars are bootstrap intervals over images.

{section("Clip art", real, "benchmark_clip_art.png")}

Rank of the better of GeoFlow's two scores:

{words_on_ranks(real)}

With so few pairs the flow's retrieval entropy is worse than references that need no training. The re-ranker, which also
uses the cosine, is ahead of them by less than the width of the intervals, at several hundred times the cost: use max
softmax.

## How many pairs it takes

With more pairs the gap closes: the entropy overtakes the references between 3,000 and 30,000 pairs. AUROC on the
concept world for different numbers of training pairs, one seed:

{pairs_section(sizes)}

## Does the sphere matter?

The same network and training run, on the sphere and with straight lines and a Gaussian base distribution
("Euclidean"), on the concept world with three seeds. Differences in AUROC, sphere minus Euclidean:

{words_on_twins(twins)}

{section("Geometry", twins, "benchmark_geometry.png")}
"""
    kept = {key: old for _, key, old, _ in BLOCK.findall(PAGE.read_text())}  # of `python -m benchmarks --study real`
    PAGE.write_text(filled(page, lambda key: kept[key].strip() or None))
    return f"Wrote {PAGE}\n\n{words_on_ranks(world)}"
