"""`geoflow demo`: the whole method on synthetic pairs whose densities are known."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from geoflow_fast.cli.base import INTERRUPTED, Commands, JsonFlag, SeedFlag, print_json

app = Commands()


@app.command(epilog="Example: geoflow demo --out demo_output")
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the report; created if missing.")] = Path("demo_output"),
    seed: SeedFlag = 0,
    steps: Annotated[int | None, typer.Option(help="Training steps; fewer are faster but give worse results.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Trains a flow on synthetic pairs with known densities and reports how good its uncertainties are, with figures;
    then a search with a certified rule goes live, its log is watched, and explore.html shows its queries.

    Takes under four minutes on two cores and downloads nothing. Ctrl-C saves; the same command continues.
    """
    from geoflow_fast.demo import PAGE, REPORT, run, summary
    from geoflow_fast.runtime.malloc import keep_freed_memory

    keep_freed_memory()
    outcome = run(out, seed, steps, lambda words: typer.echo(f"{words} ...", err=as_json))
    if outcome is None:
        typer.echo(f"stopped; {out} holds the state: run the same command to continue", err=True)
        raise typer.Exit(INTERRUPTED)
    if as_json:
        print_json(summary(outcome))
        return
    table = Table("expected", "measured", "at least", "", title="Compared with the truth")
    checks = outcome.checks()
    for check in checks:
        table.add_row(check.name, f"{check.value:.3f}", f"{check.floor:.2f}", "ok" if check.holds else "MISSED")
    Console().print(table)
    typer.echo(f"{sum(check.holds for check in checks)} of {len(checks)} expectations hold")
    typer.echo(f"Wrote {out / REPORT} and {out / PAGE}")
