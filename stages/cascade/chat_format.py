"""SmolLM2's chat format as token ids, with functions in the Hermes form. What users type never becomes a special token."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from tokenizers import Tokenizer

from omni_bus.stages.cascade.payloads import Turn

START, END = "<|im_start|>", "<|im_end|>"


class ChatTokenizer:
    """One conversation after the other to token ids; those of user text are ordinary ones, whatever the text looks like."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.backend_tokenizer = tokenizer
        tokenizer.encode_special_tokens = True
        start, end = tokenizer.token_to_id(START), tokenizer.token_to_id(END)
        assert start is not None and end is not None
        self.start, self.end = start, end

    def text(self, text: str) -> list[int]:
        ids: list[int] = self.backend_tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def prompt(self, turns: Sequence[Turn], system_prompt: str, tools: Sequence[str] = ()) -> list[int]:
        """The conversation up to where the assistant speaks next; `system_prompt` comes first unless a system message does.

        tools: as in ChatInput. They close the system message.
        """
        line = self.text("\n")
        ids: list[int] = []
        for role, text in _messages(turns, system_prompt, tools):
            ids += [self.start, *self.text(f"{role}\n{text}"), self.end, *line]
        return [*ids, self.start, *self.text("assistant\n")]


def _messages(turns: Sequence[Turn], system_prompt: str, tools: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(role, text) of each message; results of functions are the user's, those that come together in one message."""
    if turns and turns[0].role == "system":
        system_prompt, turns = turns[0].text, turns[1:]
    yield "system", f"{system_prompt}\n\n{_tools_block(tools)}" if tools else system_prompt
    results: list[str] = []
    for turn in turns:
        if turn.role == "tool":
            results.append(f"<tool_response>\n{turn.text}\n</tool_response>")
            continue
        if results:
            yield "user", "\n".join(results)
            results = []
        yield turn.role, "\n".join((*((turn.text,) if turn.text or not turn.tool_calls else ()), *_calls(turn)))
    if results:
        yield "user", "\n".join(results)


def _calls(turn: Turn) -> Iterator[str]:
    for call in turn.tool_calls:
        name = json.dumps(call.name, ensure_ascii=False)
        yield f'<tool_call>\n{{"name": {name}, "arguments": {call.arguments}}}\n</tool_call>'


def _tools_block(tools: Sequence[str]) -> str:
    listed = "\n".join(tools)
    return (
        "You can call these functions; each line is the JSON description of one:\n"
        f"<tools>\n{listed}\n</tools>\n"
        "To call one, write a JSON object with its name and arguments, and nothing else, in this form:\n"
        '<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>'
    )
