"""The page of the study: what was done, what to use, the numbers, the figures."""

from __future__ import annotations

from pathlib import Path

import figures as own_figures
import numpy as np
from study import Findings

from geoflow_fast.evaluation import figures
from geoflow_fast.evaluation.figures import DIRECTION_TITLES
from geoflow_fast.evaluation.report import Report
from geoflow_fast.evaluation.results import COLUMNS, Comparison
from geoflow_fast.evaluation.verdict import verdict

PAGE = "index.html"
EXPLAINED = (
    "NLL is the mean of -log of the probability that a method gave to the right items among the whole gallery, for all "
    "methods alike; items outside a shortlist share equally what it leaves to them. AUROC is the probability that a "
    "query which plain search answers wrongly is less certain than one that it answers rightly. AURC is the share of "
    "wrong answers among the most certain, averaged over how many are kept. Recall@1 is that of a method's own "
    "ranking, or of plain search if it has none. ECE is the expected calibration error of the stated probability that "
    "plain search is right.",
    "Spearman and R^2 are the paper's: they compare Recall@1 with the number of the bin, in ten bins of the "
    "uncertainty (-1 and 1 are ideal). They are noisy and do not reward sharpness, so decide by the others.",
)
SHOWN = ("nll", "auroc", "aurc", "recall", "ece", "spearman", "r2")
"""The columns of the page, which fit its width; results.json has all."""
STATED = ("ladder", "rerank", "max_softmax", "hub_softmax")
"""Methods whose stated probabilities are drawn; with all of them the curves would hide each other."""


def write_page(findings: Findings, out: Path, title: str) -> Path:
    """Draws the figures into `out` and writes the page with them."""
    comparison = findings.comparison
    page = Report(title, "Which answers of a search can be trusted, and what does each rung of evidence bring?")
    page.section("What was done", *_done(findings))
    page.section(
        "Which to use",
        *(f"{DIRECTION_TITLES[d].capitalize()}: {verdict(comparison.of(d))}" for d in comparison.directions),
    )
    page.section("The numbers", *EXPLAINED)
    for direction in comparison.directions:
        one = comparison.of(direction)[0]
        sizes = f"{one.queries:,} queries, {one.items:,} items each"
        caption = (
            f"{DIRECTION_TITLES[direction].capitalize()}: {sizes}, plain search has Recall@1 {one.plain_recall:.3f}."
        )
        rows = number_rows(comparison, direction)
        best = {heading: which for heading, which in comparison.best(direction).items() if heading in rows[0]}
        page.table(rows, caption, best)
    page.section(
        "Ahead or behind",
        "By how much the pipeline (cosine, hubs and head) is better than each other method (negative: worse), with "
        "paired 95 % intervals over images, and p-values after Holm's correction for the whole table. Its lead over "
        "hubs only is what the head adds; where it is behind the re-ranker, the flow adds to it.",
    )
    page.table(lead_rows(findings), "Leads of the pipeline.")
    data = {"": comparison}
    stated = {"": Comparison([result for result in comparison.results if result.method in STATED], comparison.facts)}
    page.section("Can the probabilities be believed?")
    words = "Stated probability that plain search is right against the share that was: on the diagonal they agree."
    page.figure(figures.draw_reliability(stated, out / "reliability.png", stacked=True), words)
    words = "Recall@1 of plain search in ten bins of the uncertainty; a good one falls from left to right."
    page.figure(figures.draw_calibration(data, out / "calibration.png", stacked=True), words)
    page.section("Risk against coverage")
    words = "Share of wrong answers if only the most certain queries are answered; lower is better."
    page.figure(figures.draw_risk(data, out / "risk.png", stacked=True), words)
    page.section("What each rung brought")
    words = (
        "Nats a query that a rung gained on the held-out queries of the calibration: bars are means, dots folds "
        "(hollow where the rung was not kept), whiskers one standard error of a fold."
    )
    page.figure(own_figures.draw_rungs(findings, out / "rungs.png"), words)
    if (drawn := own_figures.draw_captions(findings, out / "captions.png")) is not None:
        page.section("Most and least certain captions")
        framed = " Of the most probable pictures the right one is framed." if findings.photos.pictures else ""
        page.figure(drawn, f"With the number of images among which they seem to leave the choice open.{framed}")
    return page.write(out / PAGE)


def _done(findings: Findings) -> list[str]:
    pairs, facts = findings.photos.pairs, findings.comparison.facts
    models = "a head and a flow" if facts["flow"] else "a head"
    folds = f"{facts['folds']} folds" if facts["folds"] > 1 else "one split"
    sizes = f"{len(pairs):,} captions of {len(np.unique(pairs.group)):,} images"
    learned, second, third = "from one part", "a second", "third"
    if facts["learned_elsewhere"]:
        learned, second, third = f"from {facts['learned_elsewhere']:,} pairs of other images", "one part", "other"
    done = (
        f"{sizes}, divided by image into {folds}. In each, {models} learned {learned}; the re-ranker and every "
        f"reference were tuned on {second}, and the {third} judged them, as queries and as the items that are "
        "searched. All folds are judged together."
    )
    return [done, *(["--quick trained everything for a moment only: the numbers mean nothing."] * facts["quick"])]


def number_rows(comparison: Comparison, direction: str) -> list[dict[str, object]]:
    """One row per method."""
    headings = ["method", *(COLUMNS[name][0] for name in SHOWN)]
    return [{heading: row[heading] for heading in headings} for row in comparison.table(direction)]


def lead_rows(findings: Findings) -> list[dict[str, object]]:
    """One row per reference and measure: the lead of the pipeline in each direction."""
    titles = {result.method: result.title for result in findings.comparison.results}
    rows: dict[tuple[str, str], dict[str, object]] = {}
    for lead in findings.leads:
        row = rows.setdefault((lead.over, lead.measure), {"over": titles[lead.over], "in": COLUMNS[lead.measure][0]})
        where = DIRECTION_TITLES[lead.direction]
        row[where] = f"{lead.value:+.3f} ({lead.low:+.3f} to {lead.high:+.3f})"
        row[f"p, {where}"] = "< 0.001" if lead.p_holm < 0.001 else lead.p_holm
    return list(rows.values())
