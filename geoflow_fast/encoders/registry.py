"""Encoders by the names that the command line uses."""

from __future__ import annotations

from pathlib import Path

from geoflow_fast.encoders.colours import ColourEncoder
from geoflow_fast.encoders.open_clip import OpenClipEncoder
from geoflow_fast.encoders.protocol import Encoder


def open_encoder(
    kind: str,
    *,
    model: str | None = None,
    pretrained: str | None = None,
    checkpoint: Path | None = None,
    device: str = "auto",
    precision: str = "auto",
) -> Encoder:
    """Returns the encoder that `geoflow embed --encoder` names: open_clip or colours."""
    if kind == "open_clip":
        model = model or "ViT-H-14"
        return OpenClipEncoder.load(model, pretrained, checkpoint, device=device, precision=precision)
    if kind != "colours":
        raise ValueError(f"encoder must be open_clip or colours, got {kind!r}")
    given = {"--model": model, "--pretrained": pretrained, "--checkpoint": checkpoint}
    for flag, value in given.items():
        if value is not None:
            raise ValueError(f"{flag} is for --encoder open_clip; colours has no weights")
    return ColourEncoder()
