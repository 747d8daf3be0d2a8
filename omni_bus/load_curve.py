"""How a replica's real-time factor grows with the streams it carries: a line, fitted to what was seen, the newest most."""

from __future__ import annotations

HALF_LIFE_S = 20.0  # of work, after which an observation counts half
CAUTION = 1.0  # seconds of audio: what a curve through one point must outweigh before streams are believed to share a step
LEAST_SLOPE = 0.1  # of the steepest line there could be: one more stream is never free


class LoadCurve:
    """rtf(n) ≈ a + c·n: `a` is what a step costs however many rows it has, `c` what each row adds.

    Seen at one number of streams only, all of it is taken as the rows' (a = 0), which foretells too much rather than too little.
    """

    def __init__(self) -> None:
        self._weight = self._n = self._nn = self._y = self._ny = 0.0

    @property
    def measured(self) -> bool:
        return self._weight > 0.0

    def add(self, streams: float, rtf: float, audio_s: float, work_s: float) -> None:
        """With so many streams on average, each second of one's audio took `rtf` seconds; seen over `audio_s` of it in `work_s`."""
        kept = 0.5 ** (work_s / HALF_LIFE_S)
        self._weight = self._weight * kept + audio_s
        self._n = self._n * kept + audio_s * streams
        self._nn = self._nn * kept + audio_s * streams * streams
        self._y = self._y * kept + audio_s * rtf
        self._ny = self._ny * kept + audio_s * streams * rtf

    def at(self, streams: float) -> float:
        """The real-time factor with so many streams; 0 where nothing was measured."""
        if not self.measured:
            return 0.0
        weight = self._weight + CAUTION  # a is drawn to 0, as by an observation of such weight
        spread = weight * self._nn - self._n * self._n
        slope = (weight * self._ny - self._n * self._y) / spread
        base = (self._y - slope * self._n) / weight
        if base < 0.0:
            base, slope = 0.0, self._ny / self._nn
        least = LEAST_SLOPE * self._ny / self._nn
        if slope < least:
            slope, base = least, (self._y - least * self._n) / self._weight
        return base + slope * streams
