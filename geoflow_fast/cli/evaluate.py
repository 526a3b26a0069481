"""`geoflow evaluate` and its subcommands: reads flags, calls the library, prints."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from geoflow_fast.cli.base import (
    Commands,
    Conditional,
    ConfigFlag,
    DebugFlag,
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
from geoflow_fast.cli.embeddings import (
    GalleryFlag,
    ImageIndexFlag,
    ImagesFlag,
    NormalizeFlag,
    QueriesFlag,
    QueryIdsFlag,
    TextsFlag,
    naming,
)

if TYPE_CHECKING:
    from geoflow_fast.evaluation.job import JudgedFiles
    from geoflow_fast.jobs.queries import Naming

SeedsFlag = Annotated[int, typer.Option(help="Number of seeds to train and score with.", min=1, max=1000)]
StepsFlag = Annotated[int | None, typer.Option(help="Training steps of the flow.")]
BatchFlag = Annotated[int | None, typer.Option(help="Pairs per training step.")]
MaxQueriesFlag = Annotated[int | None, typer.Option(help="Largest number of queries, drawn by the seed.")]
BinsFlag = Annotated[int, typer.Option(help="Number of bins of the uncertainty.")]
ResamplesFlag = Annotated[int, typer.Option(help="Bootstrap resamples for intervals; 0 for no intervals.")]

MAIN_COLUMNS = ("method", "score", "AUROC", "AURC", "Spearman", "Recall@1", "NLL, nats", "ECE")
"""The columns that are printed; pages and files have the rest."""

app = Commands(
    invoke_without_command=True,
    no_args_is_help=True,
    epilog="Example: geoflow evaluate --model runs/first --pairs test/ --held-out val/ --train embeddings/ --out out/",
)


@app.callback()
def evaluate(
    context: typer.Context,
    pairs: Annotated[Path | None, typer.Option(help="Folder of test pairs (img_emb/, text_emb/).")] = None,
    images: ImagesFlag = None,
    texts: TextsFlag = None,
    image_index: ImageIndexFlag = None,
    queries: QueriesFlag = None,
    gallery: GalleryFlag = None,
    qrels: Annotated[
        Path | None,
        typer.Option(
            help="Instead of test pairs: .parquet or .csv of judgements (query, item, grade) of --queries and "
            "--gallery, searched in --direction."
        ),
    ] = None,
    ids: Annotated[
        Path | None,
        typer.Option(
            help="With --qrels: the ids by which it names the gallery's rows: .npy, .txt with one on each line, "
            ".parquet or .parquet:COLUMN. Default: row numbers."
        ),
    ] = None,
    query_ids: QueryIdsFlag = None,
    normalize: NormalizeFlag = False,
    held_out: Annotated[
        Path | None,
        typer.Option(help="Folder of held-out pairs that every method is tuned on. Default: the model's."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for results; the same command continues a stopped run.")
    ] = None,
    model: Annotated[
        Path | None,
        model_option("Folder of a trained flow, with the head beside it, or of a head; without it, no models."),
    ] = None,
    train: Annotated[
        Path | None, typer.Option(help="Folder of training pairs, for baselines that are trained.")
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated names: rerank, ladder, entropy, margin, ...; or all. Default: those that need no "
            "long training of their own."
        ),
    ] = None,
    direction: Annotated[
        Conditional | None, typer.Option(help="Only this direction. Default: both; --qrels needs one.")
    ] = None,
    max_queries: MaxQueriesFlag = None,
    bins: BinsFlag = 10,
    resamples: ResamplesFlag = 1000,
    baseline_steps: Annotated[int | None, typer.Option(help="Training steps of baselines. Default: their own.")] = None,
    baseline_batch_size: Annotated[
        int | None, typer.Option(help="Pairs per training step of baselines. Default: their own.")
    ] = None,
    seed: SeedFlag = 0,
    device: DeviceFlag = "auto",
    as_json: JsonFlag = False,
    config: ConfigFlag = None,  # noqa: ARG001, its callback acts
    debug: DebugFlag = False,  # noqa: ARG001, likewise
) -> None:
    """Compares uncertainties of retrieval: which method knows when plain cosine search is wrong?

    Writes results.json, results.parquet, figures and report.html. All tuning is done on the held-out pairs.
    """
    if context.invoked_subcommand is not None:
        return
    judged = given(queries=queries, gallery=gallery, qrels=qrels, ids=ids, query_ids=query_ids)
    if out is None or not (pairs or images or judged):
        missing = {"--pairs or --qrels": pairs or images or judged, "--out": out}
        raise ValueError(f"evaluate needs {', '.join(name for name, value in missing.items() if not value)}")
    if judged and (pairs or images or texts or image_index):
        raise ValueError("give test pairs, or --queries, --gallery and --qrels, not both")
    from geoflow_fast.data.pairs import open_pairs
    from geoflow_fast.evaluation import job
    from geoflow_fast.evaluation.results import RESULTS_JSON
    from geoflow_fast.evaluation.verdict import verdict

    choices: dict[str, Any] = {"max_queries": max_queries, "bins": bins, "resamples": resamples, "seed": seed}
    choices |= {"device": device, "run": given(steps=baseline_steps, batch_size=baseline_batch_size)}
    if methods is not None:
        choices["names"] = names_of(methods)
    if direction is not None:
        choices["directions"] = (direction,)
    with continued_later():
        study = job.evaluate_folders(
            model,
            _judged_files(queries, gallery, qrels, naming(query_ids, ids))
            if judged
            else open_pairs(pairs, images, texts, image_index, normalize=normalize),
            held_out,
            train,
            out,
            job.EvaluationSettings(**choices),
            normalize=normalize,
            announce=lambda line: typer.echo(line, err=True),
        )
    if as_json:
        print((out / RESULTS_JSON).read_text(), end="")
        return
    for name in study.directions:
        _print_rows(f"{name}, plain Recall@1 {study.of(name)[0].plain_recall:.3f}", study.table(name))
        typer.echo(verdict(study.of(name)))
    typer.echo(f"Wrote {out / job.PAGE}")


@app.command(
    "zero-shot",
    epilog="Example: geoflow evaluate zero-shot --model runs/first --images img_emb/ --labels labels.npy --prompts "
    "prompts.npy --out report",
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
    from geoflow_fast.evaluation import job

    if (held_out_images is None) != (held_out_labels is None):
        raise ValueError("--held-out-images and --held-out-labels go together")
    tuned = None if held_out_images is None or held_out_labels is None else (held_out_images, held_out_labels)
    options: dict[str, Any] = {"bins": bins, "resamples": resamples, "seed": seed, "device": device}
    study = job.zero_shot_folders(model, images, labels, prompts, out, held_out=tuned, train=train, **options)
    if as_json:
        components = [dataclasses.asdict(component) for component in study.components]
        print_json({"accuracy": study.accuracy, "components": components})
        return
    _print_rows(f"{len(study.correct)} images, accuracy {study.accuracy:.3f}", [c.row() for c in study.components])
    typer.echo(f"Wrote {out / job.PAGE}")


@app.command(
    epilog="Example: geoflow evaluate ablation guidance --train embeddings/ --held-out val/ --pairs test/ --out ab"
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


@app.command(epilog="Example: geoflow evaluate backbone clip/ siglip/ --out backbones")
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


@app.command(epilog="Example: geoflow evaluate recipe recipes/calibration.toml --data embeddings/ --out calibration")
def recipe(
    file: Annotated[Path, typer.Argument(help="TOML file, such as those in recipes/.")],
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
    from geoflow_fast.evaluation import recipe as recipes

    chosen = recipes.load_recipe(file).changed(
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
    from geoflow_fast.evaluation.recipe import Recipe, RecipeData

    sets = [RecipeData(**{name: str(value) for name, value in part.items()}) for part in data]
    run = given(steps=steps, batch_size=batch_size)
    made = Recipe(data=sets, seeds=range(seeds), preset=preset, flow=run, max_queries=max_queries, **changes)
    _run_recipe(made, Path(), out, device)


def _run_recipe(chosen: Any, base: Path, out: Path, device: str) -> None:
    from geoflow_fast.evaluation.recipe import run_recipe

    with continued_later():
        page = run_recipe(chosen, base, out, device=device, announce=lambda words: typer.echo(words, err=True))
    typer.echo(f"Wrote {page}")


def _judged_files(queries: Path | None, gallery: Path | None, qrels: Path | None, names: Naming) -> JudgedFiles:
    """The files of judgements, which all have to be given."""
    from geoflow_fast.evaluation.job import JudgedFiles

    if queries is None or gallery is None or qrels is None:
        raise ValueError("--queries, --gallery and --qrels go together: rows, and judgements of them")
    return JudgedFiles(queries, gallery, qrels, names)


def names_of(text: str) -> list[str]:
    """Splits a list of names at its commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def _print_rows(title: str, rows: list[dict[str, object]]) -> None:
    """Prints the main columns of the rows, which fit a terminal; a missing value is a dash."""
    from geoflow_fast.evaluation.report import shown

    columns = [name for name in dict.fromkeys(name for row in rows for name in row) if name in MAIN_COLUMNS]
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*(shown(row.get(name)) for name in columns))
    Console().print(table)
