"""How close entropies of the fast setting are to those of many samples and steps, and to the true ones.

On trained flows the entropies of `RetrievalEntropy.fast` are at least as close to those of 400 samples and 200 steps as
those of the paper's 50 samples and 50 steps.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

import geoflow_fast as gf
from benchmarks.methods.results import RESULTS, gate, report
from geoflow_fast.flow.sampling import FAST_SAMPLING, SamplingSettings
from geoflow_fast.worlds import ConceptWorld

PAPER = SamplingSettings()
BEST, BEST_SEED = SamplingSettings(n_samples=400, n_steps=200, solver="ab2", noise="antithetic"), 999
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
        self.best = self.entropy(BEST, BEST_SEED)

    def entropy(self, settings: SamplingSettings, seed: int) -> Tensor:
        scorer = gf.RetrievalEntropy(self.flow, self.items, kappa=KAPPA, seed=seed, settings=settings)
        return scorer(self.queries).entropy.double()

    def row(self, name: str, settings: SamplingSettings) -> dict[str, Any]:
        entropies = torch.stack([self.entropy(settings, seed) for seed in range(SEEDS)])
        spearman = torch.stack([rank_correlation(h, self.best) for h in entropies])
        return {
            "setting": name,
            "network rows": 2 * settings.n_samples * settings.n_steps,
            "RMS error, nats": float((entropies - self.best).square().mean().sqrt()),
            "Spearman": round(float(spearman.mean()), 4),
            "standard deviation over seeds": float(entropies.std(0).mean()),
        }


def rank_correlation(a: Tensor, b: Tensor) -> Tensor:
    """Spearman's, for values without ties."""
    return torch.corrcoef(torch.stack([x.argsort().argsort().double() for x in (a, b)]))[0, 1]


def agreement(dim: int) -> str:
    """The paper's setting, the fast one and others against the best."""
    world = Agreement(dim)
    paper, fast = world.row("paper", PAPER), world.row("fast", FAST_SAMPLING)
    gate(f"fast ranks as the paper's setting does, width {dim}", fast["Spearman"] >= paper["Spearman"])
    gate(f"fast is as close as the paper's setting, width {dim}", fast["RMS error, nats"] <= paper["RMS error, nats"])
    others = []
    for samples, noise, steps, grid in CONSIDERED:
        settings = SamplingSettings(n_samples=samples, n_steps=steps, solver="ab2", grid=grid, noise=noise)
        others.append(world.row(f"{samples} {noise}, {steps} AB2, {grid}", settings))
    return report(f"entropy_agreement_{dim}", [paper, fast, *others], {"kappa": KAPPA, "seeds": SEEDS})


def posterior() -> str:
    """The posterior of 300 texts over 1,000 images, and the true one, which the world knows."""
    world, flow = ConceptWorld(), trained_flow(24)
    held_out, (images, texts) = (
        world.sample(count, generator=torch.Generator().manual_seed(seed))[:2]
        for count, seed in ((1000, 50), (1000, 51))
    )
    own = torch.arange(300)
    truth = world.gallery_posterior(texts[own], images, "t2i")
    true_entropy = torch.special.entr(truth).sum(1)
    fitted = gf.fit_bandwidth(flow, gf.EmbeddingPairs.from_arrays(*held_out))
    kernel = {"kappa": fitted.kappa, "guidance": fitted.guidance}
    post = gf.RetrievalEntropy.fast(flow, images, **kernel, top_k=len(images))(texts[own])
    pi = torch.zeros(len(own), len(images)).scatter_(1, post.top_index, post.top_prob).double()
    rows = [
        posterior_row("the truth", truth, truth, true_entropy, true_entropy),
        posterior_row("the flow's", pi, truth, post.entropy, true_entropy),
    ]
    return report("entropy_posterior", rows, {"fast": dataclasses.asdict(FAST_SAMPLING)})


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
    """The study."""
    tables = [f"Concept world of width {dim}:\n\n{agreement(dim)}" for dim in WORLDS]
    return "\n\n".join([*tables, posterior()])
