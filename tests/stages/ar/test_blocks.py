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
