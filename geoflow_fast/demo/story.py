"""The demo's last chapter: a search of the world as wide as CLIP goes live, and what it is asked for changes.

The ladder answers judged captions, and a rule is certified on them that assumes a share of captions whose image is not
there. A log follows: its first part is as the rule expects, and later many more ask for what is missing. The files are
those of the commands, and the page is that of `geoflow explore`.
"""

from __future__ import annotations

import colorsys
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from geoflow_fast.data.pairs import EmbeddingPairs
from geoflow_fast.data.rows import Rows
from geoflow_fast.decisions.rules import Rule
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
from geoflow_fast.runtime.files import write_atomic
from geoflow_fast.worlds import Captioned, ClipWorld

ITEMS, CAPTIONS, HELD_OUT, BANK, SHORTLIST = 500, 6, 400, 1000, 64
FITTED, CERTIFIED, QUIET, CHANGED = 500, 1400, 400, 600
"""Judged captions that are fitted and certified on; queries of the log before and after the change."""
NO_MATCH, MISSING = 0.1, 0.5
"""Shares of queries that ask for missing images before and after the change; the rule assumes the former."""
DOUBLES, ALIKE = 12, 0.99
"""How many images are in the gallery a second time, and the cosine of the two: a photograph that was saved again."""
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
class Expectation:
    """Something that is expected of the demo: `value` is at least `floor`."""

    name: str
    value: float
    floor: float

    @property
    def holds(self) -> bool:
        """True if the value is as large as expected."""
        return self.value >= self.floor


@dataclass(frozen=True)
class Story:
    """What happened, for the report."""

    rule: Rule
    watched: Watched | None
    """None if nothing could be certified, so that there is nothing to watch."""
    noticed: int | None
    """How many queries after the change the alarm came, negative if before; None if it did not."""
    rungs: list[dict[str, object]]
    marked: dict[str, int]
    """How many queries of the page deserve a look, by reason."""

    @property
    def verdict(self) -> str:
        """What watching the log says."""
        return "Nothing could be certified." if self.watched is None else self.watched.verdict

    def checks(self) -> list[Expectation]:
        """What is expected of it."""
        answered = self.rule.certificate.answered  # none if nothing is certified
        early = self.noticed is not None and self.noticed <= 0
        left = -1 if self.noticed is None or early else CHANGED - self.noticed
        return [
            Expectation("live search: share answered at the certified error", answered, 0.25),
            Expectation("live search: no alarm before the change (1 or 0)", 0.0 if early else 1.0, 1.0),
            Expectation("live search: queries of the log that are left when the change is noticed", left, 0.0),
        ]

    def summary(self) -> dict[str, object]:
        """The numbers of the story in a form that can be written as JSON."""
        own = self.rule.certificate
        return {
            "max_error": self.rule.max_error,
            **own.as_json(),
            "no_match_share": self.rule.no_match_share,
            "verdict": self.verdict,
            "noticed_after": self.noticed,
            "rungs": self.rungs,
            "marked": self.marked,
        }

    @property
    def tiles(self) -> list[dict[str, str]]:
        """The story as a score card."""
        own = self.rule.certificate
        when = "not noticed" if self.noticed is None else f"after {self.noticed} queries"
        missing = f"{MISSING:.0%} of them then ask for something that is missing, {NO_MATCH:.0%} before"
        wrong = f"{own.error:.0%} wrong in the test" if self.rule.certified else "nothing could be certified"
        assumed = f"at {self.rule.confidence:.0%} confidence, with up to {NO_MATCH:.0%} of the queries without a match"
        return [
            {
                "name": "guaranteed error of a live search",
                "value": f"at most {self.rule.max_error:.0%}",
                "note": assumed,
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
    missing = world.sample_captioned(QUIET + CHANGED, 1, generator=generator)
    image, text, _ = world.sample(HELD_OUT, generator=generator)
    scenes = torch.cat((there.scene, there.scene[:DOUBLES]))
    gallery = torch.cat((there.image, _nearly(there.image[:DOUBLES], generator)))
    bank = typical_queries(pairs, Direction.T2I, BANK, seed)
    ladder = BayesReranker(None, gallery, Direction.T2I, SHORTLIST, seed=seed, head=head, bank=bank)
    ladder.calibrate(EmbeddingPairs.from_arrays(image, text), progress=False)
    judged = FITTED + CERTIFIED
    order = torch.randperm(len(there.text), generator=generator, device="cpu")[: judged + QUIET + CHANGED]
    number = torch.arange(len(order), device="cpu") - judged
    share = torch.where(number < QUIET, NO_MATCH, MISSING) * (number >= 0)
    gone = torch.rand(len(order), generator=generator, dtype=torch.float64, device="cpu") < share
    number = number.clamp(min=0)
    asked = torch.where(gone.unsqueeze(1), missing.text[number], there.text[order])
    own = there.text_image_index[order]
    words = [
        _caption(world, missing, int(number[row])) if gone[row] else _caption(world, there, int(order[row]))
        for row in range(len(order))
    ]
    meant = torch.where(gone.unsqueeze(1), missing.image[number], there.image[own])
    fit = _fit(head, asked[judged:], meant[judged:], gallery)
    return _live(world, ladder, Asked(asked, own.masked_fill(gone, -1), words, fit), Searched(gallery, scenes), out)


@dataclass(frozen=True)
class Asked:
    """All queries: judged ones, then those of the log."""

    text: Tensor
    item: Tensor
    """The number of the image that each asks for; -1 if it is not there."""
    words: Sequence[str]
    fit: Tensor
    """How well each caption of the log fits its image, in nats."""


@dataclass(frozen=True)
class Searched:
    """The images that are there."""

    image: Tensor
    scene: Tensor


def _nearly(rows: Tensor, generator: torch.Generator) -> Tensor:
    """Unit rows [n, d] that have the cosine `ALIKE` with these."""
    noise = torch.randn(rows.shape, generator=generator, device="cpu").to(rows)
    noise = noise - (noise * rows).sum(1, keepdim=True) * rows
    return ALIKE * rows + math.sqrt(1 - ALIKE**2) * torch.nn.functional.normalize(noise)


def _fit(head: PosteriorHead, text: Tensor, image: Tensor, gallery: Tensor) -> Tensor:
    """The pointwise mutual information [n] of texts and images by the head, whose scores are relative to a gallery."""
    told = head.points(text, Direction.T2I)
    own = (told.points * image.unsqueeze(1)).sum(2, keepdim=True)
    own, others = ((each + told.log_weights.unsqueeze(2)).logsumexp(1) for each in (own, told.points @ gallery.T))
    own = own.squeeze(1) + head.item_bias(image, Direction.T2I)
    others = others + head.item_bias(gallery, Direction.T2I)
    return own - others.logsumexp(1) + math.log(len(gallery))


def _live(world: ClipWorld, ladder: BayesReranker, asked: Asked, searched: Searched, out: Path) -> Story:
    folder = out / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    reranked = ladder(asked.text)
    judged = FITTED + CERTIFIED
    live = len(asked.text) - judged
    right = (reranked.index == asked.item[:, None]).numpy()
    scores = np.log(np.maximum(reranked.prob.double().numpy(), SMALLEST))
    trust = Trust(log_prob=True).fit(scores[:FITTED], right[:FITTED])
    hits = reranked.index.numpy()
    tested = slice(FITTED, judged)
    rule = trust.certify(scores[tested], right[tested], MAX_ERROR, no_match_share=NO_MATCH).with_hits(hits[tested])
    rule.save(folder / "rule.json")
    log = {
        "query": np.array([f"live-{row}" for row in range(live)], dtype=object),
        "index": hits[judged:],
        "prob": reranked.prob[judged:].numpy(),
        "p_outside": reranked.p_outside[judged:].numpy(),
        "entropy": reranked.entropy[judged:].numpy(),
        **{
            f"{EVIDENCE}{name}": part[judged:, :EXPLAINED].numpy()
            for name, part in zip(ladder.evidence_names, reranked.evidence.unbind(2))
        },
    }
    parquet.write_columns(folder / "log.parquet", log, live)
    fit = {"pair": np.arange(live), "pmi": asked.fit.double().numpy()}
    parquet.write_columns(folder / "density.parquet", fit, live)
    files = (folder / "rule.json", folder / "log.parquet", folder / "health.parquet")
    watched = watch_file(*files, WatchSettings(), overwrite=True) if rule.certified else None
    rungs: list[dict[str, object]] = [
        {"name": rung.name, "gain": f"{rung.gain:+.3f} nats a query", "kept": "kept" if rung.kept else "left out"}
        for rung in ladder.rungs
    ]
    texts = Rows([asked.text[judged:].numpy()], "queries")
    page = _page(world, searched, folder, sources.Described(asked.words[judged:], texts), right[judged:], rungs)
    verdict = None if watched is None else (watched.verdict, watched.holds)
    write_page(Explored(**{**vars(page), "verdict": verdict}), out / PAGE)
    marked = {each.name: len(each.rows) for each in page.marked}
    return Story(rule, watched, None if watched is None else _noticed(watched), rungs, marked)


def _noticed(watched: Watched) -> int | None:
    """How many queries after the change the first alarm came."""
    late = [int(end) - QUIET for end, holds in zip(watched.table["end"], watched.table["holds"]) if not holds]
    return late[0] if late else None


def _page(
    world: ClipWorld,
    searched: Searched,
    folder: Path,
    queries: sources.Described,
    right: Any,
    rungs: list[dict[str, object]],
) -> Explored:
    names = [_name(world, int(scene)) for scene in searched.scene]
    for name, words in (("queries", queries.words), ("gallery", names)):
        write_atomic(folder / f"{name}.txt", "\n".join(words).encode())
    gallery = sources.Described(names, Rows([searched.image.numpy()], "gallery"))
    run = sources.RunFiles.open(folder)
    page = sources.explored(run, queries, gallery, labels=right, title="A search of the CLIP-like world, live")
    scenes = [int(searched.scene[int(each)]) for each in page.items.ids]
    items = Items(page.items.ids, page.items.captions, [_picture(world, scene) for scene in scenes])
    lead = (
        f"{len(queries.words):,} live captions search {len(names)} images of a made-up world. Pictures stand for "
        f"scenes: groups have a colour, concepts a pattern. {NO_MATCH:.0%} of the captions ask for images that are not "
        f"there, as the rule expects; from query {QUIET} on it is {MISSING:.0%}."
    )
    return Explored(**{**vars(page), "items": items, "lead": lead, "ladder": rungs})


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
