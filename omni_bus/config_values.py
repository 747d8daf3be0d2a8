"""One value against the type its key declares: converted, or a sentence on what it must be."""

from __future__ import annotations

import math
import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

from omni_bus.names import did_you_mean


class BadValue(Exception):
    """Says what the value must be: "must be an integer, not a string (\"x\")"."""


def convert(value: Any, kind: Any, raw: str | None = None, *, bounded: bool = False) -> Any:
    """`value` as `kind`; raises BadValue. `raw`: the text it was parsed from, taken as it is where `kind` is a string.

    Numbers must be finite, and not negative where neither the type (`msgspec.Meta`) nor the caller (`bounded`) says their bounds.
    """
    if raw is not None and kind is str:
        value = raw if not isinstance(value, str) else value
    try:
        converted = msgspec.convert(value, kind)
    except msgspec.ValidationError:
        raise BadValue(f"must be {wanted(kind)}, not {described(value)}{_nearest(value, kind)}") from None
    if isinstance(converted, float) and not math.isfinite(converted):
        raise BadValue(f"must be {wanted(kind)}, not {converted}")
    if isinstance(converted, int | float) and converted < 0 and not bounded and get_origin(kind) is not Annotated:
        raise BadValue(f"must be {wanted(kind)} of at least 0, not {converted}")
    return converted


def wanted(kind: Any) -> str:
    """A type in words."""
    words = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
    if kind in words:
        return words[kind]
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return wanted(arguments[0]) + _bounds(arguments[1:])
    if origin in (Union, types.UnionType):
        return " or ".join(wanted(inner) for inner in arguments if inner is not type(None))
    if origin is Literal:
        return "one of " + ", ".join(f'"{choice}"' if isinstance(choice, str) else str(choice) for choice in arguments)
    if origin in (tuple, list, frozenset, set):
        plural = {int: "integers", float: "numbers", str: "strings"}.get(arguments[0], "values")
        return f"a list of {plural}"
    return "a table"


def described(value: Any) -> str:
    """A TOML value in words, shortened."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'the string "{value if len(value) <= 60 else value[:57] + "..."}"'
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, list):
        return "a list" if len(str(value)) > 60 else f"the list {value}"
    return "a table" if isinstance(value, dict) else f"the date or time {value}"


def _bounds(metas: tuple[Any, ...]) -> str:
    said = []
    for meta in metas:
        if isinstance(meta, msgspec.Meta):
            said += [f"of at least {meta.ge}"] if meta.ge is not None else []
            said += [f"above {meta.gt}"] if meta.gt is not None else []
            said += [f"up to {meta.le}"] if meta.le is not None else []
            said += [f"below {meta.lt}"] if meta.lt is not None else []
    return " " + " and ".join(said) if said else ""


def _nearest(value: Any, kind: Any) -> str:
    choices = [choice for choice in get_args(kind) if isinstance(choice, str)] if get_origin(kind) is Literal else []
    found = did_you_mean(value, choices) if isinstance(value, str) and choices else ""
    return found if "did you mean" in found else ""
