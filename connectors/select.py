"""All connectors of one process: which one carries a tensor, a chunk's tensors as a parcel, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch

from omni_bus.connectors.base import Connector, Frame
from omni_bus.connectors.cuda_ipc import CudaIpcConnector
from omni_bus.connectors.inline import InlineConnector
from omni_bus.connectors.local import LocalConnector
from omni_bus.connectors.shm import LIMIT_BYTES, SEGMENT_BYTES, ShmConnector
from omni_bus.connectors.tcp import TcpConnector
from omni_bus.errors import ProtocolViolation
from omni_bus.events import EdgeRoute, TensorRef

INLINE_BYTES = 64 << 10  # a tensor up to here goes inline on every edge, unless it is on a GPU and the edge is cuda_ipc


@dataclasses.dataclass(frozen=True, slots=True)
class Parcel:
    """A chunk's tensors on their way: refs for its event, payload frames (the first is the payload Struct's)."""

    refs: tuple[TensorRef, ...]
    frames: list[Frame]


class Connectors:
    """`put` and `get` for whole chunks, all or nothing."""

    def __init__(
        self,
        tag: str,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        limit: int = LIMIT_BYTES,
        cuda_ipc: CudaIpcConnector | None = None,
        tcp: TcpConnector | None = None,
    ) -> None:
        self._inline = InlineConnector()
        self._shm = ShmConnector(tag, segment_bytes=segment_bytes, limit=limit)
        self._cuda_ipc = cuda_ipc or CudaIpcConnector(tag)
        self.tcp = tcp or TcpConnector()
        connectors: tuple[Connector, ...] = (self._inline, LocalConnector(), self._shm, self._cuda_ipc, self.tcp)
        self._by_name = {connector.name: connector for connector in connectors}

    def check_route(self, route: EdgeRoute) -> None:
        """Raise ProtocolViolation for a connector that this process does not have."""
        if self._named(route.connector) is self.tcp and not (route.to and self.tcp.endpoint):
            raise ProtocolViolation(f"edge {route.edge} leads to another host, and one of the two has no data socket")

    def takes_room(self, route: EdgeRoute, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether `put` may find no room for these."""
        if route.connector not in (self._shm.name, self._cuda_ipc.name, self.tcp.name):
            return False
        return any(self._chosen(route, tensor) is not self._inline for tensor in tensors.values())

    def prepare(self, connector: str, device: str, *, sends: bool) -> None:
        """What the first tensor from or to a stage on that device would else wait for."""
        if connector == self._cuda_ipc.name:
            (self._cuda_ipc.prepare if sends else self._cuda_ipc.load)(int(device.removeprefix("cuda:")))

    def put(self, route: EdgeRoute, payload: Frame, tensors: Mapping[str, torch.Tensor]) -> Parcel | None:
        """None: there is no room for one of them now, and none was put. Raises TooLarge where there never will be."""
        frames = [payload]
        refs: list[TensorRef] = []
        try:
            for name, tensor in tensors.items():
                chosen = self._chosen(route, tensor)
                ref = self.tcp.send(route.to, name, tensor) if chosen is self.tcp else chosen.put(name, tensor, frames)
                if ref is None:
                    self.release(refs)
                    return None
                refs.append(ref)
        except Exception:
            self.release(refs)
            raise
        return Parcel(tuple(refs), frames)

    def awaited(self, refs: Sequence[TensorRef]) -> TensorRef | None:
        """The first of these tensors that is still on its way from another host."""
        if self.tcp.socket is None:
            return None
        return next((ref for ref in refs if ref.connector == self.tcp.name and not self.tcp.here(ref)), None)

    def get(self, refs: Sequence[TensorRef], frames: Sequence[Frame], *, inline_only: bool = False) -> dict[str, torch.Tensor]:
        """The tensors by name. Raises ProtocolViolation or StaleTensor. `inline_only` for refs that a client made."""
        tensors: dict[str, torch.Tensor] = {}
        for ref in refs:
            if ref.name in tensors:
                raise ProtocolViolation("a chunk with two tensors of one name")
            if inline_only and ref.connector != self._inline.name:
                raise ProtocolViolation("a client's tensors come inline only")
            tensors[ref.name] = self._named(ref.connector).get(ref, frames)
        return tensors

    def release(self, refs: Sequence[TensorRef]) -> None:
        for ref in refs:
            self._named(ref.connector).release(ref)

    @property
    def used(self) -> int:
        """Slots handed out and not yet returned, over all connectors."""
        return sum(connector.used for connector in self._by_name.values())

    def prune(self) -> None:
        """Let go of other processes' segments that are gone."""
        self._shm.prune()
        self._cuda_ipc.prune()
        self.tcp.prune()

    def close(self) -> None:
        for connector in self._by_name.values():
            connector.close()

    def _chosen(self, route: EdgeRoute, tensor: torch.Tensor) -> Connector:
        if route.connector == self._cuda_ipc.name:
            if self._cuda_ipc.carries(tensor):
                return self._cuda_ipc
            return self._inline if _small(tensor) else self._shm
        return self._inline if _small(tensor) else self._named(route.connector)

    def _named(self, name: str) -> Connector:
        try:
            return self._by_name[name]
        except KeyError:
            raise ProtocolViolation(f"no connector {name[:40]!r} in this process") from None


def _small(tensor: torch.Tensor) -> bool:
    return tensor.numel() * tensor.element_size() <= INLINE_BYTES
