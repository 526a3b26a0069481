"""`geoflow evaluate`: folders in, a folder with results, figures and one HTML page out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from geoflow_fast import baselines
from geoflow_fast.data.pairs import EmbeddingPairs
from geoflow_fast.data.rows import load_npy, open_rows
from geoflow_fast.directions import CONDITIONAL
from geoflow_fast.evaluation import figures
from geoflow_fast.evaluation.compare import RESULTS_JSON, RUNS_FOLDER, Comparison, compare, without_nan
from geoflow_fast.evaluation.methods import Study
from geoflow_fast.evaluation.metrics import BINS
from geoflow_fast.evaluation.report import Report
from geoflow_fast.evaluation.statistics import RESAMPLES
from geoflow_fast.evaluation.zero_shot import CLIP_SCALE, ZeroShot, class_prompts, tuned_scale, zero_shot
from geoflow_fast.flow.model import GeoFlow
from geoflow_fast.runtime import plots
from geoflow_fast.runtime.device import usable_device
from geoflow_fast.runtime.files import write_json

PAGE = "report.html"
Say = Callable[[str], object]

NUMBERS_EXPLAINED = (
    "AUROC is the chance that a query answered wrongly is less certain than one answered rightly; AURC the share of "
    "wrong answers among the most certain, averaged over how many are kept (lower is better); AUSAC the accuracy "
    "averaged over coverages from 100 to 10 %. Spearman and R^2 are of Recall@1 over the number of the bin, in ten "
    "bins of the uncertainty (-1 and 1 are ideal): they are noisy and do not reward a sharper uncertainty, so decide "
    "by AUROC and AURC. R^2, value, is that of the line over the bins' mean uncertainty.",
    "NLL is the mean of -log probability of the right item among all of the gallery, ECE the expected calibration "
    "error of the stated probability that plain search is right; only methods that state probabilities have them. "
    "Recall@1 is that of a method's own ranking, or of plain search where it has none. Whatever is tuned was tuned on "
    "held-out pairs.",
)


@dataclass(frozen=True)
class Choices:
    """How `evaluate_folders` evaluates."""

    names: Sequence[str] | None = None
    directions: Sequence[str] = CONDITIONAL[::-1]
    max_queries: int | None = None
    bins: int = BINS
    resamples: int = RESAMPLES
    seed: int = 0
    device: str = "auto"
    run: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of `RunConfig` that replace those of baselines that train by gradient, such as `steps`."""


def evaluate_folders(
    model: Path | None,
    test: Path,
    held_out: Path,
    train: Path | None,
    out: Path,
    choices: Choices | None = None,
    *,
    say: Say = lambda _: None,
) -> Comparison:
    """Compares methods on the pairs of the folder `test` and writes results, figures and a page into `out`.

    Stopped, it is continued by the same call: finished scores are kept in `out`.
    """
    choices = choices or Choices()
    plots.pyplot()  # its absence is said before the work, not after
    flow = None if model is None else GeoFlow.from_pretrained(model).to(usable_device(choices.device))
    parts = {"test": EmbeddingPairs.open(test), "val": EmbeddingPairs.open(held_out)}
    learnt = None if train is None else EmbeddingPairs.open(train)
    study = Study(
        val=parts["val"],
        train=learnt,
        flow=flow,
        seed=choices.seed,
        configs=run_configs(parts["val"], choices.run),
        folder=out / RUNS_FOLDER,
    )
    found = compare(
        study,
        parts["test"],
        choices.names,
        directions=choices.directions,
        max_queries=choices.max_queries,
        bins=choices.bins,
        resamples=choices.resamples,
        folder=out,
        say=say,
    )
    found.save(out)
    write_report({test.name: found}, out, f"Retrieval uncertainty on {test.name}")
    return found


def run_configs(pairs: EmbeddingPairs, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Every baseline's own run with these changes."""
    if not changes:
        return {}
    kinds = baselines.METHODS.items()
    return {
        name: dataclasses.replace(kind(pairs.image_dim, pairs.text_dim).default_config(), **changes)
        for name, kind in kinds
    }


def write_report(found: Mapping[str, Comparison], out: Path, title: str) -> Path:
    """Figures and the page of comparisons, by data set, into the folder `out`; returns the page."""
    results = [result for part in found.values() for result in part.results]
    runs = max(result.runs for result in results)
    over = f" Means over {runs} seeds; shaded or bars: one standard deviation." if runs > 1 else ""
    page = Report(title, f"Which method knows when plain cosine search is wrong?{over}")
    page.section("The numbers", *NUMBERS_EXPLAINED)
    for name, part in found.items():
        for way in part.directions:
            one = part.of(way)[0]
            sizes = (
                f"{one.queries:,} queries over {one.items:,} items, plain search has Recall@1 {one.plain_recall:.3f}"
            )
            page.table(part.table(way), f"{name}, {figures.DIRECTION_TITLES[way]}: {sizes}.", part.best(way))
    page.section("Telling wrong answers from right ones")
    spans = "one standard deviation over seeds" if runs > 1 else "95 % bootstrap intervals over images"
    page.figure(figures.draw_auroc(found, out / "auroc.png"), f"AUROC, best on top; bars are {spans}.")
    page.section("Recall by uncertainty")
    words = "Recall@1 of plain search in bins of equally many queries; a good score falls from left to right."
    page.figure(figures.draw_calibration(found, out / "calibration.png"), words)
    page.section("Turning queries away")
    words = "Accuracy on the queries that are left when the least certain are turned away."
    page.figure(figures.draw_selective(found, out / "selective.png"), words)
    if any(result.stated is not None for result in results):
        page.section("Can the probabilities be believed?")
        words = "Stated probability that plain search is right against the share that was: on the diagonal they agree."
        page.figure(figures.draw_reliability(found, out / "reliability.png"), words)
    return page.write(out / PAGE)


def zero_shot_folders(
    model: Path,
    images: Path,
    labels: Path,
    prompts: Path,
    out: Path,
    *,
    held_out: tuple[Path, Path] | None = None,
    train: Path | None = None,
    bins: int = BINS,
    resamples: int = RESAMPLES,
    seed: int = 0,
    device: str = "auto",
) -> ZeroShot:
    """Zero-shot classification of the images of a file or folder, with component analysis, into the folder `out`.

    `labels`: a `.npy` file of integers; `prompts`: one of [C, d], or [C, P, d] with P templates. `held_out`: images and
    labels that the temperature of the references is tuned on, else it is CLIP's.
    """
    plots.pyplot()
    flow = GeoFlow.from_pretrained(model).to(usable_device(device))
    rows, label = labelled(images, labels)
    classes = prompts_of(prompts)
    scale = CLIP_SCALE if held_out is None else tuned_scale(*labelled(*held_out), classes)
    pairs = None if train is None else EmbeddingPairs.open(train)
    found = zero_shot(flow, rows, label, classes, train=pairs, seed=seed, bins=bins, resamples=resamples, scale=scale)
    out.mkdir(parents=True, exist_ok=True)
    facts = {"images": len(rows), "classes": len(classes), "accuracy": found.accuracy, "scale": found.scale}
    parts = [dataclasses.asdict(part) for part in found.components]
    write_json(out / RESULTS_JSON, without_nan({**facts, "seed": seed, "components": parts}))
    page = Report(
        f"Zero-shot classification of {images.stem}",
        f"{len(rows):,} images, {len(classes):,} classes, accuracy {found.accuracy:.3f}. What says which to doubt?",
    )
    page.section(
        "Components",
        "Each image is paired with the prompt of the class it is predicted to be of. -log p(text) of a handful of "
        "prompts ranks classes, not images: read -log p(image) beside the sum, and both beside the references, which "
        "need no training.",
    )
    page.table([part.row() for part in found.components], "Scores of single images.", {"AUSAC": "max", "AUROC": "max"})
    picture = figures.draw_components({images.stem: found}, out / "components.png")
    page.figure(
        picture, "Accuracy on the images that are left when the most doubtful are turned away; references dashed."
    )
    page.write(out / PAGE)
    return found


def labelled(images: Path, labels: Path) -> tuple[Tensor, Tensor]:
    """Unit rows of images [B, d] and their classes [B]."""
    rows = open_rows(images, "images")
    rows.check(normalize=False)
    label = load_npy(labels)
    if label.ndim != 1 or label.dtype.kind not in "iu":
        raise ValueError(f"labels {labels} must be integers [B], got {label.dtype} {label.shape}")
    if len(label) != len(rows):
        raise ValueError(f"labels {labels} have {len(label)} entries, but there are {len(rows)} images in {images}")
    return torch.from_numpy(rows[np.arange(len(rows))]), torch.from_numpy(label.astype(np.int64))


def prompts_of(path: Path) -> Tensor:
    """One unit prompt per class [C, d], templates averaged."""
    found = torch.from_numpy(load_npy(path).astype(np.float32))
    if found.dim() == 2:
        found = found.unsqueeze(1)
    if found.dim() != 3:
        raise ValueError(f"prompts {path} must be [C, d] or [C, P, d], got {tuple(found.shape)}")
    return class_prompts(found)
