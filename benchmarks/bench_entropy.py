"""Retrieval entropy end to end, sampling included: the paper's network, 4 queries over 10,000 items, 1024 wide.

The twin is what one would first write in torch: two passes for guidance, modulations per row, every step in new memory,
the posterior from a dense [Q, M, N]. Gates: at the paper's settings both give the same entropies, and on trained
flows the entropies of `RetrievalEntropy.fast` are at least as close to those of 400 samples and 200 steps as the
paper's 50 and 50 are.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import geoflow_fast as gf
from benchmarks.bench_training import WIDTH, PlainFlow
from benchmarks.common import RESULTS, gate, report, time_together
from geoflow_fast.entropy import FAST
from geoflow_fast.geometry import sample_uniform
from geoflow_fast.worlds import ConceptWorld

QUERIES, ITEMS = 4, 10_000
PAPER: dict[str, Any] = {"n_samples": 50, "n_steps": 50, "solver": "euler", "noise": "iid"}
BEST: dict[str, Any] = {"n_samples": 400, "n_steps": 200, "solver": "ab2", "noise": "antithetic", "seed": 999}
# Width of the world: network, training steps, queries. A kappa of 18 is near what `gf.fit_bandwidth` finds for both.
WORLDS = {
    24: (gf.GeoFlowConfig.tiny(), 1500, 64),
    128: (gf.GeoFlowConfig(128, 128, hidden=192, depth=4, layer_scale=0.1), 3000, 32),
}
KAPPA = 18.0
# Samples, noise, steps and grid of what else was considered, all with Adams-Bashforth steps.
CONSIDERED = [
    *((40, kind, 8, "late") for kind in ("orthogonal", "iid")),
    *((32, kind, 8, "late") for kind in ("antithetic", "orthogonal", "iid")),
    (48, "antithetic", 6, "late"),
    *((16, "antithetic", steps, grid) for steps, grid in ((8, "late"), (8, "uniform"), (10, "uniform"))),
]
SEEDS = 8


@torch.no_grad()
def straightforward(flow: PlainFlow, queries: Tensor, gallery: Tensor, start: Tensor, noise: Tensor) -> Tensor:
    """Entropies [Q] at the paper's settings, text to image, from base points and unconditional noise [M, d]."""
    draws, steps, guidance, kappa = len(start), 50, 3.0, 100.0
    rows = len(queries) * draws
    x, text, free = start.repeat(len(queries), 1), queries.repeat_interleave(draws, 0), noise.repeat(len(queries), 1)
    direction = torch.full((rows,), 2, dtype=torch.int8)
    for step in range(steps):
        t = torch.full((rows,), step / steps)
        conditional, unconditional = (flow(x, given, t, direction)[0] for given in (text, free))
        v = (conditional + guidance * (conditional - unconditional)) / steps
        angle = v.norm(dim=1, keepdim=True)
        x = torch.cos(angle) * x + torch.sin(angle) * v / angle
        x = x / x.norm(dim=1, keepdim=True)
    logits = kappa * torch.einsum("qmd,nd->qmn", x.view(len(queries), draws, -1), gallery)
    log_pi = torch.log_softmax(torch.logsumexp(logits, 1) - math.log(draws), 1)
    return -(log_pi.exp() * log_pi).sum(1)


def paper_network() -> gf.GeoFlow:
    """Random weights of such a size that samples move across the sphere."""
    torch.manual_seed(0)
    flow = gf.GeoFlow(gf.GeoFlowConfig.paper(WIDTH, WIDTH))
    with torch.no_grad():
        for parameter in flow.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return flow.eval()


def kept(found: dict[str, Tensor], name: str, run: Callable[[], Tensor]) -> Callable[[], None]:
    """`run`, whose last result is left in `found`: minutes are too long to run again for the gate."""

    def call() -> None:
        found[name] = run()

    return call


def speed() -> str:
    flow = paper_network()
    queries, gallery = sample_uniform(QUERIES, WIDTH), sample_uniform(ITEMS, WIDTH)
    paper, fast = gf.RetrievalEntropy(flow, gallery), gf.RetrievalEntropy.fast(flow, gallery)
    plain, start = PlainFlow(flow).eval(), (paper.start_generated, paper.start_condition)
    found: dict[str, Tensor] = {}
    contenders = {
        "torch, straightforward": lambda: straightforward(plain, queries, gallery, *start),
        "RetrievalEntropy": lambda: paper(queries).entropy,
        "RetrievalEntropy.fast": lambda: fast(queries).entropy,
    }
    seconds = time_together({name: kept(found, name, run) for name, run in contenders.items()}, rounds=2)
    same = torch.allclose(found["torch, straightforward"], found["RetrievalEntropy"], atol=2e-3)
    gate("the same entropies at the paper's settings", same)
    rows = [
        {
            "implementation": name,
            "seconds per query": value / QUERIES,
            "speed-up": seconds["torch, straightforward"] / value,
        }
        for name, value in seconds.items()
    ]
    return report("entropy", rows, {"queries": QUERIES, "items": ITEMS, "fast": FAST})


def trained_flow(dim: int) -> gf.GeoFlow:
    """A flow trained on the concept world of that width; kept, since it takes minutes."""
    config, steps, _ = WORLDS[dim]
    folder = RESULTS / f"concept_world_{dim}"
    image, text, _ = ConceptWorld(dim).sample(60_000, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    flow = gf.GeoFlow(config)
    train = dataclasses.replace(gf.TrainConfig.tiny(), steps=steps)
    gf.train(flow, gf.EmbeddingPairs.from_arrays(image, text), train, out=folder)
    return flow.eval()


class Agreement:
    """How close entropies of queries over 1,000 items are to those of 400 samples and 200 steps."""

    def __init__(self, dim: int) -> None:
        self.flow = trained_flow(dim)
        self.items, texts, _ = ConceptWorld(dim).sample(1000, generator=torch.Generator().manual_seed(51))
        self.queries = texts[: WORLDS[dim][2]]
        self.best = self.entropy(**BEST)

    def entropy(self, **settings: Any) -> Tensor:
        scorer = gf.RetrievalEntropy(self.flow, self.items, kappa=KAPPA, guidance=3.0, **settings)
        return scorer(self.queries).entropy.double()

    def row(self, name: str, settings: dict[str, Any]) -> dict[str, Any]:
        found = torch.stack([self.entropy(**settings, seed=seed) for seed in range(SEEDS)])
        spearman = torch.stack([rank_correlation(h, self.best) for h in found])
        return {
            "setting": name,
            "network rows": 2 * settings["n_samples"] * settings["n_steps"],
            "RMS error, nats": float((found - self.best).square().mean().sqrt()),
            "Spearman": round(float(spearman.mean()), 4),
            "standard deviation over seeds": float(found.std(0).mean()),
        }


def rank_correlation(a: Tensor, b: Tensor) -> Tensor:
    """Spearman's, for values without ties."""
    return torch.corrcoef(torch.stack([x.argsort().argsort().double() for x in (a, b)]))[0, 1]


def agreement(dim: int) -> str:
    """The paper's setting, the fast one and others against the best."""
    world = Agreement(dim)
    paper, fast = world.row("paper", PAPER), world.row("fast", FAST)
    gate(f"fast ranks as the paper's setting does, width {dim}", fast["Spearman"] >= paper["Spearman"])
    gate(f"fast is as close as the paper's setting, width {dim}", fast["RMS error, nats"] <= paper["RMS error, nats"])
    others = []
    for samples, noise, steps, grid in CONSIDERED:
        settings = {"n_samples": samples, "noise": noise, "n_steps": steps, "grid": grid, "solver": "ab2"}
        others.append(world.row(f"{samples} {noise}, {steps} AB2, {grid}", settings))
    return report(f"entropy_agreement_{dim}", [paper, fast, *others], {"kappa": KAPPA, "seeds": SEEDS})


def posteriors() -> str:
    """Likelihood and Bayes posteriors of 300 texts over 1,000 images against the true one, which the world knows."""
    world, flow = ConceptWorld(), trained_flow(24)
    held_out, (images, texts), (_, reference) = (
        world.sample(count, generator=torch.Generator().manual_seed(seed))[:2]
        for count, seed in ((1000, 50), (1000, 51), (256, 52))
    )
    own = torch.arange(300)
    truth = world.gallery_posterior(texts[own], images, "t2i")
    true_entropy = torch.special.entr(truth).sum(1)
    rows = [posterior_row("the truth", truth, truth, true_entropy, true_entropy)]
    for posterior, marginal in (("likelihood", "scores"), ("bayes", "scores"), ("bayes", "density")):
        # Marginals from the density cannot be fitted with: kappa and guidance are those fitted for the scores.
        fitted = gf.fit_bandwidth(flow, gf.EmbeddingPairs.from_arrays(*held_out), posterior=posterior)
        kernel = {"kappa": fitted.kappa, "guidance": fitted.guidance}
        options = {"posterior": posterior, "marginal": marginal, "reference": reference, "top_k": len(images)}
        post = gf.RetrievalEntropy.fast(flow, images, **kernel, **options)(texts[own])
        pi = torch.zeros(len(own), len(images)).scatter_(1, post.top_index, post.top_prob).double()
        rows.append(posterior_row(f"{posterior}, marginals: {marginal}", pi, truth, post.entropy, true_entropy))
    return report("entropy_posteriors", rows, {"fast": FAST})


def posterior_row(name: str, pi: Tensor, truth: Tensor, entropy: Tensor, true_entropy: Tensor) -> dict[str, Any]:
    log_pi = pi.clamp_min(1e-30).log()
    return {
        "posterior": name,
        "-log pi(true item)": float(-log_pi.diagonal().mean()),
        "KL from the truth": float((torch.special.xlogy(truth, truth) - truth * log_pi).sum(1).mean()),
        "mean H": float(entropy.mean()),
        "Spearman of H with the true H": float(rank_correlation(entropy, true_entropy)),
    }


def run() -> str:
    tables = [f"Concept world of width {dim}:\n\n{agreement(dim)}" for dim in WORLDS]
    return "\n\n".join([*tables, posteriors(), speed()])
