"""The model this server serves, as requests are checked against it."""

from __future__ import annotations

import dataclasses
import time

from omni_bus.api.http_errors import ModelNotFound
from omni_bus.deployment import Deployment
from omni_bus.spec import PipelineSpec


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
