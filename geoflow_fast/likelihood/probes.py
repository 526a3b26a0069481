"""Random probes of the divergence.

For a random vector e whose second moment is the tangent projection, the mean of e^T J e is the trace of J over the
tangent space (Hutchinson). The noise of one probe is that of the anisotropic part of J: a fixed norm makes the
isotropic part exact, and a probe of size one along a dominant eigenvector makes that one's share exact too. Probes are
computed from a hash of seed, row, draw and stream, so they do not depend on batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from geoflow_fast.geometry import inner
from geoflow_fast.likelihood.settings import DensitySettings
from geoflow_fast.manifolds import Manifold
from geoflow_fast.ops import dispatch, triton_kernels
from geoflow_fast.ops.tangent_probes import align, hashed_normals, leading_part, learned_direction


class Probes:
    """Probes of the kind that `settings` name, for rows with the numbers `rows` [B], or [1] if all share the same ones.

    "gaussian": tangent, rescaled to the norm sqrt(d - 1). "aligned": the same, but of size one along a direction in
    which the Jacobian was seen to act most in earlier draws (see `learn`), and uniform in the rest. That direction is
    settled before the draw, so the second moment is still the projection. "rademacher": random signs, projected. If
    orthogonal to "steps", a probe is orthogonal to those of earlier draws, in frames of up to `FRAME` draws: along a
    path the Jacobian changes slowly, so that a new direction sees what the others have not. If orthogonal to "probes",
    the K probes of a draw are orthogonal to each other. For exact divergences the probes are all tangent directions,
    whose forms add up to the trace. `seed` is an integer, or a 0-d tensor on the device. `like`: some of the points, if
    kernels may draw and read the probes.
    """

    FRAME = 32

    def __init__(
        self,
        seed: int | Tensor,
        rows: Tensor,
        settings: DensitySettings,
        manifold: Manifold,
        like: Tensor | None = None,
    ) -> None:
        self.seed, self.rows, self.settings, self.manifold = seed, rows, settings, manifold
        self.fused = self._fused_passes(like)
        self._drawn: dict[int, tuple[int, Tensor]] = {}  # by stream: the last draw's number and directions
        self._frames: dict[int, list[Tensor]] = {0: [], 1: []}
        self._seen: dict[int, Tensor] = {}
        self._leads: dict[int, Tensor] = {}

    def draw(self, number: int, stream: int, x: Tensor) -> Tensor:
        """Probes [K, B, d] of draw `number` at the points `x` [B, d] of a stream, tangent there. Draws must be asked
        for in order, but the last one may be asked for again, at other points."""
        if self.fused is not None:
            draws = self.rows, self._seed_on(x.device), number, stream, self.settings.n_probes
            signs, freedom = self.settings.probe_kind == "rademacher", self.manifold.freedom(x.shape[1])
            e: Tensor = self.fused[0](x, *draws, signs, self._seen.get(stream), freedom)
            return e
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
        return align(e, plain, self.manifold.project(x, self._leads[stream]), freedom)

    def read(
        self,
        stream: int,
        x: Tensor,
        f: Tensor,
        e: Tensor,
        product: Tensor,
        integral: Tensor,
        weight: float,
        *,
        leads: bool,
    ) -> None:
        """Adds the weighted divergences that the probes give to `integral` [K, B] and, where it `leads`, learns from
        them, in one pass. For probes that are `fused`."""
        assert self.fused is not None
        freedom = self.manifold.freedom(x.shape[1])
        curvature = -float(freedom) if self.manifold.unit_norm else 0.0
        learns = leads and self.settings.probe_kind == "aligned"
        learned = self.fused[1](
            x, f, e, product, integral, weight, curvature, freedom, learns, self._seen.get(stream) if learns else None
        )
        if learns:
            self._seen[stream] = learned

    def _seed_on(self, device: torch.device) -> Tensor:
        """The seed as a tensor, for kernels."""
        if not isinstance(self.seed, Tensor):
            self.seed = torch.full((), self.seed, dtype=torch.int64, device=device)
        return self.seed

    def _fused_passes(self, like: Tensor | None) -> tuple[Callable[..., Any], Callable[..., Any]] | None:
        """The kernels that draw and read probes of these settings in one pass each, if there are any for tensors like
        this one."""
        settings = self.settings
        plain = settings.exact or settings.shared or settings.orthogonal_to != "none" or not settings.redraw
        if (
            plain
            or like is None
            or not like.is_cuda
            or like.dtype != torch.float32
            or triton_kernels.missing() is not None
        ):
            return None
        draw, read = (dispatch.choose(name, like, "auto", (like,)) for name in ("tangent_probes", "probe_traces"))
        return draw, read

    def learn(self, stream: int, x: Tensor, e: Tensor, product: Tensor) -> None:
        """Takes into account, for later draws of aligned probes, what the Jacobian J made of the probes `e` [K, B, d]
        at `x` [B, d].

        Without its part along e, which an isotropic Jacobian would also have, J e leans towards the eigenvectors of the
        largest eigenvalues. This is a step of power iteration, averaged over probes and draws, whose signs are
        arbitrary.
        """
        self._seen[stream] = learned_direction(e, self.manifold.project(x, product), self._seen.get(stream))

    def _directions(self, number: int, stream: int, like: Tensor) -> Tensor:
        """Directions [K, B, d] of a draw before they are projected at a point; all solves share them."""
        if stream in self._drawn and self._drawn[stream][0] == number:
            return self._drawn[stream][1]
        normals = hashed_normals(self.rows, self.seed, number, stream, self.settings.n_probes, like.shape[1])
        e = normals.to(like.dtype)
        if self.settings.probe_kind == "rademacher":
            e = torch.where(e < 0, -1.0, 1.0).to(like.dtype)
        if self.settings.orthogonal_to == "steps":
            frame = self._frames[stream]
            if len(frame) == min(self.FRAME, like.shape[1]):
                frame.clear()
            (e,) = _orthogonalise([e], frame)
            frame.append(functional.normalize(e, dim=-1))
        if stream in self._seen:  # with the sign that the probe has along it, so that every solve uses the same one
            self._leads[stream] = leading_part(self._seen[stream], e)
        self._drawn[stream] = number, e
        return e


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
