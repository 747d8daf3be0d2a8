"""The one token id that the Talker asks the tokenizer for, read without transformers: importing that takes longer than the Talker's load."""

from __future__ import annotations

import pathlib

from tokenizers import Tokenizer

from omni_bus.errors import CheckpointError
from omni_bus.stages.qwen3_omni.json_fields import read_json

SPELLED = "Ċ"  # "\n" in byte-level BPE


def token_id_of_line_end(directory: pathlib.Path) -> int:
    """The id of "\\n", which stands between the role and the answer. CheckpointError where the tokenizer's files do not tell it."""
    if not (directory / "tokenizer.json").is_file():
        found = read_json(directory / "vocab.json").get(SPELLED)
        if not isinstance(found, int):
            raise CheckpointError(f"{directory / 'vocab.json'} has no token for the line end; give the whole checkpoint")
        return found
    try:
        ids = Tokenizer.from_file(str(directory / "tokenizer.json")).encode("\n", add_special_tokens=False).ids
    except Exception as error:  # the tokenizers library raises no narrower type
        raise CheckpointError(f"the tokenizer in {directory} cannot be read ({error}); give the whole checkpoint") from error
    return int(ids[0])
