"""What was learned or certified with one encoder never silently serves another: refused, or said in a warning."""

from __future__ import annotations

import dataclasses
import json
import re
import warnings
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import geoflow_fast as gf
from geoflow_fast.explore import sources
from geoflow_fast.jobs.watch import WatchSettings, watch_file
from geoflow_fast.runtime import parquet
from geoflow_fast.stores.lance_reranker import check_trust
from tests.decisions.helpers import search
from tests.jobs.processes import run_geoflow

K = 10
FITTED, TESTED, NEW = (search(200, K, items=40, seed=seed) for seed in range(3))
UNTOLD = "was made with encoder 'small' and is not told which one made these lists: pass encoder="
UNKNOWN = "was made without encoder= and cannot tell whether it is for 'small'"
OTHER = "was made with encoder 'small', not 'large'"


@pytest.fixture(scope="module")
def trust():
    return gf.Trust().fit(FITTED.scores, FITTED.first, encoder="small")


@pytest.fixture(scope="module")
def rule(trust):
    return trust.certify(TESTED.scores, TESTED.first, 0.3, encoder="small")


def of_trust(trust, name):
    return lambda **told: getattr(trust, name)(NEW.scores, **told)


@pytest.mark.parametrize("name", ["predict_proba", "predict", "relevance", "p_no_match"])
def test_a_trust_serves_the_encoder_that_it_was_fitted_with(trust, name):
    plain = gf.Trust().fit(FITTED.scores, FITTED.first)
    assert_never_silent(of_trust(trust, name), of_trust(plain, name))


def test_a_rule_is_of_the_encoder_of_its_trust(trust):
    def certify(**told):
        return trust.certify(TESTED.scores, TESTED.first, 0.3, **told)

    with pytest.raises(ValueError, match=f"this Trust {OTHER}: fit one for it"):
        certify(encoder="large")
    with pytest.warns(UserWarning, match=f"this Trust {UNTOLD}"):
        assert certify().encoder == "small"
    plain = gf.Trust().fit(FITTED.scores, FITTED.first)  # its rules promise what the certified lists show
    with quiet():
        assert certify(encoder="small").encoder == "small"
        assert plain.certify(TESTED.scores, TESTED.first, 0.3, encoder="large").encoder == "large"


def test_a_rule_serves_the_encoder_that_it_was_certified_with(rule):
    plain = dataclasses.replace(rule, encoder=None)
    assert_never_silent(lambda **told: rule(NEW.scores, **told), lambda **told: plain(NEW.scores, **told))
    assert_never_silent(lambda **told: rule.show(NEW.scores, **told), lambda **told: plain.show(NEW.scores, **told))


def test_a_rule_watches_a_log_of_its_encoder(rule):
    plain = dataclasses.replace(rule, encoder=None)
    assert_never_silent(
        lambda **told: gf.watch(rule, NEW.scores, every=200, **told),
        lambda **told: gf.watch(plain, NEW.scores, every=200, **told),
    )


def test_a_file_of_looks_says_what_it_was_not_told(rule, tmp_path):
    rule.save(tmp_path / "rule.json")
    dataclasses.replace(rule, encoder=None).save(tmp_path / "plain.json")
    parquet.write_columns(tmp_path / "log.parquet", {"scores": NEW.scores}, 200)

    def watched(file, **told):
        return watch_file(
            tmp_path / file, tmp_path / "log.parquet", tmp_path / f"{file}.parquet", WatchSettings(**told)
        )

    with pytest.warns(UserWarning, match=f"the rule {UNTOLD}"):
        watched("rule.json")
    with pytest.warns(UserWarning, match=f"the rule {UNKNOWN}"):
        watched("plain.json", encoder="small")
    with quiet():
        assert watched("rule.json", encoder="small").holds
        assert "the encoder is large and not small" in watched("rule.json", encoder="large").verdict
        watched("plain.json")


def test_a_page_shows_probabilities_of_its_own_encoder(rule, tmp_path):
    rule.save(tmp_path / "rule.json")
    dataclasses.replace(rule, encoder=None).save(tmp_path / "plain.json")
    write_log(tmp_path / "log.parquet")

    def explored(file):
        run, nothing = sources.RunFiles.open(tmp_path / "log.parquet", tmp_path / file), sources.Described()
        return lambda **told: sources.explored(run, nothing, nothing, **told)

    assert_never_silent(explored("rule.json"), explored("plain.json"))


def test_files_name_the_encoder(trust, rule, tmp_path):
    for made in (trust, rule):
        made.save(tmp_path / "new.json")
        values = json.loads((tmp_path / "new.json").read_text())
        assert values["encoder"] == "small"
        assert type(made).load(tmp_path / "new.json").save(tmp_path / "again.json") is None
        assert json.loads((tmp_path / "again.json").read_text()) == values
    trust.save(tmp_path / "new.json")
    values = json.loads((tmp_path / "new.json").read_text())
    (tmp_path / "bad.json").write_text(json.dumps({**values, "encoder": 3}))
    with pytest.raises(ValueError, match=r"bad\.json.*encoder must be text"):
        gf.Trust.load(tmp_path / "bad.json")


def test_a_reranker_of_lancedb_is_made_for_one_encoder(trust, rule):
    """The parts that need no LanceDB; tests/stores/test_lance_reranker.py has the rest."""
    plain = gf.Trust().fit(FITTED.scores, FITTED.first)
    other = plain.certify(TESTED.scores, TESTED.first, 0.3, encoder="large")
    for made in (None, rule):
        with pytest.raises(ValueError, match=f"the Trust {OTHER}"):
            check_trust(trust, made, "large")
        with quiet():
            check_trust(trust, made, "small")
    with pytest.raises(ValueError, match=f"the rule {OTHER}"):
        check_trust(other_trust(), rule, "large")
    for encoder in ("small", None):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(ValueError, match="the rule was made with encoder 'large', not 'small'"):
                check_trust(trust, other, encoder)
    with pytest.warns(UserWarning, match="is not told") as told:
        check_trust(trust, rule, None)
    assert [str(each.message).split(" was")[0] for each in told] == ["the Trust", "the rule"]
    with pytest.warns(UserWarning, match=f"the Trust {UNKNOWN}"):
        check_trust(plain, rule, "small")


def other_trust():
    return gf.Trust().fit(FITTED.scores, FITTED.first, encoder="large")


@pytest.mark.parametrize("encoder", [3, b"small", ["small"]])
def test_an_encoder_is_a_name(trust, rule, encoder):
    for call in (rule, trust.predict_proba, lambda scores, **told: gf.watch(rule, scores, **told)):
        with pytest.raises(TypeError, match="encoder must be text"):
            call(NEW.scores, encoder=encoder)
    with pytest.raises(TypeError, match="encoder must be text"):
        gf.Trust().fit(FITTED.scores, FITTED.first, encoder=encoder)


@pytest.fixture
def desk(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, lists in (("fitted", FITTED), ("tested", TESTED), ("new", NEW)):
        np.save(f"{name}.npy", lists.scores)
        np.save(f"{name}_labels.npy", lists.first)
    write_log(tmp_path / "log.parquet")
    return tmp_path


def test_commands_keep_and_compare_encoders(desk, monkeypatch, capsys):
    def run(command, *words, **flags):
        return run_geoflow(monkeypatch, command, *words, **flags)

    known = {"scores": "fitted.npy", "labels": "fitted_labels.npy", "trust": "t.json"}
    assert run("trust", **known, encoder="small") == 0
    new = {"scores": "new.npy", "trust": "t.json", "out": "new.parquet"}
    assert run("trust", **new, encoder="small") == 0
    assert run("trust", **new, encoder="large") == 2
    assert OTHER in capsys.readouterr().err
    with pytest.warns(UserWarning, match=UNTOLD):
        assert run("trust", **new) == 0
    rule = {"scores": "tested.npy", "labels": "tested_labels.npy", "rule": "rule.json", "max_error": 0.3}
    assert run("threshold", **rule, trust="t.json", encoder="large") == 2
    assert OTHER in capsys.readouterr().err
    with pytest.warns(UserWarning, match=UNTOLD) as told:
        assert run("threshold", **rule, trust="t.json", out="answers.parquet") == 0
    assert len(told) == 1
    assert gf.Rule.load("rule.json").encoder == "small"
    assert run("threshold", "--overwrite", **rule, encoder="small") == 0
    assert run("explore", "log.parquet", rule="rule.json", out="page.html", encoder="large") == 2
    assert OTHER in capsys.readouterr().err
    assert not (desk / "page.html").exists()
    assert run("explore", "log.parquet", rule="rule.json", out="page.html", encoder="small") == 0


@pytest.mark.usefixtures("desk")
def test_the_page_of_a_log_says_that_its_encoder_is_another(rule, monkeypatch, capsys):
    """The queries are like the judged ones, so that nothing but the name of the encoder tells."""
    rule.save("rule.json")
    files = {"rule": "rule.json", "queries": "log.parquet", "out": "health.parquet", "page": "changed.html"}
    assert run_geoflow(monkeypatch, "watch", **files, every=200, encoder="large") == 3
    assert "the encoder is large and not small" in capsys.readouterr().out
    page = Path("changed.html").read_text()
    assert "the encoder is large and not small" in page
    assert '"holds":false' in page


def assert_never_silent(known, unknown) -> None:
    """Checks a call of what knows its encoder, and of what does not."""
    with pytest.raises(ValueError, match=OTHER):
        known(encoder="large")
    with pytest.warns(UserWarning, match=re.escape(UNTOLD)) as told:
        known()
    assert [each.filename for each in told] == [__file__]  # the warning points at whoever called
    with pytest.warns(UserWarning, match=UNKNOWN):
        unknown(encoder="small")
    with quiet():
        known(encoder="small")
        unknown()


@contextmanager
def quiet():
    """No warning is given inside."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def write_log(path: Path) -> None:
    hits = np.random.default_rng(0).integers(40, size=(200, K))
    parquet.write_columns(path, {"index": hits, "scores": NEW.scores}, 200)
