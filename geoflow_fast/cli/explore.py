"""`geoflow explore`: one offline page to look at what a search found."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from geoflow_fast.cli.base import Commands, DirectionFlag, JsonFlag, print_json
from geoflow_fast.cli.decisions import JudgedPairsFlag, LabelsFlag, QrelsFlag, known_hits
from geoflow_fast.cli.embeddings import ImageIndexFlag, NormalizeFlag, TextsFlag

app = Commands()
DESCRIPTION = (
    "captions or names (.txt, .parquet, .parquet:COLUMN), embeddings (.npy, folder of shards), or a folder of "
    "`geoflow embed`; may be given twice."
)


@app.command(
    groups={
        "What is shown": "queries gallery images encoder hits title",
        "What is right": "labels pairs pair_images texts image_index qrels direction normalize",
    },
    epilog="Example: geoflow explore ranked.parquet --queries captions.txt --gallery names.txt --images photos/ --out "
    "page.html",
)
def explore(
    run: Annotated[
        Path,
        typer.Argument(
            help="The Parquet file of `geoflow rerank`, or of lists of any search (index, scores), or a folder with "
            "one, in which rule.json, densities and health.json are found, too."
        ),
    ],
    out: Annotated[Path, typer.Option(help="The page: one HTML file that needs no network.")],
    queries: Annotated[list[Path] | None, typer.Option(help=f"Of the queries: {DESCRIPTION}")] = None,
    gallery: Annotated[list[Path] | None, typer.Option(help="The same for the items.")] = None,
    images: Annotated[
        Path | None, typer.Option(help="Folder of image files, for thumbnails; names are those of --gallery, or ids.")
    ] = None,
    rule: Annotated[
        Path | None, typer.Option(help="Rule of `geoflow threshold`. Default: rule.json of the run.")
    ] = None,
    encoder: Annotated[
        str | None, typer.Option(help="The encoder that made the lists; a rule of another one is refused.")
    ] = None,
    hits: Annotated[int, typer.Option(help="Hits of each query that are shown.", min=1, max=100)] = 8,
    title: Annotated[str, typer.Option(help="Title of the page.")] = "What the search found",
    labels: LabelsFlag = None,
    pairs: JudgedPairsFlag = None,
    pair_images: Annotated[
        Path | None, typer.Option(help="Instead of --pairs, with --texts: .npy file or folder of shards.")
    ] = None,
    texts: TextsFlag = None,
    image_index: ImageIndexFlag = None,
    qrels: QrelsFlag = None,
    direction: DirectionFlag = "t2i",
    normalize: NormalizeFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Writes a page to look at queries and their hits: how sure the search is, what an error limit costs, and which
    queries deserve a look.

    Queries can be searched and filtered; a slider shows how many are answered at which error, and the certified point.
    """
    from geoflow_fast.explore import sources
    from geoflow_fast.explore.page import write_page

    opened = sources.RunFiles.open(run, rule)
    known, _ = known_hits(opened.lists, labels, (pairs, pair_images, texts, image_index, normalize), qrels, direction)
    asked, searched = ("text", "image") if direction == "t2i" else ("image", "text")
    page = sources.explored(
        opened,
        sources.described(queries or [], asked),
        sources.described(gallery or [], searched),
        images=images,
        labels=known,
        hits=hits,
        title=title,
        encoder=encoder,
    )
    write_page(page, out)
    facts = {"queries": len(page.ids), "items": len(page.items.ids), "bytes": out.stat().st_size}
    facts |= {each.name: len(each.rows) for each in page.marked}
    if as_json:
        print_json(facts)
        return
    typer.echo("; ".join(f"{count:,} {name}" for name, count in facts.items()))
    typer.echo(f"Wrote {out}")
