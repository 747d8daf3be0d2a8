"""semantic_vad's rule: how long a silence must last, from how the speech before it ended. Acoustic only: words are not looked at.

Speakers let their voice fall when they have finished, and hold it, or stop short, when they go on. The cue is the level of the
last 0.2 s of speech below that of the speech before: by 5 dB or less it is taken as held, by 11 dB or more as fallen, between the
two in proportion. Held speech is waited for as long as OpenAI's `eagerness` says (low 8 s, medium and auto 4 s, high 2 s), fallen
speech as long as SHORTEST_MS says. Whoever has paused within this turn may do it again: a silence ends it only when it is a quarter
longer than the longest pause so far. The power of the silence itself is taken off first, so that a steady noise hides the fall
only where it is nearly as loud as the voice; then the wait is longer, never shorter.
"""

from __future__ import annotations

import numpy
from numpy.typing import NDArray

from omni_bus.api.voice.items import SAMPLE_RATE
from omni_bus.api.voice.turn_config import Eagerness

SHORTEST_MS: dict[Eagerness, int] = {"low": 1_000, "medium": 500, "auto": 500, "high": 300}
LONGEST_MS: dict[Eagerness, int] = {"low": 8_000, "medium": 4_000, "auto": 4_000, "high": 2_000}
HEARD_S = 2.0  # of speech, up to its end, that the cue looks at
SETTLED_MS = 160  # of silence, after which its own level can be told

_HOP = SAMPLE_RATE // 100
_TAIL = 20  # hops: 0.2 s
_HELD_DB, _FALLEN_DB = 5.0, 11.0
_SPOKEN = 0.1  # of the loudest hop: what is quieter is a gap between words, no part of the level
_PATIENCE = 1.25


def silence_needed_ms(
    speech: NDArray[numpy.float32], silence: NDArray[numpy.float32], longest_pause_ms: float, eagerness: Eagerness
) -> float:
    """From the beginning of the silence. speech, silence: float32 [samples] at 16 kHz, the last HEARD_S up to where the speech
    ended, and what came since. longest_pause_ms: within this turn so far.
    """
    shortest, longest = SHORTEST_MS[eagerness], LONGEST_MS[eagerness]
    needed = longest - (longest - shortest) * fallen(speech, silence)
    return min(max(needed, _PATIENCE * longest_pause_ms), longest)


def fallen(speech: NDArray[numpy.float32], silence: NDArray[numpy.float32]) -> float:
    """0: the voice was held to the end, 1: it fell. 0 where there is too little to tell."""
    hops = len(speech) // _HOP
    if hops <= _TAIL or not len(silence):
        return 0.0
    # The later half of the silence: the room still sounds in the first.
    noise = float(numpy.mean(numpy.square(silence[len(silence) // 2 :])))
    powers = numpy.mean(numpy.square(speech[len(speech) - hops * _HOP :].reshape(hops, _HOP)), axis=1)
    levels = numpy.sqrt(numpy.maximum(powers - noise, 0.0))
    loudest = float(levels.max())
    if loudest <= 0.0:
        return 0.0
    body = float(levels[levels >= _SPOKEN * loudest].mean())
    tail = max(float(levels[-_TAIL:].mean()), 1e-6)
    fall_db = 20.0 * numpy.log10(body / tail)
    return float(numpy.clip((fall_db - _HELD_DB) / (_FALLEN_DB - _HELD_DB), 0.0, 1.0))
