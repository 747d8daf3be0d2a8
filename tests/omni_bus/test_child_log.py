"""A child's log keeps its newest bytes and is bounded, whatever the child writes, whoever fills the disk or takes the file away."""

from __future__ import annotations

import asyncio
import os
import pathlib
import sys

from omni_bus.child import Child
from omni_bus.child_log import ChildLog

LIMIT = 64 << 10
# Thrice the limit in one piece, and one line more when that has been cut from under it: which it sees by its own descriptor.
CHATTERS = """
import os, time
burst = b"".join(b"line %08d\\n" % number for number in range(3 * 65536 // 14))
os.write(1, burst)
while os.fstat(1).st_size >= len(burst):
    time.sleep(0.02)
os.write(2, b"after\\n")
"""


def written(log: ChildLog) -> bytes:
    return (log.older.read_bytes() if log.older.exists() else b"") + log.path.read_bytes()


async def test_a_process_that_writes_without_end_has_a_log_that_does_not_grow(tmp_path: pathlib.Path) -> None:
    code: list[int] = []
    child = Child("one", tmp_path / "one.log", lambda child, how: code.append(how), log_bytes=LIMIT)
    child.start([sys.executable, "-c", CHATTERS])
    await asyncio.wait_for(child.gone(), 120)
    assert code == [0], child.last_lines(5)
    found = written(child.log)
    assert len(found) <= 2 * LIMIT and b"\0" not in found
    assert found.endswith(b"line 00014042\nafter\n"), "the newest is what is kept"
    assert child.last_lines(2) == ["line 00014042", "after"], "also across the two files"
    assert sorted(os.listdir(tmp_path)) == ["one.log", "one.older.log"]


def test_what_is_within_the_limit_is_left_alone(tmp_path: pathlib.Path) -> None:
    log = ChildLog(tmp_path / "one.log", 10)
    log.path.write_bytes(b"0123456789")
    log.bound()
    assert log.path.read_bytes() == b"0123456789" and not log.older.exists()


def test_what_was_older_makes_room_and_an_open_file_goes_on_at_the_new_end(tmp_path: pathlib.Path) -> None:
    log = ChildLog(tmp_path / "one.log", 10)
    with log.open() as file:
        for text in (b"abcdefghijklmno", b"pqrstuvwxyz"):
            file.write(text)
            file.flush()
            log.bound()
            assert (log.older.read_bytes(), log.path.read_bytes()) == (text[-10:], b"")
        file.write(b"012")
    assert log.path.read_bytes() == b"012"
    assert [log.tail(size) for size in (2, 3, 5, 100)] == [b"12", b"012", b"yz012", b"qrstuvwxyz012"]


def test_a_file_that_cannot_be_kept_is_cut_and_one_that_is_gone_ends_nobody(tmp_path: pathlib.Path) -> None:
    log = ChildLog(tmp_path / "one.log", 10)
    log.older.mkdir()  # as good as a full disk: it cannot be written
    log.path.write_bytes(b"x" * 50)
    log.bound()
    assert log.path.read_bytes() == b""
    log.path.unlink()
    log.bound()


def test_a_log_that_somebody_removed_has_nothing_to_tell(tmp_path: pathlib.Path) -> None:
    log = ChildLog(tmp_path / "one.log", 10)
    log.bound()
    assert log.tail(5) == b""


def test_a_file_that_is_not_appended_to_is_bounded_too(tmp_path: pathlib.Path) -> None:
    """Its writer goes on where it was, behind a hole: what counts is what it takes of the disk, and what is kept is the newest."""
    log = ChildLog(tmp_path / "one.log", LIMIT)
    with log.path.open("wb", buffering=0) as file:
        for number in range(4):
            file.write(bytes([97 + number]) * 2 * LIMIT)
            log.bound()
            assert log.path.stat().st_blocks == 0 and log.older.read_bytes() == bytes([97 + number]) * LIMIT
            file.write(b"more")
            log.bound()
            assert log.older.read_bytes() == bytes([97 + number]) * LIMIT, "nothing of it is cut, as large as the file looks"
