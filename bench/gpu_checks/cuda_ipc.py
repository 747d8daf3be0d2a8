"""connectors/cuda_ipc.py between real processes on one GPU: order, reuse under load, overrun, a crash of either side, times beside shm.

Each peer is a process of its own that takes commands as lines of JSON on its standard input; the two of a pair also have a pipe in
each direction between them, for loops in which nobody else takes part.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO
from unittest import mock

import msgspec
import torch

from omni_bus import segments
from omni_bus.connectors import cuda_device
from omni_bus.connectors.cuda_ipc import CudaIpcConnector
from omni_bus.connectors.shm import ShmConnector
from omni_bus.errors import StaleTensor
from omni_bus.events import TensorRef
from omni_bus.process import die_with_parent

TAG = "gpucheck"
MIB = 1 << 20
SLOTS = 8
ANSWER_S = 60.0
CYCLES_PER_MS = 1_700_000  # of the device's clock, near enough
SIZES = {"4 KB": 4 << 10, "64 KB": 64 << 10, "1 MB": MIB, "16 MB": 16 * MIB, "64 MB": 64 * MIB}


# ---- a peer


class Served:
    """The commands of one peer."""

    def __init__(self, incoming: TextIO, outgoing: TextIO) -> None:
        self._in, self._out = incoming, outgoing
        self._connector = CudaIpcConnector(TAG)
        self._kept: list[torch.Tensor] = []
        torch.zeros(1, device="cuda")

    def open(self, buffer_bytes: int) -> None:
        self._kept.clear()
        self._connector.close()
        self._connector = CudaIpcConnector(TAG, buffer_bytes=buffer_bytes)

    def put(self, value: int, nbytes: int, behind_ms: float = 0.0) -> Any:
        """A tensor full of `value`, made after the stream has been busy that long."""
        _busy(behind_ms)
        return msgspec.to_builtins(
            self._connector.put("x", torch.full((nbytes // 4,), value, dtype=torch.int32, device="cuda"), [])
        )

    def get(self, ref: Any, behind_ms: float = 0.0) -> str:
        _busy(behind_ms)
        try:
            self._kept.append(self._connector.get(_ref(ref), []))
        except StaleTensor:
            return "stale"
        return "here"

    def forget(self) -> None:
        self._kept.clear()

    def values(self) -> list[tuple[int, int]]:
        """Least and largest element of each tensor that came."""
        return [(int(tensor.min()), int(tensor.max())) for tensor in self._kept]

    def release(self, ref: Any) -> int:
        self._connector.release(_ref(ref))
        return self._connector.used

    def finished(self, within_s: float) -> bool:
        """Whether the stream comes to its end."""
        end = torch.cuda.Event()
        end.record()
        return _comes(end.query, within_s)

    def pruned(self) -> tuple[str, ...]:
        self._connector.prune()
        return self._connector.attached

    def free_memory(self) -> int:
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info()[0])

    def send_many(self, count: int, unfenced: bool = False) -> int:
        """How often there was no room. `unfenced`: reads pass for done as soon as a slot is returned."""
        full = 0
        with mock.patch.object(cuda_device._CudaFence, "over", lambda fence: True) if unfenced else contextlib.nullcontext():
            for number in range(count):
                _busy(0.3)  # so that a ref comes long before what it names is written
                tensor = torch.full((MIB // 4,), number, dtype=torch.int32, device="cuda")
                while (ref := self._connector.put("x", tensor, [])) is None:
                    full += 1
                    self._connector.release(self._read())
                self._write(ref)
            while self._connector.used:
                self._connector.release(self._read())
        torch.cuda.synchronize()
        return full

    def receive_many(self, count: int, unfenced: bool = False) -> int:
        """How many of the tensors had a wrong element. `unfenced`: without waiting for the sender's copy."""
        wrong = torch.zeros(count, dtype=torch.bool, device="cuda")
        with mock.patch.object(cuda_device._CudaFence, "wait", lambda fence: None) if unfenced else contextlib.nullcontext():
            for number in range(count):
                ref = self._read()
                if number % 7 == 0:
                    _busy(6.0)  # so that slots come back long before they are read
                wrong[number] = (self._connector.get(ref, []) != number).any()
                self._write(ref)
        return int(wrong.sum())

    def send_timed(self, connector: str, nbytes: int, count: int) -> float:
        """Median µs that `put` keeps the host."""
        tensor = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda")
        with self._by_name(connector) as way:
            spent = []
            for _ in range(count):
                torch.cuda.synchronize()
                started = time.monotonic_ns()
                ref = way.put("x", tensor, [])
                spent.append((time.monotonic_ns() - started) / 1e3)
                self._out.write(json.dumps([started, msgspec.to_builtins(ref)]) + "\n")
                self._out.flush()
                way.release(self._read())
        return statistics.median(spent[count // 5 :])

    def receive_timed(self, connector: str, count: int) -> tuple[float, float]:
        """Median µs from before `put` until the tensor lies whole in this process's GPU memory, and of that in `get`, host time."""
        with self._by_name(connector) as way:
            whole, spent = [], []
            for _ in range(count):
                sent, ref = json.loads(self._in.readline())
                started = time.monotonic_ns()
                tensor = way.get(_ref(ref), [])
                spent.append((time.monotonic_ns() - started) / 1e3)
                tensor = tensor.to("cuda")
                torch.cuda.current_stream().synchronize()
                whole.append((time.monotonic_ns() - sent) / 1e3)
                self._write(_ref(ref))
        return statistics.median(whole[count // 5 :]), statistics.median(spent[count // 5 :])

    @contextlib.contextmanager
    def _by_name(self, connector: str) -> Iterator[Any]:
        if connector == "cuda_ipc":
            yield self._connector
        else:
            with contextlib.closing(ShmConnector(TAG)) as shm:
                yield shm

    def _read(self) -> TensorRef:
        return _ref(json.loads(self._in.readline()))

    def _write(self, ref: TensorRef) -> None:
        self._out.write(json.dumps(msgspec.to_builtins(ref)) + "\n")
        self._out.flush()

    def close(self) -> None:
        self._connector.close()


def _ref(plain: Any) -> TensorRef:
    return msgspec.convert(plain, TensorRef)


def _busy(ms: float) -> None:
    if ms:
        torch.cuda._sleep(int(ms * CYCLES_PER_MS))


def _comes(condition: Callable[[], bool], within_s: float) -> bool:
    end = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def serve(incoming: int, outgoing: int) -> None:
    torch.set_grad_enabled(False)
    served = Served(os.fdopen(incoming), os.fdopen(outgoing, "w"))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        command, arguments = json.loads(line)
        answers.write(json.dumps(getattr(served, command)(**arguments)) + "\n")
        answers.flush()
    served.close()


# ---- the checks' side


class Peer:
    def __init__(self, incoming: int, outgoing: int) -> None:
        command = [sys.executable, "-m", "bench.gpu_checks.cuda_ipc", str(incoming), str(outgoing)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=(incoming, outgoing),
            preexec_fn=die_with_parent,
        )

    def tell(self, command: str, **arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([command, arguments]) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], ANSWER_S)[0], f"a peer does not answer within {ANSWER_S:.0f} s"
        line = self.process.stdout.readline()
        assert line, f"a peer ended with exit code {self.process.wait(10)}"
        return json.loads(line)

    def ask(self, command: str, **arguments: Any) -> Any:
        self.tell(command, **arguments)
        return self.answer()

    def ask_at_once(self, command: str, **arguments: Any) -> Any:
        """The device is busy for many seconds: a host that waits for it shows."""
        started = time.monotonic()
        answer = self.ask(command, **arguments)
        assert time.monotonic() - started < 2.0, f"the host has waited for the device in {command}"
        return answer

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def pair() -> Iterator[tuple[Peer, Peer]]:
    """(sender, receiver); ended afterwards, in order where they can be."""
    forth, back = os.pipe(), os.pipe()
    peers = Peer(back[0], forth[1]), Peer(forth[0], back[1])
    for descriptor in (*forth, *back):
        os.close(descriptor)
    try:
        for peer in peers:
            peer.tell("open", buffer_bytes=SLOTS * MIB)
        for peer in peers:
            peer.answer()
        yield peers
        for peer in peers:
            if peer.process.poll() is None:
                assert peer.process.stdin is not None
                peer.process.stdin.close()
                assert peer.process.wait(30) == 0, "a peer did not end in order"
    finally:
        for peer in peers:
            peer.kill()
        segments.sweep(tag=TAG)


def fill(sender: Peer, value: int) -> list[Any]:
    """Refs to as many tensors of 1 MiB as there is room for."""
    refs: list[Any] = []
    while (ref := sender.ask("put", value=value + len(refs), nbytes=MIB)) is not None:
        refs.append(ref)
    return refs


def warm(sender: Peer, receiver: Peer, nbytes: int) -> None:
    """Buffer made and opened, kernels loaded, memory in torch's cache: what is left is what a server does in each step."""
    for _ in range(2):
        ref = sender.ask("put", value=0, nbytes=nbytes)
        for peer in (sender, receiver):
            assert peer.ask("get", ref=ref) == "here" and peer.ask("values")
            peer.ask("forget")
        sender.ask("release", ref=ref)


def order_and_reuse() -> str:
    with pair() as (sender, receiver):
        started = time.monotonic()
        sender.tell("send_many", count=1000)
        receiver.tell("receive_many", count=1000)
        full, wrong = sender.answer(), receiver.answer()
        took = time.monotonic() - started
        assert wrong == 0, f"{wrong} of 1000 tensors came torn"
        assert full > 100, f"the sender met a full buffer {full} times only: nothing was reused under load"
        return f"1000 tensors of 1 MiB through {SLOTS} slots in {took:.2f} s, {full} times full, none torn"


def controls() -> str:
    """The same load without a fence comes torn: the check above can fail."""
    with pair() as (sender, receiver):
        torn = []
        for unfenced in ({"receiver": True}, {"sender": True}):
            sender.tell("send_many", count=300, unfenced=unfenced.get("sender", False))
            receiver.tell("receive_many", count=300, unfenced=unfenced.get("receiver", False))
            sender.answer()
            torn.append(receiver.answer())
        assert torn[0], "without waiting for the sender's copy nothing came torn: the load proves nothing"
        assert torn[1], "without waiting for the reader nothing came torn: the load proves nothing"
        return f"torn of 300 without the fence of the write: {torn[0]}, of the read: {torn[1]}"


def overrun_and_stale() -> str:
    with pair() as (sender, receiver):
        refs = fill(sender, 0)
        assert len(refs) == SLOTS
        assert sender.ask("release", ref=refs[2]) == SLOTS - 1
        again = sender.ask("put", value=100, nbytes=MIB)
        assert again is not None and sender.ask("put", value=0, nbytes=MIB) is None
        assert receiver.ask("get", ref=refs[2]) == "stale"
        for ref in [*refs[:2], *refs[3:], again]:
            assert receiver.ask("get", ref=ref) == "here"
            sender.ask("release", ref=ref)
        expected = [0, 1, 3, 4, 5, 6, 7, 100]
        values = receiver.ask("values")
        assert values == [[value, value] for value in expected], values
        return f"full at {SLOTS} slots, room again after one release, a returned slot is stale"


def receiver_crash() -> str:
    """Killed with its copy still to come; the slot returned afterwards, and before with the sender's stream already waiting for it."""
    figures = []
    for returned_first in (False, True):
        with pair() as (sender, receiver):
            warm(sender, receiver, SLOTS * MIB)
            ref = sender.ask("put", value=7, nbytes=SLOTS * MIB)
            assert sender.ask("finished", within_s=5.0)
            assert receiver.ask_at_once("get", ref=ref, behind_ms=20_000) == "here"
            if returned_first:
                sender.ask("release", ref=ref)
                fresh = sender.ask_at_once("put", value=8, nbytes=SLOTS * MIB)
                assert not sender.ask("finished", within_s=0.3), "the slot was overwritten while it was to be read"
                receiver.kill()
            else:
                receiver.kill()
                sender.ask("release", ref=ref)
                fresh = sender.ask("put", value=8, nbytes=SLOTS * MIB)
            started = time.monotonic()
            how = "that already waited for it" if returned_first else "that comes to the slot later"
            assert sender.ask("finished", within_s=15.0), f"the dead receiver holds up a stream {how}"
            figures.append(f"{(time.monotonic() - started) * 1e3:.0f} ms")
            assert sender.ask("get", ref=fresh) == "here" and sender.ask("values") == [[8, 8]]
    return f"sender goes on after {figures[0]} (slot returned after the kill), {figures[1]} (its stream waited for the read)"


def sender_crash() -> str:
    """Killed at rest: what is unread is stale, the memory comes back."""
    with pair() as (sender, receiver):
        sender.ask("open", buffer_bytes=512 * MIB)
        refs = [sender.ask("put", value=value, nbytes=MIB) for value in (1, 2)]
        assert receiver.ask("get", ref=refs[0]) == "here"
        assert receiver.ask("values") == [[1, 1]] and len(receiver.ask("pruned")) == 1
        held = receiver.ask("free_memory")
        sender.kill()
        assert receiver.ask("get", ref=refs[1]) == "stale"
        assert segments.sweep(tag=TAG) == [refs[0][5]]
        assert receiver.ask("pruned") == []
        assert _comes(lambda: receiver.ask("free_memory") >= held + 500 * MIB, 15.0), "the dead sender's buffer is still taken"
        back = (receiver.ask("free_memory") - held) >> 20
        receiver.ask("put", value=3, nbytes=MIB)
        assert receiver.ask("finished", within_s=5.0)
        return f"unread tensors stale, {back} MiB back (buffer 512 MiB and the context)"


def sender_crash_under_way() -> str:
    """Killed with the copy still to come and the receiver's stream waiting for it."""
    with pair() as (sender, receiver):
        warm(sender, receiver, MIB)
        ref = sender.ask_at_once("put", value=1, nbytes=MIB, behind_ms=20_000)
        assert receiver.ask_at_once("get", ref=ref) == "here"
        assert not receiver.ask("finished", within_s=0.3), "the receiver did not wait for the copy"
        sender.kill()
        started = time.monotonic()
        assert receiver.ask("finished", within_s=15.0), "the dead sender holds up the receiver's stream"
        took = (time.monotonic() - started) * 1e3
        assert receiver.ask("get", ref=ref) == "stale"
        return f"receiver's stream goes on {took:.0f} ms after the kill"


def times() -> str:
    with pair() as (sender, receiver):
        for peer in (sender, receiver):
            peer.ask("open", buffer_bytes=256 * MIB)
        figures = []
        print("| tensor | cuda_ipc, one way | shm, one way | put, get (host): cuda_ipc | shm |  (p50, µs)", flush=True)
        for label, nbytes in SIZES.items():
            whole, host = {}, {}
            for connector in ("cuda_ipc", "shm"):
                count = 40 if nbytes > 16 * MIB else 200
                sender.tell("send_timed", connector=connector, nbytes=nbytes, count=count)
                receiver.tell("receive_timed", connector=connector, count=count)
                put = sender.answer()
                whole[connector], get = receiver.answer()
                host[connector] = f"{put:.0f}, {get:.0f}"
            print(
                f"| {label} | {whole['cuda_ipc']:.0f} | {whole['shm']:.0f} | {host['cuda_ipc']} | {host['shm']} |", flush=True
            )
            figures.append(f"{label} {whole['cuda_ipc']:.0f}/{whole['shm']:.0f}")
        return "p50 µs, cuda_ipc/shm: " + ", ".join(figures)


def checks() -> Iterator[tuple[str, Callable[[], str]]]:
    yield "order and reuse", order_and_reuse
    yield "controls", controls
    yield "overrun and stale refs", overrun_and_stale
    yield "times beside shm", times
    yield "crash of the receiver", receiver_crash
    yield "crash of the sender", sender_crash
    yield "crash of the sender under way", sender_crash_under_way


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]))
