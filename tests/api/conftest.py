"""A real aiohttp server on a real socket, and behind it a bus that answers from a script."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

import aiohttp
import pytest
from aiohttp import web

from omni_bus.api.app import create_app, create_runner
from omni_bus.api.metrics import Metrics
from omni_bus.deployment import ApiConfig, BusConfig, Deployment, ModelConfig
from omni_bus.payloads import ChatInput, InputTranscript
from omni_bus.sampling import SamplingParams
from omni_bus.spec import EdgeSpec, PipelineSpec, StageSpec
from tests.support.scripted_bus import MODEL, ScriptedBus

PATIENCE_S = 60.0


def pipeline(
    input_kinds: frozenset[str], output_modalities: frozenset[str] = frozenset({"text", "audio"}), ear: bool = False
) -> PipelineSpec:
    """`ear`: with a speech recogniser in front."""

    def factory() -> object:
        raise AssertionError("no stage is ever made here")

    speech = frozenset({"audio"})
    answer = frozenset({"text", "audio"}) if ear else frozenset[str]()
    entry = EdgeSpec(source="client", target="ear" if ear else "thinker", payload=ChatInput)
    return PipelineSpec(
        name="scripted",
        stages=(
            *((StageSpec(name="ear", factory=factory),) if ear else ()),  # type: ignore[arg-type]
            StageSpec(name="thinker", factory=factory, sampling=SamplingParams(), modalities=answer),  # type: ignore[arg-type]
            StageSpec(name="talker", factory=factory, sampling=SamplingParams(), modalities=speech),  # type: ignore[arg-type]
            StageSpec(name="vocoder", factory=factory, modalities=speech),  # type: ignore[arg-type]
        ),
        edges=(entry, EdgeSpec(source="ear", target="client", payload=InputTranscript)) if ear else (entry,),
        text_stage="thinker",
        input_kinds=input_kinds,
        output_modalities=output_modalities,
        voices=lambda path: ("Ethan", "chelsie"),
        transcript_edge="ear->client" if ear else None,
        check_model=lambda path, stages: None,
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

    async def until_metric(self, name: str, value: float) -> None:
        """An answer may be read, or a stream cancelled, a moment before its handler has counted it."""
        async with asyncio.timeout(PATIENCE_S):
            while await self.metric(name) != value:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


StartServer = Callable[..., Awaitable[Server]]


@pytest.fixture
async def start() -> AsyncIterator[StartServer]:
    """Starts servers with the given keys of [api]; they stop with the test."""
    async with contextlib.AsyncExitStack() as stack:

        async def start_one(
            input_kinds: Sequence[str] = ("text", "audio", "image", "video"),
            output_modalities: Sequence[str] = ("text", "audio"),
            ear: bool = False,
            **api: object,
        ) -> Server:
            config = ApiConfig(**api)  # type: ignore[arg-type]
            bus = ScriptedBus(config)

            async def connect() -> ScriptedBus:
                return bus

            deployment = Deployment(
                model=ModelConfig(pipeline="scripted", name=MODEL),
                api=config,
                bus=BusConfig(),
                stages={},
                edges={},
            )
            spec = pipeline(frozenset(input_kinds), frozenset(output_modalities), ear)
            app = create_app(deployment, spec, connect, Metrics())
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
