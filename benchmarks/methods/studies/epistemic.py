"""The epistemic score and what needs no flow: errors of zero-shot classification, strangers, wrong captions.

The study has four parts. The concept world, whose true density is known,
shows what a density could find and why a learned one finds less. ImageNet in CLIP ViT-B/32, if the shared embeddings
are next to the repository: selective accuracy by the paper's protocol, every image scored by a flow that was trained on
others, and strangers, which are the images of 200 classes left out of training and inputs that are no photographs.
Flickr8k in a small dual encoder: captions of which a tenth has been swapped. Differences are paired, with 95 %
intervals over resampled classes or images. The tables and the recommendation of docs/likelihood.md are written from
the results, and the gates are its claims.
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
from benchmarks.methods.baselines.repvlm import REPVLM
from benchmarks.methods.results import DOCS, SHARED, gate, report, shared_pairs, write_blocks
from benchmarks.methods.studies.entropy import trained_flow
from benchmarks.methods.zero_shot import tuned_scale
from geoflow_fast.directions import CONDITIONAL, Direction
from geoflow_fast.evaluation.metrics import auroc, auroc_leads, selective_accuracy
from geoflow_fast.evaluation.statistics import bootstrap_interval, pearson, ranks
from geoflow_fast.likelihood.density import chain_rule
from geoflow_fast.retrieval.sources import HeadSource
from geoflow_fast.worlds import ConceptWorld

PAGE = DOCS / "likelihood.md"
FLICKR, IMAGENET = SHARED / "flickr8k", SHARED / "imagenet" / "vitb32.npz"
FOLDS, STRANGE_CLASSES, VALIDATION, RESAMPLES = 2, 200, 0.1, 500
COMPONENTS, STEPS, FAR = 64, 800, 400
SEEDS = (0, 1)
"""Draws of strangers of the concept world, and of captions that are swapped; both are judged together."""
STRANGERS, NEIGHBOURHOOD, PARTNERS = 500, "kNN distance, k = 10", ("own", "nearest")
FLOW = {"hidden": 128, "depth": 3, "layer_scale": 0.1, "dropout": 0.2, "centre": True, "pca_dim": COMPONENTS}
OURS = ("flow", "head")
"""How the names of scores begin that are no references."""
OWN, NEAREST, ALONE = (
    f"flow, {words}" for words in ("with the pair's own partner", "partner: the nearest row's", "one side alone")
)
IMAGE, TEXT, PAPERS = "flow: -log p(image)", "flow: -log p(text)", "flow: -log p(image) - log p(text), the paper's"
HUBS, SOFTMAX = "-cosine, hub-corrected", "max softmax"
KINDS = {
    "classes": "classes left out",
    "gaussian": "Gaussian",
    "shuffled": "shuffled",
    "random": "random",
    "prompts": "prompts",
}
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


def in_coordinates(flow: gf.GeoFlow, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """A pair in the flow's coordinates."""
    return flow.stream_to_flow(pair[0], 0), flow.stream_to_flow(pair[1], 1)


def fitted_repvlm(flow: gf.GeoFlow, pairs: gf.EmbeddingPairs, val: gf.EmbeddingPairs) -> REPVLM:
    """REPVLM in the flow's coordinates, with as many steps."""
    repvlm = REPVLM(COMPONENTS, COMPONENTS, size="tiny")
    config = dataclasses.replace(repvlm.default_config(), steps=STEPS)
    train, held = (gf.EmbeddingPairs.from_arrays(*in_coordinates(flow, x[range(len(x))])) for x in (pairs, val))
    repvlm.fit(train, held, config)
    return repvlm


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
    kinds = {"known": None, "near": world.near, "far": world.far}
    scores: dict[str, dict[str, Scores]] = {}
    pmi: dict[str, Scores] = {}
    for kind, concepts in kinds.items():
        draws = [world.sample(STRANGERS, generator=gen(600 + seed), concepts=concepts)[:2] for seed in SEEDS]
        image, text = (torch.cat(side) for side in zip(*draws))
        near = with_neighbours(flow, image, text, training)
        own = own_partners(near)
        alone = (
            gf.epistemic(flow, image=image, generator=gen()).score,
            gf.epistemic(flow, text=text, generator=gen()).score,
        )
        assert near.image_distances is not None
        assert near.text_distances is not None
        values = {
            "truth: -log p": (-world.log_image(image), -world.log_text(text)),
            OWN: (-own.image, -own.text),
            NEAREST: (-near.image, -near.text),
            ALONE: alone,
            NEIGHBOURHOOD: (near.image_distances[:, -1], near.text_distances[:, -1]),
        }
        scores[kind] = {name: {"image": i, "text": t, "sum": i + t} for name, (i, t) in values.items()}
        pmi[kind] = {"truth": world.pmi(image, text), "own": own.pmi, "nearest": near.pmi}
    rows: list[dict[str, Any]] = [{"score": name} for name in scores["known"]]
    for kind in ("near", "far"):
        for side in ("image", "text", "sum"):
            both = {n: torch.cat([scores[k][n][side] for k in ("known", kind)]) for n in scores["known"]}
            every = len(next(iter(both.values())))
            is_known = torch.arange(every) < every // 2
            leads = auroc_leads(both, is_known, resamples=RESAMPLES)
            for row in rows:
                row[f"{kind}, {side}"] = f"{auroc(both[row['score']], is_known):.3f}"
                if side == "sum":
                    lead = leads[row["score"]].get(NEIGHBOURHOOD)
                    row[f"{kind}: lead over kNN"] = f"{lead.low:+.3f} to {lead.high:+.3f}" if lead else ""
    far = {row["score"]: float(row["far, sum"]) for row in rows}
    gate("the truth finds far strangers", far["truth: -log p"] > 0.99)
    for name in (NEAREST, ALONE):
        gate(f"{name} mends the score", far[name] > far[OWN] + 0.03)
    gate("the mended score is about as good as neighbours", far[NEAREST] > far[NEIGHBOURHOOD] - 0.02)
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
        self.repvlm = fitted_repvlm(self.flow, self.training, val)

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
        distance = torch.cdist(image.double() @ self.whiten, self.means).min(1).values
        return {
            IMAGE: -own.image,
            TEXT: -own.text,
            PAPERS: own.score,
            "flow: -PMI": -own.pmi,
            "flow: -log p(image, text)": -own.joint,
            "flow: -log p(text, given the image)": -own.text_given_image,
            "flow: -log p(image, given the text)": -own.image_given_text,
            "flow: -log p(image), nearest partner": -near.image,
            SOFTMAX: 1 - logits.softmax(1).max(1).values,
            "energy": -logits.logsumexp(1),
            "kNN distance, k = 1": near.image_distances[:, 0],
            "kNN distance, k = 10": near.image_distances[:, -1],
            "Mahalanobis": distance,
            "REPVLM": self.repvlm.pair_score(*in_coordinates(self.flow, (image, text))),
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
    gate("the softmax finds errors better than densities", max(densities) < curves[SOFTMAX].ausac)
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
        value = next(row["AUROC"] for row in tables[kind] if row["score"] == IMAGE)
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
    repvlm = fitted_repvlm(flow, pairs, val)
    print("captions: trained", flush=True)
    bank = pairs[range(0, len(pairs), 5)]
    setting = tuned_hubs(val, bank)
    rows = torch.cat(pairs[range(len(pairs))], 1)
    mean, within = rows.double().mean(0), torch.from_numpy(ledoit_wolf(rows.double().numpy())[0])
    whiten = torch.linalg.cholesky(torch.linalg.inv(within))

    def scores(image: Tensor, text: Tensor) -> Scores:
        terms, both = gf.epistemic(flow, image, text, generator=gen()), torch.cat((image, text), 1)
        return {
            "flow: -PMI": -terms.pmi,
            "flow: -log p(text, given the image)": -terms.text_given_image,
            "flow: -log p(image, text)": -terms.joint,
            PAPERS: terms.score,
            "head: -PMI": -head_pmi(head, image, text, bank),
            "-cosine": -(image * text).sum(1),
            HUBS: -hub_corrected(image, text, bank, *setting),
            "softmax over other captions and images": -hub_corrected(image, text, bank, setting[0], 1.0),
            "kNN distance of the pair, k = 10": -(both @ rows.T).topk(10, 1).values[:, -1] / 2,
            "Mahalanobis distance of the pair": ((both.double() - mean) @ whiten).norm(dim=1),
            "REPVLM": repvlm.pair_score(*in_coordinates(flow, (image, text))),
        }

    right, own = scores(*dev[range(len(dev))]), dev.group
    draws = [swapped(dev, seed) for seed in SEEDS]
    kept = torch.cat([draw["kept"][0] for draw in draws])
    tables = {}
    for kind in ("random", "similar"):
        wrong, image = (torch.cat([draw[kind][k] for draw in draws]) for k in range(2))
        image_rows, text_rows = dev.image[dev.image_row[image.numpy()]], dev.text[dev.text_row[wrong.numpy()]]
        unseen = scores(torch.from_numpy(image_rows), torch.from_numpy(text_rows))
        groups = np.concatenate((own[kept.numpy()], own[wrong.numpy()]))
        tables[kind] = unseen_auroc({name: score[kept] for name, score in right.items()}, unseen, groups)
        values = {row["score"]: float(row["AUROC"]) for row in tables[kind]}
        gate(f"a head finds wrong captions better than cosines: {kind}", values["head: -PMI"] > values["-cosine"])
        print(f"captions: {kind} done", flush=True)
    return tables


def tuned_hubs(val: gf.EmbeddingPairs, bank: tuple[Tensor, Tensor]) -> tuple[float, float]:
    """Scale and weight of the hub correction that find swapped captions of held-out pairs best."""
    draw, (image, text) = swapped(val, 0), val[range(len(val))]

    def separation(setting: tuple[float, float]) -> float:
        (kept, _), (wrong, other) = draw["kept"], draw["random"]
        scores = [hub_corrected(image[i], text[t], bank, *setting) for i, t in ((kept, kept), (other, wrong))]
        return auroc(-torch.cat(scores), torch.arange(len(kept) + len(wrong)) < len(kept))

    return max(((b, w) for b in (5.0, 10.0, 20.0, 40.0) for w in (0.0, 0.5, 0.75, 1.0)), key=separation)


def swapped(pairs: gf.EmbeddingPairs, seed: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Nine tenths of the pairs as they are; the others with another image at random, or the most similar one: numbers
    of the pairs whose caption it is, and of those whose image it gets."""
    image = pairs[range(len(pairs))][0]
    wrong, kept = torch.randperm(len(pairs), generator=gen(4 + 10 * seed)).tensor_split([len(pairs) // 10])
    group = torch.from_numpy(pairs.group)
    others = torch.where(group[wrong, None] == group, -torch.inf, image[wrong] @ image.T)
    chance = torch.rand(others.shape, generator=gen(5 + 10 * seed)).where(others.isfinite(), -torch.inf)
    return {"kept": (kept, kept), "random": (wrong, chance.argmax(1)), "similar": (wrong, others.argmax(1))}


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


# The page


def side_by_side(tables: dict[str, list[dict[str, Any]]], titles: dict[str, str]) -> list[dict[str, Any]]:
    """One table of several with the same scores: AUROC, and the lead over the best reference in brackets."""
    rows = [{"score": row["score"]} for row in next(iter(tables.values()))]
    for kind, title in titles.items():
        for row, other in zip(rows, tables[kind]):
            row[title] = f"{other['AUROC']} ({other['lead over the best reference']})"
    return rows


RECOMMENDED = (
    # question, table, column, what to use, the score that it stands for
    (
        "is this answer wrong?",
        "zero_shot",
        "AUSAC",
        "the largest softmax probability, or a [calibrated](rerank.md) one",
        SOFTMAX,
    ),
    (
        "is it a new class among many similar ones?",
        "strangers",
        KINDS["classes"],
        "the largest softmax probability over the known classes",
        SOFTMAX,
    ),
    (
        "has it the right mean and covariance, but the wrong shape?",
        "strangers",
        KINDS["gaussian"],
        "-log p(image), `ep.image`",
        IMAGE,
    ),
    (
        "is it noise, or the output of a broken encoder?",
        "strangers",
        KINDS["shuffled"],
        "the distance to training rows if they are at hand (`ep.image_distances`), else -log p(image)",
        NEIGHBOURHOOD,
    ),
    ("is it of another modality?", "strangers", KINDS["prompts"], "the same", NEIGHBOURHOOD),
    (
        "the same, if both sides of a pair may be strange",
        "concept_world",
        "far, sum",
        "the same distances, else each side alone or with `text_partners=train_pairs`",
        NEIGHBOURHOOD,
    ),
    (
        "does this caption belong to this image?",
        "captions",
        "at random",
        "the score of a [head](head.md), or hub-corrected cosines",
        "head: -PMI",
    ),
    ("the same, for a very similar image", "captions", "most similar", "the same", "head: -PMI"),
)


def recommendation(tables: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """What to use for which question, with the numbers that say so. A gate fails if something else is better by more
    than .01."""
    rows = []
    for question, table, column, use, score in RECOMMENDED:
        values = {
            row["score"]: float(str(row[column]).split()[0]) for row in tables[table] if "truth" not in row["score"]
        }
        best = max(values.values())
        gate(f"{question} {score} is as good as any", values[score] > best - 0.01)
        flow = max((name for name in values if name.startswith("flow")), key=values.__getitem__)
        measured = f"{values[score]:.3f}; best of the flow {values[flow]:.3f} ({flow.partition(': ')[2] or flow})"
        papers = values.get(PAPERS, values.get(OWN))
        rows.append({"question": question, "use": use, "measured": measured, "the paper's score": f"{papers:.3f}"})
    return rows


def run() -> str:
    """The study. Without the shared embeddings it has the concept world only."""
    rows, agreement = concept_world()
    tables = {"concept_world": rows}
    parts = [report("epistemic_concept_world", rows, agreement), *(f"{n}: {v:.3f}" for n, v in agreement.items())]
    print("concept world done", flush=True)

    def keep(name: str, rows: list[dict[str, Any]], data: str) -> None:
        tables[name] = rows
        parts.append(f"{name}\n\n{report(f'epistemic_{name}', rows, {'data': data})}")

    if FLICKR.is_dir() and IMAGENET.is_file():
        captions = side_by_side(wrong_captions(), {"random": "at random", "similar": "most similar"})
        keep("captions", captions, "Flickr8k in a small dual encoder (not CLIP)")
        data, words = ImageNet.load(), "CLIP ViT-B/32 on a sample of ImageNet training images"
        keep("strangers", side_by_side(strangers(data), KINDS), words)
        keep("zero_shot", zero_shot(data), words)
        keep("recommendation", recommendation(tables), "all of these")
    else:
        parts.append(f"Flickr8k and ImageNet are left out: {FLICKR} or {IMAGENET} is not there.")
    write_blocks(PAGE)
    return "\n\n".join(parts)
