"""Tables of the paper as recipes: a TOML file says which pairs, which methods or ablation, how many seeds.

```toml
title = "Aleatoric uncertainty: calibration of retrieval"
seeds = [0, 1, 2, 3, 4]
methods = ["entropy_paper", "rerank", "max_softmax"]   # or: ablation = "geometry"
preset = "paper"                                        # network and run; [flow] and [baselines] change single values

[[data]]                                                # one data set or several
name = "MS-COCO"
train = "cc1m/train"                                    # folders of pairs, below the folder that is given to the run
held_out = "cc1m/val"
test = "coco/test"                                      # for zero-shot instead: images, labels, prompts
```
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from geoflow_fast.data.pairs import EmbeddingPairs
from geoflow_fast.evaluation import ablation, figures
from geoflow_fast.evaluation.ablation import FLOWS_FOLDER, Ablation, Setup
from geoflow_fast.evaluation.compare import (
    RESULTS_JSON,
    RUNS_FOLDER,
    Comparison,
    aggregate,
    check_bins,
    compare,
    without_nan,
)
from geoflow_fast.evaluation.job import PAGE, labelled, prompts_of, run_configs, write_report
from geoflow_fast.evaluation.methods import Study, all_methods
from geoflow_fast.evaluation.report import Report
from geoflow_fast.evaluation.zero_shot import Component, ZeroShot, zero_shot
from geoflow_fast.flow.config import GeoFlowConfig
from geoflow_fast.runtime import checks, plots
from geoflow_fast.runtime.device import usable_device
from geoflow_fast.runtime.files import read_toml, write_json
from geoflow_fast.training.config import TrainConfig

PRESETS = ("tiny", "small", "paper")
Say = Callable[[str], object]


@dataclass(frozen=True)
class Data:
    """A data set: folders of pairs to train, tune and test on, or labelled images with class prompts to test on."""

    name: str
    train: str
    held_out: str
    test: str | None = None
    images: str | None = None
    labels: str | None = None
    prompts: str | None = None

    def __post_init__(self) -> None:
        _check_strings(self, f"data set {self.name!r}")
        # guard: the names in a recipe are those of folders
        if self.name in ("", ".", "..") or set(self.name) & {"/", "\\", "\0"}:
            raise ValueError(f"data set {self.name!r} needs a name that a folder can have: results go there")
        labelled_parts = (self.images, self.labels, self.prompts)
        if (self.test is None) != all(labelled_parts) or any(labelled_parts) != all(labelled_parts):
            raise ValueError(f"data set {self.name!r} needs either test, or images, labels and prompts")

    @property
    def zero_shot(self) -> bool:
        """Whether it is for classification."""
        return self.test is None


@dataclass(frozen=True)
class Recipe:
    """What a table is made of; the fields are the keys of the file."""

    title: str
    data: Sequence[Data]
    methods: Sequence[str] | None = None
    """None: all that can be fitted."""
    ablation: str | None = None
    seeds: Sequence[int] = (0,)
    preset: str = "paper"
    flow: Mapping[str, Any] = field(default_factory=dict)
    """Changes of the flow's training run."""
    network: Mapping[str, Any] = field(default_factory=dict)
    """Changes of the flow's network."""
    baselines: Mapping[str, Any] = field(default_factory=dict)
    """Changes of the runs of all baselines that train."""
    max_queries: int | None = None

    def __post_init__(self) -> None:
        if not self.data or not self.seeds:
            raise ValueError("a recipe needs at least one data set and one seed")
        for seed in self.seeds:
            checks.integer(seed, "seeds")
        if self.preset not in PRESETS:
            raise ValueError(f"preset must be one of {', '.join(PRESETS)}, got {self.preset!r}")
        if len({part.name for part in self.data}) < len(self.data):
            raise ValueError("data sets must have names of their own")
        if len({part.zero_shot for part in self.data}) > 1:
            raise ValueError("a recipe is for retrieval or for zero-shot classification, not for both")
        if self.ablation is not None:
            ablation.find(self.ablation)
            if self.methods is not None:
                raise ValueError("an ablation has methods of its own; leave methods out")
        for name in self.methods or ():
            if name not in all_methods():
                raise ValueError(f"methods must be among {', '.join(all_methods())}, got {name!r}")

    def changed(self, *, only: Sequence[str] | None = None, **changes: Any) -> Recipe:
        """The recipe with what is not None replaced, runs in single values; `only` these data sets."""
        for name in only or ():
            if name not in {part.name for part in self.data}:
                known = ", ".join(part.name for part in self.data)
                raise ValueError(f"the recipe has no data set {name!r}; it has {known}")
        data = [part for part in self.data if only is None or part.name in only]
        given = {name: value for name, value in changes.items() if value is not None}
        for name in ("flow", "baselines"):
            given[name] = {**getattr(self, name), **given.get(name, {})}
        return dataclasses.replace(self, data=data, **given)


def load_recipe(path: Path) -> Recipe:
    """The recipe of a TOML file; ValueError naming the file and the key if something is wrong with it."""
    found = read_toml(path)
    try:
        entries = found.pop("data", [])
        if not isinstance(entries, list):
            raise TypeError("data sets are written as [[data]]")
        data = [Data(**_known(entry, Data, "[[data]]")) for entry in entries]
        for part in data:
            _check_below(part)
        for part in data:
            if set(part.name) & set(",/"):
                raise ValueError(f"name {part.name!r} must be without comma and slash: --only and folders use it")
        return Recipe(data=data, **_known(found, Recipe, "the recipe"))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def _known(values: Any, kind: type, what: str) -> dict[str, Any]:
    """The values, if their keys are fields of `kind`."""
    names = [part.name for part in dataclasses.fields(kind)]
    if not isinstance(values, dict) or not set(values) <= set(names):
        extra = sorted(set(values) - set(names)) if isinstance(values, dict) else values
        raise ValueError(f"{what} has unknown keys {extra}; known are {', '.join(names)}")
    return values


def _check_strings(values: Any, what: str) -> None:
    for part in dataclasses.fields(values):
        value = getattr(values, part.name)
        if value is not None and not isinstance(value, str):
            raise TypeError(f"{part.name} of {what} must be a string, got {value!r}")


def run_recipe(recipe: Recipe, base: Path, out: Path, *, device: str = "auto", say: Say = lambda _: None) -> Path:
    """Trains, scores and writes tables, figures and a page into `out`; returns the page.

    Paths of the recipe are below `base`. Stopped, it is continued by the same call.
    """
    plots.pyplot()  # its absence is said before the work, not after
    missing = [path for part in recipe.data for path in _paths(part, base) if not path.exists()]
    if missing:
        raise FileNotFoundError(f"{missing[0]} does not exist; the recipe's folders are looked for in {base}")
    for part in recipe.data:
        if not part.zero_shot:  # too few queries are said before the work; images are the fewer ones
            images = len(np.unique(EmbeddingPairs.open(base / str(part.test)).group))
            check_bins(images if recipe.max_queries is None else min(images, recipe.max_queries))
    where = str(usable_device(device))
    if recipe.ablation is not None:
        return _ablation_table(recipe, base, out, where, say)
    if recipe.data[0].zero_shot:
        return _zero_shot_table(recipe, base, out, where, say)
    return _retrieval_table(recipe, base, out, where, say)


def _check_below(part: Data) -> None:
    """ValueError if a path of a file, which may be a stranger's, leads out of the folder that is given to the run."""
    for path in _paths(part, Path()):
        if path.is_absolute() or ".." in path.parts:
            raise ValueError(f"data set {part.name!r}: {path} must be below the folder of the data")


def _paths(part: Data, base: Path) -> list[Path]:
    names = (part.train, part.held_out, part.test, part.images, part.labels, part.prompts)
    return [base / name for name in names if name is not None]


def setup_of(recipe: Recipe, part: Data, base: Path, device: str) -> Setup:
    """Pairs of a data set, and how the recipe trains on them."""
    train, val = EmbeddingPairs.open(base / part.train), EmbeddingPairs.open(base / part.held_out)
    shape = getattr(GeoFlowConfig, recipe.preset)(train.image_dim, train.text_dim)
    return Setup(
        train,
        val,
        dataclasses.replace(shape, **recipe.network),
        dataclasses.replace(getattr(TrainConfig, recipe.preset)(), **recipe.flow),
        recipe.seeds,
        device,
    )


def _flows_folder(part: Data, out: Path) -> Path:
    """Flows are shared by data sets that train on the same folder."""
    return out / FLOWS_FOLDER / (part.train.strip("/").replace("/", "_").strip(".") or "flow")


def _retrieval_table(recipe: Recipe, base: Path, out: Path, device: str, say: Say) -> Path:
    found: dict[str, Comparison] = {}
    for part in recipe.data:
        setup = setup_of(recipe, part, base, device)
        test = EmbeddingPairs.open(base / str(part.test))
        runs = []
        for seed in recipe.seeds:
            say(f"{part.name}, seed {seed}: training the flow")
            flow, seconds = setup.flow(_flows_folder(part, out), seed)
            place = out / part.name / f"seed_{seed}"
            study = Study(
                setup.val,
                setup.train,
                flow,
                seconds,
                seed,
                run_configs(setup.val, recipe.baselines),
                place / RUNS_FOLDER,
            )
            runs.append(compare(study, test, recipe.methods, max_queries=recipe.max_queries, folder=place, say=say))
        found[part.name] = aggregate(runs)
        found[part.name].save(out / part.name)
    return write_report(found, out, recipe.title)


def _ablation_table(recipe: Recipe, base: Path, out: Path, device: str, say: Say) -> Path:
    chosen = ablation.find(str(recipe.ablation))
    page = Report(recipe.title, f"{chosen.title}, on {', '.join(part.name for part in recipe.data)}.")
    if recipe.data[0].zero_shot:
        return _zero_shot_ablation(recipe, chosen, page, base, out, device, say)
    for part in recipe.data:
        setup = setup_of(recipe, part, base, device)
        test, folder = EmbeddingPairs.open(base / str(part.test)), out / part.name
        found = ablation.ablate(setup, test, chosen, folder, max_queries=recipe.max_queries, say=say)
        own = ablation.write_ablation(chosen, found, folder, part.name)
        page.section(part.name, f"Tables: {own.relative_to(out)}")
        page.figure(own.with_name(ablation.PICTURE), f"AUROC by {chosen.axis} on {part.name}.")
    return page.write(out / PAGE)


def _zero_shot_ablation(
    recipe: Recipe, chosen: Ablation, page: Report, base: Path, out: Path, device: str, say: Say
) -> Path:
    found = {}
    for part in recipe.data:
        setup = setup_of(recipe, part, base, device)
        found[part.name] = ablation.ablate_zero_shot(
            setup, labelled_images(part, base), chosen, _flows_folder(part, out), say
        )
    means = {name: {label: _mean_and_spread(values) for label, values in rows.items()} for name, rows in found.items()}
    labels = next(iter(means.values()))
    page.section("Area under the selective accuracy curve")
    page.table(
        [{chosen.axis: x, **{name: means[name][x][0] for name in means}} for x in labels], "AUSAC, mean over seeds."
    )
    page.table(
        [{chosen.axis: x, **{name: means[name][x][1] for name in means}} for x in labels], "Standard deviations."
    )
    if chosen.numeric:
        picture = ablation.draw_lines(chosen, means, "AUSAC", out / ablation.PICTURE)
        page.figure(picture, "AUSAC of the epistemic score; shaded: one standard deviation over seeds.")
    write_json(out / RESULTS_JSON, without_nan(found))
    return page.write(out / PAGE)


def labelled_images(part: Data, base: Path) -> tuple[Tensor, Tensor, Tensor]:
    """Images, their classes and the classes' prompts."""
    images, labels = labelled(base / str(part.images), base / str(part.labels))
    return images, labels, prompts_of(base / str(part.prompts))


def _mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def _zero_shot_table(recipe: Recipe, base: Path, out: Path, device: str, say: Say) -> Path:
    page = Report(recipe.title, "What says which predictions to doubt? Accuracy averaged over coverages (AUSAC).")
    first: dict[str, ZeroShot] = {}
    results: dict[str, Any] = {}
    page.section("The numbers", "Each image is paired with the prompt of the class it is predicted to be of.")
    for part in recipe.data:
        setup = setup_of(recipe, part, base, device)
        task, runs = labelled_images(part, base), []
        for seed in recipe.seeds:
            say(f"{part.name}, seed {seed}")
            flow, _ = setup.flow(_flows_folder(part, out), seed)
            runs.append(zero_shot(flow, *task, train=setup.train, seed=seed, resamples=0))
        first[part.name] = runs[0]
        results[part.name] = [_component_row(parts) for parts in zip(*(run.components for run in runs))]
        page.table(
            results[part.name], f"{part.name}: accuracy {runs[0].accuracy:.3f}", {"AUSAC": "max", "AUROC": "max"}
        )
    page.section("Turning images away")
    page.figure(
        figures.draw_components(first, out / "components.png"), "Accuracy on the images that are left; first seed."
    )
    write_json(out / RESULTS_JSON, without_nan(results))
    return page.write(out / PAGE)


def _component_row(parts: Sequence[Component]) -> dict[str, object]:
    """Means over seeds of one component, with standard deviations if there are several."""
    row: dict[str, object] = {"score": parts[0].title}
    for name in ("ausac", "auroc"):
        row[name.upper()], spread = _mean_and_spread([part.numbers[name] for part in parts])
        if len(parts) > 1:
            row[f"{name.upper()}, sd"] = spread
    return row
