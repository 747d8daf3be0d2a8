"""Whether a replica can carry one more request without making those late whom it speaks to already. No I/O, no clock.

A listener hears a second of audio in a second. So a replica that does so much work for each second of audio, and has n streams, needs

    rtf(n) = n · busy seconds / seconds of audio        (both of the same stretch of time)

of its time: the real-time factor that its streams would have if nothing else held them up. It is seen from what workers push
(StageLoad.busy_s, audio_s), over stretches long enough that what a request costs once, before its first packet, is spread over its
audio. For a stage that makes no audio itself the seconds are those that were made for its requests; stages of one process, which
share its loop, are added up. How rtf grows with n is fitted as a line for each replica (load_curve.py).

One more request that ends in speech has room in a replica where

    nothing is spoken                                            always: one stream is served however slow the machine is
    rtf(n + 1) ≤ `bus.admit_rtf`                                 and while nothing was measured: n < capacity
    n + 1 ≤ capacity, or twice as many as were ever measured     no leap on a line fitted far away
    no stream's playback lead is used up                         the listeners who wait now come first
    beyond the most that were ever measured: of those who have not begun to speak, not more than speak already, or than four

Beyond a full batch (n > capacity) rows take turns, so that rtf(n) is at least rtf(capacity) · n / capacity.

The line is careful: seen with one number of streams only, it takes all of the work for the rows', as if a step with two took twice as
long. So that it can learn better, one request is let in as a trial where it says no: where so many were never measured, rtf(n) is
within the limit, and every listener has some audio ahead.

A request without speech has room where rtf(n) ≤ `bus.admit_rtf` or no other one without speech runs: alone it always goes on.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable

from omni_bus.events import RequestOptions, StageLoad
from omni_bus.load_curve import LoadCurve
from omni_bus.registry import Replica

LOW_LEAD_S = 0.02  # of playback: below it a listener is about to wait
TRIAL_LEAD_S = 0.3  # of playback, in front of every listener, before more of them are tried
LEAP = 2  # times the streams that were measured
STARTING = 4  # requests that may at any time be on their way to their first packet beyond what was measured
STRETCH_S = 1.0  # of audio, at least, in one observation
FIRST_S = 2.0  # of audio for each request that began in it, unless as many ended: their prompts are not all that is seen
DRAIN_S = 30.0  # over which ended requests are counted
RETRY_S = (1.0, 60.0)  # the least and the most that a client is told to wait
_COUNTED = 4096  # ended requests remembered, at most


def is_speech(options: RequestOptions) -> bool:
    """Whether a request is bound to real time: someone listens while it is made."""
    return "audio" in options.modalities and not options.prepare


@dataclasses.dataclass(slots=True)
class _Tally:
    """How many streams are open, and for how long: `stream_s` counts each by itself, `active_s` the time in which there was any."""

    then: float
    streams: int = 0
    stream_s: float = 0.0
    active_s: float = 0.0

    def change(self, by: int, now: float) -> None:
        passed = max(0.0, now - self.then)
        self.stream_s += self.streams * passed
        self.active_s += passed if self.streams else 0.0
        self.then = max(now, self.then)
        self.streams += by


@dataclasses.dataclass(slots=True)
class _Stretch:
    """What has been seen of a replica since its last observation; the others' figures as they stood at its beginning."""

    stream_s: float
    active_s: float
    spoken_s: float  # over all replicas
    listened_s: float
    busy_s: float = 0.0
    audio_s: float = 0.0  # that it made itself
    began: int = 0
    ended: int = 0


@dataclasses.dataclass(slots=True)
class _Seat:
    """One replica."""

    tally: _Tally
    stretch: _Stretch
    curve: LoadCurve = dataclasses.field(default_factory=LoadCurve)
    silent: int = 0  # requests without speech
    pending: int = 0  # with speech, before their first packet
    measured: float = 0.0  # the most streams that were ever observed
    load: StageLoad | None = None
    active_s: float = 0.0  # at the last push
    makes_audio: bool = False


@dataclasses.dataclass(slots=True)
class _Open:
    """One started request."""

    replicas: tuple[Replica, ...]
    speech: bool
    pending: bool


class Admission:
    """Times are seconds of any clock that never goes back; `request` is any number that names a started request once."""

    def __init__(self, admit_rtf: float, now: float) -> None:
        """admit_rtf: `bus.admit_rtf`; 0: there is always room."""
        self._limit = admit_rtf
        self._all = _Tally(now)  # the streams of every replica together
        self._spoken_s = 0.0
        self._listened_s = 0.0  # stream-seconds of all when a replica last told how much it has spoken
        self._seats: dict[Replica, _Seat] = {}
        self._open: dict[int, _Open] = {}
        self._first: float | None = None  # when the first request was started
        self._ends: collections.deque[float] = collections.deque(maxlen=_COUNTED)

    # ---- what happens

    def observe(self, replica: Replica, load: StageLoad, now: float) -> None:
        """A worker has pushed a load."""
        seat = self._seat(replica, now)
        seat.tally.change(0, now)
        before = seat.load
        seat.load = load
        if before is None:
            seat.active_s = seat.tally.active_s
            return
        active, seat.active_s = seat.tally.active_s - seat.active_s, seat.tally.active_s
        stretch = seat.stretch
        # A push may cover a time in which nobody was spoken to: what was done then was done for others.
        stretch.busy_s += min(max(0.0, load.busy_s - before.busy_s), active)
        made = max(0.0, load.audio_s - before.audio_s)
        stretch.audio_s += made
        self._spoken_s += made
        seat.makes_audio |= load.audio_s > 0.0 or load.lead_s is not None
        if seat.makes_audio:
            self._all.change(0, now)
            self._listened_s = self._all.stream_s
        self._look(seat)

    def started(self, request: int, replicas: Iterable[Replica], options: RequestOptions, now: float) -> None:
        """A request was bound to these replicas."""
        speech = is_speech(options)
        opened = self._open[request] = _Open(tuple(replicas), speech, speech)
        self._first = now if self._first is None else self._first
        for replica in opened.replicas:
            seat = self._seat(replica, now)
            if speech:
                seat.tally.change(1, now)
                seat.pending += 1
                seat.stretch.began += 1
            else:
                seat.silent += 1
        if speech:
            self._all.change(1, now)

    def spoke(self, request: int) -> None:
        """The first packet of its audio has left."""
        opened = self._open.get(request)
        if opened is not None and opened.pending:
            opened.pending = False
            for seat in self._of(opened):
                seat.pending -= 1

    def ended(self, request: int, now: float, *, drained: bool = True) -> None:
        """Nothing is left of it; drained=False: it is run again, and the queue is no shorter. Unknown ones are ignored."""
        opened = self._open.pop(request, None)
        if opened is None:
            return
        for seat in self._of(opened):
            if opened.speech:
                seat.tally.change(-1, now)
                seat.pending -= opened.pending
                seat.stretch.ended += 1
            else:
                seat.silent -= 1
        if opened.speech:
            self._all.change(-1, now)
        if drained:
            self._ends.append(now)

    def forget(self, replica: Replica) -> None:
        """It is lost: one that is started again may be another machine's."""
        self._seats.pop(replica, None)

    # ---- what is asked

    def has_room(self, replica: Replica, options: RequestOptions) -> bool:
        """Whether a request with these options may be bound to that replica now."""
        seat = self._seats.get(replica)
        if seat is None or not self._limit or not seat.tally.streams:
            return True
        streams = seat.tally.streams
        if not is_speech(options):
            return not seat.silent or self._rtf(replica, 0) <= self._limit
        if _lead_s([seat]) < LOW_LEAD_S or streams + 1 > max(replica.capacity, LEAP * seat.measured):
            return False
        unknown = streams + 1 > seat.measured + 0.5  # an average over time falls a little short of the most
        speaking = streams - seat.pending
        if unknown and speaking and seat.pending >= max(STARTING, speaking):
            return False
        if self._rtf(replica, 1) <= self._limit:
            return True
        if not unknown or seat.pending or self._rtf(replica, 0) > self._limit:
            return False
        return _lead_s([seat] if seat.makes_audio else self._seats.values()) >= TRIAL_LEAD_S

    def streams(self, replica: Replica) -> int:
        """Requests with speech that are bound to it."""
        seat = self._seats.get(replica)
        return 0 if seat is None else seat.tally.streams

    def predicted_rtf(self, replica: Replica) -> float | None:
        """With one more stream, of the replica's whole process; None before anything was measured."""
        seat = self._seats.get(replica)
        return self._rtf(replica, 1) if seat is not None and seat.curve.measured else None

    def retry_after_s(self, ahead: int, now: float) -> float:
        """When it may be the turn of a client who comes back behind so many, as requests have ended of late."""
        since = now - DRAIN_S
        while self._ends and self._ends[0] < since:
            self._ends.popleft()
        since = max(since, now if self._first is None else self._first)
        rate = max(1, len(self._ends)) / max(1.0, now - since)
        least, most = RETRY_S
        return min(max(max(1, ahead) / rate, least), most)

    # ---- inside

    def _seat(self, replica: Replica, now: float) -> _Seat:
        seat = self._seats.get(replica)
        if seat is None:
            seat = self._seats[replica] = _Seat(_Tally(now), _Stretch(0.0, 0.0, self._spoken_s, self._listened_s))
        return seat

    def _of(self, opened: _Open) -> list[_Seat]:
        return [seat for replica in opened.replicas if (seat := self._seats.get(replica)) is not None]

    def _rtf(self, replica: Replica, more: int) -> float:
        """Of a process whose every stage has so many streams more. What was not measured is not counted."""
        rtf = 0.0
        for other in replica.worker.replicas.values():
            if (seat := self._seats.get(other)) is not None:
                streams, whole = seat.tally.streams + more, max(1, other.capacity)
                # Rows beyond a full batch take turns, which no line through smaller numbers foretells.
                rtf += max(seat.curve.at(streams), seat.curve.at(whole) * streams / whole if streams > whole else 0.0)
        return rtf

    def _look(self, seat: _Seat) -> None:
        """Make an observation of what was seen, once that is enough."""
        stretch, tally = seat.stretch, seat.tally
        stream_s, active_s = tally.stream_s - stretch.stream_s, tally.active_s - stretch.active_s
        audio_s = stretch.audio_s
        if not seat.makes_audio:
            listened_s = self._listened_s - stretch.listened_s
            audio_s = stream_s * (self._spoken_s - stretch.spoken_s) / listened_s if listened_s > 0.0 else 0.0
        if audio_s < STRETCH_S or active_s <= 0.0:
            return
        if audio_s < FIRST_S * stretch.began and stretch.ended < stretch.began:
            return
        streams = stream_s / active_s
        seat.curve.add(streams, streams * stretch.busy_s / audio_s, audio_s, active_s)
        seat.measured = max(seat.measured, streams)
        seat.stretch = _Stretch(tally.stream_s, tally.active_s, self._spoken_s, self._listened_s)


def _lead_s(seats: Iterable[_Seat]) -> float:
    """The smallest playback lead that any of them has told; inf where none has a listener."""
    leads = (seat.load.lead_s for seat in seats if seat.load is not None)
    return min((lead for lead in leads if lead is not None), default=math.inf)
