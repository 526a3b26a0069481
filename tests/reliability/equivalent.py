"""Mutants that compute the same as the source, or differ only in time, by name, each with the reason."""

from __future__ import annotations

EQUIVALENT: dict[str, str] = {
    "00bdd5c650": "an item that one query alone has counts for no other fold, so that its weight is never used",
    "0455ab565b": "between pi/3 and pi/2 both forms of the departure hold and differ by rounding alone",
}
