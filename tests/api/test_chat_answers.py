"""What a good request gives: the events of a stream, the whole answer, and what the bus was asked for."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import pytest
import soundfile

from omni_bus.errors import NoReadyReplica, ReplicaLost, StageFailed
from omni_bus.payloads import MediaPart, Message, TextPart
from omni_bus.sampling import SamplingParams
from tests.support.scripted_bus import PCM_CHUNK, audio, heard, text

SPEECH = {"modalities": ["text", "audio"]}


async def events(server: Any, **fields: Any) -> list[dict[str, Any]]:
    """A stream's events; the last must be [DONE]."""
    body = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}], "stream": True, **fields}
    async with server.http.post(f"{server.url}/v1/chat/completions", json=body) as answer:
        assert answer.status == 200 and answer.content_type == "text/event-stream"
        blocks = (await answer.text()).split("\n\n")
    assert blocks.pop() == "" and blocks.pop() == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


def delta(event: dict[str, Any]) -> dict[str, Any]:
    return event["choices"][0]["delta"]  # type: ignore[no-any-return]


async def test_stream_events(server: Any) -> None:
    seen = await events(server, **SPEECH)
    assert {(e["object"], e["model"]) for e in seen} == {("chat.completion.chunk", "scripted")}
    assert len({e["id"] for e in seen}) == 1 and seen[0]["id"].startswith("chatcmpl-")
    assert delta(seen[0]) == {"role": "assistant", "content": ""}
    assert [e["modality"] for e in seen] == ["text", "text", "audio", "text", "audio", "text"]
    assert "".join(delta(e).get("content", "") for e in seen) == "Hello world"
    assert [base64.b64decode(delta(e)["audio"]["data"]) for e in seen if "audio" in delta(e)] == [PCM_CHUNK] * 2
    assert [e["choices"][0]["finish_reason"] for e in seen] == [None] * 5 + ["stop"] and delta(seen[-1]) == {}
    assert not any("usage" in e for e in seen)


async def test_stream_usage_comes_last_and_without_choices(server: Any) -> None:
    *others, last = await events(server, **SPEECH, stream_options={"include_usage": True})
    assert last["choices"] == [] and all(e["usage"] is None for e in others)
    assert last["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 2,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"audio_tokens": 3},
        "omni_bus": {"first_chunk_ms": {"thinker->client": 12.3, "vocoder->client": 45.6}},
    }


async def test_stream_finish_reason_is_the_text_stages(server: Any) -> None:
    server.bus.script = (text("a", "length"), audio(), audio(b"", last=True))
    seen = await events(server, **SPEECH)
    assert [e["choices"][0]["finish_reason"] for e in seen] == [None, None, None, "length"]


async def test_streamed_wav_has_one_header(server: Any) -> None:
    server.bus.script = (audio(), audio(), audio(b"", last=True), text("", "stop"))
    seen = await events(server, **SPEECH, audio={"format": "wav"})
    pieces = [base64.b64decode(delta(e)["audio"]["data"]) for e in seen if "audio" in delta(e)]
    assert pieces[0][:4] == b"RIFF" and pieces[0][44:] == PCM_CHUNK and pieces[1] == PCM_CHUNK
    assert soundfile.info(io.BytesIO(b"".join(pieces))).samplerate == 24_000


async def test_stream_of_audio_alone_has_no_text(server: Any) -> None:
    seen = await events(server, modalities=["audio"])
    assert [e["modality"] for e in seen[1:-1]] == ["audio"] * 2 and delta(seen[0]) == {"role": "assistant"}


async def test_stream_says_what_was_heard(server: Any) -> None:
    server.bus.script = (heard("good morning"), heard("again"), heard(""), text("Hi", "stop"))
    seen = await events(server)
    assert [e["input_transcript"] for e in seen if "input_transcript" in e] == ["good morning", "again"]
    assert delta(seen[1]) == {} == delta(seen[2])


async def test_stream_of_nothing_still_ends_well(server: Any) -> None:
    server.bus.script = ()
    seen = await events(server)
    assert [e["choices"][0]["finish_reason"] for e in seen] == [None, "stop"]


async def test_failure_in_mid_stream_is_an_event(server: Any) -> None:
    server.bus.script = (text("a"), StageFailed("stage talker failed"))
    *_, last = await events(server)
    assert last == {"error": {"message": "stage talker failed", "type": "server_error", "param": None, "code": "stage_failed"}}
    assert await server.metric('omni_bus_failures_total{code="stage_failed"}') == 1
    assert await server.metric('omni_bus_requests_total{route="/v1/chat/completions",status="500"}') == 1


async def test_a_failure_in_mid_stream_comes_behind_the_usage_so_far(server: Any) -> None:
    prompt = {"prompt_tokens": 7, "cached_tokens": 4}
    server.bus.script = (
        text("a", usage=prompt),
        audio(frames=2),
        text("b"),
        audio(frames=3),
        StageFailed("stage talker failed"),
    )
    *others, usage, failure = await events(server, **SPEECH, stream_options={"include_usage": True})
    assert failure["error"]["code"] == "stage_failed"
    assert all(event["usage"] is None for event in others) and usage["choices"] == []
    assert usage["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 2,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"audio_tokens": 5},
        "omni_bus": {"first_chunk_ms": {}},
    }


async def test_a_fault_of_the_api_in_mid_stream_tells_nothing(server: Any) -> None:
    server.bus.script = (text("a"), RuntimeError("/secret/path"))
    *_, last = await events(server)
    assert last["error"]["code"] == "internal_error" and "secret" not in last["error"]["message"]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("error", "status", "retry_after"),
    [
        (NoReadyReplica("stage thinker has no ready replica"), 503, "5"),
        (ReplicaLost("the replica died"), 500, None),
        (RuntimeError("/secret/path"), 500, None),
    ],
)
async def test_failure_before_any_output_is_a_status(
    server: Any, error: Exception, status: int, retry_after: str | None, stream: bool
) -> None:
    server.bus.script = (error,)
    body = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}], "stream": stream}
    async with server.http.post(f"{server.url}/v1/chat/completions", json=body) as answer:
        assert answer.status == status and answer.headers.get("Retry-After") == retry_after
        assert "secret" not in await answer.text()
    server.bus.script, server.bus.submit_error = (), error
    async with server.http.post(f"{server.url}/v1/chat/completions", json=body) as answer:
        assert answer.status == status


async def test_whole_answer(server: Any) -> None:
    server.bus.script = (
        heard("hey"),
        heard("you"),
        heard(""),
        text("Hello"),
        audio(),
        text("", "length"),
        audio(b"", last=True),
    )
    status, answer = await server.chat(**SPEECH)
    message = answer["choices"][0]["message"]
    assert status == 200 and answer["object"] == "chat.completion" and answer["choices"][0]["finish_reason"] == "length"
    assert (message["role"], message["content"], message["input_transcript"]) == ("assistant", "Hello", "hey\nyou")
    assert set(message["audio"]) == {"id", "data", "transcript", "expires_at"} and message["audio"]["transcript"] == "Hello"
    samples, rate = soundfile.read(io.BytesIO(base64.b64decode(message["audio"]["data"])), dtype="int16")
    assert rate == 24_000 and samples.tobytes() == PCM_CHUNK
    assert answer["usage"]["completion_tokens_details"] == {"audio_tokens": 3}


async def test_whole_answer_without_sound_has_no_audio(server: Any) -> None:
    server.bus.script = (text("", "stop"), audio(b"", last=True))
    _, answer = await server.chat(**SPEECH)
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": ""}


async def test_whole_answer_of_audio_alone(server: Any) -> None:
    _, answer = await server.chat(modalities=["audio"])
    message = answer["choices"][0]["message"]
    assert message["content"] is None and message["audio"]["transcript"] == "Hello world"


@pytest.mark.parametrize(("audio_format", "magic"), [("mp3", b"ID3"), ("opus", b"OggS"), ("flac", b"fLaC"), ("wav", b"RIFF")])
async def test_whole_answer_in_other_formats(server: Any, audio_format: str, magic: bytes) -> None:
    server.bus.script = (*[audio()] * 20, text("", "stop"))
    _, answer = await server.chat(**SPEECH, audio={"format": audio_format})
    encoded = base64.b64decode(answer["choices"][0]["message"]["audio"]["data"])
    assert encoded.startswith(magic)
    info = soundfile.info(io.BytesIO(encoded))
    assert info.channels == 1 and info.duration == pytest.approx(20 * 1920 / 24_000, abs=0.05)


async def test_whole_answer_as_pcm16(server: Any) -> None:
    _, answer = await server.chat(**SPEECH, audio={"format": "pcm16"})
    assert base64.b64decode(answer["choices"][0]["message"]["audio"]["data"]) == PCM_CHUNK * 2


async def test_what_the_bus_is_asked_for(server: Any) -> None:
    conversation = [
        {"role": "developer", "content": "be brief"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "what is this?"}, {"type": "image_url", "image_url": {"url": "data:,PNG"}}],
        },
        {"role": "assistant", "content": None, "tool_calls": []},
    ]
    status, _ = await server.chat(
        messages=conversation,
        modalities=["audio", "text"],
        audio={"voice": "ETHAN", "format": "wav"},
        temperature=0,
        max_tokens=50,
        max_completion_tokens=20,
        stop="END",
        seed=5,
        sampling={"talker": {"top_k": 40, "unheard_of": 1}, "thinker": {"top_p": 0.5}},
        timeout=10,
        user="somebody",
        tools=[],
        headers={"X-Request-Id": "mine/../\u00e9 7"},
    )
    assert status == 200
    asked = server.bus.submissions[0]
    assert asked.payload.messages == (
        Message("system", (TextPart("be brief"),)),
        Message("user", (TextPart("what is this?"), MediaPart("image", 0))),
        Message("assistant", ()),
    )
    assert bytes(asked.tensors["media0"].data) == b"PNG" and asked.tensors["media0"].dtype == "uint8"
    assert asked.options.modalities == ("text", "audio") and asked.options.voice == "Ethan" and asked.options.seed == 5
    assert asked.options.sampling == {
        "thinker": SamplingParams(temperature=0.0, max_tokens=20, stop=("END",), top_p=0.5),
        "talker": SamplingParams(top_k=40),
    }
    assert 9 < asked.deadline_s <= 10
    ours, _, theirs = asked.label.partition(" ")
    assert ours.startswith("req-") and theirs.isascii() and "/" not in theirs


@pytest.mark.parametrize("voice", ["coral", "SAGE", {"id": "onyx"}])
async def test_a_voice_of_openais_stands_for_the_models_first(server: Any, voice: object) -> None:
    status, _ = await server.chat(modalities=["text", "audio"], audio={"voice": voice, "format": "wav"})
    assert status == 200 and server.bus.submissions[0].options.voice == "Ethan"


async def test_sampling_params_list_follows_the_pipeline(server: Any) -> None:
    await server.chat(sampling_params_list=[{"temperature": 0.5}, {"seed": 3, "stop": ["a", "b"]}], temperature=0.1)
    assert server.bus.submissions[0].options.sampling == {
        "thinker": SamplingParams(temperature=0.5),
        "talker": SamplingParams(seed=3, stop=("a", "b")),
    }


async def test_nothing_said_means_the_pipelines_defaults(server: Any) -> None:
    await server.chat()
    asked = server.bus.submissions[0]
    assert asked.options.sampling == {} and asked.options.modalities == ("text",) and asked.options.voice is None
    assert 299 < asked.deadline_s <= 300


async def test_timeout_header(server: Any) -> None:
    await server.chat(headers={"X-Request-Timeout": "2.5"})
    assert 0 < server.bus.submissions[0].deadline_s <= 2.5


async def test_metrics_of_an_answer(server: Any) -> None:
    server.bus.script = (text("a"), audio(), text("b"), audio(), text("", "stop"))
    await server.chat(**SPEECH)
    for name in ("ttft_seconds", "ttfp_seconds", "tpot_seconds", "e2el_seconds", "rtf", "playback_lead_seconds"):
        await server.until_metric(f"omni_bus_{name}_count", 1)
    assert await server.metric("omni_bus_audio_seconds_total") == pytest.approx(0.16)
    async with server.http.get(f"{server.url}/v1/status") as answer:
        recent = (await answer.json())["recent"]
    for figure, metric in (("ttfp_s", "ttfp_seconds"), ("rtf", "rtf")):
        only = await server.metric(f"omni_bus_{metric}_sum")
        assert only > 0 and recent[figure] == {"count": 1, "p50": pytest.approx(only), "p95": pytest.approx(only)}
    assert await server.metric("omni_bus_underruns_total") == 0
    assert await server.metric('omni_bus_requests_total{route="/v1/chat/completions",status="200"}') == 1
