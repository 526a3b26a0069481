"""Small pictures of items, embedded in a page. Only files inside the folder that was named are ever opened."""

from __future__ import annotations

import base64
import io
from pathlib import Path

from geoflow_fast.encoders.sources import read_image
from geoflow_fast.runtime import extras

SIDE, QUALITY = 96, 60
LARGEST_FILE = 1 << 26
"""Larger files are left out: a thumbnail is not worth the memory."""
SUFFIXES = ("", ".jpg", ".jpeg", ".png", ".webp")
"""What may be missing at the end of a name."""


class Thumbnails:
    """The pictures of a folder, by the names of its files."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise NotADirectoryError(f"{folder} is not a folder of images")
        if (reason := extras.missing("a page with thumbnails", "Pillow", "PIL", "encoders")) is not None:
            raise ValueError(reason)
        self.folder = folder.resolve()
        self.skipped: dict[str, str] = {}
        """Why names have no picture."""

    def __call__(self, name: str) -> str:
        """The thumbnail of a file as a data URI; empty, with the reason in `skipped`, if there is none."""
        try:
            return self._embedded(self._inside(name))
        except (OSError, ValueError) as error:
            self.skipped[name] = " ".join(str(error).split())
            return ""

    def _inside(self, name: str) -> Path:
        """The file of that name inside the folder, where links that lead out of it do not count."""
        if not name or "\0" in name or Path(name).is_absolute():
            raise ValueError(f"{name!r} is not the name of a file in the folder")
        for suffix in SUFFIXES:
            file = (self.folder / f"{name}{suffix}").resolve()
            if not file.is_relative_to(self.folder):
                raise ValueError(f"{name!r} leads out of the folder")
            if file.is_file():
                return file
        raise FileNotFoundError(f"{name} is not a file in the folder")

    def _embedded(self, file: Path) -> str:
        size = file.stat().st_size
        if size > LARGEST_FILE:
            raise ValueError(f"{file.name} has {size} bytes")
        small = read_image(file, (2 * SIDE, 2 * SIDE))
        small.thumbnail((SIDE, SIDE))
        return data_uri(small)


def data_uri(picture: object) -> str:
    """A picture of Pillow as a small JPEG in a data URI."""
    stream = io.BytesIO()
    picture.save(stream, "JPEG", quality=QUALITY, optimize=True)  # type: ignore[attr-defined]
    return f"data:image/jpeg;base64,{base64.b64encode(stream.getvalue()).decode()}"
