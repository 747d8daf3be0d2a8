"""Who knocks at a running server: it listens where its configuration says and nowhere else, and garbage at each of its doors does no harm."""

from __future__ import annotations

import contextlib
import os
import pathlib
import random
import socket
import stat
import tempfile
from collections.abc import Iterable, Iterator

import psutil
import pytest
import zmq

from tests.support.remote_worker import write_config
from tests.support.running_server import Server, eventually, free_port, running

FRAMES = 10_000
WAIT_S = 20.0
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00"  # of ZeroMQ 3.0; its mechanism follows
MEMORY_SLACK = 32 << 20  # bytes
LOG_SLACK = 200_000  # bytes


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """One that other hosts may attach to."""
    with tempfile.TemporaryDirectory(prefix="ob-") as directory:
        config = write_config(pathlib.Path(directory), f"tcp://127.0.0.1:{free_port()}", relays=1)
        with running(config, sets=["api.processes=2"]) as server:
            yield server


def door(server: Server) -> int:
    config = (server.run_dir / "deployment.json").read_text()
    return int(config.partition('"listen":"tcp://127.0.0.1:')[2].partition('"')[0])


def tcp_ports(processes: Iterable[psutil.Process]) -> set[int]:
    found = [connection for process in processes for connection in process.net_connections("inet")]
    assert not [connection for connection in found if connection.type == socket.SOCK_DGRAM], "nothing here speaks UDP"
    listening = [connection.laddr for connection in found if connection.status == psutil.CONN_LISTEN]
    assert {address.ip for address in listening} == {"127.0.0.1"}
    return {address.port for address in listening}


def unix_paths(processes: Iterable[psutil.Process]) -> set[str]:
    """Of the Unix sockets on which they listen; one in the abstract namespace begins with "@"."""
    held = set()
    for process in processes:
        for entry in pathlib.Path(f"/proc/{process.pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                held.add(os.readlink(entry))
    lines = [line.split() for line in pathlib.Path("/proc/net/unix").read_text().splitlines()[1:]]
    listening = [line for line in lines if int(line[3], 16) & 0x10000 and f"socket:[{line[6]}]" in held]
    return {line[7] if len(line) > 7 else "" for line in listening}


def test_it_listens_where_its_configuration_says_and_nowhere_else(server: Server) -> None:
    processes = server.processes()
    ports = tcp_ports(processes.values())
    data = ports - {server.port, door(server)}
    assert {server.port, door(server)} <= ports and len(data) == 3, "a data socket for each worker"
    assert data <= set(range(door(server) + 1, door(server) + 101))
    assert unix_paths(processes.values()) == {str(server.run_dir / name) for name in ("broker.sock", "control")}
    assert stat.S_IMODE(server.run_dir.stat().st_mode) == 0o700


def bytes_at(address: tuple[str, int] | str, dice: random.Random, beginnings: list[bytes]) -> None:
    """Many frames of noise, in connections that are closed on either side as it comes."""
    sent = 0
    while sent < FRAMES:
        family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
        with contextlib.suppress(OSError), socket.socket(family) as stranger:
            stranger.settimeout(WAIT_S)
            stranger.connect(address)
            stranger.sendall(dice.choice(beginnings))
            for _ in range(250):
                sent += 1
                stranger.sendall(dice.randbytes(dice.randint(1, 80)))


def messages_at(endpoint: str, dice: random.Random) -> None:
    """Messages that are whole for ZeroMQ and nothing for us."""
    context = zmq.Context()
    try:
        for number in range(10):
            stranger = context.socket(zmq.DEALER)
            stranger.setsockopt(zmq.LINGER, int(WAIT_S * 1000))
            stranger.setsockopt(zmq.IDENTITY, [b"relay.0x", b"", b"far@host.0", dice.randbytes(9)][number % 4] or b"\x01")
            stranger.connect(endpoint)
            for _ in range(FRAMES // 10):
                stranger.send_multipart([dice.randbytes(dice.randint(0, 60)) for _ in range(dice.randint(1, 4))])
            stranger.close()
    finally:
        context.term()


def memory(server: Server) -> dict[str, int]:
    return {name: process.memory_info().rss for name, process in server.processes().items()}


def descriptors(server: Server) -> dict[str, int]:
    return {name: process.num_fds() for name, process in server.processes().items()}


def test_garbage_at_each_of_its_doors_does_no_harm(server: Server) -> None:
    dice = random.Random(7)
    assert server.answer("one two", audio=True) == "one two "
    before, memory_before, open_before = server.processes(), memory(server), descriptors(server)
    zeromq = [b"", GREETING + b"NULL" + bytes(48), GREETING + b"CURVE" + bytes(47), b"\xff" + bytes(8) + b"\x7f\x09\x09"]
    data = min(tcp_ports(before.values()) - {server.port, door(server)})
    http = [b"", b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n", b"GET / HTTP/9.9\r\n"]
    bytes_at(("127.0.0.1", server.port), dice, http)
    bytes_at(("127.0.0.1", door(server)), dice, zeromq)
    bytes_at(("127.0.0.1", data), dice, zeromq)
    bytes_at(str(server.run_dir / "broker.sock"), dice, zeromq)
    bytes_at(str(server.run_dir / "control"), dice, [b"", b"{", b'{"type":"Drain","replica":"relay/0"'])
    messages_at(f"ipc://{server.run_dir}/broker.sock", dice)

    assert server.answer("three four", audio=True) == "three four "
    assert {name: process.pid for name, process in server.processes().items()} == {
        name: process.pid for name, process in before.items()
    }
    replicas = [replica for stage in server.get("/v1/status")["stages"] for replica in stage["replicas"]]
    assert {(replica["state"], replica["restarts"]) for replica in replicas} == {("ready", 0)}
    eventually(
        lambda: all(count <= open_before[name] + 4 for name, count in descriptors(server).items()), WAIT_S, "all are closed"
    )
    assert {name for name, size in memory(server).items() if size > memory_before[name] + MEMORY_SLACK} == set()
    assert {log.name for log in server.run_dir.glob("*.log") if log.stat().st_size > LOG_SLACK} == set()
    assert "Traceback" not in server.stderr
