"""The demo's last chapter: a search of the world as wide as CLIP goes live, and what it is asked for changes.

The ladder answers judged captions, a rule is certified on them, and a log follows: its first half is like the judged
captions, and in the second half many ask for images that are not there. The files are those of the commands, and the
page is that of `geoflow explore`.
"""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from geoflow_fast.data.pairs import EmbeddingPairs
from geoflow_fast.decisions.rules import EVERYBODY, Rule
from geoflow_fast.decisions.trust import Trust
from geoflow_fast.directions import Direction
from geoflow_fast.explore import sources
from geoflow_fast.explore.page import Explored, Items, write_page
from geoflow_fast.head.model import PosteriorHead
from geoflow_fast.jobs.decisions import SMALLEST
from geoflow_fast.jobs.rerank import EVIDENCE, EXPLAINED
from geoflow_fast.jobs.watch import Watched, WatchSettings, watch_file
from geoflow_fast.retrieval.rerank import BayesReranker
from geoflow_fast.retrieval.task import typical_queries
from geoflow_fast.runtime import parquet
from geoflow_fast.worlds import Captioned, ClipWorld

ITEMS, CAPTIONS, HELD_OUT, BANK, SHORTLIST = 500, 6, 400, 1000, 64
FITTED, CERTIFIED, QUIET, CHANGED, MISSING = 500, 1400, 400, 600, 0.5
"""Judged captions that are fitted and certified on; queries of the log before and after the change, after which this
share of them asks for missing images."""
MAX_ERROR = 0.2
PAGE, FOLDER = "explore.html", "story"
LEVELS = (
    "scene {scene} of concept {concept}, group {group}",
    "something of concept {concept}, group {group}",
    "something of group {group}",
)
"""What captions say, from specific to vague ones."""
SIDE = 64


@dataclass(frozen=True)
class Story:
    """What happened, for the report."""

    rule: Rule
    watched: Watched
    noticed: int | None
    """How many queries after the change the alarm came; None if it did not."""
    rungs: list[dict[str, object]]

    def summary(self) -> dict[str, object]:
        """The numbers of the story in a form that can be written as JSON."""
        own = self.rule.certificates[EVERYBODY]
        return {
            "max_error": self.rule.max_error,
            **own.as_json(),
            "verdict": self.watched.verdict,
            "noticed_after": self.noticed,
            "rungs": self.rungs,
        }

    @property
    def tiles(self) -> list[dict[str, str]]:
        """The story as a score card."""
        own = self.rule.certificates[EVERYBODY]
        when = "not noticed" if self.noticed is None else f"after {self.noticed} queries"
        missing = f"{MISSING:.0%} of them then ask for something that is missing"
        wrong = f"{own.error:.0%} wrong in the test" if self.rule.certified else "nothing could be certified"
        return [
            {
                "name": "guaranteed error of a live search",
                "value": f"at most {self.rule.max_error:.0%}",
                "note": f"at {self.rule.confidence:.0%} confidence",
                "tone": "good" if self.rule.certified else "bad",
                "id": "",
            },
            {"name": "answered at this error", "value": f"{own.answered:.0%}", "note": wrong, "tone": "", "id": ""},
            {"name": "a change of the queries is noticed", "value": when, "note": missing, "tone": "", "id": ""},
        ]


def tell(world: ClipWorld, head: PosteriorHead, pairs: EmbeddingPairs, seed: int, out: Path) -> Story:
    """Certifies, goes live, watches, and writes the page into the folder `out`."""
    generator = torch.Generator().manual_seed(1000 + seed)
    there = world.sample_captioned(ITEMS, CAPTIONS, generator=generator)
    missing = world.sample_captioned(CHANGED, 1, generator=generator)
    image, text, _ = world.sample(HELD_OUT, generator=generator)
    bank = typical_queries(pairs, Direction.T2I, BANK, seed)
    ladder = BayesReranker(None, there.image, Direction.T2I, SHORTLIST, seed=seed, head=head, bank=bank)
    ladder.calibrate(EmbeddingPairs.from_arrays(image, text), progress=False)
    order = torch.randperm(len(there.text), generator=generator, device="cpu")[: FITTED + CERTIFIED + QUIET + CHANGED]
    gone = torch.zeros(len(order), dtype=torch.bool, device="cpu")
    gone[-CHANGED:] = torch.rand(CHANGED, generator=generator, dtype=torch.float64, device="cpu") < MISSING
    number = torch.arange(len(order), device="cpu") - (len(order) - CHANGED)
    asked = torch.where(gone.unsqueeze(1), missing.text[number.clamp(min=0)], there.text[order])
    words = [
        _caption(world, missing, int(number[row])) if gone[row] else _caption(world, there, int(order[row]))
        for row in range(len(order))
    ]
    item = there.text_image_index[order].masked_fill(gone, -1)
    return _live(world, ladder, there, asked, item, words, out)


def _live(
    world: ClipWorld,
    ladder: BayesReranker,
    there: Captioned,
    asked: Tensor,
    item: Tensor,
    words: Sequence[str],
    out: Path,
) -> Story:
    folder = out / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    reranked = ladder(asked)
    judged = FITTED + CERTIFIED
    right = (reranked.index == item[:, None]).numpy()
    scores = np.log(np.maximum(reranked.prob.double().numpy(), SMALLEST))
    trust = Trust().fit(scores[:FITTED], right[:FITTED])
    hits = reranked.index.numpy()
    rule = trust.certify(scores[FITTED:judged], right[FITTED:judged], MAX_ERROR).with_hits(hits[FITTED:judged])
    rule.save(folder / "rule.json")
    log = {
        "query": np.array([f"live-{row}" for row in range(len(asked) - judged)], dtype=object),
        "index": hits[judged:],
        "prob": reranked.prob[judged:].numpy(),
        "p_outside": reranked.p_outside[judged:].numpy(),
        "entropy": reranked.entropy[judged:].numpy(),
        **{
            f"{EVIDENCE}{name}": part[judged:, :EXPLAINED].numpy()
            for name, part in zip(ladder.evidence_names, reranked.evidence.unbind(2))
        },
    }
    parquet.write_columns(folder / "log.parquet", log, len(asked) - judged)
    watched = watch_file(
        folder / "rule.json", folder / "log.parquet", folder / "health.parquet", WatchSettings(), overwrite=True
    )
    rungs: list[dict[str, object]] = [
        {"name": rung.name, "gain": f"{rung.gain:+.3f} nats a query", "kept": "kept" if rung.kept else "left out"}
        for rung in ladder.rungs
    ]
    _write_page(world, there, folder, out / PAGE, words[judged:], right[judged:], rungs)
    return Story(rule, watched, _noticed(watched), rungs)


def _noticed(watched: Watched) -> int | None:
    """How many queries after the change the first alarm came."""
    late = [int(end) - QUIET for end, holds in zip(watched.table["end"], watched.table["holds"]) if not holds]
    return late[0] if late else None


def _write_page(
    world: ClipWorld,
    there: Captioned,
    folder: Path,
    path: Path,
    words: Sequence[str],
    right: Any,
    rungs: list[dict[str, object]],
) -> None:
    (folder / "queries.txt").write_text("\n".join(words), "utf-8")
    (folder / "gallery.txt").write_text("\n".join(_name(world, int(scene)) for scene in there.scene), "utf-8")
    run = sources.RunFiles.open(folder / "log.parquet", folder / "rule.json")
    queries = sources.Described(words)
    gallery = sources.described([folder / "gallery.txt"], "image")
    page = sources.explored(run, queries, gallery, labels=right, title="A search of the CLIP-like world, live")
    scenes = [int(there.scene[int(each)]) for each in page.items.ids]
    items = Items(page.items.ids, page.items.captions, [_picture(world, scene) for scene in scenes])
    lead = (
        f"{len(words):,} live captions search {ITEMS} images of a made-up world. Pictures stand for scenes: groups "
        f"have a colour, concepts a pattern. From query {QUIET} on, {MISSING:.0%} of the captions ask for images that "
        "are not there."
    )
    state = sources.RunFiles.open(folder).verdict
    write_page(Explored(**{**vars(page), "items": items, "lead": lead, "ladder": rungs, "verdict": state}), path)


def _caption(world: ClipWorld, drawn: Captioned, row: int) -> str:
    """What a caption says, in words."""
    scene, level = int(drawn.scene[drawn.text_image_index[row]]), int(drawn.level[row])
    concept = int(world.concept[scene])
    words = LEVELS[level].format(scene=scene, concept=concept, group=concept // world.PER_GROUP)
    return f"{words} (a wrong caption)" if drawn.wrong[row] else words


def _name(world: ClipWorld, scene: int) -> str:
    concept = int(world.concept[scene])
    return f"image of scene {scene}, concept {concept}, group {concept // world.PER_GROUP}"


def _picture(world: ClipWorld, scene: int) -> str:
    """A small picture that stands for a scene."""
    from PIL import Image

    from geoflow_fast.explore.thumbnails import data_uri

    concept = int(world.concept[scene])
    group, member = divmod(concept, world.PER_GROUP)
    y, x = np.mgrid[:SIDE, :SIDE] / SIDE
    angle = np.pi * member / world.PER_GROUP
    wave = np.sin(2 * np.pi * (2 + scene % world.PER_CONCEPT) * (x * np.cos(angle) + y * np.sin(angle)))
    dark, light = (np.array(colorsys.hls_to_rgb(group * 0.618 % 1, level, 0.55)) for level in (0.35, 0.75))
    mix = (wave[..., None] + 1) / 2
    return data_uri(Image.fromarray((255 * (dark + (light - dark) * mix)).astype(np.uint8)))
