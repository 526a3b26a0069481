"""The demo's report: one page that says what was measured, what is good and what is not.

The words of the page are in `runtime/pages/demo.html.j2`; here are the numbers and the verdicts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from geoflow_fast.demo import clip_world, figures, flows, story, study
from geoflow_fast.demo.clip_world import EXACT, LADDER, SOFTMAX
from geoflow_fast.demo.study import (
    ENTROPY,
    IMAGE_DENSITY,
    NEIGHBOURS,
    RERANKER,
    SCORE,
    TRUE_SCORE,
    TRUTH,
    DirectionOutcome,
    Outcome,
)
from geoflow_fast.directions import Direction
from geoflow_fast.evaluation.figures import DIRECTION_TITLES
from geoflow_fast.evaluation.report import EmbeddedPicture, TableRows, write_page
from geoflow_fast.runtime import pages
from geoflow_fast.runtime.pages import charts

REPORT = "report.html"
CLIP_BEST = {"AUROC of wrong answers": "max", "AUROC of missing items": "max", "Recall@1": "max"}
BEST = {"AUROC": "max", "AURC": "min", "AUSAC": "max", "accuracy at 50 %": "max", "Spearman with true entropy": "max"}
BEST |= {"Spearman of bins": "min"}
TIE = 0.01
"""Differences of AUROC below this are called a tie."""


def write_report(outcome: Outcome, out: Path) -> Path:
    """Writes the page into `out`, where its figures are, and returns its path."""
    strengths, weaknesses = verdicts(outcome)
    tables = {str(direction): TableRows.of(part.numbers(), BEST) for direction, part in outcome.by_direction.items()}
    tables |= {
        "unseen": TableRows.of(unseen_rows(outcome), {"unseen group": "max", "unseen, in a known group": "max"}),
        "densities": TableRows.of(density_rows(outcome)),
        **{f"clip_{name}": TableRows.of(part.rows(), CLIP_BEST) for name, part in outcome.clip.items()},
        "expected": TableRows.of(expectation_rows(outcome)),
    }
    values = {
        "outcome": outcome,
        "cards": score_card(outcome),
        "chart": risk_chart(outcome),
        "intervals": {str(direction): intervals(part) for direction, part in outcome.by_direction.items()},
        "explore": story.PAGE,
        "strengths": strengths,
        "weaknesses": weaknesses,
        "tables": tables,
        "checks": outcome.checks(),
        "pictures": {name: EmbeddedPicture.read(out / file) for name, file in figures.FILES.items()},
        "pairs": flows.PAIRS,
        "queries": study.QUERIES,
        "items": study.ITEMS,
        "clip": clip_world,
        "direction_titles": DIRECTION_TITLES,
    }
    return write_page(pages.render("demo.html.j2", **values), out / REPORT)


def summary(outcome: Outcome) -> dict[str, Any]:
    """The numbers of the page in a form that can be written as JSON."""
    parts = {str(direction): part for direction, part in outcome.by_direction.items()}
    return {
        "seed": outcome.seed,
        "steps": outcome.steps,
        "retrieval": {name: part.numbers() for name, part in parts.items()},
        "recall": {
            name: {"plain": part.plain_recall, "re-ranked": part.reranked_recall} for name, part in parts.items()
        },
        "calibration_error": {name: part.calibration_error for name, part in parts.items()},
        "unseen": unseen_rows(outcome),
        "densities": density_rows(outcome),
        "clip_world": {str(direction): part.rows() for direction, part in outcome.clip.items()},
        "story": None if outcome.story is None else outcome.story.summary(),
        "checks": [
            {"name": check.name, "value": check.value, "at_least": check.floor, "holds": check.holds}
            for check in outcome.checks()
        ],
    }


def score_card(outcome: Outcome) -> list[dict[str, str]]:
    """The tiles at the top of the page."""
    held = sum(check.holds for check in outcome.checks())
    tiles = [] if outcome.story is None else outcome.story.tiles
    for search in list(outcome.clip.values())[:1]:
        note = f"max softmax: {search.auroc_of(SOFTMAX):.3f}, the exact posterior: {search.auroc_of(EXACT):.3f}"
        name = "wrong answers told from right ones, AUROC"
        tiles.append({"name": name, "value": f"{search.auroc_of(LADDER):.3f}", "note": note, "tone": "", "id": ""})
    of_all = f"of {len(outcome.checks())}; the table at the end has them"
    return [*tiles, {"name": "expectations that hold", "value": f"{held}", "note": of_all, "tone": "", "id": ""}]


def risk_chart(outcome: Outcome) -> charts.RiskCoverage | None:
    """The error over the share answered, of the search in the world as wide as CLIP that ends the demo."""
    coverage = [k / 50 for k in range(5, 51)]
    search = outcome.clip.get(Direction.T2I)
    if search is None:
        return None
    risks = {name: search.risk(name, coverage) for name in (LADDER, SOFTMAX, EXACT)}
    return charts.risk_coverage(
        {name: (risk.coverage.tolist(), (1 - risk.accuracy).tolist()) for name, risk in risks.items()}
    )


def intervals(part: DirectionOutcome) -> charts.Whiskers:
    """The AUROC of all methods with their intervals; the best one that does not know the truth stands out."""
    rows = part.auroc_rows()
    return charts.whiskers(rows, next(method for method, *_ in rows if method != TRUTH))


def verdicts(outcome: Outcome) -> tuple[list[str], list[str]]:
    """Strengths and limits, one sentence each."""
    good: list[str] = []
    bad: list[str] = []
    for part in outcome.by_direction.values():
        for method in (ENTROPY, RERANKER):
            gain, sentence = _against_training_free(part, method)
            (good if gain >= TIE else bad).append(sentence)
        sentence = (
            f"{DIRECTION_TITLES[part.direction].capitalize()}: re-ranking takes Recall@1 from {part.plain_recall:.1%} "
            f"to {part.reranked_recall:.1%}; its stated probabilities are off by {part.calibration_error:.1%} on "
            "average."
        )
        (good if part.reranked_recall > part.plain_recall else bad).append(sentence)
    far, neighbours = (outcome.unseen.auroc(method, "far") for method in (SCORE, NEIGHBOURS))
    sentence = (
        f"Pairs of a group that training never saw are noticed with AUROC {far:.3f} (kNN distance: {neighbours:.3f})"
    )
    (good if far >= neighbours else bad).append(f"{sentence}{'.' if far >= neighbours else ': the simple score wins.'}")
    near, ideal = (outcome.unseen.auroc(method, "near") for method in (SCORE, TRUE_SCORE))
    bad.append(
        f"Unseen concepts that lie among known ones are noticed less well, with AUROC {near:.3f}. The true density of "
        f"the known world would reach {ideal:.3f}, so little is left to gain."
    )
    for search in outcome.clip.values():
        own, softmax, exact = (search.auroc_of(method) for method in (LADDER, SOFTMAX, EXACT))
        where = f"In a world as wide as CLIP, {DIRECTION_TITLES[search.direction]}"
        (good if own >= softmax + TIE else bad).append(
            f"{where}: {LADDER} tell wrong answers from right ones with AUROC {own:.3f}, max softmax with "
            f"{softmax:.3f} and the exact posterior with {exact:.3f}."
        )
        bad.append(
            f"{where}: queries whose item is missing are noticed with AUROC {search.missing_auroc_of(LADDER):.3f}, and "
            f"{search.missing_auroc_of(EXACT):.3f} is possible."
        )
    missed = [check.name for check in outcome.checks() if not check.holds]
    if missed:
        bad.append(f"Expected, but missed: {'; '.join(missed)}. The table at the end has the numbers.")
    return good, bad


def _against_training_free(part: DirectionOutcome, method: str) -> tuple[float, str]:
    """How much larger the method's AUROC is than that of the best score without training, and a sentence about it."""
    rival, auroc = part.best_training_free
    gain = part.auroc_of(method) - auroc
    verdict = "better" if gain >= TIE else "worse, so use the simple score" if gain <= -TIE else "a tie"
    return gain, (
        f"{DIRECTION_TITLES[part.direction].capitalize()}, {method}: wrong answers are told from right ones with AUROC "
        f"{part.auroc_of(method):.3f}, against {auroc:.3f} for the best training-free score ({rival}): {verdict}."
    )


def unseen_rows(outcome: Outcome) -> list[dict[str, object]]:
    """One row per method that notices what training never saw."""
    return [
        {
            "method": method,
            "unseen group": outcome.unseen.auroc(method, "far"),
            "unseen, in a known group": outcome.unseen.auroc(method, "near"),
        }
        for method in (SCORE, IMAGE_DENSITY, NEIGHBOURS, TRUE_SCORE)
    ]


def density_rows(outcome: Outcome) -> list[dict[str, object]]:
    """One row per log-density."""
    return [
        {"log-density": figures.DENSITY_TITLES[name], "correlation": part.correlation, "bias, nats": part.bias}
        for name, part in outcome.agreement.items()
    ]


def expectation_rows(outcome: Outcome) -> list[dict[str, object]]:
    """One row per expectation."""
    return [
        {
            "": check.name,
            "measured": check.value,
            "at least": check.floor,
            "verdict": "ok" if check.holds else "missed",
        }
        for check in outcome.checks()
    ]
