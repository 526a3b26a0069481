"""Encoders by the names that the command line uses."""

from __future__ import annotations

from pathlib import Path

from geoflow_fast.encoders.colours import ColourEncoder
from geoflow_fast.encoders.open_clip import DEFAULT_MODEL, OpenClipEncoder
from geoflow_fast.encoders.protocol import Encoder
from geoflow_fast.encoders.sentences import SentenceEncoder
from geoflow_fast.encoders.transformers import TransformersEncoder
from geoflow_fast.runtime.hub import ADDRESS

TRANSFORMERS_MODEL = "openai/clip-vit-base-patch32"
SENTENCE_MODEL = "sentence-transformers/all-MiniLM-L6-v2"


def open_encoder(
    kind: str,
    *,
    model: str | None = None,
    pretrained: str | None = None,
    checkpoint: Path | None = None,
    revision: str | None = None,
    prompt: str = "",
    device: str = "auto",
    precision: str = "auto",
) -> Encoder:
    """Returns the encoder that `geoflow embed --encoder` names: open_clip, transformers, sentence-transformers or
    colours. `model` is a folder or, with "hf://" before it, a name on the Hugging Face hub; with open_clip it is a name
    that open_clip knows."""
    given = {"--model": model, "--pretrained": pretrained, "--checkpoint": checkpoint, "--revision": revision}
    given["--prompt"] = prompt or None
    taken = {
        "open_clip": {"--model", "--pretrained", "--checkpoint"},
        "transformers": {"--model", "--revision"},
        "sentence-transformers": {"--model", "--revision", "--prompt"},
        "colours": set(),
    }
    if kind not in taken:
        raise ValueError(f"encoder must be {', '.join(taken)}, got {kind!r}")
    for flag, value in given.items():
        if value is not None and flag not in taken[kind]:
            fitting = [other for other, flags in taken.items() if flag in flags]
            raise ValueError(f"{flag} is for --encoder {' or '.join(fitting)}, not for {kind}")
    if kind == "open_clip":
        chosen = model or DEFAULT_MODEL
        return OpenClipEncoder.load(chosen, pretrained, checkpoint, device=device, precision=precision)
    if kind == "transformers":
        name = TRANSFORMERS_MODEL if model is None else _folder_or_repository(model)
        return TransformersEncoder.load(name, revision, device=device, precision=precision)
    if kind == "sentence-transformers":
        name = SENTENCE_MODEL if model is None else _folder_or_repository(model)
        return SentenceEncoder.load(name, revision, prompt=prompt, device=device, precision=precision)
    return ColourEncoder()


def _folder_or_repository(model: str) -> str:
    """The folder `model`, or the name of the repository with the address "hf://user/name"."""
    if model.startswith(ADDRESS):
        return model.removeprefix(ADDRESS)
    if not Path(model).is_dir():
        raise FileNotFoundError(f"--model {model} is not a folder; the address of a model on the hub is hf://user/name")
    return model
