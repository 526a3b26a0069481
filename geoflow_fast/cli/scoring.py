"""`geoflow entropy`, `geoflow density` and `geoflow rerank`: scores of queries or pairs, as a Parquet file."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from geoflow_fast.cli.base import (
    BlockFlag,
    Commands,
    DeviceFlag,
    DirectionFlag,
    JsonFlag,
    ModelFlag,
    OutFileFlag,
    OverwriteFlag,
    PrecisionFlag,
    ProbeSeedFlag,
    RankLayout,
    ScorerFlag,
    continued_later,
    given,
    model_option,
    print_json,
)
from geoflow_fast.cli.embeddings import (
    GalleryFlag,
    IdsFlag,
    ImageIndexFlag,
    ImagesFlag,
    NormalizeFlag,
    PairIdsFlag,
    PairsFlag,
    QueriesFlag,
    QueryIdsFlag,
    SearchedImagesFlag,
    SearchedTextsFlag,
    TextsFlag,
    naming,
    searched,
)
from geoflow_fast.runtime.words import one_line

if TYPE_CHECKING:
    from geoflow_fast.retrieval.entropy import RetrievalEntropy
    from geoflow_fast.retrieval.evidence import Rung

app = Commands()

PAPER_DEFAULTS = (
    "kappa 100 and guidance 3 are the paper's: probabilities may be far off, and only their order means something; "
    "`geoflow train` fits them, or give --kappa and --guidance"
)


@app.command(
    epilog="Example: geoflow entropy --model runs/first --queries texts.npy --gallery img_emb/ --out scores.parquet"
)
def entropy(
    model: ScorerFlag,
    out: OutFileFlag,
    queries: QueriesFlag = None,
    gallery: GalleryFlag = None,
    images: SearchedImagesFlag = None,
    texts: SearchedTextsFlag = None,
    direction: DirectionFlag = "t2i",
    fast: Annotated[
        bool, typer.Option("--fast/--no-fast", help="The cheapest settings that rank queries no worse.")
    ] = False,
    samples: Annotated[int | None, typer.Option(help="Samples per query. Default: 50; --fast: 40.")] = None,
    kappa: Annotated[
        float | None, typer.Option(help="Concentration of the kernel. Default: the model's, else 100.")
    ] = None,
    guidance: Annotated[float | None, typer.Option(help="Strength of guidance. Default: the model's, else 3.")] = None,
    steps: Annotated[int | None, typer.Option(help="Solver steps. Default: 50; --fast: 8.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the base noise. Default: 0.")] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Also write this many most probable items: lists top_index and top_prob.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Write histograms of entropy and risk bound to this PNG file.")
    ] = None,
    block: BlockFlag = 64,
    layout: Annotated[
        RankLayout,
        typer.Option(help="What the ranks started by torchrun divide among them: the gallery or the queries."),
    ] = "auto",
    normalize: NormalizeFlag = False,
    ids: IdsFlag = None,
    query_ids: QueryIdsFlag = None,
    overwrite: OverwriteFlag = False,
    device: DeviceFlag = "auto",
    precision: PrecisionFlag = "float32",
    as_json: JsonFlag = False,
) -> None:
    """Computes the retrieval entropy of queries: how ambiguous each of them is over a gallery.

    Columns: query, entropy (nats), map_index, map_prob, risk_lower_bound.
    """
    from geoflow_fast.jobs import entropy as scoring
    from geoflow_fast.runtime import plots

    queries, gallery = searched(queries, gallery, images, texts, direction)
    kind = scoring.model_kind(model)
    if kind != scoring.FLOW:
        refuse_flags(kind, fast=fast or None, samples=samples, kappa=kappa, guidance=guidance, steps=steps, seed=seed)
        refuse_flags(kind, precision=None if precision == "float32" else precision)
    if plot is not None:
        plots.need_matplotlib()  # reports a missing matplotlib now rather than after hours of scoring
    chosen = given(n_samples=samples, kappa=kappa, guidance=guidance, n_steps=steps, seed=seed, top_k=top_k)
    with continued_later() as world:
        chosen |= {"fast": fast, "device": device, "precision": precision, "normalize": normalize}
        scorer = scoring.open_scorer(model, gallery, direction, world=world, **chosen)
        steered = kind == scoring.FLOW and (kappa is None or guidance is None)
        fitted = scoring.stored_bandwidth(model, scorer.flow, direction) if steered else None
        options: dict[str, Any] = {
            "with_top": top_k is not None,
            "block": block,
            "overwrite": overwrite,
            "layout": layout,
        }
        options |= {"normalize": normalize, "naming": naming(query_ids, ids)}
        if steered and fitted is None and world.is_main:
            options["when_checked"] = lambda: warn(f"{model} has no stored kappa and guidance, so {PAPER_DEFAULTS}")
        summary = scoring.score_file(scorer, queries, out, **options)
    if not world.is_main:
        return
    if plot is not None:
        scoring.draw_scores(out, summary, plot)
    print_summary(
        summary,
        as_json,
        f"{summary.queries} queries over {summary.items} items",
        {"entropy H, nats": summary.entropy, "risk lower bound": summary.risk_lower_bound},
        *([] if fitted is None else [bandwidth_line(fitted, scorer.kappa, scorer.sampling.guidance)]),
        f"an item with probability 1/2 or more: {summary.half_or_more:.1%} of the queries{half_right(fitted, scorer)}",
        f"if the posterior is right, best guesses are wrong for at least {summary.mean_risk_lower_bound:.1%} of the "
        "queries",
        f"Wrote {out}" + (f" and {plot}" if plot is not None else ""),
    )


@app.command(epilog="Example: geoflow density --model runs/first --pairs embeddings/ --out densities.parquet")
def density(
    model: ModelFlag,
    out: OutFileFlag,
    pairs: PairsFlag = None,
    images: ImagesFlag = None,
    texts: TextsFlag = None,
    image_index: ImageIndexFlag = None,
    fast: Annotated[
        bool, typer.Option("--fast/--no-fast", help="Cheaper, with more noise and bias; for ranking.")
    ] = False,
    paper: Annotated[bool, typer.Option("--paper/--no-paper", help="The paper's settings.")] = False,
    steps: Annotated[int | None, typer.Option(help="Solver steps. Default: 10; --paper: 50.")] = None,
    probes: Annotated[
        int | None, typer.Option(help="Probes per step; two or more add a column stderr. Default: 1.")
    ] = None,
    solver: Annotated[
        str | None, typer.Option(help="euler, midpoint, ab2 or rk4. Default: midpoint; --fast: ab2.")
    ] = None,
    seed: ProbeSeedFlag = 0,
    normalize: NormalizeFlag = False,
    ids: PairIdsFlag = None,
    block: Annotated[int, typer.Option(help="Pairs per saved block.")] = 256,
    overwrite: OverwriteFlag = False,
    device: DeviceFlag = "auto",
    precision: PrecisionFlag = "float32",
    as_json: JsonFlag = False,
) -> None:
    """Computes the log-densities and the epistemic score of pairs.

    Columns, in nats: pair, joint, text_given_image, image_given_text, image, text, pmi, score. If the model has
    held-out pairs, p_value is the share of them that are as unlike the training data.
    """
    from geoflow_fast.data.pairs import open_pairs
    from geoflow_fast.flow.precision import settled_precision
    from geoflow_fast.jobs.density import UNUSUAL, density_file
    from geoflow_fast.likelihood.settings import FAST_DENSITY, PAPER_DENSITY, DensitySettings
    from geoflow_fast.runtime.device import usable_device

    if fast and paper:
        raise ValueError("--fast and --paper exclude each other")
    preset = FAST_DENSITY if fast else PAPER_DENSITY if paper else DensitySettings()
    chosen: dict[str, Any] = {"precision": settled_precision(precision, usable_device(device))}
    chosen |= given(n_steps=steps, n_probes=probes, solver=solver)
    with continued_later() as world:
        summary = density_file(
            model,
            open_pairs(pairs, images, texts, image_index, normalize=normalize, world=world),
            out,
            dataclasses.replace(preset, **chosen),
            seed=seed,
            device=device,
            block=block,
            overwrite=overwrite,
            world=world,
            ids=ids,
        )
    if not world.is_main:
        return
    unusual = (
        f"p-value of {UNUSUAL} or less: {summary.unusual or 0:.1%} of the pairs; {UNUSUAL:.0%} are expected of pairs "
    )
    unusual += f"like the model's {summary.held_out} held-out ones"
    if not summary.held_out:
        warn(f"{model} has no held-out pairs, so nats compare only within this file; `geoflow train` stores some")
    lines = [unusual] if summary.held_out else []
    print_summary(summary, as_json, f"{summary.pairs} pairs, nats", summary.quantiles, *lines, f"Wrote {out}")


@app.command(
    epilog="Example: geoflow rerank --model runs/first --queries texts.npy --gallery img_emb/ --out ranked.parquet"
)
def rerank(
    out: OutFileFlag,
    model: Annotated[
        Path | None, model_option("Folder of a flow or a head. Default: none; cosines and hubs are the evidence.")
    ] = None,
    queries: QueriesFlag = None,
    gallery: GalleryFlag = None,
    images: SearchedImagesFlag = None,
    texts: SearchedTextsFlag = None,
    calibration: Annotated[
        Path | None,
        typer.Option(
            help="JSON file of the calibration. Default: the model's, fitted to this gallery on the pairs that "
            "training held out."
        ),
    ] = None,
    held_out: Annotated[
        Path | None, typer.Option(help="Folder of held-out pairs to calibrate on first; the calibration is saved.")
    ] = None,
    qrels: Annotated[
        Path | None,
        typer.Option(
            help="Instead of --held-out: .parquet or .csv of judgements (query, item, grade) to calibrate on."
        ),
    ] = None,
    judged: Annotated[
        Path | None, typer.Option(help="With --qrels: the judged queries, .npy file or folder of .npy shards.")
    ] = None,
    judged_ids: Annotated[
        Path | None, typer.Option(help="With --qrels: the ids by which it names the queries. Default: row numbers.")
    ] = None,
    head: Annotated[
        Path | None, model_option("Folder of a head. Default: the folder head of the model, if there is one.")
    ] = None,
    bank: Annotated[
        Path | None,
        typer.Option(help="Typical queries to correct for hubs by. Default: those of the calibration."),
    ] = None,
    budget: Annotated[
        float | None, typer.Option(help="Largest share of the queries for which the flow is asked. Default: all.")
    ] = None,
    shortlist_by: Annotated[str, typer.Option(help="What chooses the items: cosine or head.")] = "cosine",
    direction: DirectionFlag = "t2i",
    shortlist: Annotated[
        int | None,
        typer.Option(
            help="Items to re-rank per query. Default: 128, or 512 in galleries of up to 20,000; a flow sees 32 of "
            "them."
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="Solver steps per log-density.")] = 6,
    probes: Annotated[int, typer.Option(help="Probes per log-density.")] = 1,
    seed: ProbeSeedFlag = 0,
    normalize: NormalizeFlag = False,
    ids: IdsFlag = None,
    query_ids: QueryIdsFlag = None,
    block: BlockFlag = 64,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite/--no-overwrite", help="Replace the output of another job or a calibration on other pairs."
        ),
    ] = False,
    device: DeviceFlag = "auto",
    precision: PrecisionFlag = "float32",
    as_json: JsonFlag = False,
) -> None:
    """Re-ranks the items nearest to each query and gives the probability that each of them is the right one.

    Columns: query, index and prob (lists), answer, p_answer, p_outside, entropy (nats), risk_lower_bound.
    """
    from geoflow_fast.jobs import rerank as rerank_job
    from geoflow_fast.jobs.queries import open_queries

    queries, gallery = searched(queries, gallery, images, texts, direction)
    if (qrels is None) != (judged is None):
        raise ValueError("--qrels and --judged go together: the judgements, and the queries that they name")
    if judged_ids is not None and qrels is None:
        raise ValueError("--judged-ids are the ids by which --qrels names queries; give both")
    if qrels is not None and held_out is not None:
        raise ValueError("give --held-out pairs or --qrels, not both")
    chosen: dict[str, Any] = {"shortlist": shortlist, "n_steps": steps, "n_probes": probes, "seed": seed}
    chosen |= {"head": head, "bank": bank, "budget": budget, "shortlist_by": shortlist_by, "normalize": normalize}
    chosen["precision"] = precision
    with continued_later() as world:
        reranker = rerank_job.open_reranker(model, gallery, direction, device=device, world=world, **chosen)
        open_queries(
            queries, reranker.query_dim, world, normalize=normalize
        )  # reports bad queries before the calibration starts
        rewrite = {"normalize": normalize, "overwrite": overwrite}
        if model is None and calibration is None and (held_out is not None or qrels is not None):
            calibration = out.with_name(f"{out.name}.calibration.json")
        if qrels is not None and judged is not None:
            kept = calibration or model
            assert kept is not None
            names = naming(judged_ids, ids)
            origin = rerank_job.calibrate_on_judgements(reranker, kept, qrels, judged, naming=names, **rewrite)
        else:
            origin = rerank_job.settle_calibration(reranker, model, calibration, held_out, **rewrite)
        if world.is_main and reranker.calibration is None:
            warn(f"uncalibrated: {reranker.plain_weights}; {origin}. Give --held-out pairs to calibrate on")
        options: dict[str, Any] = {"normalize": normalize, "naming": naming(query_ids, ids)}
        summary = rerank_job.rerank_file(reranker, queries, out, block=block, overwrite=overwrite, **options)
    if not world.is_main:
        return
    expected = f"expected share of right answers of plain search: {summary.expected_recall:.1%}"
    print_summary(
        summary,
        as_json,
        f"{summary.queries} queries over {summary.items} items",
        {"plain answer is right": summary.p_answer, "not in shortlist": summary.p_outside},
        *([origin] if summary.calibrated else []),
        *(rung_line(rung) for rung in reranker.rungs),
        *([expected] if summary.calibrated else []),
        f"re-ranking changes the answer of {summary.changed:.1%} of the queries",
        f"Wrote {out}",
    )


def refuse_flags(kind: str, **flags: Any) -> None:
    """Raises a ValueError that names a flag which was given although this kind of model has no such setting."""
    for name in given(**flags):
        raise ValueError(f"--{name} is a setting of flows, but --model holds a {kind}")


def warn(words: str) -> None:
    """Prints a warning to standard error."""
    typer.echo(f"geoflow: warning: {one_line(words)}", err=True)


def bandwidth_line(fitted: dict[str, Any], kappa: float, guidance: float) -> str:
    """Where kappa and guidance come from, in a line."""
    values = {"kappa": kappa, "guidance": guidance}
    stored = " and ".join(f"{name} {value:.3g}" for name, value in values.items() if fitted[name] == value)
    queries = f"{fitted['queries']} held-out queries over {fitted['items']} items"
    return f"{stored} as fitted at the end of training on {queries}"


def half_right(fitted: dict[str, Any] | None, scorer: RetrievalEntropy) -> str:
    """How often an item with probability 1/2 or more was right for held-out queries, to be added to a line: nothing if
    kappa or guidance are not those of the held-out queries."""
    if fitted is None or not fitted["half"]:
        return ""
    if (fitted["kappa"], fitted["guidance"]) != (scorer.kappa, scorer.sampling.guidance):
        return ""
    such = round(fitted["half"] * fitted["queries"])
    return f"; of {such} such held-out queries {round(such * fitted['half_right'])} were answered rightly"


def rung_line(rung: Rung) -> str:
    """What one rung of evidence brought, in a line."""
    kept = "kept" if rung.kept else "left out"
    return f"evidence {rung.name}: {rung.gain:+.3f} +- {rung.stderr:.3f} nats a query, {rung.cost * 1e3:.2f} ms, {kept}"


def print_summary(
    summary: Any,
    as_json: bool,
    title: str,
    quantiles: dict[str, dict[str, float]],
    *lines: str,
) -> None:
    """Prints what a job has computed: as JSON, or as a table of quantiles and the lines below it."""
    if as_json:
        print_json(dataclasses.asdict(summary))
        return
    table = Table("", *next(iter(quantiles.values())), title=title)
    for name, values in quantiles.items():
        table.add_row(name, *(f"{value:.3f}" for value in values.values()))
    Console().print(table)
    for line in lines:
        typer.echo(line)
