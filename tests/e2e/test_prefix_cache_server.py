"""Conversations with a running server, as a client of its broker: later turns are computed from where they differ, prepared prompts
say nothing, and answers are those of a fresh request."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import pathlib
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence

import numpy as np
import pytest
import torch

from omni_bus.client import BusClient, ClientStream
from omni_bus.deployment import RunDir
from omni_bus.events import RequestOptions
from omni_bus.payloads import ChatInput, Message, TextDelta, TextPart
from omni_bus.sampling import SamplingParams
from omni_bus.spec import load_pipeline
from omni_bus.stages.cascade.payloads import Prompt, Turn
from omni_bus.stages.contract import Chunk, Output
from omni_bus.wire import HostTensor
from tests.support.cascade import Driver, skip_without_packages
from tests.support.qwen3_omni import AUDIO, Case, Reference, chirp, options
from tests.support.running_server import Server, eventually, running

PATIENCE_S = 200.0
BLOCK = 16  # the default


@dataclasses.dataclass
class Heard:
    """All that came of one request."""

    deltas: list[TextDelta] = dataclasses.field(default_factory=list)
    pcm_bytes: int = 0
    closed: set[str] = dataclasses.field(default_factory=set)
    usage: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def ids(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.token_ids]


async def submit(client: BusClient, chat: ChatInput, tensors: dict[str, torch.Tensor], wanted: RequestOptions) -> ClientStream:
    sent = {
        name: HostTensor(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.numpy().tobytes())
        for name, tensor in tensors.items()
    }
    return await client.submit(options=wanted, payload=chat, tensors=sent, deadline_s=PATIENCE_S)


async def ask(client: BusClient, chat: ChatInput, tensors: dict[str, torch.Tensor], wanted: RequestOptions) -> Heard:
    heard = Heard()
    async with asyncio.timeout(PATIENCE_S), await submit(client, chat, tensors, wanted) as stream:
        async for item in stream:
            if isinstance(item.payload, TextDelta):
                heard.deltas.append(item.payload)
            heard.pcm_bytes += sum(len(tensor.data) for tensor in item.tensors.values())
            if item.last:
                heard.closed.add(item.edge)
        heard.usage = stream.usage
    return heard


@contextlib.asynccontextmanager
async def connected(server: Server, pipeline: str) -> AsyncIterator[BusClient]:
    client = await BusClient.connect(RunDir(server.run_dir).broker, load_pipeline(pipeline), timeout_s=PATIENCE_S)
    try:
        yield client
    finally:
        await client.close()


def metric(server: Server, name: str, stage: str) -> float:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name}{{") and f'stage="{stage}"' in line)


def all_free(server: Server) -> bool:
    replicas = [replica for stage in server.get("/v1/status")["stages"] for replica in stage["replicas"]]
    return all(replica["load"] is not None and not replica["load"]["kv_blocks_used"] for replica in replicas)


def common(one: Sequence[int], other: Sequence[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


# ---- Qwen3-Omni


@pytest.fixture(scope="module")
def omni(omni_checkpoint: pathlib.Path) -> Iterator[Server]:
    sets = [f"model.path={omni_checkpoint}", *(f"stages.{stage}.threads=1" for stage in ("thinker", "talker", "code2wav"))]
    with running("qwen3_omni_tiny.toml", sets=sets) as server:
        yield server


OMNI = options(max_text=12, max_frames=8)
PREPARE = RequestOptions(prepare=True, sampling=OMNI.sampling)


async def test_turns_of_text_and_audio_are_those_of_a_fresh_request(omni: Server, reference: Reference) -> None:
    """Against transformers, which keeps nothing from one request to the next."""
    questions: tuple[tuple, ...] = (("Who are you?",), (AUDIO, "What is said?"), ("And now?", ("audio", chirp(0.9, 7))))
    turns: tuple = ()
    async with connected(omni, "qwen3_omni") as client:
        before = 0
        for question in questions:
            case = Case((*turns, ("user", question)))
            heard = await ask(client, *case.chat(), OMNI)
            expected = reference.generate(case, max_text=12, max_frames=8)
            assert heard.text == reference.tokenizer.decode(expected.text, skip_special_tokens=True)
            assert heard.usage["talker"]["frames"] == expected.codes.shape[1] and bool(heard.pcm_bytes) == bool(
                expected.codes.shape[1]
            )
            cached, prompt = heard.usage["thinker"]["cached_tokens"], heard.usage["thinker"]["prompt_tokens"]
            assert cached >= before // BLOCK * BLOCK, "at least the prompt before is there, up to where its answer begins"
            assert cached < prompt
            before = prompt - 3  # what opens the answer is written otherwise when the answer is there
            turns = (*turns, ("user", question), ("assistant", (heard.text,)))
        assert cached > BLOCK
    eventually(
        lambda: metric(omni, "omni_bus_stage_prompt_cached_total", "thinker") >= cached, 20, "a heartbeat with the figure"
    )
    eventually(lambda: all_free(omni), 20, "kept blocks are free blocks")


async def test_a_prepared_conversation_is_there_when_it_is_asked(omni: Server, reference: Reference) -> None:
    case = Case((("user", ("Listen.", ("audio", chirp(1.3, 21)), "What is it?")),))
    chat, tensors = case.chat()
    async with connected(omni, "qwen3_omni") as client:
        prepared = await ask(client, chat, tensors, PREPARE)
        assert prepared.deltas == [TextDelta("", (), "stop")] and prepared.closed == {"thinker->client"}
        assert prepared.usage.keys() == {"processor", "thinker"} and prepared.usage["thinker"]["completion_tokens"] == 0
        heard = await ask(client, chat, tensors, OMNI)
    expected = reference.generate(case, max_text=12, max_frames=8)
    assert heard.text == reference.tokenizer.decode(expected.text, skip_special_tokens=True)
    assert heard.usage["talker"]["frames"] == expected.codes.shape[1]
    length = heard.usage["thinker"]["prompt_tokens"]
    assert heard.usage["thinker"]["cached_tokens"] == (length - 1) // BLOCK * BLOCK > prepared.usage["thinker"]["cached_tokens"]


async def test_prepared_requests_that_are_cancelled_leave_nothing(omni: Server) -> None:
    dice = np.random.default_rng(1)
    async with connected(omni, "qwen3_omni") as client:
        for number in range(20):
            case = Case((("user", (("audio", chirp(0.5 + dice.random(), number % 4)), "What is it?")),))
            async with asyncio.timeout(PATIENCE_S), await submit(client, *case.chat(), PREPARE) as stream:
                await asyncio.sleep(float(dice.random()) * 0.05)
                await stream.cancel()
        case = Case((("user", ("Hello.",)),))
        assert (await ask(client, *case.chat(), OMNI)).closed == {"thinker->client", "code2wav->client"}
    eventually(lambda: all_free(omni), 20, "every block is free")


# ---- the cascade


@pytest.fixture(scope="module")
def quickstart() -> Iterator[Server]:
    skip_without_packages()
    with running("quickstart.toml", sets=["stages.asr.threads=1"]) as server:
        yield server


SMOL = RequestOptions(sampling={"llm": SamplingParams(temperature=0.0, max_tokens=20)})


async def test_turns_with_smollm2_compute_exactly_the_changed_suffix(quickstart: Server) -> None:
    llm = Driver("llm", prefix_cache=False)
    program = llm.stage.program  # type: ignore[attr-defined]
    known: list[list[int]] = []

    def fresh(turns: Sequence[Turn]) -> tuple[list[int], list[int]]:
        """Prompt and answer of a stage that keeps nothing."""
        request = llm.open(RequestOptions(), SamplingParams(max_tokens=20))
        llm.stage.feed(request, Chunk("asr->llm", Prompt(tuple(turns)), {}, True))
        outputs = [one for one in llm.run() if isinstance(one, Output)]
        ids = [token for one in outputs for token in one.payload.token_ids]  # type: ignore[attr-defined]
        return program._chat.prompt(turns, program._system_prompt), ids

    async def turn(turns: Sequence[Turn]) -> Heard:
        chat = ChatInput(tuple(Message(one.role, (TextPart(one.text),)) for one in turns))
        heard = await ask(client, chat, {}, SMOL)
        prompt, answer = fresh(turns)
        assert heard.ids == answer
        assert heard.usage["llm"]["prompt_tokens"] == len(prompt)
        most = max((common(before, prompt) for before in known), default=0)
        assert heard.usage["llm"]["cached_tokens"] == min(most, len(prompt) - 1) // BLOCK * BLOCK
        known.append([*prompt, *answer[:-1]])
        return heard

    async with connected(quickstart, "cascade") as client:
        talk = [Turn("user", "What is the capital of France?")]
        for question in ("And what is it known for?", "Name one museum there."):
            heard = await turn(talk)
            talk = [*talk, Turn("assistant", heard.text.strip()), Turn("user", question)]
        whole = await turn(talk)
        assert whole.usage["llm"]["cached_tokens"] >= 3 * BLOCK
        cut = [talk[0], Turn("assistant", talk[1].text[: len(talk[1].text) // 2]), *talk[2:]]
        await turn(cut)  # an answer was heard only in part
        await turn([*talk[:2], *talk[4:]])  # a question and its answer were deleted
        await turn(talk)  # all of it is still there
    eventually(lambda: all_free(quickstart), 20, "kept blocks are free blocks")


@pytest.mark.parametrize("modalities", [("text",), ("text", "audio")])
async def test_a_prepared_prompt_of_the_cascade_says_nothing(quickstart: Server, modalities: tuple[str, ...]) -> None:
    chat = ChatInput((Message("user", (TextPart(f"Please name {len(modalities)} rivers of Italy."),)),))
    async with connected(quickstart, "cascade") as client:
        prepared = await ask(client, chat, {}, wanting(prepare=True, modalities=modalities))
        assert prepared.deltas == [TextDelta("", (), "stop")] and not prepared.pcm_bytes
        assert prepared.closed >= {"llm->client"} and prepared.usage["llm"]["completion_tokens"] == 0
        heard = await ask(client, chat, {}, SMOL)
        assert heard.ids
        assert heard.usage["llm"]["cached_tokens"] == (heard.usage["llm"]["prompt_tokens"] - 1) // BLOCK * BLOCK


def wanting(*, prepare: bool, modalities: tuple[str, ...]) -> RequestOptions:
    return RequestOptions(prepare=prepare, modalities=modalities, sampling=SMOL.sampling)
