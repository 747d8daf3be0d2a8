"""A real aiohttp server on a real socket, and behind it a bus that answers from a script."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

import aiohttp
import msgspec
import pytest
from aiohttp import web

from omni_bus.api.app import create_app, create_runner
from omni_bus.client import StreamItem
from omni_bus.deployment import ApiConfig, BusConfig, Deployment, ModelConfig
from omni_bus.events import ReplicaStatus, RequestOptions, StageLoad, Status
from omni_bus.payloads import AudioDelta, ChatInput, InputTranscript, TextDelta
from omni_bus.sampling import SamplingParams
from omni_bus.spec import EdgeSpec, PipelineSpec, StageSpec
from omni_bus.wire import HostTensor

MODEL = "scripted"
PCM_CHUNK = bytes(range(256)) * 15  # 1,920 samples


def text(piece: str, finish_reason: str | None = None) -> StreamItem:
    payload = TextDelta(piece, (1,) if piece else (), finish_reason)  # type: ignore[arg-type]
    return StreamItem("thinker->client", payload, {}, finish_reason is not None)


def audio(pcm: bytes = PCM_CHUNK, last: bool = False) -> StreamItem:
    tensors = {"pcm": HostTensor("int16", (len(pcm) // 2,), memoryview(pcm))} if pcm else {}
    return StreamItem("vocoder->client", AudioDelta(24_000), tensors, last)


def heard(words: str) -> StreamItem:
    return StreamItem("ear->client", InputTranscript(words), {}, True)


FOREVER = object()  # in a script: nothing more ever comes
Script = Sequence[StreamItem | Exception | object]
GOOD: Script = (text("Hello"), audio(), text(" world"), text("", "stop"), audio(), audio(b"", last=True))
USAGE = {"thinker": {"prompt_tokens": 7, "completion_tokens": 2}, "talker": {"frames": 3}, "vocoder": {"frames": 3}}


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
        self.taken = 0
        self.ended = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[StreamItem]:
        for step in self._script:
            if step is FOREVER:
                await asyncio.get_running_loop().create_future()
            if isinstance(step, Exception):
                self.ended.set()
                raise step
            assert isinstance(step, StreamItem)
            self.taken += 1
            yield step
            await asyncio.sleep(0)
        self.usage = USAGE
        self.ended.set()

    async def cancel(self) -> None:
        if not self.ended.is_set():
            self.cancelled.set()


class ScriptedBus:
    """Answers every request from `script`; `missing` are stages that are not ready; `submit_error` refuses."""

    def __init__(self) -> None:
        self.script: Script = GOOD
        self.missing: tuple[str, ...] = ()
        self.submit_error: Exception | None = None
        self.submissions: list[Submission] = []
        self.streams: list[ScriptedStream] = []

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
        self.streams.append(ScriptedStream(self.script))
        return self.streams[-1]

    async def status(self) -> Status:
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
            edge_chunks={"thinker->client": 5},
            uptime_s=1.0,
        )

    async def close(self) -> None: ...


def pipeline(input_kinds: frozenset[str]) -> PipelineSpec:
    def factory() -> object:
        raise AssertionError("no stage is ever made here")

    speech = frozenset({"audio"})
    return PipelineSpec(
        name="scripted",
        stages=(
            StageSpec(name="thinker", factory=factory, sampling=SamplingParams()),  # type: ignore[arg-type]
            StageSpec(name="talker", factory=factory, sampling=SamplingParams(), modalities=speech),  # type: ignore[arg-type]
            StageSpec(name="vocoder", factory=factory, modalities=speech),  # type: ignore[arg-type]
        ),
        edges=(EdgeSpec(source="client", target="thinker", payload=ChatInput),),
        text_stage="thinker",
        input_kinds=input_kinds,
        output_modalities=frozenset({"text", "audio"}),
        voices=lambda path: ("Ethan", "chelsie"),
        check_model=lambda path: None,
    )


@dataclasses.dataclass
class Server:
    url: str
    host: str
    port: int
    bus: ScriptedBus
    app: web.Application
    http: aiohttp.ClientSession

    async def chat(self, headers: Mapping[str, str] | None = None, **fields: object) -> tuple[int, dict[str, object]]:
        """A chat request with `fields` over good ones; status and JSON answer."""
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}
        async with self.http.post(f"{self.url}/v1/chat/completions", json=body, headers=headers) as answer:
            return answer.status, await answer.json()

    async def metric(self, name: str) -> float:
        """The value of the sample of that name, labels included."""
        async with self.http.get(f"{self.url}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        return next((float(line.rpartition(" ")[2]) for line in lines if line.rpartition(" ")[0] == name), 0.0)


StartServer = Callable[..., Awaitable[Server]]


@pytest.fixture
async def start() -> AsyncIterator[StartServer]:
    """Starts servers with the given keys of [api]; they stop with the test."""
    async with contextlib.AsyncExitStack() as stack:

        async def start_one(input_kinds: Sequence[str] = ("text", "audio", "image", "video"), **api: object) -> Server:
            bus = ScriptedBus()

            async def connect() -> ScriptedBus:
                return bus

            deployment = Deployment(
                model=ModelConfig(pipeline="scripted", name=MODEL),
                api=ApiConfig(**api),  # type: ignore[arg-type]
                bus=BusConfig(),
                stages={},
                edges={},
            )
            app = create_app(deployment, pipeline(frozenset(input_kinds)), connect)
            runner = create_runner(app)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            host, port = runner.addresses[0][:2]
            http = await stack.enter_async_context(aiohttp.ClientSession())
            return Server(f"http://{host}:{port}", host, port, bus, app, http)

        yield start_one


@pytest.fixture
async def server(start: StartServer) -> Server:
    return await start()
