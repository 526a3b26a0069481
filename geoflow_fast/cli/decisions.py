"""`geoflow trust`, `threshold` and `watch`: what result lists of any search are worth, which queries to answer, and
whether that still holds."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from geoflow_fast.cli.base import Commands, DirectionFlag, JsonFlag, SeedFlag, chosen_flags, print_json
from geoflow_fast.cli.embeddings import ImageIndexFlag, ImagesFlag, NormalizeFlag, TextsFlag

if TYPE_CHECKING:
    from geoflow_fast.decisions.rules import Rule
    from geoflow_fast.decisions.trust import Trust
    from geoflow_fast.jobs.decisions import ResultLists
    from geoflow_fast.jobs.watch import Watched

app = Commands()

ScoresFlag = Annotated[
    Path,
    typer.Option(
        help="Result lists, best hit first: .npy [n, k], the .parquet of `geoflow rerank`, or .parquet or .csv with a "
        "list of scores in each row or a column for each hit."
    ),
]
ColumnFlag = Annotated[str | None, typer.Option(help="Column of the lists of scores. Default: scores, or prob.")]
LabelsFlag = Annotated[
    Path | None,
    typer.Option(
        help="What is right: .npy, .parquet or .csv, [n] true or false, or 1 or 0, for the first hit, or [n, k] grades."
    ),
]
JudgedPairsFlag = Annotated[
    Path | None, typer.Option(help="Instead of --labels: folder of the pairs whose rows were asked and searched.")
]
QrelsFlag = Annotated[
    Path | None,
    typer.Option(help="Instead of --labels: .parquet or .csv of judgements with columns query, item, grade."),
]
ColumnsOut = Annotated[Path | None, typer.Option(help="Parquet file of results, a row for each query.")]
EncoderFlag = Annotated[
    str | None, typer.Option(help="Name of the encoder that made the lists, kept with what is learned and checked.")
]
GallerySizeFlag = Annotated[int | None, typer.Option(help="Number of items searched, kept and checked likewise.")]
OverwriteFlag = Annotated[
    bool, typer.Option("--overwrite/--no-overwrite", help="Replace a file that was made from labels before.")
]
GROUPS = {
    "Result lists": "scores column",
    "What is right": "labels pairs images texts image_index qrels direction normalize",
}
OF_THE_RULE = ("max_error", "confidence", "precision", "no_match_share", "unlabelled", "fitted", "seed")
"""Parameters that say how a rule is made, and nothing about how it is applied."""
FIT_SHARE = 0.5
"""Share of the judged queries that a threshold without --trust fits one on."""
NO_LONGER_HOLDS = 3
"""Exit status of `geoflow watch` if a guarantee no longer holds."""
NOTHING = (
    "NOTHING COULD BE CERTIFIED: the rule answers no query. Judge more queries, accept a larger --max-error, or use a "
    "better score"
)


@dataclass(frozen=True)
class JudgedLists:
    """Result lists, and what is known about them."""

    lists: ResultLists
    known: Any | None
    """What is known about the hits, [n] or [n, k]; None if they are not judged."""
    image: Any
    """[n], the image of each query, all different if there are no pairs."""
    column: str | None


def judged_lists(
    scores: ScoresFlag,
    column: ColumnFlag = None,
    labels: LabelsFlag = None,
    pairs: JudgedPairsFlag = None,
    images: ImagesFlag = None,
    texts: TextsFlag = None,
    image_index: ImageIndexFlag = None,
    qrels: QrelsFlag = None,
    direction: DirectionFlag = "t2i",
    normalize: NormalizeFlag = False,
) -> JudgedLists:
    """Reads result lists and what is known about their hits, from the one source that is given."""
    from geoflow_fast.jobs import decisions

    lists = decisions.open_lists(scores, column)
    known, image = known_hits(lists, labels, (pairs, images, texts, image_index, normalize), qrels, direction)
    return JudgedLists(lists, known, image, column)


@app.command(
    groups=GROUPS,
    reads={"judged": judged_lists},
    epilog="Example: geoflow trust --scores scores.npy --labels labels.npy --trust trust.json --out believed.parquet",
)
def trust(
    context: typer.Context,
    judged: JudgedLists,
    fitted: Annotated[
        Path,
        typer.Option("--trust", help="JSON file of what was learned: written if there are labels, otherwise read."),
    ],
    out: ColumnsOut = None,
    no_match_share: Annotated[
        float, typer.Option(help="Share of queries without a right item, for the column p_no_match.")
    ] = 0.5,
    encoder: EncoderFlag = None,
    seed: SeedFlag = 0,
    overwrite: OverwriteFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Learns from about a hundred judged result lists of any search how far to trust it, or applies that to new lists.

    Columns of OUT: query, p_right (the first hit is right), p_no_match, and the list relevance.
    """
    from geoflow_fast.decisions.bounds import check_open_interval
    from geoflow_fast.decisions.trust import Trust
    from geoflow_fast.jobs import decisions

    check_open_interval(no_match_share, "no_match_share")
    lists, known = judged.lists, judged.known
    if known is None:
        _refuse(context, ("seed",), f"says how to learn, and without labels {fitted} is only applied")
        judge = decisions.open_trust(fitted, lists)
        if out is None:
            raise ValueError("without labels there is nothing to learn: give --labels, --pairs or --qrels, or --out")
    else:
        _refuse_existing(fitted, overwrite=overwrite)
        judge = Trust(seed, log_prob=lists.log_prob).fit(lists.scores, known, encoder=encoder)
        fitted.parent.mkdir(parents=True, exist_ok=True)
        judge.save(fitted)
    written = None if out is None else decisions.write_probabilities(judge, lists, out, no_match_share, encoder)
    if as_json:
        mean = None if written is None else float(written["p_right"].mean())
        print_json({"queries": len(lists.query), "mean_p_right": mean, "evidence": [vars(x) for x in judge.report]})
        return
    for rung in judge.report if known is not None else ():
        typer.echo(
            f"{rung.question}, {rung.name}: {rung.gain:+.3f} +- {rung.stderr:.3f} nats a query, "
            f"{'kept' if rung.kept else 'left out'}"
        )
    if written is not None:
        typer.echo(f"expected share of right first hits: {written['p_right'].mean():.1%} of {len(lists.query)} queries")
    typer.echo(f"Wrote {' and '.join(str(x) for x in (fitted if known is not None else None, out) if x is not None)}")


@app.command(
    groups=GROUPS,
    reads={"judged": judged_lists},
    epilog="Example: geoflow threshold --scores scores.npy --labels labels.npy --rule rule.json --max-error 0.1",
)
def threshold(
    context: typer.Context,
    judged: JudgedLists,
    rule: Annotated[Path, typer.Option(help="JSON file of the rule: written if there are labels, otherwise applied.")],
    out: ColumnsOut = None,
    fitted: Annotated[
        Path | None,
        typer.Option(
            "--trust", help="What `geoflow trust` has learned from other queries. Default: half of these fit it."
        ),
    ] = None,
    max_error: Annotated[float, typer.Option(help="Largest share of wrong answers among those given.")] = 0.1,
    confidence: Annotated[float, typer.Option(help="Probability with which that is guaranteed.")] = 0.95,
    precision: Annotated[
        float | None, typer.Option(help="Instead of --max-error: least share of relevant items among those shown.")
    ] = None,
    no_match_share: Annotated[
        str, typer.Option(help="Share of the traffic without a right item, beyond the judged queries', or estimate.")
    ] = "0",
    unlabelled: Annotated[
        Path | None, typer.Option(help="For --no-match-share estimate: result lists of live queries, as --scores.")
    ] = None,
    encoder: EncoderFlag = None,
    gallery_size: GallerySizeFlag = None,
    seed: SeedFlag = 0,
    overwrite: OverwriteFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Certifies a rule whose answers are wrong in at most a given share, from judged result lists, or applies it.

    If nothing can be certified, the command warns, and its exit status is still 0. With pairs, queries of one image are
    either all fitted or all tested, and one of them is tested. Columns of OUT, which has a row for each of the lists:
    query, answer and, with --precision, the list show.
    """
    from geoflow_fast.decisions.rules import Rule
    from geoflow_fast.jobs import decisions

    lists, known = judged.lists, judged.known
    left_out = 0
    made_with: dict[str, Any] = {"encoder": encoder, "gallery_size": gallery_size}
    if known is None:
        if out is None:
            raise ValueError(
                "without labels a rule is applied: give --out, or --labels, --pairs or --qrels to make one"
            )
        _refuse(context, OF_THE_RULE, f"says how to make a rule, and without labels {rule} is applied as it is")
        made = Rule.load(rule)
    else:
        _refuse_existing(rule, overwrite=overwrite)
        judge, rows, left_out = _judge(judged, fitted, seed, encoder)
        settings: dict[str, Any] = {"precision": precision, "confidence": confidence, **made_with}
        settings["no_match_share"] = _share(no_match_share)
        if unlabelled is not None:
            settings["unlabelled"] = decisions.open_lists(unlabelled, judged.column).scores
        made = judge.certify(lists.scores[rows], known[rows], max_error, **settings)
        made = made.with_rows(rows)
        if lists.hits is not None:
            made = made.with_hits(lists.hits[rows])
        made_with["encoder"] = made.encoder
        rule.parent.mkdir(parents=True, exist_ok=True)
        made.save(rule)
    answered = None if out is None else decisions.write_answers(made, lists, out, **made_with)
    written = [path for path in (rule if known is not None else None, out) if path is not None]
    _print_rule(made, answered, left_out, written, as_json=as_json)


def _refuse(context: typer.Context, names: Collection[str], why: str) -> None:
    """Raises a ValueError if a flag of one of these names is given, which would have no effect."""
    for parameter in context.command.params:
        if parameter.name in names and parameter.name in chosen_flags(context):
            raise ValueError(f"{parameter.opts[0]} {why}: leave it out, or give --labels, --pairs or --qrels")


@app.command(
    groups={
        "What is compared": "column embeddings judged_embeddings encoder gallery_size",
        "Looks": "window every false_alarms overwrite",
        "Page": "page captions",
    },
    epilog="Example: geoflow watch --rule rule.json --queries log.parquet --out health.parquet || mail -s drift me",
)
def watch(
    rule: Annotated[Path, typer.Option(help="JSON file of a rule that `geoflow threshold` has certified.")],
    queries: Annotated[
        Path, typer.Option(help="The log: result lists of live queries in the order in which they came, as --scores.")
    ],
    out: Annotated[
        Path, typer.Option(help="Parquet file with a row for each look; the next call adds to it. Beside it: JSON.")
    ],
    column: ColumnFlag = None,
    embeddings: Annotated[
        Path | None, typer.Option(help=".npy file or folder of shards: the embeddings of the log's queries.")
    ] = None,
    judged_embeddings: Annotated[
        Path | None, typer.Option(help="The same for the judged queries that the rule was made from, all of them.")
    ] = None,
    encoder: Annotated[str | None, typer.Option(help="The encoder that the search uses now.")] = None,
    gallery_size: Annotated[int | None, typer.Option(help="The number of items that it searches now.")] = None,
    window: Annotated[int, typer.Option(help="How many of the latest queries a look compares.")] = 500,
    every: Annotated[int, typer.Option(help="How many new queries there are between looks.")] = 100,
    false_alarms: Annotated[
        float, typer.Option(help="Probability of an alarm, ever, if nothing changes; p-values are corrected for it.")
    ] = 0.05,
    page: Annotated[
        Path | None, typer.Option(help="HTML page of the latest queries, those first that are unlike the judged ones.")
    ] = None,
    captions: Annotated[
        Path | None, typer.Option(help="For --page: words of the log's queries, .txt, .parquet or .parquet:COLUMN.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite/--no-overwrite", help="Begin with the first look.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Tells, without labels, whether the guarantee of a rule still holds for a log of queries that grows.

    Exit status: 0 if it holds, 3 if not, so that cron can tell. OUT has a row for each look; OUT's name with .json has
    the last one, and with .label.parquet the 50 queries that are most worth judging. Run it again when the log has
    grown.
    """
    from geoflow_fast.jobs.watch import WatchSettings, labels_file, watch_file

    settings = WatchSettings(column, embeddings, judged_embeddings, encoder, gallery_size, window, every, false_alarms)

    def show(watched: Watched) -> None:
        if page is not None:
            _write_changed(queries, rule, watched, captions, page)

    watched = watch_file(rule, queries, out, settings, overwrite=overwrite, show=show)
    written = page if watched.health is not None else None
    if as_json:
        print_json({**watched.facts(), "page": None if written is None else str(written)})
    else:
        for look in watched.health.looks if watched.health is not None else ():
            typer.echo(
                f"look {look.number}, queries {look.start:,} to {look.end:,}: {look.expected:.1%} +- {look.stderr:.1%} "
                f"of the first hits are expected to be right, p {look.p_value:.2g} for no change"
            )
        typer.echo(watched.verdict)
        if watched.health is None:
            typer.echo(f"{watched.waiting} queries wait for the next look; there is one after every {every}")
            if page is not None:
                typer.echo(f"Wrote no {page}, which shows the queries of a look: none was due")
        else:
            if not watched.holds:
                typer.echo(f"What to do: judge the queries of {labels_file(out)}, and certify a rule again")
            typer.echo(f"Wrote {out}{'' if written is None else f' and {written}'}")
    if not watched.holds:
        raise typer.Exit(NO_LONGER_HOLDS)


def _write_changed(log: Path, rule: Path, watched: Watched, captions: Path | None, page: Path) -> None:
    """Writes the page of the queries of the last look."""
    from geoflow_fast.explore import sources
    from geoflow_fast.explore.page import write_page

    assert watched.health is not None
    words = sources.described([] if captions is None else [captions], "text")
    run, verdict = sources.RunFiles.open(log, rule), (watched.verdict, watched.holds)
    write_page(sources.changed_queries(run, watched.health, words, sources.Described(), verdict), page)


def known_hits(
    lists: ResultLists, labels: Path | None, pairs: tuple[Any, ...], qrels: Path | None, direction: str
) -> tuple[Any | None, Any]:
    """What is known about the hits, from the one source that is given; None without any. Also returns the image [n] of
    each query, all different if there are no pairs."""
    import numpy as np

    from geoflow_fast.data.pairs import open_pairs
    from geoflow_fast.jobs import decisions

    folder, images, texts, image_index, normalize = pairs
    by_pairs = any(path is not None for path in (folder, images, texts))
    if sum((labels is not None, by_pairs, qrels is not None)) > 1:
        raise ValueError("give one of --labels, --pairs (or --images and --texts) and --qrels")
    each = np.arange(len(lists.scores))
    if labels is not None:
        return decisions.open_labels(labels, lists), each
    if qrels is not None:
        return decisions.labels_from_qrels(lists, qrels), each
    if not by_pairs:
        return None, each
    opened = open_pairs(folder, images, texts, image_index, normalize=normalize)
    return decisions.labels_from_pairs(lists, opened, direction)


def _judge(judged: JudgedLists, fitted: Path | None, seed: int, encoder: str | None) -> tuple[Trust, Any, int]:
    """The Trust to certify with, the rows of judged lists to do it on, and how many are used for neither."""
    from geoflow_fast.decisions.trust import Trust
    from geoflow_fast.jobs.decisions import open_trust, tested_queries

    known, scores = judged.known, judged.lists.scores
    assert known is not None
    seen, tested = tested_queries(judged.image, FIT_SHARE if fitted is None else 0.0, seed)
    if fitted is None:
        judge = Trust(seed, log_prob=judged.lists.log_prob).fit(scores[seen], known[seen], encoder=encoder)
    else:
        judge = open_trust(fitted, judged.lists)
    return judge, tested, len(known) - len(seen) - len(tested)


def _share(words: str) -> float | str:
    try:
        return float(words)
    except ValueError:
        return words


def _refuse_existing(path: Path, *, overwrite: bool) -> None:
    if path.exists() and not overwrite:
        raise FileExistsError(f"{path} exists; move it, or ask to overwrite")


def _print_rule(made: Rule, answered: float | None, left_out: int, written: list[Path], *, as_json: bool) -> None:
    """Prints a rule in words, how many queries were left out of its test, and what it answers; loudly, if it answers
    nothing."""
    if as_json:
        facts = {"certified": made.certified, "max_error": made.max_error, "confidence": made.confidence}
        certificate = made.certificate.as_json()
        tested = {"no_match_share": made.no_match_share, "left_out": left_out, "certificate": certificate}
        print_json({**facts, **tested, "answered": answered})
    else:
        typer.echo(repr(made))
        if left_out:
            typer.echo(
                f"left out {left_out} queries: of each tested image one query is used, so that they are independent"
            )
        if answered is not None:
            by_which = ", by which it was made" if len(written) > 1 else ""
            typer.echo(f"answers {answered:.1%} of these queries{by_which}")
        typer.echo(f"Wrote {' and '.join(str(path) for path in written)}")
    if not made.certified:
        typer.echo(f"geoflow: warning: {NOTHING}", err=True)
