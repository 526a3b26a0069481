"""`geoflow train`: a flow and a posterior head on paired embeddings."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from geoflow_fast.cli.base import (
    INTERRUPTED,
    Commands,
    DeviceFlag,
    JsonFlag,
    PresetFlag,
    SeedFlag,
    chosen_flags,
    given,
    print_json,
)
from geoflow_fast.cli.embeddings import ImageIndexFlag, ImagesFlag, NormalizeFlag, PairsFlag, TextsFlag

if TYPE_CHECKING:
    from geoflow_fast.data.pairs import EmbeddingPairs
    from geoflow_fast.head.model import PosteriorHead
    from geoflow_fast.jobs.calibration import StoredCalibration
    from geoflow_fast.training.loop import TrainReport

app = Commands()

OF_THE_FLOW = (
    *("preset", "coupling", "conditional_coupling", "blend", "centre", "pca"),
    "fixed_directions",
)
"""Flags that mean nothing to a head."""
GROUPS = {
    "Data": "pairs images texts image_index val held_out calibrate ids normalize",
    "What is trained": "out preset head points overwrite",
    "The run; the preset has the defaults": "steps batch_size lr warmup_steps seed accumulate ema_decay device",
    "Validation, checkpoints and logs; the preset has the defaults": "val_every patience checkpoint_every",
    "The flow; the preset has the defaults": "coupling conditional_coupling centre pca blend fixed_directions",
}
"""The headings of the help, with the flags below them."""


@app.command(groups=GROUPS, epilog="Example: geoflow train --pairs embeddings/ --out runs/first")
def train(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="Folder of the run; the same command continues a stopped run.")],
    pairs: PairsFlag = None,
    images: ImagesFlag = None,
    texts: TextsFlag = None,
    image_index: ImageIndexFlag = None,
    head: Annotated[
        bool | None,
        typer.Option(
            "--head/--no-head",
            help="Train the posterior head alone, in minutes, or the flow alone. Default: the flow, then OUT/head.",
        ),
    ] = None,
    points: Annotated[str, typer.Option(help="Points of the head: a number, or auto to choose among a few.")] = "auto",
    preset: PresetFlag = "auto",
    val: Annotated[
        Path | None,
        typer.Option(
            help="Folder of validation pairs. Default: 10 to 20 % of the images with preset auto and fewer than 20,000 "
            "pairs, otherwise 2 %; for the head 10 % but at most 1000."
        ),
    ] = None,
    held_out: Annotated[
        str | None,
        typer.Option(
            help="Pairs for calibration that nothing is trained on: a share of the images, their number, or a folder "
            "of pairs of other images. Default: a tenth, from 100 to 1000 images."
        ),
    ] = None,
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate/--no-calibrate",
            help="Hold pairs out and calibrate on them at the end; the other commands then use what is stored.",
        ),
    ] = True,
    steps: Annotated[
        int | None,
        typer.Option(
            help="Training steps, of the flow unless --head is given, as in the flags below. Default: the preset's; "
            "auto 400, or from 20,000 pairs on 3,000 or 20,000 by the machine; tiny 1,500, small 20,000, paper 120,000."
        ),
    ] = None,
    batch_size: Annotated[int | None, typer.Option(help="Pairs per step.")] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate.")] = None,
    warmup_steps: Annotated[int | None, typer.Option(help="Steps until the learning rate reaches its peak.")] = None,
    seed: SeedFlag = 0,
    coupling: Annotated[
        str | None, typer.Option(help="Coupling of joint rows: paper, sample, exact or independent.")
    ] = None,
    conditional_coupling: Annotated[
        str | None, typer.Option(help="Coupling of conditional rows: independent, paper or c2ot.")
    ] = None,
    accumulate: Annotated[int | None, typer.Option(help="Divide each batch into this many pieces.")] = None,
    ema_decay: Annotated[float | None, typer.Option(help="Average the weights with this decay.")] = None,
    val_every: Annotated[int | None, typer.Option(help="Steps between validations.")] = None,
    patience: Annotated[
        int | None, typer.Option(help="Stop after this many validations in a row without improvement.")
    ] = None,
    checkpoint_every: Annotated[int | None, typer.Option(help="Steps between checkpoints.")] = None,
    centre: Annotated[
        bool | None,
        typer.Option("--centre/--no-centre", help="Subtract the mean of each modality. Default: the preset's."),
    ] = None,
    pca: Annotated[int | None, typer.Option(help="Keep this many principal components of each modality.")] = None,
    blend: Annotated[
        bool | None,
        typer.Option(
            "--blend/--no-blend",
            help="After training, weigh network and anchor by held-out retrieval. Default: the preset's.",
        ),
    ] = None,
    fixed_directions: Annotated[
        bool | None,
        typer.Option(
            "--fixed-directions/--no-fixed-directions",
            help="Give all batches as many rows of each direction, so that a GPU replays steps. Default: the preset's.",
        ),
    ] = None,
    ids: Annotated[
        Path | None,
        typer.Option(help="Ids of the texts, written beside those that are held out: .npy, .txt or .parquet[:COLUMN]."),
    ] = None,
    normalize: NormalizeFlag = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite/--no-overwrite", help="Start again instead of continuing the run in OUT.")
    ] = False,
    device: DeviceFlag = "auto",
    as_json: JsonFlag = False,
) -> None:
    """Trains a flow and a posterior head on paired embeddings. Ctrl-C saves and stops; the same command continues."""
    from geoflow_fast.data.pairs import EmbeddingPairs, open_pairs
    from geoflow_fast.distributed import joined
    from geoflow_fast.head.config import HeadConfig
    from geoflow_fast.head.fitting import fit_head
    from geoflow_fast.head.model import HEAD_FOLDER
    from geoflow_fast.jobs.calibration import forget_calibration, hold_out
    from geoflow_fast.runtime.device import usable_device
    from geoflow_fast.runtime.malloc import keep_freed_memory
    from geoflow_fast.training.flow_matching import preset_settings, train_from_preset

    keep_freed_memory()
    _check_flags(context, head)
    k, share = _points(points), _held_out(held_out, calibrate=calibrate)
    if ids is not None and (isinstance(share, Path) or not calibrate):
        why = "those come from a folder of their own" if calibrate else "--no-calibrate holds none out"
        raise ValueError(f"--ids are written beside pairs that are held out of the training pairs, but {why}")
    run_settings = given(
        steps=steps,
        batch_size=batch_size,
        lr=lr,
        warmup_steps=warmup_steps,
        accumulate=accumulate,
        ema_decay=ema_decay,
        val_every=val_every,
        patience=patience,
        checkpoint_every=checkpoint_every,
        seed=seed,
    )
    couplings = given(
        coupling=coupling,
        conditional_coupling=conditional_coupling,
        blend=blend,
        fixed_directions=fixed_directions,
    )
    report: TrainReport | None = None
    trained: PosteriorHead | None = None
    stored: StoredCalibration | None = None
    head_out = out if head else out / HEAD_FOLDER
    with joined() as world:
        data = open_pairs(pairs, images, texts, image_index, normalize=normalize, world=world)
        validation = None if val is None else EmbeddingPairs.open(val, normalize=normalize, world=world)
        if head:  # names bad settings before anything is written
            HeadConfig(**run_settings)
        else:
            config = preset_settings(preset, data, {**run_settings, **couplings}, centre=centre, pca_dim=pca)[1]
        usable_device(device)
        if calibrate:
            asked = EmbeddingPairs.open(share, normalize=normalize, world=world) if isinstance(share, Path) else share
            tell = typer.echo if world.is_main and not as_json else lambda _: None
            data = hold_out(data, out, asked, seed, restart=overwrite, ids=ids, announce=tell, world=world)
        elif overwrite and world.is_main:
            forget_calibration(out)
        if not head:
            if world.is_main and not as_json:
                flow_settings = {**run_settings, **couplings}
                typer.echo(_announcement(data, preset, flow_settings, centre, pca, device))
            options: dict[str, Any] = {"centre": centre, "pca_dim": pca, "device": device, "resume": not overwrite}
            changes = {**run_settings, **couplings}
            report = train_from_preset(data, out, preset, validation, changes, **options, world=world)
        if head or (head is None and report is not None and report.finished):
            trained = fit_head(
                data,
                None,
                validation,
                k,
                seed,
                head_out,
                resume=not overwrite,
                progress=None,
                device=device,
                world=world,
                changes=run_settings if head else None,
            )
        unfinished = (report is not None and not report.finished) or (
            trained is not None and not trained.report["finished"]
        )
        if world.is_main and not unfinished and calibrate:
            # A backward pass costs as much as two forward ones.
            rows = 0.0 if report is None else 3.0 * report.steps * config.batch_size
            stored = _calibrated(out, data, trained, rows, seed, device)
        world.barrier()
    if world.is_main:
        if as_json:
            print_json(_as_json(out, report, trained, head_out))
        else:
            _print_outcome(out, report, trained, head_out, stored)
    if unfinished:
        raise typer.Exit(INTERRUPTED)


def _held_out(words: str | None, *, calibrate: bool) -> float | int | Path | None:
    """The share or the number of images that `--held-out` asks for, or the folder that it names."""
    if words is None:
        return None
    if not calibrate:
        raise ValueError("--held-out is for the calibration that --no-calibrate leaves out")
    try:
        share = float(words)
    except ValueError:
        return Path(words)
    if words.isdecimal() and share >= 1:
        return int(words)
    if not 0 < share < 1:
        raise ValueError(f"--held-out must be a share between 0 and 1, a number of images or a folder, got {words}")
    return share


def _calibrated(
    out: Path, data: EmbeddingPairs, head: PosteriorHead | None, trained_rows: float, seed: int, device: str
) -> StoredCalibration | None:
    """Fits what the held-out pairs of a finished run decide; Ctrl-C leaves the rest to the next run. `trained_rows`: as
    for `calibrate_model`, 0 without a flow."""
    from geoflow_fast.flow.model import GeoFlow
    from geoflow_fast.jobs.calibration import calibrate_model
    from geoflow_fast.jobs.hub import write_card
    from geoflow_fast.runtime.device import usable_device

    where = usable_device(device)
    flow = GeoFlow.from_pretrained(out).to(where) if trained_rows else None
    head = None if head is None else head.to(where)
    try:
        stored = calibrate_model(out, data, flow, head, trained_rows=trained_rows, seed=seed)
        write_card(out)
        return stored
    except KeyboardInterrupt:
        typer.echo("stopped while calibrating; run the same command to continue", err=True)
        raise typer.Exit(INTERRUPTED) from None


def _announcement(
    pairs: EmbeddingPairs,
    preset: str,
    overrides: dict[str, Any],
    centre: bool | None,
    pca: int | None,
    device: str,
) -> str:
    """What is about to be trained, in one line: pairs, parameters, preset and steps."""
    import torch

    from geoflow_fast.flow.model import GeoFlow
    from geoflow_fast.runtime.device import usable_device
    from geoflow_fast.training.flow_matching import cores_of, preset_settings

    cores = cores_of(usable_device(device))
    shape, config = preset_settings(preset, pairs, overrides, centre=centre, pca_dim=pca, cores=cores)
    with torch.device("meta"):
        millions = GeoFlow(shape).num_parameters() / 1e6
    size = f"{len(pairs):,} pairs of widths {pairs.image_dim} and {pairs.text_dim}"
    run = f"at most {config.steps:,} steps of {config.batch_size}"
    return f"{size}; {millions:.2f} million parameters, preset {preset}, {run}"


def _check_flags(context: typer.Context, head: bool | None) -> None:
    """Raises a ValueError for a flag that means nothing to what is trained."""
    chosen = chosen_flags(context)
    for name in OF_THE_FLOW if head else ():
        if name in chosen:
            raise ValueError(f"--{name.replace('_', '-')} is a setting of the flow; leave it out with --head")
    if "points" in chosen and head is False:
        raise ValueError("--points is a setting of the head, which is not trained with --no-head")


def _points(words: str) -> int | str:
    """The number of points that `--points` asks for, or "auto"."""
    from geoflow_fast.head.config import MOST_POINTS
    from geoflow_fast.runtime import checks

    if words == "auto":
        return words
    if not words.isdecimal():
        raise ValueError(f"--points must be auto or a number, got {words!r}")
    return checks.integer(int(words), "--points", 1, MOST_POINTS)


def _as_json(out: Path, report: TrainReport | None, head: PosteriorHead | None, head_out: Path) -> dict[str, Any]:
    """What was trained: the head in an entry of its own unless it was trained alone."""
    if report is None:
        return {"out": out} if head is None else {**head.report, "out": out}
    own = {} if head is None else {"head": {**head.report, "out": head_out}}
    return {**dataclasses.asdict(report), **own}


def _print_outcome(
    out: Path,
    report: TrainReport | None,
    head: PosteriorHead | None,
    head_out: Path,
    stored: StoredCalibration | None = None,
) -> None:
    """Prints how training ended, how good what it made is, and where that is."""
    from geoflow_fast.jobs.calibration import outcome

    if report is not None:
        best = f"best validation loss {report.best_val_loss:.6g} at step {report.best_step}"
        if report.best_step < 0:
            best = "no weights yet, because it was never validated"
        elif report.best_step == 0:
            best += ": training made it no better, so the untrained weights are kept"
        typer.echo(f"{_state(report.steps, finished=report.finished)}; {best}{_shares(report.blend)}")
    if report is not None or head is None:
        typer.echo(f"Wrote {out}")
    if head is not None:
        known, points = head.report, head.config.points
        likelihood = f"held-out log-likelihood {-known['nll_t2i']:.4g} (t2i) and {-known['nll_i2t']:.4g} (i2t) nats"
        state = _state(known["steps"], finished=known["finished"])
        typer.echo(f"head {state}; {points} point{'s' * (points > 1)}; {likelihood}")
        typer.echo(f"Wrote {head_out}")
    for line in [] if stored is None else outcome(stored):
        typer.echo(line)


def _shares(blend: dict[str, Any] | None) -> str:
    """How much of the network counts beside the anchor, where held-out pairs have chosen that."""
    chosen = {name: entry["share"] for name, entry in (blend or {}).items() if entry}
    return (
        "; share of the network " + ", ".join(f"{share:g} ({name})" for name, share in chosen.items()) if chosen else ""
    )


def _state(steps: int, *, finished: bool) -> str:
    return f"{'finished' if finished else 'stopped; run the same command to continue'} at step {steps}"
