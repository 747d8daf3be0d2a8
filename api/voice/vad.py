"""Voice activity: silero's ONNX model, one session a process, one small state a stream."""

from __future__ import annotations

import functools
import importlib.util
import pathlib
import threading
from typing import TYPE_CHECKING

import numpy
from numpy.typing import NDArray

from omni_bus.api.voice.items import SAMPLE_RATE
from omni_bus.errors import ModelRefused

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

FRAME = 512  # samples at 16 kHz: 32 ms

_CONTEXT = 64  # samples of the frame before that the model is given with each frame
_MODEL = "data/silero_vad.onnx"
_INSTALL = "pip install onnxruntime && pip install --no-deps silero-vad==6.2.3"
_RATE = numpy.array(SAMPLE_RATE, numpy.int64)
_loading = threading.Lock()


class VadState:
    """What the model remembers of one stream: its recurrent state and the end of the last frame. Under 2 kB."""

    __slots__ = ("context", "recurrent")

    def __init__(self) -> None:
        self.recurrent = numpy.zeros((2, 1, 128), numpy.float32)
        self.context = numpy.zeros(_CONTEXT, numpy.float32)


class Vad:
    """The model. Thread-safe; states are not."""

    def __init__(self, session: InferenceSession) -> None:
        self._session = session

    @classmethod
    def load(cls) -> Vad:
        """The process's one model, loaded at the first call (about a quarter of a second: call it in a thread).

        Raises ModelRefused, which says what to install, where onnxruntime or silero-vad is missing.
        """
        with _loading:
            return _loaded()

    def probability(self, frame: NDArray[numpy.float32], state: VadState) -> float:
        """That there is speech in this frame, float32 [512] at 16 kHz, which follows the frames `state` has seen."""
        heard = numpy.concatenate([state.context, frame])
        probability, state.recurrent = self._session.run(None, {"input": heard[None], "state": state.recurrent, "sr": _RATE})
        state.context = heard[-_CONTEXT:]
        return float(probability[0, 0])


@functools.cache
def _loaded() -> Vad:
    model = model_file()
    try:
        import onnxruntime
    except ImportError:
        raise _missing("onnxruntime") from None
    options = onnxruntime.SessionOptions()
    options.inter_op_num_threads = options.intra_op_num_threads = 1  # a frame is a fifth of a millisecond of one core
    options.log_severity_level = 3
    return Vad(onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"]))


def model_file() -> pathlib.Path:
    """Found without importing its package, which would load torch. Raises ModelRefused where it is missing."""
    spec = importlib.util.find_spec("silero_vad")
    path = pathlib.Path(spec.origin).parent / _MODEL if spec is not None and spec.origin is not None else None
    if path is None or not path.is_file():
        raise _missing("silero-vad")
    return path


def _missing(package: str) -> ModelRefused:
    return ModelRefused(
        f"turn detection needs the package {package} on the server: {_INSTALL}; or set turn_detection to null",
        code="turn_detection_unavailable",
        param="session.audio.input.turn_detection",
    )
