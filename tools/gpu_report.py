"""What this GPU does with the library, beside what was expected of it: one table to paste into an issue.

    python -m tools.gpu_report         runs the tests of the GPU, with compute-sanitizer if it is installed, then times

`make test-gpu` runs it. Estimates are those of `tools.costs` for the most similar GPU that it knows, of
whole paths from the counts of `tools.launches`. What fails has a line in the table that says so, and the exit status is
1 then; the table is printed all the same.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import geoflow_fast as gf
from geoflow_fast.directions import DIRECTIONS, Direction
from geoflow_fast.flow.sampling import StartingPoints, sample_conditional
from geoflow_fast.likelihood.reverse_ode import density_estimates
from geoflow_fast.noise import sample_uniform
from geoflow_fast.ops import transport
from geoflow_fast.training import loop
from geoflow_fast.training.batches import Prefetcher
from geoflow_fast.training.flow_matching import FlowMatching
from geoflow_fast.training.logging import StepRate
from tools import costs

TESTS = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/gpu", "-k"]
SANITIZER = "compute_sanitizer"
"""Part of the names of the tests that run others under compute-sanitizer, which choose these others themselves."""
BATCH, ITEMS, WIDTH = 8192, 100_000, 1024
"""Sizes of the paths that `tools.launches` counts."""
ITERATIONS = 40
STEPS = 8
FAILED = "failed: "


@dataclass(frozen=True)
class Row:
    """A call with its time and the estimate in milliseconds; neither is known where it failed."""

    what: str
    took: float | None
    expected: float
    note: str


def missing() -> str | None:
    """What the tests of a GPU lack here, if anything."""
    if not torch.backends.cuda.is_built():
        return (
            f"torch {torch.__version__} is a build without CUDA; install one with CUDA into .venv, "
            "by the command that pytorch.org gives for your driver"
        )
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no CUDA device; see `nvidia-smi` and `geoflow doctor`"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; pip install triton"
    return None


def milliseconds(run: Callable[[], object], repeats: int = 10) -> float:
    """The median of several calls, after three that compile and capture."""
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[repeats // 2]


def timed(what: str, run: Callable[[], object], expected: float, note: Callable[[float], str]) -> Row:
    """A line of the table: `expected` milliseconds, and what `note` says about those it took."""
    try:
        took = milliseconds(run)
    except RuntimeError as error:  # of CUDA and Triton, and their lack of memory
        return Row(what, None, expected, f"{FAILED}{str(error).splitlines()[0]}")
    return Row(what, took, expected, note(took))


def known_gpu(name: str) -> str:
    """The GPU of `costs.PEAKS` with which this one is compared."""
    return next((key for key in costs.PEAKS if key in name.lower().replace(" ", "")), "a100")


def on_device(module: nn.Module) -> nn.Module:
    """The module on the GPU."""
    return module.to("cuda")


def timings() -> Iterator[Row]:
    """Lines for the memory, for whole paths and for single kernels."""
    gpu = known_gpu(torch.cuda.get_device_name())
    rates = costs.PEAKS[gpu]
    yield _copy(rates)
    yield from _paths(rates)
    yield from _calls(gpu)
    yield from _transport(rates)
    yield from _kernels(rates)


def _copy(rates: costs.ProductRates) -> Row:
    x = torch.empty(2**28, device="cuda", dtype=torch.float32)
    copied = 2.0 * x.nbytes
    return timed("copy of 1 GB", x.clone, 1e3 * copied / rates.bandwidth, lambda ms: f"{copied / ms / 1e6:,.0f} GB/s")


def _paths(rates: costs.ProductRates) -> Iterator[Row]:
    """Samples and densities of the paper's network."""
    shape = gf.GeoFlowConfig.paper()
    flow: Any = on_device(gf.GeoFlow(shape).eval())

    def how(_: float) -> str:
        return "replayed" if flow.graphs.reason is None else str(flow.graphs.reason)

    for precision in ("float32", "tf32", "bfloat16"):
        for queries in (5, 320):
            settings = gf.SamplingSettings(50, STEPS, precision=precision)
            given = sample_uniform(queries, 1024).to("cuda")
            start = StartingPoints.draw(settings, shape.flow_dims, Direction.T2I, None).to(given)
            work = costs.velocity_work(shape, 100 * queries, precision) * STEPS
            yield timed(
                f"{STEPS} guided velocities, {queries} x 50, {precision}",
                lambda g=given, b=start, s=settings: sample_conditional(flow, g, Direction.T2I, b, s),  # type: ignore[misc]
                1e3 * costs.seconds(work, rates, precision),
                how,
            )
        pair = [sample_uniform(512, 1024).to("cuda") for _ in range(2)]
        density = gf.DensitySettings(n_steps=STEPS, solver="euler", precision=precision)
        work = costs.likelihood_work(shape, 512, precision) * STEPS
        yield timed(
            f"{STEPS} likelihood evaluations, 512 pairs, {precision}",
            lambda p=pair, s=density: density_estimates(flow, *p, DIRECTIONS, s, 0),  # type: ignore[misc]
            1e3 * costs.seconds(work, rates, precision),
            how,
        )


def _calls(gpu: str) -> Iterator[Row]:
    """The other paths of docs/gpu.md, by the names that `tools.launches` counts them under."""
    from tools import launches  # which imports Triton

    counts = counted()
    flow: Any = on_device(gf.GeoFlow(gf.GeoFlowConfig.paper()).eval())
    head: Any = on_device(gf.PosteriorHead(gf.HeadConfig(points=8), WIDTH, WIDTH).eval())
    items = sample_uniform(ITEMS, WIDTH).to("cuda")
    reranker = gf.BayesReranker(flow, items, direction="t2i", shortlist=32, n_steps=6)
    candidates = torch.arange(5 * 32).view(5, 32)
    calls: dict[str, tuple[Callable[[Tensor], object], int]] = {
        "entropies of 5 queries": (gf.RetrievalEntropy.fast(flow, items, direction="t2i"), 5),
        "5 re-ranked queries": (lambda queries: reranker(queries, candidates=candidates), 5),
        "head posteriors of 64 queries": (gf.RetrievalEntropy(head, items, direction="t2i"), 64),
    }
    for name, (call, queries) in calls.items():
        given = sample_uniform(queries, WIDTH).to("cuda")
        expected = launches.estimated_ms(counts[name], gpu)
        yield timed(name, lambda c=call, q=given: c(q), expected, lambda _: "")  # type: ignore[misc]
    for name, changes in {
        "one training step": {},
        "one training step, fixed directions": {"fixed_directions": True},
    }.items():
        yield timed(name, training_step(**changes), launches.estimated_ms(counts[name], gpu), lambda _: "")


def counted() -> dict[str, Any]:
    """What `tools.launches` counts for each path, in a process that sees no GPU: it fakes one."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "counts.json")
        command = [sys.executable, "-m", "tools.launches", "--json", str(path)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
        counts: dict[str, Any] = json.loads(path.read_text())
    return counts


def training_step(**changes: Any) -> Callable[[], None]:
    """A function that takes one more step of the paper's run, with these settings changed."""
    image, text = (sample_uniform(2 * BATCH, WIDTH).cpu().numpy().astype(np.float32) for _ in range(2))
    pairs = gf.EmbeddingPairs.from_arrays(image, text)
    never = {"log_every": 10**6, "val_every": 10**6}
    config = dataclasses.replace(gf.TrainConfig.paper(), batch_size=BATCH, **never, **changes)
    flow: Any = on_device(gf.GeoFlow(gf.GeoFlowConfig.paper()).train())
    run = loop.Run(FlowMatching(flow, pairs, pairs, config))
    # Without a thread that prepares the next batch: the estimate counts what it does, too.
    batches = Prefetcher(run.objective.training_batch, 0, config.steps, run.device, enabled=False)
    rate = StepRate(0)
    return lambda: loop._take_step(run, batches, rate)


def _transport(rates: costs.ProductRates) -> Iterator[Row]:
    """The CUDA kernels of the coupling of a batch, with points and costs in float16: what a plan takes beside its
    iterations, and so many iterations."""
    points = [sample_uniform(BATCH, WIDTH).to("cuda", torch.float16) for _ in range(4)]
    matrix = 2.0 * BATCH**2

    def plan(iterations: int) -> Callable[[], object]:  # a tolerance that is never met
        return lambda: transport.ot_solve_cuda(*points, 0.05, 1e-30, iterations, None)

    score = costs.Work(3, 3 * matrix + 4 * 2.0 * BATCH * WIDTH, 2.0 * BATCH**2 * 2 * WIDTH)
    yield timed(
        f"costs, one iteration and the argmax of {BATCH} x {BATCH} pairs",
        plan(1),
        1e3 * costs.seconds(score, rates, "bfloat16"),
        lambda ms: _rate(ms, score.bytes / 1e6, score.operations / 1e12),
    )
    whole = costs.Work(score.kernels, score.bytes + ITERATIONS * matrix, score.operations)
    yield timed(
        f"the same with {ITERATIONS} Sinkhorn iterations more",
        plan(1 + ITERATIONS),
        1e3 * costs.seconds(whole, rates, "bfloat16"),
        lambda ms: _rate(ms, whole.bytes / 1e6, whole.operations / 1e12),
    )


def _kernels(rates: costs.ProductRates) -> Iterator[Row]:
    """Calls of single kernels at the paper's sizes, those of docs/gpu.md."""
    from tools import aot  # which imports Triton

    for case in aot.table_cases():
        work = costs.Work(1, 1e6 * case.megabytes, 1e12 * case.teraflop)
        expected = 1e3 * costs.seconds(work, rates, case.precision)
        moved, computed = case.megabytes, case.teraflop
        yield timed(case.name, case.call, expected, lambda ms, m=moved, t=computed: _rate(ms, m, t))  # type: ignore[misc]


def _rate(ms: float, megabytes: float, teraflop: float) -> str:
    return f"{1e3 * teraflop / ms:,.0f} TFLOP/s" if teraflop else f"{megabytes / ms:,.0f} GB/s"


def table(tests: dict[str, str], rows: list[Row]) -> str:
    """Markdown for an issue."""
    name = torch.cuda.get_device_name()
    facts = {"GPU": name, "torch": torch.__version__, "compared with": known_gpu(name).upper(), **tests}
    lines = ["| fact | |", "|---|---|", *(f"| {key} | {value} |" for key, value in facts.items()), ""]
    lines += ["| call | ms | estimated ms | ratio | note |", "|---|---|---|---|---|"]
    for row in rows:
        took, ratio = ("-", "-") if row.took is None else (f"{row.took:.2f}", f"{row.took / row.expected:.2f}")
        lines.append(f"| {row.what} | {took} | {row.expected:.2f} | {ratio} | {row.note} |")
    return "\n".join(lines)


def outcome(command: list[str]) -> str:
    """The last line of a test run, whose output is shown as it comes."""
    last = "no output"
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        for line in run.stdout:
            sys.stdout.write(line)
            last = line.strip("= \n") or last
    return f"{last} (exit status {run.returncode})"


def main() -> None:
    """The command; it fails where there is no GPU, or if a test or a call fails."""
    reason = missing()
    if reason is not None:
        sys.exit(f"there is nothing to report about a GPU: {reason}")
    tests = {"tests": outcome([*TESTS, f"not {SANITIZER}"]), "compute-sanitizer": outcome([*TESTS, SANITIZER])}
    rows = list(timings())
    print("Please paste this into an issue:\n")
    print(table(tests, rows))
    passed = all("(exit status 0)" in last for last in tests.values())
    if not passed or any(row.note.startswith(FAILED) for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
