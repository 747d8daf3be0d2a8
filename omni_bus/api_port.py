"""Whether the API can listen where a deployment has it, asked before anything is started."""

from __future__ import annotations

import socket

from omni_bus.deployment import Deployment
from omni_bus.errors import ConfigError


def check_port(deployment: Deployment) -> None:
    """Raises ConfigError where the API could not listen."""
    host, port = deployment.api.host, deployment.api.port
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except socket.gaierror:
        raise ConfigError(f'api.host: "{host}" is no address of this machine; choose another with --host') from None
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except PermissionError:
            raise ConfigError(f"api.port: {port} may not be used by this user; choose one above 1023 with --port") from None
        except OSError as error:
            raise ConfigError(
                f"api.port: cannot listen on {host}:{port} ({error.strerror}); choose another with --port"
            ) from None
