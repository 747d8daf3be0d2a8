"""Each stage of the cascade is loaded once for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.support.cascade import Driver, microphone, skip_without_packages


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def asr() -> Driver:
    skip_without_packages()
    return Driver("asr")


@pytest.fixture(scope="session")
def llm() -> Driver:
    skip_without_packages()
    return Driver("llm")


@pytest.fixture(scope="session")
def tts() -> Driver:
    skip_without_packages()
    return Driver("tts")


@pytest.fixture(scope="session")
def speech() -> Callable[[str], torch.Tensor]:
    """Text → what a microphone would have recorded: float32 [samples], mono, 16 kHz."""
    skip_without_packages()
    import hibari

    voice = hibari.Hibari()
    return lambda text: microphone(torch.from_numpy(voice(text, seed=0)))
