"""The `geoflow` command: reads flags, calls the library, prints. No logic of its own."""

from __future__ import annotations

import dataclasses
import json
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

import geoflow_fast
from geoflow_fast.cli import base, evaluate
from geoflow_fast.cli.base import INTERRUPTED, Commands, DebugFlag, Direction, JsonFlag, Preset, continued_later
from geoflow_fast.ops import dispatch
from geoflow_fast.retrieval.entropy import FAST

if TYPE_CHECKING:
    from geoflow_fast.jobs.entropy import ScoreSummary
    from geoflow_fast.jobs.rerank import RerankSummary
    from geoflow_fast.training.loop import TrainReport


app = Commands(pretty_exceptions_enable=False)


app.add_typer(evaluate.app, name="evaluate")


class Posterior(str, Enum):
    """What is normalised over the gallery."""

    likelihood = "likelihood"
    bayes = "bayes"


class Layout(str, Enum):
    """What the ranks of a job share."""

    auto = "auto"
    gallery = "gallery"
    queries = "queries"


VersionFlag = Annotated[bool, typer.Option("--version", help="Show the version and exit.")]


@app.callback(
    invoke_without_command=True,
    epilog="Exit status: 0 done, 2 bad input, 130 interrupted, 143 terminated. --config reads flags from a TOML file.",
)
def _about(context: typer.Context, version: VersionFlag = False, debug: DebugFlag = False) -> None:  # noqa: ARG001
    """Uncertainty for frozen vision-language embeddings, from one flow on the product of two spheres."""
    if version:
        typer.echo(f"geoflow_fast {geoflow_fast.__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command(epilog="Example: geoflow doctor --json")
def doctor(as_json: JsonFlag = False) -> None:
    """Shows what this machine can run: the backends of every operation, CPU features, torch, triton and CUDA."""
    from geoflow_fast.cli import doctor as check

    facts, table = check.machine_facts(), geoflow_fast.backends()
    if as_json:
        _print_json({"machine": facts, "backends": table})
        return
    console = Console()
    machine = Table("", "", title="This machine", show_header=False)
    for name, value in facts.items():
        machine.add_row(name, value)
    console.print(machine)
    reasons = check.numbered_reasons(table)
    rows = Table("operation", *dispatch.BACKENDS, title="Backends")
    for op, states in table.items():
        rows.add_row(op, *(f"[{reasons[state]}]" if state in reasons else state for state in states.values()))
    console.print(rows, markup=False)
    for reason, number in reasons.items():
        console.print(f"[{number}] {reason}", markup=False)


@app.command(epilog="Example: geoflow demo --out demo_output")
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the report; created if missing.")] = Path("demo_output"),
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    steps: Annotated[int | None, typer.Option(help="Training steps; fewer are faster but give worse results.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Trains a flow on synthetic pairs with known densities and reports how good its uncertainties are, with figures.

    Takes under four minutes on two cores and downloads nothing. Ctrl-C saves; the same command continues.
    """
    from geoflow_fast import demo as show

    outcome = show.run(out, seed, steps, lambda words: typer.echo(f"{words} ...", err=as_json))
    if outcome is None:
        typer.echo(f"stopped; {out} holds the state: run the same command to continue", err=True)
        raise typer.Exit(INTERRUPTED)
    if as_json:
        _print_json(show.summary(outcome))
        return
    table = Table("expected", "found", "at least", "", title="Against the truth")
    checks = outcome.checks()
    for check in checks:
        table.add_row(check.name, f"{check.value:.3f}", f"{check.floor:.2f}", "ok" if check.holds else "MISSED")
    Console().print(table)
    typer.echo(f"{sum(check.holds for check in checks)} of {len(checks)} expectations hold")
    typer.echo(f"Wrote {out / show.REPORT}")


class EncoderKind(str, Enum):
    """What turns images and captions into embeddings."""

    open_clip = "open_clip"
    colours = "colours"


@app.command(
    epilog="Example: geoflow embed --images photos/ --out embeddings/ --model ViT-H-14 --pretrained laion2b_s32b_b79k"
)
def embed(
    images: Annotated[
        Path,
        typer.Option(
            help="Folder of images or of .tar shards, a .tar file, or a .csv, .tsv or .parquet table of paths."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Output folder; the same command continues a stopped run.")],
    encoder: Annotated[
        EncoderKind,
        typer.Option(help="open_clip; or colours, which needs no weights and sees only colours, for a first try."),
    ] = EncoderKind.open_clip,
    model: Annotated[
        str | None, typer.Option(help="Name of an open_clip model, local-dir:FOLDER or hf-hub:NAME. Default: ViT-H-14.")
    ] = None,
    pretrained: Annotated[
        str | None,
        typer.Option(help="open_clip tag of the weights, downloaded once. Default: the paper's, for its models."),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="Local file of weights, safetensors or torch; no code in it is run, nothing is downloaded."),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Images or texts per batch.")] = 64,
    workers: Annotated[int, typer.Option(help="Threads that read and resize images.")] = 4,
    shard_rows: Annotated[int, typer.Option(help="Images per shard; a kill loses at most the current shard.")] = 16384,
    path_column: Annotated[str, typer.Option(help="Table column with the paths of images.")] = "path",
    caption_column: Annotated[
        str, typer.Option(help='Table column with the captions; "" to embed images only.')
    ] = "caption",
    dtype: Annotated[str, typer.Option(help="Type of the stored embeddings: float32 or float16.")] = "float32",
    precision: Annotated[
        str, typer.Option(help="float32, float16 or bfloat16 (mixed precision); auto: float16 on a GPU, else float32.")
    ] = "auto",
    pre_projection: Annotated[
        bool, typer.Option("--pre-projection", help="Also write the last projections and the activations before them.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the output of another job.")] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    as_json: JsonFlag = False,
) -> None:
    """Embeds images and their captions into a folder of pairs for train, density and the other commands.

    Images that cannot be read are skipped and listed in skipped.csv.
    """
    from geoflow_fast.encoders.registry import open_encoder
    from geoflow_fast.encoders.sources import open_images
    from geoflow_fast.jobs import embed as embed_job

    source = open_images(images, path_column=path_column, caption_column=caption_column)
    with continued_later() as world:
        if world.size > 1:
            raise ValueError("geoflow embed runs in one process; give each rank images and an output of its own")
        chosen = open_encoder(
            encoder.value,
            model=model,
            pretrained=pretrained,
            checkpoint=checkpoint,
            device=device,
            precision=precision,
        )
        summary = embed_job.embed_images(
            source,
            chosen,
            out,
            batch_size=batch_size,
            workers=workers,
            shard_rows=shard_rows,
            dtype=dtype,
            pre_projection=pre_projection,
            overwrite=overwrite,
        )
    if as_json:
        print(json.dumps(dataclasses.asdict(summary), indent=2))
        return
    typer.echo(f"{summary.images} images and {summary.texts} texts, {summary.dim} wide, in {summary.shards} shards")
    if summary.skipped_images or summary.skipped_captions:
        skipped = f"{summary.skipped_images} images and {summary.skipped_captions} captions"
        typer.echo(f"skipped {skipped}; {out / embed_job.SKIPPED_FILE} says why")
    typer.echo(f"Wrote {out}")


@app.command(epilog="Example: geoflow train --pairs embeddings/ --out runs/first --preset small --steps 20000")
def train(
    out: Annotated[Path, typer.Option(help="Folder of the run; the same command continues a stopped run.")],
    pairs: Annotated[Path | None, typer.Option(help="Folder of paired embeddings (img_emb/, text_emb/).")] = None,
    images: Annotated[
        Path | None, typer.Option(help="Instead of --pairs: .npy file or folder of shards with one row per image.")
    ] = None,
    texts: Annotated[Path | None, typer.Option(help="With --images: the same for texts.")] = None,
    image_index: Annotated[
        Path | None,
        typer.Option(help="With --images: .npy file with the image row of each text. Default: row k for text k."),
    ] = None,
    preset: Annotated[
        Preset, typer.Option(help="Size of network and run; other flags override single settings.")
    ] = Preset.small,
    val: Annotated[Path | None, typer.Option(help="Folder of validation pairs. Default: 2 % of the images.")] = None,
    method: Annotated[
        str, typer.Option(help="geoflow, or a baseline: probvlm, asymvlm_vmf, asymvlm_ps, grove, repvlm, bayesvlm, ...")
    ] = "geoflow",
    steps: Annotated[int | None, typer.Option(help="Training steps.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Pairs per step.")] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate.")] = None,
    warmup_steps: Annotated[int | None, typer.Option(help="Steps until the learning rate reaches its peak.")] = None,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    coupling: Annotated[
        str | None, typer.Option(help="Coupling of joint rows: paper, sample, exact or independent.")
    ] = None,
    conditional_coupling: Annotated[
        str | None, typer.Option(help="Coupling of conditional rows: independent, paper or c2ot.")
    ] = None,
    noise: Annotated[str | None, typer.Option(help="Kind of noise: iid or structured.")] = None,
    ot_scope: Annotated[
        str | None,
        typer.Option(help="With several ranks: one transport plan for all (global) or one per rank (local)."),
    ] = None,
    accumulate: Annotated[int | None, typer.Option(help="Divide each batch into this many pieces.")] = None,
    ema_decay: Annotated[float | None, typer.Option(help="Average the weights with this decay.")] = None,
    val_every: Annotated[int | None, typer.Option(help="Steps between validations.")] = None,
    checkpoint_every: Annotated[int | None, typer.Option(help="Steps between checkpoints.")] = None,
    centre: Annotated[bool, typer.Option("--centre/--no-centre", help="Subtract the mean of each modality.")] = False,
    pca: Annotated[int | None, typer.Option(help="Keep this many principal components of each modality.")] = None,
    normalize: Annotated[
        bool, typer.Option("--normalize/--no-normalize", help="Scale rows to unit norm instead of rejecting them.")
    ] = False,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard/--no-tensorboard", help="Also write TensorBoard events.")
    ] = False,
    compile_network: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Compile the network with torch.compile.")
    ] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    as_json: JsonFlag = False,
) -> None:
    """Trains a flow or a baseline on paired embeddings. Ctrl-C saves and stops; the same command continues."""
    from geoflow_fast import baselines
    from geoflow_fast.data.pairs import EmbeddingPairs, open_pairs
    from geoflow_fast.distributed import joined
    from geoflow_fast.training.flow_matching import train_preset

    overrides = {
        "steps": steps,
        "batch_size": batch_size,
        "lr": lr,
        "warmup_steps": warmup_steps,
        "coupling": coupling,
        "conditional_coupling": conditional_coupling,
        "noise": noise,
        "ot_scope": ot_scope,
        "accumulate": accumulate,
        "ema_decay": ema_decay,
        "val_every": val_every,
        "checkpoint_every": checkpoint_every,
    }
    chosen = {name: value for name, value in overrides.items() if value is not None}
    chosen |= {"seed": seed, "tensorboard": tensorboard, "compile": compile_network}
    report: TrainReport | None
    with joined() as world:
        data = open_pairs(pairs, images, texts, image_index, normalize=normalize, world=world)
        held_out = None if val is None else EmbeddingPairs.open(val, normalize=normalize, world=world)
        run = (data, out, preset.value, held_out, chosen)
        if method == "geoflow":
            report = train_preset(*run, centre=centre, pca_dim=pca, device=device, world=world)
        elif centre or pca is not None:
            raise ValueError(f"--centre and --pca are the flow's; {method} takes the embeddings as they are")
        elif world.size > 1:
            raise ValueError(f"{method} is trained by one process; start it without torchrun")
        else:
            report = baselines.train_preset(method, *run, folder=pairs, device=device)
    if world.is_main and as_json:
        _print_json({"out": out} if report is None else dataclasses.asdict(report))
    elif world.is_main and report is None:
        typer.echo(f"Wrote {out}")
    elif world.is_main and report is not None:
        _print_training(report)
    if report is not None and not report.finished:
        raise typer.Exit(INTERRUPTED)


def _print_training(report: TrainReport) -> None:
    state = "finished" if report.finished else "stopped; run the same command to continue"
    typer.echo(
        f"{state} at step {report.steps}; best validation loss {report.best_val_loss:.6g} at step {report.best_step}"
    )
    typer.echo(f"Wrote {report.out}")


@app.command(
    epilog="Example: geoflow entropy --model runs/first --queries texts.npy --gallery img_emb/ --out scores.parquet"
)
def entropy(
    model: Annotated[Path, typer.Option(help="Folder of a trained flow.")],
    queries: Annotated[Path, typer.Option(help=".npy file or folder of .npy shards, unit rows.")],
    gallery: Annotated[Path, typer.Option(help=".npy file or folder of .npy shards, unit rows; read block by block.")],
    out: Annotated[Path, typer.Option(help="Output Parquet file; the same command continues a stopped run.")],
    direction: Annotated[
        Direction, typer.Option(help="t2i: texts search images; i2t: images search texts.")
    ] = Direction.t2i,
    fast: Annotated[
        bool, typer.Option("--fast/--no-fast", help="The cheapest settings that rank queries no worse.")
    ] = False,
    samples: Annotated[
        int | None, typer.Option(help=f"Samples per query. Default: 50; --fast: {FAST['n_samples']}.")
    ] = None,
    kappa: Annotated[float | None, typer.Option(help="Concentration of the kernel. Default: 100.")] = None,
    guidance: Annotated[float | None, typer.Option(help="Strength of guidance. Default: 3.")] = None,
    steps: Annotated[int | None, typer.Option(help=f"Solver steps. Default: 50; --fast: {FAST['n_steps']}.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the base noise. Default: 0.")] = None,
    posterior: Annotated[
        Posterior, typer.Option(help="likelihood: as in the paper; bayes: corrected for items that fit many queries.")
    ] = Posterior.likelihood,
    reference: Annotated[
        Path | None, typer.Option(help="Typical queries other than those scored; required for --posterior bayes.")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Also write this many most probable items: lists top_index and top_prob.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Write histograms of entropy and risk bound to this PNG file.")
    ] = None,
    block: Annotated[int, typer.Option(help="Queries per pass over the gallery.")] = 64,
    layout: Annotated[
        Layout, typer.Option(help="What the ranks started by torchrun divide among them: the gallery or the queries.")
    ] = Layout.auto,
    overwrite: Annotated[
        bool, typer.Option("--overwrite/--no-overwrite", help="Replace the output of another job.")
    ] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    as_json: JsonFlag = False,
) -> None:
    """Computes the retrieval entropy of queries: how ambiguous each of them is over a gallery.

    Columns: query, entropy (nats), map_index, map_prob, risk_lower_bound.
    """
    from geoflow_fast.jobs import entropy as scoring
    from geoflow_fast.runtime import plots

    if reference is not None and posterior is not Posterior.bayes:
        raise ValueError("--reference is for --posterior bayes")
    if reference is None and posterior is Posterior.bayes:
        raise ValueError(
            "--posterior bayes needs --reference: typical queries other than those scored, which would count against "
            "their own items"
        )
    if plot is not None:
        plots.pyplot()  # its absence is said before hours of scoring, not after
    chosen = {
        "n_samples": samples,
        "kappa": kappa,
        "guidance": guidance,
        "n_steps": steps,
        "seed": seed,
        "top_k": top_k,
    }
    given: dict[str, Any] = {name: value for name, value in chosen.items() if value is not None}
    if reference is not None:
        given |= {"posterior": "bayes", "reference": scoring.reference_queries(reference)}
    with continued_later() as world:
        scorer = scoring.open_scorer(model, gallery, direction.value, fast=fast, device=device, world=world, **given)
        options = {"with_top": top_k is not None, "block": block, "overwrite": overwrite, "layout": layout.value}
        summary = scoring.score_file(scorer, queries, out, **options)  # type: ignore[arg-type]
    if not world.is_main:
        return
    if plot is not None:
        scoring.draw_scores(out, summary, plot)
    if as_json:
        _print_json(dataclasses.asdict(summary))
        return
    _print_scores(summary)
    typer.echo(f"Wrote {out}" + (f" and {plot}" if plot is not None else ""))


@app.command(epilog="Example: geoflow density --model runs/first --pairs embeddings/ --out densities.parquet")
def density(
    model: Annotated[Path, typer.Option(help="Folder of a trained flow.")],
    pairs: Annotated[Path, typer.Option(help="Folder of paired embeddings (img_emb/, text_emb/).")],
    out: Annotated[Path, typer.Option(help="Output Parquet file; the same command continues a stopped run.")],
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
    seed: Annotated[int, typer.Option(help="Seed of the probes.")] = 0,
    normalize: Annotated[
        bool, typer.Option("--normalize/--no-normalize", help="Scale rows to unit norm instead of rejecting them.")
    ] = False,
    block: Annotated[int, typer.Option(help="Pairs per saved block.")] = 256,
    overwrite: Annotated[
        bool, typer.Option("--overwrite/--no-overwrite", help="Replace the output of another job.")
    ] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    as_json: JsonFlag = False,
) -> None:
    """Computes the log-densities and the epistemic score of pairs.

    Columns, in nats: pair, joint, text_given_image, image_given_text, image, text, pmi, score.
    """
    from geoflow_fast.jobs import density as density_job
    from geoflow_fast.likelihood.settings import FAST_DENSITY, PAPER_DENSITY, DensitySettings

    if fast and paper:
        raise ValueError("--fast and --paper exclude each other")
    chosen: dict[str, Any] = {**(FAST_DENSITY if fast else PAPER_DENSITY if paper else {})}
    given = {"n_steps": steps, "n_probes": probes, "solver": solver}
    chosen |= {name: value for name, value in given.items() if value is not None}
    options: dict[str, Any] = {
        "seed": seed,
        "device": device,
        "normalize": normalize,
        "block": block,
        "overwrite": overwrite,
    }
    with continued_later() as world:
        summary = density_job.density_file(model, pairs, out, DensitySettings(**chosen), world=world, **options)
    if not world.is_main:
        return
    if as_json:
        _print_json(dataclasses.asdict(summary))
        return
    _print_quantiles(f"{summary.pairs} pairs, nats", summary.quantiles)
    typer.echo(f"Wrote {out}")


def _print_scores(summary: ScoreSummary) -> None:
    rows = {"entropy H, nats": summary.entropy, "risk lower bound": summary.risk_lower_bound}
    _print_quantiles(f"{summary.queries} queries over {summary.items} items", rows)
    typer.echo(f"confident (an item with probability 1/2 or more): {summary.confident:.1%} of the queries")
    least = f"{summary.mean_risk_lower_bound:.1%}"
    typer.echo(f"if the posterior is right, best guesses are wrong for at least {least} of the queries")


@app.command(
    epilog="Example: geoflow rerank --model runs/first --queries texts.npy --gallery img_emb/ --held-out val/ --out "
    "ranked.parquet"
)
def rerank(
    model: Annotated[Path, typer.Option(help="Folder of a trained flow.")],
    queries: Annotated[Path, typer.Option(help=".npy file or folder of .npy shards, unit rows.")],
    gallery: Annotated[Path, typer.Option(help=".npy file or folder of .npy shards, unit rows; read block by block.")],
    out: Annotated[Path, typer.Option(help="Output Parquet file; the same command continues a stopped run.")],
    calibration: Annotated[
        Path | None,
        typer.Option(help="JSON file of the calibration. Default: rerank_t2i.json or rerank_i2t.json of the model."),
    ] = None,
    held_out: Annotated[
        Path | None, typer.Option(help="Folder of held-out pairs to calibrate on first; the calibration is saved.")
    ] = None,
    direction: Annotated[
        Direction, typer.Option(help="t2i: texts search images; i2t: images search texts.")
    ] = Direction.t2i,
    shortlist: Annotated[int, typer.Option(help="Items to re-rank per query.")] = 32,
    steps: Annotated[int, typer.Option(help="Solver steps per log-density.")] = 6,
    probes: Annotated[int, typer.Option(help="Probes per log-density.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the probes.")] = 0,
    block: Annotated[int, typer.Option(help="Queries per pass over the gallery.")] = 64,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite/--no-overwrite", help="Replace the output of another job or a calibration on other pairs."
        ),
    ] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    as_json: JsonFlag = False,
) -> None:
    """Re-ranks the items nearest to each query and gives the probability that each of them is the right one.

    Columns: query, index and prob (lists), answer, p_answer, p_outside, entropy (nats), risk_lower_bound.
    """
    from geoflow_fast.jobs import rerank as rerank_job
    from geoflow_fast.jobs.entropy import open_queries

    chosen = {"shortlist": shortlist, "n_steps": steps, "n_probes": probes, "seed": seed}
    with continued_later() as world:
        reranker = rerank_job.open_reranker(model, gallery, direction.value, device=device, world=world, **chosen)
        open_queries(queries, reranker.query_dim, world)  # what is wrong is said before calibrating
        rerank_job.settle_calibration(reranker, model, calibration, held_out, overwrite=overwrite)
        summary = rerank_job.rerank_file(reranker, queries, out, block=block, overwrite=overwrite)
    if not world.is_main:
        return
    if as_json:
        _print_json(dataclasses.asdict(summary))
        return
    _print_reranking(summary)
    typer.echo(f"Wrote {out}")


def _print_reranking(summary: RerankSummary) -> None:
    rows = {"plain answer is right": summary.p_answer, "not in shortlist": summary.p_outside}
    _print_quantiles(f"{summary.queries} queries over {summary.items} items", rows)
    if not summary.calibrated:
        typer.echo("uncalibrated: alpha=1, beta=0, nothing outside the shortlist; --held-out pairs calibrate")
    typer.echo(f"expected share of right answers of plain search: {summary.expected_recall:.1%}")
    typer.echo(f"re-ranking changes the answer of {summary.changed:.1%} of the queries")


@app.command(epilog="Example: geoflow plan --gallery 1e9 --dim 1024 --queries 1e6 --device h100 --gpus 64")
def plan(
    gallery: Annotated[float, typer.Option(help="Number of gallery items; 1e9 is allowed.")],
    dim: Annotated[int, typer.Option(help="Width of the embeddings.")],
    queries: Annotated[float, typer.Option(help="Number of queries.")],
    device: Annotated[
        str, typer.Option(help="a100, h100, h200, b200; or cpu for this machine, whose speed is measured.")
    ] = "h100",
    gpus: Annotated[int, typer.Option(help="Number of devices.")] = 1,
    block: Annotated[int, typer.Option(help="Queries per pass over the gallery.")] = 64,
    fast: Annotated[bool, typer.Option("--fast/--no-fast", help="Use the settings of geoflow entropy --fast.")] = False,
    layout: Annotated[
        Layout, typer.Option(help="What the devices divide among them: the gallery or the queries.")
    ] = Layout.auto,
    as_json: JsonFlag = False,
) -> None:
    """Estimates memory, operations, transfers and hours of geoflow entropy on a cluster, without running it."""
    from geoflow_fast import plan as planning

    sizes = (int(gallery), dim, int(queries))
    found = planning.plan_scoring(*sizes, device, gpus, block=block, fast=fast, layout=layout.value)
    if as_json:
        _print_json(dataclasses.asdict(found))
        return
    title = f"{sizes[2]:,} queries over {sizes[0]:,} items of width {dim} on {gpus} x {device}"
    table = Table("", "", title=title, show_header=False)
    for name, value in planning.as_table(found).items():
        table.add_row(name, value)
    Console().print(table)


def _print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value, indent=2, default=str))


def _print_quantiles(title: str, rows: dict[str, dict[str, float]]) -> None:
    table = Table("", *next(iter(rows.values())), title=title)
    for name, quantiles in rows.items():
        table.add_row(name, *(f"{value:.3f}" for value in quantiles.values()))
    Console().print(table)


def main() -> None:
    """Entry point."""
    base.run(app)
