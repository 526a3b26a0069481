"""The demo's measurements: uncertainties of a trained flow against the true posterior and against references."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from geoflow_fast.baselines.base import Baseline
from geoflow_fast.baselines.references import KNNDistance, Margin, MaxSoftmax, SoftmaxEntropy
from geoflow_fast.data.pairs import EmbeddingPairs
from geoflow_fast.directions import CONDITIONAL
from geoflow_fast.evaluation.agreement import Agreement, agreement, densities
from geoflow_fast.evaluation.metrics import auroc, reliability, retrieval_calibration, selective_accuracy
from geoflow_fast.evaluation.statistics import spearman
from geoflow_fast.flow.model import GeoFlow
from geoflow_fast.likelihood.density import epistemic
from geoflow_fast.retrieval.bandwidth import Bandwidth, fit_bandwidth
from geoflow_fast.retrieval.entropy import RetrievalEntropy
from geoflow_fast.retrieval.rerank import BayesReranker, Reranked
from geoflow_fast.worlds import ConceptWorld

QUERIES, ITEMS, HELD_OUT, STRANGERS, DENSITY_ROWS = 500, 1000, 1000, 300, 500
GUIDANCES, TUNING_QUERIES = (0.0, 1.0, 3.0), 128
SHORTLIST, RERANK_STEPS, CALIBRATION_QUERIES = 16, 4, 400
"""Sizes for a run of a minute on two cores; the guides have what is usual."""
ENTROPY, RERANKER, TRUTH = "flow: retrieval entropy", "flow: re-ranker", "truth: 1 - P(answer)"
SCORE, IMAGE_DENSITY, NEIGHBOURS = "flow: epistemic score", "flow: -log p(image)", "kNN distance, image + text"
TRUE_SCORE = "truth: -log p(image) - log p(text)"
REFERENCES: tuple[type[Baseline], ...] = (MaxSoftmax, Margin, SoftmaxEntropy, KNNDistance)
FLOORS = {"joint": 0.97, "text|image": 0.95, "image|text": 0.95, "image": 0.90, "text": 0.90, "pmi": 0.93}
"""Least correlations of learned with true log-densities."""


@dataclass(frozen=True)
class Check:
    """Something that is expected of the demo: `value` is at least `floor`."""

    name: str
    value: float
    floor: float

    @property
    def holds(self) -> bool:
        """Whether it came out so."""
        return self.value >= self.floor


@dataclass(frozen=True)
class Side:
    """Queries over the items of a thousand pairs, in one direction; query k means item k."""

    direction: str
    queries: Tensor
    items: Tensor
    correct: Tensor
    """[Q] bool, whether plain cosine search finds the right item."""
    truth: Tensor
    """[Q, N], the true posterior, float64."""
    uncertainty: dict[str, Tensor]
    """[Q] by method; the truth's is the probability that the answer of plain search is wrong."""
    entropy: Tensor
    """[Q], the flow's, nats."""
    bandwidth: Bandwidth
    reranked: Reranked

    @property
    def true_entropy(self) -> Tensor:
        """[Q], nats."""
        return torch.special.entr(self.truth).sum(1)

    @property
    def recall_after(self) -> float:
        """Share of queries whose most probable item after re-ranking is the right one."""
        return float((self.reranked.index[:, 0] == torch.arange(len(self.queries))).double().mean())

    def numbers(self) -> list[dict[str, object]]:
        """One row per method, for a table."""
        rows: list[dict[str, object]] = []
        for name, score in self.uncertainty.items():
            found = retrieval_calibration(score, self.correct)
            selective = selective_accuracy(score, self.correct)
            rows.append(
                {
                    "method": name,
                    "AUROC": found.auroc,
                    "AURC": found.aurc,
                    "AUSAC": selective.ausac,
                    "accuracy at 50 %": float(selective.accuracy[list(selective.coverage).index(0.5)]),
                    "Spearman of bins": found.spearman,
                    "Spearman with true entropy": spearman(score, self.true_entropy),
                }
            )
        return rows

    def auroc_of(self, name: str) -> float:
        """Of telling wrong answers of plain search from right ones."""
        return auroc(self.uncertainty[name], self.correct)

    @property
    def best_reference(self) -> tuple[str, float]:
        """The reference with the largest AUROC."""
        found = {kind.title: self.auroc_of(kind.title) for kind in REFERENCES}
        name = max(found, key=lambda title: found[title])
        return name, found[name]

    @property
    def calibration_error(self) -> float:
        """Expected calibration error of the re-ranker's probability that the answer is right."""
        return reliability(self.reranked.p_answer, self.correct, strategy="quantile").ece


@dataclass(frozen=True)
class Strangers:
    """Surprise at pairs of known concepts and of concepts that training never saw: scores by method, then by kind."""

    scores: dict[str, dict[str, Tensor]]

    def auroc(self, method: str, kind: str) -> float:
        """Of telling pairs of `kind` from known ones."""
        known, strange = self.scores[method]["known"], self.scores[method][kind]
        is_known = torch.arange(len(known) + len(strange)) < len(known)
        return auroc(torch.cat((known, strange)), is_known)


@dataclass(frozen=True)
class Outcome:
    """All that the demo found."""

    seed: int
    steps: int
    """Of training."""
    concept: Tensor
    """[N], of the items; query k is of the concept of item k."""
    sides: dict[str, Side]
    strangers: Strangers
    densities: dict[str, tuple[Tensor, Tensor]]
    agreement: dict[str, Agreement]

    def checks(self) -> list[Check]:
        """What is expected, and what came out."""
        i2t, t2i = self.sides["i2t"], self.sides["t2i"]
        found = [
            Check("i2t: AUROC of wrong retrieval", i2t.auroc_of(ENTROPY), 0.87),
            Check("i2t: the same, above the best reference", i2t.auroc_of(ENTROPY) - i2t.best_reference[1], 0.02),
            Check("t2i: the same, above the best reference", t2i.auroc_of(ENTROPY) - t2i.best_reference[1], -0.04),
            Check("i2t: Spearman with the true entropy", spearman(i2t.entropy, i2t.true_entropy), 0.82),
            Check("t2i: Spearman with the true entropy", spearman(t2i.entropy, t2i.true_entropy), 0.75),
            Check("far concepts: AUROC of the epistemic score", self.strangers.auroc(SCORE, "far"), 0.80),
            Check("far concepts: AUROC of -log p(image)", self.strangers.auroc(IMAGE_DENSITY, "far"), 0.85),
        ]
        return found + [
            Check(f"log-density, {name}: correlation with the truth", self.agreement[name].correlation, floor)
            for name, floor in FLOORS.items()
        ]


def examine(
    world: ConceptWorld, flow: GeoFlow, pairs: EmbeddingPairs, seed: int, steps: int, say: Callable[[str], object]
) -> Outcome:
    """All measurements of a flow that was trained on `pairs` for so many steps. `say` is told what is being done."""
    held_image, held_text, _ = world.sample(HELD_OUT, generator=torch.Generator().manual_seed(400 + seed))
    held_out = EmbeddingPairs.from_arrays(held_image, held_text)
    image, text, concept = world.sample(ITEMS, generator=torch.Generator().manual_seed(500 + seed))
    references = [kind(world.dim, world.dim) for kind in REFERENCES]
    for reference in references:
        reference.fit(pairs, held_out)
    sides: dict[str, Side] = {}
    for direction in CONDITIONAL:
        say(f"{direction}: scoring and re-ranking {QUERIES:,} queries over {ITEMS:,} items")
        asking, items = (image, text) if direction == "i2t" else (text, image)
        sides[direction] = examine_side(world, flow, held_out, direction, asking[:QUERIES], items, references)
    say("log-densities of new pairs and of concepts that training never saw")
    strangers = examine_strangers(world, flow, references[-1], (image, text), seed)
    found = densities(world, flow, rows=DENSITY_ROWS)
    return Outcome(seed, steps, concept, sides, strangers, found, agreement(found))


def examine_side(
    world: ConceptWorld,
    flow: GeoFlow,
    held_out: EmbeddingPairs,
    direction: str,
    queries: Tensor,
    items: Tensor,
    references: list[Baseline],
) -> Side:
    """One direction; everything that is tuned is tuned on the held-out pairs."""
    bandwidth = fit_bandwidth(flow, held_out, direction, guidances=GUIDANCES, max_queries=TUNING_QUERIES)
    fitted = {"kappa": bandwidth.kappa, "guidance": bandwidth.guidance}
    entropy = RetrievalEntropy.fast(flow, items, direction, **fitted)(queries).entropy
    reranker = BayesReranker(flow, items, direction, SHORTLIST, RERANK_STEPS)
    reranker.calibrate(held_out, max_queries=CALIBRATION_QUERIES, progress=False)
    reranked = reranker(queries)
    truth = world.gallery_posterior(queries, items, direction)
    answer = (queries @ items.T).argmax(1)
    uncertainty = {ENTROPY: entropy, RERANKER: 1 - reranked.p_answer}
    uncertainty |= {method.title: method.uncertainty(queries, items, direction) for method in references}
    uncertainty[TRUTH] = 1 - truth.gather(1, answer.unsqueeze(1)).squeeze(1)
    correct = answer == torch.arange(len(queries))
    return Side(direction, queries, items, correct, truth, uncertainty, entropy, bandwidth, reranked)


def examine_strangers(
    world: ConceptWorld, flow: GeoFlow, neighbours: Baseline, known: tuple[Tensor, Tensor], seed: int
) -> Strangers:
    """Surprise at `known` pairs, at siblings of known concepts ("near") and at a group never seen ("far")."""
    generator = torch.Generator().manual_seed(600 + seed)
    kinds = {"known": (known[0][:STRANGERS], known[1][:STRANGERS])}
    for kind, concepts in (("near", world.near), ("far", world.far)):
        kinds[kind] = world.sample(STRANGERS, generator=generator, concepts=concepts)[:2]
    scores: dict[str, dict[str, Tensor]] = {name: {} for name in (SCORE, IMAGE_DENSITY, NEIGHBOURS, TRUE_SCORE)}
    for kind, (image, text) in kinds.items():
        found = epistemic(flow, image, text, generator=torch.Generator().manual_seed(seed))
        scores[SCORE][kind], scores[IMAGE_DENSITY][kind] = found.score, -found.image
        scores[NEIGHBOURS][kind] = neighbours.uncertainty(image, text, "i2t") + neighbours.uncertainty(
            text, image, "t2i"
        )
        scores[TRUE_SCORE][kind] = -world.log_image(image) - world.log_text(text)
    return Strangers(scores)
