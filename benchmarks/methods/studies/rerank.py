"""How good `BayesReranker` is on the concept world, whose posterior is known.

1,000 queries over the 1,000 items of the same pairs, calibrated on 1,000 other pairs, both directions. Scores of
"cosine's answer is wrong": 1 - p_answer; the paper's entropy, kappa and guidance fitted on the held-out pairs (in the
setting of `RetrievalEntropy.fast`, which is as close to the exact entropy as the paper's); and the references that need
no training, the temperature tuned on the held-out pairs too. Gates are the claims of docs/rerank.md.
"""

from __future__ import annotations

import torch

import geoflow_fast as gf
from benchmarks.methods.results import gate, report
from benchmarks.methods.studies.entropy import trained_flow
from geoflow_fast.evaluation.metrics import auroc, reliability
from geoflow_fast.likelihood.reverse_ode import density_estimates
from geoflow_fast.likelihood.settings import DensitySettings
from geoflow_fast.worlds import ConceptWorld, PairWorld

QUERIES, NEIGHBOURS, NOISE_QUERIES, SHORTLIST = 1000, 10, 50, 32
TEMPERATURES = torch.logspace(0, 3, 61, base=10)


class RerankStudy:
    """One direction: the queries' own items are the gallery, in order."""

    def __init__(self, flow: gf.GeoFlow, direction: str, world: PairWorld | None = None) -> None:
        self.flow, self.direction, self.world = flow, direction, world or ConceptWorld()
        image, text, _ = self.world.sample(2 * QUERIES, generator=torch.Generator().manual_seed(51))
        self.pairs = gf.EmbeddingPairs.from_arrays(image[QUERIES:], text[QUERIES:])
        sides = (text, image) if direction == "t2i" else (image, text)
        (self.queries, self.held_queries), (self.items, self.held_items) = (x.split(QUERIES) for x in sides)
        self.cosine = self.queries @ self.items.T
        self.wrong = self.cosine.argmax(1) != torch.arange(QUERIES)

    def reranked(self) -> dict[str, float]:
        """What the re-ranker claims and how it compares with the truth."""
        reranker = gf.BayesReranker(self.flow, self.items, self.direction, SHORTLIST)
        own = self.against_truth(reranker.rerank(self.queries))
        fitted = reranker.calibrate(self.pairs)
        post = reranker(self.queries)
        right = post.index == torch.arange(QUERIES).unsqueeze(1)
        reached = right.any(1)
        nll = -torch.where(reached, (post.prob * right).sum(1), post.p_outside).double().log()
        return {
            **own,
            "AUROC, 1 - p_answer": auroc(1 - post.p_answer, ~self.wrong),
            "Recall@1": float(right[:, 0].double().mean()),
            "ECE": reliability(post.p_answer, ~self.wrong, strategy="quantile").ece,
            "ECE outside": reliability(post.p_outside, ~reached, strategy="quantile").ece,
            "NLL": float(nll.mean()),
            "NLL, cross-fitted": fitted.nll,
            "alpha": fitted.alpha,
            "beta": fitted.beta,
            "outside": fitted.outside,
        }

    def against_truth(self, post: gf.Reranked) -> dict[str, float]:
        """The flow's own posterior against the softmax of the true PMI, both over the shortlist."""
        pmi = self.world.gallery_posterior(self.queries, self.items, self.direction).log().gather(1, post.index)
        truth, estimate = pmi.softmax(1), post.prob.double()
        entropies = torch.stack((torch.special.entr(truth).sum(1), post.entropy.double()))
        divergence = (truth * (truth.log() - estimate.clamp_min(1e-12).log())).sum(1)
        return {
            "KL to the truth, nats": float(divergence.mean()),
            "correlation of entropies": float(torch.corrcoef(entropies)[0, 1]),
        }

    def probe_noise(self, *, shared: bool) -> float:
        """Standard deviation over seeds of log p(q | g_j), nats, without what all of a shortlist have in common."""
        queries = self.queries[:NOISE_QUERIES].unsqueeze(1).expand(-1, 32, -1).flatten(0, 1)
        items = self.items[self.cosine[:NOISE_QUERIES].topk(32).indices].flatten(0, 1)
        reverse = gf.Direction.of(self.direction).reverse
        pair = reverse.pair(items, queries)
        settings = DensitySettings(n_steps=6, shared=shared)
        estimates = torch.stack(
            [density_estimates(self.flow, *pair, (reverse,), settings, seed)[0, 0] for seed in range(8)]
        )
        estimates = estimates.unflatten(1, (NOISE_QUERIES, 32))
        return float((estimates - estimates.mean(2, keepdim=True)).std(0).mean())

    def papers_entropy(self) -> float:
        """AUROC of the paper's entropy."""
        fitted = gf.fit_bandwidth(self.flow, self.pairs, self.direction)
        scorer = gf.RetrievalEntropy.fast(
            self.flow, self.items, self.direction, kappa=fitted.kappa, guidance=fitted.guidance
        )
        return auroc(scorer(self.queries).entropy, ~self.wrong)

    def references(self) -> dict[str, float]:
        """AUROC of what needs no training of a flow."""
        scale = self.tuned_scale()
        pi = (scale * self.cosine).softmax(1)
        best = self.cosine.topk(2).values
        image, text, _ = self.world.sample(60_000, generator=torch.Generator().manual_seed(0))  # as for `trained_flow`
        near = (self.queries @ (text if self.direction == "t2i" else image).T).topk(NEIGHBOURS).values
        scores = {
            "max softmax": -pi.amax(1),
            "margin": best[:, 1] - best[:, 0],
            "softmax entropy": torch.special.entr(pi).sum(1),
            "kNN distance": -near[:, -1],
        }
        return {f"AUROC, {name}": auroc(score, ~self.wrong) for name, score in scores.items()}

    def tuned_scale(self) -> float:
        """Inverse temperature with the least -log pi(own item) on held-out queries, each searched with its own item."""
        own = (self.held_queries * self.held_items).sum(1, keepdim=True)
        logits = torch.cat((own, self.held_queries @ self.items.T), dim=1)
        return float(min(TEMPERATURES, key=lambda scale: float(-(scale * logits).log_softmax(1)[:, 0].mean())))

    def measured(self) -> dict[str, float]:
        """All numbers by name, gated."""
        numbers, references, paper = self.reranked(), self.references(), self.papers_entropy()
        recall, score, name = float((~self.wrong).double().mean()), numbers["AUROC, 1 - p_answer"], self.direction
        noise = {kind: self.probe_noise(shared=kind == "shared") for kind in ("shared", "independent")}
        gate(f"{name}: AUROC at least .04 above the best reference", score >= max(references.values()) + 0.04)
        gate(f"{name}: AUROC above the paper's entropy", score > paper)
        gate(f"{name}: Recall@1 above cosine", numbers["Recall@1"] > recall)
        gate(f"{name}: entropies correlate with the true ones", numbers["correlation of entropies"] >= 0.85)
        gate(f"{name}: calibrated", numbers["ECE"] <= 0.05)
        gate(f"{name}: shared probes are less noisy", noise["shared"] < noise["independent"])
        return {
            **numbers,
            "Recall@1 of cosine": recall,
            "AUROC, paper's entropy": paper,
            **references,
            **{f"noise between items, {kind} probes, nats": value for kind, value in noise.items()},
        }


def run() -> str:
    """The study."""
    flow = trained_flow(24)
    columns = {direction: RerankStudy(flow, direction).measured() for direction in ("t2i", "i2t")}
    rows = [{"": name, **{direction: column[name] for direction, column in columns.items()}} for name in columns["t2i"]]
    return report("rerank_study", rows, {"queries": QUERIES})
