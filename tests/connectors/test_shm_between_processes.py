"""Shared memory between two processes that know each other by a pipe only."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import msgspec
import pytest
import torch

from omni_bus import segments
from omni_bus.connectors.shm import ShmConnector
from omni_bus.errors import StaleTensor
from omni_bus.events import TensorRef
from omni_bus.segments import SHM

TAG = "pipe"
SENDER = """
import sys
import msgspec, torch
from omni_bus.connectors.shm import ShmConnector
from omni_bus.events import TensorRef

torch.set_num_threads(1)
connector = ShmConnector("pipe", segment_bytes=1 << 20, limit=2 << 20)
put = 0
for line in sys.stdin:
    command, _, rest = line.partition(" ")
    if command == "put":
        put += 1
        answer = connector.put(f"t{put}", torch.full((int(rest),), put, dtype=torch.int32), [])
    elif command == "release":
        connector.release(msgspec.json.decode(rest, type=TensorRef))
        answer = connector.used
    elif command == "churn":  # write to the same slot again and again, as fast as can be
        print("started", flush=True)
        tensors = [torch.full((200_000,), value, dtype=torch.int32) for value in range(4)]
        for number in range(int(rest)):
            ref = connector.put("x", tensors[number % 4], [])
            connector.release(ref)
        answer = connector.used
    print(msgspec.json.encode(answer).decode(), flush=True)
connector.close()
"""


class Sender:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(SENDER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def tell(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def put(self, size: int) -> TensorRef | None:
        self.tell(f"put {size}")
        return msgspec.json.decode(self.answer(), type=TensorRef | None)

    def release(self, ref: TensorRef) -> int:
        self.tell(f"release {msgspec.json.encode(ref).decode()}")
        return int(self.answer())

    def segments(self) -> list[str]:
        return [path.name for path in SHM.glob(f"omnibus-{TAG}-*-{self.process.pid}-*")]


@pytest.fixture
def sender() -> Iterator[Sender]:
    sender = Sender()
    yield sender
    with contextlib.suppress(BrokenPipeError):
        sender.process.communicate(timeout=30)
    segments.sweep(tag=TAG)
    assert not list(SHM.glob(f"omnibus-{TAG}-*"))


@pytest.fixture
def receiver() -> Iterator[ShmConnector]:
    receiver = ShmConnector(TAG)
    yield receiver
    receiver.close()


def test_tensors_come_in_order_slots_are_reused_and_a_full_pool_says_so(sender: Sender, receiver: ShmConnector) -> None:
    refs = []
    while (ref := sender.put(50_000)) is not None:
        refs.append(ref)
    assert len(refs) == 10  # five of 200 kB a MiB
    for number, ref in enumerate(refs, 1):
        assert torch.equal(receiver.get(ref, []), torch.full((50_000,), number, dtype=torch.int32))
    assert sender.release(refs[4]) == 9
    again = sender.put(50_000)
    assert again is not None and (again.segment, again.offset) == (refs[4].segment, refs[4].offset)
    assert receiver.get(again, [])[0] == 12  # the eleventh put found no room
    with pytest.raises(StaleTensor):
        receiver.get(refs[4], [])
    assert len(sender.segments()) == 2
    assert sorted(receiver.attached) == sorted(sender.segments())
    for ref in [*refs[:4], *refs[5:], again]:
        sender.release(ref)
    sender.process.communicate(timeout=30)
    assert sender.process.returncode == 0 and sender.segments() == []
    receiver.prune()
    assert receiver.attached == ()


def test_a_reader_of_a_slot_under_reuse_sees_one_value_or_stale(sender: Sender, receiver: ShmConnector) -> None:
    """The sender rewrites one slot without pause; the reader asks for whatever generation it has that moment."""
    first = sender.put(200_000)
    assert first is not None
    sender.release(first)
    segment = (SHM / first.segment).open("rb", buffering=0)
    sender.tell("churn 8000")
    assert sender.answer() == "started\n"
    whole = stale = 0
    assert sender.process.stdout is not None
    while not select.select([sender.process.stdout], [], [], 0)[0]:
        generation = int.from_bytes(os.pread(segment.fileno(), 8, first.offset - 16), "little")
        try:
            read = receiver.get(msgspec.structs.replace(first, generation=generation), [])
        except StaleTensor:
            stale += 1
        else:
            assert (read == read[0]).all(), "a torn copy passed for a whole one"
            whole += 1
    segment.close()
    assert sender.answer() == "0\n"
    assert whole + stale > 100 and stale > 0


def test_the_senders_crash_makes_its_tensors_stale_once_swept(sender: Sender, receiver: ShmConnector) -> None:
    ref, unread = sender.put(50_000), sender.put(70_000)
    assert ref is not None and unread is not None
    assert receiver.get(ref, [])[0] == 1
    sender.process.kill()
    sender.process.wait()
    assert len(sender.segments()) == 1
    assert receiver.get(unread, [])[0] == 2  # what was handed over before is still good
    assert segments.sweep(tag=TAG) == [ref.segment]
    receiver.prune()
    assert receiver.attached == ()
    with pytest.raises(StaleTensor):
        receiver.get(ref, [])


def test_the_readers_crash_costs_the_sender_nothing() -> None:
    sender = ShmConnector(TAG, segment_bytes=1 << 20, limit=1 << 20)
    try:
        ref = sender.put("x", torch.zeros(50_000), [])
        assert ref is not None
        code = """
            import os, signal, sys, msgspec
            from omni_bus.connectors.shm import ShmConnector
            from omni_bus.events import TensorRef
            ShmConnector("pipe").get(msgspec.json.decode(sys.argv[1], type=TensorRef), [])
            os.kill(os.getpid(), signal.SIGKILL)
        """
        ended = subprocess.run([sys.executable, "-c", textwrap.dedent(code), msgspec.json.encode(ref).decode()], timeout=60)
        assert ended.returncode == -signal.SIGKILL
        assert segments.sweep(tag=TAG) == []
        sender.release(ref)
        assert sender.used == 0 and sender.put("x", torch.zeros(250_000), []) is not None
    finally:
        sender.close()
    assert not list(SHM.glob(f"omnibus-{TAG}-*"))
