"""A drain for good holds at the broker that said it: a worker that comes back to the next one serves there as any other."""

from __future__ import annotations

import pathlib

from omni_bus import events, wire
from omni_bus.config import load_deployment
from omni_bus.connectors.cuda_ipc import CudaIpcConnector
from omni_bus.connectors.select import Connectors
from omni_bus.connectors.tcp import TcpConnector
from omni_bus.spec import load_pipeline
from omni_bus.workers.worker import Worker

CONFIG = pathlib.Path(__file__).parents[2] / "configs" / "probe.toml"


def test_the_next_broker_has_taken_nobody_away() -> None:
    sent: list[events.Event] = []
    connectors = Connectors("dismissal", cuda_ipc=CudaIpcConnector("dismissal"), tcp=TcpConnector())
    worker = Worker(
        "relay@far-1.0",
        load_deployment(CONFIG),
        load_pipeline("probe"),
        connectors,
        lambda event, frames: sent.append(event),
        seat="relay.0",
    )
    try:
        worker.message([wire.encode(events.Drain())])
        assert not worker.dismissed
        worker.message([wire.encode(events.Drain(for_good=True))])
        assert worker.dismissed
        worker.broker_lost()
        assert [type(event) for event in sent] == [events.Register]
        worker.message([wire.encode(events.Shutdown())])
        assert worker.leaving and not worker.dismissed
    finally:
        connectors.close()
