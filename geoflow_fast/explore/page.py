"""The page itself: what is known about queries and their hits goes into one HTML file as data that a script shows."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geoflow_fast.runtime import checks, pages
from geoflow_fast.runtime.files import write_atomic
from geoflow_fast.runtime.pages import charts

SCALE = 10_000
"""Probabilities are stored as whole numbers of this part, which is shorter and precise enough to look at."""
NATS = 100
FEW = 20
"""Judged errors of fewer answers are not drawn."""
LONGEST = 20_000
"""Characters of a caption, at most."""

ESCAPES = {ord(each): f"\\u{ord(each):04x}" for each in "<>&\u2028\u2029"}
"""What may not stand inside a script element, and how JSON writes it instead."""

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Items:
    """What may be found: the M items that are hits of some query."""

    ids: Sequence[str]
    captions: Sequence[str] = ()
    """What items are called, if they have words; as many as ids, or none."""
    thumbnails: Sequence[str] = ()
    """Data URIs, empty where there is none; as many as ids, or none."""


@dataclass(frozen=True)
class Certified:
    """The rule whose threshold is marked."""

    threshold: float
    max_error: float
    confidence: float
    answered: float
    """Share of the queries that it was certified on."""
    no_match_share: float = 0.0


@dataclass(frozen=True)
class Marked:
    """Queries that deserve a look, and why."""

    name: str
    why: str
    rows: Sequence[int]
    """Numbers of queries, most remarkable first."""


@dataclass(frozen=True)
class Explored:
    """What a page shows: n queries with k hits each, best first."""

    title: str
    lead: str
    ids: Sequence[str]
    captions: Sequence[str]
    """Empty strings where a query has no words."""
    p_right: Floats
    """[n], the probability that the first hit is right."""
    hits: NDArray[np.int64]
    """[n, k], numbers of items; -1 where there is none."""
    prob: Floats
    """[n, k], the probability of each hit."""
    items: Items
    right: Bools | None = None
    """[n], whether the first hit is right, if that is known."""
    meant: NDArray[np.int64] | None = None
    """[n], the number of the item that was meant, if it is known; -1 where it is not among the items."""
    evidence: Mapping[str, Floats] = field(default_factory=dict)
    """[n, e] by kind: what it adds to the logit of each of the first hits, in nats."""
    facts: Mapping[str, Floats] = field(default_factory=dict)
    """[n] by name: further numbers of a query."""
    marked: Sequence[Marked] = ()
    certified: Certified | None = None
    verdict: tuple[str, bool] | None = None
    """What `geoflow watch` says, and whether the guarantee holds."""
    ladder: Sequence[Mapping[str, object]] = ()
    """What each rung of evidence brought, one row each: name, gain, kept."""
    uncertified: str = ""
    """Why no rule is marked, if there is none."""

    def __post_init__(self) -> None:
        n = len(self.ids)
        shapes = {"captions": len(self.captions), "p_right": len(self.p_right), "hits": len(self.hits)}
        for name, count in shapes.items():
            if count != n:
                raise ValueError(f"{name} has {count} rows, but there are {n} ids of queries")
        if self.hits.shape != self.prob.shape:
            raise ValueError(f"hits are {self.hits.shape}, but their probabilities {self.prob.shape}")
        if self.hits.size and (int(self.hits.max()) >= len(self.items.ids) or int(self.hits.min()) < -1):
            raise ValueError(f"hits must be numbers of the {len(self.items.ids)} items, or -1")


def write_page(explored: Explored, path: Path) -> Path:
    """Writes the page, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(checks.path(path, "path"), render(explored).encode("utf-8"))
    return path


def render(explored: Explored) -> str:
    """The HTML of the page."""
    from markupsafe import Markup

    script = (pages.TEMPLATES / "explore.js").read_text("utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return pages.render(
        "explore.html.j2",
        title=clean(explored.title),
        lead=clean(explored.lead),
        sections={},
        cards=cards(explored),
        chart=chart(explored),
        certified=explored.certified,
        marked=[each for each in explored.marked if len(each.rows)],
        judged=explored.right is not None,
        verdict=explored.verdict,
        ladder=explored.ladder,
        data=Markup(script_data(data(explored))),
        script=Markup(script),
        script_hash=Markup(digest),
    )


def cards(explored: Explored) -> list[dict[str, str]]:
    """The tiles at the top."""
    n, p = len(explored.ids), explored.p_right
    error = math.sqrt(float(p.var()) / n) if n else math.nan
    tiles = [
        {"name": "queries", "value": f"{n:,}", "note": f"{len(explored.items.ids):,} different items among their hits"},
        {
            "name": "first hits expected to be right",
            "value": f"{p.mean():.0%}" if n else "–",
            "note": f"mean probability, ± {error:.1%}" if n else "no query",
        },
    ]
    if explored.right is not None and n:
        tiles.append(
            {"name": "first hits judged right", "value": f"{explored.right.mean():.0%}", "note": f"of {n:,} queries"}
        )
    rule = explored.certified
    if rule is None:
        tiles.append({"name": "guarantee", "value": "none", "note": explored.uncertified})
    elif explored.verdict is not None and not explored.verdict[1]:
        lost = f"at most {rule.max_error:.0%} was certified, for queries unlike these"
        tiles.append({"name": "guaranteed error", "value": "no longer", "note": lost, "tone": "bad"})
    elif math.isfinite(rule.threshold):
        tiles.append(
            {
                "name": "guaranteed error",
                "value": f"at most {rule.max_error:.0%}",
                "note": f"at {rule.confidence:.0%} confidence, answering {rule.answered:.0%} in the test",
                "tone": "good",
            }
        )
    else:
        tiles.append({"name": "guarantee", "value": "none", "note": "nothing could be certified", "tone": "bad"})
    return [{"tone": "", "id": "", **tile} for tile in tiles]


def chart(explored: Explored) -> charts.RiskCoverage:
    """Expected and judged errors over the share that is answered."""
    order = np.argsort(-explored.p_right, kind="stable")
    count = np.arange(1, len(order) + 1)
    coverage = (count / max(len(order), 1)).tolist()
    curves = {"expected error": (coverage, (np.cumsum(1 - explored.p_right[order]) / count).tolist())}
    if explored.right is not None:  # the error of a handful of answers is noise
        judged = np.where(count >= FEW, np.cumsum(~explored.right[order]) / count, np.nan)
        curves["judged error"] = (coverage, judged.tolist())
    rule = explored.certified
    if rule is None or not math.isfinite(rule.threshold) or not len(order):
        return charts.risk_coverage(curves, max_error=None if rule is None else rule.max_error)
    answered = explored.p_right >= rule.threshold
    risk = float((1 - explored.p_right[answered]).mean()) if answered.any() else 0.0
    point = (float(answered.mean()), risk, "certified point")
    return charts.risk_coverage(curves, max_error=rule.max_error, certified=point)


def data(explored: Explored) -> dict[str, Any]:
    """What the script shows, in short numbers."""
    names = list(explored.evidence)
    told = np.stack([explored.evidence[name] for name in names], axis=2) if names else np.zeros((0, 0, 0))
    right = None if explored.right is None else explored.right.astype(int).tolist()
    return {
        "n": len(explored.ids),
        "k": explored.hits.shape[1],
        "scale": SCALE,
        "nats": NATS,
        "ids": [clean(each) for each in explored.ids],
        "captions": [clean(each) for each in explored.captions],
        "p": _whole(explored.p_right, SCALE),
        "hits": explored.hits.ravel().tolist(),
        "prob": _whole(explored.prob.ravel(), SCALE),
        "right": right,
        "meant": None if explored.meant is None else explored.meant.tolist(),
        "items": [clean(each) for each in explored.items.ids],
        "itemCaptions": [clean(each) for each in explored.items.captions],
        "thumbnails": list(explored.items.thumbnails),
        "evidenceNames": names,
        "evidenceHits": told.shape[1] if names else 0,
        "evidence": _whole(told.ravel(), NATS),
        "facts": {name: [_short(x) for x in values.tolist()] for name, values in explored.facts.items()},
        "marked": [
            {"name": each.name, "why": each.why, "rows": [int(row) for row in each.rows]}
            for each in explored.marked
            if len(each.rows)
        ],
        "holds": explored.verdict is None or explored.verdict[1],
        "certified": None
        if explored.certified is None or not math.isfinite(explored.certified.threshold)
        else vars(explored.certified),
    }


def script_data(values: Mapping[str, Any]) -> str:
    """JSON that may stand inside a script element: nothing in it can end the element or begin markup."""
    text = json.dumps(values, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.translate(ESCAPES)


def clean(words: object) -> str:
    """Text that can be written as UTF-8, and is not endlessly long."""
    text = str(words).encode("utf-8", "replace").decode()
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."


def _whole(values: Floats, scale: int) -> list[int]:
    finite = np.where(np.isfinite(values), values, 0.0)
    return np.round(finite * scale).astype(int).tolist()


def _short(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None
