"""A small HTTP/1.1 client on asyncio streams for the commands: one request a connection, and bodies read as they come."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import ssl
import urllib.parse
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any

from omni_bus.errors import ConfigError, OmniBusError

DEFAULT_URL = "http://127.0.0.1:8091"
_LIMIT = 1 << 26  # bytes in one line: a whole answer's audio may be one
_BLOCK = 1 << 16


class Unreachable(OmniBusError):
    """There is no server, or it went away."""

    code = "unreachable"
    status = 503


class Refused(OmniBusError):
    """The server answered with an error; `status` and `message` are its own."""

    code = "refused"

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclasses.dataclass(frozen=True, slots=True)
class Response:
    status: int
    headers: Mapping[str, str]  # names in lower case
    reader: asyncio.StreamReader

    async def blocks(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises Unreachable where it ends too early."""
        try:
            if "chunked" in self.headers.get("transfer-encoding", ""):
                while size := int(await self.reader.readuntil(b"\r\n"), 16):
                    yield (await self.reader.readexactly(size + 2))[:-2]
                await self.reader.readuntil(b"\r\n")
            elif "content-length" in self.headers:
                left = int(self.headers["content-length"])
                while left:
                    block = await self.reader.read(min(left, _BLOCK))
                    if not block:
                        raise Unreachable("the server closed the connection in the middle of an answer")
                    left -= len(block)
                    yield block
            else:
                while block := await self.reader.read(_BLOCK):
                    yield block
        except (asyncio.IncompleteReadError, ConnectionError, ValueError):
            raise Unreachable("the server closed the connection in the middle of an answer") from None

    async def body(self) -> bytes:
        return b"".join([block async for block in self.blocks()])

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """The JSON of each server-sent event, up to `[DONE]`."""
        rest = b""
        async for block in self.blocks():
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                data = line.strip().removeprefix(b"data:").strip()
                if not line.startswith(b"data:") or not data:
                    continue
                if data == b"[DONE]":
                    return
                yield json.loads(data)


def base_url(text: str | None) -> str:
    """The server's address: what was said, or OMNI_BUS_URL, or where `omni-bus up` listens by default. Raises ConfigError."""
    url = (text or os.environ.get("OMNI_BUS_URL") or DEFAULT_URL).rstrip("/")
    if "://" not in url:
        url = f"http://{url}"
    parts = urllib.parse.urlsplit(url)
    try:
        good = parts.scheme in ("http", "https") and parts.hostname is not None and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise ConfigError(f'"{text or url}" is no http address; one looks like {DEFAULT_URL}')
    return url.removesuffix("/v1")


@contextlib.asynccontextmanager
async def request(method: str, url: str, body: object = None) -> AsyncIterator[Response]:
    """Send a request, with JSON where a body is given. Raises Unreachable; Refused for a status from 400 on."""
    parts = urllib.parse.urlsplit(url)
    secure = ssl.create_default_context() if parts.scheme == "https" else None
    port = parts.port or (443 if secure else 80)
    assert parts.hostname is not None
    try:
        reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=secure, limit=_LIMIT)
    except OSError:
        raise Unreachable(f"no server at {url}; start one with `omni-bus up`, or name another with --url") from None
    try:
        writer.write(_head(method, parts, body))
        await writer.drain()
        response = await _response(reader)
        if response.status >= 400:
            raise Refused(response.status, _error_message(response.status, await response.body()))
        yield response
    except (ConnectionError, asyncio.IncompleteReadError):
        raise Unreachable("the server closed the connection") from None
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def first_model(url: str) -> str:
    """The id of the first model that the server lists."""
    async with request("GET", f"{url}/v1/models") as response:
        try:
            return str(json.loads(await response.body())["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise OmniBusError(f"{url}/v1/models lists no model; name one with --model") from None


def _head(method: str, parts: urllib.parse.SplitResult, body: object) -> bytes:
    content = b"" if body is None else json.dumps(body).encode()
    key = os.environ.get("OMNI_BUS_API_KEY", "")
    headers = {
        "Host": parts.netloc.rpartition("@")[2],
        "Connection": "close",
        "Accept": "application/json, text/event-stream",
        **({"Authorization": f"Bearer {key}"} if key else {}),
        **({"Content-Type": "application/json", "Content-Length": str(len(content))} if body is not None else {}),
    }
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content


async def _response(reader: asyncio.StreamReader) -> Response:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    words = head[0].split(" ", 2)
    if len(words) < 2 or not words[0].startswith("HTTP/") or not words[1].isdigit():
        raise Unreachable("what answers there does not speak HTTP")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
    return Response(int(words[1]), headers, reader)


def _error_message(status: int, body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered {status}"
