"""What a flow learns from few real pairs, and which settings help it to.

Photographs: where the shared embeddings are beside the repository, flows are trained on 50 and on 500 pairs of CLIP
(width 512) and on 10,455 of Flickr8k in a small dual encoder (width 256). Texts search images that no flow has seen.
Half of the held-out pairs calibrate a re-ranker, the others judge it: what the flow adds to cosine and hub correction,
and how well the flow alone tells wrong first answers from right ones. Gates are the claims of docs/training.md.

Digits: 1,797 scans of 8 x 8 pixels come with scikit-learn; the upper half plays the image, the lower half the text,
both scaled to unit norm. Pixels are not negative, so all rows lie in one corner of the sphere, as embeddings of one
modality do. Quality is the negative log-probability, in nats, of the right partner among 32 held-out ones, with
probabilities proportional to p(query | partner); it can be compared between coordinates, which log-densities cannot.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor

import geoflow_fast as gf
from benchmarks.bench_head import losses
from benchmarks.common import SHARED, gate, report, shared_pairs
from geoflow_fast.evaluation.metrics import auroc
from geoflow_fast.evaluation.statistics import bootstrap_interval
from geoflow_fast.retrieval.task import RetrievalTask
from geoflow_fast.training.flow_matching import FlowMatching, preset_settings
from geoflow_fast.training.loop import Run

TRAINING_PAIRS = (300, 1200)
CANDIDATES, QUERIES = 32, 128
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
class Photographs:
    """Pairs to train on, pairs to calibrate a re-ranker on, and pairs to judge it by, all of different images."""

    name: str
    train: gf.EmbeddingPairs
    held_out: gf.EmbeddingPairs
    test: gf.EmbeddingPairs


@dataclass(frozen=True)
class Setting:
    """How a flow differs from the one that the preset `auto` trains."""

    name: str
    network: dict[str, Any] = dataclasses.field(default_factory=dict)
    run: dict[str, Any] = dataclasses.field(default_factory=dict)
    trained: bool = True


BARE = {"anchored": False, "centre": False}
PHOTOGRAPH_SETTINGS = (
    Setting("without anchor and centring", BARE),
    Setting("without anchor, 32 components", {"anchored": False, "pca_dim": 32}),
    Setting("anchor, not trained", trained=False),
    Setting("auto"),
)
SHORTLIST, JUDGES = 16, 500


def photographs() -> list[Photographs]:
    """The sets that are there."""
    sets = []
    files = [SHARED / "photos" / f"{name}500.npz" for name in ("coco", "unsplash")]
    if all(file.is_file() for file in files):
        parts = [np.load(file, allow_pickle=False) for file in files]
        rows = [np.concatenate([part[name] for part in parts]).astype(np.float32) for name in ("image_emb", "text_emb")]
        pairs = gf.EmbeddingPairs.from_arrays(*rows, normalize=True)
        train, rest = pairs.split(0.5, 0)
        for few in (train.subset(np.arange(50)), train):
            sets.append(Photographs(f"CLIP, {len(few)} pairs", few, *rest.split(0.5, 1)))
    if (SHARED / "flickr8k").is_dir():
        train = shared_pairs("flickr8k/train")
        sets.append(Photographs(f"Flickr8k, {len(train):,} pairs", train, *shared_pairs("flickr8k/dev").split(0.5, 0)))
    return sets


class Judge:
    """A re-ranker of cosines and hub correction, to which a flow may add."""

    def __init__(self, data: Photographs) -> None:
        self.data = data
        self.task = RetrievalTask.of(data.test, "t2i", max_queries=JUDGES)
        # The cosine's first answer, which every uncertainty is about.
        self.right = self.task.is_right((self.task.queries @ self.task.items.T).argmax(1))
        self.plain = self.answers(None)

    def answers(self, flow: gf.GeoFlow | None) -> gf.Reranked:
        reranker = gf.BayesReranker(flow, self.task.items, "t2i", shortlist=SHORTLIST)
        reranker.calibrate(self.data.held_out, max_queries=JUDGES, progress=False)
        return reranker(self.task.queries)

    def row(self, flow: gf.GeoFlow) -> dict[str, Any]:
        """What the flow is worth alone, and what it adds."""
        alone = gf.BayesReranker(flow, self.task.items, "t2i", shortlist=SHORTLIST).rerank(self.task.queries)
        both, own = self.answers(flow), self.task.own[:, 0]
        gain = bootstrap_interval(np.mean, losses(self.plain, own) - losses(both, own), groups=self.task.query_image)
        return {
            "AUROC, flow alone": auroc(1 - alone.p_answer, self.right),
            "AUROC, hub correction": auroc(1 - self.plain.p_answer, self.right),
            "AUROC, both": auroc(1 - both.p_answer, self.right),
            "NLL, hub correction": float(losses(self.plain, own).mean()),
            "flow adds, nats": gain.value,
            "low": gain.low,
            "high": gain.high,
        }


def photograph_row(data: Photographs, judge: Judge, setting: Setting) -> dict[str, Any]:
    """Trains a flow with a setting and judges it."""
    shape, config = preset_settings("auto", data.train, setting.run, cores=2)
    train, val = data.train.split(config.val_fraction, config.seed)
    torch.manual_seed(0)
    flow = gf.GeoFlow(dataclasses.replace(shape, **setting.network))
    run = Run(FlowMatching(flow, train, val, config))
    run.objective.prepare()
    before = run.validate()["val_loss"]
    start, best, step = time.perf_counter(), before, 0
    if setting.trained:
        done = gf.train(flow, train, config, val, progress=False)
        best, step = done.best_val_loss, done.best_step
    facts = {"pairs": data.name, "flow": setting.name, "loss, untrained": before, "loss, kept": best, "of step": step}
    row = {**facts, "seconds": time.perf_counter() - start, **judge.row(flow.eval())}
    print(row, flush=True)
    return row


def photograph_rows() -> list[dict[str, Any]]:
    """Every setting on every set."""
    rows = []
    for data in photographs():
        judge = Judge(data)
        rows += [photograph_row(data, judge, setting) for setting in PHOTOGRAPH_SETTINGS]
    for row in rows:
        gate(
            f"{row['pairs']}, {row['flow']}: training keeps nothing worse", row["loss, kept"] <= row["loss, untrained"]
        )
    return rows


def run(seeds: int = 3) -> str:
    """The study."""
    parts = [digits(seeds)]
    if photographs():
        facts = {"queries": JUDGES, "shortlist": SHORTLIST, "data": "CLIP ViT-B/16; Flickr8k in a small dual encoder"}
        parts.append(report("few_pairs_photographs", photograph_rows(), facts))
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
