"""Rules with a guaranteed error: which queries to answer, and which hits to show.

`Trust.certify` makes them, by the tests of `certify.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from geoflow_fast.decisions import inputs, lists
from geoflow_fast.decisions.bounds import Bools
from geoflow_fast.decisions.encoders import check_encoder
from geoflow_fast.decisions.model import Model
from geoflow_fast.decisions.tables import Table
from geoflow_fast.runtime import checks
from geoflow_fast.runtime.files import contents_of, read_json, write_json

if TYPE_CHECKING:
    from geoflow_fast.decisions.reference import Reference

FORMAT = 1
ANSWERS, ITEMS = "answers", "items"


@dataclass(frozen=True)
class Certificate:
    """What was certified."""

    threshold: float
    """Answer, or show, where the probability is at least this; infinite if nothing could be certified."""
    answered: float
    """Share of the tested traffic that is answered, or that is shown something."""
    error: float
    """Share of wrong answers in it, or the mean share of wrong hits; NaN if there are none."""
    error_bound: float
    """Upper bound of the error at this threshold taken alone. What is guaranteed is the rule's `max_error`."""
    tested: int
    """Number of queries that were tested."""

    def as_json(self) -> dict[str, float | int | None]:
        """The certificate as plain values, with None for those that JSON has no number for."""
        return {name: None if not math.isfinite(value) else value for name, value in vars(self).items()}


@dataclass(frozen=True)
class Rule:
    """When to answer, or what to show, with a guaranteed error. `Trust.certify` makes it."""

    model: Model
    unit: str
    """"answers", if the error is about first hits, or "items", if it is about the hits shown."""
    max_error: float
    confidence: float
    no_match_share: float
    """The largest share of queries without a right item for which the guarantee holds."""
    score_share: float
    """The share that the probabilities are computed for."""
    certificate: Certificate
    encoder: str | None = None
    gallery_size: int | None = None
    presorted: bool = True
    reference: Reference = field(compare=False, kw_only=True)
    """The queries that it was certified on."""

    @property
    def certified(self) -> bool:
        """True if a threshold could be certified."""
        return math.isfinite(self.certificate.threshold)

    @property
    def threshold(self) -> float:
        """Answer, or show, where the probability is at least this; infinite if nothing could be certified."""
        return self.certificate.threshold

    def __call__(
        self,
        scores: Table,
        encoder: str | None = None,
        gallery_size: int | None = None,
        *,
        features: Table | None = None,
    ) -> Any:
        """Which queries to answer: bool [n], as the kind of table that `scores` [n, k] are.

        A ValueError is raised if lists have another length than those the rule was made from, and if `encoder` or
        `gallery_size` are given and differ from what the rule was made with. If only the rule or only the call names an
        encoder, a warning is given.
        """
        results, shown = self._shown(scores, encoder, gallery_size, features)
        return results.table.back(np.asarray(shown.any(1)), ["answer"])

    def show(
        self,
        scores: Table,
        encoder: str | None = None,
        gallery_size: int | None = None,
        *,
        features: Table | None = None,
    ) -> Any:
        """Which hits to show: bool [n, k], possibly none. Of a rule about answers it is the first hit alone."""
        results, shown = self._shown(scores, encoder, gallery_size, features)
        return results.table.back(results.restored(shown), results.table.columns)

    def _shown(
        self, scores: Table, encoder: str | None, gallery_size: int | None, features: Table | None
    ) -> tuple[inputs.Lists, Bools]:
        if self.gallery_size is not None and gallery_size is not None and self.gallery_size != gallery_size:
            raise ValueError(
                f"this rule was made with gallery_size {self.gallery_size!r}, not {gallery_size!r}: certify one for it"
            )
        check_encoder("this rule", self.encoder, encoder, stacklevel=4)
        results = inputs.result_lists(scores, "scores", k=self.model.k, presorted=self.presorted)
        numbers = inputs.features_of(features, len(results.scores), self.model.features)
        if self.unit == ITEMS:
            return results, self.model.p_shown(results.scores, numbers, self.score_share) >= self.threshold
        shown = np.zeros(results.scores.shape, bool)
        shown[:, 0] = self.model.p_answer(results.scores, numbers, self.score_share) >= self.threshold
        return results, shown

    def with_hits(self, hits: Table, rows: Table | None = None) -> Rule:
        """The rule with the ids of the hits [n, k] of the queries that it was certified on, so that `gf.watch` can
        compare the items that come up; it keeps as many of each list as that reads. `rows` [n] are those of
        `with_rows`."""
        if rows is not None:
            return self.with_rows(rows).with_hits(hits)
        reference = self.reference
        named = inputs.hits_of(hits, len(reference), self.model.k)
        return replace(self, reference=replace(reference, hits=named[:, : lists.KEPT_HITS]))

    def with_rows(self, rows: Table) -> Rule:
        """The rule with the numbers [n] of the queries that it was certified on in a larger file of judged ones, to
        which the `judged_embeddings` of `gf.watch` belong."""
        rows = inputs.rows_of(rows, len(self.reference))
        return replace(self, reference=replace(self.reference, row=rows))

    def save(self, path: str | Path) -> None:
        """Writes the rule as a JSON file, whole or not at all."""
        write_json(
            checks.path(path, "path"),
            {
                "format": FORMAT,
                "what": "geoflow_fast rule",
                "unit": self.unit,
                "max_error": self.max_error,
                "confidence": self.confidence,
                "no_match_share": self.no_match_share,
                "score_share": self.score_share,
                "encoder": self.encoder,
                "gallery_size": self.gallery_size,
                "presorted": self.presorted,
                "certificate": self.certificate.as_json(),
                "model": self.model.as_json(),
                "reference": self.reference.as_json(),
            },
            indent=None,
        )

    @classmethod
    def load(cls, path: str | Path) -> Rule:
        """Reads a rule that `save` has written."""
        from geoflow_fast.decisions.reference import Reference

        file = checks.path(path, "path")
        values = read_json(file, "a rule")
        with contents_of(file, "damaged or not a rule"):
            if values["format"] != FORMAT or values["what"] != "geoflow_fast rule":
                raise ValueError(
                    f"format {values['format']} of {values['what']!r}; this version reads rules of {FORMAT}"
                )
            checks.one_of(values["unit"], "unit", (ANSWERS, ITEMS))
            model = Model.from_json(values["model"])
            return cls(
                model,
                values["unit"],
                **{name: checks.number(values[name], name, 0, 1) for name in _SHARES},
                certificate=_restored(values["certificate"]),
                encoder=_text(values["encoder"]),
                gallery_size=_count(values["gallery_size"]),
                presorted=checks.boolean(values["presorted"], "presorted"),
                reference=Reference.from_json(values["reference"], model),
            )

    def __repr__(self) -> str:
        """The rule in plain words."""
        what = (
            "wrong among the answers" if self.unit == ANSWERS else "wrong among the hits shown to a query, on average"
        )
        return (
            f"Rule for lists of {self.model.k} hits: at most {self.max_error:.0%} {what},\n"
            f"with {self.confidence:.0%} confidence\n"
            f"  {_in_words(self.certificate, self.unit)}\n"
            f"  assumes: queries like the {self.certificate.tested:,} it was tested on, at most "
            f"{self.no_match_share:.0%} more without a right item, the same gallery and encoder"
        )


_SHARES = ("max_error", "confidence", "no_match_share", "score_share")


def _in_words(each: Certificate, unit: str) -> str:
    if not math.isfinite(each.threshold):
        return f"nothing could be certified with {each.tested:,} queries: no query is answered"
    verb = "answers" if unit == ANSWERS else "shows"
    return (
        f"{verb} where the probability is at least {each.threshold:.3f}: {each.answered:.1%} of the queries, "
        f"{each.error:.1%} wrong in the test (bound {each.error_bound:.1%})"
    )


def _restored(values: Mapping[str, Any]) -> Certificate:
    missing = {"threshold": math.inf, "error": math.nan}
    numbers = {
        name: missing[name] if values[name] is None and name in missing else checks.number(values[name], name)
        for name in ("threshold", "answered", "error", "error_bound")
    }
    return Certificate(**numbers, tested=checks.integer(values["tested"], "tested"))


def _text(value: Any) -> str | None:
    return None if value is None else checks.words(value, "encoder")


def _count(value: Any) -> int | None:
    return None if value is None else checks.integer(value, "gallery_size", 1)
