"""What several folders' tests need: a tiny random Qwen3-Omni checkpoint, our stages on it, and transformers' model on it."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest
import torch

from omni_bus.spec import load_pipeline
from tests.support.qwen3_omni import CASES, Expected, Reference
from tests.support.stage_pipeline import StagePipeline


@pytest.fixture(scope="session")
def omni_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    from omni_bus.stages.qwen3_omni import fixture

    directory = tmp_path_factory.mktemp("qwen3_omni") / "tiny"
    fixture.write(directory, "tiny", 2, lambda fraction, detail: None)
    return directory


@pytest.fixture(scope="session")
def omni_pipeline(omni_checkpoint: pathlib.Path) -> StagePipeline:
    """Processor, Thinker and Talker; the Talker's frames are recorded."""
    torch.set_num_threads(1)
    return StagePipeline(load_pipeline("qwen3_omni"), str(omni_checkpoint), ("processor", "thinker", "talker"))


@pytest.fixture(scope="session")
def reference(omni_checkpoint: pathlib.Path, omni_pipeline: StagePipeline) -> Reference:
    torch.set_num_threads(1)
    return Reference(omni_checkpoint, omni_pipeline)


@pytest.fixture(scope="session")
def greedy(reference: Reference) -> Callable[[str], Expected]:
    """transformers' greedy answer to a case of CASES, made once."""
    made: dict[str, Expected] = {}

    def expected(name: str) -> Expected:
        if name not in made:
            made[name] = reference.generate(CASES[name])
        return made[name]

    return expected
