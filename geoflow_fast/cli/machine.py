"""`geoflow doctor` shows what this machine can run."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from geoflow_fast.cli.base import Commands, JsonFlag, print_json

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


def machine_facts() -> dict[str, str]:
    """Versions, processor features, threads and devices by name, for `geoflow doctor` and for bug reports."""
    import torch

    from geoflow_fast.ops import extension
    from geoflow_fast.ops.product import missing_onednn
    from geoflow_fast.runtime import processors

    problem = extension.missing()
    cuda = extension.missing_cuda()
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
        "compiled extension": problem or extension.one_thread_only() or "built",
        "CPU features in use": problem
        or f"{extension.isa()} (this processor can run {', '.join(extension.supported_isas())})",
        "float32 products": "torch.mm" if missing_onednn() else "oneDNN, torch.mm for small ones",
        "threads": f"{torch.get_num_threads()}, which wait for each other {processors.waiting()}",
        "processors": processors.described(),
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
