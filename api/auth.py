"""Who may ask: one of the keys of `api_keys_file`, or anybody where there is none."""

from __future__ import annotations

import hashlib
import hmac
import pathlib

from aiohttp import web

from omni_bus.api.errors_render import Handler
from omni_bus.api.keys import CLIENT, PRIORITY
from omni_bus.api.playground.files import PATHS
from omni_bus.errors import ConfigError, Unauthorized
from omni_bus.events import INTERACTIVE, PRIORITIES

# They tell nothing. Load balancers ask the first two; the others are the page, and in it a key is typed.
OPEN_PATHS = frozenset({"/health", "/ready", *PATHS})
_PRIORITY = "priority="  # behind a key and a space
_IN_PROTOCOL = "openai-insecure-api-key."  # before a key among the subprotocols: a page can set no header of a WebSocket


class ApiKeys:
    """The keys as digests, so that comparing takes the same time whatever was sent; `priorities` of their requests, in the same order."""

    def __init__(self, keys: list[tuple[str, str]]) -> None:
        """keys: (key, priority)"""
        self._digests = [_digest(key) for key, _ in keys]
        self.priorities = [priority for _, priority in keys]

    @classmethod
    def read(cls, path: pathlib.Path) -> ApiKeys:
        """One key a line, behind it `priority=batch` where its requests may wait; empty lines and lines that start with # do not count.

        ConfigError for a file without a key, or with another priority.
        """
        try:
            lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"api.api_keys_file cannot be read: {error}") from error
        keys = [_key(line, number) for number, line in enumerate(lines, start=1) if line and not line.startswith("#")]
        if not keys:
            raise ConfigError("api.api_keys_file holds no key: put one on each line, or remove the setting")
        return cls(keys)

    def check(self, authorization: str | None) -> int:
        """Returns which key it is. Raises Unauthorized."""
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.casefold() != "bearer" or not key.strip():
            raise Unauthorized("send an API key: Authorization: Bearer KEY")
        digest = _digest(key.strip())
        matches = [hmac.compare_digest(digest, known) for known in self._digests]  # all of them: the time tells nothing
        if not any(matches):
            raise Unauthorized("this API key is not known here")
        return matches.index(True)


def _key(line: str, number: int) -> tuple[str, str]:
    """A line's key and priority."""
    key, said, priority = line.rpartition(_PRIORITY)
    if not said or not key[-1:].isspace():
        return line, INTERACTIVE
    if priority not in PRIORITIES:
        raise ConfigError(f"api.api_keys_file, line {number}: priority must be {' or '.join(PRIORITIES)}")
    return key.strip(), priority


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


API_KEYS = web.AppKey("api_keys", ApiKeys)


@web.middleware
async def require_key(request: web.Request, handler: Handler) -> web.StreamResponse:
    if API_KEYS in request.app and request.path not in OPEN_PATHS:
        keys = request.app[API_KEYS]
        number = keys.check(_authorization(request))
        request[CLIENT], request[PRIORITY] = f"key {number}", keys.priorities[number]
    return await handler(request)


def _authorization(request: web.Request) -> str | None:
    said = request.headers.get("Authorization")
    if said is not None:
        return said
    for protocol in request.headers.get("Sec-WebSocket-Protocol", "").split(","):
        if protocol.strip().startswith(_IN_PROTOCOL):
            return f"Bearer {protocol.strip().removeprefix(_IN_PROTOCOL)}"
    return None
