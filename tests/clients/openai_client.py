"""A spoken turn, a tool call and a barge-in with the openai package's Realtime connection."""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import time
from typing import Any

from microphone import Microphone
from openai import AsyncOpenAI
from openai.resources.realtime.realtime import AsyncRealtimeConnection
from openai.types.realtime import RealtimeServerEvent
from pydantic import TypeAdapter, ValidationError
from scenario import CITY, MINIMUM_PLAYED_S, WEATHER, arguments
from seen import Seen, short

STRICT: TypeAdapter[Any] = TypeAdapter(RealtimeServerEvent)
TOOL = {
    "type": "function",
    **WEATHER,
    "parameters": {"type": "object", "properties": {"city": CITY}, "required": ["city"]},
}


class Talk:
    """One connection: its reader, its microphone, and when an item's audio began to play."""

    def __init__(self, connection: AsyncRealtimeConnection, seen: Seen) -> None:
        self.connection = connection
        self.seen = seen
        self.microphone = Microphone(self._append)
        self.began: dict[str, float] = {}

    async def _append(self, pcm: bytes) -> None:
        await self.connection.input_audio_buffer.append(audio=base64.b64encode(pcm).decode())

    async def read(self) -> None:
        """Every event, held to the package's own types, of which its parser asks less than pydantic does."""
        while True:
            raw = await self.connection.recv_bytes()
            event = self.connection.parse_event(raw)
            plain = json.loads(raw)
            try:
                STRICT.validate_python(plain)
            except ValidationError as wrong:
                self.seen.add("client.invalid", event=plain["type"], wrong=str(wrong))
            if event.type == "response.output_audio.delta":
                self.began.setdefault(event.item_id, time.monotonic())
                self.seen.hear(event.item_id, base64.b64decode(event.delta))
            self.seen.add(event.type, **short(plain))


async def turn(talk: Talk, said: argparse.Namespace) -> None:
    if said.typed:
        item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": said.typed}]}
        await talk.connection.conversation.item.create(item=item)
        await talk.connection.response.create()
    else:
        await talk.microphone.say(said.say[0])
    await talk.seen.until("response.done")
    if not said.typed:
        await talk.seen.until("conversation.item.input_audio_transcription.completed")


async def tool(talk: Talk, said: argparse.Namespace) -> None:
    await turn(talk, said)
    call = await talk.seen.until("response.function_call_arguments.done")
    after = talk.seen.count
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": said.weather}
    await talk.connection.conversation.item.create(item=output)
    await talk.connection.response.create()
    await talk.seen.until("response.done", after)


async def barge(talk: Talk, said: argparse.Namespace) -> None:
    asking, interrupting = said.say
    seen, connection = talk.seen, talk.connection
    await talk.microphone.say(asking)
    audio = await seen.until("response.output_audio.delta")
    await asyncio.sleep(MINIMUM_PLAYED_S)
    since = seen.count
    speaking = asyncio.create_task(talk.microphone.say(interrupting))
    await seen.until("input_audio_buffer.speech_started", since)
    played = time.monotonic() - talk.began[audio["item_id"]]
    received = len(seen.audio[audio["item_id"]]) / 48_000
    end = int(min(played, received) * 1000)
    seen.add("client.truncates", audio_end_ms=end)
    await connection.conversation.item.truncate(
        item_id=audio["item_id"], content_index=audio["content_index"], audio_end_ms=end
    )
    await seen.until("conversation.item.truncated", since)
    await connection.conversation.item.retrieve(item_id=audio["item_id"])
    await seen.until("conversation.item.retrieved", since)
    await speaking
    await seen.until("response.done", since, lambda line: line["response"]["status"] != "cancelled")


SCENARIOS = {"turn": turn, "tool": tool, "barge": barge}


async def main() -> None:
    said, seen = arguments(), Seen()
    client = AsyncOpenAI(base_url=f"{said.url}/v1", api_key="none")
    async with client.realtime.connect(model=said.model) as connection:
        talk = Talk(connection, seen)
        tasks = [asyncio.create_task(talk.read())]
        await seen.until("session.created")
        session: dict[str, Any] = {
            "type": "realtime",
            "instructions": said.instructions,
            "audio": {
                "input": {
                    "format": {"type": "audio/pcm", "rate": 24000},
                    "transcription": {"model": "whisper-1"},
                    "turn_detection": {"type": "server_vad", "silence_duration_ms": 500},
                },
                "output": {"format": {"type": "audio/pcm", "rate": 24000}, "voice": said.voice},
            },
            "max_output_tokens": said.max_tokens,
        }
        if said.scenario == "tool":
            session["tools"] = [TOOL]
        await connection.session.update(session=session)  # type: ignore[arg-type]
        await seen.until("session.updated")
        for item in said.history:
            await connection.conversation.item.create(item=item)
        if not said.typed:
            tasks.append(asyncio.create_task(talk.microphone.run()))
        try:
            await SCENARIOS[said.scenario](talk, said)
        finally:
            for task in tasks:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
    seen.report_audio(said.out)


if __name__ == "__main__":
    asyncio.run(main())
