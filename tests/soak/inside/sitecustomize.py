"""Python runs it when it starts, where PYTHONPATH names this directory: real-time signals then make the next step fail, or free memory.

| signal | what the process does |
| --- | --- |
| SIGRTMIN + 1 | its next step with a request in it never returns, and holds the interpreter |
| SIGRTMIN + 2 | every layer of that step raises, from the third on, and so does the step |
| SIGRTMIN + 3 | the same with torch.OutOfMemoryError |
| SIGRTMIN + 4 | gives back to the system what its allocator only keeps (malloc_trim) |
"""

import ctypes
import signal
import sys

HANG, RAISE, NO_MEMORY, TRIM = (signal.SIGRTMIN + number for number in range(1, 5))
LAYERS = 2  # that go well, so that the step has begun to change what the stage holds


def in_next_step(number, frame):
    """Only a worker has steps; any other process ignores it."""
    host = sys.modules.get("omni_bus.workers.host")
    if host is None:
        return
    real = host.StageHost.step

    def step(self):
        if not self._rows or not self._stage.has_work():
            return real(self)
        host.StageHost.step = real
        if number == HANG:
            hang()
        return failing(real, self, number)

    host.StageHost.step = step


def hang():
    while True:
        pass


def failing(step, host, number):
    import torch

    kind = torch.OutOfMemoryError if number == NO_MEMORY else RuntimeError
    whole, stage_step, calls = torch.nn.Module.__call__, host._stage.step, 0

    def call(self, *said, **named):
        nonlocal calls
        calls += 1
        if calls > LAYERS:
            raise kind("a layer was told to fail")
        return whole(self, *said, **named)

    def raising():
        yield from stage_step()
        raise kind("a step was told to fail")

    torch.nn.Module.__call__, host._stage.step = call, raising
    try:
        return step(host)
    finally:
        torch.nn.Module.__call__ = whole
        del host._stage.step


def trim(number, frame):
    ctypes.CDLL(None).malloc_trim(0)


for wanted in (HANG, RAISE, NO_MEMORY):
    signal.signal(wanted, in_next_step)
signal.signal(TRIM, trim)
