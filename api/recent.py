"""What listeners noticed of the last answers: a ring for each measure and API process, in memory that the processes of a server share.

Every figure that anybody is shown of "the last minutes" comes from here, whichever process is asked; sums since the start are in metrics.py.
"""

from __future__ import annotations

import math
import mmap
import os
import pathlib
import struct
import time

WINDOW_S = 300.0  # older figures no longer count
KEPT = 256  # figures of each measure and process
MEASURES = ("ttfp_s", "rtf", "underrun_s")
SUFFIX = ".recent"

# A figure and the time at which it was noted. Both are eight aligned bytes, which are read whole or not at all; the time is written last.
_FIGURE = struct.Struct("=dd")
_SIZE = len(MEASURES) * KEPT * _FIGURE.size


class Recent:
    """One process's rings, and with `directory` those of all that keep theirs there. Times are of time.monotonic, which they share."""

    def __init__(self, directory: pathlib.Path | None = None, index: int = 0) -> None:
        """`index`: this process's number. One that was started again goes on with the rings of the one before."""
        self._directory = directory
        if directory is None:
            self._rings = mmap.mmap(-1, _SIZE)
        else:
            descriptor = os.open(directory / f"{index}{SUFFIX}", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                os.ftruncate(descriptor, _SIZE)
                self._rings = mmap.mmap(descriptor, _SIZE)
            finally:
                os.close(descriptor)
        self._next = [self._after_newest(number) for number in range(len(MEASURES))]

    def note(self, measure: str, value: float) -> None:
        """measure: one of MEASURES."""
        number = MEASURES.index(measure)
        place = self._next[number]
        self._next[number] = (place + 1) % KEPT
        start = (number * KEPT + place) * _FIGURE.size
        struct.pack_into("=d", self._rings, start + 8, value)
        struct.pack_into("=d", self._rings, start, time.monotonic())

    def figures(self) -> dict[str, object]:
        """As /v1/status tells them.

        window_s: seconds that they cover. ttfp_s, rtf: {count, p50, p95} over answers, None where there is none. underrun: how many times a
        listener of them had nothing to play, and for how many seconds in all.
        """
        ttfp, rtf, underruns = self._values()
        return {
            "window_s": WINDOW_S,
            "ttfp_s": _summary(ttfp),
            "rtf": _summary(rtf),
            "underrun": {"count": len(underruns), "seconds": sum(underruns)},
        }

    def _values(self) -> list[list[float]]:
        """Those of each measure that are not too old."""
        since = time.monotonic() - WINDOW_S
        found: list[list[float]] = [[] for _ in MEASURES]
        for rings in self._all():
            for place, (at, value) in enumerate(_FIGURE.iter_unpack(rings)):
                if at > since and at > 0:
                    found[place // KEPT].append(value)
        return found

    def _all(self) -> list[bytes]:
        if self._directory is None:
            return [self._rings[:]]
        blocks = [path.read_bytes() for path in self._directory.glob(f"*{SUFFIX}")]
        return [block for block in blocks if len(block) == _SIZE]  # one that is just being made is empty

    def _after_newest(self, number: int) -> int:
        start = number * KEPT * _FIGURE.size
        times = [at for at, _ in _FIGURE.iter_unpack(self._rings[start : start + KEPT * _FIGURE.size])]
        newest = max(range(KEPT), key=times.__getitem__)
        return (newest + 1) % KEPT if times[newest] else 0


def _summary(values: list[float]) -> dict[str, float] | None:
    if not values:
        return None
    values.sort()
    return {"count": len(values), "p50": _at(values, 0.5), "p95": _at(values, 0.95)}


def _at(ordered: list[float], share: float) -> float:
    """The smallest value that `share` of all do not exceed."""
    return ordered[math.ceil(share * len(ordered)) - 1]
