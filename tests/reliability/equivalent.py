"""Mutants that compute the same as the source, or differ only in time, by name, each with the reason."""

from __future__ import annotations

EQUIVALENT: dict[str, str] = {}
