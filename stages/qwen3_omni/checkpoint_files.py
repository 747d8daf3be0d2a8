"""The files of a checkpoint directory, without torch: which tensors there are, of what shape, in which safetensors file.

Only headers are read. What is missing, cut short or malformed is named in a CheckpointError.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import msgspec

from omni_bus.errors import CheckpointError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
MAX_HEADER_BYTES = 100 << 20  # what the safetensors format allows
# The name of a matrix of one expert.
EXPERT = re.compile(r"(?P<layer>.*\.experts)\.(?P<expert>\d+)\.(?P<part>gate|up|down)_proj\.weight")
HUB_FILES = ["*.json", "*.jinja", "*.safetensors", "*.txt"]
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


class TensorEntry(msgspec.Struct, frozen=True):
    """Where one tensor lies."""

    name: str
    file: pathlib.Path
    dtype: str  # as safetensors spells it: "F32", "BF16"
    shape: tuple[int, ...]


class CheckpointFiles:
    """A checkpoint directory, by path or by hub id (then from the local cache, downloaded if the hub can be reached)."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.directory = resolve(path)
        self._entries: dict[pathlib.Path, dict[str, TensorEntry]] = {}
        self._weight_map = self._read_weight_map()

    def json(self, name: str) -> dict[str, Any]:
        """A JSON object of the directory."""
        return _read_json(self.directory / name)

    def names(self, prefix: str = "") -> list[str]:
        """Tensors whose names start with `prefix`, sorted."""
        return sorted(name for name in self._weight_map if name.startswith(prefix))

    def entries(self, prefix: str = "") -> Iterator[TensorEntry]:
        """The same with file, dtype and shape, file by file; CheckpointError if the index names a tensor that its file lacks."""
        for name in sorted(self.names(prefix), key=lambda name: (self._weight_map[name], name)):
            yield self.entry(name)

    def entry(self, name: str) -> TensorEntry:
        if name not in self._weight_map:
            raise CheckpointError(f"{self.directory} lacks tensor {name}")
        file = self._weight_map[name]
        if file not in self._entries:
            self._entries[file] = {entry.name: entry for entry in read_header(file)}
        if name not in self._entries[file]:
            raise CheckpointError(f"{file} lacks tensor {name}, which {INDEX_FILE} says it holds; fetch the checkpoint again")
        return self._entries[file][name]

    def _read_weight_map(self) -> dict[str, pathlib.Path]:
        index, single = self.directory / INDEX_FILE, self.directory / SINGLE_FILE
        if not index.exists():
            if not single.is_file():
                raise CheckpointError(f"{self.directory} holds neither {SINGLE_FILE} nor {INDEX_FILE}")
            self._entries[single] = {entry.name: entry for entry in read_header(single)}
            return dict.fromkeys(self._entries[single], single)
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index} has no weight_map")
        files: dict[str, pathlib.Path] = {}
        for name, file in weight_map.items():
            if not isinstance(file, str) or pathlib.PurePath(file).name != file:
                raise CheckpointError(f"{index} sends tensor {name} to {file!r}, which is not a file name")
            files[name] = self.directory / file
        for path in sorted(set(files.values())):
            if not path.is_file():
                raise CheckpointError(f"{path} is missing, but {INDEX_FILE} names it; fetch the checkpoint again")
        return files


def resolve(path: str | os.PathLike[str]) -> pathlib.Path:
    """The checkpoint's directory. A hub id ("owner/name") is looked up in huggingface_hub's cache, then fetched."""
    text, directory = os.fspath(path), pathlib.Path(path)
    if not text:
        raise CheckpointError("no checkpoint is named; say --set model.path=DIR, or a hub id in its place")
    if directory.is_dir():
        return directory
    if directory.exists():
        raise CheckpointError(f"{text} is a file; model.path names a checkpoint directory or a hub id")
    if text.startswith((".", "/", "~")) or text.count("/") != 1:
        raise CheckpointError(f"there is no directory {text}")
    return _from_hub(text)


def _from_hub(repository: str) -> pathlib.Path:
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return pathlib.Path(huggingface_hub.snapshot_download(repository, allow_patterns=HUB_FILES))
    except HFValidationError as error:
        raise CheckpointError(f"{repository} is neither a directory nor a hub id") from error
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"{repository} is not a directory, not in the local hub cache, and the hub cannot be reached; name a directory"
        ) from error
    except OSError as error:  # no such repository, no access, no disk space
        raise CheckpointError(f"the hub does not give {repository}: {type(error).__name__}; name a directory") from error


def read_header(file: pathlib.Path) -> list[TensorEntry]:
    """The tensors of one safetensors file: 8 bytes of length, that much JSON, then the data, which must be there in full."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            size = file.stat().st_size
            if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
                raise CheckpointError(f"{file} is not a safetensors file, or is cut short; fetch it again")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        entries, end = [], 0
        for name, said in header.items():
            start, stop = said["data_offsets"]
            entry = TensorEntry(name, file, str(said["dtype"]), tuple(int(n) for n in said["shape"]))
            wanted = math.prod(entry.shape) * ITEM_BYTES.get(entry.dtype, 0)
            if wanted and stop - start != wanted:
                raise CheckpointError(
                    f"{file}: tensor {name} has {stop - start} bytes for shape {list(entry.shape)} of {entry.dtype}"
                )
            entries.append(entry)
            end = max(end, stop)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{file} has a malformed safetensors header; fetch it again") from error
    if size < 8 + length + end:
        raise CheckpointError(f"{file} is cut short: {size} bytes of {8 + length + end}; fetch it again")
    return entries


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return content
