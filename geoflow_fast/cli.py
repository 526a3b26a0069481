"""The `geoflow` command: reads flags, calls the library, prints. No logic of its own."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

import geoflow_fast
from geoflow_fast import dispatch

app = typer.Typer(
    help="Uncertainty for frozen vision-language embeddings, from one flow on the product of two spheres.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


class Preset(str, Enum):
    """Sizes of network and run."""

    tiny = "tiny"
    small = "small"
    paper = "paper"


JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON for machines instead of tables.")]


@app.callback()
def _version_and_help() -> None:
    """Uncertainty for frozen vision-language embeddings, from one flow on the product of two spheres."""


@app.command(epilog="Example: geoflow doctor --json")
def doctor(as_json: JsonFlag = False) -> None:
    """Shows what this machine can run: every operation's backends with reasons, CPU features, torch, triton, CUDA."""
    from geoflow_fast import doctor as check

    facts, table = check.machine_facts(), geoflow_fast.backends()
    if as_json:
        print(json.dumps({"machine": facts, "backends": table}, indent=2))
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
    out: Annotated[Path, typer.Option(help="Folder for the pictures; made if absent.")] = Path("demo_output"),
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
) -> None:
    """Draws geodesics and uniform samples on a sphere and shows which backends this machine has."""
    from geoflow_fast.demo import draw_sphere

    doctor()
    picture = draw_sphere(out, seed)
    typer.echo(f"Wrote {picture}")


@app.command(epilog="Example: geoflow train --pairs embeddings/ --out runs/first --preset small --steps 20000")
def train(
    pairs: Annotated[Path, typer.Option(help="Folder of paired embeddings (img_emb/, text_emb/).")],
    out: Annotated[Path, typer.Option(help="Folder of the run; the same command continues a run that was stopped.")],
    preset: Annotated[
        Preset, typer.Option(help="Size of network and run; the other flags override it.")
    ] = Preset.small,
    val: Annotated[Path | None, typer.Option(help="Folder of validation pairs; else 2 % of the images.")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of the optimiser.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Pairs per step.")] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate.")] = None,
    warmup_steps: Annotated[int | None, typer.Option(help="Steps until the learning rate peaks.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    coupling: Annotated[str | None, typer.Option(help="Joint rows: paper, sample, exact or independent.")] = None,
    conditional_coupling: Annotated[
        str | None, typer.Option(help="Conditional rows: independent, paper or c2ot.")
    ] = None,
    noise: Annotated[str | None, typer.Option(help="iid or structured.")] = None,
    accumulate: Annotated[int | None, typer.Option(help="Pieces in which a batch goes through the network.")] = None,
    ema_decay: Annotated[float | None, typer.Option(help="Average the weights with this decay.")] = None,
    val_every: Annotated[int | None, typer.Option(help="Steps between validations.")] = None,
    checkpoint_every: Annotated[int | None, typer.Option(help="Steps between checkpoints.")] = None,
    centre: Annotated[bool, typer.Option("--centre", help="Subtract each modality's mean first.")] = False,
    pca: Annotated[int | None, typer.Option(help="Keep this many principal components of each modality.")] = None,
    normalize: Annotated[
        bool, typer.Option("--normalize", help="Scale rows to unit norm instead of refusing.")
    ] = False,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write TensorBoard events too.")] = False,
    compile_network: Annotated[bool, typer.Option("--compile", help="Compile the network with torch.compile.")] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
) -> None:
    """Trains a flow on paired embeddings. Ctrl-C saves and stops; the same command continues where it stopped."""
    from geoflow_fast.training import train_folder

    overrides = {
        "steps": steps,
        "batch_size": batch_size,
        "lr": lr,
        "warmup_steps": warmup_steps,
        "coupling": coupling,
        "conditional_coupling": conditional_coupling,
        "noise": noise,
        "accumulate": accumulate,
        "ema_decay": ema_decay,
        "val_every": val_every,
        "checkpoint_every": checkpoint_every,
    }
    chosen = {name: value for name, value in overrides.items() if value is not None}
    chosen |= {"seed": seed, "tensorboard": tensorboard, "compile": compile_network}
    report = train_folder(
        pairs, out, preset.value, val, chosen, centre=centre, pca_dim=pca, normalize=normalize, device=device
    )
    state = "finished" if report.finished else "stopped; run the same command to continue"
    typer.echo(
        f"{state} at step {report.steps}; best validation loss {report.best_val_loss:.6g} at step {report.best_step}"
    )
    typer.echo(f"Wrote {out}")
    if not report.finished:
        raise typer.Exit(130)


def main() -> None:
    """Entry point: errors about input, backends or files end in one line, not a traceback."""
    try:
        app()
    except (ValueError, TypeError, OSError) as error:
        typer.echo(f"geoflow: error: {error}", err=True)
        raise SystemExit(2) from None
