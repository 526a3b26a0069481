"""The `geoflow` command, put together from its groups of commands."""

from __future__ import annotations

from typing import Annotated

import typer

import geoflow_fast
from geoflow_fast.cli import base, decisions, demo, embed, evaluate, explore, machine, scoring, training

app = base.Commands(pretty_exceptions_enable=False)
for group in (machine, demo, embed, training, scoring, decisions, evaluate, explore):
    app.add_typer(group.app)


@app.callback(
    invoke_without_command=True,
    epilog="Exit status: 0 done, 2 bad input, 3 a guarantee no longer holds (watch), 130 interrupted, 143 terminated. "
    "--config reads flags from a TOML file.",
)
def _about(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
    debug: base.DebugFlag = False,  # noqa: ARG001, its callback acts
) -> None:
    """Which answers of an image-text search to trust: from the scores of any search and a few judged queries or,
    better, from models trained on pairs of embeddings."""
    if version:
        typer.echo(f"geoflow_fast {geoflow_fast.__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main() -> None:
    """Runs the command line of this process and exits."""
    base.run(app)
