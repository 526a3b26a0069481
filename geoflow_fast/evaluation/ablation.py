"""The paper's ablations, and one of the coupling, on any pairs: one setting is varied, everything else stays.

A flow is trained for each value where the setting belongs to training, and else once per seed. Kappa and guidance are
tuned anew for each value on the held-out pairs unless they are what is varied: a value is judged at its best.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from geoflow_fast.data.pairs import EmbeddingPairs
from geoflow_fast.evaluation import figures
from geoflow_fast.evaluation.compare import Comparison, aggregate, compare
from geoflow_fast.evaluation.methods import FAST, FlowEntropy, FlowEpistemic, Method, Study
from geoflow_fast.evaluation.metrics import BINS
from geoflow_fast.evaluation.report import Report
from geoflow_fast.evaluation.zero_shot import zero_shot
from geoflow_fast.flow.config import GeoFlowConfig
from geoflow_fast.flow.model import GeoFlow
from geoflow_fast.likelihood.settings import PAPER_DENSITY, DensitySettings
from geoflow_fast.runtime import hashing
from geoflow_fast.runtime.files import read_json, write_json
from geoflow_fast.training.config import TrainConfig
from geoflow_fast.training.flow_matching import train

FLOWS_FOLDER, SECONDS_FILE, PICTURE = "flows", "seconds.json", "ablation.png"
Say = Callable[[str], object]
Maker = Callable[[Study], Method]


@dataclass(frozen=True)
class Setup:
    """Pairs, and how flows are trained on them."""

    train: EmbeddingPairs
    val: EmbeddingPairs
    """Held out: validates training and tunes what is tuned."""
    network: GeoFlowConfig
    run: TrainConfig
    seeds: Sequence[int] = (0,)
    device: str = "cpu"
    progress: bool | None = None

    def flow(
        self, folder: Path, seed: int, network: Mapping[str, Any] | None = None, run: Mapping[str, Any] | None = None
    ) -> tuple[GeoFlow, float]:
        """A flow trained with these changes, and the seconds that took: in `folder`, from which it is taken up again.

        KeyboardInterrupt if training was asked to stop; its state is saved then. The seconds are those of the call that
        finished the run.
        """
        shape = dataclasses.replace(self.network, **(network or {}))
        config = dataclasses.replace(self.run, **(run or {}), seed=seed)
        torch.manual_seed(seed)
        flow = GeoFlow(shape).to(self.device)
        place = folder / hashing.fingerprint({"network": shape.to_json(), "run": dataclasses.asdict(config)})[:16]
        report = train(flow, self.train, config, self.val, place, progress=self.progress)
        if not report.finished:
            raise KeyboardInterrupt
        if not (place / SECONDS_FILE).is_file():
            write_json(place / SECONDS_FILE, report.seconds)
        return flow, float(read_json(place / SECONDS_FILE))


@dataclass(frozen=True)
class Variant:
    """One value of the setting that is varied."""

    label: str
    make: Maker
    series: str = ""
    """The line it lies on, if values are numbers."""
    value: float = math.nan
    network: Mapping[str, Any] = field(default_factory=dict)
    """Changes of the network, which is then trained anew."""
    run: Mapping[str, Any] = field(default_factory=dict)
    """Changes of the training run."""
    density: DensitySettings | None = None
    """Of a reading by log-densities."""

    def method(self, study: Study) -> Method:
        """The method that is scored, under the variant's name."""
        method = self.make(study)
        method.name = "".join(x if x.isalnum() or x in ".-" else "_" for x in self.label)
        method.title = self.label
        return method


@dataclass(frozen=True)
class Ablation:
    """A setting and its values."""

    title: str
    axis: str
    variants: Sequence[Variant]
    log_axis: bool = False

    @property
    def numeric(self) -> bool:
        """Whether values have places on an axis."""
        return not math.isnan(self.variants[0].value)


def entropy_with(**settings: Any) -> Maker:
    """Retrieval entropy with these settings; a kappa or guidance among them is not tuned."""

    def make(study: Study) -> Method:
        method = FlowEntropy(study)
        method.settings = {**FAST, **settings}
        return method

    return make


def score_with(settings: DensitySettings) -> Maker:
    """Epistemic score with these settings of its solves."""

    def make(study: Study) -> Method:
        method = FlowEpistemic(study)
        method.settings = settings
        return method

    return make


def both(label: str, **changes: Any) -> list[Variant]:
    """A flow trained with changes, read as entropy and as epistemic score."""
    usual = DensitySettings()
    return [
        Variant(f"{label}: entropy", entropy_with(), **changes),
        Variant(f"{label}: epistemic", score_with(usual), density=usual, **changes),
    ]


def entropies(series: str, values: Sequence[float], settings: Callable[[Any], Mapping[str, Any]]) -> list[Variant]:
    """Retrieval entropy along an axis."""
    return [Variant(f"{series}, {x:g}", entropy_with(**settings(x)), series, float(x)) for x in values]


def scores(series: str, values: Sequence[int], name: str, settings: DensitySettings) -> list[Variant]:
    """The epistemic score along an axis: for all `values` of the setting `name`."""
    changes: list[dict[str, Any]] = [{name: x} for x in values]
    chosen = {x: dataclasses.replace(settings, **change) for x, change in zip(values, changes)}
    return [Variant(f"{series}, {x}", score_with(y), series, float(x), density=y) for x, y in chosen.items()]


def _geometry() -> Ablation:
    twin = both("Euclidean", network={"geometry": "euclidean"})
    return Ablation("The sphere against its Euclidean twin", "geometry", [*both("sphere"), *twin])


COUPLINGS = (
    ("paper", "paper"),
    ("paper", "independent"),
    ("sample", "independent"),
    ("exact", "independent"),
    ("independent", "independent"),
)
"""Of joint rows, and of conditional ones."""


def _coupling() -> Ablation:
    rules = [{"coupling": joint, "conditional_coupling": other} for joint, other in COUPLINGS]
    variants = [both(f"{rule['coupling']} / {rule['conditional_coupling']}", run=rule) for rule in rules]
    return Ablation("Coupling of noise to data, joint / conditional rows", "coupling", [*itertools.chain(*variants)])


def _steps() -> Ablation:
    values = (10, 20, 30, 40, 50)
    paper = scores("the paper's Euler", values, "n_steps", PAPER_DENSITY)
    return Ablation(
        "Steps of the reverse ODE", "steps", [*paper, *scores("midpoint", values, "n_steps", DensitySettings())]
    )


def _probes() -> Ablation:
    values = (1, 2, 3, 4, 5)
    paper = scores("the paper's Euler 50", values, "n_probes", PAPER_DENSITY)
    own = scores("midpoint 10", values, "n_probes", DensitySettings())
    return Ablation("Probes of the divergence", "probes", [*paper, *own])


def _guidance() -> Ablation:
    values = (0.0, 0.5, 1.0, 2.0, 3.0, 5.0)
    return Ablation("Guidance", "guidance", entropies("entropy", values, lambda x: {"guidance": x}))


def _samples() -> Ablation:
    values = (4, 8, 16, 32, 64)
    orthogonal = entropies("orthogonal, antithetic noise", values, lambda n: {"n_samples": n})
    plain = entropies("independent noise", values, lambda n: {"n_samples": n, "noise": "iid"})
    return Ablation("Samples per query", "samples", [*orthogonal, *plain], log_axis=True)


def _kappa() -> Ablation:
    values = (2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0)
    variants = entropies("entropy", values, lambda x: {"kappa": x})
    return Ablation("Concentration of the kernel", "kappa", variants, log_axis=True)


ABLATIONS: dict[str, Callable[[], Ablation]] = {
    "geometry": _geometry,
    "coupling": _coupling,
    "steps": _steps,
    "probes": _probes,
    "guidance": _guidance,
    "samples": _samples,
    "kappa": _kappa,
}


def find(name: str) -> Ablation:
    """The ablation of that name."""
    if name not in ABLATIONS:
        raise ValueError(f"ablation must be one of {', '.join(ABLATIONS)}, got {name!r}")
    return ABLATIONS[name]()


def ablate(
    setup: Setup,
    test: EmbeddingPairs,
    chosen: Ablation,
    folder: Path,
    *,
    max_queries: int | None = None,
    bins: int = BINS,
    say: Say = lambda _: None,
) -> Comparison:
    """Every variant on the queries of `test` in both directions, over the seeds of `setup`.

    Flows and scores are kept in `folder`: an ablation that was stopped goes on.
    """
    runs = []
    for seed in setup.seeds:
        methods = []
        for variant in chosen.variants:
            say(f"seed {seed}: {variant.label}")
            flow, seconds = setup.flow(folder / FLOWS_FOLDER, seed, variant.network, variant.run)
            study = Study(setup.val, flow=flow, flow_seconds=seconds, seed=seed, progress=setup.progress)
            methods.append(variant.method(study))
        place = folder / f"seed_{seed}"
        runs.append(compare(study, test, methods, max_queries=max_queries, bins=bins, folder=place, say=say))
    return aggregate(runs)


def ablate_zero_shot(
    setup: Setup,
    labelled: tuple[Tensor, Tensor, Tensor],
    chosen: Ablation,
    folder: Path,
    say: Say = lambda _: None,
) -> dict[str, list[float]]:
    """AUSAC of the epistemic score in zero-shot classification by variant, one per seed.

    `labelled`: images [B, d], classes [B], one prompt per class [C, d]. Variants that are read as entropy are left out.
    """
    variants = [variant for variant in chosen.variants if variant.density is not None]
    if not variants:
        raise ValueError(f"the ablation of {chosen.axis} is about retrieval; it has nothing to say on classification")
    found: dict[str, list[float]] = {variant.label: [] for variant in variants}
    for seed, variant in itertools.product(setup.seeds, variants):
        say(f"seed {seed}: {variant.label}")
        flow, _ = setup.flow(folder / FLOWS_FOLDER, seed, variant.network, variant.run)
        result = zero_shot(flow, *labelled, settings=variant.density, seed=seed, resamples=0)
        (score,) = (part for part in result.components if part.name == "sum")
        found[variant.label].append(score.numbers["ausac"])
    return found


def write_ablation(chosen: Ablation, found: Comparison, folder: Path, data: str) -> Path:
    """Results, figure and page of an ablation on the data set `data`, into `folder`; returns the page."""
    found.save(folder)
    seeds = found.results[0].runs
    page = Report(
        f"{chosen.title} on {data}", "What the setting does to telling wrong answers of plain search from right."
    )
    page.section("The figure")
    spread = "; shaded, or bars: one standard deviation over seeds" if seeds > 1 else ""
    page.figure(draw(chosen, found, folder / PICTURE), f'AUROC of "plain search is wrong"{spread}.')
    page.section("The numbers", "Kappa and guidance are tuned on held-out pairs, unless they are what is varied.")
    for way in found.directions:
        page.table(found.table(way), figures.DIRECTION_TITLES[way].capitalize(), found.best(way))
    return page.write(folder / "report.html")


def draw(chosen: Ablation, found: Comparison, path: Path) -> Path:
    """AUROC over the values, or by category."""
    if not chosen.numeric:
        return figures.draw_auroc({chosen.axis: found}, path)
    panels = {}
    for way in found.directions:
        points = {r.title: (r.numbers["auroc"], r.spread.get("auroc", 0.0)) for r in found.of(way)}
        panels[figures.DIRECTION_TITLES[way]] = points
    return draw_lines(chosen, panels, "AUROC", path)


def draw_lines(
    chosen: Ablation, panels: Mapping[str, Mapping[str, tuple[float, float]]], ylabel: str, path: Path
) -> Path:
    """A panel of lines over the values for each entry: mean and standard deviation by the variants' labels."""
    series: dict[str, list[Variant]] = {}
    for variant in chosen.variants:
        series.setdefault(variant.series, []).append(variant)
    drawn = {
        title: {name: figures.Series(*zip(*(points[x.label] for x in line))) for name, line in series.items()}
        for title, points in panels.items()
    }
    values = [variant.value for variant in next(iter(series.values()))]
    return figures.draw_ablation(drawn, values, path, xlabel=chosen.axis, ylabel=ylabel, log_x=chosen.log_axis)
