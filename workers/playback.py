"""How far the audio that a stage has sent is ahead of its playback: for each stream, and the smallest of all."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import msgspec
import torch

from omni_bus.events import RequestOptions
from omni_bus.payloads import AudioDelta

BEGUN_S = (
    0.5  # from its first packet on, until a stream's lead counts: one packet is little, and tells nothing of the next ones
)
STALLED_S = 5.0  # without a packet: what holds such a stream up is not the stage's load, and it tells nothing of that

HELD_S = 2.0  # ahead at most behind a pause: a listener takes more when he has about so much left, however much was sent before


@dataclasses.dataclass(slots=True)
class _Stream:
    began: float | None = None  # when its first packet was sent; later by what its listener kept it waiting since
    last: float = 0.0  # when a packet was sent
    audio_s: float = 0.0
    paused: float | None = None  # since when its listener has taken nothing


class Playback:
    """The requests of one stage that end in speech. Times are seconds of time.monotonic."""

    def __init__(self) -> None:
        self._streams: dict[int, _Stream] = {}
        self.audio_s = 0.0  # sent since the start, over all requests

    def __len__(self) -> int:
        """Requests that are bound to real time."""
        return len(self._streams)

    def open(self, request: int, options: RequestOptions) -> None:
        if "audio" in options.modalities and not options.prepare:
            self._streams[request] = _Stream()

    def sent(self, request: int, seconds: float, now: float) -> None:
        """A packet of so many seconds of audio has left."""
        self.audio_s += seconds
        stream = self._streams.get(request)
        if stream is not None and seconds > 0:
            stream.began = now if stream.began is None else stream.began
            stream.audio_s += seconds
            stream.last = now

    def pause(self, request: int, now: float) -> None:
        """Its listener has as much as it takes."""
        stream = self._streams.get(request)
        if stream is not None and stream.paused is None:
            stream.paused = now

    def resume(self, request: int, now: float) -> None:
        """Its listener takes more. The wait was the listener's own: it makes nobody late."""
        stream = self._streams.get(request)
        if stream is None or stream.paused is None:
            return
        if stream.began is not None:
            ahead = min(stream.audio_s - (stream.paused - stream.began), HELD_S)
            stream.began = now - (stream.audio_s - ahead)
            stream.last = now
        stream.paused = None

    def close(self, request: int) -> None:
        self._streams.pop(request, None)

    def smallest_lead(self, now: float) -> float | None:
        """Seconds, below zero where a listener waits; None where nobody is being spoken to, or all have only just begun."""
        leads = [
            (stream.audio_s - (now - stream.began), now - stream.began)
            for stream in self._streams.values()
            if stream.began is not None and stream.paused is None and now - stream.last < STALLED_S
        ]
        return min((lead for lead, age in leads if age >= BEGUN_S or lead < 0.0), default=None)


def seconds_of(payload: msgspec.Struct, tensors: Mapping[str, torch.Tensor]) -> float:
    """Of the audio in a chunk for the client; 0 where it carries none."""
    pcm = tensors.get("pcm")
    if not isinstance(payload, AudioDelta) or pcm is None:
        return 0.0
    return pcm.shape[-1] / payload.sample_rate
