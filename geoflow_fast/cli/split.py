"""`geoflow split`: parts of a set of pairs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from geoflow_fast.cli.base import Commands, JsonFlag, OverwriteFlag, SeedFlag, print_json
from geoflow_fast.cli.embeddings import ImageIndexFlag, ImagesFlag, NormalizeFlag, PairIdsFlag, PairsFlag, TextsFlag

app = Commands()


@app.command(epilog="Example: geoflow split --images images.npy --texts texts.npy --out parts")
def split(
    out: Annotated[Path, typer.Option(help="Folder in which each part becomes a folder.")],
    parts: Annotated[
        str, typer.Option(help="Names and shares of the parts; what they leave over is in none.")
    ] = "train=0.8,held_out=0.1,ask=0.1",
    pairs: PairsFlag = None,
    images: ImagesFlag = None,
    texts: TextsFlag = None,
    image_index: ImageIndexFlag = None,
    normalize: NormalizeFlag = False,
    ids: PairIdsFlag = None,
    image_ids: Annotated[
        Path | None, typer.Option(help="The same for images, where they have ids of their own.")
    ] = None,
    seed: SeedFlag = 0,
    overwrite: OverwriteFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Divides pairs into parts by image, so that no image is in two: to train, to hold out, to ask.

    Each part has files of the ids of its texts and images, or of their rows where there are no ids.
    """
    from geoflow_fast.data.pairs import open_pairs
    from geoflow_fast.jobs.split import parts_of, split_pairs

    shares = parts_of(parts)
    opened = open_pairs(pairs, images, texts, image_index, normalize=normalize)
    made = split_pairs(opened, shares, out, seed=seed, ids=ids, image_ids=image_ids, overwrite=overwrite)
    if as_json:
        print_json({name: dataclasses.asdict(part) for name, part in made.items()})
        return
    for part in made.values():
        texts_too = "" if part.pairs == part.images else f" with {part.pairs:,} texts"
        typer.echo(f"Wrote {part.folder}: {part.images:,} images{texts_too}")
