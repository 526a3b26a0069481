"""Classifiers that read a query's result list and state the probability that plain search's answer is wrong.

This is what a user would try first who has labelled queries: logistic regression, as in Platt scaling, or gradient
boosting, on the top cosine, margins, entropies at several temperatures, and what is known of similar queries.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.methods.baselines.base import Baseline, FitTask, resize_rows
from benchmarks.methods.baselines.hub import HubSoftmax
from benchmarks.methods.baselines.untrained import KNNDistance, MaxSoftmax
from geoflow_fast.data.pairs import EmbeddingPairs
from geoflow_fast.decisions.logistic import fit_logistic, logits, smoothed_share
from geoflow_fast.directions import CONDITIONAL, Direction
from geoflow_fast.evaluation.retrieval import nearest
from geoflow_fast.retrieval.freshness import marks
from geoflow_fast.retrieval.gallery import Gallery
from geoflow_fast.retrieval.task import RetrievalTask
from geoflow_fast.runtime import extras

QUERIES, IMAGES = 2000, 2000
"""At most this many queries and images of the labelled pairs are learned from."""
SHARE = 0.2
"""Share of the training images that are labelled if there are fewer held-out images."""
SCALES = (10.0, 30.0, 100.0)
"""Inverse temperatures of the entropies, besides the fitted one."""
FEATURES = (
    "top cosine",
    "margin",
    *(f"entropy at {scale:g}" for scale in SCALES),
    "entropy at the fitted temperature",
    "log probability",
    "hub-corrected log probability",
    "hub-corrected margin",
    "distance to the nearest training queries",
    "cosine with the partners of these queries",
)
Floats = NDArray[np.float64]


class ResultListClassifier(Baseline):
    """A classifier of result lists: the probability that plain search's answer is wrong.

    It learns from queries that are searched among the items of the held-out pairs, or of a fifth of the training images
    if these are more. The training queries that a list is compared with are those of other images.
    """

    ONE_WIDTH_FOR: ClassVar[str | None] = "a cosine"
    STATES_RISK: ClassVar[bool] = True

    def __init__(self, image_dim: int, text_dim: int, neighbours: int = 10, max_rows: int = 20_000) -> None:
        super().__init__(image_dim, text_dim, neighbours=neighbours, max_rows=max_rows)
        self.plain, self.hub = MaxSoftmax(image_dim, text_dim), HubSoftmax(image_dim, text_dim)
        self.near = KNNDistance(image_dim, text_dim, neighbours, max_rows)

    def _fit(self, task: FitTask) -> None:
        known, labelled = labelled_apart(task.pairs, task.val, task.config.seed)
        for part in (self.plain, self.hub, self.near):
            part._fit(FitTask(known, labelled, task.config, None, resume=False, progress=None))
        for direction in CONDITIONAL:
            asked = RetrievalTask.of(labelled, direction, max_queries=QUERIES, seed=task.config.seed)
            queries, gallery = asked.queries.to(self.device), Gallery(asked.items.to(self.device))
            wrong = ~asked.is_right(nearest(queries, gallery)[1][:, 0])
            self._learn(self.features(queries, gallery, direction).cpu(), wrong, direction, task.config.seed)

    def _resize_buffers(self, tensors: Mapping[str, Tensor]) -> None:
        for name in ("hub", "near"):
            start = f"{name}."
            own = {key.removeprefix(start): x for key, x in tensors.items() if key.startswith(start)}
            getattr(self, name)._resize_buffers(own)

    def features(self, queries: Tensor, gallery: Gallery, direction: Direction) -> Tensor:
        """The `FEATURES` of each query's result list: float64 [Q, F]."""
        cosine, index = nearest(queries, gallery, 2)
        answer = index[:, :1]
        plain, hub = (part.softmax(queries, gallery, direction) for part in (self.plain, self.hub))
        entropy = [
            gallery.statistics(queries.unsqueeze(1), scale, 1).posterior(torch.float64).entropy
            for scale in (*SCALES, plain.scale)
        ]
        hub_log_prob = hub.log_prob(answer).squeeze(1)
        best = hub.posterior(2)
        known = self.near.image, self.near.text
        similarity, similar = nearest(queries, Gallery(direction.queries(*known)), self.near.neighbours)
        partners = direction.items(*known)[similar]
        agreement = torch.einsum("qkd,qd->qk", partners, gallery.take(answer.squeeze(1)))
        columns = (
            cosine[:, 0],
            cosine[:, 0] - cosine[:, -1],
            *entropy,
            plain.log_prob(answer).squeeze(1),
            hub_log_prob,
            # How far the answer is ahead of the best other item, or behind the best.
            hub_log_prob - torch.where(best.top_index == answer, -torch.inf, best.top_prob.log()).amax(1)
            if len(gallery) > 1
            else torch.zeros_like(hub_log_prob),
            1 - similarity.mean(1),
            agreement.mean(1),
        )
        return torch.stack([column.double() for column in columns], dim=1)

    def _score(self, queries: Tensor, gallery: Gallery, direction: Direction) -> Tensor:
        features = self.features(queries, gallery, direction).cpu()
        return self._risk(features, direction).to(queries.device)

    @abstractmethod
    def _learn(self, features: Tensor, wrong: Tensor, direction: Direction, seed: int) -> None:
        """Learns which answers are `wrong` [Q] from features [Q, F]."""

    @abstractmethod
    def _risk(self, features: Tensor, direction: Direction) -> Tensor:
        """The probability, float64 [Q], that the answers with these features [Q, F] are wrong."""


class ListLogistic(ResultListClassifier):
    """Logistic regression on the result list: the probability that plain search's answer is wrong.

    The features are the top cosine, margins, entropies at several temperatures, hub-corrected probabilities, the
    distance to the nearest training queries and the cosine of the answer with their partners.
    """

    method: ClassVar[str] = "list_logistic"
    title: ClassVar[str] = "logistic on the result list"
    weights: Tensor

    def __init__(self, image_dim: int, text_dim: int, neighbours: int = 10, max_rows: int = 20_000) -> None:
        super().__init__(image_dim, text_dim, neighbours, max_rows)
        # By direction: one weight for each feature, then the constant.
        self.register_buffer("weights", torch.zeros(len(CONDITIONAL), len(FEATURES) + 1, dtype=torch.float32))

    def _learn(self, features: Tensor, wrong: Tensor, direction: Direction, seed: int) -> None:  # noqa: ARG002
        fitted = fit_logistic(features.numpy(), wrong.numpy())
        self.weights[CONDITIONAL.index(direction)] = torch.from_numpy(fitted).to(self.weights)

    def _risk(self, features: Tensor, direction: Direction) -> Tensor:
        weights = self.weights[CONDITIONAL.index(direction)].cpu().double()
        return torch.sigmoid(torch.from_numpy(logits(features.numpy(), weights.numpy())))


class ListBoosting(ResultListClassifier):
    """Gradient boosting on the result list: the probability that plain search's answer is wrong.

    The features are those of `ListLogistic`. What is saved are the features and labels of the queries it learned from,
    a few thousand rows; the trees, which scikit-learn grows the same way each time, are grown again after loading.
    """

    method: ClassVar[str] = "list_boosting"
    title: ClassVar[str] = "boosting on the result list"

    def __init__(self, image_dim: int, text_dim: int, neighbours: int = 10, max_rows: int = 20_000) -> None:
        if reason := self.missing():
            raise ValueError(reason)
        super().__init__(image_dim, text_dim, neighbours, max_rows)
        for direction in CONDITIONAL:
            self.register_buffer(f"{direction}_features", torch.empty(0, len(FEATURES), dtype=torch.float32))
            self.register_buffer(f"{direction}_wrong", torch.empty(0, dtype=torch.bool))
        self._trees: dict[Direction, tuple[Hashable, Any]] = {}

    @classmethod
    def missing(cls) -> str | None:
        """Names scikit-learn if it is not installed."""
        return extras.missing("list_boosting", "scikit-learn", "sklearn", "test")

    def _resize_buffers(self, tensors: Mapping[str, Tensor]) -> None:
        super()._resize_buffers(tensors)
        for direction in CONDITIONAL:
            names = f"{direction}_features", f"{direction}_wrong"
            if any(len(tensors.get(name, ())) > QUERIES for name in names):
                raise ValueError(f"it holds more than {QUERIES} queries to learn from")
            resize_rows(self, tensors, *names)

    def _learn(self, features: Tensor, wrong: Tensor, direction: Direction, seed: int) -> None:  # noqa: ARG002
        setattr(self, f"{direction}_features", features.to(self.device, torch.float32))
        setattr(self, f"{direction}_wrong", wrong.to(self.device))

    def _risk(self, features: Tensor, direction: Direction) -> Tensor:
        wrong = getattr(self, f"{direction}_wrong").cpu().numpy()
        if len(np.unique(wrong)) < 2 or not len(features):
            return torch.full((len(features),), smoothed_share(wrong), dtype=torch.float64, device="cpu")
        learned = getattr(self, f"{direction}_features")
        current, known = marks((learned, getattr(self, f"{direction}_wrong"))), self._trees.get(direction)
        if known is None or known[0] != current:
            self._trees[direction] = known = current, grown(learned.cpu().double().numpy(), wrong)
        return torch.from_numpy(known[1].predict_proba(features.numpy())[:, 1])


def labelled_apart(pairs: EmbeddingPairs, val: EmbeddingPairs, seed: int) -> tuple[EmbeddingPairs, EmbeddingPairs]:
    """Training pairs to compare queries with, and pairs of other images to learn from: those held out, or `SHARE` of
    the training images if these are more; at most `IMAGES` images."""
    images, held_out = (len(np.unique(part.group)) for part in (pairs, val))
    share = min(SHARE, IMAGES / images)
    if (held_out >= share * images and pairs is not val) or images < 2:
        return pairs, val if held_out <= IMAGES else val.split(IMAGES / held_out, seed)[1]
    return pairs.split(share, seed)


def grown(features: Floats, positive: NDArray[np.bool_]) -> Any:
    """Boosted trees of scikit-learn that tell which rows of features [n, F] are `positive` [n]."""
    from sklearn.ensemble import HistGradientBoostingClassifier

    settings = {"max_iter": 100, "learning_rate": 0.05, "max_depth": 3, "l2_regularization": 1.0}
    return HistGradientBoostingClassifier(**settings, early_stopping=False, random_state=0).fit(features, positive)
