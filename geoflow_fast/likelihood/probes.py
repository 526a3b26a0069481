"""Random probes of the divergence."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from geoflow_fast.geometry import dot, project_tangent

PROBES = ("aligned", "gaussian", "rademacher")


ORTHOGONAL = ("steps", "probes", "none")


STREAMS = ("image", "text")


# splitmix64, whose outputs pass the usual test batteries; as signed 64-bit integers, which wrap as unsigned ones do.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64


_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64


_LOW = 2**32 - 1


def _mix(z: Tensor) -> Tensor:
    """Finaliser of splitmix64 on int64; the masks make arithmetic shifts logical ones."""
    z = (z ^ ((z >> 30) & (2**34 - 1))) * _FIRST
    z = (z ^ ((z >> 27) & (2**37 - 1))) * _SECOND
    return z ^ ((z >> 31) & (2**33 - 1))


class Probes:
    """Probes as a function of seed, row, draw and stream, aligned ones of the path too; batches do not change them.

    `kind` "gaussian": tangent, rescaled to norm sqrt(d - 1), so exact on the isotropic part of the trace. "aligned":
    the same, but of size one along a direction in which the Jacobian was seen to act most in the draws before (see
    `learn`), which takes that eigenvalue out of the noise; the rest is uniform. That direction being settled before the
    draw, the second moment stays the projection. "rademacher": random signs, projected. `orthogonal` "steps": a probe
    is orthogonal to those of the draws before it, in frames of up to `FRAME` draws; along a path the Jacobian changes
    slowly, so what one direction has seen the next need not. "probes": the K probes of a draw are orthogonal to each
    other. `exact`: all tangent directions, whose forms add up to the trace. `rows` [B]: numbers of the rows, or [1] for
    all. `seed`: int, or 0-d on the device.
    """

    FRAME = 32
    MEMORY = 0.8
    """What the direction of aligned probes keeps of itself from draw to draw."""
    CLEAR = 1e-3
    """Length that a unit direction must have left in the tangent space to be followed there."""

    def __init__(
        self, seed: int | Tensor, rows: Tensor, count: int, kind: str, orthogonal: str, exact: bool, geometry: str
    ) -> None:
        self.seed, self.rows, self.count = seed, rows, count
        self.kind, self.orthogonal, self.exact, self.geometry = kind, orthogonal, exact, geometry
        self._drawn: dict[int, tuple[int, Tensor]] = {}
        self._frames: dict[int, list[Tensor]] = {0: [], 1: []}
        self._seen: dict[int, Tensor] = {}
        self._leads: dict[int, Tensor] = {}

    def draw(self, number: int, stream: int, x: Tensor) -> Tensor:
        """Probes [K, B, d] of draw `number` for the points `x` [B, d] of a stream, tangent on the sphere. Draws are
        asked for in order; one may be asked for again, at other points."""
        if self.exact:
            basis = torch.eye(x.shape[1], dtype=x.dtype, device=x.device).unsqueeze(1)
            return project_tangent(x, basis) if self.geometry == "sphere" else basis.expand(-1, len(x), -1)
        e = self._directions(number, stream, x).expand(-1, len(x), -1)
        if self.geometry == "sphere":
            e = project_tangent(x, e)
        if self.orthogonal == "probes":
            e = torch.stack(_orthogonalise(list(e), []))
        if self.kind == "rademacher":
            return e
        freedom = x.shape[1] - (self.geometry == "sphere")
        plain = torch.nn.functional.normalize(e, dim=-1) * math.sqrt(freedom)
        if stream not in self._leads:
            return plain
        lead = self._leads[stream]
        if self.geometry == "sphere":
            lead = project_tangent(x, lead)
        length = torch.linalg.vector_norm(lead, dim=-1, keepdim=True)
        lead = lead / length.clamp_min(self.CLEAR)
        rest = torch.nn.functional.normalize(e - dot(lead, e) * lead, dim=-1) * math.sqrt(freedom - 1)
        return torch.where(length > self.CLEAR, lead + rest, plain)

    def learn(self, stream: int, x: Tensor, e: Tensor, product: Tensor) -> None:
        """Takes what the Jacobian made of the probes `e` [K, B, d] at `x` [B, d] into account in later draws.

        Without its part along e, which the isotropic Jacobian has too, J e leans towards the eigenvectors of the
        largest eigenvalues: a step of power iteration, averaged over probes and draws, whose signs are arbitrary.
        """
        if self.kind != "aligned":
            return
        if self.geometry == "sphere":
            product = project_tangent(x, product)
        r = product - dot(e, product) / dot(e, e) * e
        before = self._seen.get(stream)
        along = torch.nn.functional.normalize(r.select(0, 0) if before is None else before, dim=-1)
        new = (r * dot(torch.nn.functional.normalize(r, dim=-1), along)).mean(0)
        self._seen[stream] = new if before is None else torch.add(new, before, alpha=self.MEMORY)

    def _directions(self, number: int, stream: int, like: Tensor) -> Tensor:
        """Directions [K, B, d] of a draw before they meet a point: the same for all solves."""
        if stream in self._drawn and self._drawn[stream][0] == number:
            return self._drawn[stream][1]
        e = self._normals(number, stream, like.shape[1]).to(like.dtype)
        if self.kind == "rademacher":
            e = torch.where(e < 0, -1.0, 1.0).to(like.dtype)
        if self.orthogonal == "steps":
            frame = self._frames[stream]
            if len(frame) == min(self.FRAME, like.shape[1]):
                frame.clear()
            (e,) = _orthogonalise([e], frame)
            frame.append(torch.nn.functional.normalize(e, dim=-1))
        if stream in self._seen:  # with the sign that the probe has along it, at whatever points
            lead = torch.nn.functional.normalize(self._seen[stream], dim=-1)
            self._leads[stream] = lead * dot(lead, e).sign()
        self._drawn[stream] = number, e
        return e

    def _normals(self, number: int, stream: int, d: int) -> Tensor:
        """Standard normals [K, B, d], float32, by Box-Muller from a hash of their place."""
        lanes = torch.arange(self.count, device=self.rows.device) * 2 + stream + (number << 32)
        keys = _mix(_mix(self.rows * _GOLDEN + self.seed) + lanes.unsqueeze(1) * _GOLDEN)
        half = torch.arange(1, (d + 1) // 2 + 1, device=self.rows.device)
        bits = _mix(keys.unsqueeze(-1) + half * _GOLDEN)
        uniform = (((bits >> 32) & _LOW).float() + 0.5) * 2.0**-32
        radius = torch.sqrt(-2 * torch.log(uniform))
        turn = (bits & _LOW).float() * (2 * math.pi * 2.0**-32)
        return torch.cat((radius * turn.cos(), radius * turn.sin()), dim=-1).narrow(-1, 0, d)


def _orthogonalise(vectors: list[Tensor], frame: Sequence[Tensor]) -> list[Tensor]:
    """Vectors [..., d] made orthogonal to the unit vectors of `frame` and to those before them; twice when little is
    left of a vector then, because once leaves rounding behind."""
    frame, done = list(frame), []
    for vector in vectors:
        for _ in range(1 if 2 * len(frame) < vector.shape[-1] else 2):
            for other in frame:
                vector = vector - dot(other, vector) * other
        frame.append(torch.nn.functional.normalize(vector, dim=-1))
        done.append(vector)
    return done
