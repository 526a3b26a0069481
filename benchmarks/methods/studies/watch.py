"""How soon `gf.watch` notices a change, and how often it raises a false alarm, in worlds with known truth.

Every run draws a gallery, captions of its items, of missing items and of items of a held-out group, fits and certifies
a rule, and looks at a log after every 100 queries. Captions search images.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import geoflow_fast as gf
from benchmarks.methods.results import RESULTS, gate, load, report, save
from benchmarks.methods.studies.trust import head_scores, hub_numbers
from geoflow_fast import decisions
from geoflow_fast.decisions.watch import EVERY, WINDOW, Log, Watcher
from geoflow_fast.runtime import hashing
from geoflow_fast.runtime.progress import progress_bar
from geoflow_fast.spherical import sample_bump
from geoflow_fast.worlds import ClipWorld, ConceptWorld

Array = NDArray[Any]
K, ITEMS, FAR_ITEMS, REPLACED = 50, 1000, 150, 0.2
FITTED, CERTIFIED, SOON, LONG, RUNS, FEW = 500, 2000, 500, 5000, 100, 40
MISSING, FROM_GROUP, FALSE_ALARMS = 0.3, 0.5, 0.05
DETECTED = 0.95
"""The share of changes that have to be noticed within `SOON` queries."""
HEAD_PAIRS = 20_000
FIRST_SEED = 50_000
"""Of the first run; the settings of `gf.watch` were chosen on seeds below 10,000."""
UNCHANGED = "no change"


@dataclass(frozen=True)
class Captions:
    """Captions that search a gallery of images. Item -1 is missing from it."""

    text: Tensor
    item: Tensor


class Places:
    """A gallery with captions: `known` ones, those of a held-out group, and those of missing items. A part of the items
    is replaced in a second gallery."""

    def __init__(self, world: ConceptWorld | ClipWorld, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        known, self.known = self._drawn(world, ITEMS, (FITTED + CERTIFIED + LONG) // ITEMS + 1)
        far, self.far = self._drawn(world, FAR_ITEMS, SOON // FAR_ITEMS + 1, world.far)
        self.far = Captions(self.far.text, self.far.item + ITEMS)
        self.images = torch.cat((known, far))
        none = self._drawn(world, SOON, 1)[1]
        self.none = Captions(none.text, torch.full_like(none.item, -1))
        new = world.sample(ITEMS, generator=self.generator)[0]
        gone = torch.randperm(ITEMS, generator=self.generator)[: round(REPLACED * ITEMS)]
        self.replaced = self.images.clone()
        self.replaced[gone] = new[: len(gone)]
        self.new_number = torch.arange(len(self.images))
        self.new_number[gone] = len(self.images) + torch.arange(len(gone))
        """The id of each row after the change: replaced items have new ones."""

    def _drawn(
        self, world: ConceptWorld | ClipWorld, items: int, each: int, concepts: Tensor | None = None
    ) -> tuple[Tensor, Captions]:
        """Images, and `each` captions of every one of them, in random order."""
        if isinstance(world, ClipWorld):
            drawn = world.sample_captioned(items, each, generator=self.generator, concepts=concepts)
            image, text, item = drawn.image, drawn.text, drawn.text_image_index
        else:
            image, _, concept = world.sample(items, generator=self.generator, concepts=concepts)
            item = torch.arange(items).repeat_interleave(each)
            centre = image[item].double() @ world.rotation.T
            text = sample_bump(centre, world.text_c[world.level[concept[item]]], self.generator).float()
        order = torch.randperm(len(text), generator=self.generator)
        return image, Captions(text[order], item[order])


@dataclass(frozen=True)
class Found:
    """Result lists of captions."""

    scores: Array
    hits: Array
    relevant: Array
    embeddings: Array

    def part(self, rows: slice | Array) -> Found:
        return Found(*(each[rows] for each in vars(self).values()))


Scores = Callable[[Tensor, Tensor], Tensor]


def result_lists(scores: Scores, captions: Captions, images: Tensor, number: Tensor | None = None) -> Found:
    """The best hits among these images, named by `number`."""
    best = scores(captions.text, images).topk(K, dim=1)
    hits = best.indices if number is None else number[best.indices]
    values = best.values.double().numpy()
    relevant = (hits == captions.item[:, None]).numpy()
    return Found(values, hits.numpy(), relevant, captions.text.double().numpy())


def mixed(one: Found, other: Found, share: float, rng: np.random.Generator) -> Found:
    """The lists of `one`, of which a share is replaced by those of `other`."""
    chosen = rng.random(len(one.scores)) < share
    pairs = zip(vars(one).values(), vars(other).values())
    return Found(*(np.where(chosen[:, None], b[: len(a)], a) for a, b in pairs))


def logs(scores: Scores, places: Places, rng: np.random.Generator) -> Iterator[tuple[str, Found]]:
    """What is judged, a log without a change, and changed ones, by name."""
    known = result_lists(scores, places.known, places.images)
    yield "judged", known.part(slice(FITTED + CERTIFIED))
    live = known.part(slice(FITTED + CERTIFIED, FITTED + CERTIFIED + LONG))
    yield UNCHANGED, live
    soon = live.part(slice(SOON))
    yield "30 % no match", mixed(soon, result_lists(scores, places.none, places.images), MISSING, rng)
    far = result_lists(scores, places.far, places.images).part(slice(SOON))
    yield "half from a held-out group", mixed(soon, far, FROM_GROUP, rng)
    rows = slice(FITTED + CERTIFIED, FITTED + CERTIFIED + SOON)
    asked = Captions(places.known.text[rows], places.known.item[rows])
    yield "a fifth of the gallery replaced", result_lists(scores, asked, places.replaced, places.new_number)


def first_alarm(rule: gf.Rule, judged: Found, log: Found, views: str, seed: int) -> tuple[int | None, str]:
    """The number of queries after which an alarm is raised, None if it is not, and by what."""
    model, n = rule.model, len(log.scores)
    own = Log(
        model.heads(log.scores),
        np.empty((n, 0)),
        log.hits if "hits" in views else None,
        log.embeddings if "embeddings" in views else None,
    )
    embeddings = judged.embeddings[FITTED:] if "embeddings" in views else None
    assert rule.reference is not None
    watcher = Watcher(rule, rule.reference, embeddings, FALSE_ALARMS, seed=seed)
    for number in range(1, n // EVERY + 1):
        end = number * EVERY
        rng = np.random.default_rng((seed, number))
        strongest = min(
            watcher.drifts(number, own.part(max(0, end - WINDOW), end), rng), key=lambda each: each.corrected
        )
        if strongest.corrected <= FALSE_ALARMS:
            return end, strongest.view
    return None, ""


VIEWS = {"scores, hits, embeddings": "hits embeddings", "scores alone": ""}
Alarms = dict[str, tuple[int | None, str]]
"""Of one run, by change and by what was looked at: the queries until the alarm, or None, and what raised it."""


@dataclass(frozen=True)
class Searched:
    """A world, how it is searched, and the error that its rules certify."""

    name: str
    world: str
    by_head: bool
    error: float
    runs: int
    long_logs: bool = False
    """Whether long logs without a change are looked at, too."""

    def alarms(self, run: int) -> Alarms:
        """One run; everything in it is drawn again."""
        world, scores = WORLDS[self.world](), self.scores()
        drawn = dict(logs(scores, Places(world, FIRST_SEED + run), np.random.default_rng(FIRST_SEED + run)))
        judged = drawn.pop("judged")
        trust = gf.Trust().fit(judged.scores[:FITTED], judged.relevant[:FITTED])
        tested = judged.part(slice(FITTED, None))
        rule = trust.certify(tested.scores, tested.relevant, self.error).with_hits(tested.hits)
        return {
            f"{change}; {title}": first_alarm(rule, judged, log, views, run)
            for change, log in drawn.items()
            for title, views in VIEWS.items()
            if change != UNCHANGED or (self.long_logs and views)
        }

    def scores(self) -> Scores:
        """Scores of images for captions."""
        if not self.by_head:
            return lambda text, image: text @ image.T
        head = trained_head(self.world)
        return lambda text, image: head_scores(head, text, image, hub_numbers(head, image, "t2i"), "t2i")


def trained_head(world: str) -> gf.PosteriorHead:
    """A head for a world; it is kept beside the results and not trained again."""
    image, text, _ = WORLDS[world]().sample(HEAD_PAIRS, generator=torch.Generator().manual_seed(100))
    folder = RESULTS / f"watch_head_{world.replace(' ', '_')}"
    return gf.PosteriorHead.fit(gf.EmbeddingPairs.from_arrays(image, text), out=folder, progress=False, k=1)


def made_by() -> str:
    """A digest of the code that the runs depend on most: those of other code do not count."""
    sources = [*sorted(Path(decisions.__file__).parent.glob("*.py")), Path(__file__)]
    return hashing.fingerprint({source.name: source.read_text() for source in sources})[:12]


def one_run(searched: Searched, run: int) -> None:
    """A run in a process of its own, whose result is kept."""
    torch.set_num_threads(1)
    save(kept_as(searched, run), {"alarms": searched.alarms(run)})


def kept_as(searched: Searched, run: int) -> str:
    """The name of a run's result: a study that was interrupted goes on after those that are there."""
    return f"watch_{made_by()}_{searched.name.replace(' ', '_').replace(',', '')}_{run}"


def rows_of(searched: Searched) -> list[dict[str, Any]]:
    """How many logs of each kind raise an alarm."""
    if searched.by_head:
        trained_head(searched.world)  # before processes would each train one
    missing = [run for run in range(searched.runs) if load(kept_as(searched, run)) is None]
    done = searched.runs - len(missing)
    processes = ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn"))
    with processes, progress_bar(searched.runs, done, "runs", shown=None) as advance:
        for finished in as_completed([processes.submit(one_run, searched, run) for run in missing]):
            finished.result()
            advance(1)
    results = [load(kept_as(searched, run)) for run in range(searched.runs)]
    alarms = [result["alarms"] for result in results if result is not None]
    return [row_of(searched.name, key, [run[key] for run in alarms]) for key in alarms[0]]


def row_of(name: str, key: str, ends: list[tuple[int | None, str]]) -> dict[str, Any]:
    """A line of the table."""
    change, title = key.split("; ")
    seen = [end for end, _ in ends if end is not None]
    return {
        "world": name,
        "change": change,
        "looked at": title,
        "runs": len(ends),
        "queries of a log": LONG if change == UNCHANGED else SOON,
        "alarms": len(seen),
        "median queries until the alarm": float(np.median(seen)) if seen else float("nan"),
        "by": ", ".join(sorted({view for _, view in ends if view})),
    }


WORLDS: dict[str, Callable[[], ConceptWorld | ClipWorld]] = {
    "concept world": ConceptWorld,
    "CLIP-like world": ClipWorld,
}
GATED = Searched("concept world, head", "concept world", True, 0.1, RUNS, long_logs=True)
OTHERS = (
    Searched("concept world, cosine", "concept world", False, 0.1, FEW),
    Searched("CLIP-like world, head", "CLIP-like world", True, 0.3, FEW),
)


def run(gated: Searched = GATED, others: Sequence[Searched] = OTHERS) -> str:
    """The study. Its gates are those of one world, of which there are most runs."""
    rows = [row for searched in (gated, *others) for row in rows_of(searched)]
    words = report("watch", rows, {"certified": CERTIFIED, "window": WINDOW, "every": EVERY})
    for row in rows:
        if row["world"] == gated.name and row["looked at"] != "scores alone":
            share = row["alarms"] / row["runs"]
            right = share <= FALSE_ALARMS if row["change"] == UNCHANGED else share >= DETECTED
            gate(f"{row['world']}, {row['change']}", right)
    return words
