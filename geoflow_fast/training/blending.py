"""How much of a trained network a flow keeps beside its anchor, by what that is worth in retrieval.

A lower flow-matching loss need not make a better re-ranker: on few pairs the network learns what embeddings look like
before it learns which belong together, and that blurs what the anchor knows. So after the last step held-out queries
decide. Each has its own item and the nearest others to choose from, and log p(query | item) joins cosine and hub
correction in a logistic choice whose weights are fitted to the other queries. The share of the network under which the
right items are likeliest is kept, for each stream by itself: a half, which was best on most sets of pairs, unless none
or all of it is better by more than the standard error of the difference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from geoflow_fast.data.pairs import EmbeddingPairs
from geoflow_fast.directions import CONDITIONAL, Direction
from geoflow_fast.flow.anchor import Anchor
from geoflow_fast.flow.model import GeoFlow
from geoflow_fast.likelihood.reverse_ode import density_estimates
from geoflow_fast.likelihood.settings import DensitySettings
from geoflow_fast.linear import fit_choice

NONE, HALF, WHOLE = 0.0, 0.5, 1.0
"""Shares of the network to choose among."""
QUERIES, CANDIDATES, BANK_ROWS = 400, 16, 1000
"""Held-out queries of a direction, items that each of them chooses among, and training queries that tell hubs."""
LEAST_QUERIES = 20
"""With fewer of them nothing is chosen, and the network keeps its full share."""
HUB_SCALE = 40.0
"""Factor of the cosines in the hub correction."""
FOLDS = 5
PRIOR_SD = 3.0
"""Standard deviation of a normal prior on the weights of standardised features."""
DENSITY = DensitySettings(n_steps=4, shared=True)

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Choice:
    """Held-out queries with the items among which each of them chooses; the first one is its own."""

    direction: Direction
    queries: Tensor
    """[Q, d]."""
    items: Tensor
    """[Q, K, d']."""
    plain: Array
    """[Q, K, F], what is known about the items without a flow."""
    image: NDArray[np.int64]
    """[Q], number of the image of each query."""

    @classmethod
    def of(
        cls, pairs: EmbeddingPairs, val: EmbeddingPairs, direction: Direction, seed: int, most: int = QUERIES
    ) -> Choice | None:
        """The choice of at most so many queries of `val` among items of `val`, with `pairs` to tell hubs by; None if
        there are too few."""
        rng = np.random.default_rng((seed, *b"blend"))
        asking = np.sort(rng.permutation(len(val))[:most])
        queries, own = direction.queries(*val[asking]), direction.items(*val[asking])
        # Stored rows that several pairs share, such as the image of five captions, are one item.
        distinct = np.unique(direction.items(val.image_row, val.text_row), return_index=True)[1]
        items = direction.items(*val[distinct])
        foreign = torch.from_numpy(val.group[asking][:, None] != val.group[distinct])
        others = min(CANDIDATES - 1, int(foreign.sum(1).min()))
        if len(asking) < LEAST_QUERIES or others < 1:
            return None
        alike = queries.shape[1] == items.shape[1]
        nearness = queries @ items.T if alike else torch.from_numpy(rng.random(foreign.shape))
        nearest = nearness.masked_fill(~foreign, -math.inf).topk(others, 1).indices
        chosen = torch.cat((own.unsqueeze(1), items[nearest]), 1)
        bank = direction.queries(*pairs[np.sort(rng.permutation(len(pairs))[:BANK_ROWS])])
        plain = plain_features(queries, chosen, bank) if alike else np.zeros((*chosen.shape[:2], 0))
        image = np.unique(val.group[asking], return_inverse=True)[1]
        return cls(direction, queries, chosen, plain, image)

    def losses(self, likelihoods: Tensor | None = None) -> Array:
        """Negative log-likelihoods [Q] of the right items, in nats: by what is known without a flow, and with
        log p(query | item) [Q, K] beside it."""
        features = self.plain
        if likelihoods is not None:
            features = np.concatenate((features, likelihoods.double().cpu().numpy()[..., None]), 2)
        return crossed_losses(features, self.image % FOLDS)

    def stderr(self, differences: Array) -> float:
        """Standard error of the mean of `differences` [Q] between queries, of which those of one image may depend on
        each other."""
        sums = np.bincount(self.image, differences - differences.mean())
        return float(np.sqrt(np.square(sums).sum()) / len(differences))

    def likelihoods(self, flow: GeoFlow, seed: int) -> Tensor:
        """log p(query | item) of the candidates: [Q, K]."""
        count, like = self.items.shape[1], flow.example
        queries, items = self.queries.repeat_interleave(count, 0).to(like), self.items.flatten(0, 1).to(like)
        pair = self.direction.pair(queries, items)
        estimates = density_estimates(flow, *pair, (self.direction.reverse,), DENSITY, seed)
        return estimates[0].mean(0).view(-1, count)


def plain_features(queries: Tensor, items: Tensor, bank: Tensor) -> Array:
    """Cosine and hub correction [Q, K, 2] of `items` [Q, K, d] for `queries` [Q, d], with typical queries `bank`."""
    cosine = torch.einsum("qd,qkd->qk", queries, items)
    hub = (HUB_SCALE * items @ bank.T).logsumexp(2)
    return torch.stack((cosine, hub), 2).double().cpu().numpy()


def crossed_losses(features: Array, fold: NDArray[np.int64]) -> Array:
    """-log probability [Q] of the first of K items, where probabilities are the softmax of features [Q, K, F] times
    weights that are fitted to the queries of other folds."""
    from scipy.special import logsumexp

    x = features - features.mean(1, keepdims=True)
    x = x / np.maximum(np.sqrt(np.square(x).mean((0, 1))), 1e-12)
    first, losses = np.zeros(x.shape[:2]), np.empty(len(x))
    first[:, 0] = 1.0
    for number in np.unique(fold):
        left_out = fold == number
        logits = x[left_out] @ fit_choice(x[~left_out], first[~left_out], PRIOR_SD)
        losses[left_out] = logsumexp(logits, axis=1) - logits[:, 0]
    return losses


def blend(
    flow: GeoFlow, first_gains: Sequence[Tensor], pairs: EmbeddingPairs, val: EmbeddingPairs, seed: int
) -> dict[str, Any]:
    """Gives the network of an anchored flow, in each conditional direction, the share that held-out retrieval asks for,
    between the flow before training, whose anchor had `first_gains`, and the trained one.

    Returns by direction of search the share that is kept, the negative log-likelihoods, in nats a query, without a flow
    ("plain") and for each share, and the standard errors of the differences from a half; the entry is empty, and the
    share one, where too few pairs are held out.
    """
    assert flow.anchor is not None
    trained_gains = [gain.detach().clone() for gain in flow.anchor.gains]
    outcome: dict[str, Any] = {}
    for direction in CONDITIONAL:
        outcome[str(direction)] = {}
        choice = Choice.of(pairs, val, direction, seed)
        if choice is None:
            continue
        stream = direction.reverse.generated[0]
        gains = first_gains[stream], trained_gains[stream]
        losses = {}
        for share in (NONE, HALF, WHOLE):
            take_share(flow.anchor, stream, share, gains)
            losses[share] = choice.losses(choice.likelihoods(flow, seed))
        best = preferred_share(choice, losses)
        take_share(flow.anchor, stream, best, gains)
        by_share = {f"{share:g}": float(loss.mean()) for share, loss in losses.items()}
        outcome[str(direction)] = {
            "share": best,
            "nll": {"plain": float(choice.losses().mean()), **by_share},
            "stderr": {f"{share:g}": choice.stderr(losses[HALF] - losses[share]) for share in (NONE, WHOLE)},
        }
    return outcome


def preferred_share(choice: Choice, losses: Mapping[float, Array]) -> float:
    """A half, unless the better one of none and all gains more than the standard error of what it gains."""
    best = min((NONE, WHOLE), key=lambda share: float(losses[share].mean()))
    gains = losses[HALF] - losses[best]
    return best if gains.mean() > choice.stderr(gains) else HALF


@torch.no_grad()
def take_share(anchor: Anchor, stream: int, share: float, gains: tuple[Tensor, Tensor]) -> None:
    """Puts a stream of the flow at `share` of the way from the untrained to the trained one, with these gains."""
    anchor.shares[stream] = share
    untrained, trained = (gain.to(anchor.gains[stream]) for gain in gains)
    anchor.gains[stream].copy_(torch.lerp(untrained, trained, share))
