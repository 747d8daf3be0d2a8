"""Streams of a card, each with one user: torch deals out the same 32 in turn, and a process of several stages asks for more.

Two users of one stream would wait for each other, and where one captures a graph the other's work would become part of it.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch

TRIES = 128  # torch has 32 of a priority

_lock = threading.RLock()  # a user's end may be found in the middle of a call here
_taken: set[int] = set()  # handles


def take_stream(device: torch.device | str, user: object) -> Any:
    """A torch.cuda.Stream that nobody has, for as long as `user` lives. RuntimeError where all are taken."""
    with _lock:
        for _ in range(TRIES):
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call, unused-ignore]
            handle: int = stream.cuda_stream
            if handle not in _taken:
                _taken.add(handle)
                weakref.finalize(user, _give_back, handle).atexit = False
                return stream
    raise RuntimeError("every stream of the card has a user already")


def _give_back(handle: int) -> None:
    with _lock:
        _taken.discard(handle)
