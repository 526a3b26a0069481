"""DistilledSampler: one call of a network in place of the ODE whose samples a flow's scorer reads.

All queries share one noise, so the samples of a flow are a function of the query alone, and a network can learn it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from geoflow_fast.directions import Direction
from geoflow_fast.flow.model import CONFIG_FILE, WEIGHTS_FILE, check_tensors
from geoflow_fast.head.config import LARGEST_WIDTH, DistilConfig
from geoflow_fast.head.model import warn_if_unfinished
from geoflow_fast.ops.gallery_posterior import check_kappa
from geoflow_fast.runtime import checks, hashing
from geoflow_fast.runtime.device import rows_at_once
from geoflow_fast.runtime.files import contents_of, write_json
from geoflow_fast.runtime.progress import Advance
from geoflow_fast.runtime.tensors import load_tensors, save_tensors

KIND = "distilled sampler"
REFERENCE = "reference"
POSTERIORS = ("likelihood", "bayes")
MOST_SAMPLES = 1 << 16
"""More samples of a query than this are refused before anything is made for them."""
TRUNK_WIDTH = 4
"""Width of the first layer, which a query passes once, as a multiple of the width of those that every sample passes."""
INPUT_SCALE = 0.5
"""Size of the coordinates that the first layer sees. Smaller ones make a smoother function, larger ones overfit."""
ROWS_AT_ONCE = 1024
"""Samples that go through the network together on a CPU, few enough for activations to stay in the cache."""


@dataclass(frozen=True)
class DistilAgreement:
    """How far the entropies of a distilled scorer and of its teacher agree on held-out queries."""

    spearman: float
    """Their rank correlation; NaN if one of the two gives all queries the same entropy."""
    difference: float
    """Mean of their absolute difference, in nats."""
    queries: int
    items: int
    """Size of the gallery that the queries searched."""


@dataclass(frozen=True)
class Scoring:
    """How a scorer uses the samples."""

    direction: Direction
    kappa: float
    posterior: str
    top_k: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "direction", Direction.of(self.direction, conditional=True))
        object.__setattr__(self, "kappa", check_kappa(self.kappa))
        checks.one_of(self.posterior, "posterior", POSTERIORS)
        checks.integer(self.top_k, "top_k", 1)

    def to_json(self) -> dict[str, Any]:
        """The fields as a dictionary that JSON can hold."""
        return {**vars(self), "direction": str(self.direction)}


class DistilledSampler(nn.Module):
    """Maps queries [Q, d] to the M samples [Q, M, d'] that a flow would end at.

    The noise of the flow is fixed, so each of the M samples has a number, for which the network learns a vector. A
    sample is a point that all queries share, plus a linear map of the query, plus what a network adds that sees query
    and number, brought back to the sphere. `teacher` says whose samples they are, and `report` how training ended:
    plain JSON values.
    """

    reference: Tensor | None

    def __init__(
        self,
        config: DistilConfig,
        query_dim: int,
        item_dim: int,
        n_samples: int,
        scoring: Scoring,
        teacher: Mapping[str, Any],
    ) -> None:
        super().__init__()
        sizes = {"query_dim": (query_dim, LARGEST_WIDTH), "item_dim": (item_dim, LARGEST_WIDTH)}
        for name, (size, most) in {**sizes, "n_samples": (n_samples, MOST_SAMPLES)}.items():
            checks.integer(size, name, 1, most)
        self.config, self.query_dim, self.item_dim, self.n_samples = config, query_dim, item_dim, n_samples
        self.scoring, self.teacher = scoring, dict(teacher)
        self.agreement: DistilAgreement | None = None
        self.report: dict[str, Any] = {}
        hidden, dtype = config.hidden, torch.float32
        self.inner = nn.Linear(query_dim, TRUNK_WIDTH * hidden, dtype=dtype)
        self.trunk = nn.Linear(TRUNK_WIDTH * hidden, hidden, dtype=dtype)
        self.number = nn.Parameter(torch.empty(n_samples, hidden, dtype=dtype))
        self.mix = nn.Linear(hidden, hidden, dtype=dtype)
        self.move = nn.Linear(hidden, item_dim, bias=False, dtype=dtype)
        self.base = nn.Linear(query_dim, item_dim, bias=False, dtype=dtype)
        self.centre = nn.Parameter(torch.empty(n_samples, item_dim, dtype=dtype))
        # Typical queries of a Bayes posterior: not learned, so no part of the state of a run.
        self.register_buffer(REFERENCE, None, persistent=False)
        nn.init.normal_(self.number)
        nn.init.normal_(self.move.weight, std=0.1 / math.sqrt(hidden * item_dim))
        nn.init.zeros_(self.base.weight)
        nn.init.normal_(self.centre, std=1 / math.sqrt(item_dim))

    def forward(self, queries: Tensor, dropout: float = 0.0) -> Tensor:
        """The samples [Q, M, d'], of unit norm, of the `queries` [Q, d], with dropout if a rate is given."""
        # Coordinates of unit rows shrink with the width.
        scaled = queries * (INPUT_SCALE * math.sqrt(self.query_dim))
        trunk = self.trunk(functional.dropout(functional.silu(self.inner(scaled)), dropout, dropout > 0))
        hidden = functional.silu(self.mix(functional.silu(trunk.unsqueeze(1) + self.number)))
        moved = self.move(functional.dropout(hidden, dropout, dropout > 0))
        return functional.normalize(self.base(queries).unsqueeze(1) + self.centre + moved, dim=-1)

    @torch.no_grad()
    def draw(self, queries: Tensor, advance: Advance | None = None) -> Tensor:
        """`forward` in blocks, without a graph. `advance(n)` is called when the samples of n more queries are there."""
        parts = [queries.new_empty(0, self.n_samples, self.item_dim)]
        row_bytes = queries.element_size() * (3 * self.config.hidden + 4 * self.item_dim)
        at_once = rows_at_once(queries.device, row_bytes, ROWS_AT_ONCE)
        for block in queries.split(max(1, at_once // self.n_samples)):
            parts.append(self(block))
            if advance is not None:
                advance(len(block))
        return torch.cat(parts)

    def facts(self) -> dict[str, Any]:
        """What identifies the network besides its weights: plain JSON values."""
        sizes = {"query_dim": self.query_dim, "item_dim": self.item_dim, "n_samples": self.n_samples}
        return {**sizes, "config": self.config.to_json(), "teacher": self.teacher}

    @classmethod
    def from_pretrained(cls, folder: str | Path, *, device: torch.device | str = "cpu") -> DistilledSampler:
        """Loads a sampler that `save_sampler` wrote, in eval mode. A damaged file, or one that does not match its
        configuration, raises a ValueError; one whose training was killed or interrupted comes with a warning."""
        path = checks.path(folder, "folder") / WEIGHTS_FILE
        tensors, info = load_tensors(path, kind=KIND, device=device)
        # On the meta device nothing is allocated until the tensors are known to fit.
        with contents_of(path), torch.device("meta"):
            sizes = (info["query_dim"], info["item_dim"], info["n_samples"])
            config, scoring = DistilConfig.from_json(info["config"]), Scoring(**info["scoring"])
            sampler = cls(config, *sizes, scoring, info["teacher"])
            expected = sampler.state_dict()
            if rows := checks.integer(info["reference_rows"], "reference_rows", 0, checks.LARGEST_COUNT):
                expected[REFERENCE] = torch.empty(rows, sampler.query_dim)
            sampler.report = dict(info.get("report", {}))  # earlier files have none
            if info["agreement"] is not None:
                sampler.agreement = _read_agreement(info["agreement"])
        check_tensors(path, tensors, expected)
        sampler.reference = tensors.pop(REFERENCE, None)
        sampler.load_state_dict(tensors, assign=True)
        warn_if_unfinished(path.parent, sampler.report, "the distilled scorer", "distil")
        return sampler.eval()


def save_sampler(
    folder: Path, sampler: DistilledSampler, weights: Mapping[str, Tensor], scoring: Scoring, reference: Tensor | None
) -> None:
    """Writes these weights of `sampler`, how a scorer uses them and its reference queries, if any, as
    `DistilledSampler.from_pretrained` reads them."""
    info = {
        **sampler.facts(),
        "scoring": scoring.to_json(),
        "reference_rows": 0 if reference is None else len(reference),
        "report": sampler.report,
        "agreement": None if sampler.agreement is None else _agreement_as_json(sampler.agreement),
    }
    tensors = dict(weights) if reference is None else {**weights, REFERENCE: reference}
    save_tensors(folder / WEIGHTS_FILE, tensors, kind=KIND, info=info)
    write_json(folder / CONFIG_FILE, {"kind": KIND, **info})


def _agreement_as_json(agreement: DistilAgreement) -> dict[str, Any]:
    """The numbers as a dictionary that JSON can hold, which knows no NaN."""
    return {**vars(agreement), "spearman": None if math.isnan(agreement.spearman) else agreement.spearman}


def _read_agreement(value: dict[str, Any]) -> DistilAgreement:
    """The inverse of `_agreement_as_json`."""
    return DistilAgreement(**{**value, "spearman": math.nan if value["spearman"] is None else value["spearman"]})


def sampler_digest(sampler: DistilledSampler) -> str:
    """SHA-256 of configuration and weights, on which results depend."""
    return hashing.fingerprint({**sampler.facts(), "weights": hashing.digest(sampler.state_dict().values())})
