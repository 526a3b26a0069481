"""What the commands wrote, put together for a page: re-ranked lists or lists of any search, rules, densities, looks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geoflow_fast.data.embeddings import IMAGE_FOLDER, TEXT_FOLDER, open_rows
from geoflow_fast.data.pairs import METADATA_FOLDER
from geoflow_fast.data.rows import Rows, load_npy
from geoflow_fast.decisions.encoders import check_encoder
from geoflow_fast.decisions.rules import ANSWERS, Rule
from geoflow_fast.decisions.watch import Health
from geoflow_fast.explore.page import Certified, Explored, Items, Marked
from geoflow_fast.explore.thumbnails import Thumbnails
from geoflow_fast.jobs.decisions import HITS, PROBABILITIES, ResultLists, open_lists
from geoflow_fast.jobs.embed import IMAGE_METADATA
from geoflow_fast.jobs.rerank import EVIDENCE
from geoflow_fast.runtime import parquet
from geoflow_fast.runtime.files import read_json

HITS_SHOWN, THUMBNAILS = 8, 2000
FACTS = {"entropy": "entropy", "p_outside": "outside the shortlist", "p_no_match": "no match"}
"""Columns that are shown as facts of a query, and what they are called."""
SAME, NEIGHBOURS, STRANGE, SURE = 0.98, 10, 0.02, 0.8
"""The cosine from which hits are near-duplicates; how many neighbours say how strange a query is; the share of queries
that is called strange, or badly matched; and the probability from which a wrong first hit casts doubt on the label."""
BLOCK = 1024

Array = NDArray[Any]


@dataclass(frozen=True)
class Described:
    """What is known about the rows of one side: words and embeddings, if they were given."""

    words: Sequence[str] = ()
    rows: Rows | None = None

    def word(self, row: int) -> str:
        """The words of a row; empty if there are none."""
        return self.words[row] if 0 <= row < len(self.words) else ""

    def rows_of(self, names: Sequence[Any]) -> list[int]:
        """The rows that have these ids or, if embeddings have none, these numbers; -1 where there is none."""
        ids = None if self.rows is None else self.rows.ids
        if ids is None:
            return [int(name) if isinstance(name, (int, np.integer)) else -1 for name in names]
        known = {str(each): row for row, each in enumerate(ids.values.tolist())}
        return [known.get(str(name), -1) for name in names]


def described(paths: Sequence[Path], side: str) -> Described:
    """Reads the descriptions of a `side`, "text" or "image": words (.txt with one line each, .parquet or
    .parquet:COLUMN, .npy of strings), embeddings (.npy or a folder of shards), or a folder of `geoflow embed`."""
    words: list[str] = []
    rows = None
    for path in paths:
        metadata = path / (METADATA_FOLDER if side == "text" else IMAGE_METADATA)
        if path.is_dir() and (path / METADATA_FOLDER).is_dir():
            words = _embedded_words(metadata if metadata.is_dir() else path / METADATA_FOLDER, side)
            rows = open_rows(path / (TEXT_FOLDER if side == "text" else IMAGE_FOLDER), side)
        elif path.is_dir() or (path.suffix == ".npy" and load_npy(path).ndim == 2):
            rows = open_rows(path, side)
        else:
            words = _words(path)
    return Described(words, rows)


def _embedded_words(folder: Path, side: str) -> list[str]:
    """The captions, or the paths of the images, of a folder of `geoflow embed`."""
    files = sorted(folder.glob("*.parquet"), key=lambda file: (len(file.name), file.name))
    column = "caption" if side == "text" else "image_path"
    return [str(each) for file in files for each in parquet.read_columns(file, [column])[column]]


def _words(path: Path) -> list[str]:
    if path.suffix == ".npy":
        return [str(each) for each in load_npy(path).tolist()]
    file, dot, column = str(path).partition(".parquet")
    if dot:
        stored = Path(f"{file}{dot}")
        names = parquet.column_names(stored)
        wanted = column.removeprefix(":") or next((x for x in ("caption", "text", "image_path", *names)), "")
        if wanted not in names:
            known = [x for x in ("caption", "text", "image_path") if x in names]
            if column or not known:
                raise ValueError(f"{stored} has no column {wanted!r}; its columns are {', '.join(names)}")
            wanted = known[0]
        return [str(each) for each in parquet.read_columns(stored, [wanted])[wanted].tolist()]
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: give .txt, .npy, .parquet or a folder")
    return path.read_text("utf-8", errors="replace").splitlines()


@dataclass(frozen=True)
class RunFiles:
    """The files that the commands wrote into a folder, or a single one."""

    lists: ResultLists
    columns: dict[str, Array] = field(default_factory=dict)
    """All columns of the file of the lists."""
    density: dict[str, Array] = field(default_factory=dict)
    rule: Rule | None = None
    verdict: tuple[str, bool] | None = None

    @classmethod
    def open(cls, path: Path, rule: Path | None = None) -> RunFiles:
        """Reads a Parquet file of lists, or a folder with such a file and whatever else is there."""
        files = [path] if path.is_file() else sorted(path.glob("*.parquet"))
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist")
        names = {file: set(parquet.column_names(file)) for file in files}
        ranked = [file for file, columns in names.items() if {HITS, PROBABILITIES} <= columns]
        plain = [file for file, columns in names.items() if {HITS, "scores"} <= columns]
        chosen = (ranked or plain)[:1]
        if not chosen:
            raise ValueError(
                f"{path} has no lists: no Parquet file with the columns index and prob, or index and scores"
            )
        if len(ranked or plain) > 1:
            several = ", ".join(file.name for file in ranked or plain)
            raise ValueError(f"{path} has several files of lists ({several}): name one of them instead of the folder")
        folder = path if path.is_dir() else path.parent
        density = next((file for file, columns in names.items() if {"pair", "pmi"} <= columns), None)
        return cls(
            open_lists(chosen[0]),
            parquet.read_columns(chosen[0]),
            {} if density is None else parquet.read_columns(density),
            _rule(folder, rule),
            _verdict(folder) if path.is_dir() else None,
        )


def _rule(folder: Path, given: Path | None) -> Rule | None:
    file = given or folder / "rule.json"
    return Rule.load(file) if given is not None or file.is_file() else None


def _verdict(folder: Path) -> tuple[str, bool] | None:
    file = folder / "health.json"
    if not file.is_file():
        return None
    state = read_json(file, "the state of a watch")
    return str(state.get("verdict", "")), bool(state.get("holds", False))


def explored(
    run: RunFiles,
    queries: Described,
    gallery: Described,
    *,
    images: Path | None = None,
    labels: Array | None = None,
    hits: int = HITS_SHOWN,
    title: str = "What the search found",
    encoder: str | None = None,
    only: Array | None = None,
    first: Sequence[Marked] = (),
) -> Explored:
    """Puts a page together. `labels` [n] or [n, k] say what is right; `only` are the rows to show, `first` marks of
    them by their places on the page. `encoder` names the one that made the lists: a rule of another one is refused, and
    if only the rule or only the call names one, a warning is given."""
    if run.rule is not None:
        check_encoder("the rule", run.rule.encoder, encoder)
    lists = run.lists
    kept = np.arange(len(lists.scores)) if only is None else np.asarray(only)
    if lists.hits is None:
        raise ValueError(f"{lists.path} does not name its hits in a column {HITS!r}")
    k = min(hits, lists.hits.shape[1])
    prob, p_right = _probabilities(run)
    shown = lists.hits[kept, :k]
    number, names = _numbered(shown)
    rows = gallery.rows_of(names)
    items, skipped = _items(rows, [str(name) for name in names], gallery, images, number)
    right = None if labels is None else (labels[:, 0] if labels.ndim == 2 else labels)[kept] > 0
    asked = queries.rows_of([lists.query[each] for each in kept.tolist()])
    row = [each if number < 0 else number for number, each in zip(asked, kept.tolist())]  # or the place in the file
    lead = f"{len(kept):,} queries of {lists.path.name}."
    unknown = sum(each < 0 for each in rows)
    if unknown and (gallery.words or gallery.rows is not None):
        lead += f" {unknown:,} items have ids that the gallery's files do not know."
    if skipped:
        lead += f" {skipped:,} items have no thumbnail."
    page = Explored(
        title,
        lead,
        [str(lists.query[each]) for each in kept.tolist()],
        [queries.word(each) for each in row],
        p_right[kept],
        number,
        prob[kept, :k],
        items,
        right,
        _meant(labels, kept, number, k),
        _evidence(run.columns, kept, k),
        {name: run.columns[column][kept].astype(float) for column, name in FACTS.items() if column in run.columns},
        [],
        _certified(run.rule),
        run.verdict,
        uncertified=_not_shown(run.rule),
    )
    return _with_marks(page, run, queries, gallery, rows, np.array(row), first)


def _probabilities(run: RunFiles) -> tuple[Array, Array]:
    """The probabilities [n, k] of the hits, and of "the first hit is right" [n]: those of the rule if there is one."""
    lists, rule = run.lists, run.rule
    if rule is not None:
        if lists.scores.shape[1] != rule.model.k:
            raise ValueError(f"{lists.path} has lists of {lists.scores.shape[1]} hits, the rule is for {rule.model.k}")
        features = np.empty((len(lists.scores), 0))
        if rule.model.features:
            raise ValueError("the rule needs features of its caller, which files of lists do not hold")
        p = rule.model.p_answer(lists.scores, features, rule.score_share)
        shown = rule.model.p_shown(lists.scores, features, rule.score_share)
        return (np.exp(lists.scores) if PROBABILITIES in run.columns else shown), p
    if PROBABILITIES not in run.columns:
        raise ValueError(f"{lists.path} holds scores: give the --rule that turns them into probabilities")
    prob = np.exp(lists.scores)
    return prob, prob[:, 0]


def _numbered(hits: Array) -> tuple[Array, list[Any]]:
    """Numbers [n, k] of the items that are hits, from 0, with -1 for none; and what they are called in the file."""
    numbers: dict[Any, int] = {}
    table = [
        [-1 if hit is None or hit == -1 else numbers.setdefault(hit, len(numbers)) for hit in line]
        for line in hits.tolist()
    ]
    return np.array(table, np.int64).reshape(hits.shape), list(numbers)


def _items(
    rows: list[int], ids: list[str], gallery: Described, images: Path | None, number: Array
) -> tuple[Items, int]:
    """The items with their words and, of those that are found most often, thumbnails; and how many have none."""
    captions = [gallery.word(row) for row in rows]
    if images is None:
        return Items(ids, captions if any(captions) else ()), 0
    pictures, often = Thumbnails(images), np.bincount(number[number >= 0], minlength=len(ids))
    wanted = np.argsort(-often, kind="stable")[:THUMBNAILS].tolist()
    made = [""] * len(ids)
    for item in wanted:
        made[item] = pictures(captions[item] or ids[item])
    return Items(ids, captions if any(captions) else (), made), sum(not each for each in made)


def _meant(labels: Array | None, kept: Array, number: Array, k: int) -> Array | None:
    """The first hit [n] that is right, as a number of an item; -1 where none of those shown is."""
    if labels is None or labels.ndim != 2:
        return None
    relevant = labels[kept, :k] > 0
    return np.where(relevant.any(1), number[np.arange(len(kept)), relevant.argmax(1)], -1)


def _evidence(columns: dict[str, Array], kept: Array, k: int) -> dict[str, Array]:
    told = {name.removeprefix(EVIDENCE): column for name, column in columns.items() if name.startswith(EVIDENCE)}
    if not len(kept):
        return {}
    return {name: np.stack([np.asarray(row) for row in column[kept]])[:, :k] for name, column in told.items()}


def _certified(rule: Rule | None) -> Certified | None:
    if rule is None or _not_shown(rule):
        return None
    own = rule.certificate
    return Certified(own.threshold, rule.max_error, rule.confidence, own.answered, rule.no_match_share)


def _not_shown(rule: Rule | None) -> str:
    """Why a page has no certified point; empty if it has one."""
    if rule is None:
        return "give a rule of `geoflow threshold`"
    return "" if rule.unit == ANSWERS else "the rule is about the hits that are shown, not about answers"


def changed_queries(
    run: RunFiles, health: Health, queries: Described, gallery: Described, verdict: tuple[str, bool] | None = None
) -> Explored:
    """A page of the queries of the last look at a log, those first that look least like the judged ones. `verdict`:
    what is said about the guarantee, and whether it holds, if that is not for `health` alone to say."""
    last = health.last
    order = np.argsort(-health.odds, kind="stable")
    position = np.empty(len(order), np.int64)
    position[order] = np.arange(len(order))
    why = "much more frequent in the log than among the judged queries, and not yet sure: judge these first"
    marks = [Marked("worth judging", why, position[health.to_label - last.start].tolist())]
    own = None if run.rule is None else run.rule.encoder  # another one is what the verdict is about
    page = explored(run, queries, gallery, title="What has changed", encoder=own, only=last.start + order, first=marks)
    facts = {**page.facts, "times as frequent as among judged queries": health.odds[order]}
    return Explored(**{**vars(page), "facts": facts, "verdict": verdict or (health.verdict, health.holds)})


# ---- queries that deserve a look ----


def _with_marks(
    page: Explored,
    run: RunFiles,
    queries: Described,
    gallery: Described,
    items: list[int],
    row: Array,
    first: Sequence[Marked],
) -> Explored:
    marks = [*first, *doubted_labels(page), *strangers(run.density, queries, row)]
    marks += [*badly_matched(run.density, row), *near_duplicates(page, gallery, items)]
    return Explored(**{**vars(page), "marked": marks})


def doubted_labels(page: Explored) -> list[Marked]:
    """Queries whose first hit was judged wrong although it is almost certain: perhaps the judgement is."""
    if page.right is None:
        return []
    rows = np.flatnonzero(~page.right & (page.p_right >= SURE))
    why = f"the first hit was judged wrong, but has a probability of {SURE:.0%} or more: look at the label"
    return [Marked("suspected wrong labels", why, rows[np.argsort(-page.p_right[rows], kind="stable")].tolist())]


def badly_matched(density: dict[str, Array], row: Array) -> list[Marked]:
    """Pairs whose caption and image have the least to do with each other."""
    if "pmi" not in density:
        return []
    pmi = np.full(len(row), np.inf)
    known = (row >= 0) & (row < len(density["pmi"]))
    pmi[known] = density["pmi"][row[known]]
    worst = np.argsort(pmi, kind="stable")[: math.ceil(STRANGE * known.sum())]
    why = f"of the {STRANGE:.0%} of the pairs whose caption and image fit each other least"
    return [Marked("suspected wrong captions", why, worst.tolist())]


def strangers(density: dict[str, Array], queries: Described, row: Array) -> list[Marked]:
    """Queries unlike the training data, by `geoflow density`, or unlike all other queries."""
    if "p_value" in density:
        p = np.ones(len(row))
        known = (row >= 0) & (row < len(density["p_value"]))
        p[known] = density["p_value"][row[known]]
        rows = np.flatnonzero(p <= STRANGE)
        why = f"at most {STRANGE:.0%} of the held-out pairs are as unlike the training data"
        return [Marked("strangers", why, rows[np.argsort(p[rows], kind="stable")].tolist())]
    if queries.rows is None or len(row) <= NEIGHBOURS or (row >= len(queries.rows)).any():
        return []
    distance = _distances(queries.rows[row])
    worst = np.argsort(-distance, kind="stable")[: math.ceil(STRANGE * len(row))]
    why = f"of the {STRANGE:.0%} of the queries that are least like their nearest other queries"
    return [Marked("strangers", why, worst.tolist())]


def _distances(rows: Array) -> Array:
    """1 - the mean cosine [n] of each row with its nearest other ones."""
    out = np.empty(len(rows))
    for start in range(0, len(rows), BLOCK):
        near = np.partition(rows[start : start + BLOCK] @ rows.T, -NEIGHBOURS - 1, axis=1)[:, -NEIGHBOURS - 1 :]
        out[start : start + BLOCK] = 1 - (near.sum(1) - near.max(1)) / NEIGHBOURS
    return out


def near_duplicates(page: Explored, gallery: Described, items: list[int]) -> list[Marked]:
    """Queries of whose first hits two are nearly the same item."""
    number, row = page.hits[:, :5], np.array(items, np.int64)
    if gallery.rows is None or not (row >= 0).any() or int(row.max()) >= len(gallery.rows):
        return []
    vectors = gallery.rows[np.maximum(row, 0)]
    chosen = vectors[np.maximum(number, 0)]
    cosine = np.einsum("nid,njd->nij", chosen, chosen)
    known = (number >= 0) & (row[np.maximum(number, 0)] >= 0)
    cosine[~(known[:, :, None] & known[:, None, :]) | np.eye(number.shape[1], dtype=bool)] = -1.0
    closest = cosine.reshape(len(cosine), -1).max(1)
    rows = np.flatnonzero(closest >= SAME)
    why = f"two of the first five hits have a cosine of {SAME} or more, so that which one is meant is hard to tell"
    return [Marked("near-duplicates", why, rows[np.argsort(-closest[rows], kind="stable")].tolist())]
