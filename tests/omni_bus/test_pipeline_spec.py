"""What a PipelineSpec says of itself: which stages a request passes, and what it may ask for."""

from __future__ import annotations

import dataclasses

import pytest

from omni_bus.spec import TRANSCRIPT, load_pipeline, pipeline_names


def test_a_transcript_passes_the_recogniser_alone() -> None:
    cascade = load_pipeline("cascade")
    assert [stage.name for stage in cascade.active_stages((TRANSCRIPT,))] == ["asr"]
    assert [edge.name for edge in cascade.active_edges((TRANSCRIPT,))] == ["client->asr", "asr->client"]
    assert [stage.name for stage in cascade.active_stages(("text",))] == ["asr", "llm"]
    assert [stage.name for stage in cascade.active_stages(("audio",))] == ["asr", "llm", "tts"]


@pytest.mark.parametrize("name", pipeline_names())
def test_a_transcript_may_be_asked_for_where_there_is_a_recogniser(name: str) -> None:
    pipeline = load_pipeline(name)
    assert (TRANSCRIPT in pipeline.asked_modalities) == (pipeline.transcript_edge is not None) == (name == "cascade")
    assert pipeline.asked_modalities - {TRANSCRIPT} == pipeline.output_modalities


def test_a_recogniser_that_cannot_be_asked_alone_is_a_mistake_in_the_topology() -> None:
    with pytest.raises(AssertionError, match="it hears alone"):
        dataclasses.replace(
            load_pipeline("probe"),
            transcript_edge="source->client",
            stages=(*(dataclasses.replace(stage, modalities=frozenset()) for stage in load_pipeline("probe").stages),),
        )
