"""The application: its routes, its middlewares, and what lives as long as it does."""

from __future__ import annotations

import pathlib
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

from aiohttp import web

from omni_bus.api import chat, models, speech, status, transcription
from omni_bus.api.auth import API_KEYS, ApiKeys, require_key
from omni_bus.api.bus import Bus
from omni_bus.api.client_limit import limit_requests
from omni_bus.api.cors import add_cors_headers, preflight
from omni_bus.api.duplex.endpoint import duplex
from omni_bus.api.errors_render import render_errors
from omni_bus.api.http_log import http_log
from omni_bus.api.intake import Intake
from omni_bus.api.keys import BUS, CONFIG, FETCHER, INTAKE, LAG, METRICS, MODEL, THREADS
from omni_bus.api.loop_lag import LoopLag
from omni_bus.api.media_fetch import MediaFetcher
from omni_bus.api.metrics import Metrics
from omni_bus.api.playground.files import add_page
from omni_bus.api.realtime.endpoint import realtime
from omni_bus.api.request_context import add_headers, in_context
from omni_bus.api.served import ServedModel
from omni_bus.api.status_watch import WATCHERS, Watchers, watch
from omni_bus.api.voice_socket import add_voice_sockets
from omni_bus.deployment import Deployment
from omni_bus.spec import PipelineSpec

SHUTDOWN_S = 2.0  # for running answers, once no new ones are taken
THREAD_COUNT = 4  # media decoding, encoding and the parsing of large bodies


def create_app(
    deployment: Deployment, pipeline: PipelineSpec, connect: Callable[[], Awaitable[Bus]], metrics: Metrics
) -> web.Application:
    """Raises ConfigError for a key file that cannot be used. `connect` is called once, when the server starts."""
    app = web.Application(
        middlewares=[in_context, render_errors, preflight, require_key, limit_requests],
        client_max_size=deployment.api.max_body_mb * 2**20,
    )
    app[CONFIG] = deployment.api
    app[MODEL] = ServedModel.of(deployment, pipeline)
    app[METRICS] = metrics
    app[INTAKE] = Intake(deployment.api.max_body_mb * 2**20)
    app[WATCHERS] = Watchers()
    app.on_shutdown.append(app[WATCHERS].leave)
    app[LAG] = LoopLag(metrics.lagged, lambda: metrics.in_flight)
    if deployment.api.api_keys_file:
        app[API_KEYS] = ApiKeys.read(pathlib.Path(deployment.api.api_keys_file))
    app.router.add_get("/health", status.health)
    app.router.add_get("/ready", status.ready)
    app.router.add_get("/metrics", status.metrics)
    app.router.add_get("/v1/models", models.list_models)
    app.router.add_get("/v1/models/{name:.+}", models.one_model)
    app.router.add_get("/v1/status", status.status)
    app.router.add_get("/v1/status/watch", watch)
    app.router.add_post("/v1/chat/completions", chat.chat_completions)
    app.router.add_post("/v1/audio/speech", speech.speech)
    app.router.add_post("/v1/audio/transcriptions", transcription.transcriptions)
    app.router.add_get("/v1/realtime", realtime)
    app.router.add_get("/v1/duplex", duplex)
    add_voice_sockets(app)
    add_page(app)
    app.on_response_prepare.append(add_headers)
    app.on_response_prepare.append(add_cors_headers)

    async def start(app: web.Application) -> None:
        app[BUS] = await connect()
        app[BUS].watch(app[WATCHERS].wake)
        app[THREADS] = ThreadPoolExecutor(THREAD_COUNT, thread_name_prefix="media")
        app[FETCHER] = MediaFetcher(deployment.api)
        app[LAG].start()

    async def stop(app: web.Application) -> None:
        app[LAG].stop()
        if BUS not in app:
            return  # the start itself failed
        await app[FETCHER].close()
        await app[BUS].close()
        app[THREADS].shutdown(wait=False, cancel_futures=True)

    app.on_startup.append(start)
    app.on_cleanup.append(stop)
    return app


def create_runner(app: web.Application) -> web.AppRunner:
    """A client that goes away cancels its handler, whatever that is waiting for. Compressed bodies are not unpacked, but refused."""
    return web.AppRunner(
        app,
        handler_cancellation=True,
        auto_decompress=False,
        access_log=None,
        logger=http_log,
        shutdown_timeout=SHUTDOWN_S,
    )
