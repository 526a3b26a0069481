"""Photographs and captions -> embeddings -> head and flow -> calibrated answers, judged beside references, on one page.

    python examples/photos/run.py --images Images/ --captions captions.txt --model ViT-B-32 \\
        --pretrained laion2b_s34b_b79k --out runs/photos
    python examples/photos/run.py --embeddings embeddings/ --out runs/photos --no-flow

Needs `pip install '.[encoders,eval,baselines]'` in a checkout. A run that was stopped goes on with the same command,
and what is finished is not done again.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
from inputs import Photos, embedded, existing, open_embeddings, read_captions, read_names, write_table
from page import lead_rows, write_page
from study import FOLDS, SMALL_SET, Findings, Settings, make_folds, run_study, usable_references

from geoflow_fast.evaluation.figures import DIRECTION_TITLES
from geoflow_fast.runtime import plots
from geoflow_fast.runtime.files import read_json, write_json

SHOWN = ("NLL, nats", "AUROC", "AURC", "Recall@1", "ECE", "Spearman", "R^2")


def parse(words: list[str] | None) -> argparse.Namespace:
    """The arguments; what contradicts itself is an error before anything is read."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_argument_group("pictures and captions, or embeddings")
    source.add_argument("--images", type=Path, help="folder of images; with --embeddings only for the figures")
    source.add_argument("--captions", type=Path, help="of Flickr8k, a COCO captions_*.json, or a CSV or TSV")
    source.add_argument("--model", help="name of any open_clip model, or local-dir:FOLDER")
    source.add_argument("--pretrained", help="open_clip tag of its weights")
    source.add_argument("--checkpoint", type=Path, help="file of weights instead")
    source.add_argument("--encoder", default="open_clip", choices=("open_clip", "colours"), help="colours: a toy")
    source.add_argument("--embeddings", type=Path, help="folder of geoflow embed, or an .npz file")
    split = parser.add_argument_group("which images learn, calibrate and judge; all are divided by --seed otherwise")
    split.add_argument("--train", type=Path, help="embeddings of other images to learn from")
    split.add_argument("--split", type=Path, help="names of the images to judge by, such as Flickr_8k.testImages.txt")
    split.add_argument(
        "--folds", type=int, help=f"default: {FOLDS} below {SMALL_SET:,} images, else 1; 2 with --train, 1 with --split"
    )
    parser.add_argument("--no-flow", action="store_true", help="head only: minutes instead of hours")
    parser.add_argument("--steps", type=int, help="training steps of the flow; default: those of geoflow train")
    parser.add_argument("--quick", action="store_true", help="short runs that show that everything works, not how well")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(words)
    if (given.embeddings is None) == (given.captions is None):
        parser.error("give --images with --captions, or --embeddings")
    if given.captions is not None and given.images is None:
        parser.error("--captions needs --images, the folder of the images")
    if given.captions is not None and given.encoder == "open_clip" and given.model is None:
        parser.error("give --model, such as ViT-B-32 with --pretrained laion2b_s34b_b79k, or --encoder colours")
    if given.train is not None and given.split is not None:
        parser.error("--train and --split both say which images to learn from; give one")
    if given.split is not None and given.folds not in (None, 1):
        parser.error("--split has one fold")
    if given.folds is not None and given.folds < 1 + (given.train is not None):
        parser.error(f"--folds {given.folds} is too few")
    return given


def open_photos(given: argparse.Namespace) -> Photos:
    """The embeddings, made first if only pictures are given."""
    if given.embeddings is not None:
        return open_embeddings(given.embeddings, given.images)
    table = write_table(existing(read_captions(given.captions), given.images), given.out / "captions.csv")
    weights = {"model": given.model, "pretrained": given.pretrained, "checkpoint": given.checkpoint}
    return embedded(table, given.out / "embeddings", encoder=given.encoder, **weights)


def claim(out: Path, facts: dict[str, Any]) -> None:
    """Notes in `out` which study it holds; a ValueError if that is another one."""
    file = out / "study.json"
    if file.is_file() and (former := read_json(file, "the settings of a study")) != facts:
        changed = ", ".join(name for name in facts if former.get(name) != facts[name])
        raise ValueError(f"{out} holds a study with another {changed or 'format'}; choose another --out")
    write_json(file, facts)


def run(given: argparse.Namespace) -> Findings:
    """Everything from the arguments to the page."""
    plots.need_matplotlib()  # says at once if matplotlib is missing
    references = usable_references()
    given.out.mkdir(parents=True, exist_ok=True)
    photos = open_photos(given)
    pairs = photos.pairs
    if pairs.image_dim != pairs.text_dim:
        raise ValueError(f"plain search needs one width, but images have {pairs.image_dim} and texts {pairs.text_dim}")
    train = None if given.train is None else open_embeddings(given.train).pairs
    judged = None if given.split is None else read_names(given.split, photos)
    small = len(np.unique(pairs.group)) < SMALL_SET
    folds = given.folds or (2 if train is not None else FOLDS if small and judged is None else 1)
    made = make_folds(pairs, train, folds, judged, given.seed)
    settings = Settings(not given.no_flow, given.steps, given.seed, quick=given.quick)
    facts = {"pairs": pairs.fingerprint(), "train": train and train.fingerprint(), "folds": folds, "seed": given.seed}
    facts |= {"flow": settings.flow, "steps": settings.steps, "quick": settings.quick}
    claim(given.out, {**facts, "judged": None if judged is None else np.flatnonzero(judged).tolist()})
    findings = run_study(photos, made, given.out, settings, references)
    name = (given.embeddings or given.images).name
    page = write_page(findings, given.out, f"Photographs and captions: {name}")
    print_tables(findings)
    print(f"\nWrote {page}, its figures, results.json and leads.json")
    return findings


def print_tables(findings: Findings) -> None:
    """The numbers as Markdown, and where another method is ahead of the pipeline."""
    for direction in findings.comparison.directions:
        rows = findings.comparison.table(direction)
        print(f"\n| {DIRECTION_TITLES[direction]} | " + " | ".join(SHOWN) + " |\n|" + "---|" * (len(SHOWN) + 1))
        for row in rows:
            cells = ("–" if row[name] is None else f"{row[name]:.3f}" for name in SHOWN)
            print(f"| {row['method']} | " + " | ".join(cells) + " |")
    columns = list(lead_rows(findings)[0])
    print("\nLeads of the pipeline (95 % paired intervals, p after Holm):\n\n| " + " | ".join(columns) + " |")
    print("|" + "---|" * len(columns))
    for row in lead_rows(findings):
        cells = (f"{x:.2g}" if isinstance(x, float) else str(x) for x in (row.get(name, "–") for name in columns))
        print("| " + " | ".join(cells) + " |")
    behind = [lead for lead in findings.leads if lead.high < 0]
    for lead in behind:
        where = DIRECTION_TITLES[lead.direction]
        print(f"behind {lead.over} in {lead.measure}, {where}: {lead.value:.3f} ({lead.low:.3f} to {lead.high:.3f})")
    if not behind:
        print("\nNo other method is ahead of the pipeline beyond its interval.")


def main(words: list[str] | None = None) -> int:
    """Runs the study; wrong input is one line, not a traceback."""
    try:
        run(parse(words))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; the same command goes on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
