"""Parts of a set of pairs, by image, each as a folder of its own."""

from __future__ import annotations

import copy
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from geoflow_fast.data.embeddings import IMAGE_IDS, TEXT_IDS
from geoflow_fast.data.ids import open_ids, row_numbers
from geoflow_fast.data.pairs import EmbeddingPairs
from geoflow_fast.data.rows import Index
from geoflow_fast.jobs.job import read_facts, refuse_other_job
from geoflow_fast.runtime.files import locked, sync_folder, write_json

FACTS_FILE = "split.json"
FORMAT = 1


@dataclass(frozen=True)
class PartSummary:
    """The size of one part."""

    pairs: int
    images: int
    folder: str


def parts_of(words: str) -> dict[str, float]:
    """The shares that `train=0.8,ask=0.2` names, in their order; together they are at most 1."""
    parts: dict[str, float] = {}
    for entry in words.split(","):
        name, sign, share = (word.strip() for word in entry.partition("="))
        try:
            number = float(share)
        except ValueError:
            number = math.nan
        if not sign or not _is_plain(name) or not 0 < number <= 1:
            raise ValueError(f"parts must be NAME=SHARE with a comma between them, shares up to 1, got {entry!r}")
        if name in parts:
            raise ValueError(f"parts names {name} twice")
        parts[name] = number
    if sum(parts.values()) > 1 + 1e-9:
        raise ValueError(f"parts are shares of the images, but theirs sum to {sum(parts.values()):g}")
    return parts


def rows_of_parts(pairs: EmbeddingPairs, parts: Mapping[str, float], seed: int) -> dict[str, Index]:
    """The numbers of the pairs of each part, in their order: images are drawn by `seed`, with all their texts."""
    images, member = np.unique(pairs.group, return_inverse=True)
    order = np.random.default_rng(seed).permutation(len(images))
    edges = np.round(np.cumsum([0.0, *parts.values()]) * len(images)).astype(int)
    chosen = {}
    for name, low, high in zip(parts, edges[:-1], edges[1:]):
        if low == high:
            raise ValueError(f"part {name} would be empty: {parts[name]:g} of {len(images)} images is less than one")
        chosen[name] = np.flatnonzero(np.isin(member, order[low:high]))
    return chosen


def split_pairs(
    pairs: EmbeddingPairs,
    parts: Mapping[str, float],
    out: Path,
    *,
    seed: int = 0,
    ids: Path | None = None,
    image_ids: Path | None = None,
    overwrite: bool = False,
) -> dict[str, PartSummary]:
    """Writes each part into a folder of `out`, with files of the ids of its texts and images: those in the files `ids`
    and `image_ids`, those that the pairs come with, or the numbers of their rows. Parts appear whole; the same call
    continues after a kill."""
    pairs = with_ids(pairs, ids, image_ids)
    names, images = (rows.ids or row_numbers(len(rows)) for rows in (pairs.text, pairs.image))
    chosen = rows_of_parts(pairs, parts, seed)
    facts = {
        "task": "split",
        "format": FORMAT,
        "parts": dict(parts),
        "seed": seed,
        "pairs": pairs.fingerprint(),
        "ids": names.digest(),
        "image_ids": images.digest(),
    }
    out.mkdir(parents=True, exist_ok=True)
    with locked(out):
        left = read_facts(out / FACTS_FILE)
        if left != facts:
            existing = [name for name in [*chosen, *_other_parts(left, chosen)] if (out / name).exists()]
            if left is not None and not overwrite:
                refuse_other_job(out, left, facts)
            if left is None and existing and not overwrite:
                raise FileExistsError(f"{out / existing[0]} exists; choose another folder, or ask to overwrite")
            for name in existing:
                shutil.rmtree(out / name)
            write_json(out / FACTS_FILE, facts)
        for name, rows in chosen.items():
            if not (out / name).exists():
                write_part(pairs.subset(rows), out / name)
    return {
        name: PartSummary(len(rows), len(np.unique(pairs.group[rows])), str(out / name))
        for name, rows in chosen.items()
    }


def _other_parts(left: Mapping[str, Any] | None, chosen: Mapping[str, Index]) -> list[str]:
    """The parts of an earlier split that are not among the `chosen` ones; its images may now be in any of these."""
    parts = None if left is None else left.get("parts")
    known = parts if isinstance(parts, dict) else {}
    return [name for name in known if _is_plain(name) and name not in chosen]


def _is_plain(name: str) -> bool:
    """Whether a part may have this name, which is that of its folder."""
    return bool(name) and Path(name).name == name and not name.startswith(".")


def with_ids(pairs: EmbeddingPairs, ids: Path | None, image_ids: Path | None = None) -> EmbeddingPairs:
    """The same pairs, with the ids of their texts and images that these files hold; the others stay."""
    if ids is None and image_ids is None:
        return pairs
    named = pairs.subset(np.arange(len(pairs)))
    for file, side, what in ((ids, "text", "texts"), (image_ids, "image", "images")):
        if file is not None:
            rows = copy.copy(getattr(pairs, side))
            rows.ids = open_ids(file, len(rows), what)
            setattr(named, side, rows)
    return named


def write_part(part: EmbeddingPairs, folder: Path) -> None:
    """Writes a part and the ids of its texts and images, or the numbers of their rows, under a temporary name, and
    renames it."""
    begun = folder.with_name(f".{folder.name}.tmp")
    if begun.exists():
        shutil.rmtree(begun)
    part.save(begun, dtype=stored_type(part))
    for file, rows, kept in ((TEXT_IDS, part.text, part.text_row), (IMAGE_IDS, part.image, np.unique(part.image_row))):
        if rows.ids is None:
            row_numbers(len(rows)).save(begun / file, kept, are_given=False)
    begun.rename(folder)
    sync_folder(folder.parent)


def stored_type(pairs: EmbeddingPairs) -> type[np.floating]:
    """The type in which pairs are stored again: half precision if they are in it, else float32."""
    stored = {part.dtype for rows in (pairs.image, pairs.text) for part in rows.parts}
    return np.float16 if stored == {np.dtype(np.float16)} else np.float32
