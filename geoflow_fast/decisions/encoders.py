"""Which encoder made the lists: what was learned or certified with one never silently serves another."""

from __future__ import annotations

import warnings

from geoflow_fast.runtime import checks


def check_encoder(
    what: str,
    own: str | None,
    given: str | None,
    instead: str = "certify one for it",
    *,
    of: str = "these lists",
    stacklevel: int = 3,
) -> None:
    """Raises a ValueError if `what`, such as "this rule", was made with another encoder than the `given` one, which is
    that `of` what it is used for, and warns if only one of the two is known. `instead` says what to do about another
    one. `stacklevel` is that of the warning: 3 is whoever calls the function that checks."""
    if given is not None:
        checks.words(given, "encoder")
    if own == given:
        return
    if own is not None and given is not None:
        raise ValueError(f"{what} was made with encoder {own!r}, not {given!r}: {instead}")
    if own is None:
        words = f"was made without encoder= and cannot tell whether it is for {given!r}: make it again with encoder="
    else:
        words = f"was made with encoder {own!r} and is not told which one made {of}: pass encoder="
    warnings.warn(f"{what} {words}", stacklevel=stacklevel)
