"""Fetches media by http(s) URL without becoming a door into the server's own network.

Each address (the first and every redirect's) must have an allowed scheme and host and may carry no credentials. The name is
resolved once, every address it has must be a public one, and the connection goes to exactly those addresses. Size and time are
bounded, the content is streamed, and nothing of the client's headers, cookies or proxies takes part.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from omni_bus.api.http_errors import MediaRefused, MediaUnreachable
from omni_bus.deployment import ApiConfig
from omni_bus.errors import TooLarge

TOTAL_S = 30.0
CONNECT_S = 5.0
MAX_REDIRECTS = 3
MAX_URL = 8192  # characters: an address may be kept for as long as those before it take
_REDIRECTS = (301, 302, 303, 307, 308)
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def is_public(address: Address) -> bool:
    """Whether it lies on the public internet; an IPv6 address that wraps an IPv4 one counts as that one."""
    if isinstance(address, ipaddress.IPv6Address):
        wrapped = address.ipv4_mapped or address.sixtofour
        if wrapped is None and address.teredo is not None:
            return False
        if wrapped is None and address in _NAT64:
            wrapped = ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
        if wrapped is not None:
            return is_public(wrapped)
    return address.is_global and not address.is_multicast


class PublicResolver(AbstractResolver):
    """Names to addresses; a name with an address that is not public has none."""

    def __init__(self, allow_private: bool) -> None:
        self._allow_private = allow_private

    async def resolve(self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET) -> list[ResolveResult]:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, family=family, type=socket.SOCK_STREAM)
        results = []
        for found_family, _, proto, _, sockaddr in found:
            address = str(sockaddr[0])
            if not self._allow_private and not is_public(ipaddress.ip_address(address.partition("%")[0])):
                raise OSError("not a public address")
            results.append(
                ResolveResult(
                    hostname=host, host=address, port=port, family=found_family, proto=proto, flags=socket.AI_NUMERICHOST
                )
            )
        return results

    async def close(self) -> None:
        """Nothing is kept."""


class MediaFetcher:
    def __init__(self, config: ApiConfig) -> None:
        self._hosts = frozenset(host.casefold() for host in config.media_hosts)
        self._allow_private = config.allow_private_media
        self.max_bytes = config.max_body_mb * 2**20
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def check(self, url: str, param: str) -> URL:
        """What can be said without asking anybody: the URL itself, or MediaRefused."""
        if len(url) > MAX_URL:
            raise MediaRefused(
                f"{param}: a media URL may have up to {MAX_URL} characters; this one has {len(url)}", param=param
            )
        try:
            address = URL(url)
        except ValueError:
            raise MediaRefused(f"{param}: this is not a URL", param=param) from None
        self._check(address, param)
        return address

    async def fetch(self, url: str, param: str, limit: int | None = None) -> bytearray:
        """The content, up to `limit` bytes (None: as large as a body may be). Raises MediaRefused, MediaUnreachable or TooLarge, with `param` as the field and no address in the message."""
        address = self.check(url, param)
        try:
            async with asyncio.timeout(TOTAL_S):
                for _ in range(MAX_REDIRECTS + 1):
                    self._check(address, param)
                    content_or_next = await self._get(address, param, self.max_bytes if limit is None else limit)
                    if isinstance(content_or_next, bytearray):
                        return content_or_next
                    address = content_or_next
        except TimeoutError:
            raise MediaUnreachable(f"{param}: its host did not send it within {TOTAL_S:g} s", param=param) from None
        except (aiohttp.ClientError, ValueError, OSError):
            raise MediaUnreachable(f"{param}: it cannot be fetched; send the content as a data URL", param=param) from None
        raise MediaUnreachable(f"{param}: more than {MAX_REDIRECTS} redirects", param=param)

    def _check(self, address: URL, param: str) -> None:
        if address.scheme not in ("http", "https"):
            raise MediaRefused(f"{param}: only data, http and https URLs are fetched", param=param)
        if address.user is not None or address.password is not None:
            raise MediaRefused(f"{param}: a media URL may not carry credentials", param=param)
        host = (address.host or "").rstrip(".").casefold()
        if not host:
            raise MediaRefused(f"{param}: the URL names no host", param=param)
        if self._hosts and host not in self._hosts:
            raise MediaRefused(f"{param}: this server does not fetch media from that host", param=param)
        if not self._allow_private and _is_literal(host) and not is_public(ipaddress.ip_address(host.partition("%")[0])):
            raise MediaRefused(f"{param}: its host is unknown or not on the public internet", param=param)

    async def _get(self, address: URL, param: str, limit: int) -> bytearray | URL:
        """The content, or where a redirect points."""
        headers = {"Accept": "*/*", "Accept-Encoding": "identity", "User-Agent": "omni-bus"}
        try:
            async with self._client().get(address, headers=headers, allow_redirects=False) as answer:
                if answer.status in _REDIRECTS and "Location" in answer.headers:
                    return address.join(URL(answer.headers["Location"]))
                if answer.status != 200:
                    raise MediaUnreachable(f"{param}: its host answered {answer.status}", param=param)
                content = bytearray()
                async for piece in answer.content.iter_any():
                    content += piece
                    if len(content) > limit:
                        raise TooLarge(f"{param}: one request may fetch up to {self.max_bytes // 2**20} MiB", param=param)
        except aiohttp.ClientConnectorDNSError:
            # One message for both: otherwise a client could ask which names exist inside.
            raise MediaRefused(f"{param}: its host is unknown or not on the public internet", param=param) from None
        if not content:
            raise MediaUnreachable(f"{param}: its host sent nothing", param=param)
        return content

    def _client(self) -> aiohttp.ClientSession:
        """Made at the first fetch: most servers never need it."""
        if self._session is None:
            connector = aiohttp.TCPConnector(
                resolver=PublicResolver(self._allow_private), use_dns_cache=False, force_close=True, limit=32, limit_per_host=8
            )
            self._session = aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                trust_env=False,
                timeout=aiohttp.ClientTimeout(total=TOTAL_S, sock_connect=CONNECT_S, sock_read=CONNECT_S * 2),
            )
        return self._session


def _is_literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True
