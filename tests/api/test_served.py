"""The model as requests are checked against it: which voice a name means, one rule for every route that speaks."""

from __future__ import annotations

import pytest

from omni_bus.api.served import ServedModel
from omni_bus.errors import ModelRefused
from tests.api.conftest import pipeline

OPENAI = ("alloy", "ash", "ballad", "coral", "echo", "fable", "nova", "onyx", "sage", "shimmer", "verse", "marin", "cedar")


def served(*voices: str) -> ServedModel:
    spec = pipeline(frozenset({"text"}))
    return ServedModel(name="scripted", pipeline=spec, voices=voices, max_deadline_s=60, created=0)


@pytest.mark.parametrize("name", OPENAI)
def test_a_voice_of_openais_is_the_models_first(name: str) -> None:
    assert served("Ethan", "chelsie").voice(name, "voice") == "Ethan"
    assert served("Ethan", "chelsie").voice(name.upper(), "voice") == "Ethan"
    assert served().voice(name, "voice") is None, "the model's only one, which has no name"


def test_the_models_own_voice_goes_before_openais_of_that_name() -> None:
    assert served("Ethan", "Echo").voice("echo", "voice") == "Echo"


def test_a_name_in_any_case() -> None:
    assert served("Ethan", "chelsie").voice("CHELSIE", "voice") == "chelsie"


@pytest.mark.parametrize("name", ["bob", "", "alloy2", "a" * 1000])
def test_another_name_is_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(ModelRefused, match=r"^audio\.voice: .* it has Ethan, chelsie$") as refused:
        served("Ethan", "chelsie").voice(name, "audio.voice")
    assert refused.value.param == "audio.voice"
    with pytest.raises(ModelRefused, match="leave it out"):
        served().voice(name, "audio.voice")
