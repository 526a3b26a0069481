"""Retrieval entropy end to end, sampling included, 1024 wide with the paper's network.

Peers solve the ODE of the plain torch network with two passes for guidance and modulations per row: Euler steps along
great circles in torch, flow_matching's solver on the sphere, torchdiffeq in the space around it; then a dense
posterior. Gates: the same entropies from the paper's settings.

The study (`python -m benchmarks --study entropy`): on trained flows the entropies of `RetrievalEntropy.fast` are at
least as close to those of 400 samples and 200 steps as the paper's 50 and 50 are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import geoflow_fast as gf
from benchmarks import peers, twins
from benchmarks.common import RESULTS, gate, report
from benchmarks.flows import random_flow, row_flops
from benchmarks.limits import Work
from benchmarks.suite import PAPER_NAME, PEER, Case, Contender, Scaling, in_bfloat16, renamed, with_mkl_alone
from geoflow_fast.flow.sampling import FAST_SAMPLING, SamplingSettings, StartingPoints
from geoflow_fast.noise import sample_uniform
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


@dataclass(frozen=True)
class Scene:
    """Texts, images to retrieve, and the flow in both forms. `settings`: samples and steps of the paper's kind."""

    flow: gf.GeoFlow
    plain: twins.PlainFlow
    queries: Tensor
    gallery: Tensor
    settings: SamplingSettings

    @classmethod
    def draw(cls, config: gf.GeoFlowConfig, queries: int, items: int, **settings: Any) -> Scene:
        flow = random_flow(config)
        plain = twins.PlainFlow(flow).eval().requires_grad_(False)
        rows = sample_uniform(queries, config.text_dim), sample_uniform(items, config.image_dim)
        return cls(flow, plain, *rows, dataclasses.replace(PAPER, **settings))

    def paper(self, precision: str = "float32") -> Tensor:
        settings = dataclasses.replace(self.settings, precision=precision)
        return gf.RetrievalEntropy(self.flow, self.gallery, settings=settings)(self.queries).entropy

    def fast(self) -> Tensor:
        return gf.RetrievalEntropy.fast(self.flow, self.gallery)(self.queries).entropy

    def by(self, sampler: Callable[..., Tensor]) -> Tensor:
        """From the same noise, with another solver."""
        scorer = gf.RetrievalEntropy(self.flow, self.gallery, **self.settings)
        start = StartingPoints.draw(
            self.settings, self.flow.config.flow_dims, scorer.direction, torch.Generator().manual_seed(scorer.seed)
        )
        points = start.generated, start.condition
        samples = sampler(self.plain, self.queries, *points, self.settings.n_steps, self.settings.guidance)
        return twins.dense_entropy(samples, self.gallery, scorer.kappa)

    def truths(self) -> tuple[Tensor, Tensor]:
        """Of the paper's settings, and of the fast ones: a dense posterior in float64 from samples."""
        drawn = (
            gf.sample(self.flow, text=self.queries, **one, generator=torch.Generator().manual_seed(0))[0]
            for one in (self.settings, FAST_SAMPLING)
        )
        paper, fast = (twins.dense_entropy(x.double(), self.gallery.double(), 100.0) for x in drawn)
        return paper, fast


def within(nats: float, index: int = 0) -> Callable[[Tensor, Any], bool]:
    return lambda result, truth: torch.allclose(result.double(), truth[index], rtol=0, atol=nats)


OURS = Contender(f"geoflow_fast, {PAPER_NAME}", Scene.paper)
CONTENDERS = (
    Contender("torch", lambda s: s.by(twins.plain_samples), PEER),
    # Steps of the other two are not along great circles.
    Contender(
        "flow_matching", lambda s: s.by(peers.flow_matching_samples), PEER, needs="flow_matching", agrees=within(0.1)
    ),
    Contender("torchdiffeq", lambda s: s.by(peers.torchdiffeq_samples), PEER, needs="torchdiffeq", agrees=within(0.1)),
    OURS,
    *with_mkl_alone(OURS),
    *in_bfloat16(
        Contender(f"geoflow_fast, {PAPER_NAME}, bfloat16", lambda s: s.paper("bfloat16"), agrees=within(0.05))
    ),
    Contender("geoflow_fast, `RetrievalEntropy.fast`", Scene.fast, agrees=within(2e-3, index=1)),
)


def cases(quick: bool) -> list[Case]:
    config, queries, items, settings = gf.GeoFlowConfig.paper(), 2, 10_000, PAPER
    if quick:
        config, queries, items = gf.GeoFlowConfig.small(256, 256), 2, 1000
        settings = dataclasses.replace(PAPER, n_samples=20, n_steps=10)
    draws, steps = settings.n_samples, settings.n_steps
    rows = queries * draws
    flops = 2 * steps * rows * row_flops(config, "t2i") + 2 * rows * items * config.image_dim
    return [
        Case(
            f"Retrieval entropy, {queries} queries, {draws} samples x {steps} steps, N = {items:,}, "
            f"d = {config.image_dim}",
            lambda: Scene.draw(config, queries, items, n_samples=draws, n_steps=steps),
            Scene.truths,
            within(2e-3),
            renamed(CONTENDERS, PAPER_NAME, f"{draws} samples x {steps} steps") if quick else CONTENDERS,
            Work(flops=flops, bytes=4 * items * config.image_dim),
            rounds=1 if not quick else 3,
        )
    ]


def scalings(quick: bool) -> list[Scaling]:
    config, top = (gf.GeoFlowConfig.small(256, 256), 8) if quick else (gf.GeoFlowConfig.small(), 40)

    def over(name: str) -> Callable[[int], Callable[[], Any]]:
        def make(size: int) -> Callable[[], Any]:
            return Scene.draw(config, 2, 1000, **{"n_samples": 20, "n_steps": 10, name: size}).paper

        return make

    sizes = (top // 4, top // 2, top, 2 * top)
    return [
        Scaling("Retrieval entropy", "steps", sizes, over("n_steps")),
        Scaling("Retrieval entropy", "M", sizes, over("n_samples")),
    ]


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
        typical = reference if marginal == "scores" else "density"
        options = {"posterior": posterior, "reference": typical, "top_k": len(images)}
        post = gf.RetrievalEntropy.fast(flow, images, **kernel, **options)(texts[own])
        pi = torch.zeros(len(own), len(images)).scatter_(1, post.top_index, post.top_prob).double()
        rows.append(posterior_row(f"{posterior}, marginals: {marginal}", pi, truth, post.entropy, true_entropy))
    return report("entropy_posteriors", rows, {"fast": dataclasses.asdict(FAST_SAMPLING)})


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
    return "\n\n".join([*tables, posteriors()])
