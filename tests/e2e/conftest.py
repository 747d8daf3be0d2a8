"""Servers for the end-to-end tests: `serve` starts one for a test, `shared_server` one that all tests of a session use."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Iterator, Sequence

import pytest

from tests.support.running_server import Server, running

Serve = Callable[..., Server]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """serve(config, sets=[…], env={…}, ready_s=…) → a ready Server, stopped (and checked) behind the test."""
    with contextlib.ExitStack() as servers:

        def start(config: pathlib.Path | str, **said: object) -> Server:
            return servers.enter_context(running(config, **said))  # type: ignore[arg-type]

        yield start


@pytest.fixture(scope="session")
def shared_server() -> Iterator[Serve]:
    """shared_server(config, sets=[…]) → the same ready Server for the same arguments. Only for tests that leave it as it was."""
    started: dict[tuple[str, tuple[str, ...]], Server] = {}
    with contextlib.ExitStack() as servers:

        def start(config: pathlib.Path | str, sets: Sequence[str] = (), ready_s: float = 240.0) -> Server:
            key = (str(config), tuple(sets))
            if key not in started:
                started[key] = servers.enter_context(running(config, sets=sets, ready_s=ready_s))
            return started[key]

        yield start
