"""Frozen settings objects: how public calls combine them with keywords, and how deprecated keywords still reach them.

A public call that takes `settings=` declares its own keywords with the default None and `**deprecated: Any`, and begins
with

    settings = settings_from(DensitySettings(), settings, deprecated, "log_density", n_steps=n_steps, solver=solver)
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, TypeVar

S = TypeVar("S", bound="Settings")


@dataclasses.dataclass(frozen=True)
class Settings(Mapping[str, Any]):
    """Base class of settings objects, which also unpack with `**` into the keywords of the calls that take them.

    `KEYWORDS` names the fields that such a call has as keywords of its own; the others travel in `settings`. As a
    mapping an object has these keywords and "settings", and `object[name]` works for every field.
    """

    KEYWORDS: ClassVar[tuple[str, ...]] = ()

    def __iter__(self) -> Iterator[str]:
        return iter((*self.KEYWORDS, "settings"))

    def __len__(self) -> int:
        return len(self.KEYWORDS) + 1

    def __getitem__(self, name: str) -> Any:
        if name == "settings":
            return self
        if name not in field_names(self):
            raise KeyError(name)
        return getattr(self, name)


def field_names(settings: Settings) -> list[str]:
    """Names of the settings in the order in which they are declared."""
    return [field.name for field in dataclasses.fields(settings)]


def settings_from(default: S, settings: S | None, deprecated: dict[str, Any], call: str, **keywords: Any) -> S:
    """Returns `settings`, or `default` without them, overridden by the `keywords` that are not None.

    `deprecated` holds keywords that the public function `call` took in an earlier release. They override too, with a
    DeprecationWarning; a TypeError names one that is not a setting.
    """
    if settings is not None and not isinstance(settings, type(default)):
        raise TypeError(f"settings must be {type(default).__name__}, got {type(settings).__name__}")
    for name in list(deprecated):
        if name not in field_names(default) or name in keywords:
            raise TypeError(f"{call}() got an unexpected keyword argument {name!r}")
        instead = f"settings={type(default).__name__}({name}=...)"
        keywords[name] = deprecated_keyword(deprecated, name, call, instead, stacklevel=4)
    changes = {name: value for name, value in keywords.items() if value is not None}
    return dataclasses.replace(settings or default, **changes)


def deprecated_attribute(name: str, instead: str, value: Any) -> Any:
    """Warns that the attribute `instead` replaces the one called `name`, and returns its value."""
    warnings.warn(f"{name} is deprecated; use {instead}", DeprecationWarning, stacklevel=3)
    return value


def deprecated_keyword(deprecated: dict[str, Any], name: str, call: str, instead: str, stacklevel: int = 3) -> Any:
    """Takes the keyword `name` of an earlier release out of `deprecated` and warns that `instead` replaces it. Returns
    None, without a warning, if it was not passed."""
    if name not in deprecated:
        return None
    warnings.warn(f"{call}({name}=...) is deprecated; pass {instead}", DeprecationWarning, stacklevel=stacklevel)
    return deprecated.pop(name)
