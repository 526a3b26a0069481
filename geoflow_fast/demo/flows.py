"""The demo's flows: one on the concept world, one on two spheres that can be looked at."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from torch import Tensor

from geoflow_fast.data.pairs import EmbeddingPairs
from geoflow_fast.flow.config import GeoFlowConfig
from geoflow_fast.flow.model import GeoFlow
from geoflow_fast.flow.solvers import Points, integrate, time_grid
from geoflow_fast.noise import sample_uniform
from geoflow_fast.spherical import sample_bump
from geoflow_fast.training.config import TrainConfig
from geoflow_fast.training.flow_matching import train
from geoflow_fast.worlds import PairWorld

PAIRS = 60_000
SPHERE_PAIRS, SPHERE_STEPS, SPHERE_C = 8192, 500, 3.0
SPHERE_POINTS, SPHERE_STOPS = 500, 41
"""Paths that are drawn, and times at which each is computed."""
SPHERE_CENTRES = ((0.9, 0.3, 0.3), (0.2, 0.9, 0.4), (0.35, 0.25, 0.9), (0.6, -0.75, 0.3), (0.5, 0.6, -0.6))
"""Centres of the bumps on the first sphere. The second has the same, and bump k of the first belongs to bump k + 2
there."""


def concept_pairs(world: PairWorld, seed: int) -> EmbeddingPairs:
    """The pairs that the flow is trained on."""
    image, text, _ = world.sample(PAIRS, generator=torch.Generator().manual_seed(100 + seed))
    return EmbeddingPairs.from_arrays(image, text)


def learn(out: Path, shape: GeoFlowConfig, pairs: EmbeddingPairs, config: TrainConfig) -> GeoFlow | None:
    """Trains a flow in the folder `out`, where an interrupted run continues; returns None if it was interrupted."""
    torch.manual_seed(config.seed)
    flow = GeoFlow(shape)
    return flow if train(flow, pairs, config, out=out).finished else None


def learn_spheres(out: Path, seed: int, steps: int | None) -> GeoFlow | None:
    """Trains a flow on S² x S² that pairs five bumps on one sphere with five on the other; this takes seconds."""
    generator = torch.Generator().manual_seed(200 + seed)
    centres = sphere_centres()
    which = torch.randint(len(centres), (SPHERE_PAIRS,), generator=generator, device="cpu")
    image, text = (sample_bump(c[which], SPHERE_C, generator).float() for c in (centres, centres.roll(2, 0)))
    config = dataclasses.replace(
        TrainConfig.tiny(),
        steps=min(SPHERE_STEPS, steps or SPHERE_STEPS),
        conditional_share=0.0,
        ramp_share=0.0,
        p_joint=1.0,
        seed=seed,
    )
    shape = GeoFlowConfig(3, 3, hidden=64, depth=2, layer_scale=0.1)
    return learn(out, shape, EmbeddingPairs.from_arrays(image, text), config)


def sphere_centres() -> Tensor:
    """Unit vectors [5, 3], float64."""
    return torch.nn.functional.normalize(torch.tensor(SPHERE_CENTRES, dtype=torch.float64, device="cpu"))


@torch.no_grad()
def sphere_paths(flow: GeoFlow, seed: int) -> tuple[Tensor, Tensor]:
    """Paths [SPHERE_STOPS, SPHERE_POINTS, 3] from noise to data, on the first and on the second sphere."""
    generator = torch.Generator().manual_seed(300 + seed)
    state: Points = tuple(sample_uniform(SPHERE_POINTS, 3, generator=generator) for _ in range(2))

    def rate(at: Points, t: float, _weight: float) -> Points:
        return flow.velocity(at[0], at[1], t, "joint")

    paths, times = [state], time_grid(SPHERE_STOPS - 1)
    for k in range(SPHERE_STOPS - 1):
        paths.append(integrate(rate, paths[-1], times[k : k + 2]))
    image, text = (torch.stack(path) for path in zip(*paths))
    return image, text
