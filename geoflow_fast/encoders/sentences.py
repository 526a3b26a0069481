"""Encoders of texts by models of `sentence-transformers`. No code that comes with a model is run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from geoflow_fast.encoders.protocol import (
    ImageLike,
    chosen_precision,
    clean_texts,
    mixed_precision,
    short_error,
    unit_rows,
    weights_digest,
)
from geoflow_fast.encoders.sources import UNREADABLE
from geoflow_fast.runtime import checks
from geoflow_fast.runtime.device import usable_device
from geoflow_fast.runtime.extras import needs

if TYPE_CHECKING:
    from PIL.Image import Image

BATCH = 64


class SentenceEncoder:
    """A `SentenceTransformer`, which embeds texts. `load` creates one by name or from a folder.

    `prompt` is put before every text, as some models want for queries ("query: ") or passages. `precision` is as for
    `gf.TransformersEncoder`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        name: str = "",
        prompt: str = "",
        device: str | torch.device = "auto",
        precision: str = "auto",
    ) -> None:
        if not callable(getattr(model, "encode", None)):
            raise TypeError(f"model must be a SentenceTransformer, got {type(model).__name__}")
        self.device = usable_device(str(device))
        self.precision, self.name = chosen_precision(self.device, precision), name
        self.prompt = checks.words(prompt, "prompt")
        self._weights = weights_digest(model)
        self.model: Any = model.eval().to(self.device)
        self.dim = len(self.encode_texts(["a text"])[0])

    @classmethod
    def load(
        cls,
        model: str,
        revision: str | None = None,
        *,
        prompt: str = "",
        device: str | torch.device = "auto",
        precision: str = "auto",
    ) -> SentenceEncoder:
        """Loads a folder that `SentenceTransformer.save` wrote, which works without a network connection, or a model of
        the Hugging Face hub by its name, downloaded once; `revision` names a branch, tag or commit of it."""
        checks.words(model, "model")
        if revision is not None:
            checks.words(revision, "revision")
        library = _sentence_transformers()
        try:
            with torch.device("cpu"):
                # Files of this format hold no code.
                network = library.SentenceTransformer(
                    model,
                    device="cpu",
                    revision=revision,
                    trust_remote_code=False,
                    model_kwargs={"use_safetensors": True},
                )
        except UNREADABLE as error:
            hint = "" if Path(model).is_dir() else "; without a network, name a folder that holds it"
            raise ValueError(f"{model} could not be loaded: {short_error(error)}{hint}") from error
        return cls(network, name=model, prompt=prompt, device=device, precision=precision)

    def facts(self) -> dict[str, Any]:
        """Returns the name, a digest of the weights, the prompt and the precision."""
        return {
            "encoder": "sentence-transformers",
            "model": self.name,
            "weights": self._weights,
            "prompt": self.prompt,
            "precision": self.precision,
        }

    def prepare(self, image: Image) -> Tensor:
        """Raises a ValueError: these models have no image tower."""
        raise ValueError(f"{self.name or 'this model'} embeds texts alone, and no {type(image).__name__}")

    def encode_images(self, images: Sequence[ImageLike]) -> Tensor:
        """Raises a ValueError: these models have no image tower."""
        raise ValueError(f"{self.name or 'this model'} embeds texts alone, not {len(images)} images")

    @torch.inference_mode()
    def encode_texts(self, texts: Sequence[str]) -> Tensor:
        """Embeds texts: float32 unit rows [B, dim] on the CPU. Longer ones are cut to what the model reads."""
        known = clean_texts(texts)
        if not known:
            return torch.empty(0, self.dim, dtype=torch.float32, device="cpu")
        options = {"batch_size": BATCH, "convert_to_tensor": True, "show_progress_bar": False}
        with mixed_precision(self.device, self.precision):
            rows: Tensor = self.model.encode(known, prompt=self.prompt or None, device=str(self.device), **options)
        return unit_rows(rows.float())


def _sentence_transformers() -> Any:
    try:
        import sentence_transformers
    except (ImportError, RuntimeError) as error:
        package = f"sentence-transformers ({short_error(error)})"
        raise ValueError(needs("this encoder", package, "encoders")) from error
    return sentence_transformers
