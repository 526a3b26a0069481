"""What needs an optional package says so before it does anything else, and names a way to install it that exists."""

from __future__ import annotations

import json
import re
import sys
import types
from pathlib import Path

import pytest
from PIL import Image

import geoflow_fast as gf
from geoflow_fast.encoders import open_clip
from geoflow_fast.runtime import extras

ROOT = Path(__file__).parents[2]
SCORED = ["--model", "flow", "--queries", "texts.npy", "--gallery", "images.npy"]
PAIRS = ["--pairs", "pairs", "--held-out", "held_out"]
NEEDS = [
    ("matplotlib", "eval", ["entropy", *SCORED, "--plot", "out/plot.png", "--out", "out/scores.parquet"]),
    ("matplotlib", "eval", ["evaluate", *PAIRS, "--out", "out"]),
    ("matplotlib", "eval", ["demo", "--out", "out"]),
    ("open_clip", "encoders", ["embed", "--images", "photos", "--out", "out"]),
    ("PIL", "encoders", ["embed", "--images", "photos", "--encoder", "colours", "--out", "out"]),
]


@pytest.mark.parametrize(("module", "extra", "arguments"), NEEDS, ids=[f"{m} {a[0]} {a[1]}" for m, _, a in NEEDS])
def test_a_missing_package_is_named_before_any_work(run, desk, monkeypatch, module, extra, arguments):
    (desk / "photos").mkdir()
    Image.new("RGB", (4, 4)).save(desk / "photos/a.png")
    (desk / "photos/a.txt").write_text("black")
    gf.EmbeddingPairs.open(desk / "pairs").subset(range(40)).save(desk / "held_out")
    for name in [name for name in sys.modules if name == module or name.startswith(f"{module}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    code, out, err = run(*arguments)
    assert code == 2
    assert f"pip install '{ROOT}[{extra}]'" in err  # which pip takes as it is
    assert not (desk / "out").exists() or not any((desk / "out").iterdir())
    assert out == "" or arguments[0] == "train"  # which first says what it is about to do


def test_extras_that_messages_name_exist():
    sources = "\n".join(path.read_text() for path in (ROOT / "geoflow_fast").rglob("*.py"))
    named = set(re.findall(r"""(?:needs|missing)\((?:.*, )"(\w+)"\)""", sources))
    assert named >= {"eval", "encoders", "gpu"}
    declared = (ROOT / "pyproject.toml").read_text()
    assert [name for name in named if f"\n{name} = [" not in declared] == []


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"url": "file:///nowhere/any%20more/x.whl", "archive_info": {}}, "geoflow_fast"),
        ({"url": "https://host.example/geoflow_fast-0.1.0.whl", "archive_info": {}}, "geoflow_fast"),
        (None, "geoflow_fast"),
        ({"url": "file://{folder}", "dir_info": {"editable": True}}, "{folder}"),
        ({"url": "file://{folder}/a%20wheel.whl", "archive_info": {}}, "{folder}/a wheel.whl"),
    ],
    ids=["wheel is gone", "from a server", "from an index", "checkout", "wheel with a blank"],
)
def test_the_command_installs_from_where_the_package_came_from(record, expected, tmp_path, monkeypatch):
    (tmp_path / "a wheel.whl").touch()
    text = None if record is None else json.dumps(record).replace("{folder}", str(tmp_path))
    known = [types.SimpleNamespace(read_text=lambda _, own=own: own) for own in (None, text)]  # one is a build's
    monkeypatch.setattr(extras.importlib.metadata, "distributions", lambda name: known)  # noqa: ARG005
    assert extras.installed_from.__wrapped__() == expected.replace("{folder}", str(tmp_path))


def test_a_torchvision_without_operators_has_a_remedy(monkeypatch):
    class Broken:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "open_clip":
                raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.delitem(sys.modules, "open_clip", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    with pytest.raises(ValueError, match=r"torchvision::nms does not exist; torchvision must be of the same .* build"):
        open_clip._open_clip()
