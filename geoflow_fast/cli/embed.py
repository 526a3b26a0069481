"""`geoflow embed`: embeddings of images and captions, as a folder of pairs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import typer

from geoflow_fast.cli.base import Commands, DeviceFlag, JsonFlag, OverwriteFlag, continued_later, print_json

app = Commands()


@app.command(
    epilog="Example: geoflow embed --images photos/ --out embeddings/ --model ViT-H-14 --pretrained laion2b_s32b_b79k"
)
def embed(
    images: Annotated[
        Path,
        typer.Option(
            help="Folder of images or of .tar shards, a .tar file, or a .csv, .tsv or .parquet table of paths."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Output folder; the same command continues a stopped run.")],
    encoder: Annotated[
        Literal["open_clip", "colours"],
        typer.Option(help="open_clip; or colours, which needs no weights and sees only colours, for a first try."),
    ] = "open_clip",
    model: Annotated[
        str | None, typer.Option(help="Name of an open_clip model, local-dir:FOLDER or hf-hub:NAME. Default: ViT-H-14.")
    ] = None,
    pretrained: Annotated[
        str | None,
        typer.Option(help="open_clip tag of the weights, downloaded once. Default: the paper's, for its models."),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="Local file of weights, safetensors or torch; no code in it is run, nothing is downloaded."),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Images or texts per batch.")] = 64,
    workers: Annotated[int, typer.Option(help="Threads that read and resize images.")] = 4,
    shard_rows: Annotated[int, typer.Option(help="Images per shard; a kill loses at most the current shard.")] = 16384,
    path_column: Annotated[str, typer.Option(help="Table column with the paths of images.")] = "path",
    caption_column: Annotated[
        str, typer.Option(help='Table column with the captions; "" to embed images only.')
    ] = "caption",
    dtype: Annotated[str, typer.Option(help="Type of the stored embeddings: float32 or float16.")] = "float32",
    precision: Annotated[
        str, typer.Option(help="float32, float16 or bfloat16 (mixed precision); auto: float16 on a GPU, else float32.")
    ] = "auto",
    pre_projection: Annotated[
        bool, typer.Option("--pre-projection", help="Also write the last projections and the activations before them.")
    ] = False,
    overwrite: OverwriteFlag = False,
    device: DeviceFlag = "auto",
    as_json: JsonFlag = False,
) -> None:
    """Embeds images and their captions into a folder of pairs for train, density and the other commands.

    Images that cannot be read are skipped and listed in skipped.csv.
    """
    from geoflow_fast.encoders.registry import open_encoder
    from geoflow_fast.encoders.sources import open_images
    from geoflow_fast.jobs.embed import SKIPPED_FILE, embed_images

    source = open_images(images, path_column=path_column, caption_column=caption_column)
    with continued_later() as world:
        if world.size > 1:
            raise ValueError("geoflow embed runs in one process; give each rank images and an output of its own")
        chosen = open_encoder(
            encoder,
            model=model,
            pretrained=pretrained,
            checkpoint=checkpoint,
            device=device,
            precision=precision,
        )
        summary = embed_images(
            source,
            chosen,
            out,
            batch_size=batch_size,
            workers=workers,
            shard_rows=shard_rows,
            dtype=dtype,
            pre_projection=pre_projection,
            overwrite=overwrite,
        )
    if as_json:
        print_json(dataclasses.asdict(summary))
        return
    shards = f"{summary.shards} shard{'s' * (summary.shards != 1)}"
    typer.echo(f"{summary.images} images and {summary.texts} texts, {summary.dim} wide, in {shards}")
    if summary.skipped_images or summary.skipped_captions:
        skipped = f"{summary.skipped_images} images and {summary.skipped_captions} captions"
        typer.echo(f"skipped {skipped}; {out / SKIPPED_FILE} says why")
    typer.echo(f"Wrote {out}")
