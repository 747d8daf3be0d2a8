"""What only the tcp connector has: tensors that come later than their event or never, keys, strangers, and consumers that are gone."""

from __future__ import annotations

import random
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator

import msgspec
import pytest
import torch

from omni_bus.connectors import data_socket, tcp
from omni_bus.connectors.tcp import TcpConnector
from omni_bus.errors import ProtocolViolation, StaleTensor
from omni_bus.keys import KeyPair
from tests.support.data_sockets import tcp_connector, until

MIB = 1 << 20


@pytest.fixture
def keys() -> KeyPair:
    return KeyPair.new()


@pytest.fixture
def receiver(keys: KeyPair) -> Iterator[TcpConnector]:
    connector = tcp_connector(keys)
    yield connector
    connector.close()


@pytest.fixture
def sender(keys: KeyPair) -> Iterator[TcpConnector]:
    connector = tcp_connector(keys, limit=4 * MIB)
    yield connector
    connector.close()


def bytes_of(value: int, size: int = MIB) -> torch.Tensor:
    return torch.full((size,), value % 256, dtype=torch.uint8)


def let_go(sender: TcpConnector) -> None:
    end = time.monotonic() + 30
    while sender.used:
        assert time.monotonic() < end, f"{sender.used} slots are still held"
        time.sleep(0.01)
        sender.prune()


def test_tensors_of_several_frames_come_whole_and_slots_are_used_again(sender: TcpConnector, receiver: TcpConnector) -> None:
    dice = random.Random(1)
    for number in range(60):
        size = dice.randint(1, 2 * MIB)
        ref = None
        while ref is None:  # ZeroMQ may hold the memory of earlier ones a moment longer
            ref = sender.send(receiver.endpoint, "x", bytes_of(number, size))
        until(lambda ref=ref: receiver.here(ref), receiver)  # type: ignore[misc]
        assert torch.equal(receiver.get(ref, []), bytes_of(number, size))
        sender.release(ref)
    let_go(sender)
    until(lambda: receiver.kept == 0, receiver)


def test_a_full_pool_says_so_and_has_room_after_a_release(sender: TcpConnector, receiver: TcpConnector) -> None:
    refs = [sender.send(receiver.endpoint, "x", bytes_of(number)) for number in range(5)]
    assert [ref is None for ref in refs] == [False] * 4 + [True]
    for ref in refs[:4]:
        assert ref is not None
        until(lambda ref=ref: receiver.here(ref), receiver)  # type: ignore[misc]
    assert refs[1] is not None
    sender.release(refs[1])
    again, end = None, time.monotonic() + 30
    while again is None and time.monotonic() < end:
        again = sender.send(receiver.endpoint, "x", bytes_of(9))
    assert again is not None and again.offset == refs[1].offset and again.generation != refs[1].generation
    until(lambda: receiver.here(again), receiver)
    assert receiver.get(again, [])[0] == 9
    with pytest.raises(StaleTensor):  # its slot was released, and its content is not another tensor's
        receiver.get(refs[1], [])


def test_a_tensor_that_is_not_here_is_stale_by_name(sender: TcpConnector, receiver: TcpConnector) -> None:
    ref = sender.send(receiver.endpoint, "x", bytes_of(1))
    assert ref is not None and not receiver.here(ref)
    with pytest.raises(StaleTensor, match="other host"):
        receiver.get(ref, [])
    until(lambda: receiver.here(ref), receiver)
    with pytest.raises(ProtocolViolation, match="announced"):
        receiver.get(msgspec.structs.replace(ref, shape=(4,), nbytes=4), [])


def test_another_key_brings_nothing_in_and_harms_nobody(receiver: TcpConnector, sender: TcpConnector) -> None:
    stranger = tcp_connector(KeyPair.new())
    ref = stranger.send(receiver.endpoint, "x", bytes_of(1))
    assert ref is not None
    good = sender.send(receiver.endpoint, "x", bytes_of(2))
    assert good is not None
    until(lambda: receiver.here(good), receiver)
    assert receiver.socket is not None and not receiver.socket.poll(1500)
    assert not receiver.here(ref)
    stranger.close()


def test_garbage_at_the_port_harms_nobody(receiver: TcpConnector, sender: TcpConnector) -> None:
    host, port = receiver.endpoint.removeprefix("tcp://").split(":")
    dice = random.Random(2)
    for _ in range(200):
        with socket.create_connection((host, int(port)), timeout=20) as stranger:
            stranger.sendall(dice.randbytes(dice.randint(1, 300)))
    good = sender.send(receiver.endpoint, "x", bytes_of(2))
    assert good is not None
    until(lambda: receiver.here(good), receiver)


def test_what_is_never_released_goes_by_age_and_by_size(
    receiver: TcpConnector, sender: TcpConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "KEPT_BYTES", 2 * MIB)
    refs = [sender.send(receiver.endpoint, "x", bytes_of(number)) for number in range(3)]
    assert refs[2] is not None
    until(lambda: receiver.here(refs[2]), receiver)  # type: ignore[arg-type]
    assert receiver.kept == 2 * MIB
    assert [receiver.here(ref) for ref in refs if ref is not None] == [False, True, True]
    receiver.prune()
    assert receiver.kept == 2 * MIB
    monkeypatch.setattr(tcp, "KEPT_S", -1.0)
    receiver.prune()
    assert receiver.kept == 0


CONSUMER = """
    import sys, msgspec
    from omni_bus.keys import KeyPair
    from tests.support.data_sockets import tcp_connector
    connector = tcp_connector(msgspec.json.decode(sys.stdin.readline(), type=KeyPair))
    print(connector.endpoint, flush=True)
    while True:
        connector.socket.poll()
        connector.receive()
        print(connector.kept, flush=True)
"""


def test_a_consumer_that_is_killed_gives_the_producer_its_memory_back(
    keys: KeyPair, sender: TcpConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(CONSUMER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert consumer.stdin is not None and consumer.stdout is not None
        consumer.stdin.write(msgspec.json.encode(keys).decode() + "\n")
        consumer.stdin.flush()
        endpoint = consumer.stdout.readline().strip()
        first = sender.send(endpoint, "x", bytes_of(1))
        assert first is not None
        assert int(consumer.stdout.readline()) == MIB
        consumer.send_signal(signal.SIGSTOP)
        refs = [first, *(sender.send(endpoint, "x", bytes_of(number)) for number in range(3))]
        assert sender.send(endpoint, "x", bytes_of(4)) is None
    finally:
        consumer.kill()
        consumer.communicate(timeout=30)
    for ref in refs:
        assert ref is not None
        sender.release(ref)
    monkeypatch.setattr(data_socket, "STUCK_S", 0.0)
    let_go(sender)
    assert sender.send(endpoint, "x", bytes_of(5)) is not None
