"""The check of whole answers, tried without a card: the engine's two forms on a tiny model in bfloat16, and that a wrong form is found."""

from __future__ import annotations

import pytest
import torch

from bench.gpu_checks import whole
from omni_bus.stages.ar.program import StepTensors
from omni_bus.stages.qwen3_omni.talker import TalkerProgram
from omni_bus.stages.qwen3_omni.thinker import ThinkerProgram


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(whole, "STEPS", 6)


def test_the_thinkers_forms_differ_by_rounding() -> None:
    assert "18 positions, 5 layers" in whole.thinker("tiny", "cpu", whole.STEPPED)


def test_the_talkers_forms_differ_by_rounding() -> None:
    assert "15 frames of 16 codes" in whole.talker("tiny", "cpu", whole.STEPPED)


def test_code2wavs_forms_differ_by_rounding() -> None:
    assert "samples: off from float32" in whole.code2wav("tiny", "cpu", "plain", frames=12)


def test_states_that_are_off_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ThinkerProgram.graph_embed

    def wrong(program: ThinkerProgram, step: StepTensors) -> torch.Tensor:
        return 1.5 * right(program, step)

    monkeypatch.setattr(ThinkerProgram, "graph_embed", wrong)
    with pytest.raises(AssertionError, match="times that is allowed"):
        whole.thinker("tiny", "cpu", whole.STEPPED)


def test_codes_that_no_rounding_explains_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = TalkerProgram.graph_output

    def wrong(program: TalkerProgram, hidden: torch.Tensor, step: StepTensors) -> tuple[torch.Tensor, torch.Tensor | None]:
        frame, scores = right(program, hidden, step)
        frame[:, 9] = (frame[:, 9] + 1) % 64
        return frame, scores

    monkeypatch.setattr(TalkerProgram, "graph_output", wrong)
    with pytest.raises(AssertionError, match="code 9 of frame 0"):
        whole.talker("tiny", "cpu", whole.STEPPED)
