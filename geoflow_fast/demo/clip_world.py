"""The demo's chapter on a world as wide as CLIP: what a search without a flow says, beside the exact probabilities.

A head learns from captioned images, and the ladder of evidence (cosine, hub correction, head) is calibrated on held-out
pairs. The world knows how probable every item is, and how probable it is that a query's item is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from geoflow_fast.data.pairs import EmbeddingPairs
from geoflow_fast.directions import CONDITIONAL, Direction
from geoflow_fast.evaluation.metrics import SelectiveAccuracy, auroc, selective_accuracy
from geoflow_fast.evaluation.untrained import max_softmax, tuned_scale
from geoflow_fast.head.config import HeadConfig
from geoflow_fast.head.model import PosteriorHead
from geoflow_fast.retrieval.gallery import Gallery
from geoflow_fast.retrieval.rerank import BayesReranker
from geoflow_fast.retrieval.task import typical_queries
from geoflow_fast.worlds import ClipWorld, DrawnSearch

IMAGES, CAPTIONS, HELD_OUT, QUERIES, ITEMS, MISSING = 1500, 5, 400, 500, 500, 0.3
SHORTLIST, BANK = 64, 1000
"""These sizes make the chapter take half a minute on two cores."""
LADDER, SOFTMAX, EXACT = "cosine, hubs and head", "max softmax", "exact posterior"


@dataclass(frozen=True)
class ClipSearch:
    """A search in one direction, in which some queries have no item."""

    direction: Direction
    there: Tensor
    """[Q] bool, whether the query's item is in the gallery."""
    correct: Tensor
    """[Q] bool, whether plain search finds it."""
    p_answer: dict[str, Tensor]
    """[Q] by method, the probability that the answer of plain search is right, if there is a right one."""
    missing: dict[str, Tensor]
    """[Q] by method, a score that is high where the item seems to be missing: the exact probability that it is, the
    ladder's that it is not in the shortlist, and what a softmax leaves to the other items."""
    recall: dict[str, float]
    """Recall@1 of the queries whose item is there, by method."""

    def auroc_of(self, method: str) -> float:
        """Probability that a wrong answer of plain search is less certain than a right one, where there is one."""
        return auroc(1 - self.p_answer[method][self.there], self.correct[self.there])

    def missing_auroc_of(self, method: str) -> float:
        """Probability that a query whose item is missing looks more like one than a query whose item is there."""
        return auroc(self.missing[method], self.there)

    def risk(self, method: str, coverage: Sequence[float]) -> SelectiveAccuracy:
        """Accuracy at these coverages, if a query whose item is missing has no right answer."""
        return selective_accuracy(1 - self.p_right(method), self.correct, coverage)

    def p_right(self, method: str) -> Tensor:
        """[Q], the probability that the answer of plain search is right, items that are missing considered if the
        method knows of them."""
        there = 1 - self.missing[EXACT] if method == EXACT else 1.0
        return self.p_answer[method] * there

    @property
    def distance(self) -> float:
        """Mean absolute difference of the ladder's probability and the exact one."""
        return float((self.p_answer[LADDER] - self.p_answer[EXACT])[self.there].abs().mean())

    def rows(self) -> list[dict[str, object]]:
        """One row per method, for a table."""
        return [
            {
                "method": method,
                "AUROC of wrong answers": self.auroc_of(method),
                "AUROC of missing items": self.missing_auroc_of(method),
                "Recall@1": self.recall[method],
            }
            for method in (SOFTMAX, LADDER, EXACT)
        ]


def learn_clip_head(out: Path, pairs: EmbeddingPairs, seed: int, steps: int | None) -> PosteriorHead | None:
    """Trains a head in the folder `out`, where an interrupted run continues; returns None if it was interrupted."""
    config = None if steps is None else HeadConfig(steps=steps)
    head = PosteriorHead.fit(pairs, config, k=1, seed=seed, out=out)
    return head if head.report["finished"] else None


def clip_pairs(world: ClipWorld, seed: int) -> EmbeddingPairs:
    """Captioned images to learn from."""
    drawn = world.sample_captioned(IMAGES, CAPTIONS, generator=torch.Generator().manual_seed(700 + seed))
    return EmbeddingPairs.from_arrays(drawn.image, drawn.text, drawn.text_image_index)


def examine_clip_world(
    world: ClipWorld, head: PosteriorHead, pairs: EmbeddingPairs, seed: int
) -> dict[Direction, ClipSearch]:
    """Measures both directions with a head that was trained on `pairs`."""
    image, text, _ = world.sample(HELD_OUT, generator=torch.Generator().manual_seed(800 + seed))
    held_out = EmbeddingPairs.from_arrays(image, text)
    searches = {}
    for direction in CONDITIONAL:
        generator = torch.Generator().manual_seed(900 + seed)
        search = world.sample_search(QUERIES, ITEMS, direction, share=MISSING, generator=generator)
        bank = typical_queries(pairs, direction, BANK, seed)
        ladder = BayesReranker(None, search.gallery, direction, SHORTLIST, seed=seed, head=head, bank=bank)
        ladder.calibrate(held_out, progress=False)
        searches[direction] = examine_search(world, ladder, search, held_out)
    return searches


def examine_search(
    world: ClipWorld, ladder: BayesReranker, search: DrawnSearch, held_out: EmbeddingPairs
) -> ClipSearch:
    """Compares what the ladder and a tuned softmax say with what is true."""
    direction, queries, gallery = ladder.direction, search.queries, search.gallery
    reranked, scale = ladder(queries), tuned_scale(held_out, direction)
    truth = world.gallery_posterior(queries, gallery, direction)
    there, answer = search.item >= 0, reranked.answer
    p_answer = {
        SOFTMAX: 1 - max_softmax(queries, Gallery(gallery), scale),
        LADDER: reranked.p_answer.double(),
        EXACT: truth.gather(1, answer.unsqueeze(1)).squeeze(1),
    }
    first = {SOFTMAX: answer, LADDER: reranked.index[:, 0], EXACT: truth.argmax(1)}
    recall = {name: float((item == search.item)[there].double().mean()) for name, item in first.items()}
    missing = {
        SOFTMAX: 1 - p_answer[SOFTMAX],
        LADDER: ladder(queries, no_match_share=MISSING).p_no_match.double(),
        EXACT: world.missing_probability(queries, gallery, direction, MISSING),
    }
    return ClipSearch(direction, there, answer == search.item, p_answer, missing, recall)
