"""Zero-shot classification of the images of a folder: results, a figure and a page."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.methods.figures import draw_components
from benchmarks.methods.zero_shot import CLIP_SCALE, Component, ZeroShot, class_prompts, tuned_scale, zero_shot
from geoflow_fast.data.embeddings import open_rows
from geoflow_fast.data.pairs import EmbeddingPairs
from geoflow_fast.data.rows import load_npy
from geoflow_fast.evaluation.job import PAGE
from geoflow_fast.evaluation.metrics import BINS
from geoflow_fast.evaluation.opening import best_first, show_ranked
from geoflow_fast.evaluation.report import Report
from geoflow_fast.evaluation.results import RESULTS_JSON, without_nan
from geoflow_fast.evaluation.statistics import RESAMPLES
from geoflow_fast.flow.model import GeoFlow
from geoflow_fast.runtime import plots
from geoflow_fast.runtime.device import usable_device
from geoflow_fast.runtime.files import write_json


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
    """Classifies the images of a file or folder without training examples, analyses the components of the score, and
    writes the results into the folder `out`.

    `labels` is a `.npy` file of integers, and `prompts` one of [C, d], or of [C, P, d] with P templates. `held_out` has
    images and labels on which the temperature of the training-free scores is tuned; without them it is CLIP's.
    """
    plots.need_matplotlib()  # fails at once if matplotlib is missing, not after the work
    flow = GeoFlow.from_pretrained(model).to(usable_device(device))
    rows, label = labelled(images, labels)
    classes = prompts_of(prompts)
    scale = CLIP_SCALE if held_out is None else tuned_scale(*labelled(*held_out), classes)
    pairs = None if train is None else EmbeddingPairs.open(train)
    outcome = zero_shot(flow, rows, label, classes, train=pairs, seed=seed, bins=bins, resamples=resamples, scale=scale)
    out.mkdir(parents=True, exist_ok=True)
    facts = {"images": len(rows), "classes": len(classes), "accuracy": outcome.accuracy, "scale": outcome.scale}
    components = [dataclasses.asdict(part) for part in outcome.components]
    write_json(out / RESULTS_JSON, without_nan({**facts, "seed": seed, "components": components}))
    _write_zero_shot_page(outcome, len(classes), out, images.stem)
    return outcome


def _write_zero_shot_page(outcome: ZeroShot, classes: int, out: Path, name: str) -> None:
    """Writes the figure and the page of the images `name` into the folder `out`."""
    page = Report(
        f"Zero-shot classification of {name}",
        f"{len(outcome.correct):,} images, {classes:,} classes, accuracy {outcome.accuracy:.3f}. "
        "Which predictions should be doubted?",
    )
    page.section("Which to doubt")
    page.cards(image_tiles({name: outcome}))
    show_images(page, name, outcome.components)
    page.section(
        "Components",
        "Each image is paired with the prompt of the class that is predicted for it. The -log p(text) of a handful of "
        "prompts ranks classes, not images. So compare -log p(image) with the sum, and both with the scores that need "
        "no training.",
    )
    best = {"AUSAC": "max", "AUROC": "max"}
    with page.folded("All numbers"):
        page.table([part.row() for part in outcome.components], "Scores of single images.", best)
    page.figure(
        draw_components({name: outcome}, out / "components.png"),
        "Accuracy on the remaining images when the most doubtful are turned away; training-free scores are dashed.",
    )
    page.write(out / PAGE)


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
    """One unit prompt per class [C, d], the mean over the templates in the file."""
    prompts = torch.from_numpy(load_npy(path).astype(np.float32))
    if prompts.dim() == 2:
        prompts = prompts.unsqueeze(1)
    if prompts.dim() != 3:
        raise ValueError(f"prompts {path} must be [C, d] or [C, P, d], got {tuple(prompts.shape)}")
    return class_prompts(prompts)


def image_tiles(datasets: Mapping[str, ZeroShot]) -> list[tuple[str, str, str]]:
    """The score card of zero-shot classification: how often predictions are right, and which score to doubt them by."""
    tiles = []
    for name, outcome in datasets.items():
        best = best_first(outcome.components)[0]
        tiles.append((f"{name}: predictions are right", f"{outcome.accuracy:.0%}", f"{len(outcome.correct):,} images"))
        tiles.append((f"{name}: AUROC of {best.title}", f"{best.numbers['auroc']:.3f}", "the best of all scores"))
    return tiles


def show_images(page: Report, where: str, components: Sequence[Component]) -> None:
    """Risk over coverage of the best scores of single images, and the AUROC of all with their intervals."""
    ranked = best_first(components)
    wrong = "the share of wrong predictions if only the most certain images are classified."
    show_ranked(page, where, ranked, ranked[0], wrong)
