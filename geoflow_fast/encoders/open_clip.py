"""Encoders of images and texts behind one small interface: open_clip's models, and one that needs no weights.

Weights are read without executing code: safetensors, or torch files that hold tensors alone.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import functools
import logging
import pickle
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from geoflow_fast.encoders.protocol import PRECISIONS, ImageLike, _picture, _sequence, _short, _stack, _texts, _unit
from geoflow_fast.encoders.sources import UNREADABLE
from geoflow_fast.runtime import checks, hashing
from geoflow_fast.runtime.device import usable_device

if TYPE_CHECKING:
    from PIL.Image import Image


PAPER_WEIGHTS = {"ViT-H-14": "laion2b_s32b_b79k", "ViT-L-16-SigLIP-384": "webli"}
"""The paper's encoders; their weights are taken where none are named."""


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
        if precision not in ("auto", *PRECISIONS):
            raise ValueError(f"precision must be auto, {', '.join(PRECISIONS)}, got {precision!r}")
        self.device = usable_device(str(device))
        if precision == "auto":
            precision = "float16" if self.device.type == "cuda" else "float32"
        self.precision, self.name = precision, name
        self.preprocess, self.tokenizer = preprocess, tokenizer
        self._weights = _digest_of(model)
        self.model: Any = model.eval().to(self.device)
        self._projection = {"image": _image_projection(model), "text": _text_projection(model)}
        self.dim = self._find_dim()

    @classmethod
    def load(
        cls,
        model: str = "ViT-H-14",
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
        with _quiet():
            if model.startswith((LOCAL, HUB)):
                network = _create_from_folder(open_clip, model, pretrained, path)
            else:
                network = _create_by_name(open_clip, model, pretrained, path)
        from open_clip.transform import PreprocessCfg, image_transform_v2

        transform = image_transform_v2(PreprocessCfg(**network.visual.preprocess_cfg), is_train=False)
        return cls(network, transform, _Tokenizer(model), name=model, device=device, precision=precision)

    def facts(self) -> dict[str, Any]:
        """Name, digest of the weights, preprocessing and precision."""
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
        return self.preprocess(_picture(image))

    def encode_images(self, images: Sequence[ImageLike]) -> Tensor:
        """Embeds images: float32 unit rows [B, dim] on the CPU."""
        return self.project_images(self.image_activations(images))

    def encode_texts(self, texts: Sequence[str]) -> Tensor:
        """Embeds texts: float32 unit rows [B, dim] on the CPU."""
        return self.project_texts(self.text_activations(texts))

    @torch.inference_mode()
    def image_activations(self, images: Sequence[ImageLike]) -> Tensor:
        """Image activations before the last projection, float32 [B, k_I]; the unscaled embedding if there is none."""
        if not len(_sequence(images, "images")):
            return torch.empty(0, self._width_before("image"))
        batch = _stack(self.prepare, images).to(self.device, non_blocking=True)
        if batch.dim() != 4 or batch.shape[1] != 3 or not batch.is_floating_point():
            raise ValueError(
                f"prepared images must be floating-point [3, H, W], got {batch.dtype} {list(batch.shape[1:])}"
            )
        with self._tower("image"):
            return self.model.encode_image(batch, normalize=False).float()

    @torch.inference_mode()
    def text_activations(self, texts: Sequence[str]) -> Tensor:
        """Text activations before the last projection, float32 [B, k_T]; the unscaled embedding if there is none."""
        known = _texts(texts)
        if not known:
            return torch.empty(0, self._width_before("text"))
        tokens = self.tokenizer(known).to(self.device, non_blocking=True)
        with self._tower("text"):
            return self.model.encode_text(tokens, normalize=False).float()

    def project_images(self, activations: Tensor) -> Tensor:
        """Embeddings of image activations [B, k_I]: float32 unit rows [B, dim] on the CPU."""
        return self._project("image", activations)

    def project_texts(self, activations: Tensor) -> Tensor:
        """Embeddings of text activations [B, k_T]: float32 unit rows [B, dim] on the CPU."""
        return self._project("text", activations)

    def projections(self) -> dict[str, Tensor]:
        """The last projections: `image.weight` [dim, k_I], `text.weight` [dim, k_T], and `.bias` [dim] if there is one.

        A tower that does not end in a linear projection raises a ValueError.
        """
        found: dict[str, Tensor] = {}
        for tower, projection in self._projection.items():
            if projection is None:
                raise ValueError(
                    f"the {tower} tower of {self.name or 'this model'} does not end in a linear projection, so there "
                    "are no activations before it"
                )
            found |= {f"{tower}.{name}": value.detach() for name, value in projection.linear.named_parameters()}
        return found

    @contextlib.contextmanager
    def _tower(self, name: str) -> Iterator[None]:
        """The network in its precision, the tower `name` without its last projection."""
        low, projection = self.precision != "float32", self._projection[name]
        mixed = torch.autocast(self.device.type, PRECISIONS[self.precision] if low else None, enabled=low)
        with mixed, projection.left_out() if projection else contextlib.nullcontext():
            yield

    @torch.inference_mode()
    def _project(self, tower: str, activations: Tensor) -> Tensor:
        projection, width = self._projection[tower], self._width_before(tower)
        if checks.with_values(activations, "activations").dim() != 2 or activations.shape[1] != width:
            raise ValueError(f"activations must be [B, {width}], got {tuple(activations.shape)}")
        activations = activations.float()
        if projection is None:
            return _unit(activations)
        return _unit(projection.linear(activations.to(projection.linear.weight.device)))

    def _width_before(self, tower: str) -> int:
        projection = self._projection[tower]
        return self.dim if projection is None else projection.linear.in_features

    def _find_dim(self) -> int:
        for projection in self._projection.values():
            if projection is not None:
                return projection.linear.out_features
        side = self.model.visual.image_size
        height, width = side if isinstance(side, tuple) else (side, side)
        with torch.inference_mode():
            return int(self.model.encode_image(torch.zeros(1, 3, height, width, device=self.device)).shape[-1])


@dataclass(frozen=True)
class _Projection:
    """The last linear map of a tower: attribute `name` of `owner`."""

    owner: nn.Module
    name: str
    linear: nn.Linear
    """In float32."""

    @classmethod
    def find(cls, owner: Any, name: str) -> _Projection | None:
        """From a layer, or from a matrix [k, dim] that is multiplied from the right; None if neither is there."""
        found = getattr(owner, name, None)
        if isinstance(found, nn.Parameter):
            width, dim = found.shape
            linear = nn.Linear(width, dim, bias=False, device=found.device)
            linear.weight = nn.Parameter(found.detach().float().T.contiguous())
            return cls(owner, name, linear)
        return cls(owner, name, copy.deepcopy(found).float()) if isinstance(found, nn.Linear) else None

    @contextlib.contextmanager
    def left_out(self) -> Iterator[None]:
        """The tower without its projection."""
        found = getattr(self.owner, self.name)
        # Towers test these attributes for None; other places call them.
        optional = isinstance(found, nn.Parameter) or self.name == "text_projection"
        setattr(self.owner, self.name, None if optional else nn.Identity())
        try:
            yield
        finally:
            setattr(self.owner, self.name, found)


def _image_projection(model: Any) -> _Projection | None:
    """Of open_clip's own vision transformers, or of timm's models."""
    return _Projection.find(model.visual, "proj") or _Projection.find(getattr(model.visual, "head", None), "proj")


def _text_projection(model: Any) -> _Projection | None:
    """Of open_clip's own text towers, which are `model.text` or the model itself, or of Hugging Face's."""
    tower = getattr(model, "text", model)
    return _Projection.find(tower, "text_projection") or _Projection.find(tower, "proj")


def _digest_of(model: nn.Module) -> str:
    """SHA-256 of names and weights."""
    state = model.state_dict()
    return hashing.fingerprint({"names": list(state), "values": hashing.digest(state.values())})


def _create_by_name(open_clip: Any, model: str, pretrained: str | None, checkpoint: Path | None) -> Any:
    if open_clip.get_model_config(model) is None:
        close = difflib.get_close_matches(model, open_clip.list_models(), n=5, cutoff=0.4)
        hint = f"; close to it: {', '.join(close)}" if close else ""
        raise ValueError(f"open_clip has no model {model!r}{hint}. A folder of your own is local-dir:FOLDER")
    tag = _settings_of_weights(open_clip, model, pretrained, checkpoint)
    quick = open_clip.get_model_config(model).get("quick_gelu", False)
    if tag and quick and not tag.get("quick_gelu", False):
        raise ValueError(
            f"{model} has QuickGELU, but the weights {pretrained!r} were trained without; use the plain one"
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
    """What open_clip knows of a tag: where its file is, and how images are prepared for it."""
    known = open_clip.list_pretrained_tags_by_model(model)
    pretrained = pretrained or PAPER_WEIGHTS.get(model)
    listed = f"it has {', '.join(known)}" if known else "it has none: give a file by --checkpoint"
    if pretrained is not None:
        found: Mapping[str, Any] = open_clip.get_pretrained_cfg(model, pretrained)
        if not found:
            raise ValueError(f"open_clip has no weights {pretrained!r} for {model}; {listed}")
        return found
    if checkpoint is None:
        raise ValueError(f"name the weights of {model} by --pretrained or --checkpoint; {listed}")
    choices = {tag: open_clip.get_pretrained_cfg(model, tag) for tag in known}
    if len({str([tag.get(name) for name in PREPROCESSING]) for tag in choices.values()}) > 1:
        raise ValueError(
            f"weights of {model} differ in how images are prepared: --pretrained must say which of them {checkpoint} "
            f"is, or began as; {listed}"
        )
    # Weights of the user's own: the model's activation stays what its name says.
    return {name: value for name, value in next(iter(choices.values()), {}).items() if name in PREPROCESSING}


def _download(open_clip: Any, model: str, tag: Mapping[str, Any]) -> Path:
    try:
        return Path(open_clip.download_pretrained(tag))
    except (OSError, RuntimeError, ValueError) as error:
        raise OSError(
            f"the weights of {model} could not be downloaded ({_short(error)}); on a machine without a network, give a "
            "file of them by --checkpoint"
        ) from error


def _create_from_folder(open_clip: Any, model: str, pretrained: str | None, checkpoint: Path | None) -> Any:
    """A model whose configuration comes with its weights; `checkpoint` replaces them."""
    if pretrained is not None:
        raise ValueError(f"--pretrained is for models of open_clip's list; {model} comes with weights")
    if model.startswith(LOCAL) and not Path(model.removeprefix(LOCAL), "open_clip_config.json").is_file():
        raise FileNotFoundError(f"{model.removeprefix(LOCAL)} holds no open_clip_config.json")
    try:
        own = {"require_pretrained": True} if checkpoint is None else {"load_weights": False}
        network = open_clip.create_model(model, pretrained_text=False, weights_only=True, **own)
    except _BAD_WEIGHTS as error:
        hint = "; on a machine without a network: local-dir:FOLDER, or --checkpoint" if model.startswith(HUB) else ""
        raise ValueError(f"{model} could not be loaded: {_short(error)}{hint}") from error
    if checkpoint is not None:
        _load_weights(open_clip, network, checkpoint, model)
    return network


_BAD_WEIGHTS = (*UNREADABLE, pickle.UnpicklingError, SafetensorError)
"""What reading weights raises when the file is damaged, of another model, or wants code to run."""


def _load_weights(open_clip: Any, network: Any, path: Path, model: str) -> None:
    if path.suffix in (".npz", ".npy"):
        raise ValueError(f"{path} is an archive of numpy; a checkpoint is a safetensors or torch file")
    try:
        if path.suffix != ".safetensors":
            # Once by itself: the error of a file that would execute code must not be taken for another one.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                # guard: the weights of an encoder hold no code
                torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except _BAD_WEIGHTS as error:
        raise ValueError(
            f"{path} is no checkpoint that can be read without executing code ({_short(error)}); save its state_dict "
            "as safetensors"
        ) from error
    try:
        open_clip.load_checkpoint(network, str(path), strict=True, weights_only=True)
    except _BAD_WEIGHTS as error:
        raise ValueError(f"{path} does not hold the weights of {model}: {_short(error)}") from error


class _Tokenizer:
    """open_clip's tokenizer of a model, made when the first text comes: some are downloads of their own."""

    def __init__(self, model: str) -> None:
        self.model = model

    def __call__(self, texts: list[str]) -> Tensor:
        tokens: Tensor = self._made(texts)
        return tokens

    @functools.cached_property
    def _made(self) -> Any:
        open_clip = _open_clip()
        config = open_clip.get_model_config(self.model) or {}
        if config.get("text_cfg", {}).get("tokenizer_kwargs", {}).get("trust_remote_code"):
            raise ValueError(f"the tokenizer of {self.model} asks to execute code that comes with it; refused")
        try:
            with _quiet():
                return open_clip.get_tokenizer(self.model)
        except ImportError as error:
            raise ValueError(f"the tokenizer of {self.model} needs a package: {_short(error)}") from error
        except (OSError, RuntimeError, ValueError) as error:
            raise OSError(
                f"the tokenizer of {self.model} could not be loaded ({_short(error)}); on a machine without a network, "
                f"put its files beside open_clip_config.json and give --model {LOCAL}FOLDER"
            ) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """open_clip logs what is said here in an error, or is as it should be."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)


def _open_clip() -> Any:
    try:
        import open_clip
    except ImportError as error:
        raise ValueError(f"open_clip is needed ({error}): pip install 'geoflow_fast[encoders]'") from error
    except RuntimeError as error:  # a torchvision that was built for another torch
        raise ValueError(f"open_clip cannot be imported beside torch {torch.__version__}: {_short(error)}") from error
    return open_clip
