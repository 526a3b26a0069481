"""How far to trust the result lists of any search: an estimator in the manner of scikit-learn, of numpy and scipy."""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from geoflow_fast.decisions import inputs, lists
from geoflow_fast.decisions.bounds import check_open_interval
from geoflow_fast.decisions.certify import Certifier
from geoflow_fast.decisions.encoders import check_encoder
from geoflow_fast.decisions.inputs import FEWEST, Labels, Lists
from geoflow_fast.decisions.logistic import Bools, FeatureGain, Floats
from geoflow_fast.decisions.model import Judged, Model, Pilot, fit_model, no_match_probability
from geoflow_fast.decisions.reference import reference_of
from geoflow_fast.decisions.rules import ANSWERS, ITEMS, Rule
from geoflow_fast.decisions.tables import Table
from geoflow_fast.runtime import checks
from geoflow_fast.runtime.files import contents_of, read_json, write_json

ESTIMATE = "estimate"
FORMAT = 1


class Trust:
    """Learns from judged result lists how probable it is that the first hit is right, that each hit is relevant, and
    that no right item is there at all.

    The scores may come from any search: similarities, best first, all lists of the same length k. About a hundred
    judged queries are enough. What is learned is first Platt scaling of a softmax whose temperature is tuned; the
    level and the shape of the list, and features of your own, are added where cross-fitting shows a gain, and `report`
    tells which. Hits of equal score count as copies of one item, so that storing items several times changes nothing.

    `seed` decides which queries are held out of which fit. Lists that are not sorted are an error, because they are
    mostly distances or rows in the wrong order; with `presorted=False` they are sorted. `log_prob=True` says that
    scores are logarithms of probabilities over the gallery, as of `gf.BayesReranker`: an item that is missing then
    leaves its probability to the others, which similarities do not.
    """

    classes_: Any
    encoder_: str | None = None
    """The encoder whose lists were fitted, if `fit` was told."""

    def __init__(self, seed: int = 0, *, presorted: bool = True, log_prob: bool = False) -> None:
        self.seed = seed
        self.presorted = presorted
        self.log_prob = log_prob

    def fit(self, scores: Table, labels: Table, features: Table | None = None, *, encoder: str | None = None) -> Trust:
        """Learns from judged queries.

        `scores` [n, k]: similarities, best first, as an array, a frame of pandas or polars, a tensor, a pyarrow table
        or the path of a Parquet file, with a column for each hit or one column of lists. `labels`: [n], True or 1 where
        the first hit is right and False or 0 where it is wrong, or [n, k], grades of the hits, of which those above 0
        are relevant; words and other numbers are refused. `features` [n, f]: what
        else is known about the query and does not change when its item is missing, such as a model's surprise about
        it; they are then needed in all other calls, too. `encoder` names the encoder that made the lists: other calls
        then refuse lists of another one, and warn if they are not told which it is.
        """
        seed = checks.integer(self.seed, "seed")
        results = inputs.result_lists(scores, "scores", presorted=self.presorted)
        n, k = results.scores.shape
        if n < FEWEST:
            raise ValueError(f"scores has {n} queries; at least {FEWEST} judged ones are needed, better about 100")
        known = inputs.labels_of(labels, results)
        numbers = inputs.features_of(features, n, None)
        if known.first.all() or not known.first.any():
            raise ValueError(
                f"labels are of one class: the first hit is {'right' if known.first.all() else 'wrong'} for all {n} "
                "queries. Queries of both kinds are needed"
            )
        self._check_kind(results.scores)
        log_prob = bool(self.log_prob)
        twins = lists.taken_out(results.scores, _known_right(known, k), log_prob=log_prob)
        judged = Judged(results.scores, twins, known.first, known.relevant, numbers)
        model, self._pilot, self._report = fit_model(judged, seed)
        self._model = dataclasses.replace(model, log_prob=log_prob)
        self._seen = frozenset(inputs.row_digests(results.scores))
        self.classes_ = np.array([False, True])
        self.encoder_ = None if encoder is None else checks.words(encoder, "encoder")
        return self

    @property
    def k(self) -> int:
        """The length of the lists that were fitted."""
        return self._fitted().k

    @property
    def report(self) -> tuple[FeatureGain, ...]:
        """What each group of features gained on held-out queries, for both questions, and which were kept."""
        self._fitted()
        return self._report

    def predict_proba(self, scores: Table, features: Table | None = None, *, encoder: str | None = None) -> Any:
        """The probabilities [n, 2] that the first hit is wrong, and that it is right."""
        from scipy import special

        results, model, numbers = self._read(scores, features, encoder)
        logit = model.right_logit(results.scores, numbers)
        values = np.column_stack((special.expit(-logit), special.expit(logit)))
        return results.table.back(values, [str(name) for name in self.classes_])

    def predict(self, scores: Table, features: Table | None = None, *, encoder: str | None = None) -> Any:
        """Whether the first hit is right rather than wrong, bool [n]."""
        results, model, numbers = self._read(scores, features, encoder)
        right = model.right_logit(results.scores, numbers) >= 0
        return results.table.back(self.classes_[right.astype(int)], ["label"])

    def relevance(self, scores: Table, features: Table | None = None, *, encoder: str | None = None) -> Any:
        """The probability [n, k] that each hit is relevant. A row need not sum to one: several hits may be relevant, or
        none. Copies of an item have the same probability. Without labels of all hits, one right item a query is
        assumed, near the top of the list; the probabilities of hits after the first are then rather too large."""
        results, model, numbers = self._read(scores, features, encoder)
        values = model.relevance(results.scores, numbers)
        return results.table.back(results.restored(values), results.table.columns)

    def p_no_match(
        self,
        scores: Table,
        no_match_share: float = 0.5,
        features: Table | None = None,
        *,
        encoder: str | None = None,
    ) -> Any:
        """The probability [n] that no right item is there, if that is so for `no_match_share` of all queries."""
        check_open_interval(no_match_share, "no_match_share")
        results, model, numbers = self._read(scores, features, encoder)
        values = no_match_probability(model.no_match_logit(results.scores, numbers), no_match_share)
        return results.table.back(values, ["p_no_match"])

    def certify(
        self,
        scores: Table,
        labels: Table,
        max_error: float = 0.10,
        confidence: float = 0.95,
        no_match_share: float | str = 0.0,
        *,
        precision: float | None = None,
        unlabelled: Table | None = None,
        features: Table | None = None,
        unlabelled_features: Table | None = None,
        encoder: str | None = None,
        gallery_size: int | None = None,
    ) -> Rule:
        """A rule whose answers are wrong in at most a share `max_error`, with the stated `confidence`.

        `scores` and `labels` are those of judged queries that `fit` has not seen, independent of each other; it is an
        error if most of them were fitted. The guarantee: with probability `confidence` over their draw, the share of
        wrong answers among those that the rule gives to new queries of the same kind is at most `max_error`.
        `no_match_share` is the share of the traffic whose right item is missing, beyond what the judged queries hold of
        this; for these every answer is wrong. It is stood for by the judged queries with their right items taken out.
        "estimate" bounds the share from `unlabelled` lists [m, k] of live queries, which must be a mixture of queries
        like the judged ones and of ones without a match; that bound is exact only for many queries. If labels [n] do
        not say where else the right item is, the place is assumed that makes the rule most willing to answer.

        `precision=0.9` in place of `max_error` makes a rule for `rule.show`: hits are shown such that, on average over
        the queries that are shown something, at least this share of the hits is relevant; labels must be [n, k].
        `encoder`, by default that of the fit, and `gallery_size` are kept with the rule, which then refuses other ones.
        The rule keeps the lists, too, so that `gf.watch` can tell when live queries are no longer like these;
        `rule.with_hits` adds what they found. The tests are exact binomial ones, for precision the bounds of Hoeffding
        and Bentkus, in a fixed order of thresholds.
        """
        for name, value in (("max_error", max_error), ("confidence", confidence)):
            check_open_interval(value, name)
        if precision is not None:
            check_open_interval(precision, "precision")
            max_error = 1 - precision
        # What is guaranteed comes from these lists: a fit that was not told its encoder does no harm.
        results, model, numbers = self._read(scores, features, None if self.encoder_ is None else encoder)
        self._refuse_fitted(results.scores)
        if model.log_prob:
            self._check_kind(results.scores)
        known = inputs.labels_of(labels, results)
        if precision is not None and known.relevant is None:
            raise ValueError("precision needs labels [n, k], the grade of each hit")
        live = self._live(no_match_share, unlabelled, unlabelled_features)
        share = 0.0 if isinstance(no_match_share, str) else checks.number(no_match_share, "no_match_share", 0, 0.99)
        unit = ANSWERS if precision is None else ITEMS
        certifier = Certifier(
            model, self._pilot, unit, float(max_error), float(confidence), share=share, live=live, seed=self.seed
        )
        certificate, covered = certifier(results.scores, numbers, known.first, known.relevant)
        return Rule(
            model,
            certifier.unit,
            float(max_error),
            float(confidence),
            covered,
            certifier.score_share,
            certificate,
            self.encoder_ if encoder is None else checks.words(encoder, "encoder"),
            None if gallery_size is None else checks.integer(gallery_size, "gallery_size", 1),
            bool(self.presorted),
            reference=reference_of(
                model, results.scores, numbers, known.first, known.relevant, share=certifier.score_share
            ),
        )

    def save(self, path: str | Path) -> None:
        """Writes what was learned as a JSON file, whole or not at all."""
        self._fitted()
        write_json(
            checks.path(path, "path"),
            {
                "format": FORMAT,
                "what": "geoflow_fast trust",
                "seed": int(self.seed),
                "presorted": bool(self.presorted),
                "encoder": self.encoder_,
                "model": self._model.as_json(),
                "pilot": {
                    name: np.asarray(values).astype(float).tolist() for name, values in vars(self._pilot).items()
                },
                "report": [vars(rung) for rung in self._report],
                "seen": sorted(self._seen),
            },
        )

    @classmethod
    def load(cls, path: str | Path) -> Trust:
        """Reads what `save` has written."""
        file = checks.path(path, "path")
        values = read_json(file, "a fitted Trust")
        with contents_of(file, "damaged or not a fitted Trust"):
            if values["format"] != FORMAT or values["what"] != "geoflow_fast trust":
                raise ValueError(f"format {values['format']} of {values['what']!r}; this version reads {FORMAT}")
            model = Model.from_json(values["model"])
            settings = {"presorted": checks.boolean(values["presorted"], "presorted"), "log_prob": model.log_prob}
            trust = cls(checks.integer(values["seed"], "seed"), **settings)
            trust._model = model
            trust._pilot = _restored_pilot(values["pilot"])
            trust._report = tuple(FeatureGain(**rung) for rung in values["report"])
            trust._seen = frozenset(str(digest) for digest in values["seen"])
            trust.classes_ = np.array([False, True])
            named = values["encoder"]
            trust.encoder_ = None if named is None else checks.words(named, "encoder")
        return trust

    def get_params(self, deep: bool = True) -> dict[str, Any]:  # noqa: ARG002
        """The settings by name, as scikit-learn asks for them."""
        return {name: getattr(self, name) for name in list(inspect.signature(type(self)).parameters)}

    def set_params(self, **params: Any) -> Trust:
        """Changes settings."""
        for name, value in params.items():
            if name not in self.get_params():
                raise ValueError(f"Trust has no setting {name!r}; there are {', '.join(self.get_params())}")
            setattr(self, name, value)
        return self

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in self.get_params().items())
        return f"Trust({settings})"

    def __sklearn_tags__(self) -> Any:
        """What scikit-learn wants to know about an estimator before it splits data for it."""
        from sklearn.utils import ClassifierTags, InputTags, Tags, TargetTags

        return Tags(
            estimator_type="classifier",
            target_tags=TargetTags(required=True),
            classifier_tags=ClassifierTags(multi_class=False),
            input_tags=InputTags(),
        )

    def _fitted(self) -> Model:
        if not hasattr(self, "_model"):
            raise ValueError("this Trust is not fitted yet: call fit with judged queries first")
        return self._model

    def _read(self, scores: Table, features: Table | None, encoder: str | None) -> tuple[Lists, Model, Floats]:
        """Checked lists, the model and the caller's features."""
        model = self._fitted()
        check_encoder("this Trust", self.encoder_, encoder, "fit one for it", stacklevel=4)
        results = inputs.result_lists(scores, "scores", k=model.k, presorted=self.presorted)
        return results, model, inputs.features_of(features, len(results.scores), model.features)

    def _check_kind(self, scores: Floats) -> None:
        """Raises a ValueError if lists that should hold logarithms of probabilities cannot, and warns if lists that
        should not seem to: a missing item changes them in another way."""
        if self.log_prob:
            total = lists.prob_sums(scores)
            if (total > 1 + lists.MOST_ROUNDING).any():
                row = int(total.argmax())
                raise ValueError(
                    f"scores must be logarithms of probabilities, but those of row {row} sum to {total[row]:.4g}"
                )
        elif lists.look_like_log_prob(scores):
            warnings.warn(
                "scores look like logarithms of probabilities over a gallery: say Trust(log_prob=True), or what is "
                "said about missing items will be wrong",
                stacklevel=3,
            )

    def _refuse_fitted(self, scores: Floats) -> None:
        """Raises a ValueError if more than half of the lists were fitted. A few may be equal by chance, and lists of
        ties alone do not count."""
        digests = inputs.row_digests(scores[scores[:, 0] > scores[:, -1]])
        fitted = sum(digest in self._seen for digest in digests)
        if fitted > len(scores) / 2:
            raise ValueError(
                f"scores has {fitted} of {len(scores)} rows that were fitted, which makes rules too bold: certify with "
                "judged queries that fit has not seen"
            )

    def _live(self, share: float | str, unlabelled: Table | None, features: Table | None) -> Floats | None:
        """The log-odds [m] of "no match" of live queries, if a share is to be estimated from them."""
        if share != ESTIMATE:
            if isinstance(share, str):
                raise ValueError(f"no_match_share must be a number or {ESTIMATE!r}, got {share!r}")
            if unlabelled is not None:
                raise ValueError(f"unlabelled is used with no_match_share={ESTIMATE!r} only")
            return None
        if unlabelled is None:
            raise ValueError(f"no_match_share={ESTIMATE!r} needs unlabelled=, the lists of live queries [m, k]")
        model = self._fitted()
        results = inputs.result_lists(unlabelled, "unlabelled", k=model.k, presorted=self.presorted)
        numbers = inputs.features_of(features, len(results.scores), model.features, "unlabelled_features")
        return model.no_match_logit(results.scores, numbers)


def _known_right(known: Labels, k: int) -> Bools:
    """[n, k], the hits that are known to be right."""
    if known.relevant is not None:
        return known.relevant
    return known.first[:, None] & (np.arange(k) == 0)


def _restored_pilot(values: dict[str, Any]) -> Pilot:
    """The pilot that `Trust.save` has written."""
    arrays = {name: np.asarray(values[name], dtype=np.float64) for name in Pilot.__dataclass_fields__}
    if len({array.shape for array in arrays.values()}) != 1 or not all(
        np.isfinite(array).all() for array in arrays.values()
    ):
        raise ValueError("the numbers of its queries are damaged")
    return Pilot(inputs.right_of(arrays.pop("right"), "right"), **arrays)
