"""A bus that answers every request from a script, for tests of what the API makes of it."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

import msgspec

from omni_bus.client import StreamItem
from omni_bus.deployment import ApiConfig
from omni_bus.events import Lease, ReplicaStatus, RequestOptions, StageLoad, Status
from omni_bus.leases import Leases
from omni_bus.payloads import AudioDelta, ChatInput, InputTranscript, TextDelta
from omni_bus.wire import HostTensor

MODEL = "scripted"
PCM_CHUNK = bytes(range(256)) * 15  # 1,920 samples


def text(piece: str, finish_reason: str | None = None, usage: dict[str, int] | None = None) -> StreamItem:
    payload = TextDelta(piece, (1,) if piece else (), finish_reason, usage or {})  # type: ignore[arg-type]
    return StreamItem("thinker->client", payload, {}, finish_reason is not None)


def audio(pcm: bytes = PCM_CHUNK, last: bool = False, spoken: int | None = None, frames: int = 0) -> StreamItem:
    tensors = {"pcm": HostTensor("int16", (len(pcm) // 2,), memoryview(pcm))} if pcm else {}
    return StreamItem("vocoder->client", AudioDelta(24_000, spoken, frames), tensors, last)


def heard(words: str, last: bool = True) -> StreamItem:
    return StreamItem("ear->client", InputTranscript(words), {}, last)


FOREVER = object()  # in a script: nothing more ever comes; an asyncio.Event: the rest comes when it is set
Script = Sequence[StreamItem | Exception | object]
GOOD: Script = (text("Hello"), audio(), text(" world"), text("", "stop"), audio(), audio(b"", last=True))
USAGE = {
    "thinker": {"prompt_tokens": 7, "cached_tokens": 4, "completion_tokens": 2},
    "talker": {"frames": 3},
    "vocoder": {"frames": 3},
}
FIRST_CHUNKS = {"thinker->client": 0.0123, "vocoder->client": 0.0456}


@dataclasses.dataclass
class Submission:
    options: RequestOptions
    payload: ChatInput
    tensors: Mapping[str, HostTensor]
    deadline_s: float
    label: str


class ScriptedStream:
    def __init__(self, script: Script) -> None:
        self._script = script
        self.usage: Mapping[str, Mapping[str, int]] = {}
        self.first_chunks: Mapping[str, float] = {}
        self.taken = 0
        self.held: set[str] = set()
        self.used = 0  # items of held edges that were said to be consumed
        self.moved = asyncio.Event()  # set when an item is taken
        self.ended = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[StreamItem]:
        for step in self._script:
            if step is FOREVER:
                await asyncio.get_running_loop().create_future()
            if isinstance(step, asyncio.Event):
                await step.wait()
                continue
            if isinstance(step, Exception):
                self.ended.set()
                raise step
            assert isinstance(step, StreamItem)
            self.taken += 1
            self.moved.set()
            yield step
            await asyncio.sleep(0)
        self.usage = USAGE
        self.first_chunks = FIRST_CHUNKS
        self.ended.set()

    async def until_taken(self, count: int) -> None:
        """Until the reader has had so many items."""
        while self.taken < count:
            self.moved.clear()
            await self.moved.wait()

    def hold(self, edge: str) -> None:
        self.held.add(edge)

    def consumed(self, edge: str) -> None:
        assert edge in self.held
        self.used += 1

    async def cancel(self) -> None:
        if not self.ended.is_set():
            self.cancelled.set()


class ScriptedBus:
    """Answers every request from `script`, or from `scripts` in turn as long as there are any; `missing` are stages that are not
    ready; `submit_error` refuses."""

    def __init__(self, config: ApiConfig | None = None) -> None:
        self.script: Script = GOOD
        self.scripts: collections.deque[Script] = collections.deque()
        self.missing: tuple[str, ...] = ()
        self.submit_error: Exception | None = None
        self.status_error: Exception | None = None
        self.changed: Callable[[], None] = lambda: None  # called when a replica's state has changed
        self.submissions: list[Submission] = []
        self.streams: list[ScriptedStream] = []
        self.leases = Leases(config or ApiConfig())
        self.leased = 0
        self.asked = asyncio.Event()  # set by the first request

    async def submit(
        self,
        *,
        options: RequestOptions,
        payload: msgspec.Struct,
        tensors: Mapping[str, HostTensor],
        deadline_s: float,
        label: str = "",
        last: bool = True,
    ) -> ScriptedStream:
        if self.submit_error is not None:
            raise self.submit_error
        msgspec.msgpack.encode([options, payload])  # a request that cannot be put on the wire is a fault of the API
        assert isinstance(payload, ChatInput) and last
        self.submissions.append(Submission(options, payload, tensors, deadline_s, label))
        self.streams.append(ScriptedStream(self.scripts.popleft() if self.scripts else self.script))
        self.asked.set()
        return self.streams[-1]

    def watch(self, changed: Callable[[], None]) -> None:
        self.changed = changed

    async def status(self) -> Status:
        if self.status_error is not None:
            raise self.status_error
        load = StageLoad(
            stage="thinker", waiting=3, running=2, batch=2, steps=9, busy_s=0.5, chunks={"thinker->client|inline": 5}
        )
        load = msgspec.structs.replace(load, bytes={"thinker->client|inline": 500})
        replica = ReplicaStatus(stage="thinker", worker="thinker.0", pid=1, host="h", device="cpu", state="ready", load=load)
        return Status(
            query=1,
            pipeline="scripted",
            ready=not self.missing,
            missing=self.missing,
            replicas=(replica,),
            requests={"streaming": 1},
            ended={"done": 4},
            edge_chunks={"client->thinker": 6, "thinker->client": 5},
            edge_bytes={"client->thinker|inline": 600},
            uptime_s=1.0,
        )

    @contextlib.asynccontextmanager
    async def lease(self, kind: str, client: str) -> AsyncIterator[None]:
        """Counted as the broker counts them."""
        self.leased += 1
        number = self.leased
        self.leases.take(b"api", Lease(number, kind, client))
        try:
            yield
        finally:
            self.leases.release(b"api", number)

    async def close(self) -> None: ...
