"""A server whose Thinker has its experts in FP8: text and speech over HTTP are those of the same stages without a server."""

from __future__ import annotations

import pathlib

import numpy as np
import torch

from omni_bus.spec import load_pipeline
from tests.support.chat_http import messages, stream
from tests.support.qwen3_omni import CASES, MAX_FRAMES, MAX_TEXT, options
from tests.support.running_server import running
from tests.support.stage_pipeline import StagePipeline

STAGES = ("processor", "thinker", "talker", "code2wav")
SAID = {"thinker": {"weights": "fp8"}}


def test_text_and_speech_through_the_server(omni_checkpoint: pathlib.Path) -> None:
    torch.set_num_threads(1)
    pipeline = StagePipeline(load_pipeline("qwen3_omni"), str(omni_checkpoint), STAGES, options=SAID)
    sets = [f"model.path={omni_checkpoint}", "model.name=tiny-omni", "stages.thinker.weights=fp8"]
    sets += [f"stages.{stage}.threads=1" for stage in STAGES]
    with running("qwen3_omni_tiny.toml", sets=sets) as server:
        for index, name in enumerate(("text", "image_audio")):
            trace = pipeline.submit(index, *CASES[name].chat(), options=options())
            pipeline.run()
            assert trace.error is None
            text = "".join(delta.text for delta in trace.payloads("thinker->client"))
            chunks = [output.tensors["pcm"].numpy() for output in trace.chunks["code2wav->client"] if output.tensors]
            spoken = np.concatenate(chunks)
            answer = stream(
                server.url,
                {
                    "model": "tiny-omni",
                    "messages": messages(CASES[name]),
                    "modalities": ["text", "audio"],
                    "audio": {"voice": "ethan", "format": "pcm16"},
                    "sampling": {
                        "thinker": {"temperature": 0.0, "max_tokens": MAX_TEXT},
                        "talker": {"temperature": 0.0, "max_tokens": MAX_FRAMES},
                    },
                },
            )
            assert not answer.errors and text and answer.text == text
            assert len(answer.pcm) == len(spoken) > 0
            # In float32 a sample may round otherwise with the pieces it is decoded in.
            assert int(np.abs(answer.pcm.astype(int) - spoken).max()) <= 1
