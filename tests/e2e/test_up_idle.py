"""An idle server costs nothing: no process of it polls."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Iterator

import pytest

from tests.support.running_server import Server, running

SETTLE_S = 3.0
MEASURE_S = 15.0
PROCESSES = {  # beside supervisor, broker and API
    "probe": ("source.0", "relay.0", "sink.0"),
    "qwen3_omni": ("processor.0", "thinker.0", "talker.0", "code2wav.0"),
}
Shares = dict[str, dict[str, float]]  # server → process → used, of one core


@pytest.fixture(scope="module")
def shares(omni_checkpoint: pathlib.Path) -> Iterator[Shares]:
    """Both servers have answered once, and are then left alone over the same time."""
    with running("probe.toml") as probe, running("qwen3_omni_tiny.toml", sets=[f"model.path={omni_checkpoint}"]) as omni:
        servers = {"probe": probe, "qwen3_omni": omni}
        for server in servers.values():
            audio = server.chat("wake up", audio=True)["choices"][0]["message"]["audio"]
            assert audio["data"], "every stage has worked"
        time.sleep(SETTLE_S)
        before, start = {name: used(server) for name, server in servers.items()}, time.monotonic()
        time.sleep(MEASURE_S)
        after, seconds = {name: used(server) for name, server in servers.items()}, time.monotonic() - start
        yield {
            name: {process: (after[name][process] - seen) / seconds for process, seen in before[name].items()}
            for name in servers
        }


def used(server: Server) -> dict[str, float]:
    """Process → seconds of a core since its start."""
    return {name: (times := process.cpu_times()).user + times.system for name, process in server.processes().items()}


@pytest.mark.parametrize("name", PROCESSES)
def test_an_idle_server_uses_less_than_a_hundredth_of_a_core(shares: Shares, name: str) -> None:
    share = shares[name]
    assert share.keys() == {"supervisor", "broker", "api.0", *PROCESSES[name]}
    assert sum(share.values()) < 0.01, share
