"""Log-densities of pairs and the epistemic score made of them (Sec. 4.2 and D of the paper).

log p(x_1) = log p_0(x_0) - integral of the divergence along the path that leads from x_1 at t = 1 back to x_0 at t = 0.
By the chain rule, log p(image) = log p(image, text) - log p(text | image), and likewise for the text. The epistemic
score is -log p(image) - log p(text): it is high where training data were sparse.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from geoflow_fast.data.embeddings import Embeddings, named_rows
from geoflow_fast.data.frames import Framed
from geoflow_fast.data.ids import Ids
from geoflow_fast.data.pairs import EmbeddingPairs
from geoflow_fast.directions import DIRECTIONS, STREAMS, Direction
from geoflow_fast.flow.fields import Field, PlainField, Streams, as_flow
from geoflow_fast.flow.sampling import SamplingSettings, sample
from geoflow_fast.geometry import check_rows
from geoflow_fast.likelihood.neighbours import check_training_pairs, nearest_partners
from geoflow_fast.likelihood.reverse_ode import density_estimates, draw_seed, in_flow
from geoflow_fast.likelihood.settings import DensitySettings
from geoflow_fast.runtime import checks
from geoflow_fast.runtime.batches import check_batch_size
from geoflow_fast.runtime.settings import settings_from

DRAWN = SamplingSettings(n_samples=1, n_steps=10, guidance=0.0, solver="ab2")
"""How a flow draws the partner of a side that is given alone."""
Rows = Tensor | NDArray[np.floating[Any]]


def log_density(
    field: Field,
    image: Rows,
    text: Rows,
    direction: str = "joint",
    n_steps: int | None = None,
    n_probes: int | None = None,
    solver: str | None = None,
    divergence: str | None = None,
    generator: torch.Generator | None = None,
    return_stderr: bool = False,
    *,
    batch_size: int | None = None,
    settings: DensitySettings | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-density at the pairs (`image` [B, d_I], `text` [B, d_T]), unit rows: float64 [B], in nats.

    Pairs are tensors or arrays in any floating-point type.

    `direction="joint"`: log p(image, text); "i2t": log p(text | image); "t2i": log p(image | text). The ODE is solved
    from t = 1 to t = 0 in `n_steps` steps (10) of `solver` ("euler", "midpoint", "rk4" or "ab2"; "midpoint").
    `divergence="hutchinson"` estimates the divergence with the mean over `n_probes` random probes (1); "exact" needs
    one tangent per coordinate and is meant for small d. `settings` holds these and the less common ones; a keyword
    overrides it.

    `return_stderr` also returns the standard error [B] over the probes, of which there must be at least two. Probes
    depend on `generator` and the number of the row, aligned ones on its path too.

    The ODE is solved for `batch_size` pairs at a time, by default as many as keep a processor's caches or a GPU's
    memory busy; results do not depend on it beyond rounding.

    A `GeoFlow` is evaluated in eval mode. If it centres embeddings or reduces them to principal components, the density
    is that of the points in the flow's coordinates (`GeoFlow.to_flow`), not that of the embeddings.
    """
    direction = Direction.of(direction)
    keywords = {"n_steps": n_steps, "n_probes": n_probes, "solver": solver, "divergence": divergence}
    settings = settings_from(DensitySettings(), settings, **keywords)
    if return_stderr and not _has_stderr(settings):
        raise ValueError("return_stderr needs divergence='hutchinson' and n_probes >= 2")
    batch_size = check_batch_size(batch_size)
    image, text = _pairs(field, image, text)
    seed = draw_seed(generator, image)
    estimates = density_estimates(field, image, text, (direction,), settings, seed, batch_size=batch_size)[0]
    if not return_stderr:
        return estimates.mean(0)
    return estimates.mean(0), _stderr(estimates)


@dataclass(frozen=True, repr=False)
class Epistemic(Framed):
    """Log-densities of B pairs and the epistemic score, each float64 [B] in nats; joint = image + text + pmi. Distances
    to training rows stand beside them if training pairs were given. If only images or only texts were given, their
    marginal and the score are known, and all other densities are NaN. `to_pandas`, `to_polars` and `to_arrow` make
    frames of it."""

    NUMBERED = "pair"
    COLUMNS = ("joint", "text_given_image", "image_given_text", "image", "text", "pmi", "score", "stderr")
    joint: Tensor
    """log p(image, text)."""
    text_given_image: Tensor
    """log p(text | image)."""
    image_given_text: Tensor
    """log p(image | text)."""
    image: Tensor
    """log p(image) = joint - text_given_image, averaged over partners if there are any."""
    text: Tensor
    """log p(text) = joint - image_given_text, averaged likewise."""
    pmi: Tensor
    """Pointwise mutual information, joint - image - text."""
    score: Tensor
    """Epistemic score (Eq. 7): -image - text; of one side alone, that side's term."""
    stderr: Tensor | None = None
    """Standard error of -image - text, or of the term of one side alone, over the probes, if there are two or more."""
    image_distances: Tensor | None = None
    """[B, k], one minus the cosines with the k nearest training images, nearest first, if training pairs were given as
    `text_partners`; k is 10, or the number of images if that is smaller."""
    text_distances: Tensor | None = None
    """The same for the texts, if training pairs were given as `image_partners`."""
    query_ids: Ids | None = None
    """The ids of the pairs, which are those of the texts, or of images alone, where they have some."""


def epistemic(
    field: Field,
    image: Rows | Embeddings | None = None,
    text: Rows | Embeddings | None = None,
    n_steps: int | None = None,
    n_probes: int | None = None,
    solver: str | None = None,
    generator: torch.Generator | None = None,
    *,
    image_partners: Rows | EmbeddingPairs | None = None,
    text_partners: Rows | EmbeddingPairs | None = None,
    batch_size: int | None = None,
    settings: DensitySettings | None = None,
) -> Epistemic:
    """Epistemic score and log-densities of the pairs (`image` [B, d_I], `text` [B, d_T]), unit rows, and with partners
    below, tensors or arrays in any floating-point type, or `gf.Embeddings`, whose ids the result has. Either may be
    left out: one side alone has a marginal and a score, -log p(image) or -log p(text).

    The joint and both conditional ODEs are solved as one batch with the same probes; aligned probes follow the joint
    solve. `n_steps`, `n_probes`, `solver`, `batch_size` and `settings` are those of `log_density`. With two probes or
    more the result has standard errors.

    The score is -log p(image) - log p(text).

    A marginal is computed together with a partner, the other side of the pair, and with finitely many steps depends on
    it a little. `text_partners`, [M, d_T] for all rows or [B, M, d_T], average log p(image) over the pair's own text
    and M more, at the cost of two solves each; `image_partners` do so for log p(text). The probes of the m-th partner
    depend on `generator`, the row and m.

    Training pairs as `text_partners` are for images that may be unlike them, since a flow extrapolates badly where it
    knows neither side of a pair: log p(image) is then computed with the text of the nearest training image instead of
    the pair's own, and the distances to the nearest training images are returned. The same holds for `image_partners`
    and log p(text). Rows that are among the training rows are their own nearest neighbours.

    One side alone is paired with its partners only: those given, by default one that the flow draws for it.
    """
    keywords = {"n_steps": n_steps, "n_probes": n_probes, "solver": solver}
    settings = settings_from(DensitySettings(), settings, **keywords)
    batch_size = check_batch_size(batch_size)
    encoders = getattr(getattr(field, "origin", None), "encoders", (None, None))
    own_image: Any
    own_text: Any
    own_image, image_ids = named_rows(image, {"the flow": encoders[0]})
    own_text, ids = named_rows(text, {"the flow": encoders[1]})
    if own_image is None or own_text is None:
        given, rows, partners, useless = (
            (Direction.I2T, own_image, text_partners, image_partners)
            if own_text is None
            else (Direction.T2I, own_text, image_partners, text_partners)
        )
        if rows is None:
            raise ValueError("image and text are both missing; give pairs, or one side alone")
        if useless is not None:
            own, missing = ("image", "text") if own_text is None else ("text", "image")
            raise ValueError(f"{own}_partners are partners of a {missing}, and no {missing} is given")
        alone = _one_side(field, rows, partners, given, settings, generator, batch_size)
        return dataclasses.replace(alone, query_ids=ids or image_ids)
    image, text = _pairs(field, own_image, own_text)
    texts = _partners(field, image, text_partners, Direction.I2T, text.shape[1])
    images = _partners(field, text, image_partners, Direction.T2I, image.shape[1])
    seed = draw_seed(generator, image)
    estimates = density_estimates(field, image, text, DIRECTIONS, settings, seed, batch_size=batch_size)
    joint, i2t, t2i = estimates

    def marginal(own: Tensor, partners: _Partners, given: Direction) -> Tensor:
        """The mean [K, B] of a marginal over partners; probes of the nearest ones are those of the pair's own."""
        nearest = partners.distances is not None
        first = seed if nearest else seed + 1
        others = _marginals(field, given.queries(image, text), partners, given, settings, first, batch_size)
        return torch.stack(others if nearest else [own, *others]).mean(0)

    of_image = marginal(joint - i2t, texts, Direction.I2T)
    of_text = marginal(joint - t2i, images, Direction.T2I)
    stderr = _stderr(of_image + of_text) if _has_stderr(settings) else None
    terms = chain_rule(estimates, (of_image, of_text), stderr)
    named = dataclasses.replace(terms, query_ids=ids or image_ids)
    return dataclasses.replace(named, image_distances=texts.distances, text_distances=images.distances)


def chain_rule(
    estimates: Tensor,
    marginals: tuple[Tensor, Tensor] | None = None,
    stderr: Tensor | None = None,
) -> Epistemic:
    """The decomposition from estimates [3, K, B] of the `DIRECTIONS`. The `marginals` of image and text, [K, B] each,
    are those that follow from the estimates if none better are given."""
    joint, i2t, t2i = estimates.mean(1)
    image, text = (joint - i2t, joint - t2i) if marginals is None else (x.mean(0) for x in marginals)
    return Epistemic(joint, i2t, t2i, image, text, joint - image - text, -image - text, stderr)


def epistemic_stderr(estimates: Tensor) -> Tensor:
    """Standard error [B] of the epistemic score from estimates [3, K, B] of the `DIRECTIONS`."""
    joint, i2t, t2i = estimates
    return _stderr(2 * joint - i2t - t2i)


def _stderr(estimates: Tensor) -> Tensor:
    """Standard error [B] of the mean of the estimates [K, B]."""
    if estimates.shape[1] == 0:  # torch warns of a spread of nothing
        return estimates[0]
    return estimates.std(0) / math.sqrt(len(estimates))


@dataclass(frozen=True)
class _Partners:
    """Rows [B, d] that stand in for one side of B pairs, one or more times."""

    rows: tuple[Tensor, ...] = ()
    distances: Tensor | None = None
    """If they belong to the training rows nearest to the other side: [B, k], how far these are."""


def _partners(
    field: Field, rows: Tensor, partners: Rows | EmbeddingPairs | None, given: Direction, width: int | None = None
) -> _Partners:
    """The partners, given as [M, d], [B, M, d] or training pairs, that stand beside the `rows` [B, d'], which are the
    queries of the direction `given`; `width` is d if it is known."""
    if partners is None:
        return _Partners()
    name = f"{STREAMS[given.generated[0]]}_partners"
    if isinstance(partners, EmbeddingPairs):
        check_training_pairs(partners, (width, rows.shape[1]), name, given)
        return _Partners(*nearest_partners(partners, rows, given))
    if not isinstance(partners, (Tensor, np.ndarray)):
        raise TypeError(f"{name} must be a tensor, an array or EmbeddingPairs, got {type(partners).__name__}")
    checks.unmasked(partners, name)
    shape = tuple(partners.shape)
    width = width or shape[-1]
    if shape[-1:] != (width,) or shape[-2:-1] in {(), (0,)} or shape[:-2] not in {(), (len(rows),)}:
        raise ValueError(f"{name} must be [M, {width}] or [{len(rows)}, M, {width}], got {shape}")
    converted = checks.rows(partners.reshape(-1, width), name, width, rows).reshape(shape)
    check_rows(converted, name)
    in_flow(as_flow(field), converted, name)
    return _Partners(converted.expand(len(rows), -1, -1).unbind(1))


def _marginals(
    field: Field,
    rows: Tensor,
    partners: _Partners,
    given: Direction,
    settings: DensitySettings,
    seed: int | Tensor,
    batch_size: int | None,
) -> list[Tensor]:
    """Estimates [K, B] of log p(rows), rows of the stream that is given in the direction `given`, with each partner."""
    every = []
    for number, other in enumerate(partners.rows):
        pair = given.pair(rows, other)
        solved = field, *pair, (Direction.JOINT, given), settings, seed + number
        joint, conditional = density_estimates(*solved, batch_size=batch_size)
        every.append(joint - conditional)
    return every


def _one_side(
    field: Field,
    rows: Rows,
    partners: Rows | EmbeddingPairs | None,
    given: Direction,
    settings: DensitySettings,
    generator: torch.Generator | None,
    batch_size: int | None,
) -> Epistemic:
    """The marginal and the score of the rows of the stream that is given in the direction `given`, with their partners
    or with one that the flow draws for each; what would need the other side is NaN."""
    x = _rows(field, rows, STREAMS[1 - given.generated[0]])
    seed = draw_seed(generator, x)
    if partners is not None:
        chosen = _partners(field, x, partners, given)
    else:
        chosen = _drawn_partners(field, x, given, seed, batch_size)
    marginal = torch.stack(_marginals(field, x, chosen, given, settings, seed, batch_size)).mean(0)
    value = marginal.mean(0)
    unknown = torch.full_like(value, math.nan)
    image, text = given.pair(value, unknown)
    stderr = _stderr(marginal) if _has_stderr(settings) else None
    distances = given.pair(chosen.distances, None)
    return Epistemic(unknown, unknown, unknown, image, text, unknown, -value, stderr, *distances)


def _drawn_partners(
    field: Field, rows: Tensor, given: Direction, seed: int | Tensor, batch_size: int | None
) -> _Partners:
    """One partner for each of the rows, drawn by the flow from its conditional distribution. A strange row is thus
    paired with what the flow itself expects beside it."""
    other = given.generated[0]
    name, missing = STREAMS[1 - other], STREAMS[other]
    if isinstance(as_flow(field), PlainField):
        raise ValueError(
            f"{name} alone needs {missing}_partners: a {type(field).__name__} does not know how wide a {missing} is"
        )
    generator = torch.Generator().manual_seed(int(seed))
    image, text = given.pair(rows, None)
    drawn = sample(field, image=image, text=text, generator=generator, batch_size=batch_size, settings=DRAWN)
    return _Partners((given.items(*drawn).squeeze(1),))


def _pairs(field: Field, image: Rows, text: Rows) -> Streams:
    """The pairs as tensors with the dtype and device of the field."""
    for name, x in zip(STREAMS, (image, text)):
        if not isinstance(x, np.ndarray):
            checks.with_values(x, name)
    if len(image.shape) != 2 or len(text.shape) != 2 or len(image) != len(text):
        raise ValueError(
            f"image and text must be [B, d] with equal B, got {tuple(image.shape)} and {tuple(text.shape)}"
        )
    return _rows(field, image, "image"), _rows(field, text, "text")


def _rows(field: Field, x: Rows, name: str) -> Tensor:
    """One side as unit rows of a tensor with the dtype and device of the field. What a field that is no flow works in
    is not known: tensors in single and double precision are left to it."""
    if not isinstance(x, np.ndarray):
        checks.with_values(x, name)
    if len(x.shape) != 2:
        raise ValueError(f"{name} must be [B, d], got {tuple(x.shape)}")
    flow = as_flow(field)
    left_alone = isinstance(flow, PlainField) and x.dtype in (torch.float32, torch.float64)
    converted = checks.rows(x, name, x.shape[1], x if isinstance(x, Tensor) and left_alone else flow.example)
    check_rows(converted, name)
    return converted


def _has_stderr(settings: DensitySettings) -> bool:
    """Whether there are several estimates of a density, whose spread is known."""
    return settings.n_probes >= 2 and not settings.exact
