"""`geoflow evaluate`: reads flags, calls the library, prints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from geoflow_fast.cli.base import (
    Commands,
    Conditional,
    DeviceFlag,
    JsonFlag,
    OutFolderFlag,
    SeedFlag,
    continued_later,
    given,
    model_option,
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
    from geoflow_fast.evaluation.results import Comparison
    from geoflow_fast.jobs.queries import Naming

MaxQueriesFlag = Annotated[int | None, typer.Option(help="Largest number of queries, drawn by the seed.")]
BinsFlag = Annotated[int, typer.Option(help="Number of bins of the uncertainty.")]
ResamplesFlag = Annotated[int, typer.Option(help="Bootstrap resamples for intervals; 0 for no intervals.")]

MAIN_COLUMNS = ("method", "score", "AUROC", "AURC", "Spearman", "Recall@1", "NLL, nats", "ECE")
"""The columns that are printed; pages and files have the rest."""

app = Commands()


@app.command(
    epilog="Example: geoflow evaluate --model runs/first --pairs test/ --held-out val/ --train embeddings/ --out out/",
)
def evaluate(
    out: OutFolderFlag,
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
    model: Annotated[
        Path | None,
        model_option("Folder of a trained flow, with the head beside it, or of a head; without it, no models."),
    ] = None,
    train: Annotated[
        Path | None, typer.Option(help="Folder of training pairs: the ladder's bank of queries, and those of knn.")
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated names: rerank, entropy, entropy_paper, epistemic, ladder, max_softmax, margin, "
            "softmax_entropy or knn. Default: all that can be made but entropy_paper."
        ),
    ] = None,
    direction: Annotated[
        Conditional | None, typer.Option(help="Only this direction. Default: both; --qrels needs one.")
    ] = None,
    max_queries: MaxQueriesFlag = None,
    bins: BinsFlag = 10,
    resamples: ResamplesFlag = 1000,
    seed: SeedFlag = 0,
    device: DeviceFlag = "auto",
    as_json: JsonFlag = False,
) -> None:
    """Compares uncertainties of retrieval: which method knows when plain cosine search is wrong?

    Writes results.json, results.parquet, figures and report.html. All tuning is done on the held-out pairs.
    """
    judged = given(queries=queries, gallery=gallery, qrels=qrels, ids=ids, query_ids=query_ids)
    if not (pairs or images or judged):
        raise ValueError("evaluate needs --pairs or --qrels")
    if judged and (pairs or images or texts or image_index):
        raise ValueError("give test pairs, or --queries, --gallery and --qrels, not both")
    from geoflow_fast.data.pairs import open_pairs
    from geoflow_fast.evaluation import job

    choices: dict[str, Any] = {"max_queries": max_queries, "bins": bins, "resamples": resamples, "seed": seed}
    choices["device"] = device
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
    print_comparison(study, out, as_json=as_json)


def print_comparison(study: Comparison, out: Path, *, as_json: bool) -> None:
    """Prints the comparison that was written to the folder `out`: its JSON, or tables and verdicts."""
    from geoflow_fast.evaluation.job import PAGE
    from geoflow_fast.evaluation.results import RESULTS_JSON
    from geoflow_fast.evaluation.verdict import verdict

    if as_json:
        print((out / RESULTS_JSON).read_text(), end="")
        return
    for name in study.directions:
        print_rows(f"{name}, plain Recall@1 {study.of(name)[0].plain_recall:.3f}", study.table(name))
        typer.echo(verdict(study.of(name)))
    typer.echo(f"Wrote {out / PAGE}")


def _judged_files(queries: Path | None, gallery: Path | None, qrels: Path | None, names: Naming) -> JudgedFiles:
    """The files of judgements, which all have to be given."""
    from geoflow_fast.evaluation.job import JudgedFiles

    if queries is None or gallery is None or qrels is None:
        raise ValueError("--queries, --gallery and --qrels go together: rows, and judgements of them")
    return JudgedFiles(queries, gallery, qrels, names)


def names_of(text: str) -> list[str]:
    """Splits a list of names at its commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def print_rows(title: str, rows: list[dict[str, object]]) -> None:
    """Prints the main columns of the rows, which fit a terminal; a missing value is a dash."""
    from geoflow_fast.evaluation.report import shown

    columns = [name for name in dict.fromkeys(name for row in rows for name in row) if name in MAIN_COLUMNS]
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*(shown(row.get(name)) for name in columns))
    Console().print(table)
