"""The model this server serves, as requests are checked against it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection

from omni_bus.api.http_errors import ModelNotFound
from omni_bus.deployment import Deployment
from omni_bus.errors import ModelRefused
from omni_bus.spec import PipelineSpec

# Stock clients name one of these without being asked to, and some cannot leave it out: it means any voice, so the model's first.
_OPENAI_VOICES = frozenset(
    {"alloy", "ash", "ballad", "cedar", "coral", "echo", "fable", "marin", "nova", "onyx", "sage", "shimmer", "verse"}
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedModel:
    name: str
    pipeline: PipelineSpec
    voices: tuple[str, ...]  # the first is the default
    max_deadline_s: float
    created: int  # Unix time

    @classmethod
    def of(cls, deployment: Deployment, pipeline: PipelineSpec) -> ServedModel:
        return cls(
            name=deployment.model_name,
            pipeline=pipeline,
            voices=pipeline.voices(deployment.model.path),
            max_deadline_s=deployment.api.deadline_s,
            created=int(time.time()),
        )

    @property
    def generating_stages(self) -> tuple[str, ...]:
        """In pipeline order: what `sampling` may name and `sampling_params_list` follows."""
        return tuple(stage.name for stage in self.pipeline.stages if stage.sampling is not None)

    def check_name(self, name: str) -> None:
        if name != self.name:
            raise ModelNotFound(f"this server has no model of that name; it serves {self.name!r}", param="model")

    def check_makes(self, modalities: Collection[str], param: str) -> None:
        """Raises ModelRefused for an output that it does not make."""
        refused = set(modalities) - self.pipeline.output_modalities
        if refused:
            offered = ", ".join(sorted(self.pipeline.output_modalities))
            raise ModelRefused(f"this model does not make {', '.join(sorted(refused))}; it makes {offered}", param=param)

    def check_takes(self, kind: str, param: str) -> None:
        """Raises ModelRefused for an input that it does not take."""
        if kind not in self.pipeline.input_kinds:
            taken = ", ".join(sorted(self.pipeline.input_kinds))
            raise ModelRefused(f"this model does not take {kind}; it takes {taken}", param=param)

    def voice(self, name: str, param: str) -> str | None:
        """The voice of that name, written in whatever case, as the model writes it. One of OpenAI's that it has not is its first, or
        None where it names none. ModelRefused for any other name."""
        by_folded = {voice.casefold(): voice for voice in self.voices}
        if (found := by_folded.get(name.casefold())) is not None:
            return found
        if name.casefold() in _OPENAI_VOICES:
            return self.voices[0] if self.voices else None
        offered = ", ".join(self.voices) or "none to choose from: leave it out"
        raise ModelRefused(f"{param}: this model has no such voice; it has {offered}", param=param)
