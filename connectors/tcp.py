"""tcp: tensors to a process on another host. The producer pushes each beside the event that speaks of it, out of a pool of its own.

A slot of the pool is free again when the consumer has used its tensor up *and* ZeroMQ has let go of its memory. The consumer keeps what
has arrived until the producer says that it was released. A tensor may come after its event: `here` says whether it has, and whoever
holds the event waits. What never comes, because a connection was cut, is StaleTensor once that wait is over.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import secrets
import time
from collections.abc import Sequence

import msgspec
import numpy as np
import torch
import zmq

from omni_bus.connectors.base import Frame, check_ref, dtype_name, tensor_bytes, tensor_from
from omni_bus.connectors.data_socket import DataSockets
from omni_bus.connectors.free_list import FreeList
from omni_bus.errors import ProtocolViolation, StaleTensor, TooLarge
from omni_bus.events import TensorRef

_log = logging.getLogger(__name__)
LIMIT_BYTES = 256 << 20  # of tensors that one process has under way
KEPT_BYTES = 1 << 30  # of tensors that have arrived and were not released yet; the oldest go first
KEPT_S = 60.0  # after which a tensor whose producer does not speak of it any more is thrown away
PART = 1 << 20  # bytes of one frame


class _Header(msgspec.Struct, array_like=True):
    """First frame of a message between data sockets. `nbytes`: of the tensor that follows; -1: that one was released."""

    number: int
    nbytes: int


@dataclasses.dataclass(slots=True)
class _Slot:
    start: int
    to: str
    tracker: zmq.MessageTracker | None


@dataclasses.dataclass(slots=True)
class _Arrived:
    parts: list[zmq.Frame]
    nbytes: int
    when: float


class TcpConnector:
    """Without sockets it takes no tensors, and knows none."""

    name = "tcp"

    def __init__(self, sockets: DataSockets | None = None, *, sender: str = "", limit: int = LIMIT_BYTES) -> None:
        """`sender`: what `new_sender` made, as in `sockets`."""
        self._sockets = sockets
        self._sender = sender
        self._limit = limit
        self._pool = np.empty(0, dtype=np.uint8)
        self._free = FreeList(limit)
        self._numbers = itertools.count(1)
        self._slots: dict[int, _Slot] = {}
        self._letting_go: list[_Slot] = []  # released, and still in ZeroMQ's hands
        self._arrived: dict[tuple[str, int], _Arrived] = {}  # oldest first
        self._kept = 0
        self._heard: dict[str, float] = {}  # sender → when its last message came (monotonic)
        self._decoder = msgspec.msgpack.Decoder(_Header)

    @property
    def endpoint(self) -> str:
        """As Register.data has it."""
        return "" if self._sockets is None else self._sockets.endpoint

    @property
    def socket(self) -> zmq.Socket[bytes] | None:
        """Readable when `receive` has something to do."""
        return None if self._sockets is None else self._sockets.socket

    @property
    def used(self) -> int:
        return len(self._slots) + len(self._letting_go)

    @property
    def kept(self) -> int:
        """Bytes that have arrived and were not released yet."""
        return self._kept

    # ---- the producer

    def send(self, to: str, name: str, tensor: torch.Tensor) -> TensorRef | None:
        """`put`, to the process with that data socket."""
        if self._sockets is None or not to:
            raise ProtocolViolation("a tensor for another host, and this process has no data socket")
        dtype = dtype_name(tensor)
        data = tensor_bytes(tensor)
        if len(data) > self._limit:
            raise TooLarge(f"a tensor of {len(data)} bytes exceeds the {self._limit} bytes that one process may have under way")
        start = self._allocate(max(1, len(data)))
        if start is None:
            return None
        if not len(self._pool):
            self._pool = np.empty(self._limit, dtype=np.uint8)  # the system gives memory for the pages that are touched
        self._pool[start : start + len(data)] = data
        number = next(self._numbers)
        memory: memoryview = self._pool[start : start + len(data)].data
        parts = [memory[at : at + PART] for at in range(0, len(data), PART)]
        tracker = self._sockets.send(to, [msgspec.msgpack.encode(_Header(number, len(data))), *parts])
        self._slots[number] = _Slot(start, to, tracker)
        return TensorRef(name, self.name, dtype, tuple(tensor.shape), len(data), self._sender, start, number)

    def put(self, name: str, tensor: torch.Tensor, frames: list[Frame]) -> TensorRef | None:
        raise ProtocolViolation("a tensor for another host needs to know which")

    def release(self, ref: TensorRef) -> None:
        slot = self._slots.pop(ref.generation)
        if self._sockets is not None:
            self._sockets.send(slot.to, [msgspec.msgpack.encode(_Header(ref.generation, -1))])
        self._letting_go.append(slot)
        self._let_go()

    # ---- the consumer

    def receive(self) -> bool:
        """Take in what has arrived; whether that was anything."""
        if self._sockets is None:
            return False
        any_came = False
        for frames in self._sockets.receive():
            any_came = True
            self._take(frames)
        return any_came

    def here(self, ref: TensorRef) -> bool:
        return (ref.segment, ref.generation) in self._arrived

    def heard(self, ref: TensorRef) -> float:
        """When anything last came from the process that sent this one (monotonic); 0: nothing has for long."""
        return self._heard.get(ref.segment, 0.0)

    def get(self, ref: TensorRef, frames: Sequence[Frame]) -> torch.Tensor:
        check_ref(ref)
        if self._sockets is None:
            raise ProtocolViolation("a tensor of another host, and this process has no data socket")
        arrived = self._arrived.get((ref.segment, ref.generation))
        if arrived is None:
            raise StaleTensor("a tensor did not come from the other host: the connection between them was cut, or is too slow")
        if arrived.nbytes != ref.nbytes:
            raise ProtocolViolation(f"{arrived.nbytes} bytes of a tensor came where {ref.nbytes} were announced")
        data = np.empty(ref.nbytes, dtype=np.uint8)
        at = 0
        for part in arrived.parts:
            data[at : at + len(part)] = np.frombuffer(part.buffer, dtype=np.uint8)
            at += len(part)
        return tensor_from(ref, torch.from_numpy(data))

    # ---- both

    def prune(self) -> None:
        """Throw away what nobody will ask for, and connections that nobody needs."""
        self._let_go()
        old = time.monotonic() - KEPT_S
        for key in [key for key, arrived in self._arrived.items() if arrived.when < old]:
            self._drop(key)
        for sender in [sender for sender, when in self._heard.items() if when < old]:
            del self._heard[sender]
        if self._sockets is not None:
            self._sockets.prune({slot.to for slot in self._slots.values()}, {slot.to for slot in self._letting_go})

    def close(self) -> None:
        if self._sockets is not None:
            self._sockets.close()
            self._sockets = None
        self._slots.clear()
        self._letting_go.clear()
        self._arrived.clear()

    # ---- inside

    def _allocate(self, size: int) -> int | None:
        start = self._free.allocate(size)
        if start is None and self._letting_go:
            self._let_go()
            start = self._free.allocate(size)
        return start

    def _let_go(self) -> None:
        """Give back slots whose memory ZeroMQ holds no longer."""
        held = []
        for slot in self._letting_go:
            if slot.tracker is None or slot.tracker.done:
                self._free.free(slot.start)
            else:
                held.append(slot)
        self._letting_go = held

    def _take(self, frames: list[zmq.Frame]) -> None:
        try:
            sender = frames[0].bytes.decode()
            header = self._decoder.decode(frames[1].buffer)
        except (IndexError, UnicodeDecodeError, msgspec.DecodeError):
            _log.warning("a malformed message at the data socket")
            return
        key = (sender, header.number)
        self._heard[sender] = time.monotonic()
        if header.nbytes < 0:
            self._drop(key)
            return
        if key in self._arrived or sum(map(len, frames[2:])) != header.nbytes or header.nbytes > KEPT_BYTES:
            _log.warning("a tensor that came twice, or is not of the size that was announced")
            return
        self._arrived[key] = _Arrived(frames[2:], header.nbytes, time.monotonic())
        self._kept += header.nbytes
        while self._kept > KEPT_BYTES:
            self._drop(next(iter(self._arrived)))

    def _drop(self, key: tuple[str, int]) -> None:
        arrived = self._arrived.pop(key, None)
        if arrived is not None:
            self._kept -= arrived.nbytes


def new_sender() -> str:
    """A name for one process's tensors that no other process has, nor a later one in its place."""
    return secrets.token_hex(16)
