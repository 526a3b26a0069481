"""PosteriorHead: what its answers cost beside a search, and how good they are, against the truth and on real data.

Hot path: the shortlists of a search, scored by a head of four points and corrected for hubs. Plain searches, ours and
FAISS's, stand beside; `bench_gallery` has the posteriors over a whole gallery.

The study (`python -m benchmarks --study head`): the concept world, five seeds, K chosen by "auto" on 60,000 pairs, five
galleries of 1,000 items with as many queries each against the exact posterior; what a head adds to a flow; the time
that training takes. Where the shared embeddings of Flickr8k are beside the repository, the ladder of evidence is judged
on them too. Gates are the claims of docs/head.md.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor

import geoflow_fast as gf
from benchmarks import peers
from benchmarks.bench_entropy import trained_flow
from benchmarks.bench_gallery import FAISS
from benchmarks.common import gate, report, time_together
from benchmarks.suite import Table
from geoflow_fast.directions import CONDITIONAL, Direction
from geoflow_fast.evaluation.metrics import auroc, auroc_leads, reliability
from geoflow_fast.evaluation.statistics import RESAMPLES, bootstrap_interval
from geoflow_fast.retrieval.calibration import UNCALIBRATED_HEAD
from geoflow_fast.retrieval.hubs import Hubs
from geoflow_fast.retrieval.task import RetrievalTask
from geoflow_fast.worlds import ConceptWorld

QUERIES, GALLERIES, SEEDS, PAIRS = 1000, 5, 5, 60_000
ITEMS, WIDTH, SEARCHES = 100_000, 1024, 64
SHORTLIST = 32
"""Of all re-rankers, with a flow and without, so that their likelihoods can be compared."""
FLICKR = Path(__file__).resolve().parent.parent.parent / "shared" / "data" / "flickr8k"


def scored_shortlists(gallery: gf.Gallery, shortlist: int | None, points: int = 4) -> gf.BayesReranker:
    """A re-ranker whose evidence is the cosine and a head with random weights, both corrected for hubs."""
    torch.manual_seed(0)
    head = gf.PosteriorHead(gf.HeadConfig(points=points, bias_hidden=64), gallery.dim, gallery.dim).eval()
    reranker = gf.BayesReranker(None, gallery, shortlist=shortlist, head=head)
    weights = {"hub": -0.5, "head": 1.0, "head_hub": -0.5}
    bank = torch.nn.functional.normalize(torch.randn(500, gallery.dim))
    reranker.bank, reranker.hubs = bank, Hubs(bank, reranker.source)
    reranker.calibration = dataclasses.replace(UNCALIBRATED_HEAD, beta=20.0, others=weights, hub_scale=20.0)
    return reranker


def same_as_float64(reranker: gf.BayesReranker, queries: Tensor) -> bool:
    """Whether the probabilities are those of the formula, written out once more in float64."""
    post = reranker.rerank(queries)
    head, source, hubs = reranker.head, reranker.source, reranker.hubs
    assert head is not None
    assert source is not None
    assert hubs is not None
    rows = reranker.gallery.take(post.index).double()
    points = head.points(queries, reranker.direction)
    each = torch.einsum("qkd,qjd->qkj", points.points.double(), rows) + points.log_weights.double().unsqueeze(2)
    score = each.logsumexp(1)
    cosine = torch.einsum("qd,qkd->qk", queries.double(), rows)
    hub = (20 * torch.einsum("rd,qkd->rqk", hubs.bank.double(), rows)).logsumexp(0)
    head_hub = source.all_scores(hubs.bank, rows.flatten(0, 1).float()).double().logsumexp(0).view_as(hub)
    bias = source.learned_about(rows.float())
    logits = 20 * cosine - 0.5 * hub + score + bias - 0.5 * (head_hub + bias)
    return bool(torch.allclose(post.prob.double(), logits.softmax(1), rtol=0, atol=1e-4))


def tables() -> Iterator[Table]:
    """The price of shortlists that a head scores."""
    torch.manual_seed(0)
    rows = torch.nn.functional.normalize(torch.randn(ITEMS, WIDTH))
    queries = torch.nn.functional.normalize(
        rows[:SEARCHES] + 0.5 * torch.nn.functional.normalize(torch.randn(64, WIDTH))
    )
    gallery = gf.Gallery(rows)
    reranker, longer = (scored_shortlists(gallery, length) for length in (SHORTLIST, None))
    for scored in (reranker, longer):
        gate(f"shortlists of {scored.shortlist} scored by a head", same_as_float64(scored, queries[:4]))
    runs: dict[str, Any] = {
        "search, top 32": lambda: gallery.statistics(queries.unsqueeze(1), 1.0, 32),
        "search, shortlists scored by a head of 4 points": lambda: reranker.rerank(queries),
        f"the same with shortlists of {longer.shortlist}, the default": lambda: longer.rerank(queries),
    }
    if FAISS.present:
        index = peers.faiss_index(rows)
        runs["FAISS, top 32"] = lambda: peers.faiss_search(index, queries, 32)
    seconds = time_together(runs)
    fastest = min(value for name, value in seconds.items() if name.endswith("top 32"))
    prices = [{"64 queries": n, "ms": 1e3 * s, "times the faster search": s / fastest} for n, s in seconds.items()]
    yield Table("shortlists", prices)


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


def flickr_pairs(part: str) -> gf.EmbeddingPairs:
    """Flickr8k in a small dual encoder."""
    with np.load(FLICKR / f"{part}.npz", allow_pickle=False) as file:
        image, text = (file[name].astype(np.float32) for name in ("image_emb", "text_emb"))
        index = file["text_image_index"].astype(np.int64)
    return gf.EmbeddingPairs.from_arrays(image, text, index, normalize=True)


def flickr() -> list[dict[str, Any]]:
    """The ladder on Flickr8k: trained on the training images, calibrated on half of the development images and judged
    on the others, both ways round."""
    head = gf.PosteriorHead.fit(flickr_pairs("train"), seed=0)
    halves = flickr_pairs("dev").split(0.5, seed=0)
    by_evidence: dict[tuple[str, str], list[dict[str, Tensor]]] = {}
    for held_out, test in (halves, halves[::-1]):
        for direction in CONDITIONAL:
            task = RetrievalTask.of(test, direction)
            for name, more in (("hub correction", None), ("ladder with a head", head)):
                reranker = gf.BayesReranker(None, task.items, direction, SHORTLIST, head=more)
                reranker.calibrate(held_out, progress=False, max_queries=5000)
                post = reranker(task.queries)
                right, share = task.is_right(post.index), (task.own >= 0).sum(1, keepdim=True)
                mass = (post.prob.double().clamp_min(1e-12).log() * right / share).sum(1)
                outside = 1 - right.sum(1) / share.squeeze(1)
                by_evidence.setdefault((name, str(direction)), []).append(
                    {
                        "NLL": -mass - outside * post.p_outside.double().clamp_min(1e-12).log(),
                        "Recall@1": right[:, 0].double(),
                        "p_answer": post.p_answer.double(),
                        "right": task.is_right(post.answer),
                        "image": task.query_image + len(test) * len(by_evidence),
                    }
                )
    return [row for direction in ("t2i", "i2t") for row in compared(direction, by_evidence)]


def compared(direction: str, by_evidence: dict[tuple[str, str], list[dict[str, Tensor]]]) -> list[dict[str, Any]]:
    """Both evidences in one direction, and the paired difference with its interval."""
    ours, plain = (
        {
            name: torch.cat([part[name] for part in by_evidence[which, direction]])
            for name in by_evidence[which, direction][0]
        }
        for which in ("ladder with a head", "hub correction")
    )
    gains = {
        name: bootstrap_interval(np.mean, sign * (ours[name] - plain[name]), groups=ours["image"])
        for name, sign in (("NLL", -1), ("Recall@1", 1))
    }
    means = {name: (float(plain[name].mean()), float(ours[name].mean())) for name in gains}
    scores = {"hub": 1 - plain["p_answer"], "ladder": 1 - ours["p_answer"]}
    means["AUROC"] = auroc(scores["hub"], plain["right"]), auroc(scores["ladder"], ours["right"])
    gains["AUROC"] = auroc_leads(scores, ours["right"], resamples=RESAMPLES, groups=ours["image"])["ladder"]["hub"]
    for name, gain in gains.items():
        gate(f"Flickr8k, {direction}: {name} not below hub correction", gain.high >= 0)
    return [
        {
            "": f"{name}, {direction}",
            "hub correction": means[name][0],
            "ladder": means[name][1],
            "gain, low": gain.low,
            "gain, high": gain.high,
        }
        for name, gain in gains.items()
    ]


def run() -> str:
    """The study."""
    parts = [report("head_concept_world", concept_world(), {"queries": QUERIES, "seeds": SEEDS, "pairs": PAIRS})]
    if FLICKR.is_dir():
        parts.append(report("head_flickr8k", flickr(), {"data": "Flickr8k in a small dual encoder (not CLIP)"}))
    return "\n\n".join(parts)
