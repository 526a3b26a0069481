"""What bfloat16 products of a network cost in quality.

Entropies with bfloat16 products rank queries as float32 ones do (Spearman at least .999), log-densities move by less
than the noise of their probes, and flows and heads trained in bfloat16 have held-out losses that differ by less than
those of two seeds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

import geoflow_fast as gf
from benchmarks.methods.results import gate, report
from benchmarks.methods.studies.density import concept_flow, concept_pairs
from benchmarks.methods.studies.entropy import KAPPA, rank_correlation
from geoflow_fast.ops import extension
from geoflow_fast.training.flow_matching import WIDE_ENOUGH
from geoflow_fast.worlds import ConceptWorld

DIM, QUERIES, SEEDS, STEPS = 128, 256, 4, 600
LEAST_SPEARMAN = 0.999


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
    return report("bfloat16_entropies", rows, {"width": DIM, "queries": QUERIES})


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
    return report("bfloat16_densities", [row], {"width": DIM, "pairs": len(image)})


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
    return report("bfloat16_training", rows, {"steps of a flow": STEPS})


def held_out_losses(name: str, loss: Callable[[str, int], float]) -> list[dict[str, object]]:
    """What is reached in float32 and in bfloat16, with two seeds each."""
    reached = {precision: [loss(precision, seed) for seed in (0, 1)] for precision in ("float32", "bfloat16")}
    between = abs(reached["float32"][0] - reached["float32"][1])
    change = sum(reached["bfloat16"]) / 2 - sum(reached["float32"]) / 2
    gate(f"training quality of a {name}", change < between)
    return [{"": name, "products": kind, "held-out loss, seed 0": a, "seed 1": b} for kind, (a, b) in reached.items()]


def run() -> str:
    """The study."""
    if (reason := extension.missing_bfloat16()) is not None:
        raise SystemExit(f"bfloat16 products are not chosen on this processor: {reason}")
    return "\n\n".join((entropies(), densities(), training()))
