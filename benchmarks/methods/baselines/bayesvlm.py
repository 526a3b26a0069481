"""BayesVLM: a Laplace approximation of the last projections, without training (Baumann et al., 2024).

The towers end in linear maps, g = W phi. The posterior of W is a matrix normal with Kronecker factors A (from the
activations) and B (from the contrastive loss), so an embedding is Gaussian with covariance (phi^T A^-1 phi) B^-1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from benchmarks.methods.baselines.base import Baseline, FitTask
from geoflow_fast.data.embeddings import open_rows
from geoflow_fast.data.pairs import EmbeddingPairs
from geoflow_fast.data.rows import Rows
from geoflow_fast.directions import STREAMS, Direction
from geoflow_fast.geometry import check_rows
from geoflow_fast.retrieval.gallery import Gallery, GallerySource
from geoflow_fast.runtime import checks
from geoflow_fast.runtime.tensors import load_tensors

IMAGE_ACTIVATIONS, TEXT_ACTIVATIONS = "img_pre", "text_pre"
PROJECTIONS_FILE, PROJECTIONS_KIND = "projections.safetensors", "projections"
TOWERS = STREAMS
GALLERY_ROWS = 8192
NEEDS_ACTIVATIONS = (
    "bayesvlm needs the activations before the last projections, and the weights of these: `python -m "
    f"benchmarks.methods activations` writes {IMAGE_ACTIVATIONS}/, {TEXT_ACTIVATIONS}/ and {PROJECTIONS_FILE} beside "
    "the embeddings, and BayesVLM.set_activations reads them"
)


@dataclass(frozen=True)
class Activations:
    """Activations of an encoder before its last projections, and the projections. Rows correspond to the embeddings'.

    `image` [N, k_I], `text` [M, k_T]. `projections`: `image.weight` [d, k_I], `text.weight` [d, k_T] and, if the model
    has them, `image.bias` and `text.bias` [d].
    """

    image: Rows
    text: Rows
    projections: Mapping[str, Tensor]

    @classmethod
    def open(cls, folder: str | Path) -> Activations:
        """Opens the activations that `python -m benchmarks.methods activations` wrote to `folder`, memory-mapped."""
        folder = checks.path(folder, "folder")
        for name in (IMAGE_ACTIVATIONS, TEXT_ACTIVATIONS, PROJECTIONS_FILE):
            if not (folder / name).exists():
                raise FileNotFoundError(f"{folder / name} does not exist: {NEEDS_ACTIVATIONS}")
        weights, _ = load_tensors(folder / PROJECTIONS_FILE, kind=PROJECTIONS_KIND)
        image, text = (open_rows(folder / name, name) for name in (IMAGE_ACTIVATIONS, TEXT_ACTIVATIONS))
        return cls(image, text, weights)

    @classmethod
    def from_arrays(cls, image: Tensor, text: Tensor, projections: Mapping[str, Tensor]) -> Activations:
        """Activations from tensors in memory."""
        rows = [Rows([checks.array(x, name)], name) for x, name in ((image, "image"), (text, "text"))]
        for name, weight in projections.items():
            checks.with_values(weight, name)
        return cls(rows[0], rows[1], projections)

    def of(self, tower: str, index: np.ndarray) -> Tensor:
        """Rows `index` of a tower ("image" or "text") as stored, not scaled to unit norm: float32."""
        rows = self._rows(tower)
        out = np.empty((len(index), rows.dim), np.float32)
        for part, start in zip(rows.parts, rows.starts):
            inside = (index >= start) & (index < start + len(part))
            out[inside] = part[index[inside] - start]
        return torch.from_numpy(out)

    def check_rows(self, tower: str, index: np.ndarray) -> None:
        """Raises a ValueError unless a tower has all rows in `index`."""
        rows, last = self._rows(tower), int(index.max(initial=-1))
        if last >= len(rows):
            raise ValueError(f"{len(rows)} rows of {tower} activations are too few for pairs of row {last}")

    def _rows(self, tower: str) -> Rows:
        return self.image if tower == "image" else self.text


class BayesVLM(Baseline):
    """BayesVLM: entropy, in nats, of the softmax over the gallery, with the uncertainty of the cosines taken into
    account (probit approximation).

    The uncertainty is that of a Laplace approximation of the encoder's last projections. Call `set_activations` before
    `fit`; `uncertainty` then takes activations of queries and gallery instead of embeddings. `logit_scale`: that of the
    pretrained model (100 for CLIP). `prior_precision`: of the projections' weights. The curvature is summed over
    batches of `batch_size` pairs, within which the contrastive loss compares each pair with the others.
    """

    method: ClassVar[str] = "bayesvlm"
    title: ClassVar[str] = "BayesVLM"
    TRAINED: ClassVar[bool] = False
    ONE_WIDTH_FOR: ClassVar[str | None] = "a cosine"

    def __init__(
        self,
        image_dim: int,
        text_dim: int,
        image_pre: int = 0,
        text_pre: int = 0,
        logit_scale: float = 100.0,
        prior_precision: float = 1.0,
        batch_size: int = 1024,
    ) -> None:
        constants = {"logit_scale": logit_scale, "prior_precision": prior_precision, "batch_size": batch_size}
        super().__init__(image_dim, text_dim, image_pre=image_pre, text_pre=text_pre, **constants)
        if not (logit_scale > 0 and prior_precision > 0 and batch_size > 1):
            raise ValueError(f"{logit_scale=} and {prior_precision=} must be positive, {batch_size=} more than 1")
        self.logit_scale, self.prior_precision, self.batch_size = logit_scale, prior_precision, batch_size
        self.activations: Activations | None = None
        self._set_widths(image_pre, text_pre, None)

    def _set_widths(self, image_pre: int, text_pre: int, device: torch.device | None) -> None:
        """Makes the buffers of both towers: projection, bias, inverse of A, diagonal of the inverse of B."""
        self.settings |= {"image_pre": image_pre, "text_pre": text_pre}
        for tower, width in zip(TOWERS, (image_pre, text_pre)):
            shapes = {
                "weight": (self.image_dim, width),
                "bias": (self.image_dim,),
                "a_inverse": (width, width),
                "b_inverse": (self.image_dim,),
            }
            for name, shape in shapes.items():
                self.register_buffer(f"{tower}_{name}", torch.zeros(shape, dtype=torch.float64, device=device))

    @classmethod
    def missing(cls) -> str | None:
        """Says that activations and projections are needed: pairs alone are never enough."""
        return NEEDS_ACTIVATIONS

    def set_activations(self, activations: Activations | str | Path) -> BayesVLM:
        """Sets the activations that `fit` uses, or the folder they are in; their rows must correspond to the pairs'."""
        if not isinstance(activations, Activations):
            activations = Activations.open(activations)
        for tower, rows in zip(TOWERS, (activations.image, activations.text)):
            weight = activations.projections.get(f"{tower}.weight")
            if weight is None or tuple(weight.shape) != (self.image_dim, rows.dim):
                shape = "nothing" if weight is None else tuple(weight.shape)
                raise ValueError(f"{tower}.weight must be [{self.image_dim}, {rows.dim}], got {shape}")
        self._set_widths(activations.image.dim, activations.text.dim, self.device)
        for tower in TOWERS:
            getattr(self, f"{tower}_weight").copy_(activations.projections[f"{tower}.weight"])
            if f"{tower}.bias" in activations.projections:
                getattr(self, f"{tower}_bias").copy_(activations.projections[f"{tower}.bias"])
        self.activations = activations
        return self

    def _fit(self, task: FitTask) -> None:
        if self.activations is None:
            raise ValueError(NEEDS_ACTIVATIONS)
        device, pairs = self.device, task.pairs
        for tower, index in zip(TOWERS, (pairs.image_row, pairs.text_row)):
            self.activations.check_rows(tower, index)
        a = {tower: torch.zeros_like(getattr(self, f"{tower}_a_inverse")) for tower in TOWERS}
        b = {tower: torch.zeros(self.image_dim, self.image_dim, dtype=torch.float64, device=device) for tower in TOWERS}
        for image_rows, text_rows, first in self._batches(pairs, task.config.seed):
            used = dict(zip(TOWERS, (image_rows, text_rows)))
            phi = {tower: self.activations.of(tower, used[tower]).to(device).double() for tower in TOWERS}
            for tower, embedding in zip(TOWERS, first or ()):
                self.check_embeddings(tower, phi[tower], embedding)
            out = {tower: self.project(tower, phi[tower]) for tower in TOWERS}
            for tower, other in (TOWERS, TOWERS[::-1]):
                a[tower] += phi[tower].T @ phi[tower]
                b[tower] += contrastive_curvature(out[tower], out[other], self.logit_scale)
        root, prior = math.sqrt(len(pairs)), math.sqrt(self.prior_precision)
        for tower in TOWERS:
            for factor, name in ((a[tower], "a_inverse"), (b[tower], "b_inverse")):
                identity = torch.eye(len(factor), dtype=torch.float64, device=device)
                inverse = torch.cholesky_inverse(torch.linalg.cholesky(factor / root + prior * identity))
                getattr(self, f"{tower}_{name}").copy_(inverse if name == "a_inverse" else inverse.diagonal())

    def _batches(
        self, pairs: EmbeddingPairs, seed: int
    ) -> Iterator[tuple[np.ndarray, np.ndarray, tuple[Tensor, Tensor] | None]]:
        """Yields the rows (image, text) of shuffled pairs, and for the first batch their embeddings too."""
        order = np.random.default_rng(seed).permutation(len(pairs))
        for low in range(0, len(order), self.batch_size):
            index = order[low : low + self.batch_size]
            yield pairs.image_row[index], pairs.text_row[index], pairs[index] if low == 0 else None

    def check_embeddings(self, tower: str, phi: Tensor, embedding: Tensor) -> None:
        """Raises a ValueError unless projecting the activations `phi` [B, k] of a tower gives the embeddings [B, d]."""
        width = self.settings[f"{tower}_pre"]
        if phi.shape[1] != width:
            raise ValueError(f"{tower} activations have width {phi.shape[1]}, but the projection takes {width}")
        out = self.project(tower, phi.to(self.device))
        least = float(torch.cosine_similarity(out, embedding.to(out), dim=1).min())
        if not least >= 0.99:
            raise ValueError(
                f"projected {tower} activations are not the pairs' embeddings (cosine {least:.3f}): "
                "they must be of the same rows and the same model"
            )

    def project(self, tower: str, phi: Tensor) -> Tensor:
        """Projects activations [B, k] to embeddings, not scaled to unit norm: float64 [B, d]."""
        return phi.double() @ getattr(self, f"{tower}_weight").T + getattr(self, f"{tower}_bias")

    def moments(self, tower: str, phi: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance, [B, d] each, of the unscaled embeddings of activations [B, k]."""
        phi = phi.double()
        factor = torch.einsum("bi,ij,bj->b", phi, getattr(self, f"{tower}_a_inverse"), phi)
        return self.project(tower, phi), factor.unsqueeze(1) * getattr(self, f"{tower}_b_inverse")

    @torch.no_grad()
    def uncertainty(self, queries: Tensor, gallery: GallerySource | Gallery, direction: str) -> Tensor:
        """Uncertainty of queries over a gallery, both given by activations, [Q, k] and [N, k']: float64 [Q].

        The gallery is a tensor, an array, a `.npy` file or a folder of shards.
        """
        direction = Direction.of(direction, conditional=True)
        if not self.fitted:
            raise ValueError(f"{self.method} is not fitted: call fit, or load one that was")
        if isinstance(gallery, Gallery):
            raise TypeError("bayesvlm searches activations, but a Gallery holds unit embeddings: give a tensor or file")
        asks, searched = towers(direction)
        if checks.with_values(queries, "queries").dim() != 2:
            raise ValueError(f"queries must be [Q, k], got {tuple(queries.shape)}")
        check_rows(queries, "queries", unit=False)
        rows = _activation_rows(gallery)
        rows.check(normalize=True)
        for name, tower, shape in (("queries", asks, queries.shape[1:]), ("gallery", searched, (rows.dim,))):
            width = self.settings[f"{tower}_pre"]
            if tuple(shape) != (width,):
                raise ValueError(
                    f"{name} must be {tower} activations of width {width}, got {tuple(shape)}: {NEEDS_ACTIVATIONS}"
                )
        return self._score(queries.detach().to(self.device), rows, direction)

    def _score(self, queries: Tensor, gallery: Any, direction: Direction) -> Tensor:
        asks, searched = towers(direction)
        mean, variance = self.moments(asks, queries)
        total = SoftmaxEntropySum(len(queries), self.device)
        for _, block in gallery.tensors(GALLERY_ROWS):
            items = self.moments(searched, block.to(self.device))
            cosine, cosine_variance = cosine_moments(mean, variance, *items)
            total.add(probit(self.logit_scale * cosine, self.logit_scale**2 * cosine_variance))
        return total.value()


def towers(direction: Direction) -> tuple[str, str]:
    """The tower of the queries and the tower of the gallery."""
    return direction.queries(*TOWERS), direction.items(*TOWERS)


def _activation_rows(gallery: GallerySource) -> Rows:
    if isinstance(gallery, (Tensor, np.ndarray)):
        return Rows([checks.array(gallery, "gallery")], "gallery")
    return open_rows(checks.path(gallery, "gallery"), "gallery")


def contrastive_curvature(own: Tensor, other: Tensor, scale: float) -> Tensor:
    """Sum over rows of J^T H J [d, d], the Gauss-Newton matrix, in `own` [B, d], of the cross-entropy over `other`.

    The logits of row i are scale <g_i/|g_i|, h_j/|h_j|>; H = diag(pi) - pi pi^T and J their derivative in g_i. Written
    out, everything is a product of matrices, none larger than [B, B] or [d, d].
    """
    length = torch.linalg.vector_norm(own, dim=1)
    g, h = own / length.unsqueeze(1), torch.nn.functional.normalize(other)
    cosine = g @ h.T
    weight = (scale * cosine).softmax(1)
    factor = (scale / length).square().unsqueeze(1)
    squares = h.T @ ((factor * weight).sum(0).unsqueeze(1) * h)
    cross = g.T @ ((factor * weight * cosine) @ h)
    along = g.T @ ((factor * (weight * cosine.square()).sum(1, keepdim=True)) * g)
    centre = weight @ h - (weight * cosine).sum(1, keepdim=True) * g
    return squares - cross - cross.T + along - centre.T @ (factor * centre)


def cosine_moments(mean: Tensor, variance: Tensor, other_mean: Tensor, other_variance: Tensor) -> tuple[Tensor, Tensor]:
    """Approximate mean and variance [Q, N] of the cosines of independent Gaussians, given by mean and variance [., d].

    Norms are replaced by the roots of their mean squares; the inner product's moments are exact.
    """
    square, other_square = (mean.square() + variance), (other_mean.square() + other_variance)
    norm = square.sum(1, keepdim=True) * other_square.sum(1)
    product = variance @ other_square.T + mean.square() @ other_variance.T
    return mean @ other_mean.T / norm.sqrt(), product / norm


def probit(mean: Tensor, variance: Tensor) -> Tensor:
    """Logits whose softmax approximates the mean softmax of Gaussian logits."""
    return mean / torch.sqrt(1 + math.pi / 8 * variance)


class SoftmaxEntropySum:
    """Entropy of a softmax whose logits come in blocks [Q, n]."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.peak = torch.full((rows,), -math.inf, dtype=torch.float64, device=device)
        self.weight, self.weighted = torch.zeros_like(self.peak), torch.zeros_like(self.peak)

    def add(self, logits: Tensor) -> None:
        peak = torch.maximum(self.peak, logits.amax(1))
        shrink = torch.exp(self.peak - peak)
        # `weighted` is the sum of e^(l - peak) (l - peak): moving the peak moves it by the weight.
        moved = torch.where(self.weight > 0, self.weight * (self.peak - peak), 0.0)
        apart = logits - peak.unsqueeze(1)
        self.weighted = shrink * (self.weighted + moved) + (apart.exp() * apart).sum(1)
        self.weight = shrink * self.weight + apart.exp().sum(1)
        self.peak = peak

    def value(self) -> Tensor:
        return self.weight.log() - self.weighted / self.weight
