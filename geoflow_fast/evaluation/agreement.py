"""How well learned log-densities agree with those of a synthetic world."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from geoflow_fast.directions import DIRECTIONS
from geoflow_fast.flow.fields import Field
from geoflow_fast.likelihood.density import log_density
from geoflow_fast.worlds import PairWorld


@dataclass(frozen=True)
class DensityAgreement:
    """How estimated log-densities compare with the truth: Pearson correlation and mean error in nats."""

    correlation: float
    bias: float


def densities(
    world: PairWorld, field: Field, *, rows: int = 1000, n_steps: int = 10, n_probes: int = 2, seed: int = 0
) -> dict[str, tuple[Tensor, Tensor]]:
    """Estimated and true log-densities [rows] of new pairs: the joint, both conditionals, both marginals, the PMI."""
    generator = torch.Generator().manual_seed(seed)
    image, text, _ = world.sample(rows, generator=generator)
    joint, text_given_image, image_given_text = (
        cast(Tensor, log_density(field, image, text, direction, n_steps, n_probes, generator=generator))
        for direction in DIRECTIONS
    )
    return {
        "joint": (joint, world.log_joint(image, text)),
        "text|image": (text_given_image, world.log_text_given_image(image, text)),
        "image|text": (image_given_text, world.log_image_given_text(image, text)),
        "image": (joint - text_given_image, world.log_image(image)),
        "text": (joint - image_given_text, world.log_text(text)),
        "pmi": (text_given_image + image_given_text - joint, world.pmi(image, text)),
    }


def agreement(pairs: dict[str, tuple[Tensor, Tensor]]) -> dict[str, DensityAgreement]:
    """Correlation and bias of the estimates of `densities`."""
    return {
        name: DensityAgreement(float(torch.corrcoef(torch.stack(pair))[0, 1]), float((pair[0] - pair[1]).mean()))
        for name, pair in pairs.items()
    }
