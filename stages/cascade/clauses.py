"""Cuts an answer that is still being written into clauses that can be spoken one after the other.

Speech starts on the first clause, so a clause ends as early as it can be spoken well: at the end of a sentence or line, at softer
punctuation once a few words are there, and in a long run without any, before a conjunction. Never inside a number, an abbreviation
or a word. A cut needs the character behind it (is "3." followed by "5" or by a space?), so it comes one piece of text late.
"""

from __future__ import annotations

import re

SENTENCE_ENDS = ".!?…"
SOFT_ENDS = ",;:—"
CLOSING = "\"'”’)]*_"
MIN_SOFT = 12  # characters before a cut at softer punctuation
MIN_SOFT_FIRST = 3  # the same for the first clause: the listener hears something at once
MIN_RUN = 32  # characters that a cut before a conjunction leaves in front
LONG_RUN = 72  # a run without punctuation is cut from here on, before its last conjunction
MAX_RUN = 160  # and here at its last space, wherever that is

CONJUNCTION = re.compile(
    r"\s(?=(?:and|but|or|nor|so|yet|because|although|though|while|when|where|which|who|that|if|unless|until|since|as)\s)", re.I
)
ABBREVIATION = re.compile(r"mr|mrs|ms|dr|prof|st|jr|sr|vs|etc|approx|dept|est|gov|inc|ltd|corp|rev|mt", re.I)


class ClauseSplitter:
    """One answer. The clauses of `push` and `flush`, joined, are the text that went in, whatever pieces it came in."""

    def __init__(self) -> None:
        self._text = ""
        self._least = MIN_SOFT_FIRST

    def push(self, piece: str) -> list[str]:
        """More text; the clauses that are complete now."""
        clauses = []
        for character in piece:
            cut = self._cut(character)
            if cut:
                clauses.append(self._text[:cut])
                self._text = self._text[cut:]
                self._least = MIN_SOFT
            self._text += character
        return clauses

    def flush(self) -> str:
        """The answer has ended: what is left, maybe nothing."""
        rest, self._text = self._text, ""
        return rest

    def _cut(self, following: str) -> int:
        """Where to cut the text before `following` is added to it; 0 = not yet."""
        text = self._text
        words = text.strip()
        if not words or not following.isspace() or text[-1].isspace():
            return 0
        if following == "\n" or _ends_sentence(words):
            return len(text)
        if words.rstrip(CLOSING).endswith(tuple(SOFT_ENDS)) and len(words) >= self._least:
            return len(text)
        if len(text) >= LONG_RUN:
            cuts = [found.start() for found in CONJUNCTION.finditer(text) if found.start() >= MIN_RUN]
            if cuts:
                return cuts[-1]
        return len(text) if len(text) >= MAX_RUN else 0


def _ends_sentence(words: str) -> bool:
    bare = words.rstrip(CLOSING)
    if not bare.endswith(tuple(SENTENCE_ENDS)):
        return False
    if not bare.endswith(".") or bare.endswith(".."):
        return True
    word = bare.rsplit(None, 1)[-1].lstrip("\"'“‘([*_")[:-1]
    initial = len(word) == 1 and word.isalpha() and word != "I"
    numbering = bare == words and words[:-1].isdigit()  # "1." that opens a list's line
    return not (initial or numbering or "." in word or ABBREVIATION.fullmatch(word))
