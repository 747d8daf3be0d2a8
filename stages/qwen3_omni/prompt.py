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

import jinja2
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from omni_bus.errors import CheckpointError, ModelRefused
from omni_bus.payloads import MediaPart, Message, TextPart
from omni_bus.stages.qwen3_omni.config import OmniConfig
from omni_bus.stages.qwen3_omni.json_fields import read_json
from omni_bus.stages.qwen3_omni.marked_texts import MarkedTexts
from omni_bus.stages.qwen3_omni.tools import marked_call, marked_tool


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
        self.opening = tuple(probe[-3:])  # of an answer

    def encode(self, messages: Sequence[Message], tools: Sequence[str] = ()) -> list[int]:
        """Token ids of the conversation and the opening of the answer, with one placeholder for each piece of media.

        `tools`: as in ChatInput. Raises InvalidRequest where one of them is no function's description, ModelRefused where the
        template has no place for a part of the conversation.
        """
        texts = MarkedTexts()
        conversation = [_message(message, texts) for message in messages]
        functions = [marked_tool(tool, texts) for tool in tools]
        try:
            rendered: str = self._tokenizer.apply_chat_template(
                conversation, tools=functions or None, add_generation_prompt=True, tokenize=False
            )
        except jinja2.TemplateError as error:
            raise ModelRefused(
                "the model's chat template does not take these messages in this order", param="messages"
            ) from error
        ids: list[int] = []
        stretch = ""  # text between two control tokens is encoded as one, whether template or message wrote it
        for piece, by_template in texts.put_in(rendered):
            if not by_template:
                stretch += piece
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

    def encode_answer(self, text: str) -> list[int]:
        """Token ids of a text that the assistant is to say; none of them is a control token."""
        return self._encode_plain(text)

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


def _message(message: Message, texts: MarkedTexts) -> dict[str, Any]:
    """A message for the template, texts replaced by marks."""
    if message.tool_calls and message.role != "assistant":
        raise ModelRefused(f"a {message.role} message cannot call tools; only one of the assistant can", param="messages")
    rendered: dict[str, Any] = {"role": message.role, "content": _content(message, texts)}
    if message.tool_calls:
        rendered["tool_calls"] = [marked_call(call, texts) for call in message.tool_calls]
    return rendered


def _content(message: Message, texts: MarkedTexts) -> str | list[dict[str, str]]:
    """Plain text is one string, as every template takes it."""
    if not any(isinstance(part, MediaPart) or part.text for part in message.parts):
        if message.tool_calls or message.role == "tool":  # a call says nothing, and a function may return nothing
            return ""
        raise ModelRefused(f"a {message.role} message has no content; give it text or media", param="messages")
    if all(isinstance(part, TextPart) for part in message.parts):
        return "".join(texts.mark(part.text) for part in message.parts if isinstance(part, TextPart))
    return [
        {"type": "text", "text": texts.mark(part.text)}
        if isinstance(part, TextPart)
        else {"type": part.kind, part.kind: part.kind}
        for part in message.parts
    ]


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
