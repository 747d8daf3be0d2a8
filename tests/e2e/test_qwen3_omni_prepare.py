"""A turn that was prepared while it was spoken, through a running server: what is left to do, and an answer equal to a fresh server's."""

from __future__ import annotations

import asyncio
import pathlib
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from bench.realtime_socket import RealtimeSocket, connected
from omni_bus.client import BusClient
from omni_bus.deployment import RunDir
from omni_bus.events import RequestOptions
from omni_bus.payloads import ChatInput, MediaPart, Message, TextDelta, TextPart
from omni_bus.spec import load_pipeline
from omni_bus.stages.qwen3_omni.rope_index import audio_tokens
from omni_bus.wire import HostTensor
from tests.support.qwen3_omni import chirp, options, picture, png, tensor_of
from tests.support.running_server import Server, eventually, running

PATIENCE_S = 200.0
RATE = 16_000
BLOCK = 16  # positions in a KV block
PREPARE = RequestOptions(prepare=True)
ANSWER = options(max_text=16, max_frames=16)
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def servers(omni_checkpoint: pathlib.Path) -> Iterator[tuple[Server, Server]]:
    """One as it is configured by default, and one that keeps nothing. Code2Wav in float64: equal codes are equal samples."""
    sets = [
        f"model.path={omni_checkpoint}",
        "stages.code2wav.dtype=float64",
        *(f"stages.{stage}.threads=1" for stage in ("processor", "thinker", "talker", "code2wav")),
    ]
    nothing = ["stages.thinker.prefix_cache=false", "stages.thinker.media_cache_mb=0", "stages.processor.media_cache_mb=0"]
    with running("qwen3_omni_tiny.toml", sets=sets) as usual, running("qwen3_omni_tiny.toml", sets=[*sets, *nothing]) as fresh:
        yield usual, fresh


class Answer:
    def __init__(self) -> None:
        self.text = ""
        self.pcm = b""
        self.usage: dict[str, dict[str, int]] = {}

    @property
    def thinker(self) -> dict[str, int]:
        return self.usage["thinker"]


async def ask(server: Server, chat: ChatInput, tensors: Tensors, wanted: RequestOptions) -> Answer:
    answer = Answer()
    sent = {
        name: HostTensor(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.numpy().tobytes())
        for name, tensor in tensors.items()
    }
    client = await BusClient.connect(RunDir(server.run_dir).broker, load_pipeline("qwen3_omni"), timeout_s=PATIENCE_S)
    try:
        async with asyncio.timeout(PATIENCE_S):
            stream = await client.submit(options=wanted, payload=chat, tensors=sent, deadline_s=PATIENCE_S)
            async with stream:
                async for item in stream:
                    if isinstance(item.payload, TextDelta):
                        answer.text += item.payload.text
                    answer.pcm += b"".join(bytes(tensor.data) for tensor in item.tensors.values())
            answer.usage = {stage: dict(usage) for stage, usage in stream.usage.items()}
    finally:
        await client.close()
    return answer


def spoken(seconds: float, seed: int) -> np.ndarray:
    """Loudest at its beginning, so that what follows moves no floor of its features; a moment of silence at its end."""
    audio = chirp(seconds, seed)[: int(seconds * 100) * 160]
    audio[: RATE // 4] *= 2.2
    return np.concatenate([audio, np.zeros(480, np.float32)])


async def test_a_prepared_turn_has_its_tail_left_to_do_and_the_answer_of_a_fresh_server(servers: tuple[Server, Server]) -> None:
    """History: a spoken turn, its answer and a picture. Then 20 s of speech, prepared at its beginning, at 8 s and at 16 s."""
    usual, fresh = servers
    first, whole = spoken(3, 31), spoken(20, 32)
    history = (
        Message("user", (MediaPart("audio", 0),)),
        Message("assistant", (TextPart("I hear you."),)),
        Message("user", (MediaPart("image", 1), TextPart("Look."))),
        Message("assistant", (TextPart("A wall."),)),
    )
    chat = ChatInput((*history, Message("user", (MediaPart("audio", 2),))))
    kept = {"media0": torch.from_numpy(first), "media1": tensor_of(png(picture(64, 96, 5)))}

    def heard(samples: int) -> Tensors:
        return {**kept, "media2": torch.from_numpy(whole[:samples])}

    ahead = [
        await ask(usual, ChatInput(history), kept, PREPARE),
        await ask(usual, chat, heard(8 * RATE + 400), PREPARE),
        await ask(usual, chat, heard(16 * RATE + 400), PREPARE),
    ]
    answer = await ask(usual, chat, heard(len(whole)), ANSWER)
    assert [one.text for one in ahead] == [""] * 3 and not any(one.pcm for one in ahead)
    assert [one.thinker["encoded_parts"] for one in (*ahead, answer)] == [2, 1, 1, 1]

    def computed(one: Answer) -> int:
        return one.thinker["prompt_tokens"] - one.thinker["cached_tokens"]

    window, tail = 104, audio_tokens(whole[16 * RATE :].size // 160)
    assert computed(ahead[1]) < window + 2 * BLOCK and computed(ahead[2]) < window + BLOCK + 1
    assert computed(answer) <= tail + BLOCK + 8, "the tail, what the template puts behind it, and a block begun before"
    alone = await ask(fresh, chat, heard(len(whole)), ANSWER)
    assert alone.thinker["encoded_parts"] == 5 and "cached_tokens" not in alone.thinker
    assert (answer.text, answer.pcm) == (alone.text, alone.pcm) and len(answer.pcm) > 1920 * 2


async def test_the_turn_after_it_computes_what_is_new(servers: tuple[Server, Server]) -> None:
    usual, fresh = servers
    messages: tuple[Message, ...] = ()
    tensors: Tensors = {}
    last = 0
    for number, seconds in enumerate((2, 4, 3)):
        tensors[f"media{number}"] = torch.from_numpy(spoken(seconds, 40 + number))
        messages = (*messages, Message("user", (MediaPart("audio", number),)))
        answer = await ask(usual, ChatInput(messages), tensors, ANSWER)
        new = answer.thinker["prompt_tokens"] - last
        assert answer.thinker["prompt_tokens"] - answer.thinker["cached_tokens"] <= new + BLOCK
        assert answer.thinker["encoded_parts"] == 1
        alone = await ask(fresh, ChatInput(messages), tensors, ANSWER)
        assert (answer.text, answer.pcm) == (alone.text, alone.pcm) and alone.thinker["encoded_parts"] == number + 1
        messages = (*messages, Message("assistant", (TextPart(f"Answer {number}."),)))
        last = answer.thinker["prompt_tokens"]


async def test_given_words_are_spoken_word_for_word(servers: tuple[Server, Server]) -> None:
    words = "Good evening, Zoë. It is 7 o'clock."
    chat = ChatInput((Message("user", (TextPart("Read it to me."),)),), say=words)
    answers = [await ask(server, chat, {}, ANSWER) for server in (*servers, servers[0])]
    assert [answer.text for answer in answers] == [words] * 3
    assert len({answer.pcm for answer in answers}) == 1 and len(answers[0].pcm) > 1920 * 2
    other = await ask(servers[0], msgspec.structs.replace(chat, say="No."), {}, ANSWER)
    assert other.text == "No." and other.pcm != answers[0].pcm


def spoken_pcm(seconds: float, seed: int) -> bytes:
    """PCM16 at 24 kHz, a noise that is loudest at its beginning."""
    noise = np.random.default_rng(seed).standard_normal(int(seconds * 24_000)) * 2000
    noise[: 24_000 // 4] *= 3
    return noise.clip(-32768, 32767).astype("<i2").tobytes()


def prompt_computed(server: Server) -> float:
    """Prompt positions that the Thinker has computed, as it last said."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    name = "omni_bus_stage_prompt_computed_total{"
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name) and 'stage="thinker"' in line)


async def test_a_session_finds_what_was_prepared_while_its_user_spoke(servers: tuple[Server, Server]) -> None:
    """Over /v1/realtime, through its resampler and buffer. Then a second, longer turn finds the whole first one."""
    usual, fresh = servers
    turns = spoken_pcm(20, 50), spoken_pcm(23, 51)
    texts: dict[str, list[str]] = {}
    usages: dict[str, list[dict[str, Any]]] = {}
    for name, server in (("usual", usual), ("fresh", fresh)):
        texts[name], usages[name] = [], []
        async with connected(server.url, "qwen3-omni-tiny") as socket:
            session = {
                "type": "realtime",
                "output_modalities": ["text"],
                "max_output_tokens": 6,
                "audio": {"input": {"turn_detection": None}},
            }
            await socket.send("session.update", session=session)
            await socket.until("session.updated")
            for pcm in turns:
                at = 0
                for seconds in (9, 17) if name == "usual" else ():
                    before = prompt_computed(server)
                    await socket.append(pcm[at : seconds * 48_000])
                    at = seconds * 48_000
                    await asyncio.to_thread(
                        eventually, lambda before=before: prompt_computed(usual) >= before + 104, PATIENCE_S, "it is prepared"
                    )
                await socket.append(pcm[at:])
                since = socket.count
                await socket.send("input_audio_buffer.commit")
                await socket.send("response.create")
                done = await socket.until("response.done", since=since, limit=PATIENCE_S)
                texts[name].append((await socket.until("response.output_text.done", since=since))["text"])
                usages[name].append(done["response"]["usage"])
    assert texts["usual"] == texts["fresh"]
    left = [usage["input_tokens"] - usage["input_token_details"]["cached_tokens"] for usage in usages["usual"]]
    tails = [audio_tokens(int(seconds * 100) - 1600) for seconds in (20.1, 23.1)]
    for computed, tail in zip(left, tails, strict=True):
        assert computed <= tail + BLOCK + 8, "the tail, what the template puts behind it, and a block begun before"
    assert all(usage["input_token_details"]["cached_tokens"] == 0 for usage in usages["fresh"])
    assert [usage["input_tokens"] for usage in usages["usual"]] == [usage["input_tokens"] for usage in usages["fresh"]]


class Talk:
    """A Realtime session that answers texts greedily; `turns`: its history as a template and a client tell it."""

    def __init__(self, socket: RealtimeSocket) -> None:
        self.socket = socket
        self.turns: list[tuple[str, str]] = []
        self.ids: list[str] = []  # of the items of `turns`
        self.audio_ms: dict[str, float] = {}  # of each answer

    async def begin(self, *, speaks: bool) -> None:
        session = {
            "type": "realtime",
            "output_modalities": ["audio" if speaks else "text"],
            "max_output_tokens": 12,
            "sampling": {"thinker": {"temperature": 0.0}, "talker": {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}},
            "audio": {"input": {"turn_detection": None}},
        }
        await self.socket.send("session.update", session=session)
        await self.socket.until("session.updated")

    async def add(self, role: str, text: str) -> None:
        since = self.socket.count
        content = [{"type": "input_text" if role == "user" else "output_text", "text": text}]
        await self.socket.send("conversation.item.create", item={"type": "message", "role": role, "content": content})
        self.ids.append((await self.socket.until("conversation.item.done", since=since))["item"]["id"])
        self.turns.append((role, text))

    async def answer(self) -> tuple[str, dict[str, Any]]:
        """Its text and its usage."""
        since = self.socket.count
        await self.socket.send("response.create")
        response = (await self.socket.until("response.done", since=since, limit=PATIENCE_S))["response"]
        (item,) = response["output"]
        (part,) = item["content"]
        text = str(part["transcript"] if part["type"] == "output_audio" else part["text"])
        pcm = [event.pcm for event in self.socket.events[since:] if event.type == "response.output_audio.delta"]
        self.audio_ms[item["id"]] = sum(map(len, pcm)) / 48
        self.ids.append(item["id"])
        self.turns.append(("assistant", text))
        return text, response["usage"]

    async def delete(self, number: int) -> None:
        await self.socket.send("conversation.item.delete", item_id=self.ids[number])
        await self.socket.until("conversation.item.deleted")
        del self.ids[number], self.turns[number]

    async def halve(self, number: int) -> None:
        item_id = self.ids[number]
        audio_end_ms = int(self.audio_ms[item_id] / 2)
        await self.socket.send("conversation.item.truncate", item_id=item_id, content_index=0, audio_end_ms=audio_end_ms)
        await self.socket.send("conversation.item.retrieve", item_id=item_id)
        item = (await self.socket.until("conversation.item.retrieved"))["item"]
        self.turns[number] = "assistant", item["content"][0]["transcript"]


def prompt_ids(tokenizer: Any, turns: Sequence[tuple[str, str]]) -> list[int]:
    """By transformers' own template; a message without words is none."""
    messages = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in turns if text]
    ids: list[int] = tokenizer(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))["input_ids"]
    return ids


def common(one: Sequence[int], other: Sequence[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@pytest.mark.parametrize("change", ["nothing", "delete_question", "delete_answer", "truncate"])
async def test_a_changed_conversation_is_computed_from_the_change_on(
    servers: tuple[Server, Server], omni_checkpoint: pathlib.Path, change: str
) -> None:
    """What the Thinker keeps of two turns is used up to the item that was deleted or truncated, to the block, and no further."""
    usual, fresh = servers
    tokenizer = AutoTokenizer.from_pretrained(omni_checkpoint)
    names = " ".join(f"{change} {number}," for number in range(12))  # other words in each case: nothing of another one is found
    async with connected(usual.url, "qwen3-omni-tiny") as socket:
        talk = Talk(socket)
        await talk.begin(speaks=change == "truncate")
        prompts = []
        for question in (f"{names} which of them is the first?", f"And of {names} which is the last?"):
            await talk.add("user", question)
            prompts.append(prompt_ids(tokenizer, talk.turns))
            _, usage = await talk.answer()
            assert usage["input_tokens"] == len(prompts[-1])
        unchanged = prompt_ids(tokenizer, [*talk.turns, ("user", "And why?")])
        match change:
            case "delete_question":
                await talk.delete(2)
            case "delete_answer":
                await talk.delete(1)
            case "truncate":
                whole = talk.turns[1][1]
                await talk.halve(1)
                assert len(talk.turns[1][1]) < len(whole) and whole.startswith(talk.turns[1][1])
        await talk.add("user", "And why?")
        history = list(talk.turns)
        prompt = prompt_ids(tokenizer, history)
        text, usage = await talk.answer()
    assert usage["input_tokens"] == len(prompt)
    kept = max(common(known, prompt) for known in prompts) // BLOCK * BLOCK
    kept_unchanged = max(common(known, unchanged) for known in prompts) // BLOCK * BLOCK
    cached = usage["input_token_details"]["cached_tokens"]
    if change == "nothing":
        assert kept_unchanged <= cached <= kept_unchanged + BLOCK, "of the second answer's own tokens a block at most"
    else:
        assert 0 < cached == kept < kept_unchanged

    async with connected(fresh.url, "qwen3-omni-tiny") as socket:
        alone = Talk(socket)
        await alone.begin(speaks=change == "truncate")
        for role, words in history:
            if words:
                await alone.add(role, words)
        assert (await alone.answer())[0] == text
        done = (await socket.until("response.done"))["response"]["usage"]
    assert (done["input_tokens"], done["input_token_details"]["cached_tokens"]) == (len(prompt), 0)


def test_nothing_is_held_afterwards(servers: tuple[Server, Server]) -> None:
    def free(server: Server) -> bool:
        loads = [replica["load"] for stage in server.get("/v1/status")["stages"] for replica in stage["replicas"]]
        held = ("kv_blocks_used", "slots_used", "segments_used", "held")
        return len(loads) == 4 and not any(load is None or any(load[name] for name in held) for load in loads)

    for server in servers:
        eventually(lambda server=server: free(server), 30, "a heartbeat of every stage that says nothing is held")  # type: ignore[misc]
