"""An idle server costs nothing: no process of it polls."""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.support.running_server import Server

SETTLE_S = 3.0
MEASURE_S = 30.0


def test_an_idle_server_uses_less_than_a_hundredth_of_a_core(serve: Callable[..., Server]) -> None:
    server = serve("probe.toml")
    assert server.answer("wake up", audio=True).split() == ["wake", "up"]
    time.sleep(SETTLE_S)
    processes = server.processes()
    assert len(processes) == 6

    def used() -> dict[str, float]:
        return {name: (times := process.cpu_times()).user + times.system for name, process in processes.items()}

    before, start = used(), time.monotonic()
    time.sleep(MEASURE_S)
    after, seconds = used(), time.monotonic() - start
    share = {name: (after[name] - before[name]) / seconds for name in processes}
    assert sum(share.values()) < 0.01, share
