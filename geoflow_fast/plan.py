"""Estimates of what it costs to score a gallery of any size: memory, operations, bytes and hours.

docs/scaling.md has the formulas. The rates of a GPU are its vendor's peaks times the shares that kernels of this kind
usually reach, with the memory, network and storage of a typical machine around it; they have not been measured. The
rates of `cpu` are measured on this machine.
"""

from __future__ import annotations

import functools
import math
import time
from dataclasses import dataclass
from typing import Any

import torch

from geoflow_fast.directions import CONDITIONAL
from geoflow_fast.flow.config import MANY_CORES, GeoFlowConfig
from geoflow_fast.flow.costs import (
    BANDWIDTH_SHARE,
    COMPUTE_SHARE,
    ELEMENT_BYTES,
    SCORING_PRODUCTS,
    STARTED_SECONDS,
    ProductRates,
    Work,
    scoring_work,
    seconds,
    velocity_work,
)
from geoflow_fast.flow.model import GeoFlow
from geoflow_fast.flow.sampling import FAST_SAMPLING, SamplingSettings
from geoflow_fast.head.fitting import (
    FEW,
    FEW_PAIRS,
    MANY,
    TRIAL_SHARE,
    VALIDATION_ITEMS,
    VALIDATION_QUERIES,
    head_settings,
)
from geoflow_fast.jobs.entropy import ITEM_BYTES, LAYOUTS, preferred_layout
from geoflow_fast.jobs.queries import BLOCK_QUERIES
from geoflow_fast.retrieval.gallery import BLOCK_ROWS, GPU_BLOCK_ROWS
from geoflow_fast.runtime import checks, processors
from geoflow_fast.runtime.device import GPU_ROWS_AT_ONCE, usable_device
from geoflow_fast.training.blending import blending_rows
from geoflow_fast.training.config import TrainConfig
from geoflow_fast.training.flow_matching import preset_of_size

TRAINING_SHARE = 1 / 3
"""Training small networks reaches this share of the rate of large products, with everything that it does besides."""
EVALUATIONS = {"euler": 1, "ab2": 1, "midpoint": 2, "rk4": 4}
"""Evaluations of the velocity per step of each solver."""
BLOCK_KERNELS = 52
"""Kernels that a GPU is given for each block of a gallery besides those of `scoring_work`: checks and merging."""
TOP_K = 10
GIGA = 1e9


@dataclass(frozen=True)
class DeviceRates:
    """Rates of one device and of its share of the machine it is in: operations and bytes per second."""

    operations: float
    """In bfloat16; on this machine in float32."""
    float32: float
    bandwidth: float
    memory: float
    """Bytes of the device's memory."""
    link: float
    """Bytes per second from the machine's memory to the device."""
    network: float
    storage: float
    machine_memory: float
    """Bytes of the memory of the whole machine, whose `devices` share the pages that they read."""
    devices: int

    @property
    def products(self) -> ProductRates:
        """What `costs` counts with."""
        return ProductRates(self.operations, self.float32, self.bandwidth)

    @property
    def scoring(self) -> float:
        """Operations per second of scoring float32 samples against a gallery, which is done in bfloat16 products."""
        tensor_cores = self.operations > self.float32
        return self.operations / SCORING_PRODUCTS["float32"] if tensor_cores else self.float32


DEVICES = {
    "a100": DeviceRates(312e12, 19.5e12, 2.04e12, 80e9, 25e9, 25e9, 1e9, 1e12, 8),
    "h100": DeviceRates(989e12, 67e12, 3.35e12, 80e9, 50e9, 50e9, 2e9, 2e12, 8),
    "h200": DeviceRates(989e12, 67e12, 4.80e12, 141e9, 50e9, 50e9, 2e9, 2e12, 8),
    "b200": DeviceRates(2250e12, 80e12, 8.00e12, 180e9, 50e9, 50e9, 2e9, 2e12, 8),
    "rtx4090": DeviceRates(165e12, 82.6e12, 1.008e12, 24e9, 25e9, 1.25e9, 2e9, 128e9, 1),
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
    shape: GeoFlowConfig | None = None,
    precision: str = "float32",
) -> Plan:
    """Estimates what `geoflow entropy` costs for `items` gallery items of width `dim` on `devices` devices.

    `device`: "a100", "h100", "h200", "b200", "rtx4090", or "cpu" for this machine, whose rates are measured briefly.
    `shape`: the network, by default the paper's. `block`: queries per pass. `fast`: the settings of
    `RetrievalEntropy.fast` instead of the paper's. `layout`: whether the devices divide the "queries" or the "gallery"
    among them; "auto" chooses.
    `precision` of the flow's matrix products on a GPU: "float32", "tf32" or "bfloat16", as in `SamplingSettings`.
    """
    counts = {"items": items, "dim": dim, "queries": queries, "devices": devices, "block": block}
    for name, count in counts.items():
        checks.integer(count, name, least=1)
    if shape is not None and not isinstance(shape, GeoFlowConfig):
        raise TypeError(f"shape must be a GeoFlowConfig, got {type(shape).__name__}")
    shape = shape or GeoFlowConfig.paper(dim, dim)
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    rates = _rates(device)
    settings = FAST_SAMPLING if fast else SamplingSettings()
    rows = settings.n_samples * queries
    gallery_bytes = float(items) * dim * ITEM_BYTES
    blocks = math.ceil(queries / block)
    if layout == "auto":
        layout = preferred_layout(gallery_bytes, rates.machine_memory, blocks, devices)
    divided = layout == "gallery"
    machines = math.ceil(devices / rates.devices)
    per_machine = gallery_bytes / machines if divided else gallery_bytes
    passes = blocks if divided else math.ceil(blocks / devices)
    link_bytes = passes * gallery_bytes * (1 if divided else devices)
    # The gallery is read once to check its rows and once for its digest. After that it is read from storage in every
    # pass, or only once more if it fits into memory.
    storage_bytes = 2 * gallery_bytes + (machines * per_machine if per_machine <= rates.machine_memory else link_bytes)
    statistics = (5 + 2 * TOP_K) * 8
    per_query = (settings.n_samples * dim * ITEM_BYTES + 4 * statistics) if divided and devices > 1 else 0
    if precision not in ELEMENT_BYTES:
        raise ValueError(f"precision must be one of {', '.join(ELEMENT_BYTES)}, got {precision!r}")
    copies = 2  # with and without the condition
    batch = min(copies * rows, GPU_ROWS_AT_ONCE)
    velocity = velocity_work(shape, batch, precision)
    velocities = settings.n_steps * EVALUATIONS[settings.solver] * copies * rows / batch
    sampling = velocity.operations * velocities
    scoring = 2.0 * rows * items * dim
    if device == "cpu":
        operations = COMPUTE_SHARE * rates.operations * devices
        moving = link_bytes / (BANDWIDTH_SHARE * rates.bandwidth * devices)
        sampling_seconds, scoring_seconds = sampling / operations, max(scoring / operations, moving)
        link_bytes = 0.0  # what is in memory is where it is computed with
    else:
        sampling_seconds = velocities * seconds(velocity, rates.products, precision) / devices
        own = math.ceil(items / devices) if divided else items
        scoring_seconds = passes * _pass_seconds(rates, min(block, queries), settings.n_samples, own, dim)
    parts = {
        "sampling": sampling_seconds,
        "scoring": scoring_seconds,
        "link": link_bytes / (BANDWIDTH_SHARE * rates.link * devices),
        "storage": storage_bytes / (rates.storage * devices),
        "network": per_query * queries / (BANDWIDTH_SHARE * rates.network),
    }
    hours = {name: value / 3600 for name, value in parts.items()}
    slowest = max(hours, key=lambda name: hours[name])
    # A block of items, from memory to the device, takes as long as it takes to score it for so many queries.
    rows_at_once = BLOCK_ROWS if device == "cpu" else GPU_BLOCK_ROWS
    starting = 0.0 if device == "cpu" else (scoring_work(1, 1, 1, dim).kernels + BLOCK_KERNELS) * STARTED_SECONDS
    copying = rows_at_once * dim * ITEM_BYTES / (BANDWIDTH_SHARE * rates.link)
    per_query_scored = 2.0 * settings.n_samples * rows_at_once * dim / (COMPUTE_SHARE * rates.scoring)
    return Plan(
        layout=layout,
        passes=passes,
        sampling_operations=sampling,
        scoring_operations=scoring,
        device_memory=_device_memory(
            shape, settings.n_samples * block, dim, devices if divided else 1, min(items, rows_at_once)
        ),
        gallery_bytes=gallery_bytes,
        gallery_bytes_per_machine=per_machine,
        link_bytes=link_bytes,
        storage_bytes=storage_bytes,
        network_bytes=float(per_query) * queries * devices,
        network_bytes_per_query=float(per_query),
        hours=hours,
        # One after the other: a block of items is read and copied once that before it has been scored.
        total_hours=sum(hours.values()),
        bound_by=slowest,
        advised_block=max(1, math.ceil((copying - starting) / per_query_scored)),
    )


def _pass_seconds(rates: DeviceRates, queries: int, samples: int, items: int, dim: int) -> float:
    """Seconds in which a GPU scores its items once for a block of queries, a block of items at a time."""
    blocks = math.ceil(items / GPU_BLOCK_ROWS)
    one = scoring_work(queries, samples, items / blocks, dim)
    work = Work(one.kernels + BLOCK_KERNELS, one.bytes, one.operations) * blocks
    return seconds(work, rates.products, "bfloat16", replayed=False)


def _device_memory(shape: GeoFlowConfig, samples: int, dim: int, shared_by: int, items: int) -> float:
    """Returns the bytes of the weights, the samples of a block, a block of items and its parts, and the network's
    widest layers."""
    rows = 2 * math.ceil(samples / shared_by)
    return 4.0 * (parameters(shape) + samples * dim + 2 * items * dim + rows * (4 * dim + 16 * shape.hidden))


def parameters(shape: GeoFlowConfig) -> int:
    """Number of parameters of a flow."""
    with torch.device("meta"):
        return sum(p.numel() for p in GeoFlow(shape).parameters())


@dataclass(frozen=True)
class TrainingPlan:
    """Estimated cost of training a flow and the head beside it."""

    pairs: int
    parameters: int
    steps: int
    """Steps of the whole run; early stopping ends it sooner."""
    batch_size: int
    total_hours: float


def plan_training(pairs: int, dim: int, device: str, devices: int, *, preset: str = "auto") -> TrainingPlan:
    """Estimates what `geoflow train` costs for this number of pairs of width `dim` on `devices` devices, which are
    named as in `plan_scoring`. `preset`: "auto", "tiny", "small" or "paper"."""
    for name, count, least in (("pairs", pairs, 4), ("dim", dim, 2), ("devices", devices, 1)):
        checks.integer(count, name, least)
    checks.one_of(preset, "preset", ("auto", "tiny", "small", "paper"))
    shape, config = preset_of_size(preset, dim, dim, pairs, None if device == "cpu" else MANY_CORES)
    taken = training_seconds(shape, config, pairs=pairs, with_head=True, rates=_rates(device))
    return TrainingPlan(pairs, parameters(shape), config.steps, config.batch_size, taken / 3600 / devices)


def training_seconds(
    shape: GeoFlowConfig, config: TrainConfig, *, pairs: int, with_head: bool = False, rates: DeviceRates | None = None
) -> float:
    """Estimates how long the whole run of a flow takes on this machine, and that of the head after it: operations by
    the rate that `plan_scoring` counts with, which is measured if it is not given. Early stopping ends runs sooner."""
    validations = sum(config.validates(step) for step in range(config.steps + 1))
    rows = 3.0 * config.steps * config.batch_size  # a backward pass costs as much as two forward ones
    held_out = math.ceil(config.val_fraction * pairs)
    rows += validations * config.val_batches * min(config.batch_size, held_out)
    if config.blend and shape.anchored:
        rows += blending_rows(held_out)
    operations = 2.0 * parameters(shape) * rows
    if with_head:
        operations += head_operations(pairs, shape.image_dim)
    return operations / training_rate(rates)


def training_rate(rates: DeviceRates | None = None) -> float:
    """Operations per second that training small networks reaches here; the machine is measured unless `rates` are
    given."""
    return TRAINING_SHARE * COMPUTE_SHARE * (_rates("cpu") if rates is None else rates).operations


def head_operations(pairs: int, dim: int) -> float:
    """Operations of fitting a head with `k="auto"`, trials included: mostly products of points with items."""
    few = pairs < FEW_PAIRS
    whole = []
    for setting in head_settings(FEW if few else MANY, pairs, "auto", chosen=False):
        validated = min(pairs, VALIDATION_QUERIES) * min(pairs, VALIDATION_ITEMS) / setting.val_every
        products = setting.steps * len(CONDITIONAL) * setting.points * (3 * setting.batch_size**2 + validated)
        whole.append(2.0 * dim * products)
    # On many pairs the trials are short, and the best setting is trained again.
    return sum(whole) if few else TRIAL_SHARE * sum(whole) + max(whole)


def duration(seconds: float) -> str:
    """A time in words, rounded up."""
    if seconds < 60:
        return f"{max(10, 10 * math.ceil(seconds / 10))} s"
    return f"{math.ceil(seconds / 60)} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _rates(name: str) -> DeviceRates:
    if checks.words(name, "device") in DEVICES:
        return DEVICES[name]
    if name != "cpu":
        raise ValueError(f"device must be one of {', '.join((*DEVICES, 'cpu'))}, got {name!r}")
    usable_device("cpu")
    memory = float(processors.physical_memory())
    operations, bandwidth = _measured_rates(torch.get_num_threads())
    # The measured rates are divided by the shares that are applied to peaks. Memory of the process needs no link.
    peak = bandwidth / BANDWIDTH_SHARE
    operations /= COMPUTE_SHARE
    return DeviceRates(operations, operations, peak, memory, peak, 1.25e9, 1e9, memory, 1)


@functools.cache
def _measured_rates(_threads: int) -> tuple[float, float]:
    """Operations and bytes per second with so many threads, measured once, so that plans of a process agree."""
    return _measure_operations(), _measure_bandwidth()


def _measure_operations() -> float:
    """Returns the floating-point operations per second of the fastest of five float32 matrix products."""
    a, b, out = (torch.ones(1024, 1024, dtype=torch.float32, device="cpu") for _ in range(3))
    return 2 * 1024**3 / min(_seconds(lambda: torch.mm(a, b, out=out)) for _ in range(5))


def _measure_bandwidth() -> float:
    """Returns the bytes per second of the fastest of five passes over an array."""
    x = torch.ones(2**24, dtype=torch.float32, device="cpu")
    return x.nbytes / min(_seconds(x.sum) for _ in range(5))


def _seconds(run: Any) -> float:
    """Seconds for which this thread computes: what others take of a busy machine does not count."""
    start = time.thread_time()
    run()
    return max(time.thread_time() - start, 1e-9)


def as_table(plan: Plan | TrainingPlan) -> dict[str, str]:
    """Returns the rows of a table that shows the plan."""
    if isinstance(plan, TrainingPlan):
        return {
            "pairs": f"{plan.pairs:,}",
            "parameters": f"{plan.parameters:,}",
            "steps, at most": f"{plan.steps:,} of {plan.batch_size:,} pairs",
            "estimate": f"at most {duration(3600 * plan.total_hours)}, with the head",
        }
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
