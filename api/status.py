"""How the server stands: /health, /ready, /v1/status, /metrics."""

from __future__ import annotations

import asyncio

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from omni_bus.api.errors_render import error_body
from omni_bus.api.keys import BUS, METRICS, MODEL
from omni_bus.api.models import json_response
from omni_bus.errors import NoReadyReplica, OmniBusError, ShuttingDown
from omni_bus.events import Status

BROKER_S = 2.0  # for the broker to say how it stands


async def _broker_status(request: web.Request) -> Status:
    """Raises ShuttingDown where the broker does not answer."""
    try:
        async with asyncio.timeout(BROKER_S):
            return await request.app[BUS].status()
    except TimeoutError:
        raise ShuttingDown("the broker does not answer") from None


async def health(request: web.Request) -> web.Response:
    """This process lives."""
    return json_response({"status": "ok"})


async def ready(request: web.Request) -> web.Response:
    """200 when every stage has a ready replica; otherwise 503 with the missing stages."""
    error: OmniBusError
    try:
        seen = await _broker_status(request)
        missing = list(seen.missing)
        if not missing and not seen.stopping:
            return json_response({"ready": True, "missing": []})
        error = NoReadyReplica(f"these stages have no ready replica: {', '.join(missing)}")
        if seen.stopping:
            error = ShuttingDown("the server is shutting down")
    except ShuttingDown as gone:
        missing, error = [stage.name for stage in request.app[MODEL].pipeline.stages], gone
    return json_response({"ready": False, "missing": missing, **error_body(error)}, error.status, {"Retry-After": "2"})


async def status(request: web.Request) -> web.Response:
    return json_response(await standing(request))


async def standing(request: web.Request) -> dict[str, object]:
    """The broker's view: stages, replicas, requests; and what listeners noticed of the last answers. Raises ShuttingDown."""
    seen = await _broker_status(request)
    model = request.app[MODEL]
    body = msgspec.to_builtins(seen)
    for internal in ("t", "query"):
        body.pop(internal, None)
    replicas = body.pop("replicas")
    stages = [
        {
            "name": stage.name,
            "ready": stage.name not in seen.missing,
            "replicas": [replica for replica in replicas if replica["stage"] == stage.name],
        }
        for stage in model.pipeline.stages
    ]
    edges = [edge.name for edge in model.pipeline.edges]
    # Where several processes share their figures this reads all of their files.
    recent = await asyncio.to_thread(request.app[METRICS].recent.figures)
    return {"model": model.name, **body, "recent": recent, "stages": stages, "edges": edges}


async def metrics(request: web.Request) -> web.Response:
    """Prometheus text; the bus's own figures are asked for here, so that nobody has to collect them in between."""
    try:
        bus = await _broker_status(request)
    except ShuttingDown:
        bus = None
    # Where several processes share their metrics this reads all of their files.
    text = await asyncio.to_thread(request.app[METRICS].text, bus)
    return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})
