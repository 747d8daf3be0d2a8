"""Words as fences: numbers that go round, a word handed on, and what happens when there is none left."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator

import pytest
import torch

from omni_bus.connectors.cuda_ipc import CudaIpcConnector
from omni_bus.connectors.cuda_words import WordFences
from omni_bus.errors import Overloaded, ProtocolViolation
from omni_bus.events import TensorRef
from tests.support.fake_gpu import FakeGpu, FakeStreamValues, Machine, Stream, on_gpu

AT = 16


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def memory() -> Iterator[mmap.mmap]:
    with mmap.mmap(-1, 4096) as memory:
        yield memory


def two_processes(machine: Machine, memory: mmap.mmap, count: int) -> tuple[WordFences, WordFences, list[Stream]]:
    """The owner's fences and a reader's, and their streams."""
    streams = [Stream(), Stream()]
    machine.streams += streams
    owner, reader = (WordFences(FakeStreamValues(machine, stream), 0, memory, AT, count) for stream in streams)
    return owner, reader, streams


def test_numbers_go_round(machine: Machine, memory: mmap.mmap) -> None:
    struct.pack_into("<II", memory, AT, 0xFFFFFFFE, 0xFFFFFFFE)
    owner, reader, (first, second) = two_processes(machine, memory, 1)
    fence = owner.new()
    opened = reader.open(fence.handle())
    first.held = True
    for _ in range(3):
        fence.record()
        opened.wait()
        machine.run()
        assert not fence.over() and not opened.over() and second.work, "the record has not been reached"
        first.held = False
        machine.run()
        first.held = True
        assert fence.over() and opened.over() and not second.work
    assert struct.unpack_from("<II", memory, AT) == (1, 1)


def test_a_word_that_is_handed_on_is_no_longer_its_first_fences(machine: Machine, memory: mmap.mmap) -> None:
    """What watches over the first one's reader, and sees it die late, sets nobody free who reads by the next."""
    owner, reader, (_, second) = two_processes(machine, memory, 1)
    first = owner.new()
    reader.open(first.handle()).record()
    second.work.clear()  # its reader has died
    assert not first.over()
    owner.retire(first)
    following = owner.new()
    assert first.over() and following.over()
    reader.open(following.handle()).record()
    first.force()
    assert not following.over(), "a live reader's record passes for reached"
    machine.run()
    assert following.over()


def test_a_word_beyond_the_page_is_refused(machine: Machine, memory: mmap.mmap) -> None:
    owner, reader, _ = two_processes(machine, memory, 2)
    owner.new()
    for handle in (bytes(64), struct.pack("<Q", 3).ljust(64, b"\0")):
        with pytest.raises(ProtocolViolation):
            reader.open(handle)


def test_streams_too_far_behind_for_more_fences_refuse_a_tensor_and_lose_nothing(machine: Machine) -> None:
    """Every put overwrites what a reader has not come to yet, so that each takes two words more; the device does nothing meanwhile."""
    gpu, other = FakeGpu(machine, words=8), FakeGpu(machine, words=8)
    sender, receiver = CudaIpcConnector("cudawords", gpu, buffer_bytes=4096, fences=2), CudaIpcConnector("cudawords", other)

    def put(value: int) -> TensorRef:
        ref = sender.put("x", on_gpu(torch.full((4096,), value, dtype=torch.uint8)), [])
        assert ref is not None
        return ref

    reads: list[torch.Tensor] = []
    with pytest.raises(Overloaded, match="too far behind"):
        for number in range(100):
            ref = put(number)
            reads.append(receiver.get(ref, []))
            sender.release(ref)
    assert len(reads) > 4 and sender.used == 0
    machine.run()
    assert [int(read[0]) for read in reads] == list(range(len(reads))) and machine.pending == 0
    for number in range(100):
        ref = put(number)
        last = receiver.get(ref, [])
        sender.release(ref)
        machine.run()
        assert (last == number).all() and machine.pending == 0
    receiver.close()
    sender.close()
    assert (machine.allocated, machine.opened) == (0, 0)
