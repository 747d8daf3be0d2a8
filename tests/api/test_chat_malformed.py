"""Requests that are wrong: each has its status, code, field and a sentence that says what to do, and a good one is answered after."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
from typing import Any

import numpy as np
import pytest
import soundfile


@dataclasses.dataclass(frozen=True)
class Row:
    name: str
    status: int
    code: str
    param: str | None
    says: str
    fields: dict[str, Any] | None = None  # over a good body
    raw: bytes | None = None  # or the body itself
    headers: dict[str, str] | None = None
    input_kinds: tuple[str, ...] = ("text", "audio", "image", "video")


def fields(name: str, status: int, code: str, param: str | None, says: str, **given: Any) -> Row:
    return Row(name, status, code, param, says, fields=given)


def content(name: str, status: int, code: str, param: str, says: str, *parts: Any) -> Row:
    return Row(name, status, code, param, says, fields={"messages": [{"role": "user", "content": list(parts)}]})


def raw(name: str, status: int, code: str, param: str | None, says: str, body: bytes, **headers: str) -> Row:
    return Row(
        name, status, code, param, says, raw=body, headers={key.replace("_", "-"): value for key, value in headers.items()}
    )


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def wav(samples: int, rate: int = 16_000) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, np.zeros(samples, dtype=np.float32), rate, format="WAV")
    return buffer.getvalue()


def audio_part(data: str, audio_format: Any = "wav") -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": data, "format": audio_format}}


def url_part(kind: str, url: Any) -> dict[str, Any]:
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}


GOOD_BODY: dict[str, Any] = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}]}
DEEP = b"[" * 100_000 + b"]" * 100_000
BAD = "invalid_request"
IN_0 = "messages[0].content[0]"

ROWS = [
    raw("empty body", 400, BAD, None, "one JSON object", b""),
    raw("not JSON", 400, BAD, None, "one JSON object", b"hello"),
    raw("cut JSON", 400, BAD, None, "one JSON object", b'{"model": "scripted", "mess'),
    raw("trailing JSON", 400, BAD, None, "one JSON object", json.dumps(GOOD_BODY).encode() + b"{}"),
    raw("array", 400, BAD, None, "expected `object`", b"[]"),
    raw("null", 400, BAD, None, "expected `object`", b"null"),
    raw(
        "NaN",
        400,
        BAD,
        None,
        "one JSON object",
        b'{"model":"scripted","messages":[{"role":"user","content":"a"}],"temperature":NaN}',
    ),
    raw("infinite", 400, BAD, "temperature", "out of range", b'{"temperature":1e999,"model":"scripted","messages":[]}'),
    raw("deep nesting", 400, BAD, None, "nested too deeply", b'{"model":"scripted","unknown":' + DEEP + b"}"),
    raw("deep sampling", 400, BAD, None, "nested too deeply", b'{"model":"scripted","sampling":{"thinker":' + DEEP + b"}}"),
    raw("huge integer", 400, BAD, "max_tokens", "<= 2147483647", b'{"max_tokens":1' + b"0" * 40 + b"}"),
    raw("6,000 digits", 400, BAD, "seed", "out of range", b'{"seed":1' + b"0" * 6000 + b"}"),
    raw("not UTF-8", 400, BAD, None, "UTF-8", b'{"model":"scripted","messages":[{"role":"user","content":"\xff\xfe"}]}'),
    raw(
        "lone surrogate",
        400,
        BAD,
        None,
        "one JSON object",
        b'{"model":"scripted","messages":[{"role":"user","content":"\\ud800"}]}',
    ),
    raw(
        "late surrogate",
        400,
        BAD,
        None,
        "surrogate",
        b'{"model":"scripted","messages":[{"role":"user","content":"\\udc00 x"}]}',
    ),
    raw("byte order mark", 400, BAD, None, "one JSON object", b"\xef\xbb\xbf" + json.dumps(GOOD_BODY).encode()),
    raw("form body", 400, BAD, None, "application/json", b"model=scripted", Content_Type="application/x-www-form-urlencoded"),
    raw("plain text", 400, BAD, None, "application/json", json.dumps(GOOD_BODY).encode(), Content_Type="text/plain"),
    raw("compressed", 400, BAD, None, "without Content-Encoding", b"no gzip at all", Content_Encoding="gzip"),
    raw("too large", 413, "too_large", None, "1 MiB", b'{"model":"' + b"x" * 1_100_000 + b'"}'),
    raw("no model", 400, BAD, "model", "is required", b'{"messages":[]}'),
    raw("no messages", 400, BAD, "messages", "is required", b'{"model":"scripted"}'),
    fields("model of a wrong type", 400, BAD, "model", "expected `str`", model=5),
    fields("another model", 404, "model_not_found", "model", "it serves 'scripted'", model="gpt-4o"),
    fields("empty messages", 400, BAD, "messages", "at least one", messages=[]),
    fields("messages a string", 400, BAD, "messages", "expected `array`", messages="hi"),
    fields("unknown role", 400, BAD, "messages[0].role", "valid: system", messages=[{"role": "bot", "content": "a"}]),
    fields("no role", 400, BAD, "messages[0].role", "is required", messages=[{"content": "a"}]),
    fields("no content", 400, BAD, "messages[0].content", "must be a text", messages=[{"role": "user"}]),
    fields(
        "content a number",
        400,
        BAD,
        "messages[0].content",
        "expected `str | array | null`",
        messages=[{"role": "user", "content": 5}],
    ),
    fields(
        "second message", 400, BAD, "messages[1].role", "valid:", messages=[*GOOD_BODY["messages"], {"role": 1, "content": ""}]
    ),
    content("empty parts", 400, BAD, "messages[0].content", "list of parts"),
    content("unknown part", 400, BAD, f"{IN_0}.type", "valid: text, input_audio", {"type": "smell", "smell": "rose"}),
    content("part without a type", 400, BAD, f"{IN_0}.type", "is required", {"text": "a"}),
    content("text without text", 400, BAD, f"{IN_0}.text", "is required", {"type": "text"}),
    content("text a number", 400, BAD, f"{IN_0}.text", "expected `str`", {"type": "text", "text": 1}),
    content(
        "no data",
        400,
        BAD,
        f"{IN_0}.input_audio.data",
        "is required",
        {"type": "input_audio", "input_audio": {"format": "wav"}},
    ),
    content("empty data", 400, BAD, f"{IN_0}.input_audio.data", "not empty", audio_part("")),
    content("not base64", 400, BAD, f"{IN_0}.input_audio.data", "not base64", audio_part("!!!!")),
    content("half a base64", 400, BAD, f"{IN_0}.input_audio.data", "not base64", audio_part("AAAAA")),
    content("not ASCII", 400, BAD, f"{IN_0}.input_audio.data", "not base64", audio_part("ä" * 8)),
    content("unknown audio format", 400, BAD, f"{IN_0}.input_audio.format", "wav, mp3", audio_part("AAAA", "midi")),
    content("format a number", 400, BAD, f"{IN_0}.input_audio.format", "expected `str", audio_part("AAAA", 5)),
    content(
        "no audio file",
        415,
        "undecodable_media",
        f"{IN_0}.input_audio.data",
        "send wav",
        audio_part(b64(b"plain words, no audio")),
    ),
    content("cut wav header", 415, "undecodable_media", f"{IN_0}.input_audio.data", "audio", audio_part(b64(wav(100)[:20]))),
    content("wav of nothing", 415, "undecodable_media", f"{IN_0}.input_audio.data", "audio", audio_part(b64(wav(0)))),
    content(
        "false flac", 415, "undecodable_media", f"{IN_0}.input_audio.data", "damaged", audio_part(b64(b"fLaC" + b"\x00" * 400))
    ),
    content(
        "false mp3",
        415,
        "undecodable_media",
        f"{IN_0}.input_audio.data",
        "damaged",
        audio_part(b64(b"ID3" + b"\x11" * 400), "mp3"),
    ),
    content(
        "odd pcm16", 415, "undecodable_media", f"{IN_0}.input_audio.data", "two bytes", audio_part(b64(b"\x00" * 33), "pcm16")
    ),
    content(
        "a playlist",
        415,
        "undecodable_media",
        f"{IN_0}.input_audio.data",
        "send wav",
        audio_part(b64(b"#EXTM3U\nfile:///etc/passwd\n")),
    ),
    content(
        "rate of 1 Hz", 415, "undecodable_media", f"{IN_0}.input_audio.data", "4 to 384 kHz", audio_part(b64(wav(4000, rate=1)))
    ),
    content(
        "file URL",
        400,
        "media_url_refused",
        f"{IN_0}.image_url.url",
        "only data, http and https",
        url_part("image", "file:///etc/passwd"),
    ),
    content("relative URL", 400, "media_url_refused", f"{IN_0}.image_url.url", "only data, http", url_part("image", "cat.png")),
    content(
        "loopback URL",
        400,
        "media_url_refused",
        f"{IN_0}.audio_url.url",
        "public internet",
        url_part("audio", "http://127.0.0.1:1/a"),
    ),
    content("empty URL", 400, BAD, f"{IN_0}.image_url.url", "data URL or an http", url_part("image", "")),
    content("URL a number", 400, BAD, f"{IN_0}.image_url.url", "expected `str`", url_part("image", 7)),
    content("data URL without comma", 400, BAD, f"{IN_0}.image_url.url", "comma", url_part("image", "data:image/png;base64")),
    content(
        "data URL not base64", 400, BAD, f"{IN_0}.image_url.url", "not base64", url_part("image", "data:image/png;base64,$$$$")
    ),
    content("empty data URL", 400, BAD, f"{IN_0}.image_url.url", "empty", url_part("image", "data:image/png;base64,")),
    fields("no modality", 400, BAD, "modalities", "at least one", modalities=[]),
    fields("unknown modality", 400, BAD, "modalities", 'did you mean "audio"', modalities=["text", "audoi"]),
    fields("modality not offered", 422, "model_refused", "modalities", "it makes audio, text", modalities=["video"]),
    fields("modalities a string", 400, BAD, "modalities", "expected `array", modalities="text"),
    fields(
        "unknown voice", 422, "model_refused", "audio.voice", "Ethan, chelsie", modalities=["audio"], audio={"voice": "bob"}
    ),
    fields("voice a number", 400, BAD, "audio.voice", "expected `str", audio={"voice": 1}),
    fields("audio a string", 400, BAD, "audio", "expected `object", audio="wav"),
    fields("streamed mp3", 400, BAD, "audio.format", "pcm16, wav", stream=True, audio={"format": "mp3"}),
    fields("unknown format", 400, BAD, "audio.format", "mp3, opus, flac", audio={"format": "au"}),
    fields("stream a string", 400, BAD, "stream", "expected `bool", stream="yes"),
    fields("stream_options alone", 400, BAD, "stream_options", "stream = true", stream_options={"include_usage": True}),
    fields(
        "include_usage", 400, BAD, "stream_options.include_usage", "expected", stream=True, stream_options={"include_usage": 1}
    ),
    fields("two answers", 400, BAD, "n", "must be 1", n=2),
    fields("temperature a string", 400, BAD, "temperature", "expected `float", temperature="hot"),
    fields("temperature below 0", 400, BAD, "temperature", "from 0 to 100", temperature=-1),
    fields("top_p of 0", 400, BAD, "top_p", "above 0", top_p=0),
    fields("top_p above 1", 400, BAD, "top_p", "up to 1", top_p=1.5),
    fields("top_k of -2", 400, BAD, "top_k", "-1 or 0", top_k=-2),
    fields("temperature next to 0", 400, BAD, "temperature", "at least 0.000001", temperature=1e-40),
    fields("penalty of 0", 400, BAD, "repetition_penalty", "from 0.01 to 100", repetition_penalty=0),
    fields("penalty next to 0", 400, BAD, "repetition_penalty", "from 0.01 to 100", repetition_penalty=1e-300),
    fields("max_tokens of 0", 400, BAD, "max_tokens", "at least 1", max_tokens=0),
    fields("max_tokens a half", 400, BAD, "max_tokens", "expected `int", max_tokens=1.5),
    fields("max_tokens a boolean", 400, BAD, "max_tokens", "expected `int", max_tokens=True),
    fields("max_completion_tokens", 400, BAD, "max_completion_tokens", "at least 1", max_completion_tokens=0),
    fields("min_tokens", 400, BAD, "min_tokens", "at least 0", min_tokens=-1),
    fields("empty stop", 400, BAD, "stop", "non-empty", stop=["a", ""]),
    fields("stop a number", 400, BAD, "stop", "expected `str", stop=5),
    fields("seed a string", 400, BAD, "seed", "expected `int", seed="7"),
    fields("seed of 65 bits", 400, BAD, "seed", "<= 9223372036854775807", seed=2**64),
    fields("sampling a list", 400, BAD, "sampling", "expected `object", sampling=[]),
    fields("sampling of no stage", 400, BAD, "sampling", 'did you mean "talker"', sampling={"talkr": {}}),
    fields("sampling of a plain stage", 400, BAD, "sampling", "valid: talker, thinker", sampling={"vocoder": {}}),
    fields("stage's field", 400, BAD, "sampling.talker.top_k", "expected `int", sampling={"talker": {"top_k": "a"}}),
    fields("stage's range", 400, BAD, "sampling.talker.top_p", "above 0", sampling={"talker": {"top_p": 0}}),
    fields("stage's object", 400, BAD, "sampling.talker", "expected `object", sampling={"talker": 5}),
    fields("short list", 400, BAD, "sampling_params_list", "thinker, talker", sampling_params_list=[{}]),
    fields("list's field", 400, BAD, "sampling_params_list[1].seed", "expected", sampling_params_list=[{}, {"seed": "a"}]),
    fields("list's range", 400, BAD, "sampling_params_list[0].top_p", "above 0", sampling_params_list=[{"top_p": 0}, {}]),
    fields("both samplings", 400, BAD, "sampling_params_list", "not both", sampling={}, sampling_params_list=[{}, {}]),
    fields("timeout of 0", 400, BAD, "timeout", "above 0", timeout=0),
    fields("timeout too long", 400, BAD, "timeout", "up to 300", timeout=301),
    fields("timeout a string", 400, BAD, "timeout", "expected `float", timeout="5"),
    Row("timeout header", 400, BAD, "X-Request-Timeout", "up to 300", fields={}, headers={"X-Request-Timeout": "soon"}),
    Row("NaN header", 400, BAD, "X-Request-Timeout", "up to 300", fields={}, headers={"X-Request-Timeout": "nan"}),
    Row(
        "image for a model without eyes",
        422,
        "model_refused",
        IN_0,
        "it takes audio, text",
        fields={"messages": [{"role": "user", "content": [url_part("image", "data:image/png;base64,AAAA")]}]},
        input_kinds=("text", "audio"),
    ),
    content("too many media", 400, BAD, "messages[0].content[64]", "up to 64", *[url_part("image", "data:,a")] * 65),
]


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
async def test_malformed_request(start: Any, row: Row) -> None:
    server = await start(input_kinds=row.input_kinds, max_body_mb=1)
    body = row.raw if row.raw is not None else json.dumps({**GOOD_BODY, **(row.fields or {})}).encode()
    headers = {"Content-Type": "application/json", **(row.headers or {})}
    async with server.http.post(f"{server.url}/v1/chat/completions", data=body, headers=headers) as answer:
        assert answer.content_type == "application/json"
        error = (await answer.json())["error"]
        assert (answer.status, error["code"], error["param"]) == (row.status, row.code, row.param), error
        assert row.says in error["message"]
        assert set(error) == {"message", "type", "param", "code"} and error["type"] in (
            "invalid_request_error",
            "not_found_error",
        )
        assert "/" not in error["message"].replace("application/json", "").replace("http(s)", ""), "no path leaves in a message"
    assert not server.bus.submissions, "nothing of a malformed request reaches the bus"
    status, good = await server.chat()
    assert status == 200 and good["choices"][0]["message"]["content"] == "Hello world"


def test_the_table_is_large_enough() -> None:
    assert len(ROWS) >= 60 and len({row.name for row in ROWS}) == len(ROWS)
