"""The pool of shared memory segments: room, reuse, bounds."""

from __future__ import annotations

import errno
import itertools
import os
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from omni_bus.connectors.free_list import FreeList
from omni_bus.connectors.segment import OwnedSegment
from omni_bus.connectors.shm import SegmentPool, ShmConnector
from omni_bus.errors import Overloaded, StaleTensor, TooLarge
from omni_bus.events import TensorRef
from omni_bus.segments import SHM

MIB = 1 << 20


def segments() -> list[str]:
    return sorted(path.name for path in SHM.glob("omnibus-pool-*"))


@pytest.fixture
def pool() -> Iterator[SegmentPool]:
    pool = SegmentPool("pool", MIB, 3 * MIB)
    yield pool
    pool.close()
    assert segments() == []


def block(size: int, value: int = 1) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.full(size, value, np.uint8)


def test_the_free_list_never_hands_out_a_byte_twice_and_coalesces_to_one_range() -> None:
    dice = random.Random(1)
    for _ in range(30):
        room = FreeList(10_000)
        taken: dict[int, int] = {}
        for _ in range(400):
            start: int | None
            if taken and dice.random() < 0.5:
                start = dice.choice(list(taken))
                room.free(start)
                del taken[start]
            else:
                size = dice.randint(1, 1500)
                start = room.allocate(size)
                gaps = sorted([(0, 0), *((s, s + n) for s, n in taken.items()), (10_000, 10_000)])
                fits = any(right[0] - left[1] >= size for left, right in itertools.pairwise(gaps))
                assert (start is not None) == fits
                if start is not None:
                    assert all(start + size <= s or s + n <= start for s, n in taken.items())
                    assert 0 <= start <= 10_000 - size
                    taken[start] = size
            assert room.used == len(taken)
            assert room.free_bytes == 10_000 - sum(taken.values())
        for start in taken:
            room.free(start)
        assert room.allocate(10_000) == 0
        with pytest.raises(KeyError):
            room.free(5)


def test_nothing_is_made_before_the_first_tensor_and_one_segment_serves_as_long_as_it_can(pool: SegmentPool) -> None:
    assert segments() == []
    for _ in range(500):
        slots = [pool.write(block(90_000)) for _ in range(10)]
        for slot in slots:
            assert slot is not None
            pool.free(*slot)
    assert len(segments()) == 1 and pool.used == 0 and pool.size == MIB
    [path] = SHM.glob("omnibus-pool-*")
    assert path.stat().st_mode & 0o777 == 0o600


def test_it_grows_to_its_limit_then_says_full_and_room_comes_back(pool: SegmentPool) -> None:
    slots = []
    while (slot := pool.write(block(400_000))) is not None:
        slots.append(slot)
    assert len(slots) == 6 and len(segments()) == 3 and pool.size == 3 * MIB
    pool.free(*slots.pop(3))
    again = pool.write(block(400_000))
    assert again is not None and pool.write(block(400_000)) is None
    for slot in [*slots, again]:
        pool.free(*slot)
    assert pool.used == 0


def test_a_tensor_larger_than_a_segment_takes_the_place_of_idle_ones(pool: SegmentPool) -> None:
    slots = [pool.write(block(900_000)) for _ in range(3)]
    assert pool.write(block(2_500_000)) is None  # waits
    for slot in slots:
        assert slot is not None
        pool.free(*slot)
    large = pool.write(block(2_500_000))
    assert large is not None and pool.size <= 3 * MIB
    pool.free(*large)
    exact = 3 * MIB - (OwnedSegment.size_for(3 * MIB) - 3 * MIB)
    largest = pool.write(block(exact))
    assert largest is not None
    pool.free(*largest)
    with pytest.raises(TooLarge):
        pool.write(block(3 * MIB))


def test_a_system_without_shared_memory_is_told_by_name(pool: SegmentPool, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    first = pool.write(block(900_000))
    assert first is not None
    monkeypatch.setattr(os, "posix_fallocate", full)
    assert pool.write(block(900_000)) is None  # what there is comes back some time
    pool.free(*first)
    again = pool.write(block(900_000))
    assert again is not None
    pool.free(*again)
    with pytest.raises(Overloaded):
        pool.write(block(2_000_000))
    assert len(segments()) == 0  # the idle one made way, and nothing half-made is left


def test_a_slot_cannot_be_returned_twice(pool: SegmentPool) -> None:
    slot = pool.write(block(10))
    assert slot is not None
    pool.free(*slot)
    with pytest.raises(AssertionError):
        pool.free(*slot)


def test_random_puts_gets_and_releases_give_right_bytes_or_stale() -> None:
    dice = random.Random(5)
    sender, receiver = ShmConnector("pool", segment_bytes=MIB, limit=3 * MIB), ShmConnector("pool")
    live: list[tuple[TensorRef, torch.Tensor]] = []
    past: list[TensorRef] = []
    full = stale = 0
    try:
        for _ in range(1500):
            action = dice.random()
            if action < 0.5:
                tensor = torch.full((dice.randint(0, 400_000),), dice.randint(0, 255), dtype=torch.uint8)
                ref = sender.put("x", tensor, [])
                if ref is None:
                    full += 1
                else:
                    live.append((ref, tensor))
            elif action < 0.75 and live:
                ref, _ = live.pop(dice.randrange(len(live)))
                sender.release(ref)
                past.append(ref)
            elif action < 0.9 and live:
                ref, tensor = dice.choice(live)
                assert torch.equal(receiver.get(ref, []), tensor)
            elif past:
                with pytest.raises(StaleTensor):
                    receiver.get(dice.choice(past), [])
                stale += 1
            assert sender.used == len(live)
        assert full > 25 and stale > 25
        receiver.prune()
        assert set(receiver.attached) <= set(segments())
    finally:
        sender.close()
        receiver.prune()
        assert receiver.attached == ()
        receiver.close()
    assert segments() == []
