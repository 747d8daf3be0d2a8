"""Realtime sessions on whole servers: interruptions that reach every stage, sockets that go away, a server that stops, a worker that dies."""

from __future__ import annotations

import asyncio
import itertools
import pathlib
import time
import urllib.request

import aiohttp
import pytest

from bench.realtime_socket import RealtimeSocket, SocketClosed, connected
from tests.e2e.conftest import Serve
from tests.support.cascade import skip_without_packages
from tests.support.realtime_events import EventChecker
from tests.support.running_server import Server, eventually

PROBE = ("stages.source.faults=true", "stages.relay.faults=true", "stages.sink.faults=true")
ENDLESS = "!repeat:3000"
PATIENCE_S = 60.0


async def ask(socket: RealtimeSocket, words: str) -> None:
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": words}]}
    await socket.send("conversation.item.create", item=item)
    await socket.send("response.create")


def idle(server: Server) -> bool:
    """No request at the broker, and nothing held in any stage."""
    status = server.get("/v1/status")
    loads = [replica["load"] for stage in status["stages"] for replica in stage["replicas"]]
    held = ("waiting", "running", "kv_blocks_used", "slots_used")
    return not any(status["requests"].values()) and all(load and not any(load[name] for name in held) for load in loads)


def holds_slot(server: Server) -> bool:
    loads = [replica["load"] for stage in server.get("/v1/status")["stages"] for replica in stage["replicas"]]
    return any(load and load["slots_used"] for load in loads)


async def acknowledged(server: Server) -> float:
    """How many cancelled responses every stage has let go of in time, since the server was started."""
    async with aiohttp.ClientSession() as http, http.get(f"{server.url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return sum(float(line.split()[1]) for line in lines if line.startswith("omni_bus_voice_cancel_seconds_count "))


def spoken(words: str) -> bytes:
    from bench.spoken import spoken

    wav = spoken(words)
    return wav[wav.index(b"data") + 8 :]


@pytest.fixture
def probe(shared_server: Serve) -> Server:
    return shared_server("probe.toml", sets=PROBE)


async def test_a_cancelled_response_leaves_every_stage(probe: Server) -> None:
    async with connected(probe.url, "probe", check=EventChecker()) as socket:
        await ask(socket, ENDLESS)
        await socket.until("response.output_audio.delta")
        await socket.send("response.cancel")
        usage = (await socket.until("response.done"))["response"]["usage"]
        assert usage["input_tokens"] == 1 and usage["output_token_details"]["audio_tokens"] > 0
        await asyncio.to_thread(eventually, lambda: idle(probe), PATIENCE_S, "the request is gone")
        end = socket.count
        await ask(socket, "well")
        assert (await socket.until("response.done", since=end))["response"]["status"] == "completed"


async def test_audio_leaves_no_earlier_than_its_lead(probe: Server) -> None:
    """What the client has is never more than two seconds (api.voice_lead_s) ahead of what it can have played."""
    async with connected(probe.url, "probe", check=EventChecker()) as socket:
        asked = time.monotonic()
        await ask(socket, "!repeat:60")
        await socket.until("response.done")
        deltas = [event for event in socket.events if event.type == "response.output_audio.delta"]
        sent = 0.0
        for event in deltas:
            sent += len(event.pcm) / 48_000
            assert sent - (event.at - asked) <= 2.0
        assert sent == pytest.approx(60 * 0.08)


async def test_speech_longer_than_the_deadline_is_not_late_and_a_stage_that_hangs_is(serve: Serve) -> None:
    server = serve("probe.toml", sets=[*PROBE, "api.deadline_s=3"])
    async with connected(server.url, "probe", check=EventChecker()) as socket:
        await ask(socket, "!repeat:100")
        response = (await socket.until("response.done"))["response"]
        assert response["status"] == "completed", response["status_details"]
        deltas = [event for event in socket.events if event.type == "response.output_audio.delta"]
        assert sum(len(event.pcm) for event in deltas) / 48_000 == pytest.approx(100 * 0.08)
        assert deltas[-1].at - deltas[0].at > 3, "eight seconds, two of them ahead"
        since = socket.count
        await ask(socket, "one !hang:relay two")
        response = (await socket.until("response.done", since=since))["response"]
        assert response["status_details"]["error"]["code"] == "deadline_exceeded"
        await asyncio.to_thread(eventually, lambda: idle(server), PATIENCE_S, "it is gone from every stage")


async def test_two_hundred_sockets_closed_in_mid_response_leave_no_request(probe: Server) -> None:
    async def one() -> None:
        async with connected(probe.url, "probe") as socket:
            await ask(socket, ENDLESS)
            await socket.until("response.output_audio.delta")

    for _ in range(8):
        await asyncio.gather(*(one() for _ in range(25)))
    await asyncio.to_thread(eventually, lambda: idle(probe), PATIENCE_S, "all requests are gone")

    def no_session() -> bool:
        with urllib.request.urlopen(f"{probe.url}/metrics", timeout=PATIENCE_S) as metrics:
            return b"\nomni_bus_voice_sessions 0.0\n" in metrics.read()

    await asyncio.to_thread(eventually, no_session, PATIENCE_S, "and all sessions")


async def test_a_worker_that_dies_fails_its_response_and_the_session_goes_on(serve: Serve) -> None:
    server = serve("probe.toml", sets=PROBE)
    async with connected(server.url, "probe", check=EventChecker()) as socket:
        await ask(socket, "one two three !exit:relay four")
        response = (await socket.until("response.done"))["response"]
        assert response["status"] == "failed"
        assert response["status_details"]["error"]["code"] == "replica_lost"
        await asyncio.to_thread(eventually, server.ready, PATIENCE_S, "the worker is back")
        since = socket.count
        await ask(socket, "well")
        assert (await socket.until("response.done", since=since))["response"]["status"] == "completed"


async def test_a_server_that_stops_says_so_with_1012(serve: Serve) -> None:
    server = serve("probe.toml", sets=PROBE)
    async with connected(server.url, "probe", check=EventChecker()) as speaking, connected(server.url, "probe") as silent:
        await ask(speaking, ENDLESS)
        await speaking.until("response.output_audio.delta")
        stopping = asyncio.create_task(asyncio.to_thread(server.stop))
        for socket in (speaking, silent):
            with pytest.raises(SocketClosed):
                await socket.until("nothing that ever comes")
            assert socket.socket.close_code == 1012
        await stopping


async def test_an_interruption_reaches_every_stage_and_history_keeps_what_was_heard(shared_server: Serve) -> None:
    skip_without_packages()
    server = shared_server("quickstart.toml", sets=["stages.asr.threads=1"])
    async with connected(server.url, "cascade", check=EventChecker()) as socket:
        await ask(socket, "Please tell me a long story about a cat and a dog.")
        answer = (await socket.until("response.output_audio.delta"))["item_id"]
        heard_ms = 900
        since = socket.count
        for start in range(0, len(question := spoken("What is the capital of France?")), 4800):
            await socket.append(question[start : start + 4800])
        started = await socket.until("input_audio_buffer.speech_started", since=since)
        cancelled = await socket.until("response.done", since=since)
        assert cancelled["response"]["usage"]["input_tokens"] > 0
        assert cancelled["response"]["status_details"] == {"type": "cancelled", "reason": "turn_detected"}
        await socket.send("conversation.item.truncate", item_id=answer, content_index=0, audio_end_ms=heard_ms)
        await socket.until("conversation.item.truncated")
        await asyncio.to_thread(eventually, lambda: idle(server), PATIENCE_S, "the story is gone from every stage")
        behind = [event for event in socket.events if event.at > started.at and event.type == "response.output_audio.delta"]
        assert not behind, "not a sample after speech_started"
        await socket.send("conversation.item.retrieve", item_id=answer)
        kept = (await socket.until("conversation.item.retrieved"))["item"]["content"][0]["transcript"]
        written = "".join(event["delta"] for event in socket.events if event.type == "response.output_audio_transcript.delta")
        assert written.startswith(kept) and len(kept) < len(written)
        assert 1 <= len(kept.split()) <= 6, f"about {heard_ms} ms of words: {kept!r}"


async def test_a_conversation_goes_on_beyond_what_its_model_has_room_for(serve: Serve) -> None:
    """Some 60 positions a turn, and 300 in all."""
    skip_without_packages()
    server = serve("quickstart.toml", sets=["stages.llm.max_length=300", "stages.asr.threads=1"])
    async with connected(server.url, "cascade", check=EventChecker()) as socket:
        await socket.send("session.update", session={"output_modalities": ["text"], "max_output_tokens": 8})
        prompts = []
        for _ in range(8):
            since = socket.count
            await ask(socket, "Please count with me: " + " ".join(map(str, range(20))))
            response = (await socket.until("response.done", since=since))["response"]
            assert response["status"] in ("completed", "incomplete"), response["status_details"]
            prompts.append(response["usage"]["input_tokens"])
    assert max(prompts) < 300 and any(later < earlier for earlier, later in itertools.pairwise(prompts)), prompts


@pytest.fixture
def omni(shared_server: Serve, omni_checkpoint: pathlib.Path) -> Server:
    return shared_server("qwen3_omni_tiny.toml", sets=[f"model.path={omni_checkpoint}"])


async def test_a_turn_of_qwen3_omni_is_answered_first_and_written_down_behind(omni: Server) -> None:
    skip_without_packages()
    session = {
        "type": "realtime",
        "max_output_tokens": 12,
        "sampling": {"talker": {"max_tokens": 20}},
        "audio": {"input": {"transcription": {"model": "any"}}},
    }
    async with connected(omni.url, "qwen3-omni-tiny", check=EventChecker()) as socket:
        await socket.send("session.update", session=session)
        await socket.until("session.updated")
        for start in range(0, len(turn := spoken("What is the capital of France?") + b"\0" * 57_600), 4800):
            await socket.append(turn[start : start + 4800])
        response = (await socket.until("response.done"))["response"]
        assert response["status"] in ("completed", "incomplete"), response
        written = await socket.until("conversation.item.input_audio_transcription.completed")
        assert written["item_id"] == (await socket.until("input_audio_buffer.committed"))["item_id"]
        assert written["usage"]["type"] == "tokens"
        types = socket.types()
        written_down = [n for n, name in enumerate(types) if name.startswith("conversation.item.input_audio_transcription.")]
        assert types.index("response.output_audio.delta") < written_down[0]
        usage = response["usage"]
        assert usage["output_token_details"]["audio_tokens"] > 0
        assert usage["input_token_details"]["audio_tokens"] > 20 and usage["input_token_details"]["text_tokens"] > 0
    await asyncio.to_thread(eventually, lambda: idle(omni), PATIENCE_S, "nothing is left, what was prepared included")


async def test_an_interruption_frees_every_slot_and_block_of_qwen3_omni(omni: Server) -> None:
    skip_without_packages()
    endless = {"thinker": {"ignore_eos": True}, "talker": {"ignore_eos": True, "max_tokens": 2000}}
    before, question = await acknowledged(omni), spoken("What is the capital of France?")
    async with connected(omni.url, "qwen3-omni-tiny", check=EventChecker()) as socket:
        await socket.send("session.update", session={"max_output_tokens": 100, "sampling": endless})
        await ask(socket, "well")
        first = await socket.until("response.output_audio.delta")
        await asyncio.to_thread(eventually, lambda: holds_slot(omni), PATIENCE_S, "its audio waits, in its stage, to be played")
        for start in range(0, len(question), 4800):
            await socket.append(question[start : start + 4800])
        done = (await socket.until("response.done"))["response"]
        assert (done["id"], done["status_details"]["reason"]) == (first["response_id"], "turn_detected")
        assert done["usage"]["input_tokens"] > 0 and done["usage"]["output_token_details"]["audio_tokens"] > 0
        await asyncio.to_thread(eventually, lambda: idle(omni), PATIENCE_S, "no slot and no KV block is held")
        async with asyncio.timeout(PATIENCE_S):
            while await acknowledged(omni) != before + 1:  # noqa: ASYNC110 - told by a metric only
                await asyncio.sleep(0.05)


@pytest.mark.timeout(600)
async def test_ten_minutes_of_silence_leave_memory_flat(omni: Server) -> None:
    """Sent faster than real time, with turn detection on; the first minute brings turn detection's model and buffers with it."""
    skip_without_packages()
    async with connected(omni.url, "qwen3-omni-tiny", check=EventChecker()) as socket:
        await silence(socket, 60)
        before = resident_mb(omni)
        await silence(socket, 600)
        assert resident_mb(omni) - before < 20, "ten minutes are 29 MB as PCM, and 38 MB as samples at 16 kHz"
        assert set(socket.types()) == {"session.created", "error"}, "no turn, no item"
        content = [{"type": "input_text", "text": "well"}]
        await socket.send("conversation.item.create", item={"type": "message", "role": "user", "content": content})
        await socket.send("response.create", response={"output_modalities": ["text"], "max_output_tokens": 8})
        response = (await socket.until("response.done"))["response"]
        assert response["status"] in ("completed", "incomplete"), response


async def silence(socket: RealtimeSocket, seconds: int) -> None:
    """Appended, and read by the server up to its end: a question behind it has been answered."""
    for number in range(seconds * 2):
        await socket.append(b"\0" * 24_000)
        if number % 20 == 19:
            since = socket.count
            await socket.send("conversation.item.retrieve", item_id="none")
            await socket.until("error", since=since)


def resident_mb(server: Server) -> float:
    return float(server.processes()["api.0"].memory_info().rss) / 2**20


async def test_a_picture_in_a_conversation(omni: Server) -> None:
    import base64

    from tests.support.qwen3_omni import picture, png

    url = f"data:image/png;base64,{base64.b64encode(png(picture(64, 64, 0))).decode()}"
    content = [{"type": "input_text", "text": "What is this?"}, {"type": "input_image", "image_url": url}]
    async with connected(omni.url, "qwen3-omni-tiny", check=EventChecker()) as socket:
        await socket.send("conversation.item.create", item={"type": "message", "role": "user", "content": content})
        await socket.send("response.create", response={"output_modalities": ["text"], "max_output_tokens": 8})
        response = (await socket.until("response.done"))["response"]
        assert response["status"] in ("completed", "incomplete"), response
        assert response["usage"]["input_token_details"]["image_tokens"] > 0
