"""The demo's measurements: uncertainties of a trained flow against the true posterior and training-free scores."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from geoflow_fast.data.pairs import EmbeddingPairs
from geoflow_fast.demo.clip_world import EXACT, LADDER, SOFTMAX, ClipSearch
from geoflow_fast.demo.story import Expectation, Story
from geoflow_fast.directions import CONDITIONAL, Direction
from geoflow_fast.evaluation.agreement import DensityAgreement, agreement, densities
from geoflow_fast.evaluation.metrics import auroc, reliability, retrieval_calibration, selective_accuracy
from geoflow_fast.evaluation.report import Unranked
from geoflow_fast.evaluation.statistics import spearman
from geoflow_fast.evaluation.untrained import (
    KNOWN_ROWS,
    UNTRAINED,
    knn_distance,
    margin,
    max_softmax,
    softmax_entropy,
    tuned_scale,
)
from geoflow_fast.flow.model import GeoFlow
from geoflow_fast.likelihood.density import epistemic
from geoflow_fast.retrieval.bandwidth import Bandwidth, fit_bandwidth
from geoflow_fast.retrieval.entropy import RetrievalEntropy
from geoflow_fast.retrieval.gallery import Gallery
from geoflow_fast.retrieval.rerank import BayesReranker, Reranked
from geoflow_fast.retrieval.task import typical_queries
from geoflow_fast.runtime.progress import Announce
from geoflow_fast.worlds import ConceptWorld

QUERIES, ITEMS, HELD_OUT, UNSEEN_PAIRS, DENSITY_ROWS = 500, 1000, 1000, 300, 500
GUIDANCES, TUNING_QUERIES, RESAMPLES = (0.0, 1.0, 3.0), 128, 500
SHORTLIST, RERANK_STEPS, CALIBRATION_QUERIES = 16, 4, 400
"""These sizes make the measurements take a minute on two cores; the guides show the usual ones."""
ENTROPY, RERANKER, TRUTH = "flow: retrieval entropy", "flow: re-ranker", "truth: 1 - P(answer)"
SCORE, IMAGE_DENSITY, NEIGHBOURS = "flow: epistemic score", "flow: -log p(image)", "kNN distance, image + text"
TRUE_SCORE = "truth: -log p(image) - log p(text)"
TRAINING_FREE = {name: kind.title for name, kind in UNTRAINED.items()}
"""What the page calls the references that need no training, by name."""
LEAST_CORRELATION = {"joint": 0.97, "text|image": 0.95, "image|text": 0.95, "image": 0.90, "text": 0.90, "pmi": 0.93}
"""The correlation of learned with true log-densities that is expected at least."""


@dataclass(frozen=True)
class DirectionOutcome:
    """The search of one direction. Query k was made for item k."""

    direction: Direction
    correct: Tensor
    """[Q] bool, true where plain cosine search finds the right item."""
    truth: Tensor
    """[Q, N], the true posterior, float64."""
    uncertainty: dict[str, Tensor]
    """[Q] by method; the truth's is the probability that the answer of plain search is wrong."""
    bandwidth: Bandwidth
    reranked: Reranked

    @property
    def true_entropy(self) -> Tensor:
        """[Q], entropy of the true posterior in nats."""
        return torch.special.entr(self.truth).sum(1)

    @property
    def plain_recall(self) -> float:
        """Share of queries for which plain search finds the right item."""
        return float(self.correct.double().mean())

    @property
    def reranked_recall(self) -> float:
        """Share of queries whose most probable item after re-ranking is the right one."""
        return float((self.reranked.index[:, 0] == torch.arange(len(self.correct), device="cpu")).double().mean())

    @property
    def calibration_error(self) -> float:
        """Expected calibration error of the re-ranker's probability that the answer is right."""
        return reliability(self.reranked.p_answer, self.correct, strategy="quantile").ece

    def auroc_of(self, method: str) -> float:
        """Probability that a wrong answer of plain search is less certain than a right one, by this method."""
        return auroc(self.uncertainty[method], self.correct)

    def auroc_rows(self) -> list[tuple[str, float, float, float]]:
        """The same for all methods, best first: (method, AUROC, low, high), with 95 % intervals."""
        rows = []
        for method, score in self.uncertainty.items():
            interval = retrieval_calibration(score, self.correct, resamples=RESAMPLES).intervals["auroc"]
            rows.append((method, interval.value, interval.low, interval.high))
        return sorted(rows, key=lambda row: -row[1])

    @property
    def best_training_free(self) -> tuple[str, float]:
        """The score without training that has the largest AUROC, with that AUROC."""
        return max(((title, self.auroc_of(title)) for title in TRAINING_FREE.values()), key=lambda pair: pair[1])

    def numbers(self) -> list[dict[str, object]]:
        """One row per method, for a table."""
        rows: list[dict[str, object]] = []
        for method, score in self.uncertainty.items():
            calibration = retrieval_calibration(score, self.correct)
            selective = selective_accuracy(score, self.correct)
            numbers = {
                "AUROC": calibration.auroc,
                "AURC": calibration.aurc,
                "AUSAC": selective.ausac,
                "accuracy at 50 %": float(selective.accuracy[list(selective.coverage).index(0.5)]),
                "Spearman of bins": calibration.spearman,
                "Spearman with true entropy": spearman(score, self.true_entropy),
            }
            rank = Unranked if method == TRUTH else float
            rows.append({"method": method, **{name: rank(value) for name, value in numbers.items()}})
        return rows


@dataclass(frozen=True)
class UnseenOutcome:
    """Surprise at pairs of known concepts and of concepts that training never saw: scores by method, then by kind
    ("known", "near" or "far")."""

    scores: dict[str, dict[str, Tensor]]

    def auroc(self, method: str, kind: str) -> float:
        """Probability that a pair of this `kind` surprises the method more than a known one."""
        known, unseen = self.scores[method]["known"], self.scores[method][kind]
        is_known = torch.arange(len(known) + len(unseen), device="cpu") < len(known)
        return auroc(torch.cat((known, unseen)), is_known)


@dataclass(frozen=True)
class Outcome:
    """Everything that the demo measures."""

    seed: int
    steps: int
    """Number of training steps."""
    concept: Tensor
    """[N], the concept of each item; query k has the concept of item k."""
    by_direction: dict[Direction, DirectionOutcome]
    unseen: UnseenOutcome
    densities: dict[str, tuple[Tensor, Tensor]]
    """Learned and true log-densities."""
    agreement: dict[str, DensityAgreement]
    clip: dict[Direction, ClipSearch] = field(default_factory=dict)
    """The searches in the world as wide as CLIP."""
    story: Story | None = None
    """What happened when the latter went live."""

    def checks(self) -> list[Expectation]:
        """What is expected, and what was measured."""
        i2t, t2i = self.by_direction[Direction.I2T], self.by_direction[Direction.T2I]
        gains = {side.direction: side.auroc_of(ENTROPY) - side.best_training_free[1] for side in (i2t, t2i)}
        return [
            Expectation("i2t: AUROC of wrong retrieval", i2t.auroc_of(ENTROPY), 0.87),
            Expectation("i2t: the same, above the best training-free score", gains[Direction.I2T], 0.02),
            Expectation("t2i: the same, above the best training-free score", gains[Direction.T2I], -0.04),
            Expectation(
                "i2t: Spearman with the true entropy", spearman(i2t.uncertainty[ENTROPY], i2t.true_entropy), 0.82
            ),
            Expectation(
                "t2i: Spearman with the true entropy", spearman(t2i.uncertainty[ENTROPY], t2i.true_entropy), 0.75
            ),
            Expectation("far concepts: AUROC of the epistemic score", self.unseen.auroc(SCORE, "far"), 0.80),
            Expectation("far concepts: AUROC of -log p(image)", self.unseen.auroc(IMAGE_DENSITY, "far"), 0.85),
            *(
                Expectation(f"log-density, {name}: correlation with the truth", self.agreement[name].correlation, least)
                for name, least in LEAST_CORRELATION.items()
            ),
            *self._clip_checks(),
            *([] if self.story is None else self.story.checks()),
        ]

    def _clip_checks(self) -> list[Expectation]:
        checks = []
        for direction, search in self.clip.items():
            own, softmax, exact = (search.auroc_of(method) for method in (LADDER, SOFTMAX, EXACT))
            name = f"CLIP-like world, {direction}: AUROC of wrong answers"
            checks.append(Expectation(f"{name}, above max softmax", own - softmax, 0.08))
            checks.append(Expectation(f"{name}, above the exact posterior's", own - exact, -0.10))
        return checks


def examine(
    world: ConceptWorld, flow: GeoFlow, pairs: EmbeddingPairs, seed: int, steps: int, announce: Announce
) -> Outcome:
    """Measures a flow that was trained on `pairs` for `steps` steps. `announce` is told what is being done."""
    held_image, held_text, _ = world.sample(HELD_OUT, generator=torch.Generator().manual_seed(400 + seed))
    held_out = EmbeddingPairs.from_arrays(held_image, held_text)
    image, text, concept = world.sample(ITEMS, generator=torch.Generator().manual_seed(500 + seed))
    known = {direction: typical_queries(pairs, direction, KNOWN_ROWS, 0) for direction in CONDITIONAL}
    by_direction = {}
    for direction in CONDITIONAL:
        announce(f"{direction}: scoring and re-ranking {QUERIES:,} queries over {ITEMS:,} items")
        queries, items = direction.queries(image, text)[:QUERIES], direction.items(image, text)
        by_direction[direction] = examine_direction(world, flow, held_out, direction, queries, items, known[direction])
    announce("log-densities of new pairs and of concepts that training never saw")
    unseen = examine_unseen(world, flow, known, (image, text), seed)
    estimates = densities(world, flow, rows=DENSITY_ROWS)
    return Outcome(seed, steps, concept, by_direction, unseen, estimates, agreement(estimates))


def examine_direction(
    world: ConceptWorld,
    flow: GeoFlow,
    held_out: EmbeddingPairs,
    direction: Direction,
    queries: Tensor,
    items: Tensor,
    known: Tensor,
) -> DirectionOutcome:
    """Measures one direction, whose training queries are `known`. Everything that is tuned is tuned on the held-out
    pairs."""
    bandwidth = fit_bandwidth(flow, held_out, direction, guidances=GUIDANCES, max_queries=TUNING_QUERIES)
    tuned = {"kappa": bandwidth.kappa, "guidance": bandwidth.guidance}
    entropy = RetrievalEntropy.fast(flow, items, direction, **tuned)(queries).entropy
    reranker = BayesReranker(flow, items, direction, SHORTLIST, RERANK_STEPS)
    reranker.calibrate(held_out, max_queries=CALIBRATION_QUERIES, progress=False)
    reranked = reranker(queries)
    truth = world.gallery_posterior(queries, items, direction)
    answer = (queries @ items.T).argmax(1)
    uncertainty = {ENTROPY: entropy, RERANKER: 1 - reranked.p_answer}
    uncertainty |= training_free(queries, Gallery(items), tuned_scale(held_out, direction), known)
    uncertainty[TRUTH] = 1 - truth.gather(1, answer.unsqueeze(1)).squeeze(1)
    correct = answer == torch.arange(len(queries), device="cpu")
    return DirectionOutcome(direction, correct, truth, uncertainty, bandwidth, reranked)


def training_free(queries: Tensor, gallery: Gallery, scale: float, known: Tensor) -> dict[str, Tensor]:
    """The references that need no training by their titles, float64 [Q] each; `known` are training queries."""
    values = {
        "max_softmax": max_softmax(queries, gallery, scale),
        "margin": margin(queries, gallery),
        "softmax_entropy": softmax_entropy(queries, gallery, scale),
        "knn": knn_distance(queries, known),
    }
    return {title: values[name].double() for name, title in TRAINING_FREE.items()}


def examine_unseen(
    world: ConceptWorld, flow: GeoFlow, trained: dict[Direction, Tensor], known: tuple[Tensor, Tensor], seed: int
) -> UnseenOutcome:
    """Measures the surprise at `known` pairs, at siblings of known concepts ("near") and at a group that training never
    saw ("far"). `trained` has training queries of each direction."""
    generator = torch.Generator().manual_seed(600 + seed)
    pairs = {"known": (known[0][:UNSEEN_PAIRS], known[1][:UNSEEN_PAIRS])}
    for kind, concepts in (("near", world.near), ("far", world.far)):
        pairs[kind] = world.sample(UNSEEN_PAIRS, generator=generator, concepts=concepts)[:2]
    scores: dict[str, dict[str, Tensor]] = {name: {} for name in (SCORE, IMAGE_DENSITY, NEIGHBOURS, TRUE_SCORE)}
    for kind, (image, text) in pairs.items():
        terms = epistemic(flow, image, text, generator=torch.Generator().manual_seed(seed))
        scores[SCORE][kind], scores[IMAGE_DENSITY][kind] = terms.score, -terms.image
        distances = knn_distance(image, trained[Direction.I2T]), knn_distance(text, trained[Direction.T2I])
        scores[NEIGHBOURS][kind] = distances[0].double() + distances[1].double()
        scores[TRUE_SCORE][kind] = -world.log_image(image) - world.log_text(text)
    return UnseenOutcome(scores)
