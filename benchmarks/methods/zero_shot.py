"""Zero-shot classification with class prompts, and how well each term of the flow's decomposition finds its errors.

An image is paired with the prompt of the class that is predicted for it. With class prompts as texts, p(text) is the
density of a handful of points: it ranks classes, not images. So -log p(image) is reported beside the sum, and the
training-free scores are always reported with both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from geoflow_fast.data.pairs import EmbeddingPairs
from geoflow_fast.directions import DIRECTIONS, Direction
from geoflow_fast.evaluation.metrics import BINS, retrieval_calibration, selective_accuracy
from geoflow_fast.evaluation.retrieval import plain_search
from geoflow_fast.evaluation.statistics import RESAMPLES, check_resamples
from geoflow_fast.evaluation.untrained import KNOWN_ROWS, UNTRAINED, knn_distance
from geoflow_fast.flow.model import GeoFlow
from geoflow_fast.geometry import check_rows
from geoflow_fast.likelihood.density import chain_rule
from geoflow_fast.likelihood.reverse_ode import density_estimates
from geoflow_fast.likelihood.settings import DensitySettings
from geoflow_fast.retrieval.bandwidth import fit_cosine_scale
from geoflow_fast.retrieval.gallery import Gallery
from geoflow_fast.retrieval.task import RetrievalTask, typical_queries
from geoflow_fast.runtime import checks
from geoflow_fast.runtime.progress import progress_bar
from geoflow_fast.runtime.summary import Summarised

BLOCK_IMAGES = 256
CLIP_SCALE = 100.0
"""Inverse temperature at which the training of CLIP ended."""
TERMS = {
    "image": "-log p(image)",
    "text": "-log p(text)",
    "pmi": "-PMI(image, text)",
    "sum": "-log p(image) - log p(text)",
}
TRAINING_FREE = {name: kind.title for name, kind in UNTRAINED.items()}


def class_prompts(embeddings: Tensor | Sequence[Tensor]) -> Tensor:
    """One unit prompt per class, [C, d]: the mean of the class's prompts, scaled to unit norm.

    `embeddings` are unit vectors [C, P, d] of every class in every template, or a list with a tensor [P, d] per class,
    each with its own number of templates.
    """
    rows = []
    for number, prompts in enumerate(embeddings):
        if prompts.dim() != 2 or not len(prompts):
            raise ValueError(f"prompts of class {number} must be [P, d], got {tuple(prompts.shape)}")
        check_rows(prompts, f"prompts of class {number}")
        mean = prompts.double().mean(0)
        if float(mean.norm()) < 1e-6:
            raise ValueError(f"prompts of class {number} cancel each other: their mean has no direction")
        rows.append((mean / mean.norm()).to(prompts.dtype))
    if not rows:
        raise ValueError("there are no classes")
    return torch.stack(rows)


def encode_prompts(encode: Callable[[list[str]], Tensor], classes: Sequence[str], templates: Sequence[str]) -> Tensor:
    """One unit prompt per class, [C, d], from the names of `classes` put into `templates` such as "a photo of a {}.".

    `encode` turns a list of n texts into embeddings [n, d].
    """
    for template in templates:
        if template.count("{}") != 1:
            raise ValueError(f"a template needs one {{}} for the name of the class, got {template!r}")
    embeddings = (encode([template.format(name) for template in templates]) for name in classes)
    return class_prompts([rows / rows.norm(dim=1, keepdim=True) for rows in embeddings])


@dataclass(frozen=True, repr=False)
class Component(Summarised):
    """A score of single images, and how well it finds wrong predictions."""

    name: str
    title: str
    learned: bool
    """True if the score comes from the flow, false if it needs no training."""
    numbers: dict[str, float]
    """The keys are ausac, auroc and aurc."""
    coverage: list[float]
    accuracy: list[float]
    intervals: dict[str, list[float]] = field(default_factory=dict)

    def row(self) -> dict[str, object]:
        """The row of a table."""
        row: dict[str, object] = {"score": self.title, "AUSAC": self.numbers["ausac"]}
        for name in ("auroc", "aurc"):
            row[name.upper()] = self.numbers[name]
            if name in self.intervals:
                row[f"{name.upper()}, 95 %"] = "{:.3f} to {:.3f}".format(*self.intervals[name])
        return row


@dataclass(frozen=True, repr=False)
class ZeroShot(Summarised):
    """Predictions for B images, and the scores that say which of them to doubt."""

    prediction: Tensor
    """[B] int64, the class whose prompt is nearest; of classes that tie, the first."""
    correct: Tensor
    """[B] bool."""
    first_right: Tensor
    """[B] float64, 1 divided by the number of classes that tie for the first place if the true one is among them,
    otherwise 0: the probability of a right prediction if ties are broken at random."""
    scores: dict[str, Tensor]
    """[B] float64 by the name of the score; higher is less certain."""
    components: list[Component]
    scale: float
    """Inverse temperature of the softmax over classes."""

    @property
    def accuracy(self) -> float:
        """Share of right predictions; ties count as in `first_right`."""
        return float(self.first_right.mean())


def zero_shot(
    flow: GeoFlow | None,
    image: Tensor,
    label: Tensor,
    prompts: Tensor,
    *,
    scale: float = CLIP_SCALE,
    train: EmbeddingPairs | None = None,
    settings: DensitySettings | None = None,
    seed: int = 0,
    bins: int = BINS,
    resamples: int = RESAMPLES,
    progress: bool | None = None,
) -> ZeroShot:
    """Classifies the unit vectors `image` [B, d] by the nearest of the `prompts` [C, d], and scores each by the terms
    of the flow's decomposition, if there is a flow, and by training-free scores.

    `label` [B] has the true classes. `scale` is the inverse temperature of the softmax, see `tuned_scale`. With `train`
    pairs the distance to the nearest training images is one of the scores. `settings` are those of the log-densities,
    and `seed` is that of their probes.
    """
    label = _checked_labels(image, label, prompts)
    check_resamples(resamples)
    images, classes = np.arange(len(image)), np.arange(len(prompts))
    task = RetrievalTask(Direction.I2T, image, prompts, label, torch.from_numpy(classes), images, classes)
    answers = plain_search(task, 2, device=image.device)
    prediction = answers.index[:, 0]
    text = prompts[prediction.to(prompts.device)]
    scores = {} if flow is None else _terms(flow, image, text, settings, seed, progress)
    scores |= _training_free(image, Gallery(prompts), answers.cosine, scale, train)
    components = [_component(name, score, answers.first_right, bins, resamples) for name, score in scores.items()]
    return ZeroShot(prediction, answers.correct, answers.first_right, scores, components, scale)


def _component(name: str, score: Tensor, right: Tensor, bins: int, resamples: int) -> Component:
    calibration = retrieval_calibration(score, right, bins, resamples=resamples)
    curve = selective_accuracy(score, right)
    return Component(
        name,
        {**TERMS, **TRAINING_FREE}[name],
        name in TERMS,
        {"ausac": curve.ausac, "auroc": calibration.auroc, "aurc": calibration.aurc},
        curve.coverage.tolist(),
        curve.accuracy.tolist(),
        {key: [x.low, x.high] for key, x in calibration.intervals.items() if key in ("auroc", "aurc")},
    )


def _checked_labels(image: Tensor, label: Tensor, prompts: Tensor) -> Tensor:
    """The labels as integers on the CPU."""
    if image.dim() != 2 or prompts.dim() != 2 or image.shape[1] != prompts.shape[1]:
        raise ValueError(
            f"image [B, d] and prompts [C, d] must have one width, got {tuple(image.shape)} and {tuple(prompts.shape)}"
        )
    check_rows(image, "image")
    check_rows(prompts, "prompts")
    label = torch.as_tensor(checks.array(label, "label"))
    if label.shape != (len(image),) or label.is_floating_point() or label.dtype == torch.bool:
        raise ValueError(f"label must be integers [{len(image)}], got {label.dtype} {tuple(label.shape)}")
    outside = (label < 0) | (label >= len(prompts))
    if bool(outside.any()):
        row = int(outside.nonzero()[0])
        raise ValueError(f"label of row {row} is {int(label[row])}, but there are {len(prompts)} classes")
    return label.long()


def _terms(
    flow: GeoFlow, image: Tensor, text: Tensor, settings: DensitySettings | None, seed: int, progress: bool | None
) -> dict[str, Tensor]:
    """Each term of the decomposition of (image, its prompt) as a score, [B]."""
    like, settings = next(flow.parameters()), settings or DensitySettings()
    parts: list[dict[str, Tensor]] = []
    with progress_bar(len(image), 0, "images", shown=progress) as advance:
        for first in range(0, len(image), BLOCK_IMAGES):
            rows = slice(first, first + BLOCK_IMAGES)
            pair = image[rows].to(like), text[rows].to(like)
            terms = chain_rule(density_estimates(flow, *pair, DIRECTIONS, settings, seed, first_row=first))
            parts.append({"image": -terms.image, "text": -terms.text, "pmi": -terms.pmi, "sum": terms.score})
            advance(len(terms.score))
    return {name: torch.cat([part[name] for part in parts]).cpu() for name in TERMS}


def _training_free(
    image: Tensor, gallery: Gallery, cosine: Tensor, scale: float, train: EmbeddingPairs | None
) -> dict[str, Tensor]:
    """The scores [B] that need no training."""
    posterior = gallery.statistics(image.unsqueeze(1), scale, 1).posterior(torch.float64)
    scores = {
        "max_softmax": 1 - posterior.top_prob[:, 0],
        "margin": cosine[:, -1] - cosine[:, 0],
        "softmax_entropy": posterior.entropy,
    }
    if train is not None:
        scores["knn"] = knn_distance(image.cpu(), typical_queries(train, Direction.I2T, KNOWN_ROWS, 0))
    return {name: score.double().cpu() for name, score in scores.items()}


def tuned_scale(image: Tensor, label: Tensor, prompts: Tensor) -> float:
    """Inverse temperature with the least -log probability of the true classes of held-out images."""
    return fit_cosine_scale(image, prompts, _checked_labels(image, label, prompts))
