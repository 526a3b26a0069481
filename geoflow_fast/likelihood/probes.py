"""Random probes of the divergence.

For a random vector e whose second moment is the tangent projection, the mean of e^T J e is the trace of J over the
tangent space (Hutchinson). The noise of one probe is that of the anisotropic part of J: a fixed norm makes the
isotropic part exact, and a probe of size one along a dominant eigenvector makes that one's share exact too. Probes are
computed from a hash of seed, row, draw and stream, so they do not depend on batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from geoflow_fast.geometry import inner
from geoflow_fast.likelihood.settings import DensitySettings
from geoflow_fast.manifolds import Manifold

# Constants of splitmix64, whose outputs pass the usual test batteries, as signed 64-bit integers: these wrap as
# unsigned ones do.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
_LOW = 2**32 - 1


class Probes:
    """Probes of the kind that `settings` name, for rows with the numbers `rows` [B], or [1] if all share the same ones.

    "gaussian": tangent, rescaled to the norm sqrt(d - 1). "aligned": the same, but of size one along a direction in
    which the Jacobian was seen to act most in earlier draws (see `learn`), and uniform in the rest. That direction is
    settled before the draw, so the second moment is still the projection. "rademacher": random signs, projected. If
    orthogonal to "steps", a probe is orthogonal to those of earlier draws, in frames of up to `FRAME` draws: along a
    path the Jacobian changes slowly, so that a new direction sees what the others have not. If orthogonal to "probes",
    the K probes of a draw are orthogonal to each other. For exact divergences the probes are all tangent directions,
    whose forms add up to the trace. `seed` is an integer, or a 0-d tensor on the device.
    """

    FRAME = 32
    MEMORY = 0.8
    """What the direction of aligned probes keeps of itself from draw to draw."""
    CLEAR = 1e-3
    """Length that a unit direction must have left in the tangent space to be followed there."""

    def __init__(self, seed: int | Tensor, rows: Tensor, settings: DensitySettings, manifold: Manifold) -> None:
        self.seed, self.rows, self.settings, self.manifold = seed, rows, settings, manifold
        self._drawn: dict[int, tuple[int, Tensor]] = {}  # by stream: the last draw's number and directions
        self._frames: dict[int, list[Tensor]] = {0: [], 1: []}
        self._seen: dict[int, Tensor] = {}
        self._leads: dict[int, Tensor] = {}

    def draw(self, number: int, stream: int, x: Tensor) -> Tensor:
        """Probes [K, B, d] of draw `number` at the points `x` [B, d] of a stream, tangent there. Draws must be asked
        for in order, but the last one may be asked for again, at other points."""
        if self.settings.exact:
            basis = torch.eye(x.shape[1], dtype=x.dtype, device=x.device).unsqueeze(1)
            return self.manifold.project(x, basis.expand(-1, len(x), -1))
        e = self.manifold.project(x, self._directions(number, stream, x).expand(-1, len(x), -1))
        if self.settings.orthogonal_to == "probes":
            e = torch.stack(_orthogonalise(list(e), []))
        if self.settings.probe_kind == "rademacher":
            return e
        freedom = self.manifold.freedom(x.shape[1])
        plain = functional.normalize(e, dim=-1) * math.sqrt(freedom)
        if stream not in self._leads:
            return plain
        lead = self.manifold.project(x, self._leads[stream])
        length = torch.linalg.vector_norm(lead, dim=-1, keepdim=True)
        lead = lead / length.clamp_min(self.CLEAR)
        rest = functional.normalize(e - inner(lead, e) * lead, dim=-1) * math.sqrt(freedom - 1)
        return torch.where(length > self.CLEAR, lead + rest, plain)

    def learn(self, stream: int, x: Tensor, e: Tensor, product: Tensor) -> None:
        """Takes into account, for later draws of aligned probes, what the Jacobian J made of the probes `e` [K, B, d]
        at `x` [B, d].

        Without its part along e, which an isotropic Jacobian would also have, J e leans towards the eigenvectors of the
        largest eigenvalues. This is a step of power iteration, averaged over probes and draws, whose signs are
        arbitrary.
        """
        product = self.manifold.project(x, product)
        r = product - inner(e, product) / inner(e, e) * e
        before = self._seen.get(stream)
        along = functional.normalize(r.select(0, 0) if before is None else before, dim=-1)
        new = (r * inner(functional.normalize(r, dim=-1), along)).mean(0)
        self._seen[stream] = new if before is None else torch.add(new, before, alpha=self.MEMORY)

    def _directions(self, number: int, stream: int, like: Tensor) -> Tensor:
        """Directions [K, B, d] of a draw before they are projected at a point; all solves share them."""
        if stream in self._drawn and self._drawn[stream][0] == number:
            return self._drawn[stream][1]
        e = self._normals(number, stream, like.shape[1]).to(like.dtype)
        if self.settings.probe_kind == "rademacher":
            e = torch.where(e < 0, -1.0, 1.0).to(like.dtype)
        if self.settings.orthogonal_to == "steps":
            frame = self._frames[stream]
            if len(frame) == min(self.FRAME, like.shape[1]):
                frame.clear()
            (e,) = _orthogonalise([e], frame)
            frame.append(functional.normalize(e, dim=-1))
        if stream in self._seen:  # with the sign that the probe has along it, so that every solve uses the same one
            lead = functional.normalize(self._seen[stream], dim=-1)
            self._leads[stream] = lead * inner(lead, e).sign()
        self._drawn[stream] = number, e
        return e

    def _normals(self, number: int, stream: int, d: int) -> Tensor:
        """Standard normals [K, B, d], float32, by Box-Muller from hashes of seed, row, draw, stream and coordinate."""
        lanes = torch.arange(self.settings.n_probes, device=self.rows.device) * 2 + stream + (number << 32)
        keys = _mix(_mix(self.rows * _GOLDEN + self.seed) + lanes.unsqueeze(1) * _GOLDEN)
        half = torch.arange(1, (d + 1) // 2 + 1, device=self.rows.device)
        bits = _mix(keys.unsqueeze(-1) + half * _GOLDEN)
        uniform = (((bits >> 32) & _LOW).float() + 0.5) * 2.0**-32
        radius = torch.sqrt(-2 * torch.log(uniform))
        turn = (bits & _LOW).float() * (2 * math.pi * 2.0**-32)
        return torch.cat((radius * turn.cos(), radius * turn.sin()), dim=-1).narrow(-1, 0, d)


def _mix(z: Tensor) -> Tensor:
    """Finaliser of splitmix64 on int64; the masks turn arithmetic shifts into logical ones."""
    z = (z ^ ((z >> 30) & (2**34 - 1))) * _FIRST
    z = (z ^ ((z >> 27) & (2**37 - 1))) * _SECOND
    return z ^ ((z >> 31) & (2**33 - 1))


def _orthogonalise(vectors: list[Tensor], frame: Sequence[Tensor]) -> list[Tensor]:
    """Makes the vectors [..., d] orthogonal to the unit vectors of `frame` and to each other. This is done twice when
    little is left of a vector, because once leaves rounding behind."""
    frame, done = list(frame), []
    for vector in vectors:
        for _ in range(1 if 2 * len(frame) < vector.shape[-1] else 2):
            for other in frame:
                vector = vector - inner(other, vector) * other
        frame.append(functional.normalize(vector, dim=-1))
        done.append(vector)
    return done
