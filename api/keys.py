"""Typed keys: of the application, what lives as long as the server; of a request, what is known of it from its first moment."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from aiohttp import web

from omni_bus.api.bus import Bus
from omni_bus.api.intake import Intake
from omni_bus.api.loop_lag import LoopLag
from omni_bus.api.media_fetch import MediaFetcher
from omni_bus.api.metrics import Metrics
from omni_bus.api.served import ServedModel
from omni_bus.deployment import ApiConfig

CONFIG = web.AppKey("config", ApiConfig)
MODEL = web.AppKey("model", ServedModel)
METRICS = web.AppKey("metrics", Metrics)
BUS: web.AppKey[Bus] = web.AppKey("bus")
LAG = web.AppKey("lag", LoopLag)
THREADS = web.AppKey("threads", ThreadPoolExecutor)
INTAKE = web.AppKey("intake", Intake)
FETCHER = web.AppKey("fetcher", MediaFetcher)

REQUEST_ID = web.RequestKey("request_id", str)  # ours: also the label at the broker and the X-Request-Id of the answer
LABEL = web.RequestKey("label", str)  # what the client calls it, for the log only
CLIENT = web.RequestKey("client", str)  # which of the keys it came with; absent where there are no keys
PRIORITY = web.RequestKey("priority", str)  # of that key's requests, where they do not say one
ARRIVAL = web.RequestKey("arrival", float)  # time.monotonic()
OUTCOME = web.RequestKey("outcome", int)  # of a streamed answer that ended badly: the status it would have had
ENDLESS = web.RequestKey("endless", bool)  # a stream that goes on until its client leaves: to leave is no cancel
