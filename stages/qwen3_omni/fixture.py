"""Writes a random Qwen3-Omni checkpoint in the Hugging Face layout: `omni-bus fixture qwen3-omni DIR`.

Each tensor has a generator of its own, seeded by (seed, name): the same size and seed give the same bytes, in whatever order or
number of threads they are made. Shards are made and written one at a time, so memory stays at about twice a shard (7 GB).
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import Tokenizer

from omni_bus.errors import CheckpointError, ConfigError
from omni_bus.names import did_you_mean
from omni_bus.stages.qwen3_omni import fixture_config, tokenizer
from omni_bus.stages.qwen3_omni.fixture_tensors import TensorSpec, tensor_specs
from omni_bus.stages.qwen3_omni.random_weights import draw

SIZES = ("tiny", "full")
SHARD_BYTES = 3 << 30
FREE_MARGIN_BYTES = 256 << 20  # for tokenizer files and the file system
INDEX_FILE = "model.safetensors.index.json"
Progress = Callable[[float, str], None]  # (fraction 0..1, what is being done)


def write(
    directory: pathlib.Path,
    size: str,
    seed: int,
    progress: Progress,
    *,
    spelling: Literal["hub", "transformers"] = "hub",
    shard_bytes: int = SHARD_BYTES,
    weights: bool = True,
    vocabulary: str | None = None,
) -> None:
    """Write the checkpoint of `size` ("tiny": 8 MB, float32; "full": 71 GB, bfloat16) into `directory`, made if it is missing.

    `spelling` is how config.json names rope and experts. Without `weights` only the configuration and tokenizer files are written, for
    stages that say `load = "random"`. `vocabulary`: "qwen" or "tiny", of the full size; "tiny" keeps the full one's ids. Raises ConfigError for an unknown size, CheckpointError where the vocabulary
    or the disk space is missing or the directory holds a checkpoint already.
    """
    if size not in SIZES:
        raise ConfigError(f"unknown size {size!r}{did_you_mean(size, list(SIZES))}; sizes are {', '.join(SIZES)}")
    words, merges = _vocabulary(size, vocabulary)
    token_id = _token_ids(tokenizer.build(words, merges))
    if size == "full":
        config = fixture_config.full(token_id)
    else:
        used = len(words) + len(tokenizer.SPECIALS)
        config = fixture_config.tiny(token_id, vocab_size=-(-used // 64) * 64)
    dtype: torch.dtype = getattr(torch, config["dtype"])
    shards = list(_shards(tensor_specs(config), dtype.itemsize, shard_bytes))
    total = sum(spec.count for shard in shards for spec in shard)
    _prepare(directory, total * dtype.itemsize if weights else 0)

    tokenizer.write(directory, words, merges)
    _write_json(directory / "config.json", config if spelling == "hub" else fixture_config.respelled(config))
    _write_json(directory / "generation_config.json", fixture_config.generation_config(config, token_id))
    _write_json(directory / "preprocessor_config.json", fixture_config.preprocessor_config())
    if not weights:
        progress(1.0, f"wrote the files of a model of {total / 1e6:,.1f} M parameters, without them, to {directory}")
        return

    done = 0
    weight_map: dict[str, str] = {}
    with concurrent.futures.ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        for index, shard in enumerate(shards, start=1):
            name = "model.safetensors" if len(shards) == 1 else f"model-{index:05}-of-{len(shards):05}.safetensors"
            progress(done / total, f"writing {name}")
            tensors = dict(zip((s.name for s in shard), pool.map(lambda spec: make(spec, seed, dtype), shard), strict=True))
            try:
                save_file(tensors, directory / name, metadata={"format": "pt"})
            except SafetensorError as error:
                raise CheckpointError(f"{directory / name} cannot be written: {error}") from error
            done += sum(spec.count for spec in shard)
            weight_map |= dict.fromkeys(tensors, name)
            del tensors
    if len(shards) > 1:
        _write_json(directory / INDEX_FILE, {"metadata": {"total_size": total * dtype.itemsize}, "weight_map": weight_map})
    progress(1.0, f"wrote {total / 1e6:,.1f} M parameters to {directory}")


def make(spec: TensorSpec, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """The tensor of (spec, seed), drawn in float32 whatever `dtype` is."""
    return draw(spec, seed, torch.Generator()).to(dtype)


def _vocabulary(size: str, said: str | None) -> tuple[tokenizer.Vocabulary, tokenizer.Merges]:
    if said not in (None, "qwen", "tiny"):
        raise ConfigError(f"unknown tokenizer {said!r}{did_you_mean(said, ['qwen', 'tiny'])}")
    if size == "tiny":
        if said == "qwen":
            raise ConfigError("the tiny size has the tiny tokenizer; Qwen's belongs to the full one")
        return tokenizer.tiny_vocabulary()
    return tokenizer.padded_vocabulary() if said == "tiny" else tokenizer.full_vocabulary(tokenizer.find_rank_file())


def _token_ids(built: Tokenizer) -> fixture_config.TokenId:
    def token_id(token: str) -> int:
        found: int | None = built.token_to_id(token)
        assert found is not None, token
        return found

    return token_id


def _shards(specs: Iterator[TensorSpec], itemsize: int, limit: int) -> Iterator[Sequence[TensorSpec]]:
    shard: list[TensorSpec] = []
    room = limit
    for spec in specs:
        if shard and spec.count * itemsize > room:
            yield shard
            shard, room = [], limit
        shard.append(spec)
        room -= spec.count * itemsize
    yield shard


def _prepare(directory: pathlib.Path, needed: int) -> None:
    if directory.exists() and not directory.is_dir():
        raise CheckpointError(f"{directory} is a file; name a directory")
    if directory.is_dir() and any(directory.glob("*.safetensors*")):
        raise CheckpointError(f"{directory} holds a checkpoint already; name an empty directory or remove it first")
    absolute = directory.absolute()
    free = shutil.disk_usage(next(path for path in (absolute, *absolute.parents) if path.exists())).free
    if free < needed + FREE_MARGIN_BYTES:
        raise CheckpointError(
            f"{directory} has {free / 1e9:.1f} GB free; the checkpoint needs {(needed + FREE_MARGIN_BYTES) / 1e9:.1f} GB"
        )
    directory.mkdir(parents=True, exist_ok=True)


def _write_json(path: pathlib.Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
