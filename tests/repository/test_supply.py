"""The lock, the licences and the audit of dependencies: each says so when something is wrong."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools import supply

ROOT = Path(__file__).parents[2]


def required() -> list[Requirement]:
    """What the project asks for, with all extras of the development environment."""
    needs = [Requirement(words) for words in metadata.requires("geoflow_fast") or []]
    wanted = [{"extra": extra} for extra in ("", *supply.EXTRAS)]
    others = [need for need in needs if canonicalize_name(need.name) != supply.OWN]  # extras that name other extras
    return [need for need in others if need.marker is None or any(map(need.marker.evaluate, wanted))]


@pytest.mark.parametrize("path", [supply.DEV, supply.CUDA, supply.TOOLS], ids=lambda path: path.name)
def test_every_line_is_a_version_with_hashes_and_names_no_place(path):
    entries = supply.read_lock(path)
    assert len(entries) > 10
    assert not re.search(r"://|--index|--find-links|@ ", path.read_text())


def test_the_lock_holds_what_the_project_asks_for():
    locked = {entry.name: entry for entry in supply.read_lock(supply.DEV) if entry.applies}
    for need in required():
        assert need.specifier.contains(locked[canonicalize_name(need.name)].version), need


def test_the_lock_has_the_versions_of_the_constraints():
    pinned = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if line[:1] not in "#"]
    chosen = {canonicalize_name(need.name): str(need.specifier).removeprefix("==") for need in pinned}
    for entry in [*supply.read_lock(supply.DEV), *supply.read_lock(supply.TOOLS)]:
        assert entry.version == chosen.get(entry.name, entry.version), f"{entry.name}: make lock"


def test_the_build_needs_nothing_beyond_the_lock():
    """`make setup` builds without isolation: what pyproject.toml asks for to build is in the lock."""
    block = re.search(r"^requires = \[(.*)\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    locked = {entry.name: entry.version for entry in supply.read_lock(supply.DEV)}
    for words in re.findall(r'"([^"]+)"', block[1]):
        need = Requirement(words)
        assert need.specifier.contains(locked[need.name])


def test_the_makefile_and_the_lock_have_the_same_extras():
    assert f"EXTRAS := {','.join(supply.EXTRAS)}\n" in (ROOT / "Makefile").read_text()


def test_every_package_that_belongs_here_is_installed_in_its_version():
    installed = supply.packages()
    for entry in supply.read_lock(supply.DEV):
        if entry.applies:
            assert installed[entry.name].version.split("+")[0] == entry.version, entry.name


def test_licences_are_allowed_and_their_page_is_of_today():
    for name, (_, licence) in supply.licences().items():
        assert set(supply.parts_of(licence)) <= supply.ALLOWED, f"{name}: {licence}"
    if sys.platform == "linux":
        assert supply.LICENCES.read_text() == supply.licences_page(), "make licences"


@pytest.mark.parametrize(
    ("about", "classifiers", "expected"),
    [
        ({"License-Expression": "MIT", "License": "GPL"}, [], "MIT"),
        ({"License": "Apache 2.0"}, [], "Apache-2.0"),
        ({"License": "Copyright\nand so on"}, ["License :: OSI Approved :: BSD License"], "BSD-3-Clause"),
        ({"License": "UNKNOWN"}, ["Topic :: X", "License :: OSI Approved :: MIT License"], "MIT"),
        ({"License": "CC-by-NC"}, [], "CC-by-NC"),
        ({}, [], "unknown"),
    ],
)
def test_how_a_licence_is_read(about, classifiers, expected):
    assert supply.licence_of(about, classifiers) == expected
    assert (set(supply.parts_of(expected)) <= supply.ALLOWED) == (expected not in ("CC-by-NC", "unknown"))


@pytest.mark.parametrize(
    "line",
    ["rich", "rich>=15", "rich==15.0.0", "rich==15.*  --hash=sha256:" + "0" * 64, "rich==15.0.0  --hash=sha256:ff"],
)
def test_a_line_without_version_or_hash_is_refused(tmp_path, line):
    path = tmp_path / "x.lock"
    path.write_text(f"{line}\n")
    with pytest.raises(ValueError, match=r"x\.lock"):
        supply.read_lock(path)


@pytest.fixture
def package(tmp_path) -> metadata.Distribution:
    """An installed package of one file."""
    info = tmp_path / "thing-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: thing\nVersion: 1.0\n")
    (tmp_path / "thing.py").write_text("good = True\n")
    (info / "RECORD").write_text(f"thing.py,sha256={supply._digest(tmp_path / 'thing.py', 'sha256')},12\nthing.pyc,,\n")
    return metadata.Distribution.at(info)


def test_a_file_that_was_changed_after_its_installation_is_found(tmp_path, package):
    assert supply.changed_files(package) == []
    (tmp_path / "thing.py").write_text("good = False\n")
    assert supply.changed_files(package) == ["thing: thing.py is not the file that was installed"]
    (tmp_path / "thing.py").unlink()
    assert supply.changed_files(package) == ["thing: thing.py is missing"]
    (tmp_path / "thing-1.0.dist-info" / "RECORD").unlink()
    assert supply.changed_files(package) == ["thing has no record of its files"]


def test_another_version_and_a_missing_package_are_found(tmp_path, monkeypatch):
    there = {"rich": metadata.distribution("rich")}
    monkeypatch.setattr(supply, "packages", lambda: there)
    monkeypatch.setattr(supply, "DEV", tmp_path / "dev.lock")
    (tmp_path / "dev.lock").write_text(f"rich==0.1 --hash=sha256:{'0' * 64}\nnone==1 --hash=sha256:{'0' * 64}\n")
    differences = supply.differences()
    assert differences[0].startswith("rich is installed in version")
    assert differences[1] == "none 1 is locked, but not installed"
    assert supply.check() == 1


@pytest.mark.parametrize(
    ("status", "stderr", "expected", "said"),
    [
        (0, "No known vulnerabilities found", 0, "no known"),
        (1, "Found 2 known vulnerabilities in 1 package", 1, "Found 2"),
        (1, "ERROR: absl-py: Dependency not found on PyPI and could not be audited", supply.UNREACHABLE, "NOT CHECKED"),
        (1, "", supply.UNREACHABLE, "NOT CHECKED"),
    ],
)
def test_no_answer_is_no_clean_bill(status, stderr, expected, said, capsys):
    assert supply.verdict(status, "", stderr) == expected
    assert said in "".join(capsys.readouterr())


def test_pip_refuses_a_file_whose_hash_is_not_locked(tmp_path):
    """What `make setup` relies on, with a package made here."""
    archive = tmp_path / "thing-1.0.tar.gz"
    archive.write_bytes(b"not what was locked")
    lock = tmp_path / "x.lock"
    lock.write_text(f"thing==1.0 --hash=sha256:{hashlib.sha256(b'what was locked').hexdigest()}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-index", "--require-hashes", "--dest", "got"]
    run = subprocess.run(
        [*command, "--find-links", str(tmp_path), "--requirement", str(lock)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert run.returncode != 0
    assert "DO NOT MATCH THE HASHES" in run.stderr
