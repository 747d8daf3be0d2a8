"""What the API asks of the bus; omni_bus.client.BusClient has this shape, and so has the scripted bus of the tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import msgspec

from omni_bus.events import RequestOptions, Status
from omni_bus.wire import HostTensor


class Item(Protocol):
    """One chunk for the client."""

    @property
    def edge(self) -> str: ...
    @property
    def payload(self) -> msgspec.Struct: ...
    @property
    def tensors(self) -> Mapping[str, HostTensor]: ...
    @property
    def last(self) -> bool: ...


class RequestStream(Protocol):
    """One request. Asking for the next item says that the one before is consumed: a slow reader stalls its own request only."""

    @property
    def usage(self) -> Mapping[str, Mapping[str, int]]: ...
    @property
    def first_chunks(self) -> Mapping[str, float]: ...

    def __aiter__(self) -> AsyncIterator[Item]: ...

    def hold(self, edge: str) -> None:
        """From now on an item of that edge is consumed when `consumed` says so, and not by asking for the next one."""

    def consumed(self, edge: str) -> None:
        """An item of a held edge has been used up; not to be said of its last one."""

    async def cancel(self) -> None:
        """Returns when every stage has acknowledged."""


class Bus(Protocol):
    async def submit(
        self,
        *,
        options: RequestOptions,
        payload: msgspec.Struct,
        tensors: Mapping[str, HostTensor],
        deadline_s: float,
        label: str = "",
        last: bool = True,
    ) -> RequestStream: ...

    async def status(self) -> Status: ...

    def watch(self, changed: Callable[[], None]) -> None:
        """`changed` is called from now on when a replica's state has changed, and when the broker is gone or back."""

    def lease(self, kind: str, client: str) -> AbstractAsyncContextManager[None]:
        """One more of events.REQUEST or SESSION of a client, over all API processes. Raises RateLimited, Overloaded or ShuttingDown."""

    async def close(self) -> None: ...
