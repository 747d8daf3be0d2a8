"""Which words of a spoken answer were said by a moment of its audio: by the model's marks, or by what speech takes."""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterator

from omni_bus.api.voice.items import OutputAudio

# Milliseconds that a character takes in speech at a usual pace: 150 English words a minute, or 4.5 syllables a second.
LETTER_MS = 65.0
SYLLABLE_MS = 220.0

_HAN_KANA = "\u3005-\u3007\u3040-\u30ff\u3100-\u312f\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
# Scripts without spaces between words; with Han and kana: Thai, Lao, Tibetan, Burmese, Khmer. Each letter counts as a word.
_UNSPACED = f"[{_HAN_KANA}\u0e00-\u0eff\u0f00-\u0fff\u1000-\u109f\u1780-\u17ff]"
_VOWELS_BEFORE, _VOWELS_AFTER = "[\u0e40-\u0e44\u0ec0-\u0ec4]", "[\u0e30\u0e32\u0e33\u0e45\u0eb0\u0eb2\u0eb3]"
# What is neither letter nor space (punctuation, and marks on letters, which Python counts to neither) goes with a word beside it.
_WORD = re.compile(
    rf"[^\w\s]*(?:{_VOWELS_BEFORE}?(?={_UNSPACED})\w{_VOWELS_AFTER}*[^\w\s]*|(?!{_UNSPACED})\w(?:(?!{_UNSPACED})\S)*)|[^\w\s]+"
)
_SILENT_END = re.compile(r"(?<=\w)[^\w\s]+$")
_SYLLABLE = re.compile(f"[{_HAN_KANA}\uac00-\ud7af]")


def spoken_part(part: OutputAudio, audio_end_ms: float, *, finished: bool) -> None:
    """Cut `part`, in place, to the words said when `audio_end_ms` of its audio has been played.

    finished: its audio says the whole transcript. Otherwise the text may run ahead of the audio: without marks, the length that
    the whole would have is estimated from the text.
    """
    part.transcript = whole_words(part.transcript, characters_said(part, audio_end_ms, finished=finished))
    part.marks = [(at, min(count, len(part.transcript))) for at, count in part.marks if at <= audio_end_ms]
    part.duration_ms = min(part.duration_ms, audio_end_ms)
    part.truncated = True


def characters_said(part: OutputAudio, audio_end_ms: float, *, finished: bool) -> float:
    """How many characters of the transcript have been said by then, at an even pace between two marks."""
    length = len(part.transcript)
    if audio_end_ms <= 0:
        return 0.0
    if part.marks:
        after = bisect.bisect_right(part.marks, audio_end_ms, key=lambda mark: mark[0])
        start_ms, start = part.marks[after - 1] if after else (0.0, 0)
        if after == len(part.marks):
            return min(start, length)
        end_ms, end = part.marks[after]
        return min(start + (end - start) * (audio_end_ms - start_ms) / (end_ms - start_ms), length)
    whole_ms = part.duration_ms if finished else max(part.duration_ms, estimated_ms(part.transcript))
    return length * min(audio_end_ms / whole_ms, 1.0) if whole_ms > 0 else length


def estimated_ms(text: str) -> float:
    """What it takes to say this, at a usual pace."""
    syllables = len(_SYLLABLE.findall(text))
    return syllables * SYLLABLE_MS + (len(text) - syllables) * LETTER_MS


def whole_words(text: str, said: float) -> str:
    """The words of `text` whose letters all lie within its first `said` characters, each with its punctuation."""
    end = 0
    for last_letter, word_end in _words(text):
        if last_letter > said + 0.5:  # half a character of grace: times are rounded to milliseconds on their way
            break
        end = word_end
    return text[:end]


def _words(text: str) -> Iterator[tuple[int, int]]:
    """(end of its last letter, end of its punctuation) of each word, in order."""
    for word in _WORD.finditer(text):
        yield word.start() + len(_SILENT_END.sub("", word[0])), word.end()
