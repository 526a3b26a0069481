"""Looks at a log of queries that grows: each call does the looks that are due and adds them to a Parquet file."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geoflow_fast.data.embeddings import open_rows
from geoflow_fast.decisions.drift import Drift
from geoflow_fast.decisions.encoders import check_encoder
from geoflow_fast.decisions.rules import Rule
from geoflow_fast.decisions.watch import (
    EVERY,
    FALSE_ALARMS,
    PARTS,
    WINDOW,
    Health,
    Look,
    Looks,
    changed_search,
    looked_at,
    watched_queries,
)
from geoflow_fast.jobs.decisions import QUERY, ResultLists, open_lists
from geoflow_fast.runtime import hashing, parquet
from geoflow_fast.runtime.files import contents_of, write_json

FORMAT = 1
MADE_BY, LOG, VERDICT, ALARM, HOLDS = "made_by", "log", "verdict", "alarm", "holds"

Array = NDArray[Any]


@dataclass(frozen=True)
class WatchSettings:
    """How a log is looked at."""

    column: str | None = None
    """Column of the lists of scores."""
    embeddings: Path | None = None
    """Those of the log's queries."""
    judged_embeddings: Path | None = None
    """Those of the judged queries, in the rows of the file that the rule was made from."""
    encoder: str | None = None
    gallery_size: int | None = None
    window: int = WINDOW
    every: int = EVERY
    false_alarms: float = FALSE_ALARMS


@dataclass(frozen=True)
class Watched:
    """The state after a call."""

    lists: ResultLists
    health: Health | None
    """What this call has noticed; None if no look was due."""
    table: dict[str, Array]
    """All looks so far, a row each."""
    waiting: int
    """Queries after the last look."""

    changed: str | None
    """In what the search is known to differ from the one that the rule was made for."""

    @property
    def holds(self) -> bool:
        """Whether nothing speaks against the guarantee."""
        return self.changed is None and (not self.table or bool(self.table[HOLDS][-1]))

    @property
    def verdict(self) -> str:
        """The last verdict, in words."""
        if self.changed is not None:
            return f"The guarantee no longer holds because {self.changed}."
        return str(self.table[VERDICT][-1]) if self.table else "There was no look yet."

    def facts(self) -> dict[str, Any]:
        """The last look and the verdict, as they are written as JSON."""
        last = {name: _plain(column[-1]) for name, column in self.table.items() if name not in (MADE_BY, LOG)}
        last |= {HOLDS: self.holds, VERDICT: self.verdict}
        looks = len(self.table.get(VERDICT, ()))
        label = [] if self.health is None else [_plain(self.lists.query[row]) for row in self.health.to_label]
        return {**last, "looks": looks, "waiting": self.waiting, "worth_labelling": label}


def watch_file(
    rule: Path,
    log: Path,
    out: Path,
    settings: WatchSettings,
    *,
    overwrite: bool = False,
    show: Callable[[Watched], None] | None = None,
) -> Watched:
    """Does the looks that are due at the log, a file of result lists as `geoflow threshold` reads them, and writes
    `out` with a row for each look, and beside it the state as JSON and the queries that are most worth judging. A
    search by another encoder than the rule's ends its guarantee; if only one of the two is known, a warning is given.
    `show` is called with what was found before `out` says that the looks are done: after a kill they are done again."""
    if out.suffix != ".parquet":
        raise ValueError(f"out must be a .parquet file, got {out}")
    own, lists = Rule.load(rule), open_lists(log, settings.column)
    watched_queries(own)  # refuses a rule without a guarantee even if no look is due
    live, judged = _rows(settings.embeddings, "embeddings"), _rows(settings.judged_embeddings, "judged_embeddings")
    made_by = _made_by(rule, settings, judged)
    table = {} if overwrite or not out.exists() else _earlier(out, made_by, lists, live)
    before = len(table.get(VERDICT, ()))
    waiting = len(lists.scores) - before * settings.every
    changed = changed_search(own, settings.encoder, settings.gallery_size)
    if changed is None:
        check_encoder("the rule", own.encoder, settings.encoder)
    if waiting < settings.every:
        return Watched(lists, None, table, waiting, changed)
    since = str(table[ALARM][-1]) if before else ""
    health = looked_at(
        own,
        lists.scores,
        Looks(settings.window, settings.every, settings.false_alarms, before, alarmed=bool(since)),
        hits=lists.hits,
        embeddings=live,
        judged_embeddings=judged,
    )
    rows = [_row(look, health, since, made_by, _log_digest(lists, live, look.end)) for look in health.looks]
    columns: dict[str, Array] = {name: np.array([row[name] for row in rows], _kind(rows[0][name])) for name in rows[0]}
    table = {name: np.concatenate((table[name], new)) if before else new for name, new in columns.items()}
    watched = Watched(lists, health, table, len(lists.scores) - health.last.end, changed)
    if show is not None:
        show(watched)
    _write(out, watched)
    return watched


def labels_file(out: Path) -> Path:
    """The file of the queries that are most worth judging, beside `out`."""
    return out.with_name(f"{out.stem}.label.parquet")


def state_file(out: Path) -> Path:
    """The file of the state, beside `out`."""
    return out.with_suffix(".json")


def _made_by(rule: Path, settings: WatchSettings, judged: Array | None) -> str:
    """What looks depend on besides the log: with anything else they would not be looks of one series."""
    numbers = {name: getattr(settings, name) for name in ("window", "every", "false_alarms")}
    compared = {"embeddings": settings.embeddings is not None, "judged": _digest_of(judged)}
    file = np.frombuffer(rule.read_bytes(), np.uint8)
    return hashing.fingerprint({"format": FORMAT, "rule": hashing.digest([file]), **compared, **numbers})


def _earlier(out: Path, made_by: str, lists: ResultLists, live: Array | None) -> dict[str, Array]:
    """The looks of earlier calls."""
    table = parquet.read_columns(out)
    with contents_of(out, "no file of looks"):
        last = int(table["end"][-1])
        if table[MADE_BY][-1] != made_by:
            raise ValueError(
                "its looks were made with another rule or other settings: name another --out, or overwrite"
            )
        if last > len(lists.scores) or table[LOG][-1] != _log_digest(lists, live, last):
            raise ValueError(f"the first {last} queries of {lists.path} have changed since: a log may only grow")
    return table


def _log_digest(lists: ResultLists, live: Array | None, end: int) -> str:
    """A digest of the first queries of a log: their ids, scores, hits and embeddings."""
    parts = {"query": lists.query, "hits": lists.hits, "embeddings": live}
    known = {name: _digest_of(None if part is None else part[:end]) for name, part in parts.items()}
    return hashing.fingerprint({**known, "scores": hashing.digest([np.asarray(lists.scores[:end], np.float64)])})


def _digest_of(part: Array | None) -> str | None:
    """A digest of a part of a log, which does not depend on what follows: integers are read as floating-point numbers
    if one of a later row is missing."""
    if part is None:
        return None
    if part.dtype.kind == "f" and (part % 1 == 0).all():
        part = part.astype(np.int64)
    return hashing.digest([part])


def _rows(path: Path | None, name: str) -> Array | None:
    if path is None:
        return None
    rows = open_rows(path, name)
    return rows[np.arange(len(rows))]


def _row(look: Look, health: Health, since: str, made_by: str, log: str) -> dict[str, Any]:
    """One look as a row of the table."""
    alarmed = health.alarm is not None and health.alarm.number <= look.number
    verdict = since or (health.verdict if alarmed else _verdict_of(look, health))
    drifts = {each.view: each for each in look.drifts}
    return {
        "look": look.number,
        "start": look.start,
        "end": look.end,
        HOLDS: not (since or alarmed),
        VERDICT: verdict,
        ALARM: since or (health.verdict if alarmed else ""),
        "p_value": look.p_value,
        **{f"{view}_{name}".replace(" ", "_"): x for view in PARTS for name, x in _drift(drifts.get(view)).items()},
        "expected": look.expected,
        "stderr": look.stderr,
        "answered": look.answered,
        "expected_error": look.expected_error,
        "judged_error": look.judged_error,
        "no_match_share": look.no_match_share,
        "no_match_stderr": look.no_match_stderr,
        MADE_BY: made_by,
        LOG: log,
    }


def _verdict_of(look: Look, health: Health) -> str:
    """The verdict after an earlier look of this call."""
    return Health(health.rule, (look,), None, health.false_alarms, *_nothing()).verdict


def _nothing() -> tuple[Array, Array, Array]:
    return np.empty(0), np.empty(0), np.empty(0, np.int64)


def _drift(drifts: Drift | None) -> dict[str, float]:
    names = ("auroc", "p_value", "corrected")
    return {name: math.nan if drifts is None else getattr(drifts, name) for name in names}


def _kind(value: Any) -> type:
    return object if isinstance(value, str) else type(value)


def _plain(value: Any) -> Any:
    """A value that JSON can hold."""
    plain = value.item() if hasattr(value, "item") else value
    return None if isinstance(plain, float) and not math.isfinite(plain) else plain


def _write(out: Path, watched: Watched) -> None:
    health, lists = watched.health, watched.lists
    assert health is not None
    rows = health.to_label
    near = rows - health.last.start
    label = {QUERY: lists.query[rows], "row": rows, "p_right": health.p_right[near], "odds": health.odds[near]}
    if lists.hits is not None:
        label["hit"] = lists.hits[rows, 0]
    out.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_columns(labels_file(out), label, len(rows))
    write_json(state_file(out), watched.facts())
    parquet.write_columns(out, watched.table, len(watched.table[VERDICT]))
