"""Where models come from: the encoder whose embeddings they were trained on, the pairs and the settings.

Two encoders of equal width give rows that mean nothing to each other's models, so each model remembers its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from geoflow_fast.runtime import checks, hashing
from geoflow_fast.runtime.files import contents_of, read_json

RESULT_FILE = "embed.json"
"""What `geoflow embed` writes beside embeddings: the facts of its job, and counts."""
FACTS = ("encoder", "version", "weights", "preprocess", "prompt")
"""Facts of an encoder that decide what its embeddings mean. Its name may be that of a folder, and half precision only
rounds."""
NAME_ONLY = "named"
"""In place of the digest of an encoder of which nothing but the name is known."""


@dataclass(frozen=True)
class Fingerprint:
    """An encoder: the name that people know it by, and a digest of what its embeddings depend on."""

    name: str
    digest: str

    def __post_init__(self) -> None:
        for part, value in asdict(self).items():
            if not isinstance(value, str) or not value:
                raise ValueError(f"the {part} of an encoder must be text, got {value!r}")

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Fingerprint:
        """The fingerprint of an encoder with these facts, which `Encoder.facts` returns."""
        kind, model = str(facts.get("encoder", "an encoder")), public_name(str(facts.get("model") or ""))
        name = f"{kind} {model}" if model else kind
        return cls(name, hashing.fingerprint({key: facts[key] for key in FACTS if key in facts}))

    @classmethod
    def named(cls, encoder: Fingerprint | str | None) -> Fingerprint | None:
        """The encoder that is given, of which only a name may be known; None if it is None."""
        if encoder is None or isinstance(encoder, cls):
            return encoder
        return cls(checks.words(encoder, "encoder"), NAME_ONLY)

    @classmethod
    def read(cls, value: Any) -> Fingerprint | None:
        """The fingerprint that a file holds; None if it holds none."""
        return cls(str(value["name"]), str(value["digest"])) if value else None

    def to_json(self) -> dict[str, str]:
        """Name and digest as values for JSON."""
        return asdict(self)

    def is_same(self, other: Fingerprint) -> bool:
        """Whether both are one encoder, by their names where nothing else is known of one of them."""
        if NAME_ONLY in (self.digest, other.digest):
            return self.name == other.name
        return self.digest == other.digest

    def __str__(self) -> str:
        return self.name if self.digest == NAME_ONLY else f"{self.name} ({self.digest[:12]})"


@dataclass(frozen=True)
class Origin:
    """What is known of the training of a flow or a head."""

    encoders: tuple[Fingerprint | None, Fingerprint | None] = (None, None)
    """The encoders of images and texts."""
    sides: tuple[str, str] = ("image", "text")
    """What the two sides are called."""
    pairs: Mapping[str, Any] = field(default_factory=dict)
    """The training pairs: their number, that of their images, and their fingerprint."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The settings of the run."""

    @classmethod
    def read(cls, value: Any) -> Origin:
        """The origin that a file of a model holds."""
        first, second = (Fingerprint.read(entry) for entry in value["encoders"])
        one, other = map(str, value["sides"])
        return cls((first, second), (one, other), dict(value["pairs"]), dict(value["settings"]))

    def to_json(self) -> dict[str, Any]:
        """All of it as values for JSON."""
        encoders = [None if encoder is None else encoder.to_json() for encoder in self.encoders]
        about = {"encoders": encoders, "sides": list(self.sides)}
        return {**about, "pairs": dict(self.pairs), "settings": dict(self.settings)}


def public_name(model: str) -> str:
    """The name of a model without the folders that lead to it on this machine, since models that are shared carry it.
    Names of the hub, user/name, stay as they are."""
    path = model.removeprefix("local-dir:").replace("\\", "/")
    is_path = path != model or path.startswith(("/", "~", ".")) or path.count("/") > 1
    return PurePosixPath(path).name if is_path else model


def embedded_by(folder: Path, side: str | None = None) -> Fingerprint | None:
    """The encoder of the embeddings in a folder of `geoflow embed`; None if nothing tells. `side`: "image" or "text",
    which may have encoders of their own."""
    file = folder / RESULT_FILE
    if not file.is_file():
        return None
    result = read_json(file, "the result of geoflow embed")
    with contents_of(file):
        facts = result["facts"]
        sides = facts.get("sides")
        known = facts if sides is None else sides[side or "image"]
        return Fingerprint.of(known) if "encoder" in known else None


def refuse_other_encoder(known: Mapping[str, Fingerprint | None]) -> None:
    """Raises a ValueError if two of these come from different encoders, with the names of both. `known`: what is
    compared, such as "the flow" and "the gallery", with the encoder where it is known."""
    told = [(what, encoder) for what, encoder in known.items() if encoder is not None]
    for (first, other), (what, encoder) in itertools.combinations(told, 2):
        if not encoder.is_same(other):
            raise ValueError(
                f"{what} has embeddings of {encoder}, but {first} was made for those of {other}; embed both with one "
                "encoder"
            )
