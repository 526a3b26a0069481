"""Log-densities by the reverse ODE and the epistemic score made of them (Sec. 4.2 and D of the paper).

log p(x_1) = log p_0(x_0) - integral of the divergence along the path that leads from x_1 at t = 1 back to x_0 at t = 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor

from geoflow_fast import checks
from geoflow_fast.divergence import ORTHOGONAL, PROBES, STREAMS, TANGENTS, Evaluator, Probes, evaluator_of
from geoflow_fast.forward_mode import GENERATED, ForwardMode, Solve
from geoflow_fast.geometry import DIRECTIONS, check_rows, log_area
from geoflow_fast.integrate import (
    Field,
    Points,
    Streams,
    Watch,
    count_of,
    eval_mode,
    evaluation_times,
    geometry_of,
    integrate,
    time_grid,
)
from geoflow_fast.model import GeoFlow

DIVERGENCES = ("hutchinson", "exact")
TYPICALITIES = ("density", "absolute")

PAPER_DENSITY: Mapping[str, Any] = MappingProxyType(
    {"n_steps": 50, "n_probes": 1, "solver": "euler", "probe": "rademacher", "tangents": "combined"}
)
"""The paper's settings, for `log_density(..., **PAPER_DENSITY)` and `epistemic(..., **PAPER_DENSITY)`."""

FAST_DENSITY: Mapping[str, Any] = MappingProxyType({"n_steps": 10, "n_probes": 1, "solver": "ab2", "grid": "early"})
"""Settings for ranking, cheaper than the defaults: steps are shorter where most of the noise arises, at the price of
more bias (on the concept world +.6 nat in the joint log-density, against +.1; see docs/likelihood.md)."""

MEMORY = {"cpu": 64 * 2**20, "cuda": 2**30}
"""Default memory budget of a network's activations, in bytes; on a CPU about what its last-level cache likes."""


@dataclass(frozen=True)
class DensitySettings:
    """How a log-density is estimated; `log_density` describes the fields."""

    n_steps: int = 10
    n_probes: int = 1
    solver: str = "midpoint"
    divergence: str = "hutchinson"
    probe: str | None = None
    redraw: bool = True
    orthogonal: str | None = None
    tangents: str = "separate"
    grid: str = "uniform"
    shared: bool = False

    def __post_init__(self) -> None:
        for count in ("n_steps", "n_probes"):  # plain integers, which go into files
            object.__setattr__(self, count, count_of(getattr(self, count), count))
        evaluation_times(time_grid(self.n_steps, kind=self.grid), self.solver)
        own = self.redraw and not self.shared  # otherwise there is nothing to learn from step to step
        if self.probe is None:
            aligned = own and self.orthogonal in (None, "none")
            object.__setattr__(self, "probe", "aligned" if aligned else "gaussian")
        choices = {"divergence": DIVERGENCES, "probe": PROBES, "tangents": TANGENTS}
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {known}, got {getattr(self, name)!r}")
        if self.orthogonal is None:
            object.__setattr__(self, "orthogonal", "steps" if self.probe == "gaussian" else "none")
        if self.orthogonal not in ORTHOGONAL:
            raise ValueError(f"orthogonal must be one of {ORTHOGONAL}, got {self.orthogonal!r}")
        if self.orthogonal != "none" and self.probe != "gaussian":
            raise ValueError(f"orthogonal={self.orthogonal!r} needs probe='gaussian', got {self.probe!r}")
        if self.probe == "aligned" and not own:
            raise ValueError("probe='aligned' follows the path of every row: it needs redraw=True and shared=False")

    @property
    def exact(self) -> bool:
        """Whether the trace is computed instead of estimated."""
        return self.divergence == "exact"

    @property
    def paired(self) -> bool:
        """Whether one tangent moves both streams of the joint solve."""
        return self.tangents != "separate" and not self.exact

    def correction(self, freedom: int) -> float:
        """Variance of the mean of K probes over that of their sample variance / K: below one for probes that are
        orthogonal, whose forms, adding up to the trace over a whole basis, have covariance -variance / (freedom - 1).
        """
        return 1 - self.n_probes / freedom if self.orthogonal == "probes" else 1.0


def log_density(
    field: Field,
    image: Tensor,
    text: Tensor,
    direction: str = "joint",
    n_steps: int = 10,
    n_probes: int = 1,
    solver: str = "midpoint",
    divergence: str = "hutchinson",
    generator: torch.Generator | None = None,
    return_stderr: bool = False,
    *,
    probe: str | None = None,
    redraw: bool = True,
    orthogonal: str | None = None,
    tangents: str = "separate",
    grid: str = "uniform",
    shared: bool = False,
    memory: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-density at the pairs (`image` [B, d_I], `text` [B, d_T]), unit rows: float64 [B], in nats.

    `direction="joint"`: log p(image, text); "i2t": log p(text | image); "t2i": log p(image | text). The ODE is solved
    from t=1 to t=0 in `n_steps` steps of `solver` ("euler", "midpoint", "rk4" or "ab2") on the time grid `grid`:
    "uniform", or with shorter steps near the noise ("early") or near the data ("late").

    `divergence="hutchinson"` estimates the divergence with the mean over `n_probes` random probes; "exact" needs one
    tangent per coordinate and is for small d. `probe`: "gaussian", of fixed norm in the tangent space; "aligned" (the
    default where applicable), which removes the noise along the direction in which the Jacobian acted most in earlier
    steps; or "rademacher", the paper's. `redraw`: draw new probes at every step, or keep them along the path.
    `orthogonal`, for Gaussian probes: orthogonal to those of earlier "steps" (the default; `n_probes` independent
    sets), to the other "probes" of the same step, or "none".

    `tangents`, for the joint direction: "separate" moves one stream at a time, which removes the Jacobian blocks
    between streams, the source of most of the noise; "combined" moves both, which costs less; "alternating" also moves
    both, but flips the text's sign at every other step, so that those blocks cancel between steps.

    `return_stderr` also returns the standard error [B] over the probes, of which there must be at least two. Probes
    depend on `generator` and the row, aligned ones on its path too; with `shared` they are the same for all rows, which
    makes differences between rows less noisy.

    A `GeoFlow` is evaluated in eval mode, as many rows at a time as fit into `memory` bytes; this does not change the
    result beyond rounding. With centring or principal components the density is that of the points in the flow's
    coordinates (`GeoFlow.to_flow`), not that of the embeddings.
    """
    if direction not in DIRECTIONS:
        raise ValueError(f"direction must be one of {DIRECTIONS}, got {direction!r}")
    settings = DensitySettings(n_steps, n_probes, solver, divergence, probe, redraw, orthogonal, tangents, grid, shared)
    _check_stderr(settings, return_stderr)
    _check_pairs(image, text)
    estimates = density_estimates(field, image, text, (direction,), settings, draw_seed(generator, image), memory)[0]
    if not return_stderr:
        return estimates.mean(0)
    return estimates.mean(0), _stderr(estimates, settings, max(_freedoms(field, image, text, (direction,))))


@dataclass(frozen=True)
class Epistemic:
    """Log-densities of B pairs and the epistemic score, each float64 [B] in nats; joint = image + text + pmi."""

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
    """Epistemic score (Eq. 7): -image - text; with absolute typicality the sum of the distances from the typical
    values."""
    stderr: Tensor | None = None
    """Standard error of -image - text over the probes, if requested."""

    def typical(self) -> tuple[float, float]:
        """Means of -log p(image) and of -log p(text). Those of training pairs are the argument `typical` of
        `epistemic`."""
        return float(-self.image.mean()), float(-self.text.mean())


def epistemic(
    field: Field,
    image: Tensor,
    text: Tensor,
    n_steps: int = 10,
    n_probes: int = 1,
    solver: str = "midpoint",
    divergence: str = "hutchinson",
    generator: torch.Generator | None = None,
    return_stderr: bool = False,
    *,
    typicality: str = "density",
    typical: tuple[float, float] | None = None,
    image_partners: Tensor | None = None,
    text_partners: Tensor | None = None,
    probe: str | None = None,
    redraw: bool = True,
    orthogonal: str | None = None,
    tangents: str = "separate",
    grid: str = "uniform",
    memory: int | None = None,
) -> Epistemic:
    """Epistemic score and log-densities of the pairs (`image` [B, d_I], `text` [B, d_T]), unit rows.

    The joint and both conditional ODEs are solved as one batch with the same probes, aligned ones following the joint
    solve. The settings of the solves are those of `log_density`.

    `typicality="density"` scores -log p(image) - log p(text). "absolute" scores |-log p - typical|, summed over both
    modalities, because a density higher than that of training pairs is unusual too; `typical` is `Epistemic.typical()`
    of training pairs.

    A marginal is computed together with a partner, the other side of the pair, and with finitely many steps depends on
    it a little. `text_partners`, [M, d_T] for all rows or [B, M, d_T], average log p(image) over the pair's own text
    and M more, at the cost of two solves each; `image_partners` do so for log p(text). The probes of the m-th partner
    depend on generator, row and m.
    """
    settings = DensitySettings(n_steps, n_probes, solver, divergence, probe, redraw, orthogonal, tangents, grid)
    _check_stderr(settings, return_stderr)
    _check_typical(typicality, typical)
    _check_pairs(image, text)
    partners = [_partners_of(field, (image, text)[s], x, s) for s, x in enumerate((image_partners, text_partners))]
    seed = draw_seed(generator, image)
    estimates = density_estimates(field, image, text, DIRECTIONS, settings, seed, memory)
    joint, i2t, t2i = estimates
    marginals = [[joint - i2t], [joint - t2i]]
    for stream, rows in enumerate(partners):
        for m, partner in enumerate(rows):
            pair, way = ((image, partner), "i2t") if stream == 1 else ((partner, text), "t2i")
            joint, conditional = density_estimates(field, *pair, ("joint", way), settings, seed + m + 1, memory)
            marginals[1 - stream].append(joint - conditional)
    of_image, of_text = (torch.stack(found).mean(0) for found in marginals)
    freedom = max(_freedoms(field, image, text, DIRECTIONS))
    spread = _stderr(of_image + of_text, settings, freedom) if return_stderr else None
    return chain_rule(estimates, (of_image, of_text), typical, spread)


def chain_rule(
    estimates: Tensor,
    marginals: tuple[Tensor, Tensor] | None = None,
    typical: tuple[float, float] | None = None,
    stderr: Tensor | None = None,
) -> Epistemic:
    """The decomposition from estimates [3, K, B] of the `DIRECTIONS`; `marginals` of image and text, [K, B] each, are
    those that follow from them if none better are given."""
    joint, i2t, t2i = estimates.mean(1)
    image, text = (joint - i2t, joint - t2i) if marginals is None else (x.mean(0) for x in marginals)
    score = -image - text
    if typical is not None:
        score = (-image - typical[0]).abs() + (-text - typical[1]).abs()
    return Epistemic(joint, i2t, t2i, image, text, joint - image - text, score, stderr)


def suggest_steps(
    field: Field,
    image: Tensor,
    text: Tensor,
    tolerance: float = 0.1,
    direction: str = "joint",
    solver: str = "midpoint",
    *,
    grid: str = "uniform",
    divergence: str = "hutchinson",
    n_probes: int = 1,
    generator: torch.Generator | None = None,
    max_steps: int = 512,
    memory: int | None = None,
) -> int:
    """Number of steps at which doubling it changes the log-density of these pilot pairs by at most `tolerance` nats.

    The change is the mean over the pairs of |log p(n) - log p(2n)|. Both use the same probes, kept along the path, so
    that only the discretisation differs. About a hundred pairs are enough. If `max_steps` steps do not reach the
    tolerance, a ValueError is raised.
    """
    if not tolerance > 0 or count_of(max_steps, "max_steps") < 2:
        raise ValueError(f"tolerance={tolerance} must be positive and max_steps={max_steps} at least 2")
    if direction not in DIRECTIONS:
        raise ValueError(f"direction must be one of {DIRECTIONS}, got {direction!r}")
    _check_pairs(image, text)
    seed = draw_seed(generator, image)
    steps, before, change = 2, None, math.inf
    while steps <= 2 * max_steps:
        settings = DensitySettings(steps, n_probes, solver, divergence, redraw=False, grid=grid)
        found = density_estimates(field, image, text, (direction,), settings, seed, memory)[0].mean(0)
        if before is not None:
            change = float((found - before).abs().mean())
            if change <= tolerance:
                return steps // 2
        steps, before = 2 * steps, found
    raise ValueError(f"doubling {steps // 4} steps of {solver} still moves the log-density by {change:.3g} nats")


def draw_seed(generator: torch.Generator | None, like: Tensor) -> int | Tensor:
    """Seed of the probes: a number from a generator on the CPU, a tensor that nobody waits for from one on a GPU."""
    device = like.device if generator is None else generator.device
    seed = torch.randint(2**62, (), generator=generator, device=device)
    return seed if seed.is_cuda else int(seed)


def density_estimates(
    field: Field,
    image: Tensor,
    text: Tensor,
    directions: Sequence[str],
    settings: DensitySettings,
    seed: int | Tensor,
    memory: int | None = None,
    first_row: int = 0,
    given_number: Tensor | None = None,
) -> Tensor:
    """Log-densities of all `directions`, one estimate per probe: [directions, K, B] float64.

    `first_row` is the number of the first pair: its probes are those it would have as row `first_row` of a larger call.
    `given_number` [B], of a single conditional direction: pairs of one number have one given point, which a network
    encodes once.
    """
    if memory is not None:
        memory = count_of(memory, "memory")
    _check_pairs(image, text)
    check_rows(image, "image")
    check_rows(text, "text")
    image, text = (_in_flow(field, x, stream, STREAMS[stream]) for stream, x in enumerate((image, text)))
    _check_freedom(settings, min(_freedoms(field, image, text, directions)))
    with eval_mode(field), torch.no_grad():
        network = once = None
        at_once = max(1, len(image))
        if isinstance(field, GeoFlow):
            field.check_points(image, text)
            times = evaluation_times(time_grid(settings.n_steps, kind=settings.grid, reverse=True), settings.solver)
            network = ForwardMode(field, directions, sorted(set(times)))
            at_once = _rows_at_once(field, directions, settings, len(image), memory)
            if given_number is not None:
                (given,) = {0, 1} - set(GENERATED[directions[0]])
                once = network.encode_once((image, text)[given], given, given_number)
        parts = []
        for number, pair in enumerate(zip(image.split(at_once), text.split(at_once))):
            points = [pair for _ in directions]
            first = first_row + number * at_once
            encoded = None if once is None else once[0][once[1][number * at_once :][:at_once]]
            evaluator = evaluator_of(field, network, directions, points, settings.exact, first, encoded)
            place = geometry_of(field), seed, first
            parts.append(_ReverseSolve(evaluator, directions, points, settings, *place).run())
    return torch.cat(parts, dim=-1)


def _rows_at_once(
    flow: GeoFlow, directions: Sequence[str], settings: DensitySettings, rows: int, memory: int | None
) -> int:
    """Rows of equal chunks whose buffers and probes fit into `memory` bytes."""

    def pair(direction: str) -> Solve:
        counts = [
            0 if stream not in GENERATED[direction] else d if settings.exact else settings.n_probes
            for stream, d in enumerate(flow.config.flow_dims)
        ]
        image, text = (
            (torch.empty(1, d, device="meta"), torch.empty(count, 1, d, device="meta"))
            for count, d in zip(counts, flow.config.flow_dims)
        )
        return Solve(direction, image, text, settings.paired and direction == "joint")

    like = next(flow.parameters())
    kept = min(Probes.FRAME, settings.n_steps) if settings.orthogonal == "steps" else 2
    probes = kept * settings.n_probes * sum(flow.config.flow_dims) * like.element_size()
    each = probes + ForwardMode.row_bytes(flow, [pair(direction) for direction in directions])
    most = max(1, (memory or MEMORY.get(like.device.type, MEMORY["cpu"])) // each)
    chunks = -(-rows // most)
    return max(1, -(-rows // max(1, chunks)))


class _ReverseSolve:
    """Follows the pairs of all directions from t=1 to t=0 and integrates their divergences on the way.

    `points` (image, text) of each direction are rows `first_row` and on of the probes of `seed`.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        directions: Sequence[str],
        points: Sequence[Streams],
        settings: DensitySettings,
        geometry: str,
        seed: int | Tensor,
        first_row: int,
    ) -> None:
        self.evaluator, self.points, self.settings, self.geometry = evaluator, points, settings, geometry
        self.moving = [(solve, stream) for solve, name in enumerate(directions) for stream in GENERATED[name]]
        rows = torch.arange(first_row, first_row + len(points[0][0]), device=points[0][0].device)
        own = torch.zeros_like(rows[:1]) if settings.shared else rows
        orthogonal = str(settings.orthogonal)
        self.probes = Probes(seed, own, settings.n_probes, str(settings.probe), orthogonal, settings.exact, geometry)
        self.leading = {stream: solve for solve, stream in reversed(self.moving)}  # of each stream, the first solve
        names = [f"{directions[solve]}: {STREAMS[stream]}" for solve, stream in self.moving]
        self.state = Watch(names, first_row)
        self.divergence = Watch([f"{name}: divergence" for name in directions], first_row)
        count = 1 if settings.exact else settings.n_probes
        self.integral = torch.zeros(len(points), count, len(rows), dtype=torch.float64, device=rows.device)
        self.drawn = 0

    def run(self) -> Tensor:
        """Estimates [directions, K, B]."""
        times = time_grid(self.settings.n_steps, kind=self.settings.grid, reverse=True)
        begin = tuple(self.points[solve][stream] for solve, stream in self.moving)
        end = integrate(self._rate, begin, times, solver=self.settings.solver, geometry=self.geometry, watch=self.state)
        self.divergence.close()
        of_solve = self.integral.unbind()
        for (solve, _), x in zip(self.moving, end):
            of_solve[solve].add_(_log_base(x, self.geometry))
        return self.integral

    def _rate(self, at: Points, t: float, weight: float) -> Points:
        """Velocities of the moving streams; divergences go into the integral by their weight."""
        sides = [list(pair) for pair in self.points]
        for (solve, stream), x in zip(self.moving, at):
            sides[solve][stream] = x
        pairs: list[Streams] = [(image, text) for image, text in sides]
        tangents = None if weight == 0 else self._draw(pairs)
        velocities, trace, products = self.evaluator(pairs, t, tangents, self.settings.paired)
        if trace is not None and tangents is not None:
            if not self.settings.exact:
                for stream, solve in self.leading.items():
                    self.probes.learn(stream, pairs[solve][stream], tangents[solve][stream], products[solve][stream])
            self.integral.add_(trace, alpha=weight)
            step = self.drawn // (4 if self.settings.solver == "rk4" else 1)
            self.divergence.see(tuple(trace.transpose(1, 2)), step, t, self.settings.solver)
            self.drawn += 1
        return tuple(velocities[solve][stream] for solve, stream in self.moving)

    def _draw(self, pairs: Sequence[Streams]) -> list[Streams]:
        """Probes at the points of each solve; a given stream has none."""
        alternating = self.settings.tangents == "alternating"
        number = self.drawn // 2 if alternating else self.drawn
        found = [[x.new_empty(0, *x.shape) for x in pair] for pair in pairs]
        for solve, stream in self.moving:
            e = self.probes.draw(number if self.settings.redraw else 0, stream, pairs[solve][stream])
            found[solve][stream] = -e if alternating and stream == 1 and self.drawn % 2 else e
        return [(image, text) for image, text in found]


def _partners_of(field: Field, own: Tensor, partners: Tensor | None, stream: int) -> tuple[Tensor, ...]:
    """The M partners [B, d] of the rows `own` [B, d] of a stream, given as [M, d] or [B, M, d], checked."""
    if partners is None:
        return ()
    name = f"{STREAMS[stream]}_partners"
    if not isinstance(partners, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(partners).__name__}")
    rows, width = own.shape
    if (
        partners.shape[-1:] != (width,)
        or partners.shape[-2:-1] in {(), (0,)}
        or partners.shape[:-2] not in {(), (rows,)}
    ):
        raise ValueError(f"{name} must be [M, {width}] or [{rows}, M, {width}], got {tuple(partners.shape)}")
    if partners.dtype != own.dtype or partners.device != own.device:
        raise ValueError(
            f"{name} is {partners.dtype} on {partners.device}, but {STREAMS[stream]} is {own.dtype} on {own.device}"
        )
    check_rows(partners, name)
    _in_flow(field, partners, stream, name)
    return partners.expand(rows, -1, -1).unbind(1)


def _in_flow(field: Field, x: Tensor, stream: int, name: str) -> Tensor:
    """Rows `x` [..., d] of a stream in the field's coordinates. Centring and projecting may leave nothing of a row: a
    ValueError names it."""
    if not isinstance(field, GeoFlow) or field.preprocess is None:
        return x
    moved = field.to_flow(**{STREAMS[stream]: x.flatten(0, -2)})[stream]
    found = cast(Tensor, moved).unflatten(0, x.shape[:-1])
    check_rows(found, f"{name} in the flow's coordinates")
    return found


def _check_pairs(image: Tensor, text: Tensor) -> None:
    for name, x in zip(STREAMS, (image, text)):
        checks.with_values(x, name)
    if image.dim() != 2 or text.dim() != 2 or len(image) != len(text):
        raise ValueError(
            f"image and text must be [B, d] with equal B, got {tuple(image.shape)} and {tuple(text.shape)}"
        )


def _check_typical(typicality: str, typical: tuple[float, float] | None) -> None:
    if typicality not in TYPICALITIES:
        raise ValueError(f"typicality must be one of {TYPICALITIES}, got {typicality!r}")
    if (typicality == "absolute") != (typical is not None):
        raise ValueError("typicality='absolute' and typical=(image, text) go together: see Epistemic.typical")
    if typical is not None and (len(typical) != 2 or not all(math.isfinite(value) for value in typical)):
        raise ValueError(f"typical must be two finite numbers, for image and text, got {typical!r}")


def _check_freedom(settings: DensitySettings, least: int) -> None:
    """There are only so many orthogonal probes."""
    if settings.orthogonal == "probes" and not settings.exact and settings.n_probes > least:
        raise ValueError(f"n_probes={settings.n_probes} orthogonal probes do not fit into {least} dimensions")


def _check_stderr(settings: DensitySettings, return_stderr: bool) -> None:
    if return_stderr and (settings.n_probes < 2 or settings.exact):
        raise ValueError("return_stderr needs divergence='hutchinson' and n_probes >= 2")


def _freedoms(field: Field, image: Tensor, text: Tensor, directions: Sequence[str]) -> list[int]:
    """Dimensions that the probes of the streams these directions generate can span."""
    widths = field.config.flow_dims if isinstance(field, GeoFlow) else (image.shape[1], text.shape[1])
    streams = {stream for direction in directions for stream in GENERATED[direction]}
    return [widths[stream] - (geometry_of(field) == "sphere") for stream in sorted(streams)]


def epistemic_stderr(estimates: Tensor, settings: DensitySettings, field: Field, image: Tensor, text: Tensor) -> Tensor:
    """Standard error [B] of the epistemic score from estimates [3, K, B] of the `DIRECTIONS`."""
    joint, i2t, t2i = estimates
    return _stderr(2 * joint - i2t - t2i, settings, max(_freedoms(field, image, text, DIRECTIONS)))


def _stderr(estimates: Tensor, settings: DensitySettings, freedom: int) -> Tensor:
    """Standard error [B] of the mean of the estimates [K, B]."""
    return estimates.std(0) * math.sqrt(settings.correction(freedom) / settings.n_probes)


def _log_base(x: Tensor, geometry: str) -> Tensor:
    """Log-density [B] of the base law at `x`: uniform on the sphere, or standard normal."""
    d = x.shape[1]
    if geometry == "sphere":
        return torch.full((len(x),), -log_area(d), dtype=torch.float64, device=x.device)
    return -0.5 * x.double().square().sum(1) - d / 2 * math.log(2 * math.pi)
