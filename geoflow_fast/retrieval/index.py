"""The index of a gallery that lets `gallery_posterior` leave items out: built once, saved beside the gallery."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from geoflow_fast.ops import native
from geoflow_fast.ops.gallery_search import RowCodes
from geoflow_fast.ops.pruning import PrefixRows, reduce_rows
from geoflow_fast.retrieval.gallery import Gallery
from geoflow_fast.runtime import checks
from geoflow_fast.runtime.files import contents_of
from geoflow_fast.runtime.tensors import load_tensors, save_tensors

KIND = "gallery index"
SAMPLE_ROWS = 32_768
"""Rows from which the principal directions are estimated. Any directions give valid bounds; these give tight ones."""


@dataclass(frozen=True)
class GalleryIndex(PrefixRows):
    """An index of a gallery in memory or on disk: each item as its leading principal coordinates and the norm of the
    rest, `width` numbers, for pruning; and rotated to bytes, a quarter of float32 rows, for bounds of its cosines.

    Building it takes about as long as scoring a few queries. `save` and `load` use one safetensors file, which contains
    the gallery's digest: `load` refuses an index of another gallery. Indices of earlier releases have no bytes; they
    are loaded, and search goes without.
    """

    digest: str
    """Hash of the gallery's rows (`Gallery.digest`)."""

    @classmethod
    def build(cls, gallery: Gallery | Tensor, width: int | None = None) -> GalleryIndex:
        """Builds the index of a gallery. `width`: from 2 to the gallery's width, by default an eighth of it."""
        gallery = Gallery.of(gallery)
        width = max(2, gallery.dim // 8) if width is None else width
        if not 2 <= width <= gallery.dim:
            raise ValueError(f"width must be between 2 and the gallery's {gallery.dim}, got {width}")
        projection = _principal_directions(gallery, width - 1)
        rows = torch.empty(len(gallery), width, device="cpu", dtype=torch.float32)
        codes = None if native.missing() is not None else RowCodes.empty(len(gallery), gallery.dim)
        largest = 0.0
        for first, block in gallery.blocks("cpu", torch.float32):
            for start in range(0, len(block), SAMPLE_ROWS):
                some = block[start : start + SAMPLE_ROWS]
                part, span = reduce_rows(some.double(), projection), slice(first + start, first + start + len(some))
                rows[span] = _round_norm_up(part)
                largest = max(largest, float(torch.linalg.vector_norm(part, dim=1).max()))
                codes = None if codes is None else codes.filled(span, RowCodes.encode(some))
        return cls(projection, rows, largest, gallery.digest(), codes=codes)

    def save(self, path: str | Path) -> None:
        """Writes the index to the file `path`, atomically."""
        info = {"digest": self.digest, "largest_norm": self.largest_norm}
        tensors = {"projection": self.projection, "rows": self.rows}
        if self.codes is not None:
            info["largest_coded_norm"] = self.codes.largest_norm
            tensors |= {"code": self.codes.code, "code_scale": self.codes.scale, "code_error": self.codes.error}
        save_tensors(checks.path(path, "path"), tensors, kind=KIND, info=info)

    @classmethod
    def load(cls, path: str | Path, gallery: Gallery | Tensor) -> GalleryIndex:
        """Reads the index of `gallery` from a file, which stays mapped if the gallery is on disk. A damaged file or
        another gallery's index raises a ValueError."""
        gallery = Gallery.of(gallery)
        path = checks.path(path, "path")
        tensors, info = load_tensors(path, kind=KIND, mapped=not gallery.in_memory)
        with contents_of(path):
            codes = None
            if "code" in tensors:
                arrays = tensors["code"], tensors["code_scale"], tensors["code_error"]
                codes = RowCodes(*arrays, float(info["largest_coded_norm"]))
            norm = float(info["largest_norm"])
            index = cls(tensors["projection"], tensors["rows"], norm, info["digest"], codes=codes)
        index.check_digest(gallery)
        return index

    def check_digest(self, gallery: Gallery) -> None:
        """Raises a ValueError unless this index was built from exactly the rows of `gallery`."""
        if self.digest != gallery.digest():
            raise ValueError("this is the index of another gallery, or the gallery has changed; build it anew")


def _principal_directions(gallery: Gallery, count: int) -> Tensor:
    """Orthonormal rows [count, d] float64: leading eigenvectors of the second moment of evenly spaced rows."""
    step = max(1, len(gallery) // SAMPLE_ROWS)
    moment = torch.zeros(gallery.dim, gallery.dim, dtype=torch.float64, device="cpu")
    for first, block in gallery.blocks("cpu", torch.float32):
        some = block[-first % step :: step]
        moment += (some.T @ some).double()
    _, vectors = torch.linalg.eigh(moment)
    return vectors.flip(1).T[:count].contiguous()


def _round_norm_up(rows: Tensor) -> Tensor:
    """Rounds float64 rows to float32, their last column upwards."""
    rounded = rows.float()
    rounded[:, -1] = torch.nextafter(rounded[:, -1], torch.tensor(torch.inf, dtype=rounded.dtype, device="cpu"))
    return rounded
