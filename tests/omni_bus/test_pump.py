"""The pump never loses the signal that a message has come, whoever touched the socket in between."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import zmq

from omni_bus.pump import BATCH, Pump

PATIENCE_S = 60.0


@pytest.fixture
def pair() -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    context = zmq.Context()
    here, there = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    for socket in (here, there):
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
    here.bind("inproc://pair")
    there.connect("inproc://pair")
    yield here, there
    here.close(0)
    there.close(0)
    context.term()


Sockets = tuple[zmq.Socket[bytes], zmq.Socket[bytes]]


async def until(arrived: list[bytes], count: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while len(arrived) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_messages_that_came_before_the_pump_are_read(pair: Sockets) -> None:
    here, there = pair
    there.send(b"early")
    arrived: list[bytes] = []
    pump = Pump(asyncio.get_running_loop(), here, lambda frames: arrived.append(frames[0].bytes))
    await until(arrived, 1)
    pump.close()


async def test_more_than_a_batch_is_read_to_the_end_and_lets_others_run(pair: Sockets) -> None:
    here, there = pair
    arrived: list[bytes] = []
    seen_between: list[int] = []
    loop = asyncio.get_running_loop()
    pump = Pump(loop, here, lambda frames: arrived.append(frames[0].bytes))
    for number in range(20 * BATCH):
        there.send(b"%d" % number)
    loop.call_soon(lambda: loop.call_soon(lambda: seen_between.append(len(arrived))))
    await until(arrived, 20 * BATCH)
    assert arrived == [b"%d" % number for number in range(20 * BATCH)]
    assert seen_between[0] < 20 * BATCH
    pump.close()


async def test_a_message_that_comes_while_sending_is_not_missed(pair: Sockets) -> None:
    """A send takes in what the other side did, and with it the signal that a reader would wait for."""
    here, there = pair
    arrived: list[bytes] = []
    pump = Pump(asyncio.get_running_loop(), here, lambda frames: arrived.append(frames[0].bytes))
    await asyncio.sleep(0)
    for number in range(500):
        there.send(b"%d" % number)
        pump.send([b"header", memoryview(b"payload")])
        await until(arrived, number + 1)
    assert there.recv_multipart() == [b"header", b"payload"]
    pump.close()


async def test_an_exception_out_of_the_callback_does_not_stop_the_rest(pair: Sockets) -> None:
    here, there = pair
    arrived: list[bytes] = []
    errors: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: errors.append(context["exception"]))

    def take(frames: list[zmq.Frame]) -> None:
        if frames[0].bytes == b"bad":
            raise LookupError
        arrived.append(frames[0].bytes)

    pump = Pump(loop, here, take)
    for message in (b"one", b"bad", b"two"):
        there.send(message)
    await until(arrived, 2)
    assert arrived == [b"one", b"two"] and isinstance(errors[0], LookupError)
    pump.close()


async def test_a_callback_may_close_the_socket(pair: Sockets) -> None:
    here, there = pair
    arrived: list[bytes] = []

    def take(frames: list[zmq.Frame]) -> None:
        arrived.append(frames[0].bytes)
        pump.close()
        here.close(0)

    pump = Pump(asyncio.get_running_loop(), here, take)
    there.send(b"one")
    there.send(b"two")
    await until(arrived, 1)
    await asyncio.sleep(0)
    assert arrived == [b"one"]
