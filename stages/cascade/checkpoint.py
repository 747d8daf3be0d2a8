"""SmolLM2 from the GGUF file of its package as a checkpoint in the Hugging Face layout, made once in the user's cache directory.

The directory's name holds the hash of the source, so another source or another layout version gets another directory; it
appears whole by one rename, so whoever sees it may read it. A lock spares two processes that start together the double work.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable
from typing import Any

import gguf
import numpy
import torch
from safetensors.torch import save_file

LAYOUT = 1  # another number for another content of the directory
TOKEN_TYPE_CONTROL = 3  # llama.cpp's token type of special tokens

# GGUF tensor name → Hugging Face name, inside one layer
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def cache_root() -> pathlib.Path:
    """$XDG_CACHE_HOME/omni-bus, or ~/.cache/omni-bus."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return pathlib.Path(base) / "omni-bus"


def converted(source: pathlib.Path, root: pathlib.Path, progress: Callable[[float, str], None]) -> pathlib.Path:
    """The checkpoint directory for the GGUF file `source`, converted now if it is not there yet.

    Holds config.json, model.safetensors (bfloat16) and tokenizer.json.
    """
    with source.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    target = root / f"{source.stem}-{digest[:16]}-v{LAYOUT}"
    if target.is_dir():
        return target
    root.mkdir(parents=True, exist_ok=True)
    with (root / "convert.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_dir():
            for left in root.glob("converting-*"):  # of a process that died; nobody else converts while we hold the lock
                shutil.rmtree(left, ignore_errors=True)
            made = pathlib.Path(tempfile.mkdtemp(prefix="converting-", dir=root))
            try:
                _convert(source, made, progress)
                made.rename(target)
            finally:
                shutil.rmtree(made, ignore_errors=True)
    return target


def _convert(source: pathlib.Path, target: pathlib.Path, progress: Callable[[float, str], None]) -> None:
    reader = gguf.GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = _config(fields)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights: dict[str, torch.Tensor] = {}
    for done, tensor in enumerate(reader.tensors):
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(numpy.float32, copy=False)
        name, kind = _names(tensor.name)
        if kind in heads:
            values = _unpermuted(values, heads[kind])
        weights[name] = torch.tensor(values).to(torch.bfloat16)
        progress(done / len(reader.tensors), "converting SmolLM2, once")
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(config, indent=1))
    (target / "tokenizer.json").write_text(json.dumps(_tokenizer(fields), ensure_ascii=False), encoding="utf-8")


def _names(name: str) -> tuple[str, str]:
    """GGUF tensor name → (Hugging Face name, kind)."""
    if name.startswith("blk."):
        _, layer, kind, suffix = name.split(".")
        return f"model.layers.{layer}.{_LAYER_NAMES[kind]}.{suffix}", kind
    kind, suffix = name.split(".")
    return f"{_TOP_NAMES[kind]}.{suffix}", kind


def _unpermuted(values: numpy.ndarray[Any, Any], heads: int) -> numpy.ndarray[Any, Any]:
    """[heads · d, in] from llama.cpp's order of rotary pairs (2i, 2i+1) into the halves (i, i + d/2) that the decoder rotates."""
    rows, columns = values.shape
    return values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _config(fields: dict[str, Any]) -> dict[str, Any]:
    """Hugging Face's LlamaConfig from the GGUF's metadata."""
    heads = fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.embedding_length"] // heads,
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": round(fields["llama.attention.layer_norm_rms_epsilon"], 12),
        "rope_theta": fields["llama.rope.freq_base"],
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "dtype": "bfloat16",
    }


def _tokenizer(fields: dict[str, Any]) -> dict[str, Any]:
    """The content of tokenizer.json: byte-level BPE that splits every digit off (llama.cpp's pre-tokeniser "smollm")."""
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    special = [index for index, kind in enumerate(fields["tokenizer.ggml.token_type"]) if kind == TOKEN_TYPE_CONTROL]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": index,
                "content": tokens[index],
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for index in special
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]],
        },
    }
