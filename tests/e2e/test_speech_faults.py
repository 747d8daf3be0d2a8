"""Speech over the real bus when stages fail, hang or die in mid-text, and when the client goes or does not read: the probe pipeline."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
from collections.abc import Iterator
from typing import Any

import numpy
import openai
import pytest

from tests.support.running_server import Server, eventually

FAULTS = tuple(f"stages.{stage}.faults=true" for stage in ("source", "relay", "sink"))
SAMPLES_PER_WORD = 1920


@pytest.fixture
def server(shared_server: Any) -> Server:
    started: Server = shared_server("probe.toml", sets=FAULTS)
    return started


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=200.0) as made:
        yield made


def speak(client: openai.OpenAI, text: str, **fields: Any) -> bytes:
    with client.audio.speech.with_streaming_response.create(
        model="probe", voice="tone", input=text, **{"response_format": "pcm", **fields}
    ) as answer:
        return answer.read()


def breaks_off(server: Server, text: str, **fields: Any) -> bool:
    """Whether an answer of audio, which began well, ends without its end."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=200)
    with contextlib.closing(connection):
        body = {"model": "probe", "input": text, "response_format": "pcm", **fields}
        connection.request("POST", "/v1/audio/speech", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == 200 and answer.headers["Transfer-Encoding"] == "chunked"
        try:
            answer.read()
        except (http.client.IncompleteRead, ConnectionError):
            return True
        return False


def open_requests(server: Server) -> int:
    return sum(server.get("/v1/status")["requests"].values())


def test_every_word_is_spoken_in_its_order(client: openai.OpenAI) -> None:
    samples = numpy.frombuffer(speak(client, "!repeat:200"), "<i2")
    assert numpy.array_equal(samples, numpy.repeat(numpy.arange(1, 201), SAMPLES_PER_WORD))


@pytest.mark.parametrize("fault", ["!raise:sink", "!panic:sink", "!exit:sink"])
def test_a_stage_that_fails_in_mid_text_breaks_the_body_off(client: openai.OpenAI, server: Server, fault: str) -> None:
    """What came is no whole file, and the client is told so: in events by an event, in a body of audio by its missing end."""
    text = f"!repeat:20 !sleep:sink:500 {fault} five"
    assert breaks_off(server, text)
    eventually(server.ready, 30, "the stage is back")
    with client.audio.speech.with_streaming_response.create(
        model="probe", voice="tone", input=text, response_format="pcm", stream_format="sse"
    ) as answer:
        *deltas, last = [json.loads(line.removeprefix("data: ")) for line in answer.iter_lines() if line]
    assert last["error"]["code"] in ("stage_failed", "replica_lost")
    pcm = b"".join(base64.b64decode(delta["audio"]) for delta in deltas)
    assert pcm and len(pcm) <= 2 * 21 * SAMPLES_PER_WORD
    eventually(server.ready, 30, "the stage is back")
    assert len(speak(client, "one two")) == 2 * 2 * SAMPLES_PER_WORD
    eventually(lambda: open_requests(server) == 0, 20, "nothing is left of it")


def test_a_stage_that_fails_at_once_is_a_status(client: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError) as failed:
        speak(client, "!raise:source")
    assert failed.value.code == "stage_failed"


def test_a_stage_that_hangs_meets_the_deadline(client: openai.OpenAI, server: Server) -> None:
    with pytest.raises(openai.APIStatusError) as late:
        speak(client, "!hang:source", extra_body={"timeout": 0.5})
    assert late.value.status_code == 408
    assert breaks_off(server, "one !hang:sink", timeout=1.0)
    eventually(lambda: open_requests(server) == 0, 20, "nothing is left of it")


def test_a_client_that_goes_away_leaves_nothing(client: openai.OpenAI, server: Server) -> None:
    with client.audio.speech.with_streaming_response.create(
        model="probe", voice="tone", input="!repeat:1000000", response_format="mp3"
    ) as answer:
        next(answer.iter_bytes(1024))
        eventually(lambda: open_requests(server) == 1, 20, "it alone is open")
    eventually(lambda: open_requests(server) == 0, 20, "the request is gone")


def test_a_reader_that_stalls_holds_the_stages_back(client: openai.OpenAI, server: Server) -> None:
    def sent() -> int:
        return int(server.get("/v1/status")["edge_chunks"].get("sink->client", 0))

    with client.audio.speech.with_streaming_response.create(
        model="probe", voice="tone", input="!repeat:1000000", response_format="pcm"
    ) as answer:
        next(answer.iter_bytes(1024))
        seen = [-1]

        def at_rest() -> bool:
            seen.append(sent())
            return seen[-1] == seen[-2]

        eventually(at_rest, 60, "no more is made than buffers and credits hold")
        assert seen[-1] < 100_000
        assert len(speak(client, "one two")) == 2 * 2 * SAMPLES_PER_WORD, "nobody else waits"
    eventually(lambda: open_requests(server) == 0, 20, "the request is gone")
