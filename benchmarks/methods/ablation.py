"""The paper's ablations, and one of the coupling, on any pairs: one setting is varied, everything else stays.

A flow is trained for each value if the setting belongs to training, and otherwise once per seed. Kappa and guidance are
tuned again for each value on the held-out pairs, unless they are what is varied, so each value is judged at its best.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.methods.euclidean import twin_of
from benchmarks.methods.figures import draw_ablation
from benchmarks.methods.zero_shot import zero_shot
from geoflow_fast.data.pairs import EmbeddingPairs
from geoflow_fast.evaluation import figures
from geoflow_fast.evaluation.compare import compare
from geoflow_fast.evaluation.flow_methods import FlowEntropy, FlowEpistemic
from geoflow_fast.evaluation.methods import Method, Study
from geoflow_fast.evaluation.metrics import BINS
from geoflow_fast.evaluation.opening import comparison_tiles
from geoflow_fast.evaluation.report import Report
from geoflow_fast.evaluation.results import Comparison, aggregate
from geoflow_fast.flow.config import GeoFlowConfig
from geoflow_fast.flow.model import GeoFlow
from geoflow_fast.flow.sampling import FAST_SAMPLING
from geoflow_fast.head.model import PosteriorHead
from geoflow_fast.likelihood.settings import PAPER_DENSITY, DensitySettings
from geoflow_fast.runtime import hashing
from geoflow_fast.runtime.files import read_json, write_json
from geoflow_fast.runtime.progress import Announce
from geoflow_fast.training.config import TrainConfig
from geoflow_fast.training.flow_matching import train

FLOWS_FOLDER, SECONDS_FILE, PICTURE = "flows", "seconds.json", "ablation.png"


@dataclass(frozen=True)
class FlowTraining:
    """Pairs, and how flows are trained on them."""

    train: EmbeddingPairs
    val: EmbeddingPairs
    """Held-out pairs that validate training and on which everything else is tuned."""
    network: GeoFlowConfig
    run: TrainConfig
    seeds: Sequence[int] = (0,)
    device: str = "cpu"
    progress: bool | None = None

    def flow(
        self, folder: Path, seed: int, network: Mapping[str, Any] | None = None, run: Mapping[str, Any] | None = None
    ) -> tuple[GeoFlow, float]:
        """Trains a flow with these changes and returns it with the seconds that took. A run that is in `folder` is
        continued, or loaded if it is finished; the seconds are those of the call that finished it.

        Raises KeyboardInterrupt if training was asked to stop; its state is then saved.
        """
        changes = dict(network or {})
        euclidean = changes.pop("geometry", "sphere") == "euclidean"
        shape = dataclasses.replace(self.network, **changes)
        shape = twin_of(shape) if euclidean else shape
        config = dataclasses.replace(self.run, **(run or {}), seed=seed)
        torch.manual_seed(seed)
        flow = GeoFlow(shape).to(self.device)
        out = folder / hashing.fingerprint({"network": shape.to_json(), "run": dataclasses.asdict(config)})[:16]
        report = train(flow, self.train, config, self.val, out, progress=self.progress)
        if not report.finished:
            raise KeyboardInterrupt
        return flow, first_seconds(out, report.seconds)

    def with_head(self, study: Study, folder: Path) -> Study:
        """The study with a head of its seed, which is trained or read as flows are."""
        out, start = folder / f"head_{study.seed}", time.perf_counter()
        head = PosteriorHead.fit(self.train, seed=study.seed, out=out, progress=self.progress, device=self.device)
        if not head.report["finished"]:
            raise KeyboardInterrupt
        return dataclasses.replace(study, head=head, head_seconds=first_seconds(out, time.perf_counter() - start))


def first_seconds(out: Path, seconds: float) -> float:
    """The seconds of the call that finished the run in the folder `out`, which are these if it was the present one."""
    if not (out / SECONDS_FILE).is_file():
        write_json(out / SECONDS_FILE, seconds)
    return float(read_json(out / SECONDS_FILE))


@dataclass(frozen=True)
class Variant:
    """One value of the setting that is varied."""

    label: str
    make: Callable[[Study], Method]
    series: str = ""
    """The line on which the value lies, if values are numbers."""
    value: float = math.nan
    network: Mapping[str, Any] = field(default_factory=dict)
    """Changes of the network, which is then trained again; `geometry` may be "euclidean"."""
    run: Mapping[str, Any] = field(default_factory=dict)
    """Changes of the training run."""
    density: DensitySettings | None = None
    """Settings of the log-densities, if the variant is scored by them."""

    def method(self, study: Study) -> Method:
        """The method that is scored, under the name of the variant."""
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
        """True if the values are numbers."""
        return not math.isnan(self.variants[0].value)


def entropy_with(
    *, kappa: float | None = None, guidance: float | None = None, **sampling: Any
) -> Callable[[Study], Method]:
    """Makes retrieval entropy with these changes of its sampler; a kappa or guidance that is given is not tuned."""

    def make(study: Study) -> Method:
        method = FlowEntropy(study)
        method.kappa, method.guidance = kappa, guidance
        method.sampling = dataclasses.replace(FAST_SAMPLING, **sampling)
        return method

    return make


def score_with(settings: DensitySettings) -> Callable[[Study], Method]:
    """Makes the epistemic score with these settings of its log-densities."""

    def make(study: Study) -> Method:
        method = FlowEpistemic(study)
        method.settings = settings
        return method

    return make


def both_scores(label: str, **changes: Any) -> list[Variant]:
    """A flow trained with changes, scored by its entropy and by its epistemic score."""
    usual = DensitySettings()
    return [
        Variant(f"{label}: entropy", entropy_with(), **changes),
        Variant(f"{label}: epistemic", score_with(usual), density=usual, **changes),
    ]


def entropies(series: str, name: str, values: Sequence[float], **others: Any) -> list[Variant]:
    """Retrieval entropy along an axis: for each value of the setting `name`, with the `others` fixed."""
    return [Variant(f"{series}, {x:g}", entropy_with(**{name: x}, **others), series, float(x)) for x in values]


def epistemic_scores(series: str, usual: DensitySettings, name: str, values: Sequence[int]) -> list[Variant]:
    """The epistemic score along an axis: for each value of the setting `name`, with the others as `usual`."""
    settings = [dataclasses.replace(usual, **{name: x}) for x in values]
    return [Variant(f"{series}, {x}", score_with(y), series, float(x), density=y) for x, y in zip(values, settings)]


COUPLINGS = (
    ("paper", "paper"),
    ("paper", "independent"),
    ("sample", "independent"),
    ("exact", "independent"),
    ("independent", "independent"),
)
"""Couplings of joint rows, and of conditional ones."""


def _geometry() -> Ablation:
    twin = both_scores("Euclidean", network={"geometry": "euclidean"})
    return Ablation("The sphere against its Euclidean twin", "geometry", [*both_scores("sphere"), *twin])


def _coupling() -> Ablation:
    rules = [{"coupling": joint, "conditional_coupling": other} for joint, other in COUPLINGS]
    variants = [both_scores(f"{rule['coupling']} / {rule['conditional_coupling']}", run=rule) for rule in rules]
    return Ablation("Coupling of noise to data, joint / conditional rows", "coupling", [*itertools.chain(*variants)])


def _steps() -> Ablation:
    values = (10, 20, 30, 40, 50)
    variants = [*epistemic_scores("the paper's Euler", PAPER_DENSITY, "n_steps", values)]
    variants += epistemic_scores("midpoint", DensitySettings(), "n_steps", values)
    return Ablation("Steps of the reverse ODE", "steps", variants)


def _probes() -> Ablation:
    values = (1, 2, 3, 4, 5)
    variants = [*epistemic_scores("the paper's Euler 50", PAPER_DENSITY, "n_probes", values)]
    variants += epistemic_scores("midpoint 10", DensitySettings(), "n_probes", values)
    return Ablation("Probes of the divergence", "probes", variants)


def _guidance() -> Ablation:
    values = (0.0, 0.5, 1.0, 2.0, 3.0, 5.0)
    return Ablation("Guidance", "guidance", entropies("entropy", "guidance", values))


def _samples() -> Ablation:
    values = (4, 8, 16, 32, 64)
    orthogonal = entropies("orthogonal, antithetic noise", "n_samples", values)
    plain = entropies("independent noise", "n_samples", values, noise="iid")
    return Ablation("Samples per query", "samples", [*orthogonal, *plain], log_axis=True)


def _kappa() -> Ablation:
    values = (2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0)
    variants = entropies("entropy", "kappa", values)
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
    training: FlowTraining,
    test: EmbeddingPairs,
    chosen: Ablation,
    folder: Path,
    *,
    max_queries: int | None = None,
    bins: int = BINS,
    announce: Announce = lambda _: None,
) -> Comparison:
    """Compares the variants on the queries of `test` in both directions, over the seeds of `training`.

    Flows and scores are kept in `folder`, so that an ablation that was stopped can continue.
    """
    runs = []
    for seed in training.seeds:
        methods = []
        for variant in chosen.variants:
            announce(f"seed {seed}: {variant.label}")
            flow, seconds = training.flow(folder / FLOWS_FOLDER, seed, variant.network, variant.run)
            study = Study(training.val, flow=flow, flow_seconds=seconds, seed=seed, progress=training.progress)
            methods.append(variant.method(study))
        out = folder / f"seed_{seed}"
        runs.append(compare(study, test, methods, max_queries=max_queries, bins=bins, folder=out, announce=announce))
    return aggregate(runs)


def ablate_zero_shot(
    training: FlowTraining,
    labelled: tuple[Tensor, Tensor, Tensor],
    chosen: Ablation,
    folder: Path,
    announce: Announce = lambda _: None,
) -> dict[str, list[float]]:
    """AUSAC of the epistemic score in zero-shot classification by variant, one value per seed.

    `labelled` has images [B, d], classes [B] and one prompt per class [C, d]. Variants that are scored by entropy are
    left out.
    """
    variants = [variant for variant in chosen.variants if variant.density is not None]
    if not variants:
        raise ValueError(f"the ablation of {chosen.axis} is about retrieval; it does not apply to classification")
    ausac: dict[str, list[float]] = {variant.label: [] for variant in variants}
    for seed, variant in itertools.product(training.seeds, variants):
        announce(f"seed {seed}: {variant.label}")
        flow, _ = training.flow(folder / FLOWS_FOLDER, seed, variant.network, variant.run)
        result = zero_shot(flow, *labelled, settings=variant.density, seed=seed, resamples=0)
        (score,) = (part for part in result.components if part.name == "sum")
        ausac[variant.label].append(score.numbers["ausac"])
    return ausac


def write_ablation(chosen: Ablation, comparison: Comparison, folder: Path, data: str) -> Path:
    """Writes results, figure and page of an ablation on the data set `data` into `folder`, and returns the page."""
    comparison.save(folder)
    page = Report(
        f"{chosen.title} on {data}",
        "This page shows how the setting changes the ability to tell wrong answers of plain search from right ones.",
    )
    page.section("The figure")
    page.cards(comparison_tiles({data: comparison}))
    several = comparison.results[0].runs > 1
    bands = "; shaded areas or bars show one standard deviation over seeds" if several else ""
    page.figure(draw(chosen, comparison, folder / PICTURE), f'AUROC of "plain search is wrong"{bands}.')
    page.section("The numbers", "Kappa and guidance are tuned on held-out pairs, unless they are what is varied.")
    with page.folded("All numbers of all values"):
        for direction in comparison.directions:
            title = figures.DIRECTION_TITLES[direction].capitalize()
            page.table(comparison.table(direction), title, comparison.best(direction))
    return page.write(folder / "report.html")


def draw(chosen: Ablation, comparison: Comparison, path: Path) -> Path:
    """Draws AUROC over the values, or by category if they are not numbers."""
    if not chosen.numeric:
        return figures.draw_auroc({chosen.axis: comparison}, path)
    panels = {
        figures.DIRECTION_TITLES[direction]: {
            result.title: (result.numbers["auroc"], result.spread.get("auroc", 0.0))
            for result in comparison.of(direction)
        }
        for direction in comparison.directions
    }
    return draw_lines(chosen, panels, "AUROC", path)


def draw_lines(
    chosen: Ablation, panels: Mapping[str, Mapping[str, tuple[float, float]]], ylabel: str, path: Path
) -> Path:
    """Draws a panel of lines over the values for each entry of `panels`, which has mean and standard deviation by the
    variants' labels."""
    series: dict[str, list[Variant]] = {}
    for variant in chosen.variants:
        series.setdefault(variant.series, []).append(variant)
    lines = {
        title: {name: figures.Series(*zip(*(points[x.label] for x in line))) for name, line in series.items()}
        for title, points in panels.items()
    }
    values = [variant.value for variant in next(iter(series.values()))]
    return draw_ablation(lines, values, path, xlabel=chosen.axis, ylabel=ylabel, log_x=chosen.log_axis)
