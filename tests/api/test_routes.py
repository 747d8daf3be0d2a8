"""The routes that are not chat, and what every answer carries."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

GOOD = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}]}


async def test_health_and_ready(server: Any) -> None:
    async with server.http.get(f"{server.url}/health") as answer:
        assert (answer.status, await answer.json()) == (200, {"status": "ok"})
    async with server.http.get(f"{server.url}/ready") as answer:
        assert (answer.status, await answer.json()) == (200, {"ready": True, "missing": []})
    server.bus.missing = ("talker",)
    async with server.http.get(f"{server.url}/ready") as answer:
        body = await answer.json()
        assert answer.status == 503 and "Retry-After" in answer.headers
        assert body["missing"] == ["talker"] and body["error"]["code"] == "no_ready_replica"


async def test_models(server: Any) -> None:
    async with server.http.get(f"{server.url}/v1/models") as answer:
        (entry,) = (await answer.json())["data"]
    assert (entry["id"], entry["object"], entry["voices"]) == ("scripted", "model", ["Ethan", "chelsie"])
    async with server.http.get(f"{server.url}/v1/models/scripted") as answer:
        assert await answer.json() == entry
    async with server.http.get(f"{server.url}/v1/models/some/other") as answer:
        assert answer.status == 404 and (await answer.json())["error"]["code"] == "model_not_found"


async def test_status(server: Any) -> None:
    async with server.http.get(f"{server.url}/v1/status") as answer:
        body = await answer.json()
    assert body["model"] == "scripted" and body["ended"] == {"done": 4}
    recent = {"window_s": 300, "ttfp_s": None, "rtf": None, "underrun": {"count": 0, "seconds": 0}}
    assert body["recent"] == recent, "nothing has been spoken yet"
    assert [(stage["name"], len(stage["replicas"])) for stage in body["stages"]] == [
        ("thinker", 1),
        ("talker", 0),
        ("vocoder", 0),
    ]
    assert body["stages"][0]["replicas"][0]["load"]["waiting"] == 3


async def test_metrics_of_the_bus(server: Any) -> None:
    assert await server.metric("omni_bus_broker_up") == 1
    assert await server.metric('omni_bus_stage_queue{stage="thinker",worker="thinker.0"}') == 3
    assert await server.metric('omni_bus_stage_batch{stage="thinker",worker="thinker.0"}') == 2
    edge = '{connector="inline",edge="thinker->client",worker="thinker.0"}'
    swapped = '{edge="thinker->client",connector="inline",worker="thinker.0"}'
    for name, value in (("chunks", 5), ("bytes", 500)):
        assert value in (
            await server.metric(f"omni_bus_edge_{name}_total{edge}"),
            await server.metric(f"omni_bus_edge_{name}_total{swapped}"),
        )
    entry = '{connector="inline",edge="client->thinker",worker="client"}'
    assert await server.metric(f"omni_bus_edge_chunks_total{entry}") == 6
    assert await server.metric(f"omni_bus_edge_bytes_total{entry}") == 600
    assert await server.metric('omni_bus_broker_ended_total{how="done"}') == 4


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere", 404, "not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
        ("POST", "/v1/../etc/passwd", 404, "not_found"),
    ],
)
async def test_wrong_address_or_method(server: Any, method: str, path: str, status: int, code: str) -> None:
    async with server.http.request(method, f"{server.url}{path}") as answer:
        error = (await answer.json())["error"]
        assert (answer.status, error["code"]) == (status, code)
        assert ("Allow" in answer.headers) == (status == 405)
    assert await server.metric(f'omni_bus_failures_total{{code="{code}"}}') == 1


async def test_unknown_paths_do_not_become_labels(server: Any) -> None:
    for number in range(3):
        async with server.http.get(f"{server.url}/path-{number}"):
            pass
    assert await server.metric('omni_bus_requests_total{route="unmatched",status="404"}') == 3


async def test_every_answer_carries_our_id_and_the_security_headers(server: Any) -> None:
    ids = set()
    for path in ("/health", "/nowhere", "/v1/models"):
        async with server.http.get(f"{server.url}{path}", headers={"X-Request-Id": "mine"}) as answer:
            ids.add(answer.headers["X-Request-Id"])
            assert answer.headers["X-Content-Type-Options"] == "nosniff" and answer.headers["Server"] == "omni-bus"
    assert len(ids) == 3 and "mine" not in ids
    async with server.http.post(f"{server.url}/v1/chat/completions", json={**GOOD, "stream": True}) as answer:
        assert answer.headers["X-Request-Id"].startswith("req-")


@pytest.fixture
def key_file(tmp_path: Any) -> str:
    path = tmp_path / "keys.txt"
    path.write_text("# ours\nsk-first\n\nsk-second\n")
    return str(path)


@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        (None, 401),
        ("Bearer ", 401),
        ("Bearer sk-firs", 401),
        ("Bearer sk-first2", 401),
        ("Bearer # ours", 401),
        ("Basic sk-first", 401),
        ("sk-first", 401),
        ("Bearer \u00e9", 401),
        ("Bearer sk-first", 200),
        ("bearer sk-second", 200),
    ],
)
async def test_keys(start: Any, key_file: str, authorization: str | None, status: int) -> None:
    server = await start(api_keys_file=key_file)
    headers = {"Authorization": authorization} if authorization is not None else {}
    async with server.http.post(f"{server.url}/v1/chat/completions", json=GOOD, headers=headers) as answer:
        assert answer.status == status
        if status == 401:
            error = (await answer.json())["error"]
            assert error["code"] == "invalid_api_key" and error["type"] == "authentication_error"
            assert "sk-" not in error["message"] and answer.headers["WWW-Authenticate"] == "Bearer"
    for path, without_key in (("/health", 200), ("/ready", 200), ("/metrics", 401), ("/v1/models", 401), ("/v1/status", 401)):
        async with server.http.get(f"{server.url}{path}") as answer:
            assert answer.status == without_key, path


async def test_a_key_file_without_keys_is_refused(start: Any, tmp_path: Any) -> None:
    from omni_bus.errors import ConfigError

    (tmp_path / "empty.txt").write_text("# nothing\n")
    with pytest.raises(ConfigError, match="holds no key"):
        await start(api_keys_file=str(tmp_path / "empty.txt"))
    with pytest.raises(ConfigError, match="cannot be read"):
        await start(api_keys_file=str(tmp_path / "absent.txt"))


async def test_cors(start: Any, key_file: str) -> None:
    server = await start(cors_origins=("https://app.example",), api_keys_file=key_file)
    ask = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
    async with server.http.options(f"{server.url}/v1/chat/completions", headers=ask) as answer:
        assert answer.status == 204 and answer.headers["Access-Control-Allow-Origin"] == "https://app.example"
        assert "Authorization" in answer.headers["Access-Control-Allow-Headers"]
    async with server.http.get(f"{server.url}/health", headers=ask) as answer:
        assert answer.headers["Access-Control-Allow-Origin"] == "https://app.example"
    async with server.http.options(
        f"{server.url}/v1/chat/completions", headers={**ask, "Origin": "https://evil.example"}
    ) as answer:
        assert answer.status == 401 and "Access-Control-Allow-Origin" not in answer.headers


async def test_access_log_has_no_prompt_and_no_key(start: Any, key_file: str, caplog: pytest.LogCaptureFixture) -> None:
    server = await start(api_keys_file=key_file)
    caplog.set_level("INFO", logger="omni_bus.api.access")
    body = {**GOOD, "messages": [{"role": "user", "content": "my secret"}]}
    headers = {"Authorization": "Bearer sk-first", "X-Request-Id": "label\u00e9<>7"}
    async with server.http.post(f"{server.url}/v1/chat/completions?token=hush", json=body, headers=headers) as answer:
        ours = answer.headers["X-Request-Id"]
    (line,) = [record.getMessage() for record in caplog.records if record.name == "omni_bus.api.access"]
    assert line.startswith("POST /v1/chat/completions 200 ") and ours in line and line.endswith("label7")
    assert not any(secret in caplog.text for secret in ("my secret", "sk-first", "hush"))


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer sk-first\x01\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer sk-first" + b"a" * 20_000 + b"\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5 sk-first\r\n\r\n",
        b"sk-first\r\n\r\n",
    ],
)
async def test_what_is_not_http_is_refused_and_not_logged(server: Any, caplog: pytest.LogCaptureFixture, sent: bytes) -> None:
    reader, writer = await asyncio.open_connection(server.host, server.port)
    writer.write(sent)
    assert b" 400 " in await reader.readline()
    writer.close()
    assert "sk-first" not in caplog.text and "Traceback" not in caplog.text
    assert (await server.chat())[0] == 200


def test_an_error_that_quotes_broken_text_can_still_be_sent() -> None:
    import msgspec

    from omni_bus.api.errors_render import error_body
    from omni_bus.errors import InvalidRequest

    said = msgspec.json.decode(msgspec.json.encode(error_body(InvalidRequest("bad \udcff", param="na\udcffme"))))
    assert (said["error"]["message"], said["error"]["param"]) == ("bad ?", "na?me")
