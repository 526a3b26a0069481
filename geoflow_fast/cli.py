"""The `geoflow` command: reads flags, calls the library, prints. No logic of its own."""

from __future__ import annotations

import json
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


def main() -> None:
    """Entry point: errors about input, backends or files end in one line, not a traceback."""
    try:
        app()
    except (ValueError, TypeError, OSError) as error:
        typer.echo(f"geoflow: error: {error}", err=True)
        raise SystemExit(2) from None
