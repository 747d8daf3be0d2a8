"""One request as the simulated stages and its listener see it."""

from __future__ import annotations

import dataclasses

from bench.simulation.ports import Stage
from omni_bus.stages.qwen3_omni.code2wav_streams import Stream


class FrameCount(Stream):
    """The real stream of Code2Wav, with frames that are only counted."""

    __slots__ = ()

    def arrived(self, frames: int) -> None:
        self.buffered += frames

    def taken(self, frames: int) -> None:
        assert 0 < frames <= self.buffered
        self.buffered -= frames

    @property
    def chunks_held(self) -> int:
        return self.buffered


@dataclasses.dataclass(slots=True, eq=False)
class Answer:
    """A request from its first sight to its end. Times are seconds of the simulation."""

    index: int
    session: str
    prompt: int  # positions
    tokens: int  # that it will have
    frames: int
    asked: float
    request: int = 0  # the broker's number
    bound: dict[str, Stage] = dataclasses.field(default_factory=dict)
    to_compute: int = 0  # prompt positions that are not there already
    made: int = 0  # tokens
    known: int = 0  # of them, to the frame stage
    all_known: bool = False
    spoken: int = 0  # frames made
    stream: FrameCount | None = None
    has_slot: bool = False  # in the chunk stage
    packets: list[tuple[float, float]] = dataclasses.field(default_factory=list)  # (arrival since `asked`, seconds of audio)
    outcome: str = ""  # "done", "cancelled", or a failure's code
    ends: int = 0  # how often an end was told: it must be once
    ended: float = 0.0
    gone: bool = False  # the stages are to do nothing more for it

    @property
    def audio_s(self) -> float:
        return sum(length for _, length in self.packets)
