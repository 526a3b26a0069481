"""Synthetic data whose densities are known: velocity fields with closed-form densities, and a world of concepts to
train on.

All are made of one distribution on the sphere, here called a bump. The field v(x) = c (mu - <mu, x> x), followed for
unit time, carries the uniform distribution to log p(y) = -log_area(d) - (d-1) log(cosh c - <mu, y> sinh c), which is
concentrated around mu, the more so the larger the strength c.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from geoflow_fast.directions import STREAMS, Direction
from geoflow_fast.geometry import UNIT_TOLERANCE, check_rows, eps, inner, log_area
from geoflow_fast.noise import sample_uniform
from geoflow_fast.runtime import checks

SHARPEST = 40.0
"""Largest strength of a bump: beyond it exp(-2 c) vanishes in float32."""


def log_bump(cosine: Tensor, c: Tensor | float, d: int) -> Tensor:
    """Log-density of a bump of strength `c` in R^d, at points whose cosine with its centre is `cosine`."""
    c = torch.as_tensor(c, dtype=cosine.dtype, device=cosine.device)
    # This is cosh c - cosine sinh c with the larger exponential factored out: computed directly, the difference would
    # lose its digits for sharp bumps. A cosine beyond 1 is due to rounding.
    along, strength = cosine.clamp(-1, 1) * c.sign(), c.abs()
    return -log_area(d) - (d - 1) * (strength + torch.log(((1 - along) + torch.exp(-2 * strength) * (1 + along)) / 2))


def sample_bump(centre: Tensor, c: Tensor | float, generator: torch.Generator | None = None) -> Tensor:
    """Draws one point from the bump of strength `c` (float or [n]) around each row of `centre` [n, d].

    The samples are exact: the flow carries a uniform point in such a way that atanh<mu, x> grows by c, while the part
    orthogonal to mu keeps its direction.
    """
    n, d = centre.shape
    start = sample_uniform(n, d, generator=generator, dtype=centre.dtype)
    before = inner(start, centre)
    strength = torch.as_tensor(c, dtype=centre.dtype, device=centre.device).reshape(-1, 1)
    after = torch.tanh(torch.atanh(before) + strength)
    sideways = start - before * centre
    return after * centre + torch.sqrt((1 - after.square()) / (1 - before.square())) * sideways


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


class ConceptWorld:
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
        checks.integer(n, "n")
        if generator is not None and not isinstance(generator, torch.Generator):
            raise TypeError(f"generator must be a torch.Generator, got {type(generator).__name__}")
        pool = self.known if concepts is None else checks.indices(concepts, "concepts", len(self.centres))
        if pool.dim() != 1 or not len(pool):
            raise ValueError(f"concepts must be at least one number of a concept, [k], got {tuple(pool.shape)}")
        concept = pool[torch.randint(len(pool), (n,), generator=generator, device="cpu")]
        image = sample_bump(self.centres[concept], self.image_c, generator)
        text = sample_bump(image @ self.rotation.T, self.text_c[self.level[concept]], generator)
        return image.float(), text.float(), concept

    def _check_rows(self, **rows: Tensor) -> None:
        """Raises a ValueError unless the rows are equally many unit rows [B, dim] on the CPU."""
        for name, x in rows.items():
            if checks.with_values(x, name).dim() != 2 or x.shape[1] != self.dim:
                raise ValueError(f"{name} must be [B, {self.dim}], got {tuple(x.shape)}")
            if x.device != self.centres.device:
                raise ValueError(f"{name} is on {x.device}, but the world is on the CPU; pass {name}.cpu()")
            check_rows(x, name)
        if len({len(x) for x in rows.values()}) > 1:
            lengths = " and ".join(f"{name} has {len(x)}" for name, x in rows.items())
            raise ValueError(f"rows must be equally many, but {lengths}")

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

    def log_text_given_image(self, image: Tensor, text: Tensor) -> Tensor:
        """log p(text | image): [B]."""
        return self.log_joint(image, text) - self.log_image(image)

    def log_image_given_text(self, image: Tensor, text: Tensor) -> Tensor:
        """log p(image | text): [B]."""
        return self.log_joint(image, text) - self.log_text(text)

    def pmi(self, image: Tensor, text: Tensor) -> Tensor:
        """Pointwise mutual information log p(image, text) - log p(image) - log p(text): [B]."""
        return self.log_joint(image, text) - self.log_image(image) - self.log_text(text)

    def gallery_posterior(self, queries: Tensor, gallery: Tensor, direction: str) -> Tensor:
        """True probability [Q, N] that each gallery item is the query's partner: softmax of the PMI over the gallery.

        `direction="t2i"`: queries are texts and the gallery holds images; "i2t": the other way round.
        """
        asked = Direction.of(direction, conditional=True)
        self._check_rows(queries=queries)
        self._check_rows(gallery=gallery)
        rows = [torch.empty(0, len(gallery), dtype=torch.float64, device="cpu")]
        for query in queries:
            rows.append(self.pmi(*asked.pair(query.expand(len(gallery), -1), gallery)).unsqueeze(0))
        return torch.cat(rows).softmax(1)


def _blurred_bump(
    d: int, outer_c: float, inner_c: float, nodes: int = 128, degree: int = 48
) -> np.polynomial.Chebyshev:
    """The logarithm of the integral over x of bump(x; mu, outer_c) bump(u; x, inner_c), as a function of the cosine
    <mu, u>.

    With u = a mu + sqrt(1-a^2) n and x = s mu + sqrt(1-s^2) (w n + ...), <x, u> = a s + sqrt((1-a^2)(1-s^2)) w. Both s
    and w are cosines of angles, over which Gauss-Legendre converges exponentially; so does the Chebyshev series in a.
    """
    node, weight = np.polynomial.legendre.leggauss(nodes)
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

    return np.polynomial.Chebyshev.interpolate(log_integral, degree)
