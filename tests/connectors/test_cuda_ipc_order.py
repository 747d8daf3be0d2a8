"""cuda_ipc's slots, fences and generations, on a GPU in memory whose streams lag behind the host as they like."""

from __future__ import annotations

import collections
import contextlib
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch

from omni_bus import segments
from omni_bus.connectors.base import DTYPES
from omni_bus.connectors.cuda_control import ControlPage
from omni_bus.connectors.cuda_ipc import CudaIpcConnector
from omni_bus.connectors.cuda_words import WordFence
from omni_bus.connectors.select import Connectors
from omni_bus.errors import Overloaded, ProtocolViolation, StaleTensor, TooLarge
from omni_bus.events import EdgeRoute, TensorRef
from omni_bus.segments import SHM, segment_name
from tests.support.fake_gpu import FakeFence, FakeGpu, Machine, on_gpu

TAG = "cudafake"
SLOT = 4096
SLOTS = 8


class Pair:
    """A sender and a receiver as if in two processes."""

    def __init__(self, machine: Machine, fences: int = 16, words: int = 0) -> None:
        self.machine = machine
        self.gpu, self.other_gpu = FakeGpu(machine, words), FakeGpu(machine, words)
        self.sender = CudaIpcConnector(TAG, self.gpu, buffer_bytes=SLOTS * SLOT, fences=fences)
        self.receiver = CudaIpcConnector(TAG, self.other_gpu)

    def put(self, value: int, nbytes: int = SLOT) -> TensorRef | None:
        return self.sender.put("x", on_gpu(torch.full((nbytes,), value % 256, dtype=torch.uint8)), [])

    def must_put(self, value: int, nbytes: int = SLOT) -> TensorRef:
        ref = self.put(value, nbytes)
        assert ref is not None
        return msgspec.msgpack.decode(msgspec.msgpack.encode(ref), type=TensorRef)

    def get(self, ref: TensorRef) -> torch.Tensor:
        return self.receiver.get(ref, [])


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture(params=[0, 32], ids=["events", "words"])
def words(request: pytest.FixtureRequest) -> int:
    """How a fence is made: an event of the device, or a word of shared memory."""
    return int(request.param)


@pytest.fixture
def pair(machine: Machine, words: int) -> Iterator[Pair]:
    pair = Pair(machine, words=words)
    yield pair
    pair.receiver.close()
    pair.sender.close()
    assert (machine.allocated, machine.opened) == (0, 0)
    assert not list(SHM.glob(f"omnibus-{TAG}-*"))


@pytest.fixture
def dead_pid() -> int:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    return ended.pid


@contextlib.contextmanager
def as_process(pid: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "getpid", lambda: pid)
        yield


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (7, 5), (20, 21)])
def test_every_dtype_comes_back_bit_for_bit(pair: Pair, shape: tuple[int, ...]) -> None:
    for name, dtype in DTYPES.items():
        count = torch.empty(shape, dtype=dtype).nbytes
        sent = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8).view(dtype).view(shape)
        ref = pair.sender.put(name, on_gpu(sent), [])
        assert ref is not None and ref.connector == "cuda_ipc"
        back = pair.get(ref)
        pair.machine.run()
        assert (back.dtype, back.shape) == (sent.dtype, sent.shape)
        assert torch.equal(back.reshape(-1).view(torch.uint8), sent.reshape(-1).view(torch.uint8))
        pair.sender.release(ref)
    assert pair.sender.used == 0


def test_views_travel_by_value(pair: Pair) -> None:
    base = torch.randn(30, 40)
    for view in (base.t(), base[::2, 1::2], base[3].expand(20, 40), torch.randn(9, 9, dtype=torch.complex64).conj()):
        ref = pair.sender.put("x", on_gpu(view), [])
        assert ref is not None
        back = pair.get(ref)
        pair.machine.run()
        assert torch.equal(back, view) and back.is_contiguous()
        pair.sender.release(ref)


@pytest.mark.parametrize(("seed", "words"), [(0, 0), (1, 32), (2, 0), (3, 32)])
def test_a_thousand_tensors_through_eight_slots_arrive_whole_whatever_the_streams_do(seed: int, words: int) -> None:
    """Host calls of a sender and three receivers, and work of their streams, by chance; a slot is returned before its read has begun on the device."""
    dice = random.Random(seed)
    machine = Machine(seed)
    pair = Pair(machine, fences=dice.choice([SLOTS, 11, 64]), words=8 * words)
    receivers = [(pair.receiver, pair.other_gpu)]
    receivers += [(CudaIpcConnector(TAG, gpu), gpu) for gpu in (FakeGpu(machine), FakeGpu(machine))]
    on_the_way: collections.deque[tuple[int, TensorRef]] = collections.deque()
    to_return: list[TensorRef] = []
    got: list[tuple[int, torch.Tensor]] = []
    sent = full = early = 0
    while len(got) < 1000 or to_return:
        action = dice.random()
        if action < 0.35 and sent < 1000:
            ref = pair.put(sent, dice.choice([SLOT, SLOT, 100, 3 * SLOT]))
            if ref is None:
                full += 1
            else:
                on_the_way.append((sent, ref))
                sent += 1
        elif action < 0.6 and on_the_way:
            number, ref = on_the_way.popleft()
            got.append((number, dice.choice(receivers)[0].get(ref, [])))
            to_return.append(ref)
        elif action < 0.85 and to_return:
            ref = to_return.pop(dice.randrange(len(to_return)))
            early += any(gpu.stream.work for _, gpu in receivers)
            pair.sender.release(ref)
            with pytest.raises(StaleTensor):
                pair.get(ref)
        else:
            machine.run(dice.choice([0, 1, 2, 5]))
    machine.run()
    assert machine.pending == 0, "streams wait for each other"
    assert [number for number, _ in got] == list(range(1000))
    assert all((tensor == number % 256).all() for number, tensor in got)
    assert full > 20 and early > 100 and pair.sender.used == 0
    for receiver, _ in receivers:
        receiver.close()
    pair.sender.close()
    assert (machine.allocated, machine.opened) == (0, 0)


def test_a_full_buffer_says_so_until_a_slot_comes_back(pair: Pair) -> None:
    refs = [pair.must_put(number) for number in range(SLOTS)]
    assert pair.put(99) is None and pair.put(99, 1) is None
    pair.machine.run()
    assert pair.put(99) is None
    pair.sender.release(refs[3])
    again = pair.must_put(99)
    assert again.offset == refs[3].offset and pair.put(99) is None
    back = pair.get(again)
    pair.machine.run()
    assert (back == 99).all()
    with pytest.raises(TooLarge):
        pair.put(0, SLOTS * SLOT + 1)


def test_a_buffer_whose_fences_are_all_taken_says_so_too(machine: Machine, words: int) -> None:
    pair = Pair(machine, fences=4, words=words)
    refs = [pair.must_put(number, 1) for number in range(4)]
    assert pair.put(9, 1) is None
    pair.sender.release(refs[0])  # its copy has not run yet: the slot is reused, and the stream waits
    back = pair.get(pair.must_put(9, 1))
    machine.run()
    assert machine.pending == 0 and back.tolist() == [9]
    pair.receiver.close()
    pair.sender.close()


def test_a_returned_slot_is_reused_before_its_read_only_behind_a_wait_of_the_stream(pair: Pair) -> None:
    first = pair.must_put(1, SLOTS * SLOT)
    pair.machine.run()
    read = pair.get(first)  # the receiver's stream does not come to it yet
    pair.other_gpu.stream.held = True
    pair.sender.release(first)
    second = pair.must_put(2, SLOTS * SLOT)  # returns at once
    pair.machine.run()
    assert pair.gpu.stream.work, "the slot was overwritten while it was still to be read"
    pair.other_gpu.stream.held = False
    later = pair.get(second)
    pair.machine.run()
    assert (read == 1).all() and (later == 2).all() and pair.machine.pending == 0


def test_a_slot_that_is_still_read_is_left_alone_while_there_is_other_room(pair: Pair) -> None:
    first = pair.must_put(1)
    pair.machine.run()
    pair.get(first)
    pair.sender.release(first)
    second = pair.must_put(2)
    assert second.offset != first.offset and second.fence != first.fence
    pair.machine.run()
    third = pair.must_put(3)
    assert third.offset == first.offset


def test_refs_that_are_past_or_cannot_be_are_told(pair: Pair) -> None:
    ref = pair.must_put(1)
    replace = msgspec.structs.replace
    for stale in (replace(ref, generation=0), replace(ref, generation=ref.generation + 1), replace(ref, fence=ref.fence + 1)):
        with pytest.raises(StaleTensor):
            pair.get(stale)
    impossible = [
        replace(ref, fence=-1),
        replace(ref, fence=16),
        replace(ref, offset=1),
        replace(ref, offset=SLOTS * SLOT),
        replace(ref, shape=(SLOTS * SLOT + 1,), nbytes=SLOTS * SLOT + 1),
        replace(ref, shape=(3,)),
        replace(ref, segment="../../etc/passwd"),
        replace(ref, segment=""),
    ]
    for bad in impossible:
        with pytest.raises(ProtocolViolation):
            pair.get(bad)
    with pytest.raises(StaleTensor):
        pair.get(replace(ref, segment=segment_name(TAG, 5)))
    pair.sender.release(ref)
    with pytest.raises(StaleTensor):
        pair.get(ref)
    with pytest.raises(AssertionError):
        pair.sender.release(ref)


def test_a_file_that_is_no_control_page_is_refused(pair: Pair) -> None:
    ref = pair.must_put(1)
    for content in (b"", b"x" * 100, bytes(4096)):
        name = segment_name(TAG, 6)
        (SHM / name).write_bytes(content)
        with pytest.raises((ProtocolViolation, ValueError)):
            ControlPage.attach(name)
        (SHM / name).unlink()
    pair.sender.release(ref)


def test_a_slot_reused_between_a_readers_two_looks_is_stale_and_harms_nobody(pair: Pair) -> None:
    """The reader has passed the first look when its request is cancelled: the slot is returned and written again."""
    ref = pair.must_put(1, SLOTS * SLOT)
    overtaken = []

    def returned(self: FakeGpu, like: torch.Tensor) -> torch.Tensor:
        if not overtaken:
            pair.sender.release(ref)
            overtaken.append(pair.must_put(2, SLOTS * SLOT))
        return torch.empty(like.shape, dtype=like.dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeGpu, "empty", returned)
        with pytest.raises(StaleTensor):
            pair.get(ref)
    back = pair.get(overtaken[0])
    pair.machine.run()
    assert (back == 2).all() and pair.machine.pending == 0


def test_a_reader_that_died_while_reading_gives_its_slot_back(pair: Pair, dead_pid: int) -> None:
    first = pair.must_put(1, SLOTS * SLOT)
    pair.machine.run()
    with as_process(dead_pid):
        pair.get(first)
    pair.other_gpu.stream.work.clear()  # what it had put on its stream ended with it
    pair.sender.release(first)
    second = pair.must_put(2, SLOTS * SLOT)
    another = CudaIpcConnector(TAG, FakeGpu(pair.machine))
    back = another.get(second, [])
    pair.machine.run()
    assert (back == 2).all() and pair.machine.pending == 0
    another.close()


def test_a_live_reader_is_waited_for_and_its_death_ends_the_wait(
    pair: Pair, words: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    forced = threading.Event()
    kind = WordFence if words else FakeFence
    once = kind.force

    def force(self: Any) -> None:
        once(self)
        forced.set()

    monkeypatch.setattr(kind, "force", force)
    first = pair.must_put(1, SLOTS * SLOT)
    pair.machine.run()
    reader = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with as_process(reader.pid):
        pair.get(first)
    pair.other_gpu.stream.work.clear()  # as the device drops what a dead process had put on it
    pair.sender.release(first)
    pair.must_put(2, SLOTS * SLOT)
    pair.machine.run()
    assert pair.machine.pending, "the slot was overwritten while a live process was to read it"
    assert not forced.is_set()
    reader.kill()
    assert forced.wait(30)
    reader.communicate()
    pair.machine.run()
    assert pair.machine.pending == 0


def test_the_owners_death_makes_its_tensors_stale_and_its_buffer_is_closed_when_nothing_is_read(pair: Pair) -> None:
    ref, unread = pair.must_put(1), pair.must_put(2)
    pair.machine.run()
    back = pair.get(ref)
    assert segments.sweep(tag=TAG, pid=os.getpid()) == [ref.segment]
    pair.receiver.prune()
    assert pair.receiver.attached == (ref.segment,), "closed while a copy out of it was under way"
    pair.machine.run()
    pair.receiver.prune()
    assert pair.receiver.attached == () and pair.machine.opened == 0
    assert (back == 1).all()
    with pytest.raises(StaleTensor):
        pair.get(unread)


def test_a_dead_owners_tensors_are_stale_before_it_is_swept(pair: Pair, dead_pid: int) -> None:
    with as_process(dead_pid):
        ref = pair.must_put(1)
    with pytest.raises(StaleTensor):
        pair.get(ref)
    assert pair.receiver.attached == () and pair.machine.opened == 0


def test_a_reader_in_the_same_process_opens_nothing(pair: Pair) -> None:
    ref = pair.must_put(7)
    back = pair.sender.get(ref, [])
    pair.sender.release(ref)
    pair.machine.run()
    assert (back == 7).all() and pair.machine.opened == 0


def test_no_shared_memory_for_the_control_page_takes_no_memory_of_the_device(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(Overloaded):
        pair.put(1)
    assert pair.machine.allocated == 0


def test_each_tensor_of_a_cuda_ipc_edge_goes_the_way_that_its_place_asks_for(pair: Pair) -> None:
    route = EdgeRoute("a->b", "cuda_ipc", 4)
    sender = Connectors(TAG, cuda_ipc=pair.sender)
    receiver = Connectors(TAG, cuda_ipc=pair.receiver)
    sender.check_route(route)
    tensors = {
        "small": torch.arange(4.0),
        "large": torch.arange(40_000.0),
        "scalar on the GPU": on_gpu(torch.tensor(3)),
        "on the GPU": on_gpu(torch.arange(1000.0)),
    }
    parcel = sender.put(route, b"payload", tensors)
    assert parcel is not None
    assert [ref.connector for ref in parcel.refs] == ["inline", "shm", "cuda_ipc", "cuda_ipc"]
    back = receiver.get(parcel.refs, parcel.frames)
    pair.machine.run()
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())
    assert sender.used == 3
    sender.release(parcel.refs)
    assert sender.used == 0
    # All or nothing, and only what may find no room has to queue for it.
    assert sender.put(route, b"", {f"{n}": on_gpu(torch.zeros(3 * SLOT, dtype=torch.uint8)) for n in range(4)}) is None
    assert sender.used == 0
    assert sender.takes_room(route, {"x": on_gpu(torch.tensor(1))}) and sender.takes_room(route, {"x": tensors["large"]})
    assert not sender.takes_room(route, {"x": tensors["small"]})
    receiver.close()
    sender.close()
