"""What all voice sessions of a server share."""

from __future__ import annotations

import dataclasses
from concurrent.futures import Executor

from omni_bus.api.bus import Bus
from omni_bus.api.media_fetch import MediaFetcher
from omni_bus.api.metrics import Metrics
from omni_bus.api.served import ServedModel
from omni_bus.deployment import ApiConfig
from omni_bus.events import CLIENT
from omni_bus.payloads import AudioDelta


@dataclasses.dataclass(frozen=True, kw_only=True)
class VoiceServices:
    bus: Bus
    model: ServedModel
    config: ApiConfig
    metrics: Metrics
    fetcher: MediaFetcher
    threads: Executor

    @property
    def audio_edges(self) -> frozenset[str]:
        """Edges on which answers are spoken to a client."""
        edges = self.model.pipeline.edges
        return frozenset(edge.name for edge in edges if edge.target == CLIENT and edge.payload is AudioDelta)
