"""The user's audio before it becomes an item, by positions that count from the session's first sample."""

from __future__ import annotations

import tracemalloc

import numpy
import pytest

from omni_bus.api.voice.input_buffer import InputBuffer, to_ms, to_samples


def filled(*sizes: int) -> InputBuffer:
    """Samples that have their own position as their value."""
    buffer, position = InputBuffer(), 0
    for size in sizes:
        buffer.push(numpy.arange(position, position + size, dtype=numpy.float32))
        position += size
    return buffer


@pytest.mark.parametrize("sizes", [(10, 20, 5), (1_000, 2_000, 500)], ids=["small", "large"])
def test_reading_between_positions(sizes: tuple[int, ...]) -> None:
    buffer, end = filled(*sizes), sum(sizes)
    assert len(buffer) == buffer.position == end
    assert buffer.read().tolist() == list(range(end))
    assert buffer.read(8, end - 4).tolist() == list(range(8, end - 4))
    assert buffer.read(end - 5).tolist() == list(range(end - 5, end))
    assert buffer.read(end + 5).tolist() == []


def test_what_is_no_longer_needed_goes_in_whole_pieces() -> None:
    buffer = filled(1_000, 2_000, 500)
    buffer.drop_before(1_500)
    assert buffer.read().tolist() == list(range(1_000, 3_500))
    assert buffer.read(0, 1_002).tolist() == [1_000, 1_001], "of what is gone nothing is read"
    buffer.drop_before(10_000)
    assert (len(buffer), buffer.position) == (0, 3_500)


def test_positions_go_on_behind_a_clear() -> None:
    buffer = filled(10)
    buffer.clear()
    assert (len(buffer), buffer.position) == (0, 10)
    buffer.push(numpy.zeros(3, numpy.float32))
    assert buffer.position == 13 and len(buffer.read(10)) == 3


def test_what_was_read_is_not_changed_by_what_comes() -> None:
    buffer = filled(4)
    read = buffer.read()
    buffer.push(numpy.ones(2, numpy.float32))
    assert read.tolist() == [0, 1, 2, 3]


def test_milliseconds() -> None:
    assert to_samples(300) == 4800
    assert to_ms(4800) == 300


def test_many_small_pieces_take_little_more_than_their_samples() -> None:
    """A client may send its audio sample by sample."""
    buffer = InputBuffer()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(50_000):
            buffer.push(numpy.full(1, number, numpy.float32))
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 2 * 50_000 * 4
    assert buffer.read(40_000, 40_003).tolist() == [40_000, 40_001, 40_002]
    buffer.drop_before(49_000)
    assert 1_000 <= len(buffer) < 1_000 + 1_600 and buffer.read().tolist()[-1] == 49_999
