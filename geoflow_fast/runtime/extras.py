"""Packages that only some calls need, and how to install them."""

from __future__ import annotations

import importlib.util


def missing(purpose: str, package: str, module: str, extra: str) -> str | None:
    """Why the optional `package` is needed, and how to get it, if its `module` is not installed; None if it is."""
    return None if importlib.util.find_spec(module) else needs(purpose, package, extra)


def needs(purpose: str, package: str, extra: str) -> str:
    """Says that `purpose` needs a `package`, which comes with an `extra` of this one. That is not on PyPI, so the extra
    is installed from a checkout."""
    return f"{purpose} needs {package}: pip install '.[{extra}]' in a checkout of geoflow_fast"
