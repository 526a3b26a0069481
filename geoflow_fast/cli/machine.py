"""`geoflow doctor` shows what this machine can run; `geoflow plan` estimates what a cluster would take."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from geoflow_fast.cli.base import BlockFlag, Commands, JsonFlag, PresetFlag, RankLayout, model_option, print_json

if TYPE_CHECKING:
    from geoflow_fast.ops.dispatch import BackendTable

app = Commands()


@app.command(epilog="Example: geoflow doctor --json")
def doctor(as_json: JsonFlag = False) -> None:
    """Shows what this machine can run: the backends of every operation, CPU features, torch, triton and CUDA."""
    from geoflow_fast.ops.dispatch import BACKENDS, backends

    facts, table = machine_facts(), backends()
    if as_json:
        print_json({"machine": facts, "backends": table})
        return
    console = Console()
    console.print(facts_table("This machine", facts))
    reasons = numbered_reasons(table)
    rows = Table("operation", *BACKENDS, title="Backends")
    for op, states in table.items():
        rows.add_row(op, *(f"[{reasons[state]}]" if state in reasons else state for state in states.values()))
    console.print(rows, markup=False)
    for reason, number in reasons.items():
        console.print(f"[{number}] {reason}", markup=False)


@app.command(epilog="Example: geoflow plan --gallery 1e9 --dim 1024 --queries 1e6 --device h100 --gpus 64")
def plan(
    gallery: Annotated[float | None, typer.Option(help="Number of gallery items; 1e9 is allowed.")] = None,
    dim: Annotated[int | None, typer.Option(help="Width of the embeddings. Default: that of --model.")] = None,
    queries: Annotated[float | None, typer.Option(help="Number of queries, with --gallery.")] = None,
    pairs: Annotated[float | None, typer.Option(help="Number of training pairs, to estimate training.")] = None,
    preset: PresetFlag = "auto",
    model: Annotated[
        Path | None, model_option("Folder of a trained flow to score with. Default: the paper's network.")
    ] = None,
    device: Annotated[
        str, typer.Option(help="a100, h100, h200, b200, rtx4090; or cpu for this machine, whose speed is measured.")
    ] = "h100",
    gpus: Annotated[int, typer.Option(help="Number of devices.")] = 1,
    block: BlockFlag = 64,
    fast: Annotated[bool, typer.Option("--fast/--no-fast", help="Use the settings of geoflow entropy --fast.")] = False,
    layout: Annotated[
        RankLayout, typer.Option(help="What the devices divide among them: the gallery or the queries.")
    ] = "auto",
    as_json: JsonFlag = False,
) -> None:
    """Estimates memory, operations, transfers and hours of geoflow entropy, with --gallery and --queries, and the hours
    of geoflow train, with --pairs, on a cluster or on this machine, without running them."""
    from geoflow_fast import plan as planning
    from geoflow_fast.flow.model import GeoFlow

    shape = None if model is None else GeoFlow.from_pretrained(model).config
    width = dim if dim is not None or shape is None else shape.image_dim
    if width is None:
        raise ValueError("give --dim, the width of the embeddings, or --model")
    if (gallery is None) != (queries is None) or (gallery is None and pairs is None):
        raise ValueError("give --gallery and --queries, to estimate scoring, or --pairs, to estimate training")
    estimates: dict[str, Any] = {}
    if pairs is not None:
        estimates["training"] = planning.plan_training(int(pairs), width, device, gpus, preset=preset)
    if gallery is not None and queries is not None:
        options: dict[str, Any] = {"block": block, "fast": fast, "layout": layout, "shape": shape}
        estimates["scoring"] = planning.plan_scoring(int(gallery), width, int(queries), device, gpus, **options)
    if as_json:
        parts = {name: dataclasses.asdict(estimate) for name, estimate in estimates.items()}
        print_json({**parts.pop("scoring", {}), **parts})
        return
    for name, estimate in estimates.items():
        title = f"{int(queries or 0):,} queries over {int(gallery or 0):,} items" if name == "scoring" else "training"
        Console().print(facts_table(f"{title}, width {width}, on {gpus} x {device}", planning.as_table(estimate)))


def machine_facts() -> dict[str, str]:
    """Versions, processor features, threads and devices by name, for `geoflow doctor` and for bug reports."""
    import torch

    from geoflow_fast.ops import native
    from geoflow_fast.ops.product import missing_onednn
    from geoflow_fast.runtime import processors

    problem = native.missing()
    cuda = native.missing_cuda()
    if cuda is None and not torch.cuda.is_available():
        cuda = f"a CUDA device is there, but torch {torch.__version__} cannot use it"
    elif cuda is None:
        cuda = ", ".join(torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count()))
    return {
        "geoflow_fast": version_of("geoflow_fast"),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "triton": version_of("triton"),
        "compiled extension": problem or native.one_thread_only() or "built",
        "CPU features in use": problem
        or f"{native.isa()} (this processor can run {', '.join(native.supported_isas())})",
        "float32 products": "torch.mm" if missing_onednn() else "oneDNN, torch.mm for small ones",
        "threads": f"{torch.get_num_threads()}, which wait for each other {processors.waiting()}",
        **processors.state(),
        "CUDA": cuda,
        "CUDA graphs": graphs_state(),
    }


def graphs_state() -> str:
    """Whether solves and training steps are captured and replayed here, or why not."""
    import torch

    from geoflow_fast.runtime import graphs

    if not torch.cuda.is_available():
        return "not used: torch has no GPU"
    reason = graphs.unsuitable(torch.empty(1, device="cuda"))
    if reason is not None:
        return f"not used: {reason}"
    return (
        "samples and densities are replayed from the second call of a kind on, training steps if directions are fixed"
    )


def version_of(package: str) -> str:
    """The version of an installed package, or that it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def numbered_reasons(table: BackendTable) -> dict[str, int]:
    """The number of the footnote, from 1, for each distinct reason why a backend is not available."""
    states = dict.fromkeys(state for row in table.values() for state in row.values())
    return {reason: number for number, reason in enumerate((s for s in states if s != "available"), start=1)}


def facts_table(title: str, facts: dict[str, str]) -> Table:
    """A table of names and values."""
    table = Table("", "", title=title, show_header=False)
    for name, value in facts.items():
        table.add_row(name, value)
    return table
