"""The locks hold what the project asks for, by version and hash, and each of them no more than its task needs."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools import supply

ROOT = Path(__file__).parents[2]
LAYERS = tuple(supply.ADDED)


def locked(*names: str) -> dict[str, str]:
    """The versions of these locks by package, where their markers hold; every line must have a version and hashes."""
    versions = {}
    for name in names:
        text = (supply.LOCKS / f"{name}.lock").read_text().replace("\\\n", " ")
        for line in text.splitlines():
            if line.startswith("#"):
                continue
            words, *hashes = re.split(r"\s+--hash=sha256:", line.strip())
            need = Requirement(words)
            pin = re.fullmatch(r"==([^,*]+)", str(need.specifier))
            assert pin, f"{name}.lock: {words}"
            assert hashes, f"{name}.lock: {words}"
            assert all(re.fullmatch("[0-9a-f]{64}", value) for value in hashes), f"{name}.lock: {words}"
            if need.marker is None or need.marker.evaluate():
                versions[canonicalize_name(need.name)] = pin[1]
    return versions


@pytest.mark.parametrize("name", [*LAYERS, "cuda", "tools"])
def test_every_line_is_a_version_with_hashes_and_names_no_place(name):
    if name != "cuda":  # its lines are for machines with the CUDA build
        assert len(locked(name)) > 10
    assert not re.search(r"://|--index|--find-links|@ ", (supply.LOCKS / f"{name}.lock").read_text())


@pytest.mark.parametrize("count", range(1, len(LAYERS) + 1))
def test_the_locks_hold_what_the_project_asks_for(count):
    versions = locked(*LAYERS[:count])
    extras = [extra for layer in LAYERS[:count] for extra in supply.ADDED[layer]]
    for words in metadata.requires("geoflow_fast") or []:
        need = Requirement(words)
        wanted = need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in ("", *extras))
        if wanted and canonicalize_name(need.name) != "geoflow-fast":
            assert need.specifier.contains(versions[canonicalize_name(need.name)]), need


def test_no_package_is_locked_twice_and_the_demo_brings_no_tools():
    layers = [set(locked(name)) for name in LAYERS]
    assert len(set.union(*layers)) == sum(map(len, layers))
    assert not layers[0] & {"pytest", "mypy", "ruff", "triton", "mkdocs", "scikit-learn", "transformers"}


def test_the_locks_have_the_versions_of_the_constraints():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = [Requirement(line) for line in lines if line and not line.startswith("#")]
    chosen = {canonicalize_name(need.name): str(need.specifier).removeprefix("==") for need in pinned}
    for name, version in locked(*LAYERS, "tools").items():
        assert version == chosen.get(name, version), f"{name}: make lock"


def test_the_build_needs_nothing_beyond_the_first_lock():
    """`make setup` builds without isolation: what pyproject.toml asks for to build is in the lock of the demo."""
    block = re.search(r"^requires = \[(.*)\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert block
    assert re.findall(r'"([^"]+)"', block[1]) == supply.BUILD.split()
    for words in supply.BUILD.split():
        assert Requirement(words).specifier.contains(locked("demo")[Requirement(words).name])
