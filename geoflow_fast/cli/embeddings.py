"""Flags of the commands that read embeddings: where rows are, whether they are scaled, and what they are called."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from geoflow_fast.cli.base import Conditional

if TYPE_CHECKING:
    from geoflow_fast.jobs.queries import Naming

PairsFlag = Annotated[Path | None, typer.Option(help="Folder of paired embeddings (img_emb/, text_emb/).")]
ImagesFlag = Annotated[
    Path | None, typer.Option(help="Instead of --pairs: .npy file or folder of shards with one row per image.")
]
TextsFlag = Annotated[Path | None, typer.Option(help="With --images: the same for texts.")]
ImageIndexFlag = Annotated[
    Path | None,
    typer.Option(help="With --images: .npy file with the image row of each text. Default: row k for text k."),
]
QueriesFlag = Annotated[Path | None, typer.Option(help=".npy file or folder of .npy shards, unit rows.")]
GalleryFlag = Annotated[
    Path | None, typer.Option(help=".npy file or folder of .npy shards, unit rows; read block by block.")
]
SearchedImagesFlag = Annotated[
    Path | None,
    typer.Option(help="With --texts, instead of --queries and --gallery; --direction says which side searches."),
]
SearchedTextsFlag = Annotated[Path | None, typer.Option(help="With --images: .npy file or folder of .npy shards.")]
NormalizeFlag = Annotated[
    bool, typer.Option("--normalize/--no-normalize", help="Scale rows to unit norm instead of rejecting them.")
]
IdsFlag = Annotated[
    Path | None,
    typer.Option(
        help="Ids of the gallery's rows, to be written instead of row numbers: .npy, .txt with one on each line, "
        ".parquet or .parquet:COLUMN."
    ),
]
QueryIdsFlag = Annotated[Path | None, typer.Option(help="The same for the queries.")]
PairIdsFlag = Annotated[
    Path | None,
    typer.Option(
        help="Ids of the pairs, to be written instead of their numbers: .npy, .txt with one on each line, .parquet or "
        ".parquet:COLUMN."
    ),
]


def searched(
    queries: Path | None, gallery: Path | None, images: Path | None, texts: Path | None, direction: Conditional
) -> tuple[Path, Path]:
    """The files of queries and of the gallery, which are given as such or as images and texts."""
    sides = (texts, images) if direction == "t2i" else (images, texts)
    chosen, other = ((queries, gallery), (images, texts))
    if any(path is not None for path in chosen) and any(path is not None for path in other):
        raise ValueError("give --queries and --gallery, or --images and --texts, not both")
    asked, items = chosen if images is None and texts is None else sides
    if asked is None or items is None:
        raise ValueError("give --queries and --gallery, or --images and --texts")
    return asked, items


def naming(query_ids: Path | None, ids: Path | None) -> Naming:
    """The files of ids of queries and items."""
    from geoflow_fast.jobs.queries import Naming

    return Naming(query_ids, ids)
