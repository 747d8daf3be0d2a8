"""One process of a pair that send each other tensors over connectors/cuda_ipc.py, and how a check drives the two.

A peer takes commands as lines of JSON on its standard input; the two of a pair also have a pipe in each direction between them, for loops
in which nobody else takes part. `card`: "events" and "words" are the GPU with fences of that kind; "host" is tests/support/host_gpu.py.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import select
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal, Protocol, TextIO
from unittest import mock

import msgspec
import torch

from omni_bus import segments
from omni_bus.connectors.cuda_device import CudaFence, CudaGpu, Gpu
from omni_bus.connectors.cuda_ipc import CudaIpcConnector
from omni_bus.connectors.cuda_words import WordFence
from omni_bus.connectors.shm import ShmConnector
from omni_bus.errors import StaleTensor
from omni_bus.events import TensorRef
from omni_bus.process import die_with_parent

TAG = "gpucheck"
MIB = 1 << 20
START_S = 120.0
ANSWER_S = 45.0
END_S = 60.0  # for a killed process to be gone, the device's work for it included
CYCLES_PER_MS = 1_700_000  # of the device's clock, near enough

CardKind = Literal["events", "words", "host"]


class Card(Protocol):
    """A device and its one stream, as the checks use them. Only `synchronize` waits for the device."""

    gpu: Gpu
    fence_class: type

    def busy(self, ms: float) -> None:
        """Keep the stream busy that long."""

    def full(self, value: int, nbytes: int) -> torch.Tensor:
        """int32, of that value from when the stream comes to it."""

    def flags(self, count: int) -> torch.Tensor:
        """bool [count], false."""

    def flag_other_than(self, flags: torch.Tensor, number: int, tensor: torch.Tensor) -> None:
        """Set flags[number] if some element of the tensor is not `number` when the stream comes to it."""

    def mark(self) -> Callable[[], bool]:
        """Whether the stream has come here."""

    def synchronize(self) -> None: ...

    def free_memory(self) -> int:
        """Bytes."""


class CudaCard:
    def __init__(self, fences: Literal["events", "words"]) -> None:
        self.gpu = CudaGpu(fences)
        self.fence_class = WordFence if fences == "words" else CudaFence
        torch.zeros(1, device="cuda")

    def busy(self, ms: float) -> None:
        if ms:
            torch.cuda._sleep(int(ms * CYCLES_PER_MS))

    def full(self, value: int, nbytes: int) -> torch.Tensor:
        return torch.full((nbytes // 4,), value, dtype=torch.int32, device="cuda")

    def flags(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.bool, device="cuda")

    def flag_other_than(self, flags: torch.Tensor, number: int, tensor: torch.Tensor) -> None:
        flags[number] = (tensor != number).any()

    def mark(self) -> Callable[[], bool]:
        end = torch.cuda.Event()
        end.record()
        return end.query

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def free_memory(self) -> int:
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info()[0])


def card_of(kind: CardKind) -> Card:
    if kind == "host":
        from tests.support.host_gpu import HostCard

        return HostCard(TAG)
    return CudaCard(kind)


# ---- the peer's process


class Served:
    """The commands of one peer."""

    def __init__(self, card: Card, incoming: TextIO, outgoing: TextIO) -> None:
        self._card = card
        self._in, self._out = incoming, outgoing
        self._connector = CudaIpcConnector(TAG, card.gpu)
        self._kept: list[torch.Tensor] = []

    def open(self, buffer_bytes: int) -> None:
        self._kept.clear()
        self._connector.close()
        self._connector = CudaIpcConnector(TAG, self._card.gpu, buffer_bytes=buffer_bytes)

    def put(self, value: int, nbytes: int, behind_ms: float = 0.0) -> Any:
        """A tensor full of `value`, made after the stream has been busy that long."""
        self._card.busy(behind_ms)
        return msgspec.to_builtins(self._connector.put("x", self._card.full(value, nbytes), []))

    def get(self, ref: Any, behind_ms: float = 0.0) -> str:
        self._card.busy(behind_ms)
        try:
            self._kept.append(self._connector.get(_ref(ref), []))
        except StaleTensor:
            return "stale"
        return "here"

    def forget(self) -> None:
        self._kept.clear()

    def values(self) -> list[tuple[int, int]]:
        """Least and largest element of each tensor that came."""
        self._card.synchronize()
        return [(int(tensor.min()), int(tensor.max())) for tensor in self._kept]

    def release(self, ref: Any) -> int:
        self._connector.release(_ref(ref))
        return self._connector.used

    def finished(self, within_s: float) -> bool:
        """Whether the stream comes to its end."""
        return comes(self._card.mark(), within_s)

    def pruned(self) -> tuple[str, ...]:
        self._connector.prune()
        return self._connector.attached

    def free_memory(self) -> int:
        return self._card.free_memory()

    def send_many(self, count: int, busy_ms: float, unfenced: bool = False) -> int:
        """How often there was no room; each tensor is made after the stream has been busy for `busy_ms`.

        `unfenced`: reads pass for done as soon as a slot is returned.
        """
        full = 0
        with self._without("over", lambda fence: True) if unfenced else contextlib.nullcontext():
            for number in range(count):
                self._card.busy(busy_ms)
                tensor = self._card.full(number, MIB)
                while (ref := self._connector.put("x", tensor, [])) is None:
                    full += 1
                    self._connector.release(self._read())
                self._write(ref)
            while self._connector.used:
                self._connector.release(self._read())
        self._card.synchronize()
        return full

    def receive_many(self, count: int, busy_ms: float, every: int = 1, unfenced: bool = False) -> int:
        """How many of the tensors had a wrong element; before each `every`th the stream is busy for `busy_ms`.

        `unfenced`: without waiting for the sender's copy.
        """
        wrong = self._card.flags(count)
        with self._without("wait", lambda fence: None) if unfenced else contextlib.nullcontext():
            for number in range(count):
                ref = self._read()
                if number % every == 0:
                    self._card.busy(busy_ms)
                self._card.flag_other_than(wrong, number, self._connector.get(ref, []))
                self._write(ref)
        self._card.synchronize()
        return int(wrong.sum())

    def send_timed(self, connector: str, nbytes: int, count: int) -> float:
        """Median µs that `put` keeps the host. On a GPU."""
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

    def _without(self, call: str, instead: Callable[[Any], object]) -> Any:
        return mock.patch.object(self._card.fence_class, call, instead)

    def _read(self) -> TensorRef:
        return _ref(json.loads(self._in.readline()))

    def _write(self, ref: TensorRef) -> None:
        self._out.write(json.dumps(msgspec.to_builtins(ref)) + "\n")
        self._out.flush()

    def close(self) -> None:
        self._connector.close()


def _ref(plain: Any) -> TensorRef:
    return msgspec.convert(plain, TensorRef)


def comes(condition: Callable[[], bool], within_s: float) -> bool:
    end = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def serve(kind: CardKind, incoming: int, outgoing: int) -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    served = Served(card_of(kind), os.fdopen(incoming), os.fdopen(outgoing, "w"))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        command, arguments = json.loads(line)
        answers.write(json.dumps(getattr(served, command)(**arguments)) + "\n")
        answers.flush()
    served.close()


# ---- the checks' side


class Peer:
    def __init__(self, name: str, kind: CardKind, incoming: int, outgoing: int) -> None:
        self._name = name
        self._asked = "start"
        command = [sys.executable, "-m", "bench.cuda_ipc_peer", kind, str(incoming), str(outgoing)]
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
        self._asked = command
        self.process.stdin.write(json.dumps([command, arguments]) + "\n")
        self.process.stdin.flush()

    def answer(self, within_s: float = ANSWER_S) -> Any:
        """Raises AssertionError for none in time, once the peer's log says where each of its threads stands."""
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], within_s)[0]:
            self.process.send_signal(signal.SIGUSR1)
            select.select([self.process.stdout], [], [], 2.0)  # for it to be written
            raise AssertionError(
                f"the {self._name} does not answer {self._asked} within {within_s:.0f} s; its stacks are above"
            )
        line = self.process.stdout.readline()
        assert line, f"the {self._name} ended with exit code {self.process.wait(10)} in {self._asked}"
        return json.loads(line)

    def ask(self, command: str, **arguments: Any) -> Any:
        self.tell(command, **arguments)
        return self.answer()

    def ask_at_once(self, command: str, busy_s: float, **arguments: Any) -> Any:
        """The device is busy that long: a host that waits for it shows."""
        started = time.monotonic()
        answer = self.ask(command, **arguments)
        took = time.monotonic() - started
        assert took < busy_s / 2, f"the {self._name}'s host has waited {took:.1f} s for the device in {command}"
        return answer

    def kill(self) -> float:
        """Seconds until it was gone."""
        started = time.monotonic()
        self.process.kill()
        self.process.wait(END_S)
        return time.monotonic() - started


@contextlib.contextmanager
def pair(kind: CardKind, buffer_bytes: int) -> Iterator[tuple[Peer, Peer]]:
    """(sender, receiver); ended afterwards, in order where they can be."""
    forth, back = os.pipe(), os.pipe()
    peers = Peer("sender", kind, back[0], forth[1]), Peer("receiver", kind, forth[0], back[1])
    for descriptor in (*forth, *back):
        os.close(descriptor)
    try:
        for peer in peers:
            peer.tell("open", buffer_bytes=buffer_bytes)
        for peer in peers:
            peer.answer(START_S)
        yield peers
        for peer in peers:
            if peer.process.poll() is None:
                assert peer.process.stdin is not None
                peer.process.stdin.close()
                assert peer.process.wait(END_S) == 0, "a peer did not end in order"
    finally:
        for peer in peers:
            peer.kill()
            for pipe in (peer.process.stdin, peer.process.stdout):
                assert pipe is not None
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        for tag in (TAG, f"{TAG}m"):
            segments.sweep(tag=tag)


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))  # type: ignore[arg-type]
