"""Which replica serves each stage of a request, and which connector each of its edges uses. No I/O, no clock."""

from __future__ import annotations

from omni_bus import events, routing
from omni_bus.admission import Admission
from omni_bus.affinity import Affinity
from omni_bus.deployment import Deployment
from omni_bus.events import CLIENT
from omni_bus.registry import Registry, Replica
from omni_bus.request import Edge, Request
from omni_bus.spec import PipelineSpec


class Binder:
    def __init__(self, pipeline: PipelineSpec, deployment: Deployment, registry: Registry) -> None:
        self._pipeline = pipeline
        self._config = deployment.edges
        self._all_auto = all(edge.connector == "auto" for edge in deployment.edges.values())  # works between any two
        self._registry = registry
        self._affinity = Affinity()

    def edges(self, modalities: tuple[str, ...]) -> dict[str, Edge]:
        """Fresh edges for a request of these output modalities."""
        active = self._pipeline.active_edges(modalities)
        return {edge.name: Edge(edge.name, edge.source, edge.target, self._config[edge.name].credits) for edge in active}

    def client_credits(self) -> dict[str, int]:
        """Credits of the edges to and from the client."""
        ends = (edge.name for edge in self._pipeline.edges if CLIENT in (edge.source, edge.target))
        return {name: self._config[name].credits for name in ends}

    def missing(self, request: Request) -> str | None:
        """A stage of the request that has no ready replica."""
        return next((stage for stage in request.stages if not self._registry.ready_replicas(stage)), None)

    def choose(self, request: Request, admission: Admission | None) -> dict[str, Replica] | str:
        """A ready replica for every stage of the request, with room for it where that matters, or the stage that has none."""
        key, options = request.options.affinity, request.options

        def fits(replica: Replica, chosen: dict[str, Replica]) -> bool:
            return (admission is None or admission.has_room(replica, options)) and (
                self._all_auto or self._fits(request, replica, chosen)
            )

        chosen = routing.choose(self._registry, self._affinity, request.stages, key, fits)
        if not isinstance(chosen, str):
            self._affinity.note(key, chosen)
        return chosen

    def open(self, request: Request, stage: str, now: float) -> events.Open:
        """What the replica bound for `stage` has to know of the request."""
        return events.Open(
            request=request.id,
            stage=stage,
            options=request.options,
            deadline_s=request.deadline - now,
            inputs=tuple(edge.name for edge in request.inputs(stage)),
            outputs=tuple(self._route(edge, request.bindings) for edge in request.outputs(stage)),
        )

    def _fits(self, request: Request, replica: Replica, chosen: dict[str, Replica]) -> bool:
        """Whether the connectors that the configuration forces work between `replica` and those chosen already."""
        return all(
            replica.can(self._config[edge.name].connector, chosen[other])
            for edge in request.edges.values()
            for end, other in ((edge.source, edge.target), (edge.target, edge.source))
            if end == replica.stage and other in chosen
        )

    def _route(self, edge: Edge, bindings: dict[str, Replica]) -> events.EdgeRoute:
        connector = self._connector(edge, bindings)
        return events.EdgeRoute(
            edge.name, connector, edge.credits, bindings[edge.target].worker.data if connector == "tcp" else ""
        )

    def _connector(self, edge: Edge, bindings: dict[str, Replica]) -> str:
        if edge.target == CLIENT:
            return "inline"
        forced = self._config[edge.name].connector
        return bindings[edge.source].reach(bindings[edge.target]) if forced == "auto" else forced
