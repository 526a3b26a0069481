"""Backends: asked for by name they work or say why not; the automatic choice passes over what is unavailable only."""

from __future__ import annotations

import pytest
import torch

import geoflow_fast as gf
from geoflow_fast.noise import sample_uniform
from geoflow_fast.ops import dispatch, extension


@pytest.fixture
def table(monkeypatch):
    """A private registry with one operation, `double`, and a broken fast backend."""
    monkeypatch.setattr(dispatch, "_OPERATIONS", {})
    plain = dispatch.Backend(lambda x: 2 * x, ("cpu", "cuda"))

    def register(**backends: dispatch.Backend) -> None:
        dispatch.register("double", reference=plain, **backends)

    return register


def test_automatic_choice_passes_over_the_unavailable(table):
    table(cpu=dispatch.Backend(lambda: None, ("cpu",), missing=lambda: "not built"))
    assert dispatch.choose("double", torch.ones(1))(torch.ones(1)) == 2


def test_automatic_choice_never_hides_a_failure(table):
    def broken() -> torch.Tensor:
        raise RuntimeError("kernel failed")

    table(cpu=dispatch.Backend(broken, ("cpu",)))
    with pytest.raises(RuntimeError, match="kernel failed"):
        dispatch.choose("double", torch.ones(1))()


def test_a_named_backend_that_cannot_serve_says_why(table):
    table(
        cpu=dispatch.Backend(lambda: None, ("cpu",), missing=lambda: "not built"),
        cuda=dispatch.Backend(lambda: None, ("cuda",)),
    )
    for name, reason in (
        ("cpu", "not built"),
        ("cuda", "these are on cpu"),
        ("triton", "no triton implementation"),
        ("magic", "no such backend"),
    ):
        with pytest.raises(dispatch.BackendUnavailable, match=reason):
            dispatch.choose("double", torch.ones(1), name)


def test_public_table_covers_every_operation_and_backend():
    table = gf.backends()
    assert "masked_interpolant" in table
    for row in table.values():
        assert set(row) == {"reference", "cpu", "cuda", "triton"}
        assert all(isinstance(state, str) and state for state in row.values())
    assert table["masked_interpolant"]["reference"] == "available"
    assert "masked_interpolant" in str(table)


def test_compiled_code_is_built_here():
    assert extension.missing() is None
    assert gf.backends()["masked_interpolant"]["cpu"] == "available"


@pytest.fixture
def without_extension(monkeypatch):
    """The package as it is where nothing was compiled."""
    monkeypatch.setattr(extension, "loaded", lambda: None)
    extension.missing.cache_clear()
    yield
    extension.missing.cache_clear()


@pytest.mark.usefixtures("without_extension")
def test_without_the_extension_the_reason_is_given():
    assert "not built" in gf.backends()["masked_interpolant"]["cpu"]
    x = sample_uniform(2, 3)
    zeros = torch.zeros(2, dtype=torch.int8)
    assert len(gf.ops.masked_interpolant(x, x, x, x, torch.rand(2), zeros)) == 4
    with pytest.raises(gf.BackendUnavailable, match="not built"):
        gf.ops.masked_interpolant(x, x, x, x, torch.rand(2), zeros, backend="cpu")
