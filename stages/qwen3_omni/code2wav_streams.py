"""One request's stream of codec frames, and how many of them are decoded next.

The chunk grows with the playback lead: the audio emitted so far minus the time since its first emission. A chunk may take half the
lead to come together, so even frames that arrive no faster than they are played never let the listener run dry; with a small
lead that is a single frame, and nothing waits.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses

import torch

from omni_bus.stages.qwen3_omni.spec import SAMPLE_RATE


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkRule:
    """How many frames of `frame_seconds` make a chunk. `sizes`: what a chunk may have, ascending from 1, `first_frames` among them.
    `credits`: chunks the producer may have under way before it stops."""

    first_frames: int
    sizes: tuple[int, ...]
    credits: int
    frame_seconds: float = 0.08

    def wanted(self, lead: float) -> int:
        """Frames worth waiting for at this playback lead in seconds."""
        return self._fitting(max(1, int(lead / 2 / self.frame_seconds)))

    def next(self, stream: Stream, now: float) -> int:
        """Frames to decode now; 0 = wait for more.

        A backlog goes out in chunks of at most twice the last one: decoding falls behind only where small chunks cost too much,
        and larger ones then catch up. Waiting ends when the producer cannot send more: it has said so, or its credit is half gone.
        """
        arrived = stream.buffered
        wanted = self.wanted(stream.lead(now)) if stream.frames else self.first_frames
        if not arrived or (arrived < wanted and not stream.closed and stream.chunks_held < max(1, self.credits // 2)):
            return 0
        limit = max(wanted, 2 * stream.last_chunk) if stream.frames else self.first_frames
        return self._fitting(min(arrived, limit))

    def due(self, stream: Stream) -> float | None:
        """When the frames that wait for more go out even if none come; None while none wait, and before the first chunk."""
        if not stream.buffered or not stream.frames:
            return None
        larger = bisect.bisect_right(self.sizes, stream.buffered)  # waiting is over when the lead is too small for this size
        frames = self.sizes[larger] if larger < len(self.sizes) else stream.buffered + 1
        return stream.empty_at - 2 * self.frame_seconds * frames

    def _fitting(self, frames: int) -> int:
        """The largest size that is at most `frames`."""
        return self.sizes[bisect.bisect_right(self.sizes, frames) - 1]


@dataclasses.dataclass(slots=True)
class Stream:
    """Frames that wait, and what has been made of those before them."""

    opened: float
    emits: bool  # whether its audio edge is open
    closed: bool = False  # the last chunk has come
    paused: bool = False
    slot: int | None = None
    parked: list[torch.Tensor] | None = None  # its state, while another stream has the slot
    frames: int = 0  # decoded
    samples: int = 0  # emitted
    last_chunk: int = 0  # frames of the last decoded chunk
    first_emission: float = 0.0
    unreported: int = 0  # chunks used up and not yet told to the producer
    _chunks: collections.deque[torch.Tensor] = dataclasses.field(default_factory=collections.deque)  # int16 [n, groups]
    buffered: int = 0  # frames in _chunks

    @property
    def chunks_held(self) -> int:
        return len(self._chunks)

    def push(self, codes: torch.Tensor) -> None:
        """codes: int16 [n, groups], n ≥ 1"""
        self._chunks.append(codes)
        self.buffered += codes.shape[0]

    def pop(self, count: int) -> torch.Tensor:
        """The next `count` frames; chunks taken whole are counted in `unreported`."""
        assert 0 < count <= self.buffered
        self.buffered -= count
        pieces = []
        while count:
            chunk = self._chunks.popleft()
            pieces.append(chunk[:count])
            if chunk.shape[0] > count:
                self._chunks.appendleft(chunk[count:])
            else:
                self.unreported += 1
            count -= pieces[-1].shape[0]
        return torch.cat(pieces)

    def emitted(self, frames: int, samples: int, now: float) -> None:
        if not self.frames:
            self.first_emission = now
        self.frames += frames
        self.samples += samples
        self.last_chunk = frames

    def lead(self, now: float) -> float:
        """Seconds of audio that are still to be played; before the first emission, minus the time since the request came."""
        if not self.frames:
            return self.opened - now
        return self.empty_at - now

    @property
    def empty_at(self) -> float:
        """When a listener who began at the first emission has heard all that was emitted."""
        return self.first_emission + self.samples / SAMPLE_RATE
