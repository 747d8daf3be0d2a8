"""Media by URL: what is fetched, what is refused, and that a refusal tells nothing of the inside."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from omni_bus.api import media_fetch
from omni_bus.api.http_errors import MediaRefused, MediaUnreachable
from omni_bus.api.media_fetch import MediaFetcher, is_public
from omni_bus.deployment import ApiConfig
from omni_bus.errors import OmniBusError, TooLarge

PNG = b"\x89PNG" + bytes(1000)


@pytest.fixture
async def fetcher() -> AsyncIterator[MediaFetcher]:
    made = MediaFetcher(ApiConfig())
    yield made
    await made.close()


@pytest.fixture
async def private_fetcher() -> AsyncIterator[MediaFetcher]:
    made = MediaFetcher(ApiConfig(allow_private_media=True, max_body_mb=1))
    yield made
    await made.close()


@pytest.fixture
async def host() -> AsyncIterator[str]:
    """A web server on loopback, with files, redirects and misbehaviour."""
    seen: list[web.Request] = []

    async def file(request: web.Request) -> web.StreamResponse:
        seen.append(request)
        name = request.match_info["name"]
        if name == "cat.png":
            assert "Authorization" not in request.headers and "Cookie" not in request.headers
            return web.Response(body=PNG, headers={"Set-Cookie": "a=b"})
        if name.startswith("redirect-"):
            count = int(name.removeprefix("redirect-"))
            return web.Response(status=302, headers={"Location": f"redirect-{count - 1}" if count else "cat.png"})
        if name == "to-file":
            return web.Response(status=302, headers={"Location": "file:///etc/passwd"})
        if name == "to-metadata":
            return web.Response(status=307, headers={"Location": "http://169.254.169.254/latest"})
        if name == "huge":
            response = web.StreamResponse()
            await response.prepare(request)
            for _ in range(64):
                await response.write(bytes(64 * 1024))
            return response
        if name == "slow":
            response = web.StreamResponse()
            await response.prepare(request)
            await response.write(b"a")
            await asyncio.sleep(30)
            return response
        if name == "empty":
            return web.Response()
        if name == "bomb":
            return web.Response(body=b"\x1f\x8b not unpacked", headers={"Content-Encoding": "gzip"})
        raise web.HTTPNotFound

    app = web.Application()
    app.router.add_get("/{name}", file)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1111", True),
        ("127.0.0.1", False),
        ("127.8.8.8", False),
        ("0.0.0.0", False),
        ("10.0.0.1", False),
        ("172.16.5.5", False),
        ("192.168.1.1", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("198.18.0.1", False),
        ("224.0.0.1", False),
        ("255.255.255.255", False),
        ("::1", False),
        ("::", False),
        ("fe80::1", False),
        ("fc00::1", False),
        ("fd00:ec2::254", False),
        ("ff02::1", False),
        ("::ffff:127.0.0.1", False),
        ("::ffff:8.8.8.8", True),
        ("2002:7f00:1::", False),
        ("64:ff9b::7f00:1", False),
        ("64:ff9b::808:808", True),
        ("2001:0:4136:e378:8000:63bf:3fff:fdd2", False),
    ],
)
def test_public_addresses(address: str, public: bool) -> None:
    assert is_public(ipaddress.ip_address(address)) is public


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "ftp://example.com/a",
        "gopher://example.com/",
        "javascript:alert(1)",
        "HTTP:relative",
        "//example.com/a",
        "http://",
        "http://user:secret@example.com/a",
        "http://127.0.0.1/a",
        "http://127.0.0.1.:80/a",
        "http://localhost/a",
        "http://LOCALHOST./a",
        "http://[::1]/a",
        "http://[::ffff:127.0.0.1]/a",
        "http://[fe80::1%25lo]/a",
        "http://0.0.0.0/a",
        "http://0/a",
        "http://2130706433/a",
        "http://0x7f.1/a",
        "http://127.1/a",
        "http://0177.0.0.1/a",
        "http://10.1.2.3/a",
        "http://169.254.169.254/latest/meta-data",
        "http://192.168.0.1:8080/a",
        "http://no-such-host.invalid/a",
        "http://[not-an-address/a",
        "http://exa mple.com/",
        "http://example.com:99999/",
    ],
)
async def test_refused_urls(fetcher: MediaFetcher, url: str) -> None:
    with pytest.raises((MediaRefused, MediaUnreachable)) as refused:
        await fetcher.fetch(url, "field")
    assert refused.value.param == "field" and refused.value.status == 400
    assert not any(told in refused.value.message for told in ("127.0", "::1", "secret", "169.254", "passwd"))


async def test_a_name_that_points_inside_is_refused_like_one_that_does_not_exist(
    fetcher: MediaFetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = set()
    for answer in ("10.0.0.7", None):

        async def getaddrinfo(*_: Any, answer: str | None = answer, **__: Any) -> list[Any]:
            if answer is None:
                raise socket.gaierror(socket.EAI_NONAME, "unknown")
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (answer, 80))]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
        with pytest.raises(MediaRefused) as refused:
            await fetcher.fetch("http://cdn.example/a.png", "field")
        messages.add(refused.value.message)
    assert len(messages) == 1


async def test_one_private_address_among_public_ones_is_enough_to_refuse(
    fetcher: MediaFetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def getaddrinfo(*_: Any, **__: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 80)) for address in ("8.8.8.8", "127.0.0.1")]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    with pytest.raises(MediaRefused):
        await fetcher.fetch("http://cdn.example/a.png", "field")


async def test_the_name_is_resolved_once_and_the_connection_goes_where_the_check_looked(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that answers with a public address first and a private one later gains nothing: there is no later."""
    fetcher = MediaFetcher(ApiConfig(allow_private_media=True))
    asked = []

    async def getaddrinfo(name: str, port: int, **_: Any) -> list[Any]:
        asked.append(name)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    assert await fetcher.fetch(f"http://cdn.example:{host.rpartition(':')[2]}/cat.png", "field") == PNG
    assert asked == ["cdn.example"]
    await fetcher.close()


async def test_fetching(private_fetcher: MediaFetcher, host: str) -> None:
    for name in ("cat.png", "redirect-2", "cat.png"):
        assert await private_fetcher.fetch(f"http://{host}/{name}", "field") == PNG


@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [
        ("absent", MediaUnreachable, "answered 404"),
        ("empty", MediaUnreachable, "sent nothing"),
        ("redirect-9", MediaUnreachable, "more than 3 redirects"),
        ("to-file", MediaRefused, "only data, http"),
        ("huge", TooLarge, "up to 1 MiB"),
    ],
)
async def test_hosts_that_misbehave(
    private_fetcher: MediaFetcher, host: str, name: str, kind: type[OmniBusError], says: str
) -> None:
    with pytest.raises(kind, match=says):
        await private_fetcher.fetch(f"http://{host}/{name}", "field")


async def test_a_redirect_is_checked_like_the_first_address(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fetcher = MediaFetcher(ApiConfig())
    monkeypatch.setattr(media_fetch, "is_public", lambda address: str(address) == "127.0.0.1")
    with pytest.raises(MediaRefused, match="public internet"):
        await fetcher.fetch(f"http://{host}/to-metadata", "field")
    await fetcher.close()


async def test_packed_content_is_not_unpacked(private_fetcher: MediaFetcher, host: str) -> None:
    assert (await private_fetcher.fetch(f"http://{host}/bomb", "field")).startswith(b"\x1f\x8b not")


async def test_a_slow_host_is_given_up(private_fetcher: MediaFetcher, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_fetch, "TOTAL_S", 0.2)
    with pytest.raises(MediaUnreachable, match="did not send it"):
        await private_fetcher.fetch(f"http://{host}/slow", "field")


async def test_nobody_listens(private_fetcher: MediaFetcher) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        with pytest.raises(MediaUnreachable, match="data URL"):
            await private_fetcher.fetch(f"http://127.0.0.1:{reserved.getsockname()[1]}/a", "field")


async def test_media_hosts(host: str) -> None:
    fetcher = MediaFetcher(ApiConfig(media_hosts=("CDN.example",), allow_private_media=True))
    with pytest.raises(MediaRefused, match="from that host"):
        await fetcher.fetch(f"http://{host}/cat.png", "field")
    with pytest.raises(MediaRefused, match="from that host"):
        await fetcher.fetch("http://evil.cdn.example/cat.png", "field")
    await fetcher.close()
    fetcher = MediaFetcher(ApiConfig(media_hosts=("127.0.0.1",), allow_private_media=True))
    assert await fetcher.fetch(f"http://{host}/cat.png", "field") == PNG
    await fetcher.close()


async def test_a_fetched_image_reaches_the_bus(start: Any, host: str) -> None:
    server = await start(allow_private_media=True)
    part = {"type": "image_url", "image_url": {"url": f"http://{host}/redirect-1"}}
    status, _ = await server.chat(messages=[{"role": "user", "content": [part]}])
    assert status == 200 and bytes(server.bus.submissions[0].tensors["media0"].data) == PNG


async def test_the_deadline_covers_fetching(start: Any, host: str) -> None:
    server = await start(allow_private_media=True)
    part = {"type": "image_url", "image_url": {"url": f"http://{host}/slow"}}
    status, answer = await server.chat(messages=[{"role": "user", "content": [part]}], timeout=0.3)
    assert (status, answer["error"]["code"]) == (408, "deadline_exceeded") and not server.bus.submissions


async def test_an_address_may_not_be_of_any_length(private_fetcher: MediaFetcher) -> None:
    url = "http://files.example/" + "a" * media_fetch.MAX_URL
    with pytest.raises(MediaRefused, match=f"image_url: .* up to {media_fetch.MAX_URL} characters; this one has {len(url)}"):
        private_fetcher.check(url, "image_url")
    assert private_fetcher.check(url[: media_fetch.MAX_URL], "image_url").host == "files.example"
