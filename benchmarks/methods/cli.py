"""The commands of `python -m benchmarks.methods`: reads flags, calls the methods, prints."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.methods import baselines, registry, studies
from benchmarks.methods.activations import write_activations
from benchmarks.methods.recipe import Recipe, RecipeData, load_recipe, run_recipe
from benchmarks.methods.registry import RUNS_FOLDER
from benchmarks.methods.zero_shot_page import zero_shot_folders
from geoflow_fast.cli.base import (
    Commands,
    Conditional,
    DeviceFlag,
    JsonFlag,
    ModelFlag,
    OutFolderFlag,
    Preset,
    PresetFlag,
    ProbeSeedFlag,
    SeedFlag,
    continued_later,
    given,
    model_option,
    print_json,
)
from geoflow_fast.cli.evaluate import BinsFlag, MaxQueriesFlag, ResamplesFlag, names_of, print_comparison, print_rows
from geoflow_fast.data.pairs import EmbeddingPairs
from geoflow_fast.encoders.open_clip import DEFAULT_MODEL, OpenClipEncoder
from geoflow_fast.evaluation.job import PAGE, EvaluationSettings, evaluate_folders

SeedsFlag = Annotated[int, typer.Option(help="Number of seeds to train and score with.", min=1, max=1000)]
StepsFlag = Annotated[int | None, typer.Option(help="Training steps of the flow.")]
BatchFlag = Annotated[int | None, typer.Option(help="Pairs per training step.")]
BaselineStepsFlag = Annotated[int | None, typer.Option(help="Training steps of baselines. Default: their own.")]
BaselineBatchFlag = Annotated[
    int | None, typer.Option(help="Pairs per training step of baselines. Default: their own.")
]

app = Commands(
    help="Trains and scores methods that GeoFlow is compared with, and makes the paper's tables. The first argument is "
    "a command, or the names of methods: they are then trained and scored, as by `score`.",
    pretty_exceptions_enable=False,
)


@app.command(
    epilog="Example: python -m benchmarks.methods probvlm,margin --train embeddings/ --held-out val/ --pairs test/ "
    "--out report/"
)
def score(
    methods: Annotated[str, typer.Argument(help="Comma-separated names: probvlm, hub_softmax, margin, ...; or all.")],
    pairs: Annotated[Path, typer.Option(help="Folder of test pairs (img_emb/, text_emb/).")],
    out: OutFolderFlag,
    held_out: Annotated[
        Path | None,
        typer.Option(help="Folder of held-out pairs that every method is tuned on. Default: the model's."),
    ] = None,
    train: Annotated[Path | None, typer.Option(help="Folder of training pairs.")] = None,
    model: Annotated[
        Path | None,
        model_option("Folder of a trained flow, with the head beside it, or of a head; without it, no models."),
    ] = None,
    direction: Annotated[Conditional | None, typer.Option(help="Only this direction. Default: both.")] = None,
    max_queries: MaxQueriesFlag = None,
    bins: BinsFlag = 10,
    resamples: ResamplesFlag = 1000,
    steps: BaselineStepsFlag = None,
    batch_size: BaselineBatchFlag = None,
    seed: SeedFlag = 0,
    device: DeviceFlag = "auto",
    as_json: JsonFlag = False,
) -> None:
    """Trains methods on the training pairs, tunes them on the held-out pairs and scores them on the test pairs."""
    settings: dict[str, Any] = {"max_queries": max_queries, "bins": bins, "resamples": resamples}
    if direction is not None:
        settings["directions"] = (direction,)
    run = given(steps=steps, batch_size=batch_size)
    with continued_later():
        study = evaluate_folders(
            model,
            pairs,
            held_out,
            train,
            out,
            EvaluationSettings(names_of(methods), seed=seed, device=device, **settings),
            announce=lambda line: typer.echo(line, err=True),
            choose=lambda names, study: registry.chosen(
                names, study, registry.run_configs(study.val, run), out / RUNS_FOLDER
            ),
        )
    print_comparison(study, out, as_json=as_json)


@app.command(epilog="Example: python -m benchmarks.methods train probvlm --pairs embeddings/ --out runs/probvlm")
def train(
    method: Annotated[str, typer.Argument(help=f"One of {', '.join(baselines.METHODS)}.")],
    pairs: Annotated[Path, typer.Option(help="Folder of training pairs.")],
    out: Annotated[Path, typer.Option(help="Folder of the run; the same command continues a stopped run.")],
    val: Annotated[Path | None, typer.Option(help="Folder of validation pairs. Default: 2 % of the images.")] = None,
    preset: PresetFlag = "auto",
    steps: Annotated[int | None, typer.Option(help="Training steps. Default: the preset's.")] = None,
    batch_size: BatchFlag = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate.")] = None,
    seed: SeedFlag = 0,
    overwrite: Annotated[
        bool, typer.Option("--overwrite/--no-overwrite", help="Start again instead of continuing the run in OUT.")
    ] = False,
    device: DeviceFlag = "auto",
) -> None:
    """Trains one baseline on paired embeddings and saves it."""
    data, validation = EmbeddingPairs.open(pairs), None if val is None else EmbeddingPairs.open(val)
    changes = given(steps=steps, batch_size=batch_size, lr=lr, seed=seed)
    options: dict[str, Any] = {"folder": pairs, "device": device, "resume": not overwrite}
    report = baselines.train_preset(method, data, out, preset, validation, changes, **options)
    if report is not None:
        state = "finished" if report.finished else "stopped; run the same command to continue"
        typer.echo(f"{state} at step {report.steps}; best validation loss {report.best_val_loss:.6g}")
    typer.echo(f"Wrote {out}")


@app.command(
    "zero-shot",
    epilog="Example: python -m benchmarks.methods zero-shot --model runs/first --images img_emb/ --labels labels.npy "
    "--prompts prompts.npy --out report",
)
def zero_shot(
    model: ModelFlag,
    images: Annotated[Path, typer.Option(help=".npy file or folder of .npy shards, unit rows.")],
    labels: Annotated[Path, typer.Option(help=".npy file of integers: the class of every image.")],
    prompts: Annotated[
        Path, typer.Option(help=".npy file of prompt embeddings: [C, d], or [C, P, d] for P templates.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for results, a figure and report.html.")],
    held_out_images: Annotated[
        Path | None, typer.Option(help="Images to tune the references' temperature on; without them it is CLIP's.")
    ] = None,
    held_out_labels: Annotated[Path | None, typer.Option(help="Their classes.")] = None,
    train: Annotated[Path | None, typer.Option(help="Folder of training pairs, needed for the kNN distance.")] = None,
    bins: BinsFlag = 10,
    resamples: ResamplesFlag = 1000,
    seed: ProbeSeedFlag = 0,
    device: DeviceFlag = "auto",
    as_json: JsonFlag = False,
) -> None:
    """Zero-shot classification with class prompts: which term of the flow's density finds wrong predictions?"""
    if (held_out_images is None) != (held_out_labels is None):
        raise ValueError("--held-out-images and --held-out-labels go together")
    tuned = None if held_out_images is None or held_out_labels is None else (held_out_images, held_out_labels)
    options: dict[str, Any] = {"bins": bins, "resamples": resamples, "seed": seed, "device": device}
    study = zero_shot_folders(model, images, labels, prompts, out, held_out=tuned, train=train, **options)
    if as_json:
        components = [dataclasses.asdict(component) for component in study.components]
        print_json({"accuracy": study.accuracy, "components": components})
        return
    print_rows(f"{len(study.correct)} images, accuracy {study.accuracy:.3f}", [c.row() for c in study.components])
    typer.echo(f"Wrote {out / PAGE}")


@app.command(
    epilog="Example: python -m benchmarks.methods ablation guidance --train embeddings/ --held-out val/ --pairs test/ "
    "--out ab"
)
def ablation(
    name: Annotated[str, typer.Argument(help="geometry, coupling, steps, probes, guidance, samples or kappa.")],
    train: Annotated[Path, typer.Option(help="Folder of training pairs.")],
    held_out: Annotated[Path, typer.Option(help="Folder of held-out pairs for tuning and validation.")],
    pairs: Annotated[Path, typer.Option(help="Folder of test pairs.")],
    out: OutFolderFlag,
    preset: PresetFlag = "small",
    seeds: SeedsFlag = 1,
    steps: StepsFlag = None,
    batch_size: BatchFlag = None,
    max_queries: MaxQueriesFlag = None,
    device: DeviceFlag = "auto",
) -> None:
    """Varies one setting of the flow or of the scoring; writes a figure and a table of the effect on retrieval."""
    data = [{"name": pairs.name, "train": train, "held_out": held_out, "test": pairs}]
    changes = {"ablation": name, "title": f"Ablation: {name}"}
    _run(data, out, preset, seeds, steps, batch_size, max_queries, device, **changes)


@app.command(epilog="Example: python -m benchmarks.methods backbone clip/ siglip/ --out backbones")
def backbone(
    folders: Annotated[list[Path], typer.Argument(help="Folders of embeddings, each with train/, val/ and test/.")],
    out: OutFolderFlag,
    methods: Annotated[str, typer.Option(help="Comma-separated names.")] = "rerank,entropy,max_softmax,margin",
    preset: PresetFlag = "small",
    seeds: SeedsFlag = 1,
    steps: StepsFlag = None,
    batch_size: BatchFlag = None,
    max_queries: MaxQueriesFlag = None,
    device: DeviceFlag = "auto",
) -> None:
    """Runs the same evaluation on the embeddings of several encoders, for example CLIP and SigLIP, side by side."""
    data = [{"name": x.name, "train": x / "train", "held_out": x / "val", "test": x / "test"} for x in folders]
    changes = {"methods": names_of(methods), "title": "Backbones side by side"}
    _run(data, out, preset, seeds, steps, batch_size, max_queries, device, **changes)


@app.command(
    epilog="Example: python -m benchmarks.methods recipe benchmarks/methods/recipes/calibration.toml "
    "--data embeddings/ --out calibration"
)
def recipe(
    file: Annotated[Path, typer.Argument(help="TOML file, such as those in benchmarks/methods/recipes/.")],
    data: Annotated[Path, typer.Option(help="Folder that contains the recipe's folders.")],
    out: OutFolderFlag,
    only: Annotated[str | None, typer.Option(help="Comma-separated names of data sets. Default: all.")] = None,
    methods: Annotated[str | None, typer.Option(help="Comma-separated names. Default: the recipe's.")] = None,
    preset: Annotated[Preset | None, typer.Option(help="Size of network and run. Default: the recipe's.")] = None,
    seeds: Annotated[int | None, typer.Option(help="Number of seeds. Default: the recipe's.", min=1, max=1000)] = None,
    steps: StepsFlag = None,
    batch_size: BatchFlag = None,
    baseline_steps: Annotated[int | None, typer.Option(help="Training steps of baselines.")] = None,
    baseline_batch_size: Annotated[int | None, typer.Option(help="Pairs per training step of baselines.")] = None,
    max_queries: MaxQueriesFlag = None,
    device: DeviceFlag = "auto",
) -> None:
    """Makes a table of the paper, or your own, from folders of embeddings as described in a recipe."""
    chosen = load_recipe(file).changed(
        only=None if only is None else names_of(only),
        methods=None if methods is None else names_of(methods),
        preset=preset,
        seeds=None if seeds is None else range(seeds),
        flow=given(steps=steps, batch_size=batch_size),
        baselines=given(steps=baseline_steps, batch_size=baseline_batch_size),
        max_queries=max_queries,
    )
    _run_recipe(chosen, data, out, device)


def _run(
    data: list[dict[str, Any]],
    out: Path,
    preset: Preset,
    seeds: int,
    steps: int | None,
    batch_size: int | None,
    max_queries: int | None,
    device: str,
    **changes: Any,
) -> None:
    """Runs the recipe that the flags of a command describe."""
    sets = [RecipeData(**{name: str(value) for name, value in part.items()}) for part in data]
    run = given(steps=steps, batch_size=batch_size)
    made = Recipe(data=sets, seeds=range(seeds), preset=preset, flow=run, max_queries=max_queries, **changes)
    _run_recipe(made, Path(), out, device)


def _run_recipe(chosen: Recipe, base: Path, out: Path, device: str) -> None:
    with continued_later():
        page = run_recipe(chosen, base, out, device=device, announce=lambda words: typer.echo(words, err=True))
    typer.echo(f"Wrote {page}")


@app.command(epilog="Example: python -m benchmarks.methods activations --images photos/ --embedded photos_embedded/")
def activations(
    images: Annotated[Path, typer.Option(help="The images that were embedded.")],
    embedded: Annotated[Path, typer.Option(help="The folder that geoflow embed wrote.")],
    model: Annotated[str, typer.Option(help="The open_clip model that embedded them.")] = DEFAULT_MODEL,
    pretrained: Annotated[str | None, typer.Option(help="Tag of its weights.")] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="File of its weights.")] = None,
    batch_size: Annotated[int, typer.Option(help="Images at once.", min=1)] = 64,
    device: DeviceFlag = "auto",
) -> None:
    """Writes the inputs of an encoder's last projections beside its embeddings; bayesvlm needs them."""
    encoder = OpenClipEncoder.load(model, pretrained, checkpoint, device=device)
    write_activations(encoder, images, embedded, batch_size)
    typer.echo(f"Wrote {embedded}")


def study_names() -> list[str]:
    """The names of all studies."""
    return sorted(module.name for module in pkgutil.iter_modules(studies.__path__))


@app.command()
def study(name: Annotated[str, typer.Argument(help=f"One of {', '.join(study_names())}.")]) -> None:
    """Runs a study of quality, which takes minutes to hours, and prints its tables."""
    if name not in study_names():
        raise ValueError(f"study must be one of {', '.join(study_names())}, got {name!r}")
    print(importlib.import_module(f"{studies.__name__}.{name}").run())


def with_command(arguments: list[str]) -> list[str]:
    """The arguments, behind `score` if they begin with names of methods instead of a command."""
    first = arguments[0] if arguments else "--help"
    known = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    return arguments if first in known or first.startswith("-") else ["score", *arguments]


def main(arguments: list[str]) -> None:
    """Runs the command that the arguments name, or `score` on the methods that they name."""
    app(with_command(arguments), prog_name="python -m benchmarks.methods")
