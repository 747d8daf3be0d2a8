"""A spoken turn, a tool call and a barge-in with pipecat-ai's OpenAIRealtimeLLMService in a pipeline with a speaker."""

from __future__ import annotations

import argparse
import asyncio
import contextlib

from loguru import logger
from microphone import RATE, Microphone
from pipecat.adapters.llm.schemas.function_schema import FunctionSchema
from pipecat.adapters.llm.schemas.tools_schema import ToolsSchema
from pipecat.frames.frames import (
    BotStartedSpeakingFrame,
    BotStoppedSpeakingFrame,
    ErrorFrame,
    Frame,
    FunctionCallResultFrame,
    InputAudioRawFrame,
    InterruptionFrame,
    LLMFullResponseEndFrame,
    LLMFullResponseStartFrame,
    LLMMessagesAppendFrame,
    LLMRunFrame,
    MetricsFrame,
    OutputAudioRawFrame,
    StartFrame,
    TranscriptionFrame,
    TTSAudioRawFrame,
    TTSStartedFrame,
    TTSTextFrame,
    UserStartedSpeakingFrame,
    UserStoppedSpeakingFrame,
)
from pipecat.metrics.metrics import LLMUsageMetricsData
from pipecat.observers.base_observer import BaseObserver, FramePushed
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineParams, PipelineWorker
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import LLMContextAggregatorPair
from pipecat.services.llm_service import FunctionCallParams
from pipecat.services.openai.realtime.events import (
    AudioConfiguration,
    AudioInput,
    AudioOutput,
    InputAudioTranscription,
    SessionProperties,
    TurnDetection,
)
from pipecat.services.openai.realtime.llm import OpenAIRealtimeLLMService
from pipecat.transports.base_output import BaseOutputTransport
from pipecat.transports.base_transport import TransportParams
from pipecat.workers.runner import WorkerRunner
from scenario import CITY, MINIMUM_PLAYED_S, WEATHER, arguments
from seen import Seen

TOLD = (
    BotStartedSpeakingFrame,
    BotStoppedSpeakingFrame,
    InterruptionFrame,
    LLMFullResponseEndFrame,
    LLMFullResponseStartFrame,
    TTSStartedFrame,
    UserStartedSpeakingFrame,
    UserStoppedSpeakingFrame,
)


class Speaker(BaseOutputTransport):
    """Plays in real time into nowhere; what was played of each answer is kept."""

    def __init__(self, seen: Seen) -> None:
        super().__init__(TransportParams(audio_out_enabled=True, audio_out_sample_rate=RATE))
        self._seen = seen
        self._answers = 0

    async def start(self, frame: StartFrame) -> None:
        await super().start(frame)
        await self.set_transport_ready(frame)

    async def process_frame(self, frame: Frame, direction: object) -> None:
        if isinstance(frame, TTSStartedFrame):
            self._answers += 1
        await super().process_frame(frame, direction)

    async def write_audio_frame(self, frame: OutputAudioRawFrame) -> bool:
        self._seen.hear(f"answer {self._answers}", frame.audio)
        await asyncio.sleep(len(frame.audio) / 2 / RATE)
        return True


class Watcher(BaseObserver):
    """One line for each frame of interest, however many processors pass it on."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self._seen = seen
        self._known: set[int] = set()

    async def on_push_frame(self, data: FramePushed) -> None:
        frame = data.frame
        twin = frame.broadcast_sibling_id  # a broadcast goes both ways, as two frames
        if frame.id in self._known or twin in self._known:
            return
        self._known.add(frame.id)
        kind = f"client.{type(frame).__name__}"
        match frame:
            case ErrorFrame():
                self._seen.add(kind, wrong=frame.error)
            case TranscriptionFrame() | TTSTextFrame():
                self._seen.add(kind, text=frame.text)
            case TTSAudioRawFrame() if isinstance(data.source, OpenAIRealtimeLLMService):  # the speaker makes frames of its own
                self._seen.add(kind, bytes=len(frame.audio))
            case FunctionCallResultFrame():
                self._seen.add(kind, name=frame.function_name, arguments=dict(frame.arguments), result=frame.result)
            case MetricsFrame():
                for one in frame.data:
                    if isinstance(one, LLMUsageMetricsData):
                        self._seen.add("client.usage", **one.value.model_dump(exclude_none=True))
            case _ if isinstance(frame, TOLD):
                self._seen.add(kind)


class Talk:
    def __init__(self, worker: PipelineWorker, context: LLMContext, seen: Seen) -> None:
        self.worker = worker
        self.context = context
        self.seen = seen
        self.microphone = Microphone(self._send)

    async def _send(self, pcm: bytes) -> None:
        await self.worker.queue_frame(InputAudioRawFrame(pcm, sample_rate=RATE, num_channels=1))


async def greeting(talk: Talk) -> None:
    """The bot speaks first, as in the package's own examples: what it is given first, it answers, be it the user's first turn."""
    await talk.worker.queue_frame(LLMRunFrame())
    await talk.seen.until("client.LLMFullResponseEndFrame")
    await talk.seen.until("client.BotStoppedSpeakingFrame")
    talk.seen.add("client.greeted")


async def turn(talk: Talk, said: argparse.Namespace) -> None:
    await greeting(talk)
    since = talk.seen.count
    await talk.microphone.say(said.say[0])
    await talk.seen.until("client.TranscriptionFrame", since)
    await talk.seen.until("client.LLMFullResponseEndFrame", since)
    await talk.seen.until("client.BotStoppedSpeakingFrame", since)


async def tool(talk: Talk, said: argparse.Namespace) -> None:
    """The package calls the function, sends its output and asks for the answer by itself."""
    message = {"role": "user", "content": said.typed}
    await talk.worker.queue_frame(LLMMessagesAppendFrame([message], run_llm=True))
    await talk.seen.until("client.FunctionCallResultFrame")
    after = talk.seen.lines.index(await talk.seen.until("client.TTSTextFrame"))
    await talk.seen.until("client.LLMFullResponseEndFrame", after)
    await talk.seen.until("client.BotStoppedSpeakingFrame", after)


async def barge(talk: Talk, said: argparse.Namespace) -> None:
    """The package truncates what was played by itself."""
    asking, interrupting = said.say
    seen = talk.seen
    await greeting(talk)
    since = seen.count
    await talk.microphone.say(asking)
    await seen.until("client.BotStartedSpeakingFrame", since)
    await asyncio.sleep(MINIMUM_PLAYED_S)
    since = seen.count
    speaking = asyncio.create_task(talk.microphone.say(interrupting))
    await seen.until("client.InterruptionFrame", since)
    await speaking
    after = seen.lines.index(await seen.until("client.TTSStartedFrame", since))
    await seen.until("client.LLMFullResponseEndFrame", after)
    await seen.until("client.BotStoppedSpeakingFrame", after)


SCENARIOS = {"turn": turn, "tool": tool, "barge": barge}


async def main() -> None:
    said, seen = arguments(), Seen()
    logger.remove()
    logger.add(
        lambda message: seen.add("client.log", text=str(message).strip()),
        level="WARNING",
        format="{level} {message}",
        # On a slow machine pipecat may still be at its own work when we end it, and says so: nothing a server could change.
        filter=lambda record: "dangling tasks" not in record["message"],
    )

    async def weather(params: FunctionCallParams) -> None:
        await params.result_callback(said.weather)

    llm = OpenAIRealtimeLLMService(
        api_key="none",
        base_url=f"{said.url.replace('http', 'ws', 1)}/v1/realtime",
        settings=OpenAIRealtimeLLMService.Settings(
            model=said.model,
            system_instruction=said.instructions or None,
            session_properties=SessionProperties(
                audio=AudioConfiguration(
                    input=AudioInput(transcription=InputAudioTranscription(), turn_detection=TurnDetection()),
                    output=AudioOutput(voice=said.voice),
                ),
                max_output_tokens=said.max_tokens,
            ),
        ),
    )
    llm.register_function(WEATHER["name"], weather)
    schema = FunctionSchema(**WEATHER, properties={"city": CITY}, required=["city"])
    if said.scenario == "tool":
        context = LLMContext(tools=ToolsSchema(standard_tools=[schema]))
    else:
        context = LLMContext([{"role": "developer", "content": "Say hello!"}])
    user, assistant = LLMContextAggregatorPair(context)
    pipeline = Pipeline([user, llm, Speaker(seen), assistant])
    params = PipelineParams(
        enable_metrics=True, enable_usage_metrics=True, audio_in_sample_rate=RATE, audio_out_sample_rate=RATE
    )
    worker = PipelineWorker(pipeline, params=params, observers=[Watcher(seen)], idle_timeout_secs=None)
    started = asyncio.Event()

    @worker.event_handler("on_pipeline_started")
    async def on_pipeline_started(worker: PipelineWorker, frame: Frame) -> None:
        started.set()

    runner = WorkerRunner(handle_sigint=False)
    await runner.add_workers(worker)
    running = asyncio.create_task(runner.run())
    await asyncio.wait_for(started.wait(), 60)
    talk = Talk(worker, context, seen)
    speaking = asyncio.create_task(talk.microphone.run()) if not said.typed else None
    try:
        await SCENARIOS[said.scenario](talk, said)
    finally:
        if speaking:
            speaking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await speaking
        await worker.cancel()
        await running
    seen.add("client.context", messages=context.get_messages())
    seen.report_audio(said.out)


if __name__ == "__main__":
    asyncio.run(main())
