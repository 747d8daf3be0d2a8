"""A tiny Qwen3-Omni that calls a function where nothing has been told to it, and says one sentence behind a function's answer.

Everything around the Thinker's weights is the random checkpoint's. Each text that it can say is cut into tokens of its own, and the
output row of a token is the embedding of the token in front of it, so that what comes next depends on the newest token alone. Layers
add nothing, but for one attention head: it finds `<tool_response>` in the prompt, and that decides with what an answer begins.
"""

from __future__ import annotations

import itertools
import json
import pathlib

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer

from omni_bus.stages.qwen3_omni import fixture

CALL = ("<tool_call>", '\n{"name": "', "get_weather", '", "arguments": ', '{"city": "', "Paris", '"}}\n', "</tool_call>")
ANSWER = ("It is", " sunny", " and 21", " degrees.")
SENTENCE = "".join(ANSWER)
_TEXTS = (*CALL[1:-1], *ANSWER)
ARGUMENTS = '{"city": "Paris"}'

_EVER, _TOLD, _ASKED = 61, 62, 63  # of 64 hidden values: 1 for every token; set by the head; 1 for <tool_response>
_SLOWEST = 15  # the first value of the pair in a head that positions turn least
_SURE = 4.0  # how far apart scores are


def write(directory: pathlib.Path) -> None:
    """The checkpoint, in a directory that does not exist yet."""
    fixture.write(directory, "tiny", 2, lambda fraction, detail: None)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in _TEXTS])
    tokenizer.save(str(directory / "tokenizer.json"))
    said = directory / "tokenizer_config.json"  # the tokenizer's loader takes them from here
    config = json.loads(said.read_text())
    config["added_tokens_decoder"] |= {
        str(tokenizer.token_to_id(text)): {"content": text, "normalized": False, "special": False} for text in _TEXTS
    }
    said.write_text(json.dumps(config))

    def token(text: str) -> int:
        (found,) = tokenizer.encode(text, add_special_tokens=False).ids
        return int(found)

    path = directory / "model.safetensors"
    tensors = load_file(path)
    embeddings = tensors["thinker.model.embed_tokens.weight"]
    embeddings.copy_(torch.randn(embeddings.shape, generator=torch.Generator().manual_seed(1)).sign())
    embeddings[:, _EVER:] = 0
    embeddings[:, _EVER] = 1
    embeddings[token("<tool_response>"), _ASKED] = 8  # louder than the rest of its row
    for name in ("weight", "bias"):  # a sound is no answer of a function
        tensors[f"thinker.audio_tower.proj2.{name}"][_TOLD:] = 0
    _let_one_head_look(tensors)

    head = tensors["thinker.lm_head.weight"]
    head.zero_()
    newline, end = token("\n"), token("<|im_end|>")
    for text in (CALL, ANSWER):
        ids = [newline, *map(token, text), end]
        for before, after in itertools.pairwise(ids):
            head[after, :_EVER] += _SURE * embeddings[before, :_EVER]
    begins = token(ANSWER[0])
    head[begins] *= 0.9  # the call has the better score, unless the head adds to this one
    head[begins, _TOLD] = _SURE * 3
    save_file(tensors, path, metadata={"format": "pt"})


def _let_one_head_look(tensors: dict[str, torch.Tensor]) -> None:
    """Queries, keys and values of head 0 in layer 0; all other parts of the layers give nothing."""
    for name, tensor in tensors.items():
        if name.startswith("thinker.model.layers.") and name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    first = "thinker.model.layers.0.self_attn."
    for name, source in (("q", _EVER), ("k", _ASKED), ("v", _ASKED)):
        projection = tensors[f"{first}{name}_proj.weight"]
        projection.zero_()
        projection[_SLOWEST, source] = 1
        if name != "v":
            tensors[f"{first}{name}_norm.weight"].fill_(3)
    tensors[f"{first}o_proj.weight"][_TOLD, _SLOWEST] = 2
    tensors["thinker.model.layers.0.input_layernorm.weight"].fill_(1)
    tensors["thinker.model.norm.weight"].fill_(1)
