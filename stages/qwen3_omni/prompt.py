"""Messages to prompt tokens, by the checkpoint's own chat template.

Control tokens come from the template alone. Text of users, tools and earlier turns is put in behind the template, as text: a
typed "<|im_end|>" is encoded as those ten characters, and ends no turn.
"""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer

from omni_bus.errors import CheckpointError, ModelRefused
from omni_bus.payloads import MediaPart, Message, TextPart
from omni_bus.stages.qwen3_omni.config import OmniConfig
from omni_bus.stages.qwen3_omni.json_fields import read_json

# Private-use characters mark where a text belongs in the rendered template; texts are put in afterwards, so they may hold them too.
OPEN, CLOSE = "\ue0f0", "\ue0f1"
MARK = re.compile(f"{OPEN}([0-9]+){CLOSE}")


class PromptEncoder:
    def __init__(self, directory: pathlib.Path, config: OmniConfig) -> None:
        """Reads tokenizer and template; CheckpointError where they are missing or end a prompt in another way than the Talker needs."""
        self.config = config
        self._tokenizer = load_tokenizer(directory)
        state = json.loads(self._tokenizer.backend_tokenizer.to_str())
        control = {token["content"]: int(token["id"]) for token in state["added_tokens"]}
        self._control = control
        self._split = re.compile("(" + "|".join(re.escape(token) for token in sorted(control, key=len, reverse=True)) + ")")
        # The same tokenizer without its added tokens: nothing it encodes can become one.
        state["added_tokens"] = []
        self._plain = Tokenizer.from_str(json.dumps(state))
        ids = config.ids
        probe = self.encode([Message("user", (TextPart("?"),))])
        if list(probe[-3:-1]) != [ids.im_start, ids.assistant] or ids.user not in probe:
            raise CheckpointError(
                "the checkpoint's chat template does not open the answer with '<|im_start|>assistant\\n', or the tokenizer's ids "
                "are not those of config.json; take tokenizer and config from the same checkpoint"
            )

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of the conversation and the opening of the answer, with one placeholder for each piece of media."""
        texts: list[str] = []
        conversation = [{"role": message.role, "content": _content(message, texts)} for message in messages]
        rendered: str = self._tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
        ids: list[int] = []
        stretch = ""  # text between two control tokens is encoded as one, whether template or message wrote it
        for index, piece in enumerate(MARK.split(rendered)):
            if index % 2:
                stretch += texts[int(piece)]
                continue
            for part in self._split.split(piece):
                token = self._control.get(part)
                if token is None:
                    stretch += part
                    continue
                ids += self._encode_plain(stretch)
                ids.append(token)
                stretch = ""
        return ids + self._encode_plain(stretch)

    def _encode_plain(self, text: str) -> list[int]:
        if not text:
            return []
        ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
        return ids


def expand(token_ids: Sequence[int], lengths: dict[int, list[int]]) -> list[int]:
    """Every placeholder repeated to its media's length; `lengths`: placeholder id → tokens of each, in order."""
    queues = {token: iter(counts) for token, counts in lengths.items()}
    expanded: list[int] = []
    for token in token_ids:
        if token in queues:
            expanded.extend([token] * next(queues[token]))
        else:
            expanded.append(token)
    return expanded


def _content(message: Message, texts: list[str]) -> str | list[dict[str, str]]:
    """A message's content for the template, texts replaced by marks. Plain text is one string, as every template takes it."""
    if not any(isinstance(part, MediaPart) or part.text for part in message.parts):
        raise ModelRefused(f"a {message.role} message has no content; give it text or media", param="messages")
    if all(isinstance(part, TextPart) for part in message.parts):
        return "".join(_mark(part, texts) for part in message.parts if isinstance(part, TextPart))
    return [
        {"type": "text", "text": _mark(part, texts)}
        if isinstance(part, TextPart)
        else {"type": part.kind, part.kind: part.kind}
        for part in message.parts
    ]


def _mark(part: TextPart, texts: list[str]) -> str:
    texts.append(part.text)
    return f"{OPEN}{len(texts) - 1}{CLOSE}"


def load_tokenizer(directory: pathlib.Path) -> Any:
    """transformers' tokenizer of the checkpoint, with its chat template; CheckpointError where either is missing."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"the tokenizer in {directory} cannot be read ({error}); give the whole checkpoint") from error
    legacy = directory / "chat_template.json"
    if tokenizer.chat_template is None and legacy.is_file():
        tokenizer.chat_template = read_json(legacy)["chat_template"]
    if tokenizer.chat_template is None:
        raise CheckpointError(
            f"{directory} has no chat template (chat_template.jinja, chat_template.json or tokenizer_config.json)"
        )
    return tokenizer
