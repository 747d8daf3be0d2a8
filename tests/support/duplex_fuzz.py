"""Random messages of the duplex protocol: valid ones, the same with something wrong, and what is no message at all. Seeded."""

from __future__ import annotations

import json
from typing import Any

from tests.support.duplex_socket import AUDIO, CONTROL, EVENT, HELLO, TEXT
from tests.support.realtime_fuzz import Frame, Fuzz

CONTROLS = ("commit", "clear", "cancel", "played", "update", "ping")


class DuplexFuzz(Fuzz):
    """An endless source of messages; `known`: ids of answers that the server has named."""

    def message(self) -> Frame:
        dice = self.dice
        kind = dice.choices((HELLO, AUDIO, TEXT, CONTROL, EVENT, dice.randrange(5, 256)), (5, 25, 10, 50, 3, 4))[0]
        if dice.random() < 0.03:
            return dice.choice((b"", self._text(), dice.randbytes(dice.choice((1, 100, 5000)))))
        return bytes([kind]) + self._body(kind)

    def _body(self, kind: int) -> bytes:
        dice = self.dice
        if kind == AUDIO:
            size = dice.randrange(0, 2400) * 2 + (dice.random() < 0.1)
            return dice.choice((bytes(size), dice.randbytes(size)))
        if kind == TEXT:
            return dice.choice((self._text().encode(), self._text().encode(), dice.randbytes(20)))
        text = dice.choices((self._valid_text, self._wrong_text, self._broken_text), (40, 45, 15))[0]()
        return text.encode("utf-8", "surrogatepass")

    def _valid_text(self) -> str:
        return json.dumps(self.valid())

    def _wrong_text(self) -> str:
        return self._written(self.mutated())

    def valid(self) -> dict[str, Any]:
        """A control message; with a version, which a control ignores, an update is a hello as well."""
        dice = self.dice
        kind = dice.choice(CONTROLS)
        said: dict[str, Any] = {"type": kind}
        match kind:
            case "played":
                said["ms"] = dice.choice((0, 0.5, 80, 10_000, 2**40))
                if dice.random() < 0.5:
                    said["id"] = dice.choice(self.known)
            case "ping":
                said["id"] = dice.randrange(-1000, -1)
            case "update":
                turns = (
                    None,
                    {"type": "server_vad", "silence_duration_ms": 200},
                    {"type": "semantic_vad", "eagerness": "high"},
                )
                said |= {
                    "version": 1,
                    "instructions": self._text(),
                    "output": dice.choice(("both", "audio", "text")),
                    "turn_detection": dice.choice(turns),
                    "transcripts": dice.choice((True, False)),
                    "lead_ms": dice.choice((200, 500, 60_000)),
                    "max_output_tokens": dice.choice((1, 4, 8)),
                }
        return said
