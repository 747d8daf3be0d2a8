"""Voice sessions on a bus that answers from scripts: what only a script can make happen, seen event by event."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest

from omni_bus.api.media_fetch import MediaFetcher
from omni_bus.api.metrics import Metrics
from omni_bus.api.served import ServedModel
from omni_bus.api.voice.events import SessionEvent
from omni_bus.api.voice.items import InputText, Item
from omni_bus.api.voice.services import VoiceServices
from omni_bus.api.voice.session import VoiceSession
from omni_bus.api.voice.settings import SessionSettings
from omni_bus.deployment import ApiConfig
from omni_bus.payloads import AudioDelta, ChatInput, InputTranscript, TextDelta
from omni_bus.sampling import SamplingParams
from omni_bus.spec import EdgeSpec, PipelineSpec, StageSpec
from tests.support.scripted_bus import ScriptedBus

EventT = TypeVar("EventT", bound=SessionEvent)
PATIENCE_S = 60.0


def voice_pipeline(*, ear: bool) -> PipelineSpec:
    """thinker → talker → vocoder; `ear`: with a speech recogniser in front, as the quickstart has one."""

    def factory() -> object:
        raise AssertionError("no stage is ever made here")

    speech, answer = frozenset({"audio"}), frozenset({"text", "audio"})
    edges = [
        EdgeSpec(source="client", target="ear" if ear else "thinker", payload=ChatInput),
        EdgeSpec(source="thinker", target="client", payload=TextDelta),
        EdgeSpec(source="vocoder", target="client", payload=AudioDelta),
    ]
    stages = [
        StageSpec(name="thinker", factory=factory, sampling=SamplingParams(), modalities=answer),  # type: ignore[arg-type]
        StageSpec(name="talker", factory=factory, sampling=SamplingParams(), modalities=speech),  # type: ignore[arg-type]
        StageSpec(name="vocoder", factory=factory, modalities=speech),  # type: ignore[arg-type]
    ]
    if ear:
        stages.insert(0, StageSpec(name="ear", factory=factory))  # type: ignore[arg-type]
        edges.append(EdgeSpec(source="ear", target="client", payload=InputTranscript))
    return PipelineSpec(
        name="scripted",
        stages=tuple(stages),
        edges=tuple(edges),
        text_stage="thinker",
        input_kinds=frozenset({"text", "audio", "image"}),
        output_modalities=frozenset({"text", "audio"}),
        voices=lambda path: ("Ethan", "chelsie"),
        transcript_edge="ear->client" if ear else None,
        check_model=lambda path, stages: None,
    )


class Seen:
    """A session and the events it has told."""

    def __init__(self, session: VoiceSession, bus: ScriptedBus, services: VoiceServices, events: list[SessionEvent]) -> None:
        self.session = session
        self.bus = bus
        self.services = services
        self.events = events
        self.changed = asyncio.Event()

    async def until(self, kind: type[EventT], count: int = 1) -> EventT:
        """The `count`-th event of that type since the beginning."""
        async with asyncio.timeout(PATIENCE_S):
            while len(found := self.of(kind)) < count:
                self.changed.clear()
                await self.changed.wait()
        return found[count - 1]

    async def until_taken(self, count: int, request: int = 0) -> None:
        """Until so many items of a request's script have been read."""
        async with asyncio.timeout(PATIENCE_S):
            await self.bus.asked.wait()
            await self.bus.streams[request].until_taken(count)

    def of(self, kind: type[EventT]) -> list[EventT]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def names(self) -> list[str]:
        return [type(event).__name__ for event in self.events]

    def say(self, text: str) -> Item:
        """An item of the user."""
        item = Item.message("user", [InputText(text)])
        self.session.add_item(item)
        return item

    def metric(self, name: str) -> float:
        lines = self.services.metrics.text(None).decode().splitlines()
        return next((float(line.rpartition(" ")[2]) for line in lines if line.rpartition(" ")[0] == name), 0.0)


StartSession = Callable[..., Awaitable[Seen]]


@pytest.fixture
async def start() -> AsyncIterator[StartSession]:
    """start(ear=…, sink=…, settings={…}, **keys of [api]) → a session that runs until the test ends."""
    async with contextlib.AsyncExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(1))

        async def start_one(
            *, ear: bool = False, gate: asyncio.Event | None = None, settings: dict[str, object] | None = None, **api: object
        ) -> Seen:
            bus = ScriptedBus()
            model = ServedModel(
                name="scripted", pipeline=voice_pipeline(ear=ear), voices=("Ethan", "chelsie"), max_deadline_s=60, created=0
            )
            config = ApiConfig(**{"voice_prepare": False, **api})  # type: ignore[arg-type]
            fetcher = MediaFetcher(config)
            services = VoiceServices(bus=bus, model=model, config=config, metrics=Metrics(), fetcher=fetcher, threads=threads)
            events: list[SessionEvent] = []

            async def sink(event: SessionEvent) -> None:
                if gate is not None:
                    await gate.wait()
                events.append(event)
                seen.changed.set()

            wanted = {"turn_detection": None, **(settings or {})}
            session = VoiceSession(services, SessionSettings(speaks=True, voice="Ethan"), sink)
            seen = Seen(session, bus, services, events)
            running = asyncio.create_task(session.run())
            await session.configure(_with(session.settings, wanted))

            async def stop() -> None:
                await session.close()
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)

            stack.push_async_callback(stop)
            return seen

        yield start_one


def _with(settings: SessionSettings, changed: dict[str, object]) -> SessionSettings:
    import dataclasses

    return dataclasses.replace(settings, **changed)  # type: ignore[arg-type]


@functools.cache
def spoken(words: str) -> bytes:
    """PCM16, 24 kHz: the words, 0.3 s of silence before them."""
    from bench.spoken import spoken

    wav = spoken(words)
    return b"\0" * 14_400 + wav[wav.index(b"data") + 8 :]


def silence(seconds: float) -> bytes:
    return b"\0" * (int(24_000 * seconds) * 2)
