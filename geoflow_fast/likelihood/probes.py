"""Random probes of the divergence.

For a random vector e whose second moment is the tangent projection, the mean of e^T J e is the trace of J over the
tangent space (Hutchinson). The noise of one probe is that of the anisotropic part of J: a fixed norm makes the
isotropic part exact, and a probe of size one along a dominant eigenvector makes that one's share exact too. Probes are
computed from a hash of seed, row, draw and stream, so they do not depend on batches.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from geoflow_fast.geometry import inner
from geoflow_fast.likelihood.settings import DensitySettings
from geoflow_fast.manifolds import Sphere
from geoflow_fast.ops import dispatch
from geoflow_fast.ops.tangent_probes import hashed_normals, shaped_probes


class Probes:
    """Probes of the kind that `settings` name, for rows with the numbers `rows` [B].

    "aligned": tangent, rescaled to the norm sqrt(d - 1), and of size one along a direction in which the Jacobian was
    seen to act most in earlier draws (see `read`), uniform in the rest. That direction is settled before the draw, so
    the second moment is still the projection. Probes that all rows share do not follow the path of a row: they are
    orthogonal to those of earlier draws instead, in frames of up to `FRAME` draws, since along a path the Jacobian
    changes slowly and a new direction sees what the others have not. "rademacher": random signs, projected. For exact
    divergences the probes are all tangent directions, whose forms add up to the trace. `seed` is an integer, or a 0-d
    tensor on the device.
    """

    FRAME = 32

    def __init__(self, seed: int | Tensor, rows: Tensor, settings: DensitySettings, manifold: Sphere) -> None:
        self.seed, self.settings, self.manifold = seed, settings, manifold
        self.rows = torch.zeros_like(rows[:1]) if settings.shared else rows
        self.signs = settings.probe == "rademacher"
        self._drawn: dict[int, tuple[int, Tensor]] = {}  # by stream: the last draw's number and normals
        self._frames: dict[int, list[Tensor]] = {0: [], 1: []}
        self._seen: dict[int, Tensor] = {}

    def draw(self, number: int, stream: int, x: Tensor) -> Tensor:
        """Probes [K, B, d] of draw `number` at the points `x` [B, d] of a stream, tangent there. Draws must be asked
        for in order, but the last one may be asked for again, at other points."""
        if self.settings.exact:
            basis = torch.eye(x.shape[1], dtype=x.dtype, device=x.device).unsqueeze(1)
            return self.manifold.project(x, basis.expand(-1, len(x), -1))
        number = number if self.settings.redraw else 0
        freedom, seen = self.manifold.tangent_dim(x.shape[1]), self._seen.get(stream)
        if x.is_cuda and not self.settings.shared:
            draws = self.rows, self._seed_on(x.device), number, stream, self.settings.n_probes
            e: Tensor = dispatch.choose("tangent_probes", x, "auto", (x,))(x, *draws, self.signs, seen, freedom)
            return e
        return shaped_probes(x, self._normals(number, stream, x), self.signs, seen, freedom)

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
        curved: bool,
        leads: bool,
    ) -> None:
        """Adds the weighted divergences that the probes `e` [K, B, d] of a stream give to `integral` [K, B], float64:
        e^T product, where `product` is what the Jacobian made of them at the points `x` [B, d], and the curvature term
        of the velocities `f` if they are `curved`, that is, not yet tangent. For exact divergences there is one sum.

        Where a stream `leads`, aligned probes of later draws learn from it. Without its part along e, which an
        isotropic Jacobian would also have, J e leans towards the eigenvectors of the largest eigenvalues. This is a
        step of power iteration, averaged over probes and draws, whose signs are arbitrary.
        """
        freedom = self.manifold.tangent_dim(x.shape[1])
        curvature = -float(freedom) if curved and self.manifold.unit_norm else 0.0
        if self.settings.exact:
            trace = (product.double() * e.double()).sum((0, -1)) + curvature * (x.double() * f.double()).sum(-1)
            integral.add_(trace, alpha=weight)
            return
        learns = leads and self.settings.learns
        seen = self._seen.get(stream) if learns else None
        add = dispatch.choose("probe_traces", x, "auto", (x,))
        learned = add(x, f, e, product, integral, weight, curvature, freedom, learns, seen)
        if learns:
            self._seen[stream] = learned

    def _seed_on(self, device: torch.device) -> Tensor:
        """The seed as a tensor, for kernels."""
        if not isinstance(self.seed, Tensor):
            self.seed = torch.full((), self.seed, dtype=torch.int64, device=device)
        return self.seed

    def _normals(self, number: int, stream: int, like: Tensor) -> Tensor:
        """Normals [K, B or 1, d] of a draw, which all solves share; those of a frame are orthogonal to each other."""
        if stream in self._drawn and self._drawn[stream][0] == number:
            return self._drawn[stream][1]
        normals = hashed_normals(self.rows, self.seed, number, stream, self.settings.n_probes, like.shape[1])
        e = normals.to(like.dtype)
        if self.settings.shared and not self.signs:
            frame = self._frames[stream]
            if len(frame) == min(self.FRAME, like.shape[1]):
                frame.clear()
            # Taken away twice where little is left of it, because once leaves rounding behind.
            for _ in range(1 if 2 * len(frame) < like.shape[1] else 2):
                for other in frame:
                    e = e - inner(other, e) * other
            frame.append(functional.normalize(e, dim=-1))
        self._drawn[stream] = number, e
        return e
