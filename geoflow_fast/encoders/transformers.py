"""Encoders by models of `transformers` with an image and a text tower: CLIP, SigLIP and their kin.

Weights are read from safetensors alone, and no code that comes with a model is run.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
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


class TransformersEncoder:
    """A model of `transformers` with its image processor and tokenizer. `load` creates one by name or from a folder.

    The model has `get_image_features` and `get_text_features`, as `CLIPModel` and `SiglipModel` do. `precision`:
    "float32"; "float16" or "bfloat16" for mixed precision; or "auto", float16 on a GPU and float32 on a CPU.
    """

    def __init__(
        self,
        model: nn.Module,
        image_processor: Any,
        tokenizer: Any,
        *,
        name: str = "",
        device: str | torch.device = "auto",
        precision: str = "auto",
    ) -> None:
        for method in ("get_image_features", "get_text_features"):
            if not hasattr(model, method):
                raise TypeError(f"{type(model).__name__} has no {method}: it is no model of images and texts")
        self.device = usable_device(str(device))
        self.precision, self.name = chosen_precision(self.device, precision), name
        self.image_processor, self.tokenizer = image_processor, tokenizer
        self._weights = weights_digest(model)
        self.model: Any = model.eval().to(self.device)
        self._preprocess = json.loads(image_processor.to_json_string())
        config: Any = self.model.config
        self._is_siglip = str(config.model_type).startswith("siglip")
        self.dim = int(getattr(config, "projection_dim", 0) or config.text_config.hidden_size)
        if self._is_siglip:
            self.dim = int(getattr(config.text_config, "projection_size", 0) or config.text_config.hidden_size)

    @classmethod
    def load(
        cls,
        model: str,
        revision: str | None = None,
        *,
        device: str | torch.device = "auto",
        precision: str = "auto",
    ) -> TransformersEncoder:
        """Loads a folder that `save_pretrained` wrote, which works without a network connection, or a model of the
        Hugging Face hub by its name, downloaded once; `revision` names a branch, tag or commit of it."""
        checks.words(model, "model")
        if revision is not None:
            checks.words(revision, "revision")
        library = _transformers()
        options: dict[str, Any] = {"revision": revision or "main", "trust_remote_code": False}
        try:
            with torch.device("cpu"):
                # Files of this format hold no code.
                network = library.AutoModel.from_pretrained(model, use_safetensors=True, dtype=torch.float32, **options)
            processor = library.AutoImageProcessor.from_pretrained(model, use_fast=False, **options)
            tokenizer = library.AutoTokenizer.from_pretrained(model, **options)
        except UNREADABLE as error:
            hint = "" if Path(model).is_dir() else "; without a network, name a folder that holds it"
            raise ValueError(f"{model} could not be loaded: {short_error(error)}{hint}") from error
        return cls(network, processor, tokenizer, name=model, device=device, precision=precision)

    def facts(self) -> dict[str, Any]:
        """Returns the name, a digest of the weights, the preprocessing and the precision."""
        return {
            "encoder": "transformers",
            "model": self.name,
            "weights": self._weights,
            "preprocess": self._preprocess,
            "precision": self.precision,
        }

    def prepare(self, image: Image) -> Tensor:
        """Applies the image processor: [3, H, W]."""
        with torch.device("cpu"):
            prepared: Tensor = self.image_processor(images=check_picture(image), return_tensors="pt")["pixel_values"][0]
        return prepared.float()

    @torch.inference_mode()
    def encode_images(self, images: Sequence[ImageLike]) -> Tensor:
        """Embeds images: float32 unit rows [B, dim] on the CPU."""
        if not len(check_sequence(images, "images")):
            return self._nothing()
        batch = stack_images(self.prepare, images).to(self.device, non_blocking=True)
        if batch.dim() != 4 or batch.shape[1] != 3 or not batch.is_floating_point():
            raise ValueError(f"prepared images must be floating-point [3, H, W], got {list(batch.shape[1:])}")
        with mixed_precision(self.device, self.precision):
            return unit_rows(_features(self.model.get_image_features(pixel_values=batch)))

    @torch.inference_mode()
    def encode_texts(self, texts: Sequence[str]) -> Tensor:
        """Embeds texts: float32 unit rows [B, dim] on the CPU. Longer ones are cut to what the model reads."""
        known = clean_texts(texts)
        if not known:
            return self._nothing()
        length = int(self.model.config.text_config.max_position_embeddings)
        # SigLIP was trained on texts that are padded to its full length.
        padding = "max_length" if self._is_siglip else True
        with torch.device("cpu"):
            tokens = self.tokenizer(known, padding=padding, truncation=True, max_length=length, return_tensors="pt").to(
                self.device
            )
        inputs = {"input_ids": tokens["input_ids"]}
        if not self._is_siglip:
            inputs["attention_mask"] = tokens["attention_mask"]
        with mixed_precision(self.device, self.precision):
            return unit_rows(_features(self.model.get_text_features(**inputs)))

    def _nothing(self) -> Tensor:
        return torch.empty(0, self.dim, dtype=torch.float32, device="cpu")


def _features(output: Any) -> Tensor:
    """The embeddings in what a model returns, which is a tensor or an object that has them."""
    features: Tensor = output if isinstance(output, Tensor) else output.pooler_output
    return features.float()


def _transformers() -> Any:
    try:
        import transformers
        from transformers import AutoModel  # its parts are imported when they are first asked for

        assert AutoModel is not None
    except (ImportError, RuntimeError) as error:
        raise ValueError(needs("this encoder", f"transformers ({short_error(error)})", "encoders")) from error
    return transformers
