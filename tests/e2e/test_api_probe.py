"""The API in front of the real bus: three worker processes of the probe pipeline, and clients as users have them."""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from tests.support.running_server import PATIENCE_S, Server, eventually

FAULTS = tuple(f"stages.{stage}.faults=true" for stage in ("source", "relay", "sink"))
WORDS = "one two three four"
SAMPLES_PER_WORD = 1920


@pytest.fixture
def server(shared_server: Any) -> Server:
    started = shared_server("probe.toml", sets=FAULTS)
    assert isinstance(started, Server)
    return started


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def ask(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def metric(server: Server, name: str) -> float:
    with urllib.request.urlopen(f"{server.url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return next((float(line.rpartition(" ")[2]) for line in lines if line.rpartition(" ")[0] == name), 0.0)


def open_requests(server: Server) -> int:
    return sum(server.get("/v1/status")["requests"].values())


def send(server: Server, **fields: Any) -> socket.socket:
    """A chat request over a bare socket that nobody reads yet."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 * 1024)
    sock.connect(("127.0.0.1", server.port))
    body = json.dumps({"model": "probe", **fields}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    sock.sendall(head.encode() + body)
    return sock


def test_openai_client_whole_answer(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="probe", messages=ask(WORDS))
    assert answer.choices[0].message.content == f"{WORDS} " and answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 4)


def test_openai_client_whole_answer_with_audio(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="probe", messages=ask(WORDS), modalities=["text", "audio"], audio={"voice": "tone", "format": "wav"}
    )
    message = answer.choices[0].message
    assert message.audio is not None and message.audio.transcript == f"{WORDS} "
    wav = base64.b64decode(message.audio.data)
    assert wav[:4] == b"RIFF" and len(wav) == 44 + 4 * SAMPLES_PER_WORD * 2
    assert answer.usage is not None and answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.audio_tokens == 4


def test_openai_client_stream(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="probe",
        messages=ask(WORDS),
        modalities=["text", "audio"],
        audio={"voice": "tone", "format": "pcm16"},
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == f"{WORDS} "
    audio = [found for delta in deltas if (found := delta.model_dump().get("audio"))]
    assert len({piece["id"] for piece in audio}) == 1 and all(piece["data"] for piece in audio)
    assert sum(len(base64.b64decode(piece["data"])) for piece in audio) == 4 * SAMPLES_PER_WORD * 2
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert reasons[-1] == "stop" and reasons.count(None) == len(reasons) - 1
    assert chunks[-1].choices == [] and chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 4
    modalities = {chunk.model_extra["modality"] for chunk in chunks[:-1] if chunk.model_extra}
    assert modalities == {"text", "audio"}


def test_openai_client_errors_and_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["probe"]
    assert client.models.retrieve("probe").owned_by == "omni-bus"
    with pytest.raises(openai.NotFoundError) as absent:
        client.chat.completions.create(model="gpt-4o", messages=ask("hi"))
    assert absent.value.code == "model_not_found" and absent.value.param == "model"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="probe", messages=ask("hi"), temperature=-3)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.UnprocessableEntityError, match="it has tone"):
        client.chat.completions.create(
            model="probe", messages=ask("hi"), modalities=["audio"], audio={"voice": "bob", "format": "wav"}
        )
    stock = client.chat.completions.create(
        model="probe", messages=ask("hi"), modalities=["text", "audio"], audio={"voice": "alloy", "format": "wav"}
    )
    assert stock.choices[0].message.audio is not None and stock.choices[0].message.audio.data
    with pytest.raises(openai.InternalServerError) as failed:
        client.chat.completions.create(model="probe", messages=ask("a !raise:source"))
    assert failed.value.code == "stage_failed"
    with pytest.raises(openai.APIError) as broken:
        list(client.chat.completions.create(model="probe", messages=ask("a b !raise:source"), stream=True))
    assert broken.value.code == "stage_failed"
    assert client.chat.completions.create(model="probe", messages=ask("hi")).choices[0].message.content == "hi "


async def test_many_streams_at_once_each_get_their_own(server: Server) -> None:
    async def one(client: openai.AsyncOpenAI, number: int) -> str:
        words = " ".join(f"w{number}-{index}" for index in range(20))
        stream = await client.chat.completions.create(
            model="probe", messages=ask(words), modalities=["text", "audio"], stream=True
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == f"{words} "
        return text

    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        assert len(set(await asyncio.gather(*(one(client, number) for number in range(24))))) == 24


def test_first_text_leaves_before_the_answer_is_complete(server: Server) -> None:
    """The second word never comes; the first does not wait for it."""
    with send(server, messages=ask("first !hang:source last"), stream=True) as sock:
        sock.settimeout(PATIENCE_S)
        seen = b""
        while b"first " not in seen:
            block = sock.recv(4096)
            assert block, seen
            seen += block
        assert b"[DONE]" not in seen and open_requests(server) == 1
    eventually(lambda: open_requests(server) == 0, 5, "it is gone")


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_cancels_a_request_that_makes_nothing(server: Server, stream: bool) -> None:
    before = metric(server, "omni_bus_cancels_total")
    sock = send(server, messages=ask("!hang:source"), stream=stream)
    eventually(lambda: open_requests(server) == 1, 5, "the request is open")
    sock.close()
    eventually(lambda: metric(server, "omni_bus_cancels_total") == before + 1, 5, "it is cancelled, long before its deadline")
    eventually(lambda: open_requests(server) == 0, 5, "every stage has let go of it")


def test_a_slow_reader_stalls_only_itself(server: Server, client: openai.OpenAI) -> None:
    chunks = "sink->client"
    with send(server, messages=ask("!repeat:20000"), modalities=["text", "audio"], stream=True):
        sent, since, end = 0, time.monotonic(), time.monotonic() + PATIENCE_S
        while not sent or time.monotonic() - since < 2:  # a busy machine makes pauses of its own
            assert time.monotonic() < end, "the producer never stopped, though nobody reads"
            if (now := server.get("/v1/status")["edge_chunks"][chunks]) != sent:
                sent, since = now, time.monotonic()
            time.sleep(0.1)
        for _ in range(5):
            assert client.chat.completions.create(model="probe", messages=ask("hi")).choices[0].message.content == "hi "
        assert server.get("/v1/status")["edge_chunks"][chunks] == sent and open_requests(server) == 1
    eventually(lambda: open_requests(server) == 0, 5, "the closed reader's request is gone")


def test_a_deadline_ends_in_408(server: Server, client: openai.OpenAI) -> None:
    began = time.monotonic()
    with pytest.raises(openai.APIStatusError) as late:
        client.chat.completions.create(model="probe", messages=ask("!hang:source"), extra_body={"timeout": 0.5})
    assert late.value.status_code == 408 and late.value.code == "deadline_exceeded"
    assert 0.4 < time.monotonic() - began < PATIENCE_S
    eventually(lambda: open_requests(server) == 0, 5, "nothing of it is left")


def test_large_inputs_arrive_whole(server: Server, client: openai.OpenAI) -> None:
    words = " ".join(f"word-{index}" for index in range(400)) + " " + "x" * 2_000_000
    answer = client.chat.completions.create(model="probe", messages=ask(words))
    assert answer.choices[0].message.content == f"{words} "


async def test_the_loop_stays_responsive_under_load(server: Server) -> None:
    """Sixteen streams with audio, and large bodies beside them. What the machine's other work adds is told apart."""
    filler = json.dumps({"model": "probe", "messages": ask("a"), "unknown": "x" * 3_000_000})

    def upload() -> int:
        connection = http.client.HTTPConnection("127.0.0.1", server.port)
        connection.request("POST", "/v1/chat/completions", filler, {"Content-Type": "application/json"})
        status = connection.getresponse().status
        connection.close()
        return status

    async def stream(client: openai.AsyncOpenAI) -> int:
        answer = await client.chat.completions.create(
            model="probe", messages=ask("!repeat:60"), modalities=["text", "audio"], stream=True
        )
        return len([chunk async for chunk in answer])

    looks = metric(server, "omni_bus_event_loop_lag_seconds_count")
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        results = await asyncio.gather(*(stream(client) for _ in range(16)), *(asyncio.to_thread(upload) for _ in range(4)))
    assert results[-4:] == [200] * 4 and min(results[:16]) > 100
    assert metric(server, "omni_bus_event_loop_lag_seconds_count") > looks + 10, "the loop is watched"
    assert metric(server, "omni_bus_event_loop_lag_worst_seconds") > 0
    # Milliseconds on an idle machine; the bound is one that a slow machine keeps, too.
    assert metric(server, "omni_bus_event_loop_held_worst_seconds") < 0.200


def test_metrics_know_the_bus(server: Server, client: openai.OpenAI) -> None:
    before = metric(server, "omni_bus_ttfp_seconds_count")
    client.chat.completions.create(model="probe", messages=ask(WORDS), modalities=["text", "audio"])
    assert metric(server, "omni_bus_ttfp_seconds_count") == before + 1
    assert metric(server, "omni_bus_broker_up") == 1
    assert metric(server, 'omni_bus_stage_ready{stage="sink",worker="sink.0"}') == 1
    assert metric(server, 'omni_bus_broker_edge_chunks_total{edge="sink->client"}') >= 4


EDGES = {  # edge → who sends on it
    "client->source": "client",
    "source->relay": "source.0",
    "relay->sink": "relay.0",
    "source->client": "source.0",
    "sink->client": "sink.0",
}


def test_metrics_count_chunks_and_bytes_by_edge_and_connector(server: Server, client: openai.OpenAI) -> None:
    """The workers' own figures come with their next heartbeat."""

    def figures(name: str) -> dict[str, float]:
        label = 'omni_bus_edge_{}_total{{connector="inline",edge="{}",worker="{}"}}'
        return {edge: metric(server, label.format(name, edge, worker)) for edge, worker in EDGES.items()}

    def counted() -> bool:
        after = figures("chunks")
        return all(after[edge] >= chunks[edge] + (1 if edge == "client->source" else 4) for edge in EDGES)

    chunks, sent = figures("chunks"), figures("bytes")
    client.chat.completions.create(model="probe", messages=ask(WORDS), modalities=["text", "audio"])
    eventually(counted, 10, "a heartbeat of each worker that tells of the request")
    after = figures("bytes")
    assert all(after[edge] > sent[edge] for edge in EDGES)
    assert after["sink->client"] >= sent["sink->client"] + 4 * SAMPLES_PER_WORD * 2
    for stage in ("source", "relay", "sink"):
        where = f'{{stage="{stage}",worker="{stage}.0"}}'
        assert metric(server, f"omni_bus_stage_batch{where}") >= 0 == metric(server, f"omni_bus_stage_queue{where}")
        assert metric(server, f"omni_bus_stage_steps_total{where}") >= 4
        assert metric(server, f"omni_bus_stage_busy_seconds_total{where}") > 0


def test_a_client_over_its_limit_is_told_so_and_served_when_it_has_room(serve: Callable[..., Server]) -> None:
    one_process = [f"stages.{stage}.process=all" for stage in ("source", "relay", "sink")]
    server = serve("probe.toml", sets=[*FAULTS, *one_process, "api.max_requests_per_client=2"])
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        hanging = [send(server, messages=ask("!hang:source"), stream=True) for _ in range(2)]
        eventually(lambda: open_requests(server) == 2, 10, "two are in flight")
        with pytest.raises(openai.RateLimitError) as refused:
            client.chat.completions.create(model="probe", messages=ask("hi"))
        assert refused.value.code == "rate_limit_exceeded" and refused.value.response.headers["Retry-After"] == "1"
        assert open_requests(server) == 2, "it never came to the bus"
        hanging.pop().close()
        eventually(lambda: open_requests(server) == 1, 5, "one has gone")
        assert client.chat.completions.create(model="probe", messages=ask("hi")).choices[0].message.content == "hi "
        hanging.pop().close()
