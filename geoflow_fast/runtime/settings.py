"""How public calls combine a frozen settings object with keywords of their own."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

S = TypeVar("S")


def settings_from(default: S, settings: S | None, **keywords: Any) -> S:
    """Returns `settings`, or `default` without them, overridden by the `keywords` that are not None."""
    if settings is not None and not isinstance(settings, type(default)):
        raise TypeError(f"settings must be {type(default).__name__}, got {type(settings).__name__}")
    changes = {name: value for name, value in keywords.items() if value is not None}
    return dataclasses.replace(settings or default, **changes)  # type: ignore[type-var]
