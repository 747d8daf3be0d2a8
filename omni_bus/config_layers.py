"""The layers a configuration comes from, TOML < environment < --set, merged key by key, each value with where it was said.

`OMNI_BUS_API__PORT=8092` sets `api.port`: two underscores stand for a dot, letters are lowered, and under `EDGES` the `->` of an
edge's name is written `_TO_` (`OMNI_BUS_EDGES__TALKER_TO_CODE2WAV__CREDITS`). The value of a variable and of `--set key=value`
is TOML where it is valid TOML, else a string.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from omni_bus.config_text import KeyPath, TomlError, parse, parse_path, parse_value
from omni_bus.errors import ConfigError

PREFIX = "OMNI_BUS_"
# Read by commands that are clients of a server; they configure none.
CLIENT_VARIABLES = frozenset({"OMNI_BUS_URL", "OMNI_BUS_API_KEY"})

_PLAIN_KEY = re.compile(r"[A-Za-z0-9_-]+")
_BARE_EDGE = re.compile(r"edges\.(?P<edge>\w+->\w+)(?P<rest>(\.\w+)*)")


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """Where a value was said: "file.toml:12", "OMNI_BUS_API__PORT" or "--set api.port=x"."""

    where: str
    order: tuple[int, int]  # layer, line: the order in which problems are told
    raw: str | None = None  # the text of a value from outside the TOML, which may be meant as a string
    directory: pathlib.Path | None = None  # of the TOML file: what relative paths in it may start from


class Layers:
    """The merged values; later layers win."""

    def __init__(self, file: pathlib.Path) -> None:
        self.file = Origin(str(file), (0, 0), directory=file.parent)
        self.values: dict[str, Any] = {}
        self._origins: dict[KeyPath, Origin] = {}

    def origin(self, path: KeyPath) -> Origin:
        """Of the value at `path`, or of the nearest table around it that was said."""
        for length in range(len(path), 0, -1):
            if path[:length] in self._origins:
                return self._origins[path[:length]]
        return self.file

    def add(self, path: KeyPath, value: Any, origin: Origin) -> None:
        """Set one value; a table is merged key by key."""
        if isinstance(value, dict) and value:
            for name, inner in value.items():
                self.add((*path, name), inner, origin)
            return
        table = self.values
        for depth, name in enumerate(path[:-1], 1):
            if not isinstance(table.get(name), dict):
                table[name] = {}
                self._origins[path[:depth]] = origin
            table = table[name]
        if isinstance(value, dict) and isinstance(table.get(path[-1]), dict):
            return
        table[path[-1]] = value
        self._origins[path] = origin

    def add_toml(self) -> None:
        """Raises ConfigError for a file that cannot be read or is not TOML."""
        file = self.file.where
        try:
            text = pathlib.Path(file).read_text(encoding="utf-8").replace("\r\n", "\n")
            self.values, lines = parse(text)
        except FileNotFoundError:
            raise ConfigError(f"{file}: no such file{_nearest_file(pathlib.Path(file))}") from None
        except IsADirectoryError:
            raise ConfigError(f"{file}: is a directory; name a TOML file") from None
        except UnicodeDecodeError as error:
            raise ConfigError(f"{file}: is not UTF-8 text (byte {error.start})") from None
        except OSError as error:
            raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
        except TomlError as error:
            raise ConfigError(f"{file}:{error.line}: not valid TOML: {error.message}") from None
        directory = self.file.directory
        self._origins = {path: Origin(f"{file}:{line}", (0, line), directory=directory) for path, line in lines.items()}

    def add_environment(self, environ: Mapping[str, str]) -> list[str]:
        """Returns the problems."""
        problems = []
        for variable in sorted(name for name in environ if name.startswith(PREFIX) and name not in CLIENT_VARIABLES):
            path = tuple(variable.removeprefix(PREFIX).lower().split("__"))
            if len(path) < 2 or not all(path):
                problems.append(
                    f"{variable}: names no setting; a dot is written as two underscores, as in OMNI_BUS_API__PORT=8092"
                )
                continue
            if path[0] == "edges":
                path = ("edges", path[1].replace("_to_", "->"), *path[2:])
            raw = environ[variable]
            self.add(path, parse_value(raw), Origin(variable, (1, 0), raw))
        return problems

    def add_sets(self, sets: Sequence[str]) -> list[str]:
        """Values of `--set`, later ones over earlier ones. Returns the problems."""
        problems = []
        for order, text in enumerate(sets):
            key, equals, raw = text.partition("=")
            path = _set_path(key.strip())
            if not equals or path is None or len(path) < 2:
                problems.append(f"--set {text}: wants table.key=value, as in --set api.port=8092")
                continue
            self.add(path, parse_value(raw), Origin(f"--set {text}", (2, order), raw))
        return problems

    def add_option(self, option: str, path: KeyPath, value: Any) -> None:
        """An option of the command line that stands for a key, such as --port."""
        self.add(path, value, Origin(f"{option} {value}", (3, 0), str(value)))


def dotted(path: KeyPath) -> str:
    """The path as TOML spells it."""
    return ".".join(name if _PLAIN_KEY.fullmatch(name) else f'"{name}"' for name in path)


def _set_path(key: str) -> KeyPath | None:
    # The inner quotes of edges."a->b" are easily lost in a shell; without them the key can mean nothing else.
    bare = _BARE_EDGE.fullmatch(key)
    return ("edges", bare["edge"], *bare["rest"].split(".")[1:]) if bare else parse_path(key)


def _nearest_file(missing: pathlib.Path) -> str:
    from omni_bus.names import did_you_mean

    if not missing.parent.is_dir():
        return ""
    found = did_you_mean(
        missing.name, [entry.name for entry in missing.parent.glob("*.toml") if entry.name != "pyproject.toml"]
    )
    return found if "did you mean" in found else ""
