"""PipelineSpec: which stages a model family has, which edges join them, what each edge carries. Topology is code; the TOML places it.

A family is one folder in `stages/` whose `spec.py` holds `PIPELINE = PipelineSpec(...)` and imports no torch: broker, API and
`omni-bus check` read it. `load_pipeline` finds it by the folder's name; nothing else has to be told of a new one.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import pkgutil
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import msgspec

from omni_bus.errors import ConfigError
from omni_bus.events import CLIENT
from omni_bus.sampling import SamplingParams

if TYPE_CHECKING:
    from omni_bus.deployment import Deployment, StageConfig
    from omni_bus.memory import StageNeed
    from omni_bus.stages.contract import Stage


TRANSCRIPT = "transcript"  # the modality of a request for what a recogniser hears, and nothing else


class NoOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options type of a stage or edge that has none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageSpec:
    """One stage. `factory` imports the implementation when called, inside a worker only."""

    name: str
    factory: Callable[[], Stage]
    modalities: frozenset[str] = frozenset()  # outputs it is needed for; empty = every request passes it
    sampling: SamplingParams | None = None  # defaults of a generating stage; None = it does not sample
    options: type[msgspec.Struct] = NoOptions  # keys of [stages.NAME] beyond the common ones, with their defaults
    device: str = "cpu"  # default of `devices`
    max_batch: int = 16
    cpu_only: bool = False  # any other device in `devices` is refused
    unused: frozenset[str] = frozenset()  # common keys of [stages.NAME] that change nothing in this stage: refused where said


@dataclasses.dataclass(frozen=True, kw_only=True)
class EdgeSpec:
    """One edge, named "source->target". `payload` is the Struct its chunks carry; `credits` bounds the unconsumed ones."""

    source: str
    target: str
    payload: type[msgspec.Struct]
    credits: int = 64
    options: type[msgspec.Struct] = NoOptions  # keys of [edges."a->b"] beyond `connector` and `credits`

    @property
    def name(self) -> str:
        return f"{self.source}->{self.target}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelineSpec:
    """A model family's graph. The text stage is the one that OpenAI's top-level sampling fields speak of."""

    name: str
    stages: tuple[StageSpec, ...]  # in pipeline order: `sampling_params_list` follows it over the generating ones
    edges: tuple[EdgeSpec, ...]
    text_stage: str
    input_kinds: frozenset[str]  # of "text", "audio", "image", "video"
    output_modalities: frozenset[str]  # of "text", "audio"
    voices: Callable[[str], tuple[str, ...]]  # model path → voices, the first is the default
    # InputTranscript of a speech recogniser that a request for the modality "transcript" passes alone; None = there is none
    transcript_edge: str | None = None
    # model path, stages as placed → CheckpointError with what to do; reads no tensor data, imports no torch
    check_model: Callable[[str, Mapping[str, StageConfig]], None]
    needs: Callable[[Deployment], dict[str, StageNeed]] | None = None  # stage → memory; read from the configuration, no torch

    def __post_init__(self) -> None:
        names = [stage.name for stage in self.stages]
        assert len(set(names)) == len(names) and CLIENT not in names
        assert len({edge.name for edge in self.edges}) == len(self.edges)
        for edge in self.edges:
            assert {edge.source, edge.target} <= {*names, CLIENT}, edge.name
        assert sum(edge.source == CLIENT for edge in self.edges) == 1, "one entry edge"
        assert self.text_stage in names
        if self.transcript_edge is not None:
            passed = self.active_stages((TRANSCRIPT,))
            assert [stage.name for stage in passed] == [self.edge(self.transcript_edge).source], "it hears alone"

    def stage(self, name: str) -> StageSpec:
        return next(stage for stage in self.stages if stage.name == name)

    def edge(self, name: str) -> EdgeSpec:
        return next(edge for edge in self.edges if edge.name == name)

    @property
    def entry(self) -> EdgeSpec:
        return next(edge for edge in self.edges if edge.source == CLIENT)

    @property
    def asked_modalities(self) -> frozenset[str]:
        """What a request on the bus may ask for: "transcript" beside the outputs, where a recogniser can be asked alone."""
        return self.output_modalities | (frozenset() if self.transcript_edge is None else {TRANSCRIPT})

    def active_stages(self, modalities: tuple[str, ...]) -> tuple[StageSpec, ...]:
        """The stages a request for these output modalities passes."""
        wanted = frozenset(modalities)
        return tuple(stage for stage in self.stages if not stage.modalities or stage.modalities & wanted)

    def active_edges(self, modalities: tuple[str, ...]) -> tuple[EdgeSpec, ...]:
        """The edges with both ends active."""
        ends = {stage.name for stage in self.active_stages(modalities)} | {CLIENT}
        return tuple(edge for edge in self.edges if edge.source in ends and edge.target in ends)


def pipeline_names() -> list[str]:
    """Folders of `stages/` that hold a `spec` module."""
    stages = importlib.import_module("omni_bus.stages")
    return sorted(
        info.name
        for info in pkgutil.iter_modules(stages.__path__)
        if info.ispkg and importlib.util.find_spec(f"omni_bus.stages.{info.name}.spec") is not None
    )


def load_pipeline(name: str) -> PipelineSpec:
    """The registered PipelineSpec of that name; ConfigError names the nearest one otherwise."""
    from omni_bus.names import did_you_mean

    names = pipeline_names()
    if name not in names:
        raise ConfigError(f"unknown pipeline {name!r}{did_you_mean(name, names)}")
    spec = importlib.import_module(f"omni_bus.stages.{name}.spec").PIPELINE
    assert isinstance(spec, PipelineSpec) and spec.name == name
    return spec
