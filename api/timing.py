"""What one answer measures of itself, in the words of the metrics: TTFT, TTFP, TPOT, E2EL, RTF, playback lead, underrun."""

from __future__ import annotations

import time

from omni_bus.api.metrics import Metrics


class AnswerTiming:
    """Times are seconds of time.monotonic; `arrival` is when the request's handler began."""

    def __init__(self, metrics: Metrics, arrival: float) -> None:
        self._metrics = metrics
        self._arrival = arrival
        self._first_text: float | None = None
        self._last_text = 0.0
        self._tokens = 0
        self._playback_start: float | None = None  # moves on by every silence that an underrun made
        self._audio_s = 0.0

    def text(self, tokens: int) -> None:
        """A piece of text of that many tokens is about to leave."""
        now = time.monotonic()
        if self._first_text is None:
            self._first_text = now
            self._metrics.ttft.observe(now - self._arrival)
        else:
            self._tokens += tokens
        self._last_text = now

    def audio(self, seconds: float) -> None:
        """An audio chunk of that length is about to leave."""
        now = time.monotonic()
        if self._playback_start is None:
            self._playback_start = now
            self._metrics.first_packet(now - self._arrival)
        else:
            lead = self._audio_s - (now - self._playback_start)
            self._metrics.playback_lead.observe(lead)
            if lead < 0:
                self._metrics.underrun(-lead)
                self._playback_start -= lead
        self._audio_s += seconds
        self._metrics.audio_seconds.inc(seconds)

    def ended(self) -> None:
        """The answer is complete."""
        now = time.monotonic()
        self._metrics.e2el.observe(now - self._arrival)
        if self._first_text is not None and self._tokens:
            self._metrics.tpot.observe((self._last_text - self._first_text) / self._tokens)
        if self._audio_s:
            self._metrics.real_time_factor((now - self._arrival) / self._audio_s)
