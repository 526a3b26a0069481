"""How good the answers of a `PosteriorHead` are, against the truth of the concept world.

Five seeds, K chosen by "auto" on 60,000 pairs, five galleries of 1,000 items with as many queries each, compared with
the exact posterior; what a head adds to a flow; the time that training takes. Gates are the claims of docs/head.md.
The study `real` judges heads on real data.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor

import geoflow_fast as gf
from benchmarks.methods.results import gate, report
from benchmarks.methods.studies.entropy import trained_flow
from geoflow_fast.directions import CONDITIONAL, Direction
from geoflow_fast.evaluation.metrics import auroc, reliability
from geoflow_fast.evaluation.statistics import bootstrap_interval
from geoflow_fast.worlds import ConceptWorld

QUERIES, GALLERIES, SEEDS, PAIRS = 1000, 5, 5, 60_000
SHORTLIST = 32
"""Of all re-rankers, with a flow and without, so that their likelihoods can be compared."""


class World:
    """A seed of the concept world: pairs to train on, held-out pairs to calibrate on, and galleries with a query for
    each item."""

    def __init__(self, seed: int) -> None:
        self.seed, self.world = seed, ConceptWorld()
        generator = torch.Generator().manual_seed(1000 + seed)
        sizes = [PAIRS, *[QUERIES] * (1 + GALLERIES)]
        image, text, _ = self.world.sample(sum(sizes), generator=generator)
        (first, second), *galleries = zip(image.split(sizes), text.split(sizes))
        self.pairs, self.held_out = (
            gf.EmbeddingPairs.from_arrays(first, second),
            gf.EmbeddingPairs.from_arrays(*galleries[0]),
        )
        self.galleries = galleries[1:]

    def fit(self) -> tuple[gf.PosteriorHead, float]:
        """The head that "auto" chooses, and the seconds that took."""
        start = time.perf_counter()
        head = gf.PosteriorHead.fit(self.pairs, seed=self.seed)
        return head, time.perf_counter() - start

    def measured(self, head: gf.PosteriorHead, direction: Direction) -> dict[str, float]:
        """Numbers by name. The exact posterior's calibration error is what chance alone leaves."""
        entropies, answers = [], []
        for image, text in self.galleries:
            queries, items = direction.queries(image, text), direction.items(image, text)
            answer, own = (queries @ items.T).argmax(1), torch.arange(QUERIES)
            exact = self.world.gallery_posterior(queries, items, direction)
            scorer = gf.RetrievalEntropy(head, items, direction)
            entropies.append(torch.stack((scorer(queries).entropy.double(), torch.special.entr(exact).sum(1)), 1))
            alone = gf.BayesReranker(None, items, direction, SHORTLIST, head=head)
            alone.calibrate(self.held_out, progress=False)
            post = alone(queries)
            stated = torch.stack((post.p_answer.double(), exact[own, answer].double()), 1)
            answers.append(torch.cat((stated, (answer == own).unsqueeze(1), losses(post, own).unsqueeze(1)), 1))
        ours, truth, right, loss = torch.cat(answers).unbind(1)
        return {
            "Spearman of H with the true one": float(stats.spearmanr(*torch.cat(entropies).unbind(1)).statistic),
            "AUROC of p_answer": auroc(1 - ours, right.bool()),
            "AUROC of the exact posterior": auroc(1 - truth, right.bool()),
            "ECE of p_answer": reliability(ours, right.bool(), strategy="quantile").ece,
            "ECE of the exact posterior": reliability(truth, right.bool(), strategy="quantile").ece,
            "NLL, head": float(loss.mean()),
        }

    def fusion(self, flow: gf.GeoFlow, head: gf.PosteriorHead, direction: Direction) -> dict[str, Tensor]:
        """-log probability of the right answer [Q] for the queries of one gallery, without and with the head."""
        image, text = self.galleries[0]
        queries, items = direction.queries(image, text), direction.items(image, text)
        loss = {}
        for name, more in (("flow", None), ("flow and head", head)):
            reranker = gf.BayesReranker(flow, items, direction, SHORTLIST, head=more)
            reranker.calibrate(self.held_out, progress=False)
            loss[name] = losses(reranker(queries), torch.arange(QUERIES))
        return loss


def losses(post: gf.Reranked, own: Tensor) -> Tensor:
    """-log of the probability of the own item [Q], or of "outside" if it is not in the shortlist."""
    right = post.index == own.unsqueeze(1)
    return -torch.where(right.any(1), (post.prob * right).sum(1), post.p_outside).double().log()


def concept_world() -> list[dict[str, Any]]:
    """Mean and range over seeds, gated; the gain of flow and head together is that over the queries of all seeds."""
    runs: list[dict[str, float]] = []
    fused: dict[tuple[str, Direction], list[Tensor]] = {}
    flow = trained_flow(24)
    for world in map(World, range(SEEDS)):
        head, seconds = world.fit()
        runs.append({"points chosen": head.config.points, "seconds of training": seconds})
        for direction in CONDITIONAL:
            runs[-1] |= {f"{name}, {direction}": x for name, x in world.measured(head, direction).items()}
            for name, loss in world.fusion(flow, head, direction).items():
                fused.setdefault((name, direction), []).append(loss)
        print(f"seed {world.seed}: {runs[-1]}", flush=True)
    values = {name: [run[name] for run in runs] for name in runs[0]}
    mean = {name: float(np.mean(value)) for name, value in values.items()}
    rows = [{"": n, "mean": mean[n], "least": min(v), "largest": max(v)} for n, v in values.items()]
    for direction, least in zip(CONDITIONAL, (0.965, 0.94)):
        gate(
            f"{direction}: Spearman of H with the truth", mean[f"Spearman of H with the true one, {direction}"] >= 0.93
        )
        gate(f"{direction}: AUROC of p_answer", mean[f"AUROC of p_answer, {direction}"] >= least)
        gate(f"{direction}: ECE of p_answer", mean[f"ECE of p_answer, {direction}"] <= 0.03)
        alone, both = (torch.cat(fused[name, direction]) for name in ("flow", "flow and head"))
        gain = bootstrap_interval(np.mean, alone - both)
        gate(f"{direction}: the head adds to the flow", gain.low > 0)
        for name, loss in (("flow", alone), ("flow and head", both)):
            rows.append({"": f"NLL, {name}, {direction}", "mean": float(loss.mean()), "least": "", "largest": ""})
        rows.append(
            {
                "": f"gain of the head, 95 % interval, {direction}",
                "mean": float((alone - both).mean()),
                "least": gain.low,
                "largest": gain.high,
            }
        )
    return rows


def run() -> str:
    """The study."""
    return report("head_concept_world", concept_world(), {"queries": QUERIES, "seeds": SEEDS, "pairs": PAIRS})
