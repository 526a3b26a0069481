"""PosteriorHead: one call turns a query into the points that give its posterior over any gallery.

The posterior over a gallery needs only the ratio p(item | query) / p(item), which a contrastive critic learns directly.
A query becomes K points on the items' sphere with concentrations c_k and log-weights w_k, an item keeps its row g_j and
gets one number b_j, and the score of the item is logsumexp_k (w_k + c_k <x_k, g_j>) + b_j. With one point, one
concentration and no number this is the softmax over cosines at a tuned temperature.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from geoflow_fast.data.cards import model_card
from geoflow_fast.data.fingerprint import Origin
from geoflow_fast.data.pairs import EmbeddingPairs
from geoflow_fast.directions import CONDITIONAL, Direction
from geoflow_fast.distributed import ALONE, World
from geoflow_fast.geometry import check_rows
from geoflow_fast.head.config import LARGEST_WIDTH, HeadConfig
from geoflow_fast.runtime import checks, hashing, hub
from geoflow_fast.runtime.files import write_json
from geoflow_fast.runtime.hub import CONFIG_FILE, WEIGHTS_FILE
from geoflow_fast.runtime.pretrained import Pretrained
from geoflow_fast.runtime.tensors import save_tensors
from geoflow_fast.runtime.warn import warn_user

KIND = "posterior head"
HEAD_FOLDER = "head"
"""Where in the folder of a flow `geoflow train` writes its head."""
FIRST_CONCENTRATION = 20.0
MOST_LOG_CONCENTRATION = math.log(1e4)


@dataclass(frozen=True)
class HeadPoints:
    """The points of Q queries: `points` [Q, K, d], each of the length of its concentration, and `log_weights` [Q, K].
    An item g has the score logsumexp_k (log_weights_k + <points_k, g>) plus the number of the item."""

    points: Tensor
    log_weights: Tensor

    def __getitem__(self, rows: Tensor) -> HeadPoints:
        """Those of the queries `rows`."""
        return HeadPoints(self.points[rows], self.log_weights[rows])


class Tower(nn.Module):
    """Maps queries [Q, d] to points on the items' sphere [Q, K, d'].

    Each point is the query, mapped linearly, plus what a network of one hidden layer adds; at first the map is the
    identity, or the best linear one where the widths differ, and the network adds next to nothing.
    """

    base: Tensor | None

    def __init__(self, query_dim: int, item_dim: int, config: HeadConfig) -> None:
        super().__init__()
        self.item_dim, self.config = item_dim, config
        base = None if query_dim == item_dim else torch.zeros(item_dim, query_dim, dtype=torch.float32)
        self.register_buffer("base", base)
        self.change = nn.Linear(query_dim, item_dim, bias=False, dtype=torch.float32)
        self.inner = nn.Linear(query_dim, config.hidden, dtype=torch.float32)
        self.offsets = nn.Linear(config.hidden, config.points * item_dim, dtype=torch.float32)
        self.shape = nn.Linear(config.hidden, 2 * config.points, dtype=torch.float32)
        self.log_concentration = nn.Parameter(torch.full((config.points,), 0.0, dtype=torch.float32))
        self.reset()

    def reset(self) -> None:
        """Gives the weights their first values."""
        nn.init.zeros_(self.change.weight)
        nn.init.normal_(self.offsets.weight, std=0.1 / math.sqrt(self.config.hidden * self.item_dim))
        # Points that began in one place would stay there.
        spread = 0.0 if self.config.points == 1 else 0.3
        nn.init.normal_(self.offsets.bias, std=spread / math.sqrt(self.item_dim))
        for parameter in (self.shape.weight, self.shape.bias):
            nn.init.zeros_(parameter)
        nn.init.constant_(self.log_concentration, math.log(FIRST_CONCENTRATION))

    def forward(self, queries: Tensor, dropout: float = 0.0) -> HeadPoints:
        """The points of the queries, with dropout if a rate is given."""
        moved = self.change(queries) + (queries if self.base is None else functional.linear(queries, self.base))
        hidden = functional.dropout(functional.silu(self.inner(queries)), dropout, dropout > 0)
        offsets = self.offsets(hidden).unflatten(1, (self.config.points, self.item_dim))
        centre = functional.normalize(moved.unsqueeze(1) + offsets, dim=-1)
        change, log_weights = self.shape(hidden).chunk(2, dim=1)
        log_concentration = (self.log_concentration + change).clamp(max=MOST_LOG_CONCENTRATION)
        return HeadPoints(centre * log_concentration.exp().unsqueeze(2), log_weights.log_softmax(1))


class PosteriorHead(Pretrained):
    """Estimates log p(item | query) - log p(item) for texts that search images and for images that search texts.

    `fit` trains one on pairs. `gf.RetrievalEntropy(head, gallery, direction)` reads the posterior over a gallery from
    it, and `gf.BayesReranker(..., head=head)` uses it as evidence; `head(queries, direction)` gives the points behind
    both. `config` has the settings of the network and of its run, `report` says how `fit` chose them, and `origin`
    tells of the encoder and the pairs.

    Beside its networks a head keeps a bank of training queries: an item that is near to everything has a high score for
    all of them, and `scale` and `hub_weight` say how far scores are corrected for that.
    """

    KIND = KIND
    bank_image: Tensor
    bank_text: Tensor
    scale: Tensor
    hub_weight: Tensor

    def __init__(self, config: HeadConfig, image_dim: int, text_dim: int) -> None:
        super().__init__()
        if not isinstance(config, HeadConfig):
            raise TypeError(f"config must be a HeadConfig, got {type(config).__name__}")
        for name, width in (("image_dim", image_dim), ("text_dim", text_dim)):
            checks.integer(width, name, 1, LARGEST_WIDTH)
        self.config, self.image_dim, self.text_dim = config, image_dim, text_dim
        self.report: dict[str, Any] = {}
        self.origin = Origin()
        widths = image_dim, text_dim
        self.towers = nn.ModuleDict({str(d): Tower(d.queries(*widths), d.items(*widths), config) for d in CONDITIONAL})
        self.biases = nn.ModuleDict(
            {str(d): _bias_network(d.items(*widths), config.bias_hidden) for d in CONDITIONAL if config.bias_hidden}
        )
        for name, width in (("bank_image", image_dim), ("bank_text", text_dim)):
            self.register_buffer(name, torch.zeros(config.bank, width, dtype=torch.float32))
        # For i2t and t2i: the factor of all scores, and how much of an item's mean score is subtracted.
        self.register_buffer("scale", torch.ones(len(CONDITIONAL), dtype=torch.float32))
        self.register_buffer("hub_weight", torch.zeros(len(CONDITIONAL), dtype=torch.float32))

    @classmethod
    def fit(
        cls,
        pairs: EmbeddingPairs,
        conf: HeadConfig | None = None,
        val: EmbeddingPairs | None = None,
        k: int | str | None = None,
        seed: int | None = None,
        out: str | Path | None = None,
        *,
        resume: bool = True,
        progress: bool | None = None,
        device: torch.device | str = "cpu",
        world: World = ALONE,
    ) -> PosteriorHead:
        """Trains a head on `pairs` and returns it in eval mode.

        `conf`: settings of network and run; by default they follow from the number of pairs. `k`: number of points, or
        "auto", which trains several heads and keeps the one with the highest likelihood of held-out items; by default
        `conf.points`, or "auto" without a `conf`. `seed` decides everything random; by default `conf.seed`. Both, if
        given, take the place of what `conf` has. `val`: held-out pairs; by default a share of the images is held out.
        `out`: folder for the head and for the state of its runs, which are continued if it has any, unless `resume` is
        False. `progress`: whether to show a live line on the terminal, by default if there is one. Ctrl-C stops after
        the current step and saves; `report["finished"]` is then False. The scales come last: what a killed run leaves
        behind has none. The ranks of a `world` share the rows of each batch.
        """
        from geoflow_fast.head.fitting import fit_head  # which builds heads, so it imports this module

        return fit_head(pairs, conf, val, k, seed, out, resume=resume, progress=progress, device=device, world=world)

    def extra_repr(self) -> str:
        """Widths and points in one line, for `print`."""
        return f"image {self.image_dim} x text {self.text_dim}, {self.config.points} points"

    @property
    def example(self) -> Tensor:
        """Some tensor with the dtype and the device of the head."""
        return self.scale

    def raw_points(self, queries: Tensor, direction: Direction, dropout: float = 0.0) -> HeadPoints:
        """The points of `queries` [Q, d] as the networks give them, before the scale is applied."""
        points: HeadPoints = self.towers[str(direction)](queries, dropout)
        return points

    def raw_item_bias(self, items: Tensor, direction: Direction) -> Tensor:
        """The learned number of each of the `items` [N, d]: [N]."""
        if not self.biases:
            return items.new_zeros(len(items))
        bias: Tensor = self.biases[str(direction)](items)
        return bias.squeeze(1)

    def scale_of(self, direction: str) -> float:
        """The factor of all scores in this direction."""
        return float(self.scale[CONDITIONAL.index(Direction.of(direction, conditional=True))])

    def hub_weight_of(self, direction: str) -> float:
        """How much of the logarithm of an item's mean score over the bank is subtracted from its score."""
        return float(self.hub_weight[CONDITIONAL.index(Direction.of(direction, conditional=True))])

    if TYPE_CHECKING:  # a module's call has no types of its own

        def __call__(self, queries: Tensor, direction: str) -> HeadPoints: ...

    def forward(self, queries: Tensor, direction: str) -> HeadPoints:
        """The points of the `queries` [Q, d], unit rows, without dropout in either mode, scaled as the held-out pairs
        asked. Gradients flow."""
        chosen = Direction.of(direction, conditional=True)
        width = chosen.queries(self.image_dim, self.text_dim)
        check_rows(queries, "queries")
        if queries.dim() != 2 or queries.shape[1] != width:
            raise ValueError(f"queries must be [Q, {width}], got {tuple(queries.shape)}")
        raw, scale = self.raw_points(queries.to(self.example), chosen), self.scale_of(chosen)
        return HeadPoints(raw.points * scale, raw.log_weights * scale)

    @torch.no_grad()
    def points(self, queries: Tensor, direction: str) -> HeadPoints:
        """The same without gradients: what scorers and re-rankers use."""
        return self(queries, direction)

    @torch.no_grad()
    def item_bias(self, items: Tensor, direction: Direction) -> Tensor:
        """The learned number of each of the `items` [N, d], on the scale of `points`: [N]."""
        return self.raw_item_bias(items, direction) * self.scale_of(direction)

    def bank(self, direction: str) -> Tensor:
        """The training queries [R, d] that the head keeps for this direction."""
        return Direction.of(direction, conditional=True).queries(self.bank_image, self.bank_text)

    def card(self) -> str:
        """The text of the model card: encoder, pairs, settings, held-out likelihood and limits, as far as they are
        known."""
        sides = " and ".join(map(hub.escaped, self.origin.sides))
        what = f"A posterior head for searches between {sides} embeddings: {self.extra_repr()}.{self.told_bank}"
        figures = {name: value for name, value in self.report.items() if isinstance(value, (int, float))}
        widths = self.image_dim, self.text_dim
        return model_card("PosteriorHead", what, widths, self.origin, self.config.to_json(), figures)

    @property
    def training_rows(self) -> int:
        """The training pairs of the bank."""
        return len(self.bank_image) if bool(self.bank_image.any()) else 0

    @property
    def told_bank(self) -> str:
        """A sentence about the bank for a model card, with a space before it; nothing without a bank."""
        rows = self.training_rows
        return f" Its weights contain the embeddings of {rows:,} training pairs, its bank." if rows else ""

    def write_files(self, folder: Path) -> None:
        """Writes `config.json` and `model.safetensors`."""
        save_head(folder, self, self.state_dict())

    @classmethod
    def described(cls, info: Mapping[str, Any]) -> PosteriorHead:
        head = cls(HeadConfig.from_json(info["config"]), info["image_dim"], info["text_dim"])
        head.report, head.origin = dict(info["report"]), Origin.read(info["origin"])
        return head

    def warn_of(self, folder: Path) -> None:
        if self.report.get("finished") is False:
            warn_user(
                f"the head in {folder} is not finished: training was stopped, and what is fitted at its end may be "
                "missing; the same call of PosteriorHead.fit or geoflow train that began it, with this folder as its "
                "output, continues it"
            )

    def facts(self) -> dict[str, Any]:
        """What identifies the network besides its weights: plain JSON values."""
        return {"image_dim": self.image_dim, "text_dim": self.text_dim, "config": self.config.to_json()}


def _bias_network(width: int, hidden: int) -> nn.Module:
    """A network from items [N, d] to one number each [N, 1], which is zero at first."""
    # A constant for all items would change no posterior.
    last = nn.Linear(hidden, 1, bias=False, dtype=torch.float32)
    nn.init.zeros_(last.weight)
    return nn.Sequential(nn.Linear(width, hidden, dtype=torch.float32), nn.SiLU(), last)


def save_head(folder: Path, head: PosteriorHead, weights: Mapping[str, Tensor]) -> None:
    """Writes these weights of `head`, with its configuration, as `PosteriorHead.from_pretrained` reads them."""
    info = {**head.facts(), "report": head.report, "origin": head.origin.to_json()}
    save_tensors(folder / WEIGHTS_FILE, weights, kind=KIND, info=info)
    write_json(folder / CONFIG_FILE, {"kind": KIND, **info})


def head_digest(head: PosteriorHead) -> str:
    """SHA-256 of configuration and weights, on which results depend."""
    return hashing.fingerprint({**head.facts(), "weights": hashing.digest(head.state_dict().values())})
