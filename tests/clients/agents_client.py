"""A spoken turn, a tool call and a barge-in with openai-agents' RealtimeRunner."""

from __future__ import annotations

import argparse
import asyncio
import contextlib

from agents import function_tool, set_tracing_disabled
from agents.realtime import RealtimeAgent, RealtimeModelSendRawMessage, RealtimeRunner, RealtimeSession
from microphone import Microphone
from scenario import MINIMUM_PLAYED_S, WEATHER, arguments
from seen import Seen, short


class Talk:
    """One session: what it tells its user, and under it each event of the server."""

    def __init__(self, session: RealtimeSession, seen: Seen) -> None:
        self.session = session
        self.seen = seen
        self.microphone = Microphone(session.send_audio)

    async def read(self) -> None:
        async for event in self.session:
            match event.type:
                case "raw_model_event" if event.data.type == "raw_server_event":
                    self.seen.add(event.data.data["type"], **short(event.data.data))
                case "raw_model_event" if event.data.type == "exception":
                    self.seen.add("client.exception", wrong=repr(event.data.exception), context=event.data.context)
                case "raw_model_event":
                    pass
                case "audio":
                    self.seen.hear(event.item_id, event.audio.data)
                case "error":
                    self.seen.add("client.error", wrong=str(event.error))
                case "tool_start":
                    self.seen.add("client.tool_start", name=event.tool.name, arguments=event.arguments)
                case "tool_end":
                    self.seen.add("client.tool_end", name=event.tool.name, output=str(event.output))
                case "history_updated":
                    history = [item.model_dump(exclude_none=True) for item in event.history]
                    self.seen.add("client.history", history=history)
                case kind:
                    self.seen.add(f"client.{kind}")


async def turn(talk: Talk, said: argparse.Namespace) -> None:
    if said.typed:
        await talk.session.send_message(said.typed)
    else:
        await talk.microphone.say(said.say[0])
        await talk.seen.until("conversation.item.input_audio_transcription.completed")
    await talk.seen.until("client.agent_end")
    await asyncio.wait_for(talk.seen.until("client.history"), 60)


async def tool(talk: Talk, said: argparse.Namespace) -> None:
    """The package calls the function, sends its output and asks for the answer by itself."""
    await turn(talk, said)
    await talk.seen.until("client.tool_end")
    await talk.seen.until(
        "response.done", where=lambda line: any(item["type"] == "message" for item in line["response"]["output"])
    )


async def barge(talk: Talk, said: argparse.Namespace) -> None:
    """The package truncates by its own playback clock, and asks for the item."""
    asking, interrupting = said.say
    seen = talk.seen
    await talk.microphone.say(asking)
    await seen.until("response.output_audio.delta")
    await asyncio.sleep(MINIMUM_PLAYED_S)
    since = seen.count
    speaking = asyncio.create_task(talk.microphone.say(interrupting))
    await seen.until("client.audio_interrupted", since)
    await seen.until("conversation.item.truncated", since)
    await seen.until("conversation.item.retrieved", since)
    await speaking
    await seen.until("response.done", since, lambda line: line["response"]["status"] != "cancelled")


SCENARIOS = {"turn": turn, "tool": tool, "barge": barge}


async def main() -> None:
    said, seen = arguments(), Seen()
    set_tracing_disabled(True)  # of the package's own reports to OpenAI

    @function_tool(name_override=WEATHER["name"], description_override=WEATHER["description"])
    def weather(city: str) -> str:
        return str(said.weather)

    agent = RealtimeAgent(
        name="Assistant", instructions=said.instructions or None, tools=[weather] if said.scenario == "tool" else []
    )
    runner = RealtimeRunner(agent)
    settings = {"model_name": said.model, "voice": said.voice, "max_output_tokens": said.max_tokens}
    url = f"{said.url.replace('http', 'ws', 1)}/v1/realtime?model={said.model}"
    session = await runner.run(model_config={"url": url, "api_key": "none", "initial_model_settings": settings})  # type: ignore[typeddict-item]
    async with session:
        talk = Talk(session, seen)
        tasks = [asyncio.create_task(talk.read())]
        await seen.until("session.updated")
        for item in said.history:
            create = RealtimeModelSendRawMessage({"type": "conversation.item.create", "other_data": {"item": item}})
            await session.model.send_event(create)
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
