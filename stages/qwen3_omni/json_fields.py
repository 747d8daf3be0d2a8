"""A checkpoint's JSON files, read field by field: what is missing or of a wrong type is named with file and full path."""

from __future__ import annotations

import json
import pathlib
from typing import Any, TypeVar

from omni_bus.errors import CheckpointError

ScalarT = TypeVar("ScalarT", int, float, str, bool)


class Section:
    """An object inside a checkpoint's JSON file; reading a field that is not there or of a wrong type names its full path."""

    def __init__(self, fields: dict[str, Any], path: str = "", file: str = "config.json") -> None:
        self.fields = fields
        self.path = path
        self.file = file

    def _find(self, names: tuple[str, ...]) -> Any:
        for name in names:
            if self.fields.get(name) is not None:
                return self.fields[name]
        raise CheckpointError(f"{self.file} lacks {self.path}{names[0]}; take the checkpoint's {self.file} as it was published")

    def _wrong(self, name: str, wanted: str) -> CheckpointError:
        return CheckpointError(f"{self.file}: {self.path}{name} must be {wanted}")

    def section(self, name: str) -> Section:
        value = self._find((name,))
        if not isinstance(value, dict):
            raise self._wrong(name, "an object")
        return Section(value, f"{self.path}{name}.", self.file)

    def get(self, kind: type[ScalarT], *names: str) -> ScalarT:
        """The field under the first of `names` that is there."""
        value = self._find(names)
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self._wrong(names[0], {int: "an integer", float: "a number", str: "a string", bool: "true or false"}[kind])
        return value

    def get_or(self, default: ScalarT, *names: str) -> ScalarT:
        if all(self.fields.get(name) is None for name in names):
            return default
        return self.get(type(default), *names)

    def ints(self, name: str) -> tuple[int, ...]:
        value = self._find((name,))
        if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
            raise self._wrong(name, "a list of integers")
        return tuple(value)

    def numbers(self, name: str) -> tuple[float, ...]:
        value = self._find((name,))
        if not isinstance(value, list) or not all(isinstance(item, int | float) for item in value):
            raise self._wrong(name, "a list of numbers")
        return tuple(float(item) for item in value)


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """A JSON object from a checkpoint file."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path.name} is missing in {path.parent}; give the whole checkpoint directory") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not readable JSON ({error}); fetch it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return value
