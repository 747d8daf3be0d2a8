"""bench/host_frame.py carries every frame of every row from Talker to Code2Wav, with nothing but the model left out."""

from __future__ import annotations

import torch

from bench.bare_stages import checkpoint, prompts
from bench.host_frame import PROMPT, measure
from omni_bus.stages.qwen3_omni.payloads import TalkerPrompt


@torch.no_grad()
def test_every_frame_passes_both_stages() -> None:
    torch.set_num_threads(1)
    with checkpoint("tiny") as path:
        payload = prompts(path)[PROMPT][1].payload
        assert isinstance(payload, TalkerPrompt)
        found = measure(path, payload, rows=3, frames=6, rounds=2)
    assert found["rows"] == 3 and found["talker_us"] > 0 and found["code2wav_us"] > 0
