"""Tables of the paper as recipes: a TOML file names the pairs, the methods or the ablation, and the seeds.

```toml
title = "Aleatoric uncertainty: calibration of retrieval"
seeds = [0, 1, 2, 3, 4]
methods = ["entropy_paper", "rerank", "max_softmax"]   # or: ablation = "geometry"
preset = "paper"                                        # network and run; [flow] and [baselines] change single values

[[data]]                                                # one data set or several
name = "MS-COCO"
train = "cc1m/train"                                    # folders of pairs, below the folder given to the run
held_out = "cc1m/val"
test = "coco/test"                                      # for zero-shot instead: images, labels, prompts
```
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from benchmarks.methods import ablation, registry
from benchmarks.methods.ablation import FLOWS_FOLDER, Ablation, FlowTraining
from benchmarks.methods.figures import draw_components
from benchmarks.methods.registry import RUNS_FOLDER, all_methods
from benchmarks.methods.zero_shot import Component, ZeroShot, zero_shot
from benchmarks.methods.zero_shot_page import image_tiles, labelled, prompts_of
from geoflow_fast.data.pairs import EmbeddingPairs
from geoflow_fast.evaluation.compare import check_bins, compare
from geoflow_fast.evaluation.job import PAGE, write_report
from geoflow_fast.evaluation.ladder_methods import Ladder
from geoflow_fast.evaluation.methods import Study
from geoflow_fast.evaluation.opening import comparison_tiles
from geoflow_fast.evaluation.report import Report
from geoflow_fast.evaluation.results import RESULTS_JSON, Comparison, aggregate, standard_deviation, without_nan
from geoflow_fast.runtime import checks, plots
from geoflow_fast.runtime.device import usable_device
from geoflow_fast.runtime.files import read_toml, write_json
from geoflow_fast.runtime.progress import Announce
from geoflow_fast.training.flow_matching import cores_of, preset_settings

PRESETS = ("auto", "tiny", "small", "paper")


@dataclass(frozen=True)
class RecipeData:
    """A data set: folders of pairs to train, tune and test on, or labelled images with class prompts to test on."""

    name: str
    train: str
    held_out: str
    test: str | None = None
    images: str | None = None
    labels: str | None = None
    prompts: str | None = None

    def __post_init__(self) -> None:
        for key, value in dataclasses.asdict(self).items():
            if value is not None and not isinstance(value, str):
                raise TypeError(f"{key} of data set {self.name!r} must be a string, got {value!r}")
        if self.name in ("", ".", "..") or set(self.name) & {"/", "\\", "\0"}:
            raise ValueError(f"data set {self.name!r} needs a name that a folder can have: results go there")
        labelled_parts = (self.images, self.labels, self.prompts)
        if (self.test is None) != all(labelled_parts) or any(labelled_parts) != all(labelled_parts):
            raise ValueError(f"data set {self.name!r} needs either test, or images, labels and prompts")

    @property
    def zero_shot(self) -> bool:
        """True if the data set is for classification."""
        return self.test is None

    def paths(self, base: Path) -> list[Path]:
        """All folders and files that it names, below `base`."""
        names = (self.train, self.held_out, self.test, self.images, self.labels, self.prompts)
        return [base / name for name in names if name is not None]

    def labelled_images(self, base: Path) -> tuple[Tensor, Tensor, Tensor]:
        """Images, their classes and the classes' prompts."""
        images, labels = labelled(base / str(self.images), base / str(self.labels))
        return images, labels, prompts_of(base / str(self.prompts))

    def flows_folder(self, out: Path) -> Path:
        """Folder of the flows, which data sets that train on the same pairs share."""
        return out / FLOWS_FOLDER / (self.train.strip("/").replace("/", "_").strip(".") or "flow")


@dataclass(frozen=True)
class Recipe:
    """What a table is made of; the fields are the keys of the file."""

    title: str
    data: Sequence[RecipeData]
    methods: Sequence[str] | None = None
    """Names of methods; None asks for all that can be fitted."""
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
            raise ValueError("data sets must have different names")
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
        """The recipe with every field replaced for which a change is not None. Changes of runs replace single values,
        and `only` keeps the data sets of these names."""
        for name in only or ():
            if name not in {part.name for part in self.data}:
                known = ", ".join(part.name for part in self.data)
                raise ValueError(f"the recipe has no data set {name!r}; it has {known}")
        data = [part for part in self.data if only is None or part.name in only]
        given = {name: value for name, value in changes.items() if value is not None}
        for name in ("flow", "baselines"):
            given[name] = {**getattr(self, name), **given.get(name, {})}
        return dataclasses.replace(self, data=data, **given)

    def training(self, part: RecipeData, base: Path, device: str) -> FlowTraining:
        """The pairs of a data set, and how the recipe trains flows on them."""
        train, val = EmbeddingPairs.open(base / part.train), EmbeddingPairs.open(base / part.held_out)
        network, run = preset_settings(self.preset, train, self.flow, cores=cores_of(usable_device(device)))
        return FlowTraining(train, val, dataclasses.replace(network, **self.network), run, self.seeds, device)


def load_recipe(path: Path) -> Recipe:
    """The recipe of a TOML file. A ValueError names the file and the key if something is wrong with it."""
    values = read_toml(path)
    try:
        entries = values.pop("data", [])
        if not isinstance(entries, list):
            raise TypeError("data sets are written as [[data]]")
        data = [RecipeData(**_known_keys(entry, RecipeData, "[[data]]")) for entry in entries]
        for part in data:
            for below in part.paths(Path()):  # the file may come from a stranger
                if below.is_absolute() or ".." in below.parts:
                    raise ValueError(f"data set {part.name!r}: {below} must be below the folder of the data")
            if set(part.name) & set(",/"):
                raise ValueError(f"name {part.name!r} must not have a comma or slash: --only and folders use it")
        return Recipe(data=data, **_known_keys(values, Recipe, "the recipe"))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def _known_keys(values: Any, kind: type, what: str) -> dict[str, Any]:
    """The values, if they are a table whose keys are fields of `kind`."""
    names = [part.name for part in dataclasses.fields(kind)]
    if not isinstance(values, dict) or not set(values) <= set(names):
        extra = sorted(set(values) - set(names)) if isinstance(values, dict) else values
        raise ValueError(f"{what} has unknown keys {extra}; known are {', '.join(names)}")
    return values


def run_recipe(
    recipe: Recipe, base: Path, out: Path, *, device: str = "auto", announce: Announce = lambda _: None
) -> Path:
    """Trains, scores and writes tables, figures and a page into `out`; returns the page.

    Paths of the recipe are below `base`. If it is stopped, the same call continues it.
    """
    plots.need_matplotlib()  # fails at once if matplotlib is missing, not after the work
    missing = [path for part in recipe.data for path in part.paths(base) if not path.exists()]
    if missing:
        raise FileNotFoundError(f"{missing[0]} does not exist; the recipe's folders are looked for in {base}")
    for part in recipe.data:
        if part.test is not None:  # there are fewer images than texts, so if the images fill the bins, all do
            images = len(np.unique(EmbeddingPairs.open(base / part.test).group))
            check_bins(images if recipe.max_queries is None else min(images, recipe.max_queries))
    device = str(usable_device(device))
    if recipe.ablation is not None:
        write = _zero_shot_ablation if recipe.data[0].zero_shot else _retrieval_ablation
    else:
        write = _zero_shot_table if recipe.data[0].zero_shot else _retrieval_table
    return write(recipe, base, out, device, announce)


def _retrieval_table(recipe: Recipe, base: Path, out: Path, device: str, announce: Announce) -> Path:
    datasets: dict[str, Comparison] = {}
    for part in recipe.data:
        training = recipe.training(part, base, device)
        test = EmbeddingPairs.open(base / str(part.test))
        # This draws random numbers, so it must not come between a flow's seed and the weights of the baselines.
        configs = registry.run_configs(training.val, recipe.baselines)
        runs = []
        for seed in recipe.seeds:
            announce(f"{part.name}, seed {seed}: training the flow")
            flow, seconds = training.flow(part.flows_folder(out), seed)
            folder = out / part.name / f"seed_{seed}"
            study = Study(training.val, training.train, flow, seconds, seed)
            if recipe.methods is None or Ladder.name in recipe.methods:
                announce(f"{part.name}, seed {seed}: training the head")
                study = training.with_head(study, part.flows_folder(out))
            methods = registry.chosen(recipe.methods, study, configs, folder / RUNS_FOLDER)
            runs.append(compare(study, test, methods, max_queries=recipe.max_queries, folder=folder, announce=announce))
        datasets[part.name] = aggregate(runs)
        datasets[part.name].save(out / part.name)
    return write_report(datasets, out, recipe.title)


def _ablation_page(recipe: Recipe) -> tuple[Ablation, Report]:
    chosen = ablation.find(str(recipe.ablation))
    return chosen, Report(recipe.title, f"{chosen.title}, on {', '.join(part.name for part in recipe.data)}.")


def _retrieval_ablation(recipe: Recipe, base: Path, out: Path, device: str, announce: Announce) -> Path:
    chosen, page = _ablation_page(recipe)
    compared, pages = {}, {}
    for part in recipe.data:
        training = recipe.training(part, base, device)
        test, folder = EmbeddingPairs.open(base / str(part.test)), out / part.name
        comparison = ablation.ablate(training, test, chosen, folder, max_queries=recipe.max_queries, announce=announce)
        compared[part.name], pages[part.name] = (
            comparison,
            ablation.write_ablation(chosen, comparison, folder, part.name),
        )
    page.cards(comparison_tiles(compared))
    for name, own in pages.items():
        page.section(name, f"Tables: {own.relative_to(out)}")
        page.figure(own.with_name(ablation.PICTURE), f"AUROC by {chosen.axis} on {name}.")
    return page.write(out / PAGE)


def _zero_shot_ablation(recipe: Recipe, base: Path, out: Path, device: str, announce: Announce) -> Path:
    chosen, page = _ablation_page(recipe)
    ausac = {}
    for part in recipe.data:
        training, images = recipe.training(part, base, device), part.labelled_images(base)
        ausac[part.name] = ablation.ablate_zero_shot(training, images, chosen, part.flows_folder(out), announce)
    means = {name: {label: _mean_and_spread(values) for label, values in rows.items()} for name, rows in ausac.items()}
    page.section("Area under the selective accuracy curve")
    best = {name: max(rows, key=lambda label: rows[label][0]) for name, rows in means.items()}
    page.cards([(f"{name}: best AUSAC", f"{means[name][x][0]:.3f}", f"{chosen.axis}: {x}") for name, x in best.items()])
    with page.folded("All numbers"):
        for column, caption in enumerate(("AUSAC, mean over seeds.", "Standard deviations.")):
            rows = [
                {chosen.axis: label, **{name: means[name][label][column] for name in means}}
                for label in next(iter(means.values()))
            ]
            page.table(rows, caption)
    if chosen.numeric:
        picture = ablation.draw_lines(chosen, means, "AUSAC", out / ablation.PICTURE)
        page.figure(picture, "AUSAC of the epistemic score; shaded: one standard deviation over seeds.")
    write_json(out / RESULTS_JSON, without_nan(ausac))
    return page.write(out / PAGE)


def _zero_shot_table(recipe: Recipe, base: Path, out: Path, device: str, announce: Announce) -> Path:
    page = Report(recipe.title, "Which predictions should be doubted? Accuracy averaged over coverages (AUSAC).")
    first: dict[str, ZeroShot] = {}
    results: dict[str, Any] = {}
    for part in recipe.data:
        training = recipe.training(part, base, device)
        images, runs = part.labelled_images(base), []
        for seed in recipe.seeds:
            announce(f"{part.name}, seed {seed}")
            flow, _ = training.flow(part.flows_folder(out), seed)
            runs.append(zero_shot(flow, *images, train=training.train, seed=seed, resamples=0))
        first[part.name] = runs[0]
        results[part.name] = [_component_row(parts) for parts in zip(*(run.components for run in runs))]
    page.section("Which to doubt", "Each image is paired with the prompt of the class that is predicted for it.")
    page.cards(image_tiles(first))
    with page.folded("All numbers"):
        for name, rows in results.items():
            caption = f"{name}: accuracy {first[name].accuracy:.3f}"
            page.table(rows, caption, {"AUSAC": "max", "AUROC": "max"})
    page.section("Turning images away")
    picture = draw_components(first, out / "components.png")
    page.figure(picture, "Accuracy on the remaining images; first seed.")
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


def _mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation, which is 0 for a single value."""
    return float(np.mean(values)), standard_deviation(values) if len(values) > 1 else 0.0
