"""Text of a token stream: incremental detokenisation, and stop strings decided before a token is released.

For every split of the output, the released text is what `tokenizer.decode(ids, skip_special_tokens=True)` gives for all ids,
without a half character on the way. The work per token does not grow with the output.
"""

from __future__ import annotations

import codecs
import dataclasses
import json
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from omni_bus.errors import CheckpointError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class FastTokenizer(Protocol):
    """A transformers tokenizer backed by the `tokenizers` library."""

    @property
    def backend_tokenizer(self) -> Tokenizer: ...


class TokenDecoder(Protocol):
    """Turns token strings into text piece by piece; what is not yet decided stays inside."""

    pending: bool  # whether the last token's text is still incomplete
    resolved: int  # characters of what `push` returned that belong to earlier tokens, which were incomplete until then

    def push(self, token: str) -> str: ...

    def flush(self) -> str: ...


def _byte_of_character() -> dict[str, int]:
    """Byte-level BPE writes each byte as one printable character: itself where it is printable Latin-1, else the next of U+0100 …"""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()


class ByteLevelDecoder:
    """Byte-level BPE: the bytes of all tokens are one UTF-8 stream. A token with any other character stands for itself."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self.pending = False
        self.resolved = 0

    def push(self, token: str) -> str:
        try:
            data = bytes([_BYTE_OF_CHARACTER[character] for character in token])
        except KeyError:
            data = token.encode()
        text = self._utf8.decode(data)
        self.resolved = int(self.pending and bool(text))  # an incomplete character becomes one character, good or U+FFFD
        self.pending = bool(self._utf8.getstate()[0])
        return text

    def flush(self) -> str:
        self.pending = False
        return self._utf8.decode(b"", final=True)


class ByteFallbackDecoder:
    """SentencePiece style: tokens are text, with tokens `<0xE2>` for bytes that have none. A run of byte tokens is text if the
    whole run is UTF-8, else one U+FFFD a byte, so it is decided when the run has ended."""

    def __init__(self, replacements: Sequence[tuple[str, str]], stripped: str) -> None:
        self._replacements = replacements
        self._stripped = stripped  # one leading occurrence is dropped from the whole text; "" = none
        self._run = bytearray()
        self.pending = False
        self.resolved = 0

    def push(self, token: str) -> str:
        for old, new in self._replacements:
            token = token.replace(old, new)
        byte = _byte_token(token)
        self.pending = byte is not None
        if byte is not None:
            self._run.append(byte)
            self.resolved = 0
            return ""
        run = self._end_run()
        text = self._strip(run + token)
        self.resolved = len(text) - len(token) if run else 0
        return text

    def flush(self) -> str:
        self.pending = False
        return self._strip(self._end_run())

    def _end_run(self) -> str:
        try:
            text = self._run.decode()
        except UnicodeDecodeError:
            text = "\N{REPLACEMENT CHARACTER}" * len(self._run)
        self._run.clear()
        return text

    def _strip(self, text: str) -> str:
        if text and self._stripped:
            text = text.removeprefix(self._stripped)
            self._stripped = ""
        return text


def _byte_token(token: str) -> int | None:
    if len(token) != 6 or not token.startswith("<0x") or not token.endswith(">"):
        return None
    try:
        return int(token[3:5], 16)
    except ValueError:
        return None


def token_decoder(backend: Tokenizer) -> TokenDecoder:
    """A fresh decoder that does what the tokenizer's own does. CheckpointError for a kind that cannot be decoded in pieces."""
    decoder = backend.decoder
    state: dict[str, Any] = {} if decoder is None else json.loads(decoder.__getstate__())
    steps = state["decoders"] if state.get("type") == "Sequence" else [state]
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return ByteLevelDecoder()
    if "ByteFallback" in kinds and kinds == [
        *["Replace"] * kinds.index("ByteFallback"),
        "ByteFallback",
        "Fuse",
        *["Strip"] * kinds.count("Strip"),
    ]:
        strips = [step for step in steps if step["type"] == "Strip"]
        if len(strips) <= 1 and all(step["start"] <= 1 and step["stop"] == 0 for step in strips):
            replacements = [(step["pattern"]["String"], step["content"]) for step in steps if step["type"] == "Replace"]
            return ByteFallbackDecoder(replacements, "".join(step["content"] for step in strips if step["start"]))
    raise CheckpointError("the tokenizer must be byte-level BPE or have byte fallback; its decoder is of another kind")


@dataclasses.dataclass(frozen=True, slots=True)
class Release:
    """What may leave now. `stopped`: a stop string was met; the text before it is in `text`, and nothing comes after."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    stopped: bool = False


@dataclasses.dataclass(slots=True)
class _HeldToken:
    id: int
    end: int | None  # characters of text up to the end of this token; None while its last character is incomplete


class TextStream:
    """One output's text. Without stop strings token ids are released at once, and text as soon as its characters are whole.

    With stop strings, text that may be the beginning of one is held back, and so are the ids of the tokens it belongs to. An id
    is released when all its text is, so one that a stop string reaches into never is.
    """

    def __init__(self, tokenizer: FastTokenizer, stop: Sequence[str] = ()) -> None:
        backend = tokenizer.backend_tokenizer
        self._backend = backend
        self._special = {id for id, token in backend.get_added_tokens_decoder().items() if token.special}
        self._decoder = token_decoder(backend)
        self._stop = tuple(stop)
        self._longest = max((len(string) for string in self._stop), default=1)
        self._held = ""
        self._released = 0  # characters
        self._tokens: deque[_HeldToken] = deque()
        self._incomplete: list[_HeldToken] = []
        self.stopped = False

    def push(self, token_id: int) -> Release:
        """The next token of the output."""
        assert not self.stopped
        token = None if token_id in self._special else self._backend.id_to_token(token_id)
        text = "" if token is None else self._decoder.push(token)
        if text:
            self._complete(self._decoder.resolved)
        self._held += text
        held = _HeldToken(token_id, self._released + len(self._held))
        self._tokens.append(held)
        if self._decoder.pending:
            held.end = None
            self._incomplete.append(held)
        return self._advance()

    def flush(self) -> Release:
        """The output has ended: all that was held back, incomplete bytes as replacement characters."""
        if self.stopped:
            return Release()
        self._held += self._decoder.flush()
        self._complete(0)
        release = self._advance()
        if not release.stopped:
            release = Release((*release.token_ids, *(token.id for token in self._tokens)), release.text + self._held)
            self._held = ""
            self._tokens.clear()
        return release

    def _complete(self, characters: int) -> None:
        """The tokens that were incomplete end so many characters behind what is held."""
        for token in self._incomplete:
            token.end = self._released + len(self._held) + characters
        self._incomplete.clear()

    def _advance(self) -> Release:
        match = self._match()
        self.stopped = match is not None
        count = len(self._held) - self._suspect() if match is None else match
        out, self._held = self._held[:count], self._held[count:]
        self._released += count
        ids = []
        while self._tokens and self._is_released(self._tokens[0]):
            ids.append(self._tokens.popleft().id)
        return Release(tuple(ids), out, self.stopped)

    def _is_released(self, token: _HeldToken) -> bool:
        return not self._stop or (token.end is not None and token.end <= self._released)

    def _match(self) -> int | None:
        """Where the stop string that ends first begins."""
        found = [(start + len(stop), start) for stop in self._stop if (start := self._held.find(stop)) >= 0]
        return min(found)[1] if found else None

    def _suspect(self) -> int:
        """How many characters at the end may be the beginning of a stop string."""
        for count in range(min(self._longest - 1, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-count:]) for stop in self._stop):
                return count
        return 0
