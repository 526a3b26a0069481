"""How a head is fitted: its objective in the common training loop, the choice among settings, and the scale and the
hub correction that held-out pairs ask for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor
from torch.nn import functional

from geoflow_fast.data.pairs import EmbeddingPairs
from geoflow_fast.data.rows import Index
from geoflow_fast.directions import CONDITIONAL, Direction
from geoflow_fast.distributed import ALONE, World
from geoflow_fast.flow.config import FEW_PAIRS
from geoflow_fast.flow.precision import bfloat16_pays
from geoflow_fast.head.config import HeadConfig
from geoflow_fast.head.loss import contrastive_losses, log_mean_exp, point_scores
from geoflow_fast.head.model import PosteriorHead, Tower, save_head
from geoflow_fast.linear import ridge
from geoflow_fast.runtime import checks
from geoflow_fast.runtime.device import usable_device
from geoflow_fast.training.batches import ShuffledBatches, piece_edges
from geoflow_fast.training.loop import Run, complete
from geoflow_fast.training.objective import Objective

HELD_OUT_IMAGES = 1000
"""At most this many images are held out unless validation pairs are given."""
VALIDATION_QUERIES, VALIDATION_ITEMS = 1000, 4000
"""Queries and items of the gallery over which held-out likelihoods are computed, at most."""
BASE_RIDGE = 1e-3
BASE_ROWS = 50_000
SCALES = tuple(2.0 ** (k / 8) for k in range(-8, 9, 2))
MOST_HUB_WEIGHT = 1.5
POINTS = (1, 4, 8)
"""Numbers of points among which "auto" chooses."""
LIGHTER, STRONGER = 0.2, 0.3
"""Rates of dropout that "auto" tries too, with four points, on few pairs and on many."""
TRIAL_SHARE = 0.1
"""Length of the runs by which "auto" compares heads on many pairs, as a share of the whole run."""
TRIALS_FOLDER = "trials"


FEW = HeadConfig(steps=600, batch_size=512, lr=1e-3, weight_decay=0.1, val_every=20, dropout=0.5, noise=0.3, points=1)
"""Settings for few pairs."""
MANY = HeadConfig(steps=1000, bias_hidden=64)
"""Settings for many pairs."""


@dataclass(frozen=True)
class Search:
    """Queries of one direction and the items that they are contrasted with; rows of one image have one number."""

    direction: Direction
    queries: Tensor
    query_image: Tensor
    items: Tensor
    item_image: Tensor
    copies: Tensor
    """[N], how often each item occurs among the items."""

    @property
    def right(self) -> Tensor:
        """[Q, N] bool, which items belong to the image of the query."""
        return self.query_image.unsqueeze(1) == self.item_image

    def rows(self, low: int, high: int) -> Search:
        """The same search for some of the queries."""
        return dataclasses.replace(self, queries=self.queries[low:high], query_image=self.query_image[low:high])


@dataclass(frozen=True)
class HeadBatch:
    """One search in each direction, with as many queries each."""

    searches: tuple[Search, ...]

    def __len__(self) -> int:
        return len(self.searches[0].queries)

    def pieces(self, count: int) -> Iterator[HeadBatch]:
        """Yields the queries in `count` pieces of nearly equal size; the items stay whole."""
        for low, high in piece_edges(len(self), count):
            yield HeadBatch(tuple(search.rows(low, high) for search in self.searches))


class HeadObjective(Objective[HeadBatch]):
    """The contrastive objective of a head, in both directions at once.

    The validation loss is the likelihood of held-out items over a gallery, not over a batch, whose size would decide
    its value. A rank has its share of the queries and all items of a batch, so nothing but gradients is exchanged.
    """

    TELLS_RISE = False
    pairs: EmbeddingPairs
    config: HeadConfig

    def __init__(
        self, head: PosteriorHead, pairs: EmbeddingPairs, val: EmbeddingPairs, config: HeadConfig, world: World = ALONE
    ) -> None:
        if config.batch_size < world.size:
            raise ValueError(f"batch_size={config.batch_size} is too small for {world.size} ranks")
        widths = {"image_dim": head.image_dim, "text_dim": head.text_dim}
        super().__init__(head, pairs, val, config, widths, world)
        self.head, self.device = head, head.example.device
        self.order = ShuffledBatches(len(pairs), config.batch_size, config.seed)
        self.held_out = HeadBatch(tuple(held_out_search(pairs, val, d, config, self.device) for d in CONDITIONAL))

    def prepare(self) -> None:
        """Keeps the bank of queries, and fits the linear maps where images and texts differ in width."""
        config, head = self.config, self.head
        # With fewer pairs than the bank has rows, some occur more than once.
        rows = np.resize(bank_rows(self.pairs, config), config.bank)
        image, text = self.pairs[rows]
        head.bank_image.copy_(image)
        head.bank_text.copy_(text)
        for direction in CONDITIONAL:
            tower = head.towers[str(direction)]
            assert isinstance(tower, Tower)
            if tower.base is not None:
                tower.base.copy_(linear_map(self.pairs, direction, config.seed))

    def training_batch(self, step: int) -> HeadBatch:
        """The pairs of a step; every item of the batch serves every query."""
        index = self.order[step]
        return self._batch(index, self.world.own(len(index)))

    def _batch(self, index: Index, own: range) -> HeadBatch:
        image, text = (x.to(self.device, non_blocking=True) for x in self.pairs[index])
        number = torch.from_numpy(self.pairs.group[index]).to(self.device)
        copies = (number.unsqueeze(0) == number.unsqueeze(1)).sum(0).to(image)
        searches = []
        for direction in CONDITIONAL:
            queries, items = direction.queries(image, text), direction.items(image, text)
            # The texts of one image are different items, its rows among the images are one.
            times = copies if direction is Direction.T2I else torch.ones_like(copies)
            searches.append(Search(direction, queries, number, items, number, times).rows(own.start, own.stop))
        return HeadBatch(tuple(searches))

    def validation_batch(self, number: int) -> HeadBatch:  # noqa: ARG002
        """The held-out queries of this rank, over the gallery of held-out items."""
        searches = []
        for search in self.held_out.searches:
            own = self.world.own(len(search.queries))
            searches.append(search.rows(own.start, own.stop))
        return HeadBatch(tuple(searches))

    def losses(self, batch: HeadBatch) -> Tensor:
        """The sum of the losses in both directions, for each row [B]."""
        return torch.stack([self._losses(search) for search in batch.searches]).sum(0)

    def _losses(self, search: Search) -> Tensor:
        training, queries = self.head.training, search.queries
        if training and self.config.noise:
            queries = functional.normalize(
                queries + self.config.noise * functional.normalize(torch.randn_like(queries))
            )
        points = self.head.raw_points(queries, search.direction, self.config.dropout if training else 0.0)
        bias = self.head.raw_item_bias(search.items, search.direction)
        # Scores are in the hundreds, where half precision would round away what tells items apart.
        with torch.autocast(self.device.type, enabled=False):
            scores = point_scores(points.points.float(), points.log_weights.float(), search.items)
            return contrastive_losses(scores + bias, search.right, search.copies)

    def gains_from_bfloat16(self) -> bool:
        """The network is half of a step, its products the larger part of that: what pays elsewhere pays here."""
        return bfloat16_pays(self.device)

    def export(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        """Writes what `PosteriorHead.from_pretrained` reads."""
        save_head(folder, self.head, weights)


def bank_rows(pairs: EmbeddingPairs, config: HeadConfig) -> Index:
    """The numbers of the pairs whose queries are the bank: at most half of the pairs, and at least one."""
    count = min(config.bank, max(1, len(pairs) // 2))
    return np.sort(np.random.default_rng((config.seed, 1)).permutation(len(pairs))[:count])


def held_out_search(
    pairs: EmbeddingPairs, val: EmbeddingPairs, direction: Direction, config: HeadConfig, device: torch.device
) -> Search:
    """Held-out queries over a gallery of held-out items and of as many training items as there is room for.

    Items whose own queries are in the bank are left out: the bank would count against them, which are all wrong here.
    """
    rng = np.random.default_rng((config.seed, 2))
    if len(val) > VALIDATION_ITEMS:
        val = val.subset(np.sort(rng.permutation(len(val))[:VALIDATION_ITEMS]))
    asking = np.sort(rng.permutation(len(val))[:VALIDATION_QUERIES])
    free = np.flatnonzero(~np.isin(pairs.group, pairs.group[bank_rows(pairs, config)]))
    others = np.sort(rng.permutation(free)[: VALIDATION_ITEMS - len(val)])
    image, text = (torch.cat(sides) for sides in zip(val[np.arange(len(val))], pairs[others]))
    # Training pairs are of other images than held-out ones.
    own, foreign = np.unique(val.group, return_inverse=True)[1], np.unique(pairs.group, return_inverse=True)[1]
    number = torch.from_numpy(np.concatenate((own, own.max() + 1 + foreign[others]))).to(device)
    copies = torch.ones(len(number), dtype=torch.float32, device=device)
    if direction is Direction.T2I:
        copies = number.bincount()[number].to(copies)
    chosen = torch.from_numpy(asking).to(device)
    queries, items = (x.to(device) for x in (direction.queries(image, text), direction.items(image, text)))
    return Search(direction, queries[chosen], number[chosen], items, number, copies)


def linear_map(pairs: EmbeddingPairs, direction: Direction, seed: int) -> Tensor:
    """The matrix [d', d] of the ridge regression of items on queries, of at most `BASE_ROWS` pairs."""
    chosen = np.sort(np.random.default_rng((seed, 3)).permutation(len(pairs))[:BASE_ROWS])
    image, text = pairs[chosen]
    x, y = (side.double().numpy() for side in (direction.queries(image, text), direction.items(image, text)))
    return torch.from_numpy(ridge(x.T @ x, x.T @ y, [BASE_RIDGE])[0].T).float().contiguous()


def fit_head(
    pairs: EmbeddingPairs,
    conf: HeadConfig | None,
    val: EmbeddingPairs | None,
    k: int | str | None,
    seed: int | None,
    out: str | Path | None,
    *,
    resume: bool,
    progress: bool | None,
    device: torch.device | str,
    world: World,
    changes: Mapping[str, Any] | None = None,
) -> PosteriorHead:
    """Does the work of `PosteriorHead.fit`. `changes`: fields in which the settings differ from `conf`, or from those
    that follow from the number of pairs."""
    if conf is not None and not isinstance(conf, HeadConfig):
        raise TypeError(f"conf must be a HeadConfig, got {type(conf).__name__}")
    folder = None if out is None else checks.path(out, "out")
    usual = conf or HeadConfig()
    seed = usual.seed if seed is None else checks.integer(seed, "seed")
    if k is None:
        k = "auto" if conf is None else conf.points
    pairs, val = _checked_pairs(pairs, val, usual.val_fraction, seed)
    base = conf or (FEW if len(pairs) < FEW_PAIRS else MANY)
    settings = head_settings(
        dataclasses.replace(base, **{**(changes or {}), "seed": seed}), len(pairs), k, chosen=conf is not None
    )
    fitting = Fitting(pairs, val, resume=resume, progress=progress, device=usable_device(str(device)), world=world)
    if len(settings) == 1:
        return fitting.run(settings[0], folder)
    trials = []
    for setting in settings:
        trials.append(fitting.trial(setting, None if folder is None else folder / TRIALS_FOLDER))
        if not trials[-1].report["finished"]:
            return trials[-1]
    best = min(trials, key=lambda head: float(head.report["nll"]))
    reports = [dict(head.report) for head in trials]
    if best.config in settings:  # the trial was a whole run
        return fitting.keep(best, folder, reports)
    return fitting.run(settings[trials.index(best)], folder, reports)


def _checked_pairs(
    pairs: EmbeddingPairs, val: EmbeddingPairs | None, share: float, seed: int
) -> tuple[EmbeddingPairs, EmbeddingPairs]:
    """The pairs to train on and those held out, after checking what the user passed."""
    for name, part in (("pairs", pairs), ("val", val)):
        if not isinstance(part, EmbeddingPairs) and not (name == "val" and part is None):
            raise TypeError(f"{name} must be EmbeddingPairs, got {type(part).__name__}")
        if part is not None and len(part) == 0:
            raise ValueError(f"{name} hold no pairs")
    if val is None:
        images = len(np.unique(pairs.group))
        return pairs.split(min(share, HELD_OUT_IMAGES / images), seed)
    if (val.image_dim, val.text_dim) != (pairs.image_dim, pairs.text_dim):
        raise ValueError(
            f"val have widths {val.image_dim} and {val.text_dim}, but pairs have {pairs.image_dim} and {pairs.text_dim}"
        )
    return pairs, val


def head_settings(base: HeadConfig, count: int, k: int | str, *, chosen: bool) -> list[HeadConfig]:
    """The settings to try on `count` pairs: one for a number of points `k`, several for "auto", which tries another
    regularisation too unless the user has `chosen` the settings."""
    if isinstance(k, str) and k != "auto":
        raise ValueError(f'k must be a number of points or "auto", got {k!r}')
    base = dataclasses.replace(base, batch_size=min(base.batch_size, count))
    if not isinstance(k, str):
        return [dataclasses.replace(base, points=k)]
    by_points = [dataclasses.replace(base, points=points) for points in POINTS]
    other = LIGHTER if count < FEW_PAIRS else STRONGER
    return by_points if chosen else [*by_points, dataclasses.replace(by_points[1], dropout=other)]


class Fitting:
    """Heads that are trained on the same pairs."""

    def __init__(
        self,
        pairs: EmbeddingPairs,
        val: EmbeddingPairs,
        *,
        resume: bool,
        progress: bool | None,
        device: torch.device,
        world: World,
    ) -> None:
        self.pairs, self.val, self.resume, self.progress = pairs, val, resume, progress
        self.device, self.world = device, world

    def trial(self, config: HeadConfig, folder: Path | None) -> PosteriorHead:
        """A head with these settings; on many pairs its run is a short one."""
        if len(self.pairs) >= FEW_PAIRS:
            config = dataclasses.replace(config, steps=max(1, round(TRIAL_SHARE * config.steps)))
        return self.run(config, None if folder is None else folder / f"points_{config.points}_dropout_{config.dropout}")

    def run(self, config: HeadConfig, folder: Path | None, trials: Sequence[Mapping[str, Any]] = ()) -> PosteriorHead:
        """Trains a head, or continues to, and fits its scales."""
        with torch.random.fork_rng([]), torch.device("cpu"):
            torch.manual_seed(config.seed)
            head = PosteriorHead(config, self.pairs.image_dim, self.pairs.text_dim)
            head.origin = self.pairs.origin(config.to_json())
        head.report = {"points": config.points, "dropout": config.dropout, "finished": False}  # while it is trained
        objective = HeadObjective(head.to(self.device), self.pairs, self.val, config, self.world)
        report = complete(Run(objective), folder, resume=self.resume, progress=self.progress)
        losses = fit_scales(head, objective.held_out.searches)
        head.report |= {
            "steps": report.steps,
            "best_step": report.best_step,
            "finished": report.finished,
            "nll": sum(losses.values()),
            **{f"nll_{direction}": loss for direction, loss in losses.items()},
        }
        return self.keep(head, folder, trials)

    def keep(self, head: PosteriorHead, folder: Path | None, trials: Sequence[Mapping[str, Any]]) -> PosteriorHead:
        """Adds the reports of the `trials`, if there were any, and writes the head to its folder."""
        if trials:
            head.report["trials"] = list(trials)
        if folder is not None and self.world.is_main:
            head.save_pretrained(folder)
        return head


@torch.no_grad()
def fit_scales(head: PosteriorHead, searches: Sequence[Search]) -> dict[str, float]:
    """Fits the scale and the weight of the hub correction of each direction on held-out searches and writes them into
    the head. Returns the mean loss of each direction."""
    losses = {}
    for number, search in enumerate(searches):
        tried = {scale: _best_hub_weight(head, search, scale) for scale in SCALES}
        scale = min(tried, key=lambda s: tried[s][1])
        weight, losses[str(search.direction)] = tried[scale]
        head.scale[number], head.hub_weight[number] = scale, weight
    return losses


def _best_hub_weight(head: PosteriorHead, search: Search, scale: float) -> tuple[float, float]:
    """The weight of the hub correction with the lowest loss at this scale, and that loss."""
    learned = scale * head.raw_item_bias(search.items, search.direction)

    def scores(queries: Tensor) -> Tensor:
        raw = head.raw_points(queries, search.direction)
        return point_scores(raw.points * scale, raw.log_weights * scale, search.items) + learned

    own, right = scores(search.queries), search.right
    bank = head.bank(search.direction)

    def loss(weight: float) -> float:
        return float(contrastive_losses(own - weight * hubs, right, search.copies).double().mean())

    if not len(bank):
        hubs = torch.zeros_like(learned)
        return 0.0, loss(0.0)
    hubs = log_mean_exp(scores(bank))
    best = minimize_scalar(loss, bounds=(0.0, MOST_HUB_WEIGHT), method="bounded", options={"xatol": 0.02})
    weight = float(best.x)
    return (weight, float(best.fun)) if best.fun < loss(0.0) else (0.0, loss(0.0))
