"""The command line as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


def geoflow(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "geoflow_fast", *arguments], capture_output=True, text=True, **options)


def test_doctor_shows_every_operation_with_its_reasons():
    result = geoflow("doctor", "--json")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["backends"]["masked_interpolant"]["cpu"] == "available"
    assert {"torch", "triton", "CUDA", "threads", "CPU features in use"} <= set(report["machine"])


def test_doctor_prints_tables_into_a_pipe():
    result = geoflow("doctor")
    assert result.returncode == 0, result.stderr
    assert "masked_interpolant" in result.stdout
    assert "Traceback" not in result.stderr


def test_demo_writes_its_pictures(tmp_path):
    out = tmp_path / "pictures"
    result = geoflow("demo", "--out", str(out), "--steps", "2")
    assert result.returncode == 0, result.stderr
    for picture in (out / "sphere.png", out / "densities.png"):
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert f"Wrote {picture}" in result.stdout.replace("\n", "")
    assert {path.name for path in out.iterdir()} == {"sphere.png", "densities.png", "concept_world"}
    assert result.stdout.count("correlation with the truth") == 6


def test_errors_are_one_line(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    result = geoflow("demo", "--out", str(blocked))
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert "geoflow: error:" in result.stderr.splitlines()[-1]


@pytest.mark.parametrize("command", ["doctor", "demo"])
def test_help_has_an_example(command):
    result = geoflow(command, "--help")
    assert result.returncode == 0
    assert f"geoflow {command}" in result.stdout
