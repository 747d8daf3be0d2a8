"""Every request the broker holds: by id, by ticket, by when the clock must look at it. Nothing is kept of one that has ended."""

from __future__ import annotations

import collections
import heapq

from omni_bus.request import InputChunk, Request, RequestState

KEPT_BYTES = 256 * 2**20  # of input held for retries, over all requests; one that goes beyond cannot be run again
OUTCOMES = 64  # distinct outcomes counted; codes come from stages too, so their number is bounded here


class RequestTable:
    def __init__(self) -> None:
        self._by_id: dict[int, Request] = {}
        self._by_ticket: dict[bytes, dict[int, Request]] = {}
        self._alarms: list[tuple[float, int]] = []
        self._kept_bytes = 0
        self.alarms_set = 0  # in all, so that a timer need not be looked at while none is added
        self.ended: collections.Counter[str] = collections.Counter()

    def __len__(self) -> int:
        """Requests in flight, those included that only wait for their stages to let go."""
        return len(self._by_id)

    def add(self, request: Request) -> None:
        self._by_id[request.id] = request
        if request.client is not None:
            self._by_ticket.setdefault(request.client, {})[request.ticket] = request
        self.set_alarm(request, request.deadline)

    def remove(self, request: Request) -> None:
        del self._by_id[request.id]

    def get(self, number: int) -> Request | None:
        return self._by_id.get(number)

    def all(self) -> list[Request]:
        return list(self._by_id.values())

    def queued(self) -> list[Request]:
        return [request for request in self._by_id.values() if request.state is RequestState.QUEUED]

    def of_client(self, client: bytes, ticket: int) -> Request | None:
        return self._by_ticket.get(client, {}).get(ticket)

    def all_of_client(self, client: bytes) -> list[Request]:
        return list(self._by_ticket.get(client, {}).values())

    def leave_client(self, request: Request) -> bytes | None:
        """The ticket is free; returns whose it was."""
        client, request.client = request.client, None
        if client is not None:
            tickets = self._by_ticket[client]
            del tickets[request.ticket]
            if not tickets:
                del self._by_ticket[client]
        return client

    def states(self) -> dict[str, int]:
        counts = collections.Counter(request.state.value for request in self._by_id.values())
        return {state.value: counts[state.value] for state in RequestState if state is not RequestState.ENDED}

    def count(self, outcome: str) -> None:
        known = outcome in self.ended or len(self.ended) < OUTCOMES
        self.ended[outcome if known else "failed:other"] += 1

    # ---- input kept for a retry

    def keep(self, request: Request, chunk: InputChunk) -> None:
        """Keep a chunk of input as long as a retry is possible and the bounds allow."""
        if request.kept is None:
            return
        request.kept.append(chunk)
        self._kept_bytes += chunk.nbytes
        if self._kept_bytes > KEPT_BYTES or len(request.kept) > request.entry.credits:
            self.forget_input(request)

    def forget_input(self, request: Request) -> None:
        if request.kept is not None:
            self._kept_bytes -= sum(chunk.nbytes for chunk in request.kept)
            request.kept = None

    # ---- the clock

    def set_alarm(self, request: Request, when: float) -> None:
        request.alarm = when
        self.alarms_set += 1
        heapq.heappush(self._alarms, (when, request.id))
        if len(self._alarms) > 64 + 2 * len(self._by_id):  # what ended long before its deadline must not pile up
            self._alarms = [alarm for alarm in self._alarms if self._is_live(*alarm)]
            heapq.heapify(self._alarms)

    def next_alarm(self) -> float | None:
        while self._alarms and not self._is_live(*self._alarms[0]):
            heapq.heappop(self._alarms)
        return self._alarms[0][0] if self._alarms else None

    def pop_alarm(self, now: float) -> Request | None:
        """The next request whose time has come."""
        when = self.next_alarm()
        if when is None or when > now:
            return None
        return self._by_id[heapq.heappop(self._alarms)[1]]

    def _is_live(self, when: float, number: int) -> bool:
        request = self._by_id.get(number)
        return request is not None and request.alarm == when
