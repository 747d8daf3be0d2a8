"""The user's audio before it becomes an item, by positions that count from the session's first sample."""

from __future__ import annotations

import numpy

from omni_bus.api.voice.input_buffer import InputBuffer, to_ms, to_samples


def filled(*sizes: int) -> InputBuffer:
    """Samples that have their own position as their value."""
    buffer, position = InputBuffer(), 0
    for size in sizes:
        buffer.push(numpy.arange(position, position + size, dtype=numpy.float32))
        position += size
    return buffer


def test_reading_between_positions() -> None:
    buffer = filled(10, 20, 5)
    assert len(buffer) == buffer.position == 35
    assert buffer.read().tolist() == list(range(35))
    assert buffer.read(8, 31).tolist() == list(range(8, 31))
    assert buffer.read(30).tolist() == list(range(30, 35))
    assert buffer.read(40).tolist() == []


def test_what_is_no_longer_needed_goes_in_whole_pieces() -> None:
    buffer = filled(10, 20, 5)
    buffer.drop_before(15)
    assert buffer.read().tolist() == list(range(10, 35))
    assert buffer.read(0, 12).tolist() == [10, 11], "of what is gone nothing is read"
    buffer.drop_before(100)
    assert (len(buffer), buffer.position) == (0, 35)


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
