"""Encoders by open_clip's models. Weights are read without executing code: from safetensors, or from torch files that
hold nothing but tensors.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import functools
import logging
import pickle
import threading
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from geoflow_fast.encoders.protocol import (
    ImageLike,
    check_picture,
    check_sequence,
    chosen_precision,
    clean_texts,
    mixed_precision,
    short_error,
    stack_images,
    unit_rows,
    weights_digest,
)
from geoflow_fast.encoders.sources import UNREADABLE
from geoflow_fast.runtime import checks
from geoflow_fast.runtime.device import usable_device
from geoflow_fast.runtime.extras import needs

if TYPE_CHECKING:
    from PIL.Image import Image


DEFAULT_MODEL = "ViT-B-32"
USUAL_WEIGHTS = {
    DEFAULT_MODEL: "laion2b_s34b_b79k",
    "ViT-H-14": "laion2b_s32b_b79k",
    "ViT-L-16-SigLIP-384": "webli",
}
"""The weights that are used if the user names none: of a small model, and of the paper's two encoders."""
PREPROCESSING = ("mean", "std", "interpolation", "resize_mode")
LOCAL, HUB = "local-dir:", "hf-hub:"


class OpenClipEncoder:
    """An open_clip model with its image transform and tokenizer. `load` creates one from pretrained weights.

    `precision`: "float32"; "float16" or "bfloat16" for mixed precision; or "auto", float16 on a GPU and float32 on a
    CPU. The last projections are always applied in float32. `name` identifies the model in `facts`.
    """

    def __init__(
        self,
        model: nn.Module,
        preprocess: Callable[[Image], Tensor],
        tokenizer: Callable[[list[str]], Tensor],
        *,
        name: str = "",
        device: str | torch.device = "auto",
        precision: str = "auto",
    ) -> None:
        self.device = usable_device(str(device))
        self.precision, self.name = chosen_precision(self.device, precision), name
        self.preprocess, self.tokenizer = preprocess, tokenizer
        self._weights = weights_digest(model)
        self.model: Any = model.eval().to(self.device)
        image_tower, text_tower = self.model.visual, getattr(model, "text", model)
        self.last = {  # the last projections, None for a tower that does not end in a linear map
            # open_clip's own vision transformers have the first of these, timm's models the second.
            "image": Projection.find(image_tower, "proj")
            or Projection.find(getattr(image_tower, "head", None), "proj"),
            # open_clip's own text towers have the first of these, those of Hugging Face the second.
            "text": Projection.find(text_tower, "text_projection") or Projection.find(text_tower, "proj"),
        }
        self.dim = self._find_dim()

    @classmethod
    def load(
        cls,
        model: str = DEFAULT_MODEL,
        pretrained: str | None = None,
        checkpoint: str | Path | None = None,
        *,
        device: str | torch.device = "auto",
        precision: str = "auto",
    ) -> OpenClipEncoder:
        """Loads a model by its open_clip name, with weights of the tag `pretrained` (downloaded once) or of a file.

        With a local `checkpoint`, `pretrained` names the tag whose preprocessing the weights need. `model` may also be
        `local-dir:FOLDER`, a folder with `open_clip_config.json`, the weights and, if the model has its own tokenizer,
        that tokenizer's files; this works without a network connection.
        """
        open_clip = _open_clip()
        checks.words(model, "model")
        path = None if checkpoint is None else checks.path(checkpoint, "checkpoint")
        if path is not None and not path.is_file():
            raise FileNotFoundError(f"checkpoint {checkpoint} does not exist")
        with _quiet(open_clip), torch.device("cpu"):
            if model.startswith((LOCAL, HUB)):
                network = _create_from_folder(open_clip, model, pretrained, path)
            else:
                network = _create_by_name(open_clip, model, pretrained, path)
        from open_clip.transform import PreprocessCfg, image_transform_v2

        transform = image_transform_v2(PreprocessCfg(**network.visual.preprocess_cfg), is_train=False)
        return cls(network, transform, _Tokenizer(model), name=model, device=device, precision=precision)

    def facts(self) -> dict[str, Any]:
        """Returns the name, a digest of the weights, the preprocessing and the precision."""
        transform = getattr(self.model.visual, "preprocess_cfg", None) or repr(self.preprocess)
        return {
            "encoder": "open_clip",
            "model": self.name,
            "weights": self._weights,
            "preprocess": transform,
            "precision": self.precision,
        }

    def prepare(self, image: Image) -> Tensor:
        """Applies open_clip's image transform: [3, H, W]."""
        with torch.device("cpu"):
            prepared: Tensor = self.preprocess(check_picture(image))
        return prepared.float() if prepared.dtype == torch.float64 else prepared

    def encode_images(self, images: Sequence[ImageLike]) -> Tensor:
        """Embeds images: float32 unit rows [B, dim] on the CPU."""
        return self._project("image", self.image_activations(images))

    def encode_texts(self, texts: Sequence[str]) -> Tensor:
        """Embeds texts: float32 unit rows [B, dim] on the CPU."""
        return self._project("text", self.text_activations(texts))

    @torch.inference_mode()
    def image_activations(self, images: Sequence[ImageLike]) -> Tensor:
        """Image activations before the last projection, float32 [B, k_I]; the unscaled embedding if there is none."""
        if not len(check_sequence(images, "images")):
            return torch.empty(0, self._width_before("image"), dtype=torch.float32, device="cpu")
        batch = stack_images(self.prepare, images).to(self.device, non_blocking=True)
        if batch.dim() != 4 or batch.shape[1] != 3 or not batch.is_floating_point():
            raise ValueError(
                f"prepared images must be floating-point [3, H, W], got {batch.dtype} {list(batch.shape[1:])}"
            )
        with self._tower("image"):
            return self.model.encode_image(batch, normalize=False).float()

    @torch.inference_mode()
    def text_activations(self, texts: Sequence[str]) -> Tensor:
        """Text activations before the last projection, float32 [B, k_T]; the unscaled embedding if there is none."""
        known = clean_texts(texts)
        if not known:
            return torch.empty(0, self._width_before("text"), dtype=torch.float32, device="cpu")
        tokens = self.tokenizer(known).to(self.device, non_blocking=True)
        with self._tower("text"):
            return self.model.encode_text(tokens, normalize=False).float()

    @contextlib.contextmanager
    def _tower(self, name: str) -> Iterator[None]:
        """Runs the network in its precision, and the tower `name` without its last projection."""
        mixed, projection = mixed_precision(self.device, self.precision), self.last[name]
        with mixed, projection.left_out() if projection else contextlib.nullcontext():
            yield

    @torch.inference_mode()
    def _project(self, tower: str, activations: Tensor) -> Tensor:
        projection = self.last[tower]
        if projection is None:
            return unit_rows(activations)
        return unit_rows(projection.linear(activations.to(projection.linear.weight.device)))

    def _width_before(self, tower: str) -> int:
        projection = self.last[tower]
        return self.dim if projection is None else projection.linear.in_features

    def _find_dim(self) -> int:
        for projection in self.last.values():
            if projection is not None:
                return projection.linear.out_features
        side = self.model.visual.image_size
        height, width = side if isinstance(side, tuple) else (side, side)
        with torch.inference_mode():
            return int(
                self.model.encode_image(
                    torch.zeros(1, 3, height, width, dtype=torch.float32, device=self.device)
                ).shape[-1]
            )


@dataclass(frozen=True)
class Projection:
    """The last linear map of a tower: attribute `name` of `owner`."""

    owner: nn.Module
    name: str
    linear: nn.Linear
    """A float32 copy of the map."""

    @classmethod
    def find(cls, owner: Any, name: str) -> Projection | None:
        """Finds a linear layer, or a matrix [k, dim] by which the tower multiplies from the right."""
        projection = getattr(owner, name, None)
        if isinstance(projection, nn.Parameter):
            width, dim = projection.shape
            linear = nn.Linear(width, dim, bias=False, dtype=torch.float32, device=projection.device)
            linear.weight = nn.Parameter(projection.detach().float().T.contiguous())
            return cls(owner, name, linear)
        return cls(owner, name, copy.deepcopy(projection).float()) if isinstance(projection, nn.Linear) else None

    @contextlib.contextmanager
    def left_out(self) -> Iterator[None]:
        """Takes the projection out of the tower for a while."""
        projection = getattr(self.owner, self.name)
        # Towers skip a matrix or a text_projection that is None; every other projection they call.
        optional = isinstance(projection, nn.Parameter) or self.name == "text_projection"
        setattr(self.owner, self.name, None if optional else nn.Identity())
        try:
            yield
        finally:
            setattr(self.owner, self.name, projection)


def _create_by_name(open_clip: Any, model: str, pretrained: str | None, checkpoint: Path | None) -> Any:
    if open_clip.get_model_config(model) is None:
        close = difflib.get_close_matches(model, open_clip.list_models(), n=5, cutoff=0.4)
        hint = f"; similar names: {', '.join(close)}" if close else ""
        raise ValueError(f"open_clip has no model {model!r}{hint}. Name a folder of your own by local-dir:FOLDER")
    tag = _settings_of_weights(open_clip, model, pretrained, checkpoint)
    quick = open_clip.get_model_config(model).get("quick_gelu", False)
    if tag and quick and not tag.get("quick_gelu", False):
        raise ValueError(
            f"{model} has QuickGELU, but the weights {pretrained!r} were trained without it; use the plain model"
        )
    weights = checkpoint or _download(open_clip, model, tag)
    network = open_clip.create_model(
        model,
        load_weights=False,
        pretrained_text=False,
        force_quick_gelu=bool(tag.get("quick_gelu", False)),
        force_preprocess_cfg={name: tag[name] for name in PREPROCESSING if name in tag},
    )
    _load_weights(open_clip, network, weights, model)
    return network


def _settings_of_weights(
    open_clip: Any, model: str, pretrained: str | None, checkpoint: Path | None
) -> Mapping[str, Any]:
    """Returns what open_clip knows about a tag: where its file is, and how images are prepared for it."""
    known = open_clip.list_pretrained_tags_by_model(model)
    pretrained = pretrained or USUAL_WEIGHTS.get(model)
    listed = f"it has {', '.join(known)}" if known else "it has none: give a file by --checkpoint"
    if pretrained is not None:
        tag: Mapping[str, Any] = open_clip.get_pretrained_cfg(model, pretrained)
        if not tag:
            raise ValueError(f"open_clip has no weights {pretrained!r} for {model}; {listed}")
        return tag
    if checkpoint is None:
        raise ValueError(f"name the weights of {model} by --pretrained or --checkpoint; {listed}")
    choices = [open_clip.get_pretrained_cfg(model, name) for name in known]
    if len({str([choice.get(name) for name in PREPROCESSING]) for choice in choices}) > 1:
        raise ValueError(
            f"weights of {model} differ in how images are prepared: --pretrained must name those that {checkpoint} "
            f"holds or was trained from; {listed}"
        )
    # The weights are the user's own, so the activation function is the one of the model's name, not of a tag.
    return {name: value for name, value in next(iter(choices), {}).items() if name in PREPROCESSING}


def _download(open_clip: Any, model: str, tag: Mapping[str, Any]) -> Path:
    try:
        return Path(open_clip.download_pretrained(tag))
    except (OSError, RuntimeError, ValueError) as error:
        raise OSError(
            f"the weights of {model} could not be downloaded ({short_error(error)}); on a machine without a network, "
            "name a file of them by --checkpoint"
        ) from error


def _create_from_folder(open_clip: Any, model: str, pretrained: str | None, checkpoint: Path | None) -> Any:
    """Creates a model whose configuration comes with its weights, which a `checkpoint` replaces."""
    if pretrained is not None:
        raise ValueError(f"--pretrained is for the models that open_clip lists; {model} comes with its weights")
    if model.startswith(LOCAL) and not Path(model.removeprefix(LOCAL), "open_clip_config.json").is_file():
        raise FileNotFoundError(f"{model.removeprefix(LOCAL)} holds no open_clip_config.json")
    try:
        own = {"require_pretrained": True} if checkpoint is None else {"load_weights": False}
        network = open_clip.create_model(model, pretrained_text=False, weights_only=True, **own)
    except _BAD_WEIGHTS as error:
        hint = "; on a machine without a network: local-dir:FOLDER, or --checkpoint" if model.startswith(HUB) else ""
        raise ValueError(f"{model} could not be loaded: {short_error(error)}{hint}") from error
    if checkpoint is not None:
        _load_weights(open_clip, network, checkpoint, model)
    return network


_BAD_WEIGHTS = (*UNREADABLE, pickle.UnpicklingError, SafetensorError)
"""Errors about a file of weights that is damaged, belongs to another model, or would execute code."""


def _load_weights(open_clip: Any, network: Any, path: Path, model: str) -> None:
    if path.suffix in (".npz", ".npy"):
        raise ValueError(f"{path} is an archive of numpy; a checkpoint is a safetensors or torch file")
    try:
        if path.suffix != ".safetensors":
            # The file is read once by torch alone, so that an error about code in it is not taken for another one.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except _BAD_WEIGHTS as error:
        raise ValueError(
            f"{path} is no checkpoint that can be read without executing code ({short_error(error)}); save its "
            "state_dict as safetensors"
        ) from error
    try:
        open_clip.load_checkpoint(network, str(path), strict=True, weights_only=True)
    except _BAD_WEIGHTS as error:
        raise ValueError(f"{path} does not hold the weights of {model}: {short_error(error)}") from error


class _Tokenizer:
    """open_clip's tokenizer of a model. It is loaded with the first text, because some need a download of their own."""

    def __init__(self, model: str) -> None:
        self.model = model

    def __call__(self, texts: list[str]) -> Tensor:
        with torch.device("cpu"):
            tokens: Tensor = self._tokenizer(texts)
        return tokens

    @functools.cached_property
    def _tokenizer(self) -> Any:
        open_clip = _open_clip()
        config = open_clip.get_model_config(self.model) or {}
        if config.get("text_cfg", {}).get("tokenizer_kwargs", {}).get("trust_remote_code"):
            raise ValueError(f"the tokenizer of {self.model} would execute code that comes with it, which is refused")
        try:
            with _quiet(open_clip):
                return open_clip.get_tokenizer(self.model)
        except ImportError as error:
            raise ValueError(f"the tokenizer of {self.model} needs a package: {short_error(error)}") from error
        except (OSError, RuntimeError, ValueError) as error:
            raise OSError(
                f"the tokenizer of {self.model} could not be loaded ({short_error(error)}); on a machine without a "
                f"network, put its files beside open_clip_config.json and give --model {LOCAL}FOLDER"
            ) from error


class _LastResort(logging.Handler):
    """Does what the root logger does without a handler. While it has this one, open_clip does not install its own."""

    def emit(self, record: logging.LogRecord) -> None:
        """Passes what is at least a warning to the handler that Python keeps for loggers without one."""
        if logging.lastResort is not None and record.levelno >= logging.lastResort.level:
            logging.lastResort.handle(record)


@contextlib.contextmanager
def _quiet(open_clip: Any) -> Iterator[None]:
    """Leaves out what open_clip writes to the root logger in this thread: it reports what is in order, or what an error
    here reports. Levels, handlers and the messages of others stay as they are."""
    folder, thread = str(Path(open_clip.__file__).parent), threading.get_ident()

    def keep(record: logging.LogRecord) -> bool:
        return record.thread != thread or not record.pathname.startswith(folder)

    root, stand_in = logging.getLogger(), _LastResort()
    if not root.handlers:
        root.addHandler(stand_in)
    root.addFilter(keep)
    try:
        yield
    finally:
        root.removeFilter(keep)
        root.removeHandler(stand_in)


def _open_clip() -> Any:
    try:
        import open_clip
    except ImportError as error:
        raise ValueError(needs("this encoder", f"open_clip ({error})", "encoders")) from error
    except RuntimeError as error:  # a torchvision that was built for another torch
        raise ValueError(
            f"open_clip cannot be imported beside torch {torch.__version__}: {short_error(error)}; torchvision must be "
            "of the same release and build as torch: pip uninstall torchvision, then install it from where torch came "
            "from (for the CPU build of torch: with the same --index-url)"
        ) from error
    return open_clip
