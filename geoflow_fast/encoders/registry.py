"""Encoders by the names that the command line uses."""

from __future__ import annotations

from pathlib import Path

from geoflow_fast.encoders.colours import ColourEncoder
from geoflow_fast.encoders.open_clip import DEFAULT_MODEL, OpenClipEncoder
from geoflow_fast.encoders.protocol import Encoder
from geoflow_fast.encoders.sentences import SentenceEncoder
from geoflow_fast.encoders.transformers import TransformersEncoder
from geoflow_fast.runtime.hub import ADDRESS, repository_of

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
    colours. `model` is a folder or the address of a repository on the Hugging Face hub, "hf://user/name" or
    "hf://user/name@revision"; with open_clip it is a name that open_clip knows."""
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
        name, version = _folder_or_repository(model or ADDRESS + TRANSFORMERS_MODEL, revision)
        return TransformersEncoder.load(name, version, device=device, precision=precision)
    if kind == "sentence-transformers":
        name, version = _folder_or_repository(model or ADDRESS + SENTENCE_MODEL, revision)
        return SentenceEncoder.load(name, version, prompt=prompt, device=device, precision=precision)
    return ColourEncoder()


def _folder_or_repository(model: str, revision: str | None) -> tuple[str, str | None]:
    """The folder `model`, or the name of the repository with the address "hf://user/name" or "hf://user/name@revision";
    and the revision."""
    if not model.startswith(ADDRESS):
        if not Path(model).is_dir():
            raise FileNotFoundError(
                f"--model {model} is not a folder; the address of a model on the hub is hf://user/name"
            )
        return model, revision
    name, addressed = repository_of(model)
    if addressed is not None and revision not in (None, addressed):
        raise ValueError(f"--model {model} names another revision than --revision {revision}; give one of them")
    if Path(name).exists():  # the libraries take a folder of this name for the model
        raise FileExistsError(
            f"the folder {name} hides the repository {ADDRESS}{name}; give the folder's full path, or run elsewhere"
        )
    return name, addressed or revision
