"""`tcp://HOST:PORT`: read, and the address of this host from which one is reached."""

from __future__ import annotations

import re
import socket

import msgspec

from omni_bus.errors import ConfigError

_FORM = re.compile(r"tcp://(?P<host>\*|[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]{1,5})")


class TcpEndpoint(msgspec.Struct, frozen=True):
    host: str  # a name or an address, without brackets; "*": every address of this host
    port: int

    @classmethod
    def parse(cls, text: str) -> TcpEndpoint:
        """Raises ValueError for anything of another form."""
        found = _FORM.fullmatch(text)
        if found is None or not 1 <= int(found["port"]) <= 65535:
            raise ValueError(f'must be tcp://HOST:PORT, such as tcp://0.0.0.0:5600, not "{text[:80]}"')
        return cls(found["host"].strip("[]"), int(found["port"]))

    @property
    def anywhere(self) -> bool:
        return self.host in ("*", "0.0.0.0", "::")

    def __str__(self) -> str:
        return f"tcp://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


def own_address(towards: TcpEndpoint) -> str:
    """The address that this host has on the way there; nothing is sent. Raises ConfigError where there is no way."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(towards.host, towards.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(f"--broker: there is no way from here to {towards}: {error.strerror}") from None
