"""From a function without arguments, which reads and writes tensors of fixed address, to one CUDA graph."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from omni_bus.stages.streams import take_stream

_WARM_UPS = 2  # the first compiles kernels and allocates workspaces; the second finds both there

# Stages of one process may capture in threads of their own. Whatever breaks another's capture is done with this held: a wait for the
# whole device (each capture begins with one), memory given back to the device, numbers drawn from the device's own generator.
device_alone = threading.Lock()

T = TypeVar("T")


class Capture:
    """One for all graphs of a stage: they share their memory, since the stage runs one at a time and its results are used at once.

    Capture the largest first: the others fit into its memory. On the CPU, or with `captures` off, a function is its own replay.
    """

    def __init__(self, device: torch.device, *, captures: bool) -> None:
        self.device = device
        self.captures = captures and device.type == "cuda"
        self._stream: Any = None
        self._pool: Any = None

    @torch.no_grad()
    def __call__(self, forward: Callable[[], T]) -> Callable[[], T]:
        """`forward`, run and captured → what runs it again, and gives the same tensors each time."""
        if not self.captures:
            forward()
            return forward
        if self._stream is None:
            gc.collect()
            gc.freeze()  # what is loaded stays: each capture begins with a collection
            self._stream = take_stream(self.device, self)
            self._pool = torch.cuda.graph_pool_handle()
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        mode = "thread_local"  # stages in other threads of the process go on working meanwhile
        with device_alone:  # the warm-ups as well: what one thread compiles, another may not compile at the same time
            with torch.cuda.stream(self._stream):
                for _ in range(_WARM_UPS):
                    forward()
            self._stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode=mode):
                result = forward()
        current.wait_stream(self._stream)

        def replay() -> T:
            graph.replay()
            return result

        return replay
