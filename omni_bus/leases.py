"""How much of a server each client has at a time: requests and voice sessions, over all API processes. No I/O, no clock.

A client is a name that an API process has made: of a key, or of an address where there are no keys.
"""

from __future__ import annotations

import collections
from typing import TypeVar

from omni_bus.deployment import ApiConfig
from omni_bus.errors import OmniBusError, Overloaded, ProtocolViolation, RateLimited
from omni_bus.events import REQUEST, SESSION, Lease

KeyT = TypeVar("KeyT", str, tuple[str, str])


class Leases:
    """`owner`: the connection of the API process that asks; its leases end with it."""

    def __init__(self, config: ApiConfig) -> None:
        self._most = {REQUEST: 0, SESSION: config.max_sessions}
        self._most_per_client = {REQUEST: config.max_requests_per_client, SESSION: config.max_sessions_per_client}
        self._held: dict[bytes, dict[int, Lease]] = {}
        # Of those only that have any.
        self._in_all: collections.Counter[str] = collections.Counter()
        self._of_client: collections.Counter[tuple[str, str]] = collections.Counter()

    def __len__(self) -> int:
        return sum(map(len, self._held.values()))

    def take(self, owner: bytes, wanted: Lease) -> None:
        """Raises RateLimited where the client has as many as it may, Overloaded where the server has, ProtocolViolation."""
        if wanted.kind not in self._most or wanted.lease in self._held.get(owner, {}):
            raise ProtocolViolation("a lease of no known kind, or a second one of the same number")
        if not wanted.renewed:
            self._check(wanted)
        self._held.setdefault(owner, {})[wanted.lease] = wanted
        self._in_all[wanted.kind] += 1
        self._of_client[wanted.kind, wanted.client] += 1

    def release(self, owner: bytes, lease: int) -> None:
        """One that was never granted, or is not known, is none."""
        held = self._held.get(owner, {})
        if (ended := held.pop(lease, None)) is None:
            return
        if not held:
            del self._held[owner]
        _less(self._in_all, ended.kind)
        _less(self._of_client, (ended.kind, ended.client))

    def release_all(self, owner: bytes) -> None:
        for lease in list(self._held.get(owner, ())):
            self.release(owner, lease)

    def _check(self, wanted: Lease) -> None:
        most = self._most_per_client[wanted.kind]
        if 0 < most <= self._of_client[wanted.kind, wanted.client]:
            raise _refusals[wanted.kind](most)
        if 0 < self._most[wanted.kind] <= self._in_all[wanted.kind]:
            raise Overloaded("the server has as many sessions as it takes; try again when one has ended")


def _too_many_requests(most: int) -> OmniBusError:
    many = "1 request" if most == 1 else f"{most} requests"
    return RateLimited(f"a client may have {many} in flight at a time; try again when one has ended")


def _too_many_sessions(most: int) -> OmniBusError:
    many = f"{most} session{'s' * (most > 1)}"
    return RateLimited(f"a client may have {many} open at a time; close one first", code="too_many_sessions")


_refusals = {REQUEST: _too_many_requests, SESSION: _too_many_sessions}


def _less(counts: collections.Counter[KeyT], key: KeyT) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
