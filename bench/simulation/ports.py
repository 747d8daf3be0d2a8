"""What the parts of the simulation ask of each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from omni_bus import events

if TYPE_CHECKING:
    from bench.simulation.answers import Answer


class Bus(Protocol):
    """The broker, to a worker."""

    def send(self, worker: str, said: Sequence[events.Event]) -> None:
        """Events that the real orchestrator is to see, in order. To be called from within `hand_over`'s action only."""

    def hand_over(self, count: float, action: Callable[..., None], *arguments: Any) -> None:
        """`count` events go through the broker; the action is what their receivers do when they come."""


class Stage(Protocol):
    """A stage's replica, to whoever hands it something."""

    worker: str  # its process's name

    def open(self, answer: Answer, options: events.RequestOptions) -> None: ...
    def take(self, answer: Answer) -> None:
        """There is something new for that answer; `look` follows."""

    def look(self) -> None:
        """Begin a step if there is work and none is under way."""

    def drop(self, answer: Answer) -> None: ...
