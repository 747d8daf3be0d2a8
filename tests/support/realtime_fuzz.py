"""Random client events of the Realtime protocol: valid ones, the same with something wrong, and what is no event at all. Seeded."""

from __future__ import annotations

import base64
import copy
import json
import random
from collections.abc import Callable
from typing import Any

Frame = str | bytes  # a text or a binary message

PNG = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
WORDS = ("hello", "Paris", "", " ", "é☃", "\u0000", "a" * 300, "<tool_call>", "</tool_call>", "<|im_end|>", "!")
TYPES = (
    "session.update",
    "input_audio_buffer.append",
    "input_audio_buffer.commit",
    "input_audio_buffer.clear",
    "output_audio_buffer.clear",
    "conversation.item.create",
    "conversation.item.retrieve",
    "conversation.item.truncate",
    "conversation.item.delete",
    "response.create",
    "response.cancel",
)


class Fuzz:
    """An endless source of messages. `known`: ids of items and responses that the server has named, which some events then name."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.known: list[str] = ["root", "item_none"]
        self._kinds: tuple[tuple[int, Callable[[], Frame]], ...] = (
            (35, lambda: json.dumps(self.valid())),
            (50, lambda: self._written(self.mutated())),
            (8, self._broken_text),
            (4, lambda: json.dumps(self._value(0))),
            (3, lambda: self.dice.randbytes(self.dice.choice((0, 1, 100, 5000)))),
        )

    def message(self) -> Frame:
        weights, makers = zip(*self._kinds, strict=True)
        return self.dice.choices(makers, weights)[0]()

    # ---- valid events

    def valid(self) -> dict[str, Any]:
        pick = self.dice.choice
        kind = pick(TYPES)
        event: dict[str, Any] = {"type": kind}
        if self.dice.random() < 0.5:
            event["event_id"] = f"event_{self.dice.randrange(1000)}"
        match kind:
            case "session.update":
                event["session"] = self._session()
            case "input_audio_buffer.append":
                event["audio"] = self._audio()
            case "conversation.item.create":
                event["item"] = self._item()
                if self.dice.random() < 0.3:
                    event["previous_item_id"] = pick(self.known)
            case "conversation.item.retrieve" | "conversation.item.delete":
                event["item_id"] = pick(self.known)
            case "conversation.item.truncate":
                event |= {"item_id": pick(self.known), "content_index": 0, "audio_end_ms": self.dice.randrange(0, 400)}
            case "response.create":
                event["response"] = self._response()
            case "response.cancel":
                if self.dice.random() < 0.3:
                    event["response_id"] = pick(self.known)
        return event

    def _text(self) -> str:
        return " ".join(self.dice.choices(WORDS, k=self.dice.randrange(1, 4)))

    def _audio(self) -> str:
        """0 to 100 ms of noise or silence."""
        size = self.dice.randrange(0, 2400) * 2
        return base64.b64encode(self.dice.choice((bytes(size), self.dice.randbytes(size)))).decode()

    def _session(self) -> dict[str, Any]:
        pick = self.dice.choice
        turn = pick(
            (
                None,
                {"type": "server_vad", "threshold": 0.5, "prefix_padding_ms": 300, "silence_duration_ms": pick((100, 500))},
                {"type": "server_vad", "create_response": pick((True, False)), "interrupt_response": pick((True, False))},
                {"type": "semantic_vad", "eagerness": pick(("low", "medium", "high", "auto"))},
            )
        )
        form = pick(({"type": "audio/pcm", "rate": 24000}, {"type": "audio/pcmu"}, {"type": "audio/pcma"}))
        return {
            "type": "realtime",
            "instructions": self._text(),
            "output_modalities": pick((["text"], ["audio"])),
            "max_output_tokens": pick((1, 4, 8)),
            "audio": {
                "input": {"format": form, "turn_detection": turn, "transcription": pick((None, {"model": "whisper-1"}))},
                "output": {"format": form, "speed": pick((0.25, 1.0, 1.5))},
            },
            "tools": pick(([], [self._tool()])),
            "tool_choice": pick(("auto", "none", "required")),
        }

    def _tool(self) -> dict[str, Any]:
        return {
            "type": "function",
            "name": "f",
            "description": self._text(),
            "parameters": {"type": "object", "properties": {}},
        }

    def _item(self) -> dict[str, Any]:
        pick = self.dice.choice
        item = copy.deepcopy(
            pick(
                (
                    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": self._text()}]},
                    {"type": "message", "role": "system", "content": [{"type": "input_text", "text": self._text()}]},
                    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": self._text()}]},
                    {"type": "message", "role": "user", "content": [{"type": "input_audio", "audio": self._audio()}]},
                    {"type": "message", "role": "user", "content": [{"type": "input_image", "image_url": PNG}]},
                    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "c", "output": self._text()},
                )
            )
        )
        if self.dice.random() < 0.3:
            item["id"] = f"mine_{self.dice.randrange(200)}"
            self.known.append(item["id"])
            del self.known[2:-500]
        return item

    def _response(self) -> dict[str, Any]:
        pick = self.dice.choice
        response: dict[str, Any] = {"max_output_tokens": pick((1, 3)), "output_modalities": pick((["text"], ["audio"]))}
        if self.dice.random() < 0.3:
            response |= {"conversation": "none", "metadata": {"topic": self._text()}, "input": [self._item()]}
        if self.dice.random() < 0.2:
            response["instructions"] = self._text()
        return response

    # ---- the same with something wrong

    def mutated(self) -> Any:
        """A valid event with one to three values dropped, doubled, renamed, wrapped or replaced, at any depth."""
        event: Any = self.valid()
        for _ in range(self.dice.randrange(1, 4)):
            places = list(_places(event))
            if not places:
                break
            holder, key = self.dice.choice(places)
            match self.dice.randrange(6):
                case 0:
                    del holder[key]
                case 1 if isinstance(holder, dict):
                    holder[f"{key}{self.dice.choice('sX_ ')}"] = holder.pop(key)
                case 2:
                    holder[key] = [holder[key]]
                case 3 if isinstance(holder[key], str) and holder[key]:
                    at = self.dice.randrange(len(holder[key]))
                    holder[key] = (
                        holder[key][:at] + self.dice.choice(("\ud800", "*", "\x7f", "=", "é", "")) + holder[key][at + 1 :]
                    )
                case 4:
                    holder[key] = {"type": holder[key]}
                case _:
                    holder[key] = self._value(0)
        return event

    def _value(self, depth: int) -> Any:
        dice = self.dice
        simple = (
            None,
            True,
            False,
            0,
            -1,
            1,
            2**31,
            2**63,
            -(2**70),
            0.5,
            -0.0,
            1e308,
            "",
            "x",
            "\ud800",
            "item_none",
            "A" * 5000,
        )
        if depth < 3 and dice.random() < 0.25:
            return [self._value(depth + 1) for _ in range(dice.randrange(4))]
        if depth < 3 and dice.random() < 0.25:
            return {dice.choice(("type", "id", "text", "x", "")): self._value(depth + 1) for _ in range(dice.randrange(4))}
        if dice.random() < 0.01:
            return "AAAA" * dice.choice((10_000, 250_000))
        return dice.choice(simple)

    def _written(self, event: Any) -> str:
        text = json.dumps(event)
        return text.replace("0.5", self.dice.choice(("NaN", "Infinity", "1e999")), 1) if self.dice.random() < 0.05 else text

    # ---- no event at all

    def _broken_text(self) -> str:
        text = json.dumps(self.valid())
        at = self.dice.randrange(len(text))
        depth = self.dice.choice((50, 2_000, 100_000))
        return self.dice.choice(
            (
                text[:at],
                text[at:],
                text[:at] + self.dice.choice('{}[]",:\\') + text[at:],
                text + text,
                "[" * depth,
                "[" * depth + "]" * depth,
                '{"type":' * depth + "1" + "}" * depth,
                '{"type":"session.update","session":' + '{"audio":' * depth + "1" + "}" * depth + "}",
                "",
                " ",
                "null",
            )
        )


def _places(value: Any) -> Any:
    """Every (holder, key) in a value, at any depth."""
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in list(keys):
        yield value, key
        yield from _places(value[key])
