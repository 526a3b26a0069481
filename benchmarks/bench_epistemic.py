"""The epistemic score beside what needs no flow: errors of zero-shot classification, strangers, wrong captions.

The study (`python -m benchmarks --study epistemic`) has four parts. The concept world, whose true density is known,
shows what a density could find and why a learned one finds less. ImageNet in CLIP ViT-B/32, if the shared embeddings
are beside the repository: selective accuracy by the paper's protocol, every image scored by a flow that was trained on
others, and strangers, which are the images of 200 classes left out of training and inputs that are no photographs.
Flickr8k in a small dual encoder: captions of which a tenth has been swapped. Differences are paired, with 95 %
intervals over resampled classes or images. Gates are the claims of docs/likelihood.md.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.covariance import ledoit_wolf
from torch import Tensor
from torch.nn.functional import normalize

import geoflow_fast as gf
from benchmarks.bench_entropy import trained_flow
from benchmarks.common import SHARED, gate, report, shared_pairs
from geoflow_fast.baselines.repvlm import REPVLM
from geoflow_fast.directions import CONDITIONAL, Direction
from geoflow_fast.evaluation.metrics import auroc, auroc_leads, selective_accuracy
from geoflow_fast.evaluation.statistics import bootstrap_interval, pearson, ranks
from geoflow_fast.evaluation.zero_shot import tuned_scale
from geoflow_fast.likelihood.density import chain_rule
from geoflow_fast.retrieval.sources import HeadSource
from geoflow_fast.worlds import ConceptWorld

FLICKR, IMAGENET = SHARED / "flickr8k", SHARED / "imagenet" / "vitb32.npz"
FOLDS, STRANGE_CLASSES, VALIDATION, RESAMPLES = 2, 200, 0.1, 500
COMPONENTS, STEPS, FAR = 64, 800, 400
STRANGERS, NEIGHBOURHOOD, PARTNERS = 500, "kNN distance, k = 10", ("own", "nearest")
FLOW = {"hidden": 128, "depth": 3, "layer_scale": 0.1, "dropout": 0.2, "centre": True, "pca_dim": COMPONENTS}
OURS = ("flow", "head")
"""How the names of scores begin that are no references."""
Scores = dict[str, Tensor]


def gen(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def fitted(pairs: gf.EmbeddingPairs, val: gf.EmbeddingPairs) -> gf.GeoFlow:
    """A small flow for a few thousand pairs, in principal components, stopped when validation no longer gains."""
    torch.manual_seed(0)
    flow = gf.GeoFlow(gf.GeoFlowConfig(pairs.image_dim, pairs.text_dim, **cast(Any, FLOW)))
    changes = {"steps": STEPS, "weight_decay": 0.05, "val_every": 100, "patience": 5, "ema_decay": 0.99}
    config = dataclasses.replace(gf.TrainConfig.tiny(), **cast(Any, changes))
    gf.train(flow, pairs, config, val=val, progress=False)
    return flow.eval()


def with_neighbours(flow: gf.GeoFlow, image: Tensor, text: Tensor, pairs: gf.EmbeddingPairs) -> gf.Epistemic:
    """The terms, with the partners of the nearest training rows for both marginals."""
    return gf.epistemic(flow, image, text, generator=gen(), image_partners=pairs, text_partners=pairs)


def own_partners(terms: gf.Epistemic) -> gf.Epistemic:
    """What `epistemic` returns without partners, from what it returns with them."""
    return chain_rule(torch.stack((terms.joint, terms.text_given_image, terms.image_given_text)).unsqueeze(1))


def unseen_auroc(known: Scores, unseen: Scores, groups: NDArray[Any] | None = None) -> list[dict[str, Any]]:
    """AUROC of the unseen by score, and the lead over the best reference with its interval."""
    scores = {name: torch.cat((known[name], unseen[name])) for name in known}
    count, every = (len(next(iter(some.values()))) for some in (known, scores))
    is_known = torch.arange(every) < count
    values = {name: auroc(score, is_known) for name, score in scores.items()}
    best = max((name for name in values if not name.startswith(OURS)), key=values.__getitem__)
    leads = auroc_leads(scores, is_known, resamples=RESAMPLES, groups=groups)
    rows = []
    for name, value in values.items():
        lead = leads[name].get(best)
        span = f"{lead.low:+.3f} to {lead.high:+.3f}" if lead is not None else "best reference"
        rows.append({"score": name, "AUROC": f"{value:.3f}", "lead over the best reference": span})
    return rows


# The concept world


def concept_world() -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Far and near strangers by the true density, by the flow with each kind of partner, and by neighbours; and how
    close the mutual information of known pairs is to the truth."""
    world, flow = ConceptWorld(), trained_flow(24)
    training = gf.EmbeddingPairs.from_arrays(*world.sample(60_000, generator=gen())[:2])
    generator = gen(600)
    kinds = {"known": None, "near": world.near, "far": world.far}
    pairs = {
        kind: world.sample(STRANGERS, generator=generator, concepts=concepts)[:2] for kind, concepts in kinds.items()
    }
    scores: dict[str, dict[str, Scores]] = {}
    pmi: dict[str, Scores] = {}
    for kind, (image, text) in pairs.items():
        near = with_neighbours(flow, image, text, training)
        own = own_partners(near)
        assert near.image_distances is not None
        assert near.text_distances is not None
        values = {
            "truth": (-world.log_image(image), -world.log_text(text)),
            "flow, partner: the pair's own": (-own.image, -own.text),
            "flow, partner: of the nearest training row": (-near.image, -near.text),
            NEIGHBOURHOOD: (near.image_distances[:, -1], near.text_distances[:, -1]),
        }
        scores[kind] = {name: {"image": i, "text": t, "sum": i + t} for name, (i, t) in values.items()}
        pmi[kind] = {"truth": world.pmi(image, text), "own": own.pmi, "nearest": near.pmi}
    rows: list[dict[str, Any]] = [{"score": name} for name in scores["known"]]
    for kind in ("near", "far"):
        for side in ("image", "text", "sum"):
            both = {n: torch.cat([scores[k][n][side] for k in ("known", kind)]) for n in scores["known"]}
            is_known = torch.arange(2 * STRANGERS) < STRANGERS
            leads = auroc_leads(both, is_known, resamples=RESAMPLES)
            for row in rows:
                row[f"{kind}, {side}"] = auroc(both[row["score"]], is_known)
                if side == "sum":
                    lead = leads[row["score"]].get(NEIGHBOURHOOD)
                    row[f"{kind}, lead over kNN"] = f"{lead.low:+.3f} to {lead.high:+.3f}" if lead else ""
    truth, own_row, near_row, neighbours = rows
    gate("the truth finds far strangers", truth["far, sum"] > 0.99)
    gate("nearest partners mend the score", near_row["far, sum"] > own_row["far, sum"] + 0.03)
    gate("the mended score is about as good as neighbours", near_row["far, sum"] > neighbours["far, sum"] - 0.02)
    known = pmi["known"]
    return rows, {f"PMI, {n} partner: correlation with the truth": pearson(known[n], known["truth"]) for n in PARTNERS}


# ImageNet


@dataclass(frozen=True)
class ImageNet:
    """CLIP ViT-B/32: images, their classes, and a prompt for each class."""

    image: Tensor
    label: Tensor
    prompts: Tensor

    @classmethod
    def load(cls) -> ImageNet:
        with np.load(IMAGENET, allow_pickle=False) as file:
            image, prompts = (
                normalize(torch.from_numpy(file[name].astype(np.float32))) for name in ("image_emb", "class_text_emb")
            )
            return cls(image, torch.from_numpy(file["label"].astype(np.int64)), prompts)

    def pairs(self, rows: Tensor) -> gf.EmbeddingPairs:
        """Images, each with the prompt of its class."""
        return gf.EmbeddingPairs.from_arrays(self.image[rows], self.prompts[self.label[rows]])


class Scorer:
    """Everything that is learned from the images `train`, with the prompts of the `classes` that are known."""

    def __init__(self, data: ImageNet, train: Tensor, classes: Tensor) -> None:
        order = train[torch.randperm(len(train), generator=gen(1))]
        held_out, train = order.tensor_split([int(VALIDATION * len(order))])
        self.classes, self.prompts = classes, data.prompts[classes]
        self.training, val = data.pairs(train), data.pairs(held_out)
        self.flow = fitted(self.training, val)
        number = torch.searchsorted(classes, data.label[held_out])
        self.scale = tuned_scale(data.image[held_out], number, self.prompts)
        self.rows, label = data.image[train], torch.searchsorted(classes, data.label[train])
        # Mahalanobis distance to the nearest class mean, with one covariance for all classes.
        means = torch.zeros_like(self.prompts).index_add(0, label, self.rows)
        count = torch.bincount(label, minlength=len(classes)).clamp(min=1).unsqueeze(1)
        means = means / count
        within = torch.from_numpy(ledoit_wolf((self.rows - means[label]).double().numpy())[0])
        self.whiten = torch.linalg.cholesky(torch.linalg.inv(within))
        self.means = (means.double() @ self.whiten)[count.squeeze(1) > 0]
        # REPVLM in the flow's coordinates, with as many steps.
        points = [self.flow.stream_to_flow(x, k) for k, x in enumerate(self.training[range(len(train))])]
        held = [self.flow.stream_to_flow(x, k) for k, x in enumerate(val[range(len(held_out))])]
        self.repvlm = REPVLM(COMPONENTS, COMPONENTS, size="tiny")
        config = dataclasses.replace(self.repvlm.default_config(), steps=STEPS)
        self.repvlm.fit(gf.EmbeddingPairs.from_arrays(*points), gf.EmbeddingPairs.from_arrays(*held), config)

    def predict(self, image: Tensor) -> Tensor:
        """The class of the nearest prompt."""
        return self.classes[(image @ self.prompts.T).argmax(1)]

    def __call__(self, image: Tensor) -> Scores:
        """Higher is stranger or less certain; the text of an image is the prompt of its predicted class."""
        cosine = image @ self.prompts.T
        text = self.prompts[cosine.argmax(1)]
        near = gf.epistemic(self.flow, image, text, generator=gen(), text_partners=self.training)
        own = own_partners(near)
        assert near.image_distances is not None
        logits = self.scale * cosine.double()
        points = [self.flow.stream_to_flow(x, k) for k, x in enumerate((image, text))]
        distance = torch.cdist(image.double() @ self.whiten, self.means).min(1).values
        return {
            "flow: -log p(image)": -own.image,
            "flow: -log p(text)": -own.text,
            "flow: -log p(image) - log p(text), the paper's": own.score,
            "flow: -PMI": -own.pmi,
            "flow: -log p(image, text)": -own.joint,
            "flow: -log p(text, given the image)": -own.text_given_image,
            "flow: -log p(image), nearest partner": -near.image,
            "max softmax": 1 - logits.softmax(1).max(1).values,
            "energy": -logits.logsumexp(1),
            "kNN distance, k = 1": near.image_distances[:, 0],
            "kNN distance, k = 10": near.image_distances[:, -1],
            "Mahalanobis": distance,
            "REPVLM": self.repvlm.pair_score(points[0], points[1]),
        }


def zero_shot(data: ImageNet) -> list[dict[str, Any]]:
    """Selective accuracy; the scores of a fold count by their rank among those of the fold."""
    fold = torch.randperm(len(data.image), generator=gen(2)) % FOLDS
    parts: list[Scores] = []
    right: list[Tensor] = []
    label: list[Tensor] = []
    for number in range(FOLDS):
        scorer = Scorer(data, (fold != number).nonzero().squeeze(1), torch.arange(len(data.prompts)))
        image, truth = data.image[fold == number], data.label[fold == number]
        parts.append({n: torch.from_numpy(ranks(s)) / len(image) for n, s in scorer(image).items()})
        right.append(scorer.predict(image) == truth)
        label.append(truth)
        print(f"fold {number} done", flush=True)
    scores = {name: torch.cat([part[name] for part in parts]).numpy() for name in parts[0]}
    correct, groups = torch.cat(right).numpy(), torch.cat(label).numpy()
    curves = {name: selective_accuracy(score, correct) for name, score in scores.items()}
    best = max((name for name in curves if not name.startswith(OURS)), key=lambda name: curves[name].ausac)

    def lead(ours: Any, theirs: Any, answers: Any) -> float:
        return selective_accuracy(ours, answers).ausac - selective_accuracy(theirs, answers).ausac

    rows = []
    for name, curve in curves.items():
        span = "best reference"
        if name != best:
            interval = bootstrap_interval(lead, scores[name], scores[best], correct, resamples=RESAMPLES, groups=groups)
            span = f"{interval.low:+.3f} to {interval.high:+.3f}"
        kept = {f"{c:.0%}": f"{a:.3f}" for c, a in zip(curve.coverage, curve.accuracy)}
        rows.append({"score": name, **kept, "AUSAC": f"{curve.ausac:.3f}", "lead over the best reference": span})
    densities = [curve.ausac for name, curve in curves.items() if name.startswith(OURS)]
    gate("the softmax finds errors better than densities", max(densities) < curves["max softmax"].ausac)
    return rows


def strangers(data: ImageNet) -> dict[str, list[dict[str, Any]]]:
    """Unseen images of known classes against images of classes left out, and against what is no photograph: draws from
    a Gaussian with the images' mean and covariance, images with shuffled coordinates, random directions, and prompts in
    place of images."""
    generator = gen(3)
    order = torch.randperm(len(data.prompts), generator=generator)
    classes = order[STRANGE_CLASSES:].sort().values
    strange = torch.isin(data.label, order[:STRANGE_CLASSES])
    known = (~strange).nonzero().squeeze(1)
    test, train = known[torch.randperm(len(known), generator=generator)].tensor_split([int(strange.sum())])
    scorer = Scorer(data, train, classes)
    image, rows, dim = data.image[test], scorer.rows, data.image.shape[1]
    spread = torch.linalg.cholesky(torch.cov(rows.T) + 1e-6 * torch.eye(dim))
    kinds = {
        "classes": data.image[strange],
        "gaussian": rows.mean(0) + torch.randn(FAR, dim, generator=generator) @ spread.T,
        "shuffled": image[:FAR, torch.randperm(dim, generator=generator)],
        "random": torch.randn(FAR, dim, generator=generator),
        "prompts": scorer.prompts[:FAR],
    }
    scores = scorer(image)
    tables = {}
    for kind, unseen in kinds.items():
        groups = None
        if kind == "classes":
            groups = torch.cat((data.label[test], data.label[strange])).numpy()
        tables[kind] = unseen_auroc(scores, scorer(normalize(unseen)), groups)
        value = next(row["AUROC"] for row in tables[kind] if row["score"] == "flow: -log p(image)")
        gate(f"the density finds strangers of another kind: {kind}", kind == "classes" or float(value) > 0.98)
        print(f"strangers: {kind} done", flush=True)
    return tables


# Flickr8k


def wrong_captions() -> dict[str, list[dict[str, Any]]]:
    """A tenth of the development captions gets another image, at random or the one most like its own; a high score says
    that the two do not belong together."""
    train, dev = shared_pairs("flickr8k/train"), shared_pairs("flickr8k/dev")
    pairs, val = train.split(VALIDATION, seed=0)
    flow, head = fitted(pairs, val), gf.PosteriorHead.fit(train, seed=0)
    bank = pairs[range(0, len(pairs), 5)]
    tuning = swapped(val)
    grid = [(scale, weight) for scale in (5.0, 10.0, 20.0, 40.0) for weight in (0.0, 0.5, 0.75, 1.0)]

    def tuned(setting: tuple[float, float]) -> float:
        kept, wrong = (hub_corrected(*tuning[kind][:2], bank, *setting) for kind in ("kept", "random"))
        return auroc(-torch.cat((kept, wrong)), torch.arange(len(kept) + len(wrong)) < len(kept))

    setting = max(grid, key=tuned)

    def scores(image: Tensor, text: Tensor) -> Scores:
        near = with_neighbours(flow, image, text, pairs)
        own = own_partners(near)
        return {
            "flow: -PMI": -own.pmi,
            "flow: -PMI, nearest partner": -near.pmi,
            "flow: -log p(text, given the image)": -own.text_given_image,
            "flow: -log p(image) - log p(text)": own.score,
            "head: -PMI": -head_pmi(head, image, text, bank),
            "-cosine": -(image * text).sum(1),
            "-cosine, hub-corrected": -hub_corrected(image, text, bank, *setting),
        }

    parts = swapped(dev)
    every = {kind: scores(image, text) for kind, (image, text, _) in parts.items()}
    tables = {}
    for kind in ("random", "similar"):
        groups = np.concatenate((parts["kept"][2], parts[kind][2]))
        tables[kind] = unseen_auroc(every["kept"], every[kind], groups)
        values = {row["score"]: float(row["AUROC"]) for row in tables[kind]}
        gate(f"a head finds wrong captions better than cosines: {kind}", values["head: -PMI"] > values["-cosine"])
    return tables


def swapped(pairs: gf.EmbeddingPairs) -> dict[str, tuple[Tensor, Tensor, NDArray[Any]]]:
    """Nine tenths of the pairs as they are; the others with another image at random, or the most similar one. The third
    entry is the caption's own image."""
    image, text = pairs[range(len(pairs))]
    order = torch.randperm(len(pairs), generator=gen(4))
    wrong, kept = order.tensor_split([len(pairs) // 10])
    group = torch.from_numpy(pairs.group)
    others = torch.where(group[wrong, None] == group, -torch.inf, image[wrong] @ image.T)
    chance = torch.rand(others.shape, generator=gen(5)).where(others.isfinite(), -torch.inf)
    own = group[wrong].numpy()
    return {
        "kept": (image[kept], text[kept], group[kept].numpy()),
        "random": (image[chance.argmax(1)], text[wrong], own),
        "similar": (image[others.argmax(1)], text[wrong], own),
    }


def hub_corrected(image: Tensor, text: Tensor, bank: tuple[Tensor, Tensor], scale: float, weight: float) -> Tensor:
    """scale cosine, less a share of its log-mean-exp over the bank's texts for the image and images for the text."""
    hubs = (scale * image @ bank[1].T).logsumexp(1) + (scale * text @ bank[0].T).logsumexp(1)
    return scale * (image * text).sum(1) - weight / 2 * hubs


def head_pmi(head: gf.PosteriorHead, image: Tensor, text: Tensor, bank: tuple[Tensor, Tensor]) -> Tensor:
    """log p(item | query) - log p(item) in nats, the mean of both directions: the score of a head, less its
    log-mean-exp over a bank of items, since it leaves a constant of each query open."""
    both = []
    for direction in CONDITIONAL:
        source = HeadSource(head, Direction.of(direction))
        queries, items = direction.queries(image, text), direction.items(image, text)
        others = direction.items(*bank)
        points = head.points(queries, direction)
        score = source.scores(points, items.unsqueeze(1)).squeeze(1) + source.learned_about(items)
        every = source.all_scores(queries, others).double() + source.learned_about(others)
        both.append(score - every.logsumexp(1))
    return torch.stack(both).mean(0)


def run() -> str:
    """The study."""
    rows, agreement = concept_world()
    parts = [report("epistemic_concept_world", rows, agreement), *(f"{n}: {v:.3f}" for n, v in agreement.items())]
    if FLICKR.is_dir():
        notes = {"data": "Flickr8k in a small dual encoder (not CLIP)"}
        for kind, rows in wrong_captions().items():
            parts.append(f"Swapped captions: {kind}\n\n{report(f'epistemic_captions_{kind}', rows, notes)}")
    else:
        parts.append(f"Flickr8k is left out: {FLICKR} is not there.")
    if not IMAGENET.is_file():
        return "\n\n".join((*parts, f"ImageNet is left out: {IMAGENET} is not there."))
    data = ImageNet.load()
    notes = {"data": "CLIP ViT-B/32 on a sample of ImageNet training images"}
    for kind, rows in strangers(data).items():
        parts.append(f"Strangers: {kind}\n\n{report(f'epistemic_strangers_{kind}', rows, notes)}")
    parts.append(report("epistemic_zero_shot", zero_shot(data), {**notes, "folds": FOLDS}))
    return "\n\n".join(parts)
