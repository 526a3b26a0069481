"""What a flow learns from few real pairs, and which settings help it to.

Photographs and a world: flows are trained with the preset `auto`, where the shared embeddings are beside the
repository, on 300 pairs of CLIP (COCO and Unsplash, width 512) and on 300 to 10,455 of Flickr8k in a small dual encoder
(width 256), and everywhere on 300 to 20,000 pairs of the CLIP-like world (width 512). Queries that no flow has seen, up
to 700 in each direction, choose among 16 items, their own one and the nearest others. The flow is judged by how much
likelier it makes the right ones beside cosine and hub correction, with weights fitted to other queries: before
training, with half of the network, with all of it, and with the share that `auto` kept.

Digits: 1,797 scans of 8 x 8 pixels come with scikit-learn; the upper half plays the image, the lower half the text,
both scaled to unit norm. Pixels are not negative, so all rows lie in one corner of the sphere, as embeddings of one
modality do. Quality is the negative log-probability, in nats, of the right partner among 32 held-out ones, with
probabilities proportional to p(query | partner); it can be compared between coordinates, which log-densities cannot.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from torch import Tensor

import geoflow_fast as gf
from benchmarks.methods.results import SHARED, gate, report, shared_pairs
from geoflow_fast.directions import Direction
from geoflow_fast.evaluation.statistics import bootstrap_interval
from geoflow_fast.flow.config import FEW_PAIRS
from geoflow_fast.retrieval.hubs import SCALES, log_means
from geoflow_fast.retrieval.task import drawn_rows
from geoflow_fast.training.blending import CANDIDATES as CANDIDATES_OF_CHOICE
from geoflow_fast.training.blending import Choice, blend, take_share
from geoflow_fast.training.flow_matching import FlowMatching, preset_settings
from geoflow_fast.training.loop import Run, complete

TRAINING_PAIRS = (300, 1200)
CANDIDATES, QUERIES = 32, 128
FLICKR_PAIRS, WORLD_PAIRS = (300, 1000, 10_455), (300, 2000, 20_000)
JUDGES, BANK = 700, 2000
SETTINGS: dict[str, dict[str, object]] = {
    "as they are": {},
    "centred": {"centre": True},
    "centred, 16 components": {"centre": True, "pca_dim": 16},
}


def digit_halves(seed: int) -> tuple[Tensor, Tensor]:
    """Unit rows [1797, 32] of both halves, shuffled; blank halves are left out."""
    pixels = load_digits().images.astype(np.float32)
    halves = [torch.from_numpy(part.reshape(len(pixels), 32)) for part in (pixels[:, :4], pixels[:, 4:])]
    inked = torch.stack([half.norm(dim=1) > 0 for half in halves]).all(0).nonzero().squeeze(1)
    order = inked[torch.randperm(len(inked), generator=torch.Generator().manual_seed(seed))]
    upper, lower = (torch.nn.functional.normalize(half[order]) for half in halves)
    return upper, lower


def surprise(flow: gf.GeoFlow, upper: Tensor, lower: Tensor, seed: int) -> float:
    """Mean of -log pi(right partner) of `QUERIES` upper halves among `CANDIDATES` lower halves each."""
    generator = torch.Generator().manual_seed(seed)
    others = torch.rand(QUERIES, len(lower), generator=generator).scatter_(1, torch.arange(QUERIES)[:, None], 2.0)
    candidates = others.topk(CANDIDATES, dim=1).indices  # the right one first
    image = upper[:QUERIES].repeat_interleave(CANDIDATES, 0)
    logits = gf.log_density(flow, image, lower[candidates.flatten()], "t2i", generator=generator)
    assert isinstance(logits, Tensor)
    return float(-logits.view(QUERIES, CANDIDATES).log_softmax(1)[:, 0].mean())


def trained(upper: Tensor, lower: Tensor, seed: int, changes: dict[str, object]) -> gf.GeoFlow:
    torch.manual_seed(seed)
    flow = gf.GeoFlow(dataclasses.replace(gf.GeoFlowConfig.tiny(32, 32), **changes))
    config = dataclasses.replace(gf.TrainConfig.tiny(), steps=400, warmup_steps=40, batch_size=128, seed=seed)
    gf.train(flow, gf.EmbeddingPairs.from_arrays(upper, lower), config, progress=False)
    return flow


@dataclass(frozen=True)
class FewPairs:
    """Pairs to train on and pairs to judge by, of different images."""

    name: str
    seed: int
    train: gf.EmbeddingPairs
    test: gf.EmbeddingPairs


def photographs(seeds: int) -> Iterator[FewPairs]:
    """The shared sets that are there: 300 of 500 pairs of CLIP, and parts of Flickr8k."""
    for seed in range(seeds):
        for name in ("coco", "unsplash"):
            if (SHARED / "photos" / f"{name}500.npz").is_file():
                train, test = shared_pairs(f"photos/{name}500").split(0.4, seed)
                yield FewPairs(f"{name.capitalize()}, CLIP, 300 (512)", seed, train, test)
        if (SHARED / "flickr8k").is_dir():
            whole, test = shared_pairs("flickr8k/train"), shared_pairs("flickr8k/dev")
            for count in FLICKR_PAIRS:
                first = min(seed * count, len(whole) - count)
                train = whole.subset(np.arange(first, first + count))
                yield FewPairs(f"Flickr8k, {count:,} (256)", seed, train, test)


def clip_world(seeds: int) -> Iterator[FewPairs]:
    """Pairs of the world of CLIP-like statistics."""
    world = gf.worlds.ClipWorld()
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(seed)
        test = gf.EmbeddingPairs.from_arrays(*world.sample(1000, generator=generator)[:2])
        for count in WORLD_PAIRS:
            if count < FEW_PAIRS or not seed:  # a long run
                train = gf.EmbeddingPairs.from_arrays(*world.sample(count, generator=generator)[:2])
                yield FewPairs(f"CLIP-like world, {count:,} (512)", seed, train, test)


class Judge:
    """What a flow adds to cosine and hub correction when held-out queries choose among 16 items."""

    def __init__(self, data: FewPairs, direction: Direction) -> None:
        choice = Choice.of(data.train, data.test, direction, data.seed, JUDGES)
        assert choice is not None
        bank = direction.queries(*data.train[drawn_rows(len(data.train), BANK, data.seed)])
        cosine = torch.einsum("qd,qkd->qk", choice.queries, choice.items).double()
        numbers = log_means(bank @ choice.items.flatten(0, 1).T, None, SCALES).view(-1, *cosine.shape)
        plain = [dataclasses.replace(choice, plain=torch.stack((cosine, hub), 2).numpy()) for hub in numbers]
        self.choice = min(plain, key=lambda each: float(each.losses().mean()))  # the best scale of the correction
        self.plain = self.choice.losses()

    def losses(self, flow: gf.GeoFlow) -> NDArray[np.float64]:
        """-log probability of the right items [Q] with the flow."""
        return self.choice.losses(self.choice.likelihoods(flow, 1))


def trained_row(data: FewPairs) -> dict[str, dict[str, Any]]:
    """Trains as the preset `auto` does and judges, for both directions of search, the shares that it may keep."""
    shape, config = preset_settings("auto", data.train, {"seed": data.seed, "blend": False}, cores=2)
    train, val = data.train.split(config.val_fraction, config.seed)
    torch.manual_seed(data.seed)
    flow = gf.GeoFlow(shape)
    objective = FlowMatching(flow, train, val, config)
    start = time.perf_counter()
    report = complete(Run(objective), progress=False)
    assert flow.anchor is not None
    gains = objective.first_gains(), [gain.detach().clone() for gain in flow.anchor.gains]
    kept = blend(flow, gains[0], train, val, config.seed)
    seconds = time.perf_counter() - start
    rows = {}
    for direction in (Direction.T2I, Direction.I2T):
        judge, stream = Judge(data, direction), direction.reverse.generated[0]
        losses = {}
        for share in (0.0, 0.5, 1.0):
            take_share(flow.anchor, stream, share, (gains[0][stream], gains[1][stream]))
            losses[share] = judge.losses(flow)
        share = kept[str(direction)].get("share", 1.0)
        adds = bootstrap_interval(np.mean, judge.plain - losses[share], groups=judge.choice.image)
        over = bootstrap_interval(np.mean, losses[0.0] - losses[share], groups=judge.choice.image)
        rows[str(direction)] = {
            "pairs (width)": data.name,
            "seed": data.seed,
            "search": str(direction),
            "NLL, hub correction": float(judge.plain.mean()),
            "untrained adds": float((judge.plain - losses[0.0]).mean()),
            "half adds": float((judge.plain - losses[0.5]).mean()),
            "trained adds": float((judge.plain - losses[1.0]).mean()),
            "kept share": share,
            "auto adds": adds.value,
            "low": adds.low,
            "high": adds.high,
            "auto over untrained": over.value,
            "over, low": over.low,
            "over, high": over.high,
            "step": report.best_step,
            "seconds": seconds,
        }
        print(rows[str(direction)], flush=True)
    return rows


def few_pairs_rows(sets: Iterable[FewPairs]) -> list[dict[str, Any]]:
    """Both directions of every set."""
    return [row for data in sets for row in trained_row(data).values()]


def run(seeds: int = 3) -> str:
    """The study."""
    parts = [digits(seeds)]
    for name, sets in (("photographs", photographs(2)), ("world", clip_world(2))):
        rows = few_pairs_rows(sets)
        if rows:
            parts.append(report(f"few_pairs_{name}", rows, {"queries": JUDGES, "candidates": CANDIDATES_OF_CHOICE}))
            gate(f"{name}: auto adds on average", statistics.mean(row["auto adds"] for row in rows) > 0)
    return "\n\n".join(parts)


def digits(seeds: int) -> str:
    """Coordinates and their effect, on digits."""
    rows: list[dict[str, Any]] = []
    for pairs in TRAINING_PAIRS:
        for name, changes in SETTINGS.items():
            surprises = []
            for seed in range(seeds):
                upper, lower = digit_halves(seed)
                flow = trained(upper[:pairs], lower[:pairs], seed, changes)
                surprises.append(surprise(flow, upper[1200:], lower[1200:], seed))
            rows.append(
                {
                    "training pairs": pairs,
                    "embeddings": name,
                    "median surprise, nats": statistics.median(surprises),
                    "worst of seeds": max(surprises),
                }
            )
    gate("the best setting is better than guessing", rows[-1]["median surprise, nats"] < np.log(CANDIDATES))
    return report("few_pairs", rows, {"guessing": float(np.log(CANDIDATES)), "seeds": seeds})
