"""The nearest valid name, for messages about a name that is not one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """` (did you mean "x"?)`, or the list of valid names where none is near."""
    names = sorted(valid)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if near:
        return f' (did you mean "{near[0]}"?)'
    return f" (valid: {', '.join(names)})" if names else ""
