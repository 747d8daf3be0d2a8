"""Block accounting and the options that size the cache."""

from __future__ import annotations

import random

import msgspec
import pytest

from omni_bus.stages.ar.blocks import BlockManager
from omni_bus.stages.ar.options import AROptions


def test_no_block_has_two_holders_and_none_is_lost():
    rng = random.Random(0)
    manager = BlockManager(40, 16)
    held: list[list[int]] = []
    for _ in range(2000):
        count = rng.randint(0, 9)
        if rng.random() < 0.5 and manager.can_allocate(count):
            held.append(manager.allocate(count))
        elif held:
            blocks = held.pop(rng.randrange(len(held)))
            manager.free(blocks)
            assert blocks == []
        numbers = [block for blocks in held for block in blocks]
        assert len(numbers) == len(set(numbers)) == manager.used
        assert all(1 <= block <= 40 for block in numbers), "block 0 is the null block"
        assert manager.can_allocate(40 - manager.used) and not manager.can_allocate(41 - manager.used)


def test_blocks_that_were_never_filled_stay_so():
    manager = BlockManager(1000, 16)
    filled = set()
    for _ in range(200):
        first, second = manager.allocate(300), manager.allocate(300)
        filled |= {*first[:2], *second[:2]}  # of each reservation only the beginning is written
        manager.free(first)
        manager.free(second)
    assert len(filled) == 4


class PlainModel:
    """What BlockManager must do, without its data structures: every free block in a list, the next to be handed out last."""

    def __init__(self, total: int) -> None:
        self.held: dict[int, int] = {}
        self.content: dict[int, bytes] = {}
        self.free = list(range(total, 0, -1))
        self.order: dict[int, int] = {}  # of kept blocks: when they became free or were used, the smallest goes first
        self.clock = 0
        self.evicted = 0

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    def find(self, keys: list[bytes]) -> list[int]:
        by_key = {key: block for block, key in self.content.items()}
        found = []
        for key in keys:
            if key not in by_key:
                break
            found.append(by_key[key])
        return found

    def room(self, shared: list[int]) -> int:
        return len(self.free) + sum(block not in shared for block in self.order)

    def allocate(self, count: int, shared: list[int]) -> list[int]:
        for block in shared:
            self.order.pop(block, None)
        new = []
        for _ in range(count - len(shared)):
            if self.free:
                new.append(self.free.pop())
            else:
                oldest = min(self.order, key=self.order.__getitem__)
                del self.order[oldest], self.content[oldest]
                new.append(oldest)
                self.evicted += 1
        for block in [*shared, *new]:
            self.held[block] = self.held.get(block, 0) + 1
        return [*shared, *new]

    def keep(self, block: int, key: bytes) -> None:
        (owner,) = self.find([key]) or [block]
        if owner == block:
            self.content[block] = key
        elif owner in self.order:
            self.order[owner] = self.tick()

    def forget(self, blocks: list[int]) -> None:
        for block in blocks:
            if self.content.pop(block, None) is not None and self.order.pop(block, None) is not None:
                self.free.append(block)

    def release(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.held[block] -= 1
            if not self.held[block]:
                del self.held[block]
                if block in self.content:
                    self.order[block] = self.tick()
                else:
                    self.free.append(block)


@pytest.mark.parametrize("seed", range(8))
def test_blocks_kept_by_content_are_those_of_a_plain_model(seed):
    rng = random.Random(seed)
    total = rng.choice([5, 17, 40])
    manager, model = BlockManager(total, 16), PlainModel(total)
    rows: list[tuple[list[int], list[bytes], int]] = []  # blocks, keys, how many are filled
    shared_blocks = 0
    for _ in range(1500):
        act = rng.random()
        if act < 0.45:
            # A few roots and a small alphabet, so that rows meet.
            keys, key = [], b""
            for _ in range(rng.randint(0, 6)):
                key += rng.choice([b"a", b"b"])
                keys.append(key)
            found = manager.find(keys)
            assert found == model.find(keys)
            found = found[: rng.randint(0, len(found))] if rng.random() < 0.2 else found
            count = rng.randint(len(found), 8)
            assert manager.can_allocate(count, found) == (count - len(found) <= model.room(found))
            if manager.can_allocate(count, found):
                blocks = manager.allocate(count, found)
                assert blocks == model.allocate(count, list(found))
                assert len(set(blocks)) == count
                shared_blocks += len(found)
                rows.append((blocks, keys[:count], len(found)))
        elif act < 0.75 and rows:
            at = rng.randrange(len(rows))
            blocks, keys, filled = rows[at]
            if filled < len(keys):
                manager.keep(blocks[filled], keys[filled])
                model.keep(blocks[filled], keys[filled])
                rows[at] = blocks, keys, filled + 1
        elif rows:
            blocks, _, _ = rows.pop(rng.randrange(len(rows)))
            if rng.random() < 0.1:
                manager.forget(blocks)
                model.forget(blocks)
            model.release(list(blocks))
            manager.free(blocks)
            assert blocks == []
        assert manager.used == len(model.held) == len({block for blocks, _, _ in rows for block in blocks})
        assert manager.can_allocate(total - manager.used) and not manager.can_allocate(total - manager.used + 1)
    assert shared_blocks > 50 and model.evicted > 50
    while rows:
        manager.free(rows.pop()[0])
    assert manager.used == 0 and manager.can_allocate(total)


def test_kept_blocks_are_handed_out_last_and_the_least_recently_used_first():
    manager = BlockManager(5, 16)
    old = manager.allocate(2)
    for block, key in zip(old, (b"a", b"ab"), strict=True):
        manager.keep(block, key)
    new = manager.allocate(1)
    manager.keep(new[0], b"b")
    first, second, third = *old, *new
    manager.free(old)
    manager.free(new)
    assert manager.used == 0 and manager.find([b"a", b"ab"]) == [first, second]
    held = manager.allocate(2)
    assert not {*held} & {first, second, third}, "blocks without content go first"
    assert manager.allocate(1) == [second], "of a row its end goes before its beginning"
    assert manager.find([b"a", b"ab"]) == [first]
    again = manager.allocate(1, manager.find([b"a"]))
    manager.free(again)
    assert manager.allocate(1) == [third], "what was found again is the newest"
    assert manager.find([b"a"]) == [first] and manager.find([b"b"]) == []


def test_a_block_is_free_when_its_last_holder_has_gone():
    manager = BlockManager(4, 16)
    first = manager.allocate(2)
    manager.keep(first[0], b"a")
    second = manager.allocate(3, manager.find([b"a"]))
    assert second[0] == first[0] and manager.used == 4
    manager.free(first)
    assert manager.used == 3 and not manager.can_allocate(2) and manager.can_allocate(2, manager.find([b"a"]))
    manager.free(second)
    assert manager.used == 0


def test_what_was_found_and_was_free_is_not_counted_twice():
    manager = BlockManager(3, 16)
    blocks = manager.allocate(2)
    manager.keep(blocks[0], b"a")
    manager.keep(blocks[1], b"ab")
    manager.free(blocks)
    shared = manager.find([b"a", b"ab"])
    assert manager.can_allocate(3, shared) and not manager.can_allocate(4, shared)
    assert manager.allocate(3, shared)[:2] == shared
    assert not manager.can_allocate(1)


def test_what_is_forgotten_is_not_found_and_its_holders_go_on():
    manager = BlockManager(2, 16)
    first = manager.allocate(1)
    manager.keep(first[0], b"a")
    second = manager.allocate(1, manager.find([b"a"]))
    manager.forget(first)
    manager.free(first)
    assert manager.find([b"a"]) == [] and manager.used == 1 and not manager.can_allocate(2)
    manager.keep(second[0], b"a")
    assert manager.find([b"a"]) == second


def test_freeing_a_block_twice_is_an_error():
    manager = BlockManager(4, 16)
    blocks = manager.allocate(2)
    manager.free(list(blocks))
    with pytest.raises(AssertionError):
        manager.free(blocks)


@pytest.mark.parametrize(("positions", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2)])
def test_blocks_needed(positions, blocks):
    assert BlockManager(4, 16).needed(positions) == blocks


@pytest.mark.parametrize(
    "wrong", [{"block_size": 0}, {"kv_blocks": -1}, {"kv_memory_mb": 0}, {"max_prefill_tokens": 0}, {"max_length": 1}, {"x": 1}]
)
def test_options_out_of_range_are_refused(wrong):
    with pytest.raises(msgspec.ValidationError, match=next(iter(wrong))):
        msgspec.convert(wrong, AROptions)
