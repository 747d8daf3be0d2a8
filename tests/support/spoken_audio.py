"""Real speech for tests of listening: hibari's, at the 16 kHz that models take, with silence or noise around it."""

from __future__ import annotations

import functools

import numpy
from av.audio.frame import AudioFrame
from av.audio.resampler import AudioResampler
from numpy.typing import NDArray

from omni_bus.errors import CheckpointError
from omni_bus.stages.cascade.packages import package_file
from tests.support.lacking import lacking

Samples = NDArray[numpy.float32]

RATE = 16_000
QUIET = 0.003  # amplitude below which the ends of an utterance count as silence


def skip_without_speech() -> None:
    """Skip (by hand only: lacking.py), with the reason, where the package that speaks is missing."""
    try:
        package_file("hibari")
    except CheckpointError as error:
        lacking(error.message)


@functools.cache
def _voice() -> object:
    from hibari import Hibari

    from omni_bus.stages.cascade.spec import VOICE

    return Hibari(VOICE, threads=1)


@functools.cache
def say(text: str, seed: int = 0) -> Samples:
    """float32 [samples], 16 kHz, from the first sound to the last; the same for the same seed."""
    voice = _voice()
    noise = numpy.random.default_rng(seed)
    spoken = [voice.from_ids(voice.ids(phonemes), 1.0, noise) for phonemes in voice.phonemize(text)]  # type: ignore[attr-defined]
    audio = numpy.concatenate(spoken)
    loud = numpy.flatnonzero(numpy.abs(audio) > QUIET)
    frame = AudioFrame.from_ndarray(audio[None, loud[0] : loud[-1] + 1].astype(numpy.float32), format="flt", layout="mono")
    frame.sample_rate = 24_000
    resampler = AudioResampler(format="flt", layout="mono", rate=RATE)
    parts = [*resampler.resample(frame), *resampler.resample(None)]
    samples = numpy.concatenate([part.to_ndarray()[0] for part in parts])
    samples.setflags(write=False)
    return samples


def silence(seconds: float) -> Samples:
    return numpy.zeros(int(seconds * RATE), numpy.float32)


def with_noise(samples: Samples, level: float, seed: int = 1) -> Samples:
    """White noise of that amplitude (RMS) over it."""
    noise = numpy.random.default_rng(seed).standard_normal(len(samples)).astype(numpy.float32)
    return samples + level * noise
