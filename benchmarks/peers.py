"""Calls into other libraries, as their documentation has them. Imports are inside: none of them is required."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.twins import PlainFlow, Points, guided, torch_cost
from geoflow_fast.geometry import log_area, normalize


def pot_assign(points: Points, iterations: int, eps: float) -> Tensor:
    """POT in float32: row argmax of the plan."""
    ot = importlib.import_module("ot")
    cost = torch_cost(points).numpy()
    plan = ot.bregman.sinkhorn_knopp([], [], cost, eps, numItermax=iterations, stopThr=0.0, warn=False)
    return torch.from_numpy(plan.argmax(1))


def pot_plan(cost: Tensor, iterations: int, eps: float) -> Tensor:
    """POT's `ot.sinkhorn` in float32: the plan."""
    ot = importlib.import_module("ot")
    return torch.from_numpy(ot.sinkhorn([], [], cost.numpy(), eps, numItermax=iterations, stopThr=0.0, warn=False))


def geomloss_assign(points: Points, iterations: int, eps: float) -> Tensor:
    """geomloss, which anneals: it needs more iterations for the same plan and is given four times as many."""
    ot = importlib.import_module("geomloss.ot")
    cost = torch_cost(points)
    plan = ot.solve(cost, reg=eps, max_iter=4 * iterations)
    return cost.neg_().add_(plan.potential_b).argmax(1)


def flash_sinkhorn_assign(x: Tensor, y: Tensor, iterations: int, eps: float) -> Tensor:
    """flash-sinkhorn's reference in torch (its kernels need a GPU), squared chords: row argmax of the plan."""
    reference = importlib.import_module("flash_sinkhorn.testing.reference_sinkhorn")
    uniform = torch.full((len(x),), -math.log(len(x)))
    _, g = reference.sinkhorn_potentials_ref(x, y, uniform, uniform, eps, iterations)
    return reference.sqeuclid_cost(x, y).neg_().add_(g).argmax(1)


def torchcfm_draw(x: Tensor, y: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """torchcfm's sampler, squared chords: rows and columns drawn from the plan. It solves on the CPU in NumPy."""
    transport = importlib.import_module("torchcfm.optimal_transport")
    sampler = transport.OTPlanSampler("sinkhorn", reg=eps)
    rows, columns = sampler.sample_map(sampler.get_map(x, y), len(x))
    return torch.from_numpy(rows), torch.from_numpy(columns)


def flow_matching_interpolant(points: Points, t: Tensor, direction: Tensor) -> Points:
    """flow_matching's geodesic path, a stream at a time; given rows are set afterwards."""
    path = importlib.import_module("flow_matching.path")
    manifolds = importlib.import_module("flow_matching.utils.manifolds")
    schedule = importlib.import_module("flow_matching.path.scheduler").CondOTScheduler()
    geodesics = path.GeodesicProbPath(scheduler=schedule, manifold=manifolds.Sphere())
    parts = []
    for noise, data, given in ((points[0], points[2], direction == 1), (points[1], points[3], direction == 2)):
        drawn = geodesics.sample(x_0=noise, x_1=data, t=t)
        parts.append((torch.where(given[:, None], data, drawn.x_t), torch.where(given[:, None], 0, drawn.dx_t)))
    (image, v_image), (text, v_text) = parts
    return image, text, v_image, v_text


@torch.no_grad()
def flow_matching_samples(
    flow: PlainFlow, queries: Tensor, start: Tensor, noise: Tensor, steps: int, guidance: float
) -> Tensor:
    """flow_matching's solver on the sphere: Euler steps, each projected back."""
    solver = importlib.import_module("flow_matching.solver")
    manifolds = importlib.import_module("flow_matching.utils.manifolds")
    model = importlib.import_module("flow_matching.utils").ModelWrapper
    velocity = guided(flow, queries, noise, guidance)

    class Guided(model):  # type: ignore[misc, valid-type]
        def forward(self, x: Tensor, t: Tensor, **_: Any) -> Tensor:
            return velocity(x, float(t))

    solve = solver.RiemannianODESolver(manifolds.Sphere(), Guided(torch.nn.Identity()))
    x = solve.sample(x_init=start.repeat(len(queries), 1), step_size=1 / steps, method="euler")
    return x.view(len(queries), len(start), -1)


@torch.no_grad()
def torchdiffeq_samples(
    flow: PlainFlow, queries: Tensor, start: Tensor, noise: Tensor, steps: int, guidance: float
) -> Tensor:
    """torchdiffeq's Euler in the space around the sphere; the field sees projected points."""
    odeint = importlib.import_module("torchdiffeq").odeint
    velocity = guided(flow, queries, noise, guidance)
    times = torch.linspace(0, 1, steps + 1)
    x = odeint(lambda t, x: velocity(normalize(x), float(t)), start.repeat(len(queries), 1), times, method="euler")[-1]
    return normalize(x).view(len(queries), len(start), -1)


def torchdiffeq_log_density(
    plain: PlainFlow, image: Tensor, text: Tensor, code: int, steps: int, probes: Callable[[int, int, Tensor], Tensor]
) -> Tensor:
    """torchdiffeq's Euler back from t=1 with the divergence as one more state, one vector-Jacobian product a step."""
    odeint = importlib.import_module("torchdiffeq").odeint
    rows, moving = len(image), {0: (0, 1), 1: (1,), 2: (0,)}[code]
    direction = torch.full((rows,), code, dtype=torch.int8)
    step = iter(range(steps))

    def rate(t: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        number = next(step)
        with torch.enable_grad():
            points = [normalize(x.detach()).requires_grad_() for x in state[:2]]
            velocity = plain(*points, t.expand(rows), direction)
            probe = {s: probes(number, s, points[s].detach()) for s in moving}
            along = sum((velocity[s] * probe[s]).sum() for s in moving)
            pulled = torch.autograd.grad(along, [points[s] for s in moving])
        divergence = sum((g * probe[s]).sum(1) for s, g in zip(moving, pulled))
        return velocity[0].detach(), velocity[1].detach(), divergence

    state = (image, text, torch.zeros(rows))  # of one kind: torchdiffeq makes them one vector
    change = odeint(rate, state, torch.linspace(1, 0, steps + 1), method="euler")[2][-1].double()
    return change - sum(log_area(x.shape[1]) for s, x in enumerate((image, text)) if s in moving)


def faiss_index(gallery: Tensor) -> Any:
    """FAISS's exact index of inner products, which keeps a copy of the gallery.

    From 20 queries on it is told to use matrix products, as earlier releases did by themselves: the threshold of
    today's, 128,000, makes 64 queries several times slower here.
    """
    faiss = importlib.import_module("faiss")
    faiss.omp_set_num_threads(torch.get_num_threads())
    faiss.cvar.distance_compute_blas_threshold = 20
    index = faiss.IndexFlatIP(gallery.shape[1])
    index.add(gallery.numpy())
    return index


def faiss_search(index: Any, queries: Tensor, k: int) -> Tensor:
    """Rows [Q, k] of the gallery with the largest cosines."""
    return torch.from_numpy(np.asarray(index.search(queries.numpy(), k)[1]))
