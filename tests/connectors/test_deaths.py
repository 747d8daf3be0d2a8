"""A stream that waits for a process which dies is set free; one whose process lives, or that waits no more, is left alone."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from omni_bus.connectors.deaths import Deaths


class Recorded:
    """A fence that notes whether it was forced."""

    def __init__(self) -> None:
        self.reached = False
        self.forced = threading.Event()

    def record(self) -> None: ...
    def wait(self) -> None: ...
    def handle(self) -> bytes:
        return b""

    def over(self) -> bool:
        return self.reached

    def force(self) -> None:
        self.reached = True
        self.forced.set()


@pytest.fixture
def deaths() -> Iterator[Deaths]:
    deaths = Deaths()
    yield deaths
    deaths.close()
    assert all(thread.name != "deaths" for thread in threading.enumerate())


def process() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)


def test_only_the_fences_of_the_process_that_died_are_forced(deaths: Deaths) -> None:
    first, second = process(), process()
    fences = [Recorded() for _ in range(4)]
    for fence in fences[:2]:
        deaths.note(first.pid, fence)
    deaths.note(second.pid, fences[2])
    fences[3].reached = True
    deaths.note(first.pid, fences[3])
    first.kill()
    assert fences[0].forced.wait(30) and fences[1].forced.wait(30)
    first.communicate()
    assert not fences[2].forced.is_set() and not fences[3].forced.is_set()
    second.kill()
    assert fences[2].forced.wait(30)
    second.communicate()


def test_one_that_is_dead_already_is_forced_at_once(deaths: Deaths) -> None:
    ended = process()
    ended.communicate()
    fence = Recorded()
    deaths.note(ended.pid, fence)
    assert fence.forced.is_set()
