"""Voice activity: silero's ONNX model, one session a process, one small state a stream."""

from __future__ import annotations

import numpy
from numpy.typing import NDArray

FRAME = 512  # samples at 16 kHz: 32 ms
FRAME_MS = 32


class VadState:
    """What the model remembers of one stream."""


class Vad:
    """The model. Thread-safe; states are not."""

    @classmethod
    def load(cls) -> Vad:
        """The process's one model, loaded at the first call (some 50 ms).

        Raises ModelRefused, which says what to install, where onnxruntime or silero-vad is missing.
        """
        raise NotImplementedError

    def probability(self, frame: NDArray[numpy.float32], state: VadState) -> float:
        """That there is speech in this frame, float32 [512] at 16 kHz, which follows the frames `state` has seen."""
        raise NotImplementedError
