"""Synthetic data whose densities are known: velocity fields with closed-form densities, a small world of concepts to
train on, and a world with the statistics of CLIP embeddings.

They are made of the distributions of `spherical`: the fields and the small world of bumps, the other of von
Mises-Fisher distributions.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from geoflow_fast.directions import STREAMS, Direction
from geoflow_fast.geometry import UNIT_TOLERANCE, check_rows, eps, inner, log_area, normalize
from geoflow_fast.noise import sample_uniform
from geoflow_fast.runtime import checks
from geoflow_fast.spherical import SHARPEST, log_bump, log_vmf, sample_bump, sample_vmf

LEAST_PRODUCT = 1e-280
"""Smallest sum of products of probabilities from which no term that matters has vanished in float64."""
PART = 1024
"""Rows of which a table over all scenes is held at a time."""
BUMP_NODES, BUMP_DEGREE = 128, 48
"""Nodes of the quadrature over a blurred bump, and degree of the series that stands for it."""


@dataclass(frozen=True)
class BumpField:
    """A field with known densities: each generated stream follows v(x) = c (mu - <mu, x> x) around its own centre mu.

    `image_centre` [d_I], `text_centre` [d_T]: unit vectors. `c`: strength; the larger |c|, the sharper the density.
    """

    image_centre: Tensor
    text_centre: Tensor
    c: float

    def __post_init__(self) -> None:
        for name, centre in (("image_centre", self.image_centre), ("text_centre", self.text_centre)):
            if checks.with_values(centre, name).dim() != 1 or len(centre) < 2:
                raise ValueError(f"{name} must be one point [d] with d >= 2, got {tuple(centre.shape)}")
            eps(centre.dtype)
            check_rows(centre, name)
        _check_like("text_centre", self.text_centre, "image_centre", self.image_centre)
        checks.number(self.c, "c", -SHARPEST, SHARPEST)

    def velocity(self, image: Tensor, text: Tensor, t: float | Tensor, direction: str) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """Velocities (v_image [B, d_I], v_text [B, d_T]), zero for a given stream; the time `t` has no effect."""
        generated = self._check(image, text, direction).generated
        v_image, v_text = (
            _attract(x, centre, self.c) if stream in generated else torch.zeros_like(x)
            for stream, (x, centre) in enumerate(((image, self.image_centre), (text, self.text_centre)))
        )
        return v_image, v_text

    def log_density(self, image: Tensor, text: Tensor, direction: str) -> Tensor:
        """Exact log-density [B] of the generated streams, in nats."""
        generated = self._check(image, text, direction).generated
        _check_units(image, text)
        cosines = (image @ self.image_centre, text @ self.text_centre)
        parts = [log_bump(cosines[stream], self.c, (image, text)[stream].shape[1]) for stream in generated]
        return torch.stack(parts).sum(0)

    def _check(self, image: Tensor, text: Tensor, direction: str) -> Direction:
        dims = (len(self.image_centre), len(self.text_centre))
        return _check_pairs(image, text, direction, dims, self.image_centre)


@dataclass(frozen=True)
class PairField:
    """A field of dependent pairs with known densities: given an image, its text is distributed around R image with
    strength `c`, and given a text, its image around R^T text; both marginals are uniform.

    `rotation` R [d, d] is orthogonal. In the joint direction the image does not move, and the text moves as in i2t.
    """

    rotation: Tensor
    c: float

    def __post_init__(self) -> None:
        rotation = checks.with_values(self.rotation, "rotation")
        if rotation.dim() != 2 or rotation.shape[0] != rotation.shape[1] or len(rotation) < 2:
            raise ValueError(f"rotation must be [d, d] with d >= 2, got {tuple(rotation.shape)}")
        eps(rotation.dtype)
        off = (
            (rotation @ rotation.T - torch.eye(len(rotation), dtype=rotation.dtype, device=rotation.device)).abs().max()
        )
        if not off <= UNIT_TOLERANCE:
            raise ValueError(f"rotation must be orthogonal, but R R^T differs from the identity by {float(off):.3g}")
        checks.number(self.c, "c", -SHARPEST, SHARPEST)

    def velocity(self, image: Tensor, text: Tensor, t: float | Tensor, direction: str) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """Velocities (v_image [B, d_I], v_text [B, d_T]), zero for a given stream; the time `t` has no effect."""
        if _check_pairs(image, text, direction, self.rotation.shape, self.rotation) is Direction.T2I:
            return _attract(image, text @ self.rotation, self.c), torch.zeros_like(text)
        return torch.zeros_like(image), _attract(text, image @ self.rotation.T, self.c)

    def log_density(self, image: Tensor, text: Tensor, direction: str) -> Tensor:
        """Exact log-density [B] of the generated streams, in nats. Both log-marginals are -log_area(d), and the PMI is
        the i2t log-density plus log_area(d)."""
        asked = _check_pairs(image, text, direction, self.rotation.shape, self.rotation)
        _check_units(image, text)
        d = image.shape[1]
        conditional = log_bump(inner(image @ self.rotation.T, text).squeeze(-1), self.c, d)
        return conditional - log_area(d) if asked is Direction.JOINT else conditional


def _check_pairs(image: Tensor, text: Tensor, direction: str, dims: Sequence[int], like: Tensor) -> Direction:
    """Returns the direction. An error is raised unless image and text have equally many rows, these widths, and the
    dtype and device of `like`."""
    for name, x, dim in zip(STREAMS, (image, text), dims):
        if checks.floating(x, name).dim() != 2 or x.shape[1] != dim:
            raise ValueError(f"{name} must be [B, {dim}], got {tuple(x.shape)}")
        _check_like(name, x, "the field", like)
    if len(image) != len(text):
        raise ValueError(f"image has {len(image)} rows, but text has {len(text)}")
    return Direction.of(direction)


def _check_like(name: str, x: Tensor, other: str, like: Tensor) -> None:
    if x.dtype != like.dtype or x.device != like.device:
        raise ValueError(f"{name} is {x.dtype} on {x.device}, but {other} is {like.dtype} on {like.device}")


def _check_units(image: Tensor, text: Tensor) -> None:
    check_rows(image, "image")
    check_rows(text, "text")


def _attract(x: Tensor, centre: Tensor, c: float) -> Tensor:
    """The velocity c (mu - <mu, x> x) at the points `x` [B, d]."""
    return c * (centre - inner(centre.expand_as(x), x) * x)


@dataclass(frozen=True)
class DrawnSearch:
    """Queries, a gallery, and for each query the row of its item in the gallery, or -1 if it is missing there."""

    queries: Tensor
    gallery: Tensor
    item: Tensor


class PairWorld(ABC):
    """What worlds of pairs have in common: a sampler, exact log-densities, and the true posterior over a gallery.

    Rows are unit rows [B, dim] on the CPU. Densities are those of pairs of the `known` concepts, float64, in nats;
    `far` and `near` are the numbers of held-out concepts, unlike the known ones and similar to them.
    """

    dim: int
    known: Tensor
    far: Tensor
    near: Tensor

    @abstractmethod
    def sample(
        self, n: int, *, generator: torch.Generator | None = None, concepts: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draws `n` pairs: (image [n, d], text [n, d], concept [n]), float32 and int64. `concepts` [k] are the numbers
        of the concepts to draw from, by default the known ones."""

    @abstractmethod
    def log_image(self, image: Tensor) -> Tensor:
        """log p(image): [B]."""

    @abstractmethod
    def log_text(self, text: Tensor) -> Tensor:
        """log p(text): [B]."""

    @abstractmethod
    def log_joint(self, image: Tensor, text: Tensor) -> Tensor:
        """log p(image, text): [B]."""

    @abstractmethod
    def _gallery_pmi(self, queries: Tensor, gallery: Tensor, asked: Direction, groups: Tensor | None) -> Tensor:
        """PMI [Q, N] of every query with every item, or [Q, G] with every group of items; the input is checked."""

    def log_text_given_image(self, image: Tensor, text: Tensor) -> Tensor:
        """log p(text | image): [B]."""
        return self.log_joint(image, text) - self.log_image(image)

    def log_image_given_text(self, image: Tensor, text: Tensor) -> Tensor:
        """log p(image | text): [B]."""
        return self.log_joint(image, text) - self.log_text(text)

    def pmi(self, image: Tensor, text: Tensor) -> Tensor:
        """Pointwise mutual information log p(image, text) - log p(image) - log p(text): [B]."""
        return self.log_joint(image, text) - self.log_image(image) - self.log_text(text)

    def gallery_pmi(self, queries: Tensor, gallery: Tensor, direction: str, *, groups: Tensor | None = None) -> Tensor:
        """Pointwise mutual information [Q, N] of every query with every gallery item.

        `direction="t2i"`: queries are texts and the gallery holds images; "i2t": the other way round. `groups` [N]
        gives the number of the group that each item belongs to, such as the image that a caption describes; the result
        is then [Q, G], the PMI of a query with all items of a group together.
        """
        asked = Direction.of(direction, conditional=True)
        self._check_rows(queries=queries)
        self._check_rows(gallery=gallery)
        if groups is not None:
            _check_groups(groups, len(gallery))
        return self._gallery_pmi(queries, gallery, asked, groups)

    def gallery_posterior(
        self, queries: Tensor, gallery: Tensor, direction: str, *, groups: Tensor | None = None
    ) -> Tensor:
        """True probability [Q, N] that each gallery item is the query's partner, given that one of them is: softmax of
        the PMI over the gallery. Arguments as in `gallery_pmi`; with `groups`, [Q, G] for the groups of items."""
        return self.gallery_pmi(queries, gallery, direction, groups=groups).softmax(1)

    def missing_probability(
        self, queries: Tensor, gallery: Tensor, direction: str, share: float, *, groups: Tensor | None = None
    ) -> Tensor:
        """True probability [Q] that a query's item is missing from the gallery, if a `share` of all queries have none
        there and the others' items are equally likely. Arguments as in `gallery_pmi`."""
        checks.number(share, "share", 0, 1)
        pmi = self.gallery_pmi(queries, gallery, direction, groups=groups)
        odds = torch.tensor([share, 1 - share], dtype=torch.float64, device="cpu").log()
        if not pmi.shape[1]:
            raise ValueError("gallery must hold at least one item")
        present = pmi.logsumexp(1) - math.log(pmi.shape[1])
        return torch.exp(odds[0] - torch.logaddexp(odds[0], odds[1] + present))

    def sample_search(
        self,
        queries: int,
        items: int,
        direction: str,
        *,
        share: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> DrawnSearch:
        """Draws a gallery of `items` items, and at most as many `queries`, float32. The item of a query is missing from
        the gallery with probability `share`; no two queries have the same item."""
        asked = Direction.of(direction, conditional=True)
        checks.integer(queries, "queries", 0, checks.integer(items, "items"))
        checks.number(share, "share", 0, 1)
        image, text, _ = self.sample(items + queries, generator=generator)
        missing = torch.rand(queries, generator=generator, dtype=torch.float64, device="cpu") < share
        item = torch.randperm(items, generator=generator, device="cpu")[:queries]
        source = torch.where(missing, torch.arange(items, items + queries, device="cpu"), item)
        return DrawnSearch(
            asked.queries(image, text)[source],
            asked.items(image, text)[:items],
            item.masked_fill(missing, -1),
        )

    def _check_rows(self, **rows: Tensor) -> None:
        """Raises a ValueError unless the rows are equally many unit rows [B, dim] on the CPU."""
        for name, x in rows.items():
            if checks.with_values(x, name).dim() != 2 or x.shape[1] != self.dim:
                raise ValueError(f"{name} must be [B, {self.dim}], got {tuple(x.shape)}")
            if x.device.type != "cpu":
                raise ValueError(f"{name} is on {x.device}, but the world is on the CPU; pass {name}.cpu()")
            check_rows(x, name)
        if len({len(x) for x in rows.values()}) > 1:
            lengths = " and ".join(f"{name} has {len(x)}" for name, x in rows.items())
            raise ValueError(f"rows must be equally many, but {lengths}")

    def _pool(self, n: int, generator: torch.Generator | None, concepts: Tensor | None, count: int) -> Tensor:
        """Checks the arguments of `sample` and returns the numbers [k] of the concepts to draw from, of `count`."""
        checks.integer(n, "n")
        if generator is not None and not isinstance(generator, torch.Generator):
            raise TypeError(f"generator must be a torch.Generator, got {type(generator).__name__}")
        pool = self.known if concepts is None else checks.indices(concepts, "concepts", count)
        if pool.dim() != 1 or not len(pool):
            raise ValueError(f"concepts must be at least one number of a concept, [k], got {tuple(pool.shape)}")
        return pool


def _check_groups(groups: Tensor, items: int) -> None:
    """Raises a ValueError unless `groups` gives one of the numbers 0 to G - 1 to each item and none is left out."""
    if checks.indices(groups, "groups", items).shape != (items,):
        raise ValueError(f"groups must be [{items}], one number for each item, got {tuple(groups.shape)}")
    numbers = groups.unique()
    if len(numbers) and len(numbers) != int(numbers[-1]) + 1:
        raise ValueError(f"groups must be numbered without gaps, but has {len(numbers)} up to {int(numbers[-1])}")


class ConceptWorld(PairWorld):
    """Synthetic pairs of 32 concepts in 8 groups of 4, with captions from specific to vague. All densities are known.

    An image is drawn from a bump (the distribution of `BumpField`) of strength c, tanh c = 0.8, around the centre of
    its concept, mu_k = unit(0.6 e_1 + 0.98 group + 0.7 concept). Its text is drawn from a bump around R image, where
    tanh c is .9, .7 or .45, depending on the concept. R rotates the plane (e_1, e_2) by 60 degrees, which makes a
    modality gap. Concepts are equally likely. Training uses only the `known` concepts: one group (`far`) and one member
    of each of three other groups (`near`) are held out. Densities are those of the known concepts, float64, in nats.
    """

    GROUPS, PER_GROUP = 8, 4
    IMAGE_TANH = 0.8
    TEXT_TANH = (0.9, 0.7, 0.45)

    def __init__(self, dim: int = 24, seed: int = 0) -> None:
        self.dim = checks.integer(dim, "dim", 4)
        count = self.GROUPS * self.PER_GROUP
        generator = torch.Generator().manual_seed(checks.integer(seed, "seed"))

        def directions(n: int) -> Tensor:
            """Draws uniform unit vectors orthogonal to the plane in which R rotates."""
            points = sample_uniform(n, dim - 2, generator=generator, dtype=torch.float64)
            return torch.nn.functional.pad(points, (2, 0))

        groups = directions(self.GROUPS).repeat_interleave(self.PER_GROUP, 0)
        mean = 0.98 * groups + 0.7 * directions(count)
        mean[:, 0] += 0.6
        self.centres = mean / mean.norm(dim=1, keepdim=True)
        self.image_c = math.atanh(self.IMAGE_TANH)
        self.text_c = torch.atanh(torch.tensor(self.TEXT_TANH, dtype=torch.float64, device="cpu"))
        self.level = torch.arange(count, device="cpu") % len(self.TEXT_TANH)
        self.rotation = torch.eye(dim, dtype=torch.float64, device="cpu")
        cos, sin = math.cos(math.pi / 3), math.sin(math.pi / 3)
        self.rotation[:2, :2] = torch.tensor([[cos, -sin], [sin, cos]], dtype=torch.float64, device="cpu")
        self.far = torch.arange(count - self.PER_GROUP, count, device="cpu")
        self.near = torch.arange(3, device="cpu") * self.PER_GROUP + self.PER_GROUP - 1
        held_out = set(self.far.tolist()) | set(self.near.tolist())
        self.known = torch.tensor([k for k in range(count) if k not in held_out], device="cpu")
        self._text_tables = [_blurred_bump(dim, self.image_c, float(c)) for c in self.text_c]

    def sample(
        self, n: int, *, generator: torch.Generator | None = None, concepts: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draws `n` pairs: (image [n, d], text [n, d], concept [n]), float32 and int64. `concepts` [k] are the numbers
        of the concepts to draw from, by default the known ones."""
        pool = self._pool(n, generator, concepts, len(self.centres))
        concept = pool[torch.randint(len(pool), (n,), generator=generator, device="cpu")]
        image = sample_bump(self.centres[concept], self.image_c, generator)
        text = sample_bump(image @ self.rotation.T, self.text_c[self.level[concept]], generator)
        return image.float(), text.float(), concept

    def _log_images(self, image: Tensor) -> Tensor:
        """log p(image, k) over the known concepts: [B, K]."""
        cosine = image.double() @ self.centres[self.known].T
        return log_bump(cosine, self.image_c, self.dim) - math.log(len(self.known))

    def log_image(self, image: Tensor) -> Tensor:
        """log p(image): [B]."""
        self._check_rows(image=image)
        return self._log_images(image).logsumexp(1)

    def log_joint(self, image: Tensor, text: Tensor) -> Tensor:
        """log p(image, text): [B]."""
        self._check_rows(image=image, text=text)
        cosine = inner(image.double() @ self.rotation.T, text.double())
        conditional = log_bump(cosine, self.text_c, self.dim)[:, self.level[self.known]]
        return (self._log_images(image) + conditional).logsumexp(1)

    def log_text(self, text: Tensor) -> Tensor:
        """log p(text): [B]. Given the concept it is a function of one cosine, for which there is a table."""
        self._check_rows(text=text)
        back = text.double() @ self.rotation
        if back.requires_grad:
            raise ValueError("text requires a gradient, which a table does not have; pass text.detach()")
        parts = []
        for level, table in enumerate(self._text_tables):
            cosine = back @ self.centres[self.known[self.level[self.known] == level]].T
            parts.append(torch.from_numpy(table(cosine.clamp(-1, 1).numpy())))
        return torch.cat(parts, dim=1).logsumexp(1) - math.log(len(self.known))

    def _gallery_pmi(self, queries: Tensor, gallery: Tensor, asked: Direction, groups: Tensor | None) -> Tensor:
        if groups is not None:
            raise ValueError("groups of items are known to a ClipWorld; a ConceptWorld knows pairs only")
        rows = [torch.empty(0, len(gallery), dtype=torch.float64, device="cpu")]
        for query in queries:
            rows.append(self.pmi(*asked.pair(query.expand(len(gallery), -1), gallery)).unsqueeze(0))
        return torch.cat(rows)


def _blurred_bump(d: int, outer_c: float, inner_c: float) -> np.polynomial.Chebyshev:
    """The logarithm of the integral over x of bump(x; mu, outer_c) bump(u; x, inner_c), as a function of the cosine
    <mu, u>.

    With u = a mu + sqrt(1-a^2) n and x = s mu + sqrt(1-s^2) (w n + ...), <x, u> = a s + sqrt((1-a^2)(1-s^2)) w. Both s
    and w are cosines of angles, over which Gauss-Legendre converges exponentially; so does the Chebyshev series in a.
    """
    node, weight = np.polynomial.legendre.leggauss(BUMP_NODES)
    angle = torch.from_numpy((node + 1) * math.pi / 2)
    log_weight = torch.from_numpy(np.log(weight * math.pi / 2))
    s, w = angle.cos(), angle.cos()
    log_sin = angle.sin().log()
    log_s = log_weight + (d - 2) * log_sin + log_bump(s, outer_c, d) + log_area(d - 1)
    log_w = log_weight + (d - 3) * log_sin + log_area(d - 2) - log_area(d - 1)

    def log_integral(a: np.ndarray) -> np.ndarray:
        values = []
        for cosine in a:
            along = cosine * s[:, None] + math.sqrt(max(0.0, 1 - cosine**2)) * (1 - s**2).sqrt()[:, None] * w
            values.append((log_s[:, None] + log_w + log_bump(along, inner_c, d)).flatten().logsumexp(0).item())
        return np.array(values)

    return np.polynomial.Chebyshev.interpolate(log_integral, BUMP_DEGREE)


@dataclass(frozen=True)
class Captioned:
    """Images with their captions, and what the world knows about them."""

    image: Tensor
    """float32 [n, d]."""
    text: Tensor
    """float32 [n * captions, d]; the captions of an image stand together."""
    text_image_index: Tensor
    """The image that each caption was written for: int64 [n * captions]."""
    scene: Tensor
    """The scene of each image: int64 [n]."""
    level: Tensor
    """What each caption describes: 0 the scene, 1 its concept, 2 its group; int64 [n * captions]."""
    wrong: Tensor
    """Whether a caption was written for an image of some other scene: bool [n * captions]."""


@dataclass(frozen=True)
class _Stream:
    """The images or the texts of a `ClipWorld`: von Mises-Fisher distributions of concentration `kappa` around the unit
    vectors offset + nodes[i] + styles[k], where style k has the probability exp(log_style[k]), whatever the node.

    The offset, the nodes and the styles lie in orthogonal subspaces, and all nodes have one norm, and all styles. A row
    of scene s is drawn from node `levels[s, l]` with probability exp(log_level[l]) or, with probability `wrong`, from
    that of another scene.
    """

    offset: Tensor
    nodes: Tensor
    styles: Tensor
    log_style: Tensor
    kappa: float
    levels: Tensor
    log_level: Tensor
    wrong: float

    def sample(self, node: Tensor, generator: torch.Generator | None) -> Tensor:
        """Draws one point [n, d] for each node [n]."""
        style = _choose(self.log_style, len(node), generator)
        return sample_vmf(self.offset + self.nodes[node] + self.styles[style], self.kappa, generator)

    def evidence(self, rows: Tensor, scenes: Tensor, log_scene: Tensor) -> tuple[Tensor, Tensor]:
        """log p(row | scene) - log p(row), [B, S], and log p(row), [B], if these are the scenes [S] and the logarithms
        of their probabilities."""
        rows = normalize(rows.double())
        nodes = self.kappa * (rows @ self.nodes.T)
        given, *vaguer = (nodes[:, self.levels[scenes, level]] + log_p for level, log_p in enumerate(self.log_level))
        for more in vaguer:
            given = torch.logaddexp(given, more)
        # What depends on the style does not depend on the scene: the density is a product of the two.
        style = (self.log_style + self.kappa * (rows @ self.styles.T)).logsumexp(1)
        marginal = (log_scene + given).logsumexp(1)
        wrong = torch.tensor(self.wrong, dtype=torch.float64, device="cpu").log()
        evidence = torch.logaddexp(given - marginal.unsqueeze(1) + math.log1p(-self.wrong), wrong)
        return evidence, marginal + style + log_vmf(rows @ self.offset, self.kappa, rows.shape[1])


class ClipWorld(PairWorld):
    """Synthetic pairs with the statistics of CLIP embeddings. All densities are known.

    A scene belongs to a concept, and a concept to a group. Scenes have heavy-tailed probabilities. Given its scene, an
    image is drawn from a von Mises-Fisher distribution around offset + scene + style. Its captions are drawn likewise
    around the offset of texts + R node + phrasing, where the node is the scene or, in a vaguer caption, its concept or
    its group, all of whose images the caption fits as well. A share `wrong` of the captions describes some other scene.
    Styles and phrasings have heavy-tailed probabilities, too: images of one scene and style are near-duplicates.

    Scenes and styles vary along axes whose variances are a power law, and R turns the axes of scenes towards those of
    styles. The two offsets make the modality gap, and each has one large coordinate. Some styles have a part of the
    other modality's offset, which makes hubs. An image and its captions are independent given the scene, so that the
    posterior over a gallery is known for several captions of an image as well. Concepts are held out as in
    `ConceptWorld`: an eighth of the groups (`far`) and one concept of each of three eighths (`near`).

    `groups` have 8 concepts of 8 scenes each; `styles` is the number of styles, and of phrasings.
    """

    PER_GROUP, PER_CONCEPT = 8, 8
    LEVELS = (0.6, 0.3, 0.1)
    """Shares of captions that describe the scene, its concept and its group."""
    OFFSET, CONTENT = 0.55, 0.18
    """Squared norms of offsets and of nodes; that of styles is the rest of one."""
    OFFSET_COSINE, ROGUE = 0.31, 0.86
    """The cosine of the two offsets; the large coordinate of a unit vector along the first."""
    LIKE_GROUP, LIKE_CONCEPT = 0.75, 0.9
    """Weight of the group in a concept, and of the concept in a scene."""
    DECAY, TURN, HUB = 1.1, 0.35, 0.04
    """The exponent of the power law, the angle by which R turns, and the size of the other offset's part in a style."""
    TAIL, STYLE_TAIL = 1.0, 1.6
    """Standard deviations of the logarithms of the probabilities of scenes and of styles."""
    MEAN_COSINE = 0.975
    """The mean cosine of a row with the mean of its von Mises-Fisher distribution."""

    def __init__(
        self, dim: int = 512, seed: int = 0, *, groups: int = 64, styles: int = 512, wrong: float = 0.03
    ) -> None:
        self.dim = checks.integer(dim, "dim", 4, 2**12)
        checks.integer(groups, "groups", 2, 2**10)
        checks.integer(styles, "styles", 1, 2**16)
        self.wrong = checks.number(wrong, "wrong", 0, 0.99)
        generator = torch.Generator().manual_seed(checks.integer(seed, "seed"))
        concepts = torch.arange(groups * self.PER_GROUP, device="cpu")
        self.far = concepts[-self.PER_GROUP * math.ceil(groups / 8) :]
        self.near = concepts[self.PER_GROUP - 1 :: self.PER_GROUP][: math.ceil(groups * 3 / 8)]
        self.known = concepts[~torch.isin(concepts, torch.cat([self.far, self.near]))]
        self.concept = concepts.repeat_interleave(self.PER_CONCEPT)
        self.log_weight = _log_weights(len(self.concept), self.TAIL, generator)
        self._scenes = torch.isin(self.concept, self.known).nonzero().squeeze(1)
        self._log_scene = self.log_weight[self._scenes].log_softmax(0)
        self._image, self._text = self._streams(groups, styles, generator)

    def _streams(self, groups: int, styles: int, generator: torch.Generator) -> tuple[_Stream, _Stream]:
        """Draws the distributions of images and of texts."""
        scenes, concepts, all_groups = self._nodes(groups, generator)
        axes = scenes.shape[1]
        offset, other, content, style, _ = self._basis(generator).split([1, 1, axes, axes, self.dim - 2 - 2 * axes])
        scene = torch.arange(len(scenes), device="cpu")
        images = self._stream((offset, other, content, style), scenes, scene[:, None], styles, generator)
        offset, other = _turned(offset, other, math.acos(self.OFFSET_COSINE))
        content, style = _turned(content, style, self.TURN)
        concept, group = len(scenes) + self.concept, len(scenes) + len(concepts) + self.concept // self.PER_GROUP
        texts = self._stream(
            # Flipped: phrasings vary most along the axes where styles vary least, so that they are hardly correlated.
            (offset, other, content, style.flip(0)),
            torch.cat([scenes, concepts, all_groups]),
            torch.stack([scene, concept, group], 1),
            styles,
            generator,
        )
        return images, texts

    def _stream(
        self,
        axes: tuple[Tensor, Tensor, Tensor, Tensor],
        nodes: Tensor,
        levels: Tensor,
        styles: int,
        generator: torch.Generator,
    ) -> _Stream:
        """Draws the styles of a stream whose axes are those of its offset, of the hubs, of the nodes and of styles. A
        stream of more than one level is that of the texts."""
        offset, other, content, style = axes
        hub = torch.tanh(self.HUB * _normal(styles, 1, generator))
        own = hub * other + (1 - hub.square()).sqrt() * (self._directions(styles, generator) @ style)
        shares = torch.tensor(self.LEVELS[: levels.shape[1]], dtype=torch.float64, device="cpu")
        return _Stream(
            offset=math.sqrt(self.OFFSET) * offset.squeeze(0),
            nodes=math.sqrt(self.CONTENT) * (nodes @ content),
            styles=math.sqrt(1 - self.OFFSET - self.CONTENT) * own,
            log_style=_log_weights(styles, self.STYLE_TAIL, generator),
            kappa=self.MEAN_COSINE * (self.dim - self.MEAN_COSINE**2) / (1 - self.MEAN_COSINE**2),
            levels=levels,
            log_level=(shares / shares.sum()).log(),
            wrong=self.wrong if levels.shape[1] > 1 else 0.0,
        )

    def _nodes(self, groups: int, generator: torch.Generator) -> list[Tensor]:
        """Unit vectors [., axes] of the scenes, the concepts and the groups; each resembles the one it belongs to."""
        levels = [self._directions(groups, generator)]
        for like, each in ((self.LIKE_GROUP, self.PER_GROUP), (self.LIKE_CONCEPT, self.PER_CONCEPT)):
            parent = levels[0].repeat_interleave(each, 0)
            own = self._directions(len(parent), generator)
            levels.insert(0, normalize(like * parent + math.sqrt(1 - like**2) * own))
        return levels

    def _directions(self, n: int, generator: torch.Generator) -> Tensor:
        """Draws unit vectors [n, axes] whose coordinates' variances are a power law."""
        axes = (self.dim - 2) // 2
        decay = torch.arange(1, axes + 1, dtype=torch.float64, device="cpu") ** (-self.DECAY / 2)
        return normalize(decay * _normal(n, axes, generator))

    def _basis(self, generator: torch.Generator) -> Tensor:
        """Draws orthonormal rows [dim, dim]; the first two have a large coordinate each."""
        basis = _normal(self.dim, self.dim, generator)
        for axis in range(2):
            basis[:, axis] *= math.sqrt(1 - self.ROGUE**2) / basis[:, axis].norm()
            basis[axis, axis] = self.ROGUE
        q, r = torch.linalg.qr(basis)
        return (q * r.diagonal().sign()).T.contiguous()

    def sample(
        self, n: int, *, generator: torch.Generator | None = None, concepts: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draws `n` pairs: (image [n, d], text [n, d], concept [n]), float32 and int64. `concepts` [k] are the numbers
        of the concepts to draw from, by default the known ones."""
        drawn = self.sample_captioned(n, 1, generator=generator, concepts=concepts)
        return drawn.image, drawn.text, self.concept[drawn.scene]

    def sample_captioned(
        self,
        n: int,
        captions: int = 5,
        *,
        generator: torch.Generator | None = None,
        concepts: Tensor | None = None,
    ) -> Captioned:
        """Draws `n` images and `captions` captions of each. `concepts` as in `sample`."""
        pool = self._pool(n, generator, concepts, len(self.concept) // self.PER_CONCEPT)
        index = torch.arange(n, device="cpu").repeat_interleave(checks.integer(captions, "captions", 1))
        among = torch.isin(self.concept, pool)
        scene = _choose(self.log_weight.masked_fill(~among, -math.inf), n, generator)
        wrong = torch.rand(len(index), generator=generator, dtype=torch.float64, device="cpu") < self.wrong
        other = self._scenes[_choose(self._log_scene, len(index), generator)]
        level = _choose(self._text.log_level, len(index), generator)
        node = self._text.levels[torch.where(wrong, other, scene[index]), level]
        image, text = self._image.sample(scene, generator), self._text.sample(node, generator)
        return Captioned(image.float(), text.float(), index, scene, level, wrong)

    def log_image(self, image: Tensor) -> Tensor:
        """log p(image): [B]."""
        self._check_rows(image=image)
        return _by_parts(lambda part: self._evidence(self._image, part)[1], image)

    def log_text(self, text: Tensor) -> Tensor:
        """log p(text): [B]."""
        self._check_rows(text=text)
        return _by_parts(lambda part: self._evidence(self._text, part)[1], text)

    def log_joint(self, image: Tensor, text: Tensor) -> Tensor:
        """log p(image, text): [B]."""
        self._check_rows(image=image, text=text)

        def log_joint(image: Tensor, text: Tensor) -> Tensor:
            (by_image, log_image), (by_text, log_text) = (
                self._evidence(stream, rows) for stream, rows in ((self._image, image), (self._text, text))
            )
            return (self._log_scene + by_image + by_text).logsumexp(1) + log_image + log_text

        return _by_parts(log_joint, image, text)

    def _evidence(self, stream: _Stream, rows: Tensor) -> tuple[Tensor, Tensor]:
        """log p(row | scene) - log p(row) for the known scenes, [B, S], and log p(row), [B]."""
        return stream.evidence(rows, self._scenes, self._log_scene)

    def _gallery_pmi(self, queries: Tensor, gallery: Tensor, asked: Direction, groups: Tensor | None) -> Tensor:
        given, items = (
            _by_parts(lambda part, stream=stream: self._evidence(stream, part)[0], rows)
            for stream, rows in zip(
                (asked.queries(self._image, self._text), asked.items(self._image, self._text)), (queries, gallery)
            )
        )
        if groups is not None:
            items = _summed(items, groups)
            items = items - (self._log_scene + items).logsumexp(1, keepdim=True)
        return _log_product(self._log_scene + given, items)


def _by_parts(function: Callable[..., Tensor], *rows: Tensor) -> Tensor:
    """The results of a function of equally many rows, computed a part at a time to save memory."""
    return torch.cat([function(*part) for part in zip(*(x.split(PART) for x in rows))])


def _summed(x: Tensor, groups: Tensor) -> Tensor:
    """Sums [G, S] of the rows of `x` [N, S] that belong to each group."""
    count = int(groups.max()) + 1 if len(groups) else 0
    return torch.zeros(count, x.shape[1], dtype=x.dtype, device=x.device).index_add(0, groups.long(), x)


def _normal(n: int, d: int, generator: torch.Generator) -> Tensor:
    return torch.randn(n, d, generator=generator, dtype=torch.float64, device="cpu")


def _turned(a: Tensor, b: Tensor, angle: float) -> tuple[Tensor, Tensor]:
    """The rows of `a` turned by the angle towards those of `b`, and those of `b` turned with them."""
    cos, sin = math.cos(angle), math.sin(angle)
    return cos * a + sin * b, cos * b - sin * a


def _log_weights(n: int, tail: float, generator: torch.Generator) -> Tensor:
    """Logarithms [n] of random log-normal probabilities; `tail` is the standard deviation of their logarithms."""
    return (tail * _normal(1, n, generator)).squeeze(0).log_softmax(0)


def _choose(log_weight: Tensor, n: int, generator: torch.Generator | None) -> Tensor:
    """Draws `n` numbers, each with a probability proportional to exp(log_weight)."""
    if n == 0:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    return torch.multinomial(log_weight.softmax(0), n, replacement=True, generator=generator)


def _log_product(a: Tensor, b: Tensor) -> Tensor:
    """log(exp(a) @ exp(b)^T), [Q, N], of a [Q, S] and b [N, S]. A product of matrices gives it, except for entries so
    small that terms may have vanished, which are computed one by one."""
    top_a, top_b = a.amax(1, keepdim=True), b.amax(1, keepdim=True)
    product = torch.exp(a - top_a) @ torch.exp(b - top_b).T
    log_product = product.log() + top_a + top_b.T
    for entries in (product < LEAST_PRODUCT).nonzero().split(PART):
        row, column = entries.T
        log_product[row, column] = (a[row] + b[column]).logsumexp(1)
    return log_product
