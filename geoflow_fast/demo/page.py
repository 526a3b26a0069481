"""The demo's report: one page that says what came out, what is good and what is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from geoflow_fast.demo import figures
from geoflow_fast.demo.flows import PAIRS
from geoflow_fast.demo.study import (
    ENTROPY,
    IMAGE_DENSITY,
    ITEMS,
    NEIGHBOURS,
    QUERIES,
    RERANKER,
    SCORE,
    TRUE_SCORE,
    TRUTH,
    Outcome,
    Side,
)
from geoflow_fast.evaluation.report import Report

REPORT = "report.html"
BEST = {"AUROC": "max", "AURC": "min", "AUSAC": "max", "accuracy at 50 %": "max", "Spearman with true entropy": "max"}


def write_report(outcome: Outcome, out: Path) -> Path:
    """Writes the page into `out`, beside its figures."""
    page = Report(
        "How sure is this retrieval?",
        "A flow was trained on pairs of embeddings from a made-up world in which every probability is known. Here is "
        "what it says about its own answers, held against the truth and against what needs no training.",
    )
    _in_short(page, outcome)
    _the_world(page, out)
    for side in outcome.sides.values():
        _one_direction(page, side)
    _curves(page, out)
    _strangers(page, outcome, out)
    _densities(page, outcome, out)
    _checks(page, outcome)
    return page.write(out / REPORT)


def summary(outcome: Outcome) -> dict[str, Any]:
    """The numbers of the page, for machines."""
    return {
        "seed": outcome.seed,
        "steps": outcome.steps,
        "retrieval": {name: side.numbers() for name, side in outcome.sides.items()},
        "recall": {
            name: {"plain": float(side.correct.double().mean()), "re-ranked": side.recall_after}
            for name, side in outcome.sides.items()
        },
        "calibration_error": {name: side.calibration_error for name, side in outcome.sides.items()},
        "unseen": _strange_rows(outcome),
        "densities": _density_rows(outcome),
        "checks": [
            {"name": check.name, "value": check.value, "at_least": check.floor, "holds": check.holds}
            for check in outcome.checks()
        ],
    }


def _in_short(page: Report, outcome: Outcome) -> None:
    good, bad = verdicts(outcome)
    page.section("In short")
    page.text(*good)
    page.text(*(bad or ["Nothing that was expected failed to appear."]))


def verdicts(outcome: Outcome) -> tuple[list[str], list[str]]:
    """What is good and what is not, a sentence each."""
    good: list[str] = []
    bad: list[str] = []
    for side in outcome.sides.values():
        way, (name, reference) = figures.WAYS[side.direction], side.best_reference
        for method in (ENTROPY, RERANKER):
            gain = side.auroc_of(method) - reference
            words = (
                f"{way.capitalize()}, {method}: wrong answers are told from right ones with AUROC "
                f"{side.auroc_of(method):.3f}, against {reference:.3f} for the best training-free score ({name})"
            )
            verdict = "better" if gain >= 0.01 else "worse: use the simple one" if gain <= -0.01 else "a tie"
            (bad if gain < 0.01 else good).append(f"{words}: {verdict}.")
        plain = float(side.correct.double().mean())
        change = f"{way.capitalize()}: re-ranking takes Recall@1 from {plain:.1%} to {side.recall_after:.1%}"
        (good if side.recall_after > plain else bad).append(
            f"{change}; its stated probabilities are off by {side.calibration_error:.1%} on average."
        )
    far, neighbours = (outcome.strangers.auroc(name, "far") for name in (SCORE, NEIGHBOURS))
    words = (
        f"Pairs of a group that training never saw are noticed with AUROC {far:.3f} (kNN distance: {neighbours:.3f})"
    )
    (good if far >= neighbours else bad).append(f"{words}{'.' if far >= neighbours else ': the simple score wins.'}")
    near = outcome.strangers.auroc(SCORE, "near")
    bad.append(
        f"Unseen concepts that lie among known ones are noticed less well, AUROC {near:.3f}; by the true density of "
        f"the known world it would be {outcome.strangers.auroc(TRUE_SCORE, 'near'):.3f}, so little is left to find."
    )
    missed = [check.name for check in outcome.checks() if not check.holds]
    if missed:
        bad.append(f"Expected, but missed: {'; '.join(missed)}. The table at the end has the numbers.")
    return good, bad


def _the_world(page: Report, out: Path) -> None:
    page.section(
        "What was done",
        f"The world has 32 concepts in 8 groups. An image is a point near its concept on a sphere; its caption is a "
        f"point near the rotated image, close by for specific concepts and far off for vague ones, so some captions "
        f"fit many images. One whole group and three single concepts were kept from training. The flow saw {PAIRS:,} "
        "pairs. It learns to carry noise to data on both spheres at once; probabilities follow from how it does so.",
        f"Then {QUERIES:,} images were searched among {ITEMS:,} texts by plain cosine, and {QUERIES:,} texts among as "
        "many images, all of new pairs. Kernel width, guidance, temperatures and calibration come from other, held-out "
        "pairs.",
    )
    page.figure(
        out / figures.SPHERES,
        "A flow of the same kind on two ordinary spheres, learned in seconds: five clusters of images (above), each "
        "paired with one of five clusters of texts (below). Points start as noise and end as pairs; a colour is the "
        "cluster in which the image of the pair ends.",
        alt="Eight spheres: coloured points spread all over at time 0 gather into five clusters at time 1, image and "
        "text of a pair in matching clusters.",
    )


def _one_direction(page: Report, side: Side) -> None:
    plain = float(side.correct.double().mean())
    page.section(
        f"{figures.WAYS[side.direction].capitalize()}: how well uncertainty finds wrong answers",
        f"Plain search finds the right item for {plain:.1%} of the queries. Each method says how unsure it is of that "
        f"answer; the best possible score, from the true posterior, is in the last row. The flow's kernel has "
        f"kappa {side.bandwidth.kappa:.1f}, guidance {side.bandwidth.guidance:.1f}.",
    )
    rows = side.numbers()
    truth = [row for row in rows if row["method"] == TRUTH]
    page.table(
        [row for row in rows if row["method"] != TRUTH] + truth,
        "Higher is better, except AURC. AUROC: chance that a wrong answer is less certain than a right one. AURC: mean "
        "error over all coverages. AUSAC: mean accuracy over coverages from 10 % to 100 %. Marked: the best of each "
        "column, the truth included.",
        best=BEST,
    )


def _curves(page: Report, out: Path) -> None:
    page.section("Calibration and abstention")
    page.figure(
        out / figures.CALIBRATION,
        "Above: the queries in ten equal parts by uncertainty; recall should fall from left to right. Below: the "
        "re-ranker's stated probability that the answer of plain search is right, against how often it was.",
        alt="Four panels. Recall falls from near one for the most certain tenth to near zero for the least certain; "
        "stated probabilities lie near the diagonal.",
    )
    page.figure(
        out / figures.SELECTIVE,
        "Accuracy when only the most certain queries are answered. Grey: scores without training; pale: the truth.",
        alt="Accuracy against coverage for all methods in both directions; all curves meet at a coverage of 100 %.",
    )
    page.figure(
        out / figures.CERTAIN,
        "The three captions of which the re-ranker is most certain (left) and least certain (right), each with its "
        "eight likeliest images. Solid: the flow's probability; hatched: the true one. Colour and letter: the group of "
        "the image, with the number of its concept; the star marks the image that the caption was made for.",
        alt="Bars of probabilities. Most certain: one bar near one, true and learned alike. Least certain: small bars.",
    )


def _strangers(page: Report, outcome: Outcome, out: Path) -> None:
    page.section(
        "What training never saw",
        "The epistemic score is -log p(image) - log p(text): high where training saw little. It asks another question "
        "than the retrieval scores, which are about a query and a gallery.",
    )
    page.table(
        _strange_rows(outcome),
        "AUROC of telling unseen concepts from known ones. The truth is the density of the known world itself.",
        best={"unseen group": "max", "unseen, in a known group": "max"},
    )
    page.figure(
        out / figures.STRANGE,
        "Known concepts, unseen ones from known groups, and a group that was kept from training.",
        alt="Two histograms: pairs of the unseen group lie to the right of known ones, near ones in between.",
    )


def _strange_rows(outcome: Outcome) -> list[dict[str, object]]:
    found = outcome.strangers
    return [
        {
            "method": name,
            "unseen group": found.auroc(name, "far"),
            "unseen, in a known group": found.auroc(name, "near"),
        }
        for name in (SCORE, IMAGE_DENSITY, NEIGHBOURS, TRUE_SCORE)
    ]


def _densities(page: Report, outcome: Outcome, out: Path) -> None:
    page.section(
        "Learned and true log-densities",
        "Of new pairs. Marginals and the mutual information are differences of the first three, so their errors "
        "are those of two or three solves together.",
    )
    page.table(_density_rows(outcome), "Correlation with the truth, and mean error in nats.")
    page.figure(
        out / figures.DENSITIES,
        "Each point is a pair; on the orange line learned and true log-density agree.",
        alt="Six scatter plots of learned against true log-densities; points lie along the diagonal.",
    )


def _density_rows(outcome: Outcome) -> list[dict[str, object]]:
    return [
        {"log-density": figures.DENSITY_TITLES[name], "correlation": found.correlation, "bias, nats": found.bias}
        for name, found in outcome.agreement.items()
    ]


def _checks(page: Report, outcome: Outcome) -> None:
    page.section(
        "What was expected",
        f"Seed {outcome.seed}, {outcome.steps:,} steps of training. The expectations are for a run of full length.",
    )
    rows: list[dict[str, object]] = [
        {"": check.name, "found": check.value, "at least": check.floor, "verdict": "ok" if check.holds else "missed"}
        for check in outcome.checks()
    ]
    page.table(rows, "Each number and the least that was expected of it.")
