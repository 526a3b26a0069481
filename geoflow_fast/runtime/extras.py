"""Packages that only some calls need, and how to install them."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
from pathlib import Path
from urllib.parse import unquote, urlsplit

PACKAGE = "geoflow_fast"


def missing(purpose: str, package: str, module: str, extra: str) -> str | None:
    """Why the optional `package` is needed, and how to get it, if its `module` is not installed; None if it is."""
    return None if importlib.util.find_spec(module) else needs(purpose, package, extra)


def needs(purpose: str, package: str, extra: str) -> str:
    """Says that `purpose` needs a `package`, which comes with an `extra` of this one, and how pip installs that."""
    return f"{purpose} needs {package}: pip install '{installed_from()}[{extra}]'"


@functools.cache
def installed_from() -> str:
    """What pip installs this package from: the checkout or the wheel that it came from, if that is still there, and
    otherwise its name."""
    # A build in a checkout leaves a second record of the package there, which does not tell.
    records = (known.read_text("direct_url.json") for known in importlib.metadata.distributions(name=PACKAGE))
    record = next(filter(None, records), None)
    parts = urlsplit(json.loads(record)["url"] if record else "")
    local = Path(unquote(parts.path))
    return str(local) if parts.scheme == "file" and local.exists() else PACKAGE
