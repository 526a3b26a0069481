"""The interface of every baseline: it is fitted on pairs, gives the uncertainty of queries over a gallery, and is saved
to a folder.

All baselines follow one convention: the higher the uncertainty, the less certain the answer of plain cosine search.
Some published scripts turn the sign of a method round; here none does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from geoflow_fast.data.pairs import EmbeddingPairs
from geoflow_fast.directions import Direction
from geoflow_fast.evaluation.methods import item_scores
from geoflow_fast.geometry import check_rows
from geoflow_fast.ops.gallery_statistics import GalleryPosterior
from geoflow_fast.retrieval.gallery import Gallery, GallerySource
from geoflow_fast.runtime import checks
from geoflow_fast.runtime.files import contents_of, read_json, write_json
from geoflow_fast.runtime.hub import CONFIG_FILE, WEIGHTS_FILE
from geoflow_fast.runtime.pretrained import check_tensors
from geoflow_fast.runtime.tensors import load_tensors, save_tensors
from geoflow_fast.training.config import RunConfig
from geoflow_fast.training.loop import TrainReport

KIND = "baseline"
LARGEST_DIM = 1 << 20
"""The largest width of embeddings that a file may ask for."""
LoadedBaseline = TypeVar("LoadedBaseline", bound="Baseline")


@dataclass(frozen=True)
class FitTask:
    """What a baseline is fitted on, and how: the checked arguments of `Baseline.fit`."""

    pairs: EmbeddingPairs
    val: EmbeddingPairs
    config: RunConfig
    out: Path | None
    resume: bool
    progress: bool | None


@dataclass(frozen=True)
class GallerySoftmax:
    """A softmax over a gallery of scores scale <query, item> + bias. A method may have mapped queries and items to
    other embeddings for it."""

    queries: Tensor
    """[Q, d], unit rows."""
    gallery: Gallery
    scale: float
    bias: Tensor | None = None
    """[N], one number for each item."""

    def posterior(self, top_k: int = 1) -> GalleryPosterior:
        """The probabilities in float64, of which the `top_k` largest are kept."""
        return self.gallery.statistics(self.queries.unsqueeze(1), self.scale, top_k, self.bias).posterior(torch.float64)

    def log_prob(self, index: Tensor) -> Tensor:
        """Log-probabilities, float64 [Q, k], of the items `index` [Q, k]."""
        scores = item_scores(self.queries.unsqueeze(1), self.gallery, index, self.scale, self.bias)
        return scores - self.posterior().log_z.unsqueeze(1)


class Baseline(nn.Module, ABC):
    """Base class of all methods: `fit` on pairs, then `uncertainty` of queries.

    `method` is the method's name. Settings are values that JSON can hold; weights are in the state dict. Subclasses
    pass their settings to `__init__` and implement `_fit` and `_score`.
    """

    method: ClassVar[str]
    title: ClassVar[str]
    """Name of the method in tables."""
    TRAINED: ClassVar[bool] = True
    """False if nothing is learned but a few numbers, such as temperatures."""
    NEEDS_TRAINING_PAIRS: ClassVar[bool] = True
    """False if held-out pairs are enough: they may then be given as the training pairs too."""
    USES_TRAINING_PAIRS: ClassVar[bool] = True
    STATES_RISK: ClassVar[bool] = False
    """True if the uncertainty is a probability that the answer of plain search is wrong."""
    ONE_WIDTH_FOR: ClassVar[str | None] = None
    """What makes the method need images and texts of one width; None if it takes any widths."""

    def __init__(self, image_dim: int, text_dim: int, **settings: Any) -> None:
        super().__init__()
        for name, width in (("image_dim", image_dim), ("text_dim", text_dim)):
            checks.integer(width, name, 1, LARGEST_DIM)
        if self.ONE_WIDTH_FOR is not None and image_dim != text_dim:
            raise ValueError(
                f"{self.ONE_WIDTH_FOR} needs images and texts of one width, got {image_dim} and {text_dim}"
            )
        self.image_dim, self.text_dim = image_dim, text_dim
        self.settings = {"image_dim": image_dim, "text_dim": text_dim, **settings}
        self.fitted = False

    def fit(
        self,
        pairs: EmbeddingPairs,
        val: EmbeddingPairs | None = None,
        config: RunConfig | None = None,
        out: str | Path | None = None,
        resume: bool = True,
        *,
        progress: bool | None = None,
    ) -> TrainReport | None:
        """Fits the method to training `pairs`. `val`: held-out pairs; by default a share of the images is held out.

        For methods trained by gradient descent, `config`, `out`, `resume` and `progress` are as in `gf.train`, and the
        report is returned. Others use only the seed and the held-out share of `config`, write nothing and return None.
        """
        config = config or self.default_config()
        for name, part in (("pairs", pairs), ("val", val)):
            if not isinstance(part, EmbeddingPairs) and not (name == "val" and part is None):
                raise TypeError(f"{name} must be EmbeddingPairs, got {type(part).__name__}")
            if part is not None and (part.image_dim, part.text_dim) != (self.image_dim, self.text_dim):
                widths = f"{part.image_dim} and {part.text_dim}"
                raise ValueError(f"{name} have widths {widths}, not {self.image_dim} and {self.text_dim}")
        if val is None:
            pairs, val = pairs.split(config.val_fraction, config.seed)
        report = self._fit(
            FitTask(pairs, val, config, None if out is None else checks.path(out, "out"), resume, progress)
        )
        self.fitted = report is None or report.finished
        self.eval()
        return report

    @classmethod
    def missing(cls) -> str | None:
        """What the method needs besides pairs and is not available, and how to get it; None if nothing is missing."""
        return None

    def default_config(self) -> RunConfig:
        """The training run described by the method's authors or in the paper's comparison."""
        return RunConfig()

    @torch.no_grad()
    def uncertainty(self, queries: Tensor, gallery: GallerySource | Gallery, direction: str) -> Tensor:
        """Uncertainty of `queries` [Q, d], unit rows, over the gallery: float64 [Q]; higher means less certain.

        `direction="t2i"`: queries are texts and the gallery holds images; "i2t": the other way round.
        """
        direction = Direction.of(direction, conditional=True)
        if not self.fitted:
            raise ValueError(f"{self.method} is not fitted: call fit, or load one that was")
        checks.with_values(queries, "queries")
        gallery = Gallery.of(gallery)
        query_dim = direction.queries(self.image_dim, self.text_dim)
        item_dim = direction.items(self.image_dim, self.text_dim)
        if queries.dim() != 2 or queries.shape[1] != query_dim:
            raise ValueError(f"queries must be [Q, {query_dim}] in direction {direction}, got {tuple(queries.shape)}")
        if gallery.dim != item_dim:
            raise ValueError(f"gallery has width {gallery.dim}, but direction {direction} expects {item_dim}")
        check_rows(queries, "queries")
        return self._score(queries.detach().to(self.device, torch.float32), gallery, direction).double()

    @property
    def device(self) -> torch.device:
        """Device of the method's tensors."""
        tensors = [*self.parameters(), *self.buffers()]
        return tensors[0].device if tensors else torch.device("cpu")

    @abstractmethod
    def _fit(self, task: FitTask) -> TrainReport | None:
        """Does the work of `fit`, whose arguments are checked and complete."""

    @abstractmethod
    def _score(self, queries: Tensor, gallery: Gallery, direction: Direction) -> Tensor:
        """Does the work of `uncertainty` for checked queries on the method's device."""

    def softmax(self, queries: Tensor, gallery: Gallery, direction: Direction) -> GallerySoftmax | None:  # noqa: ARG002
        """The method's own probabilities of the items, by which it could also rank them; None if it has none."""
        return None

    def save(self, folder: str | Path) -> None:
        """Writes settings (JSON) and tensors (safetensors) to `folder`, each file atomically."""
        if not self.fitted:
            raise ValueError(f"{self.method} is not fitted: there is nothing to save")
        self.write(checks.path(folder, "folder"), self.state_dict())

    def write(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """Does what `save` does with the given weights instead of the current ones: a run writes its best so far."""
        facts = {"method": self.method, "settings": self.settings}
        save_tensors(folder / WEIGHTS_FILE, tensors, kind=KIND, info=facts)
        write_json(folder / CONFIG_FILE, facts)

    @property
    def facts(self) -> dict[str, Any]:
        """What identifies the method besides its data and run: name and settings."""
        return {"method": self.method, **self.settings}

    @classmethod
    def load(cls: type[LoadedBaseline], folder: str | Path) -> LoadedBaseline:
        """Loads what `save` wrote, onto the CPU. Another method's folder or a damaged file raises a ValueError."""
        path = checks.path(folder, "folder") / WEIGHTS_FILE
        tensors, facts = load_tensors(path, kind=KIND)
        with contents_of(path):
            if facts["method"] != cls.method:
                raise ValueError(f"{folder} holds a {facts['method']!r}, not a {cls.method!r}")
            cls._check_sizes(path, tensors, facts["settings"])
            with torch.device("cpu"):
                baseline = cls(**facts["settings"])
            baseline._resize_buffers(tensors)
            check_tensors(path, tensors, baseline.state_dict())
            baseline.load_state_dict(tensors)
        baseline.fitted = True
        return baseline.eval()

    @classmethod
    def _check_sizes(cls, path: Path, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> None:
        """Raises a ValueError if the settings ask for other tensors than those of the file. The check itself takes no
        memory for them."""
        with torch.device("meta"):
            asked = cls(**settings)
            asked._resize_buffers(tensors)
        check_tensors(path, tensors, asked.state_dict())

    def _resize_buffers(self, tensors: Mapping[str, Tensor]) -> None:
        """Gives the buffers whose sizes depend on the data the sizes of `tensors`, which are about to be loaded."""


def resize_rows(module: nn.Module, tensors: Mapping[str, Tensor], *names: str) -> None:
    """Gives the buffers of these names as many rows as the tensors of the same names have."""
    for name in names:
        buffer: Tensor = getattr(module, name)
        setattr(module, name, buffer.new_empty(len(tensors.get(name, ())), *buffer.shape[1:]))


def method_of(folder: str | Path) -> str:
    """Name of the method that was saved to `folder`."""
    path = checks.path(folder, "folder") / CONFIG_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: {folder} holds no baseline")
    try:
        return str(read_json(path)["method"])
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{path} is not the configuration of a baseline") from error


def answer_risk(softmax: GallerySoftmax, answers: Tensor) -> Tensor:
    """One minus the probability that `softmax` gives to the `answers` [Q] of plain search: float64 [Q]."""
    return (1 - softmax.log_prob(answers.unsqueeze(1)).squeeze(1).exp()).clamp(min=0)
