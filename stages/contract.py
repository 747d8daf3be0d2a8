"""The stage contract: what a worker asks of a stage and what a stage may hand back.

All calls come from one thread, the worker's engine loop. `feed`, `cancel`, `pause` and `resume` are cheap: they note what came;
work happens in `step`, one unit of batched work a call. Readiness is per row: a request that waits for input, or is paused,
leaves the batch and the batch goes on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

import msgspec

from omni_bus.errors import ErrorInfo
from omni_bus.events import RequestOptions
from omni_bus.sampling import SamplingParams

if TYPE_CHECKING:
    import torch

    from omni_bus.deployment import EdgeConfig, StageConfig
    from omni_bus.spec import PipelineSpec

OptionsT = TypeVar("OptionsT", bound=msgspec.Struct)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StageContext:
    """What a stage knows of its surroundings at load."""

    stage: str
    pipeline: PipelineSpec
    model_path: str
    device: str
    config: StageConfig  # dtype, max_batch, sampling, threads, and `options` of the stage's own type
    edges: Mapping[str, EdgeConfig]
    progress: Callable[[float, str], None]  # (fraction 0..1, what is being done)
    state_bytes: int | None = None  # of KV or slots, by the memory plan; None = nothing is known of this stage's needs

    def options(self, kind: type[OptionsT]) -> OptionsT:
        """The stage's own TOML keys as the options type that its StageSpec declares."""
        return msgspec.convert(self.config.options, kind)

    def edge_options(self, edge: str, kind: type[OptionsT]) -> OptionsT:
        """The same for an edge."""
        return msgspec.convert(self.edges[edge].options, kind)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StageRequest:
    """One request as a stage sees it. `sampling` is merged: pipeline defaults < TOML < request."""

    id: int
    options: RequestOptions
    sampling: SamplingParams
    inputs: tuple[str, ...]  # edges that will bring chunks
    outputs: tuple[str, ...]  # edges that are open; output on any other is dropped by not emitting it
    deadline: float  # time.monotonic() of this process


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk that arrived. Tensors lie in this process's memory and belong to the stage."""

    edge: str
    payload: msgspec.Struct
    tensors: Mapping[str, torch.Tensor]
    last: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
    """A chunk to send on an output edge; `last` closes the edge. Tensors are handed over: the stage does not write to them again."""

    request_id: int
    edge: str
    payload: msgspec.Struct
    tensors: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    last: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Consumed:
    """`count` more chunks that came on `edge` have been used up: their producer may send as many again."""

    request_id: int
    edge: str
    count: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Finished:
    """The request is done here: every output edge has had its last chunk and nothing of it is held any more."""

    request_id: int
    usage: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class StageError:
    """The request failed here; nothing of it is held any more. Raising from `open` or `feed` means the same for that request."""

    request_id: int
    error: ErrorInfo


Emission = Output | Consumed | Finished | StageError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StageStats:
    """A stage's figures for the heartbeat."""

    waiting: int = 0
    running: int = 0
    queued: int = 0  # work that is here and not done, where the stage can count it: prompt positions, codec frames
    per_step: int = 0  # as much of it as one step does
    batch: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    prompt_computed: int = 0  # prompt positions computed since the start
    prompt_cached: int = 0  # those whose KV was there already
    slots_used: int = 0
    slots_total: int = 0


@runtime_checkable
class RunsAhead(Protocol):
    """A stage whose device can work while the host sends what the last step gave."""

    def ahead(self) -> None:
        """Called behind each `step` and the events that came with it, before its emissions are sent: begin what the next step is to
        give, and wait for nothing. A request that is paused or cancelled meanwhile may have begun already."""


class WokenByEvents:
    """Base of stages for which time alone changes nothing."""

    def wake_at(self) -> float | None:
        return None


class Stage(Protocol):
    def load(self, ctx: StageContext) -> None:
        """Weights, graphs, warm-up; reports progress. Raises CheckpointError or DeviceUnavailable with what to do."""

    def open(self, request: StageRequest) -> None:
        """A request is coming; may be before its first chunk. OmniBusError refuses it."""

    def feed(self, request_id: int, chunk: Chunk) -> None:
        """A chunk of an open request; chunks of one edge come in order."""

    def cancel(self, request_id: int) -> None:
        """Free all that the request holds, at once. Emissions for it that are still to come are dropped. Unknown ids are ignored."""

    def pause(self, request_id: int) -> None:
        """The consumer of one of its outputs is out of credit: leave the batch until `resume`. What has begun may still be given."""

    def resume(self, request_id: int) -> None: ...

    def has_work(self) -> bool:
        """Whether `step` would do something now."""

    def wake_at(self) -> float | None:
        """time.monotonic() at which `has_work` may become true with no event in between; None = only an event can do that."""

    def step(self) -> Iterable[Emission]:
        """One unit of batched work. An exception from here fails every request open in the stage, so rows are isolated inside."""

    def stats(self) -> StageStats: ...
