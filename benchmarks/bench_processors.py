"""Instruction sets side by side, and what bfloat16 products of a network cost in quality.

Targets: a process for each instruction set that this processor has from AVX2 on, in which this library's kernels and
torch's products keep to it; they take turns, and the best of each rate counts. A processor with AVX2 alone has other
clocks and caches, so its column says which paths are chosen there and how they compare, not how fast such a machine is.

The study (`python -m benchmarks --study processors`): entropies with bfloat16 products rank queries as float32 ones do
(Spearman at least .999), log-densities move by less than the noise of their probes, and flows and heads trained in
bfloat16 have held-out losses that differ by less than those of two seeds.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import geoflow_fast as gf
from benchmarks.bench_density import concept_flow, concept_pairs
from benchmarks.bench_entropy import KAPPA, rank_correlation
from benchmarks.bench_gallery import spectral_rows
from benchmarks.bench_interpolant import InterpolantInput
from benchmarks.bench_ot import EPS, random_points
from benchmarks.common import gate, report, time_together
from benchmarks.limits import Limits, gemm_peak, integer_peak
from benchmarks.suite import Table
from geoflow_fast.ops import native
from geoflow_fast.training.flow_matching import WIDE_ENOUGH
from geoflow_fast.worlds import ConceptWorld

TORCH_NAMES = {
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
}
"""By the name of an instruction set here, the variables that keep torch and its libraries to it."""
OLDEST = "avx2"
TURNS = 2
SEARCHED, WIDTH, ITEMS = 64, 1024, 100_000
COUPLED = 2048
DIM, QUERIES, SEEDS, STEPS = 128, 256, 4, 600
LEAST_SPEARMAN = 0.999


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


def entropies() -> str:
    """Entropies of the same samples' noise with float32 and with bfloat16 products."""
    flow = concept_flow(DIM)
    items, texts, _ = ConceptWorld(DIM).sample(1000, generator=torch.Generator().manual_seed(51))
    rows = []
    for name, settings in (("the paper's", gf.SamplingSettings()), ("fast", gf.FAST_SAMPLING)):
        exact, half = (
            gf.RetrievalEntropy(flow, items, kappa=KAPPA, settings=dataclasses.replace(settings, precision=precision))(
                texts[:QUERIES]
            ).entropy.double()
            for precision in ("float32", "bfloat16")
        )
        spearman = float(rank_correlation(exact, half))
        gate(f"entropies, {name}", spearman >= LEAST_SPEARMAN)
        change = float((exact - half).abs().mean())
        rows.append({"samples": name, "Spearman": f"{spearman:.5f}", "mean change of H, nats": change})
    return report("processors_entropies", rows, {"width": DIM, "queries": QUERIES})


def densities() -> str:
    """Log-densities of the same probes with float32 and with bfloat16 products, and the noise of the probes."""
    flow, (image, text) = concept_flow(DIM), concept_pairs(DIM)

    def joint(precision: str, seed: int) -> torch.Tensor:
        settings, generator = gf.DensitySettings(precision=precision), torch.Generator().manual_seed(seed)
        return gf.log_density(flow, image, text, "joint", generator=generator, settings=settings).double()

    exact = torch.stack([joint("float32", seed) for seed in range(SEEDS)])
    half = torch.stack([joint("bfloat16", seed) for seed in range(SEEDS)])
    noise, bias = float(exact.var(0).mean().sqrt()), float((half - exact).mean())
    gate("bias of log-densities", abs(bias) < noise)
    row = {"noise of a probe, nats": noise, "bias, nats": bias, "mean change, nats": float((half - exact).abs().mean())}
    return report("processors_densities", [row], {"width": DIM, "pairs": len(image)})


def training() -> str:
    """Held-out losses of flows, and negative log-likelihoods of heads, trained in float32 and in bfloat16."""
    image, text, _ = ConceptWorld(DIM).sample(20_000, generator=torch.Generator().manual_seed(100))
    pairs = gf.EmbeddingPairs.from_arrays(image, text)

    def flow_loss(precision: str, seed: int) -> float:
        torch.manual_seed(seed)
        flow = gf.GeoFlow(gf.GeoFlowConfig(DIM, DIM, hidden=WIDE_ENOUGH, depth=2))
        config = dataclasses.replace(gf.TrainConfig.tiny(), steps=STEPS, seed=seed, precision=precision)
        return gf.train(flow, pairs, config, progress=False).best_val_loss

    def head_loss(precision: str, seed: int) -> float:
        config = gf.HeadConfig(seed=seed, precision=precision)
        return float(gf.PosteriorHead.fit(pairs, config, k=4).report["nll"])

    rows = [row for name, loss in (("flow", flow_loss), ("head", head_loss)) for row in held_out_losses(name, loss)]
    return report("processors_training", rows, {"steps of a flow": STEPS})


def held_out_losses(name: str, loss: Callable[[str, int], float]) -> list[dict[str, object]]:
    """What is reached in float32 and in bfloat16, with two seeds each."""
    reached = {precision: [loss(precision, seed) for seed in (0, 1)] for precision in ("float32", "bfloat16")}
    between = abs(reached["float32"][0] - reached["float32"][1])
    change = sum(reached["bfloat16"]) / 2 - sum(reached["float32"]) / 2
    gate(f"training quality of a {name}", change < between)
    return [{"": name, "products": kind, "held-out loss, seed 0": a, "seed 1": b} for kind, (a, b) in reached.items()]


def run() -> str:
    """The study."""
    if (reason := native.missing_bfloat16()) is not None:
        raise SystemExit(f"bfloat16 products are not chosen on this processor: {reason}")
    return "\n\n".join((entropies(), densities(), training()))
