"""What scoring a gallery of any size takes: memory, operations, bytes and hours, by arithmetic.

docs/scaling.md has the formulas. Rates are vendors' peaks times the shares that kernels of this kind reach, and what a
machine of that kind usually has around the device; nothing here has been measured on a GPU. `cpu` is measured here.
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass
from typing import Any

import torch

from geoflow_fast.flow.config import GeoFlowConfig
from geoflow_fast.flow.model import GeoFlow
from geoflow_fast.flow.sampling import FAST_SAMPLING, SamplingSettings
from geoflow_fast.jobs.entropy import ITEM_BYTES, LAYOUTS, preferred_layout
from geoflow_fast.jobs.queries import BLOCK_QUERIES
from geoflow_fast.retrieval.gallery import BLOCK_ROWS
from geoflow_fast.runtime import checks
from geoflow_fast.runtime.device import usable_device

COMPUTE_SHARE, BANDWIDTH_SHARE = 0.60, 0.85
"""Of a vendor's peak."""
EVALUATIONS = {"euler": 1, "ab2": 1, "midpoint": 2, "rk4": 4}
"""Of the velocity per solver step."""
TOP_K = 10
GIGA = 1e9


@dataclass(frozen=True)
class Device:
    """Rates of one device and its share of the machine it is in, in operations and bytes per second, and in bytes."""

    operations: float
    bandwidth: float
    memory: float
    link: float
    """From the machine's memory to the device."""
    network: float
    storage: float
    machine_memory: float
    """Of the whole machine, whose `devices` read the same pages."""
    devices: int


DEVICES = {
    "a100": Device(312e12, 2.04e12, 80e9, 25e9, 25e9, 1e9, 1e12, 8),
    "h100": Device(989e12, 3.35e12, 80e9, 50e9, 50e9, 2e9, 2e12, 8),
    "h200": Device(989e12, 4.80e12, 141e9, 50e9, 50e9, 2e9, 2e12, 8),
    "b200": Device(2250e12, 8.00e12, 180e9, 50e9, 50e9, 2e9, 2e12, 8),
}


@dataclass(frozen=True)
class Plan:
    """Estimated cost of a job. Bytes and operations are totals over all devices unless stated otherwise."""

    layout: str
    """What the devices divide among them: the "queries" or the "gallery"."""
    passes: int
    """Passes over the items of a device."""
    sampling_operations: float
    """Floating-point operations for drawing samples."""
    scoring_operations: float
    """Floating-point operations for scoring items."""
    device_memory: float
    """Bytes in use on each device."""
    gallery_bytes: float
    """Size of the gallery."""
    gallery_bytes_per_machine: float
    """Part of the gallery that each machine reads."""
    link_bytes: float
    """Bytes of items copied from the machines' memory to the devices."""
    storage_bytes: float
    """Bytes read from storage."""
    network_bytes: float
    """Bytes sent over the network."""
    network_bytes_per_query: float
    """Bytes per query that pass each device; they do not depend on the number of items."""
    hours: dict[str, float]
    """Duration of each part if it ran alone."""
    total_hours: float
    """Estimated duration of the job."""
    bound_by: str
    """The part that takes longest."""
    advised_block: int
    """Number of queries per pass from which the link is no longer the bottleneck."""


def plan_scoring(
    items: int,
    dim: int,
    queries: int,
    device: str,
    devices: int,
    *,
    block: int = BLOCK_QUERIES,
    fast: bool = False,
    layout: str = "auto",
) -> Plan:
    """Estimates what `geoflow entropy` costs for `items` gallery items of width `dim` on `devices` devices.

    `device`: "a100", "h100", "h200", "b200", or "cpu" for this machine, whose rates are measured briefly. The network
    is the paper's. `block`: queries per pass. `fast`: the settings of `RetrievalEntropy.fast` instead of the paper's.
    `layout`: whether the devices divide the "queries" or the "gallery" among them; "auto" chooses.
    """
    counts = {"items": items, "dim": dim, "queries": queries, "devices": devices, "block": block}
    for name, count in counts.items():
        checks.integer(count, name, least=1)
    shape = GeoFlowConfig.paper(dim, dim)
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    rates = _rates(device)
    settings = FAST_SAMPLING if fast else SamplingSettings()
    rows = settings.n_samples * queries
    evaluations = settings.n_steps * EVALUATIONS[settings.solver] * 2  # with and without the condition
    gallery_bytes = float(items) * dim * ITEM_BYTES
    blocks = math.ceil(queries / block)
    if layout == "auto":
        layout = preferred_layout(gallery_bytes, rates.machine_memory, blocks, devices)
    spread = layout == "gallery"
    machines = math.ceil(devices / rates.devices)
    per_machine = gallery_bytes / machines if spread else gallery_bytes
    passes = blocks if spread else math.ceil(blocks / devices)
    link_bytes = passes * gallery_bytes * (1 if spread else devices)
    # Once to check the rows, once for their digest, then from memory if they fit there, else in every pass.
    storage_bytes = 2 * gallery_bytes + (machines * per_machine if per_machine <= rates.machine_memory else link_bytes)
    statistics = (5 + 2 * TOP_K) * 8
    per_query = (settings.n_samples * dim * ITEM_BYTES + 4 * statistics) if spread and devices > 1 else 0
    sampling = 2.0 * _weights(shape) * rows * evaluations
    scoring = 2.0 * rows * items * dim
    hours = _hours(rates, devices, sampling, scoring, passes, link_bytes, storage_bytes, per_query * queries)
    slowest = max(hours, key=lambda name: hours[name])
    operations_per_query = scoring / queries / items / dim  # per coordinate of an item
    return Plan(
        layout=layout,
        passes=passes,
        sampling_operations=sampling,
        scoring_operations=scoring,
        device_memory=_device_memory(shape, settings.n_samples * block, dim, devices if spread else 1),
        gallery_bytes=gallery_bytes,
        gallery_bytes_per_machine=per_machine,
        link_bytes=link_bytes,
        storage_bytes=storage_bytes,
        network_bytes=float(per_query) * queries * devices,
        network_bytes_per_query=float(per_query),
        hours=hours,
        # Transfers run beside the computation of the block before; sampling and scoring follow each other.
        total_hours=max(hours["sampling"] + hours["scoring"], hours["link"], hours["storage"]) + hours["network"],
        bound_by=slowest,
        advised_block=math.ceil(
            COMPUTE_SHARE * rates.operations * ITEM_BYTES / (BANDWIDTH_SHARE * rates.link * operations_per_query)
        ),
    )


def _hours(
    rates: Device,
    devices: int,
    sampling: float,
    scoring: float,
    passes: int,
    link_bytes: float,
    storage_bytes: float,
    network_bytes_per_device: float,
) -> dict[str, float]:
    """Hours of each part alone. Scoring reads each item from the device's memory once per pass."""
    operations = COMPUTE_SHARE * rates.operations * devices
    memory_seconds = link_bytes / (BANDWIDTH_SHARE * rates.bandwidth * devices)
    seconds = {
        "sampling": sampling / operations,
        "scoring": max(scoring / operations, memory_seconds),
        "link": link_bytes / (BANDWIDTH_SHARE * rates.link * devices),
        "storage": storage_bytes / (rates.storage * devices),
        "network": network_bytes_per_device / (BANDWIDTH_SHARE * rates.network),
    }
    return {name: value / 3600 for name, value in seconds.items()} if passes else dict.fromkeys(seconds, 0.0)


def _device_memory(shape: GeoFlowConfig, samples: int, dim: int, shared_by: int) -> float:
    """Weights, the samples of a block, two blocks of items, and the network's widest layers for one rank's samples."""
    rows = 2 * math.ceil(samples / shared_by)
    return 4.0 * (_weights(shape) + samples * dim + 2 * BLOCK_ROWS * dim + rows * (4 * dim + 16 * shape.hidden))


def _weights(shape: GeoFlowConfig) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in GeoFlow(shape).parameters())


def _rates(name: str) -> Device:
    if checks.words(name, "device") in DEVICES:
        return DEVICES[name]
    if name != "cpu":
        raise ValueError(f"device must be one of {', '.join((*DEVICES, 'cpu'))}, got {name!r}")
    usable_device("cpu")
    memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    operations, bandwidth = _measure_operations(), _measure_bandwidth()
    # Peaks are what the shares are taken of; a process's own memory needs no link.
    peak = bandwidth / BANDWIDTH_SHARE
    return Device(operations / COMPUTE_SHARE, peak, memory, peak, 1.25e9, 1e9, memory, 1)


def _measure_operations() -> float:
    """Floating-point operations per second of a float32 matrix product, the best of a few."""
    a, b, out = torch.randn(1024, 1024), torch.randn(1024, 1024), torch.empty(1024, 1024)
    return 2 * 1024**3 / min(_seconds(lambda: torch.mm(a, b, out=out)) for _ in range(5))


def _measure_bandwidth() -> float:
    """Bytes per second of a streaming read, the best of a few."""
    x = torch.ones(2**24)
    return x.nbytes / min(_seconds(x.sum) for _ in range(5))


def _seconds(run: Any) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def as_table(plan: Plan) -> dict[str, str]:
    """The plan in words, row by row."""
    hours = {f"  {name}, alone": f"{value:.3g} h" for name, value in plan.hours.items()}
    return {
        "layout": plan.layout,
        "passes over a device's items": f"{plan.passes:,}",
        "operations, sampling": f"{plan.sampling_operations:.3g}",
        "operations, scoring": f"{plan.scoring_operations:.3g}",
        "gallery": f"{plan.gallery_bytes / GIGA:,.1f} GB, {plan.gallery_bytes_per_machine / GIGA:,.1f} GB per machine",
        "memory of each device": f"{plan.device_memory / GIGA:.2f} GB",
        "memory to devices": f"{plan.link_bytes / GIGA:,.0f} GB",
        "from storage": f"{plan.storage_bytes / GIGA:,.0f} GB",
        "over the network": f"{plan.network_bytes / GIGA:,.1f} GB, {plan.network_bytes_per_query:,.0f} bytes per query",
        **hours,
        "estimate": f"{plan.total_hours:.3g} h, limited by {plan.bound_by}",
        "advised --block": f"{plan.advised_block:,} or more",
    }
