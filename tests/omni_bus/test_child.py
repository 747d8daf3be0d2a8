"""A child process says that it is ready through a pipe; one that ends before is not."""

from __future__ import annotations

import asyncio
import os
import pathlib
import sys

import pytest

from omni_bus.child import BACKOFF_LIMIT_S, STEADY_S, Child

SAY = "import os, sys; sys.stdin.read(); os.write(int(sys.argv[1]), b'+')"
READY, WAITS = f"{SAY}; import time; time.sleep(60)", "import time; time.sleep(60)"


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


class Watched:
    """A Child, and what it has told, in order."""

    def __init__(self, log: pathlib.Path) -> None:
        self.told: list[str] = []
        self.ready = asyncio.Event()
        self.child = Child("one", log, lambda child, code: self.told.append(f"exit {code}"))

    def start(self, code: str) -> None:
        self.child.start([sys.executable, "-c", code], self._ready)

    def _ready(self) -> None:
        self.told.append("ready")
        self.ready.set()


async def test_it_is_ready_when_it_says_so_and_not_before(tmp_path: pathlib.Path) -> None:
    one, before = Watched(tmp_path / "log"), descriptors()
    one.start(READY)
    assert not one.child.ready
    await asyncio.wait_for(one.ready.wait(), 60)
    assert one.child.ready and one.child.alive
    one.child.send_signal(9)
    await one.child.gone()
    assert one.told == ["ready", "exit -9"]
    assert not descriptors() - before, "others may be closed meanwhile: what earlier tests have left to the garbage collector"


async def test_one_that_ends_without_a_word_is_not_ready_and_its_next_life_may_be(tmp_path: pathlib.Path) -> None:
    one, before = Watched(tmp_path / "log"), descriptors()
    for code, status in (("", 0), ("raise SystemExit(3)", 3), ("import os, sys; os.close(int(sys.argv[1]))", 0)):
        one.start(code)
        await one.child.gone()
        assert one.told.pop() == f"exit {status}" and not one.told
        assert not one.child.ready
    assert one.child.early_deaths == 3
    one.start(READY)
    await asyncio.wait_for(one.ready.wait(), 60)
    one.child.send_signal(9)
    await one.child.gone()
    assert (one.told, one.child.early_deaths) == (["ready", "exit -9"], 0)
    assert not descriptors() - before, "others may be closed meanwhile: what earlier tests have left to the garbage collector"


async def test_the_pipe_is_closed_behind_one_that_was_killed_before_it_spoke(tmp_path: pathlib.Path) -> None:
    one, before = Watched(tmp_path / "log"), descriptors()
    one.start(WAITS)
    one.child.send_signal(9)
    await one.child.gone()
    assert one.told == ["exit -9"]
    assert not descriptors() - before, "others may be closed meanwhile: what earlier tests have left to the garbage collector"


async def test_it_has_the_environment_that_it_is_given(tmp_path: pathlib.Path) -> None:
    one = Watched(tmp_path / "log")
    one.child.start([sys.executable, "-c", "import os; print(sorted(os.environ))"], environment={"ONLY": "1"})
    await one.child.gone()
    assert one.child.last_lines(1)[0].startswith("['LC_CTYPE', 'ONLY', 'PYTHONUNBUFFERED']")


class Mortal:
    """A Child whose lives last as long as the test says, by a clock that only the test moves."""

    def __init__(self, log: pathlib.Path) -> None:
        self.now = 1000.0
        self.child = Child("one", log, lambda child, code: None, clock=lambda: self.now)

    async def dies_after(self, seconds: float, *, expected: bool = False) -> float:
        """The delay behind it, of 0.5 s at first."""
        self.child.start(["true"])
        self.child.expected = expected
        self.now += seconds  # its end is seen in the loop, and so after this
        await asyncio.wait_for(self.child.gone(), 60)
        return self.child.backoff(0.5)


async def test_the_delay_doubles_with_each_death_up_to_its_limit(tmp_path: pathlib.Path) -> None:
    one = Mortal(tmp_path / "log")
    assert one.child.backoff(0.5) == 0.5
    assert [await one.dies_after(1.0) for _ in range(9)] == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    assert BACKOFF_LIMIT_S == 30.0


async def test_a_steady_life_starts_over_with_the_first_delay(tmp_path: pathlib.Path) -> None:
    one = Mortal(tmp_path / "log")
    assert [await one.dies_after(0.0) for _ in range(3)] == [0.5, 1.0, 2.0]
    assert await one.dies_after(STEADY_S) == 4.0, "not longer than that"
    assert await one.dies_after(STEADY_S + 1.0) == 0.5
    assert await one.dies_after(1.0) == 1.0


async def test_an_end_that_was_asked_for_counts_for_nothing(tmp_path: pathlib.Path) -> None:
    one = Mortal(tmp_path / "log")
    assert [await one.dies_after(1.0) for _ in range(2)] == [0.5, 1.0]
    assert await one.dies_after(1.0, expected=True) == 1.0
    assert await one.dies_after(1.0) == 2.0


@pytest.mark.parametrize("first_s", [0.001, 0.5, 60.0])
def test_a_process_that_dies_for_days_is_still_started_again(tmp_path: pathlib.Path, first_s: float) -> None:
    one = Mortal(tmp_path / "log")
    one.child._deaths = 10_000
    assert one.child.backoff(first_s) == BACKOFF_LIMIT_S
