"""What this GPU does with the library, beside what was expected of it: one table to paste into an issue.

    python -m tools.gpu_report         runs the tests of the GPU, with compute-sanitizer if it is installed, then times

`make test-gpu` runs it. Estimates are those of `geoflow_fast.flow.costs` for the most similar GPU that it knows.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable

import torch

import geoflow_fast as gf
from geoflow_fast.directions import DIRECTIONS, Direction
from geoflow_fast.flow import costs
from geoflow_fast.flow.sampling import StartingPoints, sample_conditional
from geoflow_fast.likelihood.reverse_ode import density_estimates
from geoflow_fast.noise import sample_uniform
from geoflow_fast.plan import DEVICES

TESTS = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/gpu"]
STEPS = 8


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


def known_gpu(name: str) -> str:
    """The GPU of `plan.DEVICES` with which this one is compared."""
    return next((key for key in DEVICES if key in name.lower()), "a100")


def timings() -> list[tuple[str, float, float, str]]:
    """(what, milliseconds, estimated milliseconds, note) of paths and of the memory."""
    rates = DEVICES[known_gpu(torch.cuda.get_device_name())].products
    shape = gf.GeoFlowConfig.paper()
    flow = gf.GeoFlow(shape).eval().to("cuda")
    rows: list[tuple[str, float, float, str]] = []
    x = torch.empty(2**28, device="cuda", dtype=torch.float32)
    copied = 2.0 * x.nbytes
    took = milliseconds(x.clone)
    rows.append(("copy of 1 GB", took, 1e3 * copied / rates.bandwidth, f"{copied / took / 1e6:,.0f} GB/s"))
    del x
    for precision in ("float32", "tf32", "bfloat16"):
        for queries in (5, 320):
            settings = gf.SamplingSettings(50, STEPS, precision=precision)
            given = sample_uniform(queries, 1024).to("cuda")
            start = StartingPoints.draw(settings, shape.flow_dims, Direction.T2I, None).to(given)
            took = milliseconds(lambda g=given, b=start, s=settings: sample_conditional(flow, g, Direction.T2I, b, s))
            work = costs.velocity_work(shape, 100 * queries, precision) * STEPS
            expected, note = 1e3 * costs.seconds(work, rates, precision), flow.graphs.reason or "replayed"
            rows.append((f"{STEPS} guided velocities, {queries} x 50, {precision}", took, expected, note))
        pair = [sample_uniform(512, 1024).to("cuda") for _ in range(2)]
        density = gf.DensitySettings(n_steps=STEPS, solver="euler", precision=precision)
        took = milliseconds(lambda p=pair, s=density: density_estimates(flow, *p, DIRECTIONS, s, 0))
        work = costs.likelihood_work(shape, 512, precision) * STEPS
        expected = 1e3 * costs.seconds(work, rates, precision, replayed=False)
        rows.append((f"{STEPS} likelihood evaluations, 512 pairs, {precision}", took, expected, "started one by one"))
    return rows


def table(tests: dict[str, str], rows: list[tuple[str, float, float, str]]) -> str:
    """Markdown for an issue."""
    name = torch.cuda.get_device_name()
    facts = {"GPU": name, "torch": torch.__version__, "compared with": known_gpu(name).upper(), **tests}
    lines = ["| fact | |", "|---|---|", *(f"| {key} | {value} |" for key, value in facts.items()), ""]
    lines += ["| call | ms | estimated ms | ratio | note |", "|---|---|---|---|---|"]
    for what, took, expected, note in rows:
        lines.append(f"| {what} | {took:.2f} | {expected:.2f} | {took / expected:.2f} | {note} |")
    return "\n".join(lines)


def outcome(command: list[str]) -> str:
    """The last line of a test run."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    last = [line for line in done.stdout.splitlines() if line.strip()][-1:] or ["no output"]
    return f"{last[0].strip('= ')} (exit status {done.returncode})"


def main() -> None:
    """The command; it fails where there is no GPU, or if a test fails."""
    if not torch.cuda.is_available():
        sys.exit("no CUDA device: torch.cuda.is_available() is false")
    tests = {"parity": outcome(TESTS)}
    sanitizer = shutil.which("compute-sanitizer")
    tests["compute-sanitizer"] = (
        outcome([sanitizer, "--error-exitcode", "1", *TESTS, "-k", "parity"]) if sanitizer else "not installed"
    )
    print("Please paste this into an issue:\n")
    print(table(tests, timings()))
    if "(exit status 0)" not in tests["parity"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
