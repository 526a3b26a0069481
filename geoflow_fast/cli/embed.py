"""`geoflow embed`: embeddings of images and captions, as a folder of pairs, or of texts, as a Parquet file."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from geoflow_fast.cli.base import Commands, DeviceFlag, JsonFlag, OverwriteFlag, continued_later, print_json

if TYPE_CHECKING:
    from geoflow_fast.encoders.protocol import Encoder

app = Commands()

GROUPS = {
    "What is embedded": "images texts path_column caption_column text_column other_column id_column",
    "The encoder": "encoder model pretrained checkpoint revision prompt device precision",
    "The output": "out dtype shard_rows overwrite",
}
"""The headings of the help, with the flags below them."""


@app.command(groups=GROUPS, epilog="Example: geoflow embed --images photos/ --out embeddings/")
def embed(
    out: Annotated[
        Path,
        typer.Option(help="Output folder, or with --texts a Parquet file; the same command continues a stopped run."),
    ],
    images: Annotated[
        Path | None,
        typer.Option(
            help="Folder of images or of .tar shards, a .tar file, or a .csv, .tsv or .parquet table of paths."
        ),
    ] = None,
    texts: Annotated[
        Path | None,
        typer.Option(
            help="Instead of --images, texts alone: .txt with one on each line, .csv, .tsv, .parquet, .arrow or a "
            "dataset."
        ),
    ] = None,
    encoder: Annotated[
        Literal["open_clip", "transformers", "sentence-transformers", "colours"],
        typer.Option(
            help="open_clip; transformers, for CLIP and SigLIP; sentence-transformers, for texts; or colours, which "
            "needs no weights and sees only colours, for a first try."
        ),
    ] = "open_clip",
    model: Annotated[
        str | None,
        typer.Option(
            help="With open_clip the name of a model, local-dir:FOLDER or hf-hub:NAME; with transformers and "
            "sentence-transformers a folder or hf://user/name. Default: ViT-B-32 (a download of 605 MB); with "
            "transformers openai/clip-vit-base-patch32 (605 MB), with sentence-transformers all-MiniLM-L6-v2 (91 MB)."
        ),
    ] = None,
    pretrained: Annotated[
        str | None,
        typer.Option(
            help="open_clip tag of the weights, downloaded once. Default: laion2b_s34b_b79k for ViT-B-32, and the "
            "paper's for its models."
        ),
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of a model of the Hugging Face hub. Default: main.")
    ] = None,
    prompt: Annotated[
        str, typer.Option(help='sentence-transformers: words before every text, such as "query: ".')
    ] = "",
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
    text_column: Annotated[
        str | None,
        typer.Option(help="With --texts: table column with the texts. Default: text, caption, query or sentence."),
    ] = None,
    other_column: Annotated[
        str | None,
        typer.Option(help="With --texts: column with the texts of the other side; the output then holds pairs."),
    ] = None,
    id_column: Annotated[
        str | None, typer.Option(help="With --texts: table column with the ids. Default: id, if there is one.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Type of the stored embeddings: float32 or float16.")] = "float32",
    precision: Annotated[
        str, typer.Option(help="float32, float16 or bfloat16 (mixed precision); auto: float16 on a GPU, else float32.")
    ] = "auto",
    overwrite: OverwriteFlag = False,
    device: DeviceFlag = "auto",
    as_json: JsonFlag = False,
) -> None:
    """Embeds images and their captions into a folder of pairs for train, density and the other commands, or texts into
    a Parquet file of queries or items.

    Images that cannot be read are skipped and listed in skipped.csv.
    """
    from geoflow_fast.encoders.registry import open_encoder
    from geoflow_fast.encoders.sources import open_images
    from geoflow_fast.jobs.embed import SKIPPED_FILE, embed_images

    def chosen_encoder() -> Encoder:
        own: dict[str, Any] = {"model": model, "pretrained": pretrained, "checkpoint": checkpoint}
        own |= {"revision": revision, "prompt": prompt, "device": device, "precision": precision}
        return open_encoder(encoder, **own)

    if (images is None) == (texts is None):
        raise ValueError("give --images, or --texts to embed texts alone")
    if texts is not None:
        columns = [text_column] if other_column is None else [text_column, other_column]
        kept = {"batch_size": batch_size, "dtype": dtype, "overwrite": overwrite}
        with continued_later() as world:
            if world.size > 1:
                raise ValueError("geoflow embed runs in one process; give each rank texts and an output of its own")
            _embed_texts(texts, columns, id_column, chosen_encoder, out, as_json=as_json, **kept)
        return
    given = {"--text-column": text_column, "--other-column": other_column, "--id-column": id_column}
    for flag, value in given.items():
        if value is not None:
            raise ValueError(f"{flag} is for --texts; columns of a table of images are --path-column, --caption-column")
    assert images is not None
    source = open_images(images, path_column=path_column, caption_column=caption_column)
    with continued_later() as world:
        if world.size > 1:
            raise ValueError("geoflow embed runs in one process; give each rank images and an output of its own")
        chosen = chosen_encoder()
        summary = embed_images(
            source,
            chosen,
            out,
            batch_size=batch_size,
            workers=workers,
            shard_rows=shard_rows,
            dtype=dtype,
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


def _embed_texts(
    texts: Path,
    columns: list[str | None],
    id_column: str | None,
    chosen_encoder: Callable[[], Encoder],
    out: Path,
    *,
    as_json: bool,
    **options: Any,
) -> None:
    """Embeds one column of texts, or two as pairs, into a Parquet file."""
    from geoflow_fast.jobs.embed_columns import embed_sides, embed_texts, read_texts

    if out.suffix.lower() != ".parquet":
        raise ValueError(f"--out must be a .parquet file for --texts, got {out}")
    read = read_texts(texts, columns, id_column)
    ids = None if read[0].ids is None else read[0].ids.values
    encoder = chosen_encoder()
    if len(read) == 1:
        count = embed_texts(read[0].texts, encoder, out, ids=ids, **options)
    else:
        first, second = (name or "text" for name in columns)
        sides = {first: (read[0].texts, encoder), second: (read[1].texts, encoder)}
        count = embed_sides(sides, out, ids=ids, **options)
    what = "pairs of texts" if len(read) == 2 else "texts"
    if as_json:
        print_json({"texts": count, "dim": encoder.dim, "columns": [column for column in columns if column]})
        return
    typer.echo(f"{count} {what}, {encoder.dim} wide")
    typer.echo(f"Wrote {out}")
