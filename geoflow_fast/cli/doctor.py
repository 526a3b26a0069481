"""What this machine has: versions, processor features, threads, devices."""

from __future__ import annotations

import importlib.metadata
import platform

import torch

from geoflow_fast.ops import native
from geoflow_fast.ops.dispatch import BackendTable


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _cuda() -> str:
    reason = native.missing_cuda()
    if reason is not None:
        return reason
    if not torch.cuda.is_available():
        return f"a CUDA device is there, but torch {torch.__version__} cannot use it"
    return ", ".join(torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count()))


def machine_facts() -> dict[str, str]:
    """Name -> value, for `geoflow doctor` and for bug reports."""
    built = native.missing()
    return {
        "geoflow_fast": _version_of("geoflow_fast"),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "triton": _version_of("triton"),
        "compiled extension": built or "built",
        "CPU features in use": built or ", ".join(native.cpu_features()) or "baseline only",
        "threads": str(torch.get_num_threads()),
        "CUDA": _cuda(),
    }


def numbered_reasons(table: BackendTable) -> dict[str, int]:
    """Each distinct reason why a backend cannot serve -> its footnote number, from 1."""
    states = dict.fromkeys(state for row in table.values() for state in row.values())
    return {reason: number for number, reason in enumerate((s for s in states if s != "available"), start=1)}
