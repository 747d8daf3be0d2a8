"""Drives the stages of a pipeline in one process through the stage contract: no bus, no sockets; outputs are handed on as they come."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from omni_bus.deployment import EdgeConfig, StageConfig
from omni_bus.errors import ErrorInfo
from omni_bus.events import CLIENT, RequestOptions
from omni_bus.sampling import SamplingParams
from omni_bus.spec import PipelineSpec
from omni_bus.stages.contract import Chunk, Consumed, Finished, Output, Stage, StageContext, StageError, StageRequest


@dataclasses.dataclass
class Trace:
    """All that was seen of one request: chunks by edge in order, usage by stage, the first error."""

    chunks: dict[str, list[Output]] = dataclasses.field(default_factory=dict)
    consumed: dict[str, int] = dataclasses.field(default_factory=dict)
    usage: dict[str, Mapping[str, int]] = dataclasses.field(default_factory=dict)
    error: ErrorInfo | None = None
    cancelled: bool = False

    def payloads(self, edge: str) -> list[Any]:
        return [output.payload for output in self.chunks.get(edge, [])]

    def closed(self, edge: str) -> bool:
        """Whether the edge had its last chunk, as its last."""
        lasts = [output.last for output in self.chunks.get(edge, [])]
        return bool(lasts) and lasts[-1] and sum(lasts) == 1


class StagePipeline:
    def __init__(
        self,
        spec: PipelineSpec,
        model_path: str,
        stages: Sequence[str],
        *,
        options: Mapping[str, Mapping[str, Any]] | None = None,
        device: str = "cpu",
        dtype: str = "float32",
        max_batch: int = 16,
    ) -> None:
        """Loads the named stages; what is sent to another one is recorded and goes nowhere."""
        self.spec = spec
        self.stages: dict[str, Stage] = {}
        self.traces: dict[int, Trace] = {}
        self._sampling = {stage.name: stage.sampling or SamplingParams() for stage in spec.stages}
        edges = {edge.name: EdgeConfig(credits=edge.credits) for edge in spec.edges}
        for name in stages:
            one = spec.stage(name)
            stage = one.factory()
            config = StageConfig(
                devices=(device,), dtype=dtype, max_batch=max_batch, options=dict((options or {}).get(name, {}))
            )
            stage.load(
                StageContext(
                    stage=name,
                    pipeline=spec,
                    model_path=model_path,
                    device=device if name != "processor" else "cpu",
                    config=config,
                    edges=edges,
                    progress=lambda fraction, detail: None,
                )
            )
            self.stages[name] = stage

    def submit(
        self,
        request_id: int,
        payload: Any,
        tensors: Mapping[str, torch.Tensor] | None = None,
        *,
        options: RequestOptions | None = None,
    ) -> Trace:
        """Opens the request at every active stage and brings its first chunk; refusals are in the trace."""
        options = options or RequestOptions()
        trace = self.traces[request_id] = Trace()
        edges = self.spec.active_edges(options.modalities)
        for stage in self.spec.active_stages(options.modalities):
            if stage.name not in self.stages:
                continue
            request = StageRequest(
                id=request_id,
                options=options,
                sampling=self._sampling[stage.name].merged(options.sampling.get(stage.name, SamplingParams())),
                inputs=tuple(edge.name for edge in edges if edge.target == stage.name),
                outputs=tuple(edge.name for edge in edges if edge.source == stage.name),
                deadline=time.monotonic() + 300,
            )
            self._guard(request_id, lambda stage=stage, request=request: self.stages[stage.name].open(request))
        self._deliver(Output(request_id, self.spec.entry.name, payload, tensors or {}, last=True))
        return trace

    def cancel(self, request_id: int) -> None:
        self.traces[request_id].cancelled = True
        for stage in self.stages.values():
            stage.cancel(request_id)

    def step(self) -> bool:
        """One step of every stage that has work; False when none had."""
        worked = False
        for name, stage in self.stages.items():
            if stage.has_work():
                worked = True
                self._handle(name, stage.step())
        return worked

    def run(self) -> None:
        while self.step():
            pass

    def _handle(self, name: str, emissions: Iterable[Any]) -> None:
        for emission in emissions:
            trace = self.traces[emission.request_id]
            if trace.cancelled:
                continue
            if isinstance(emission, Output):
                self._deliver(emission)
            elif isinstance(emission, Finished):
                assert name not in trace.usage, "a stage finished twice"
                trace.usage[name] = emission.usage
            elif isinstance(emission, StageError):
                trace.error = trace.error or emission.error
            elif isinstance(emission, Consumed):
                trace.consumed[emission.edge] = trace.consumed.get(emission.edge, 0) + emission.count

    def _deliver(self, output: Output) -> None:
        trace = self.traces[output.request_id]
        sent = trace.chunks.setdefault(output.edge, [])
        assert not any(chunk.last for chunk in sent), f"a chunk on {output.edge} after the last one"
        sent.append(output)
        target = self.spec.edge(output.edge).target
        if target == CLIENT or target not in self.stages or trace.error is not None:
            return
        chunk = Chunk(output.edge, output.payload, output.tensors, output.last)
        self._guard(output.request_id, lambda: self.stages[target].feed(output.request_id, chunk))

    def _guard(self, request_id: int, call: Any) -> None:
        """What the worker does with an error of open or feed: it fails the request."""
        from omni_bus.errors import OmniBusError

        trace = self.traces[request_id]
        if trace.error is not None:
            return
        try:
            call()
        except OmniBusError as error:
            trace.error = error.info()
            for stage in self.stages.values():
                stage.cancel(request_id)
