"""Instruction sets side by side.

Targets: a process for each instruction set that this processor has from AVX2 on, in which this library's kernels and
torch's products keep to it; they take turns, and the best of each rate counts. A processor with AVX2 alone has other
clocks and caches, so its column says which paths are chosen there and how they compare, not how fast such a machine is.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

import geoflow_fast as gf
from benchmarks.bench_gallery import spectral_rows
from benchmarks.bench_interpolant import InterpolantInput
from benchmarks.bench_ot import EPS, random_points
from benchmarks.common import gate, time_together
from benchmarks.limits import Limits, gemm_peak, integer_peak
from benchmarks.suite import Table
from geoflow_fast.ops import native

TORCH_NAMES = {
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
}
"""By the name of an instruction set here, the variables that keep torch and its libraries to it."""
OLDEST = "avx2"
TURNS = 2
SEARCHED, WIDTH, ITEMS = 64, 1024, 100_000
COUPLED = 2048


def tables() -> Iterator[Table]:
    yield targets()


def targets() -> Table:
    """Rates of the machine and of this library's kernels by instruction set."""
    known = native.supported_isas()
    names = known[known.index(OLDEST) :] if OLDEST in known else known[-1:]
    best: dict[str, dict[str, float]] = {name: {} for name in names}
    for _ in range(TURNS):
        for name in names:
            for rate, value in measured_in(name).items():
                best[name][rate] = max(value, best[name].get(rate, 0.0))
    rates = list(dict.fromkeys(rate for own in best.values() for rate in own))
    rows = [{"": rate, **{name: best[name].get(rate, float("nan")) for name in names}} for rate in rates]
    return Table("targets", rows)


def measured_in(isa: str) -> dict[str, float]:
    """`rates` in a process that keeps to an instruction set."""
    command = [sys.executable, "-c", "from benchmarks import bench_processors as b; b.print_rates()"]
    environment = {**os.environ, "GEOFLOW_ISA": isa, **TORCH_NAMES.get(isa, {})}
    root = Path(__file__).parents[1]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment, cwd=root)
    return dict(json.loads(done.stdout))


def print_rates() -> None:
    """Writes the rates of this process to standard output."""
    json.dump(rates(), sys.stdout)


def rates() -> dict[str, float]:
    """What products, memory and exponentials reach here, and this library's kernels."""
    torch.manual_seed(0)
    limits = Limits.measure()
    result = {
        "limit: float32 products, GFLOP/s": limits.flops / 1e9,
        "limit: memory, GB/s": limits.bytes / 1e9,
        "limit: exponentials, 10^9/s": limits.exps / 1e9,
    }
    if native.missing_bfloat16() is None:
        result["limit: bfloat16 products, GFLOP/s"] = gemm_peak(dtype=torch.bfloat16) / 1e9
    if native.missing_int8() is None:
        result["limit: int8 products, GOP/s"] = integer_peak() / 1e9
    return result | search_rates() | posterior_rates() | coupling_rates() | interpolant_rates()


def search_rates() -> dict[str, float]:
    gallery = spectral_rows(ITEMS, WIDTH)
    queries = gf.geometry.normalize(gallery[:SEARCHED] + 0.7 * spectral_rows(SEARCHED, WIDTH))
    runs = {"search": lambda: gf.ops.gallery_search(queries, gallery, 10)[1]}
    truth = (queries.double() @ gallery.double().T).topk(10).indices
    gate("search", float((runs["search"]() == truth).double().mean()) > 0.999)
    if native.missing_int8() is None:
        codes = gf.ops.RowCodes.encode(gallery)
        runs["search with bounds from bytes"] = lambda: gf.ops.gallery_search(queries, gallery, 10, codes=codes)[1]
        gate("the same items", torch.equal(*(run() for run in runs.values())))
    work = 2 * SEARCHED * ITEMS * WIDTH / 1e9
    return {f"{name}, {SEARCHED} x 1e5, GFLOP/s": work / value for name, value in time_together(runs, 5).items()}


def posterior_rates() -> dict[str, float]:
    gallery = spectral_rows(ITEMS, WIDTH)
    samples = gf.geometry.normalize(gallery[: 8 * 50] + 0.7 * spectral_rows(8 * 50, WIDTH)).unflatten(0, (8, 50))
    kinds = ["float32", *(["bfloat16"] if native.missing_bfloat16() is None else [])]
    runs = {kind: lambda k=kind: gf.ops.gallery_posterior(samples, gallery, 100.0, precision=k) for kind in kinds}
    exact = runs["float32"]().entropy
    for kind, run in runs.items():
        gate(f"posterior in {kind}", torch.allclose(run().entropy, exact, rtol=0, atol=0.01))
    work = 2 * 400 * ITEMS * WIDTH / 1e9
    return {f"posterior in {kind}, GFLOP/s": work / value for kind, value in time_together(runs, 3).items()}


def coupling_rates() -> dict[str, float]:
    points = random_points(COUPLED)
    expected = gf.ops.ot_assign(*points, eps=EPS, backend="reference")
    run = lambda: gf.ops.ot_assign(*points, eps=EPS, backend="cpu")  # noqa: E731
    gate("coupling", float((run() == expected).double().mean()) > 0.999)
    return {f"coupling, B = {COUPLED}, per second": 1 / time_together({"": run}, 5)[""]}


def interpolant_rates() -> dict[str, float]:
    batch = InterpolantInput.draw(8192, WIDTH)
    pairs = zip(batch.op("cpu", batch.out), batch.op("reference"))
    gate("interpolant", all(torch.allclose(a, b, atol=2e-6) for a, b in pairs))
    moved = 4 * WIDTH * (8 * 8192 - 2 * 8192 // 3) / 1e9
    return {"interpolant, GB/s": moved / time_together({"": lambda: batch.op("cpu", batch.out)}, 9)[""]}
