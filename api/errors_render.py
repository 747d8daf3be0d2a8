"""The one place where an error becomes an HTTP answer or an SSE event, always in OpenAI's shape."""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from omni_bus.api.http_errors import MethodNotAllowed
from omni_bus.api.keys import METRICS, REQUEST_ID
from omni_bus.errors import Cancelled, DeadlineExceeded, NotFound, OmniBusError, TooLarge

log = logging.getLogger("omni_bus.api")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
# Seconds, for errors that do not bring a number of their own.
_RETRY_AFTER_S = {"no_ready_replica": 5, "shutting_down": 10, "broker_lost": 1, "overloaded": 1, "rate_limit_exceeded": 1}


def error_body(error: OmniBusError) -> dict[str, dict[str, str | None]]:
    """`{"error": {"message", "type", "param", "code"}}`."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    param = None if error.param is None else _encodable(error.param)
    return {"error": {"message": _encodable(error.message), "type": kind, "param": param, "code": error.code}}


def _encodable(text: str) -> str:
    """What a client sent may be quoted, and a header's bytes need be no UTF-8."""
    return text.encode("utf-8", "replace").decode()


def error_response(error: OmniBusError) -> web.Response:
    headers = {}
    if error.status in (429, 503):
        computed = error.retry_after_s
        headers["Retry-After"] = str(_RETRY_AFTER_S.get(error.code, 1) if computed is None else max(1, math.ceil(computed)))
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, MethodNotAllowed):
        headers["Allow"] = error.allowed
    return web.Response(
        status=error.status, body=msgspec.json.encode(error_body(error)), content_type="application/json", headers=headers
    )


def internal_error() -> OmniBusError:
    """What a client is told of a fault of ours; the log has the rest."""
    return OmniBusError("the server met an internal error; its log says more under this answer's X-Request-Id")


def _of_http(error: web.HTTPException, request: web.Request) -> OmniBusError:
    """aiohttp's own refusals: no route, no such method, body too large."""
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        return MethodNotAllowed(f"this address takes {allowed}, not {error.method}", allowed=allowed)
    if isinstance(error, web.HTTPNotFound):
        return NotFound("there is nothing at this address; see /v1/models and /v1/chat/completions")
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return TooLarge("the request is too large")
    refused = OmniBusError(error.reason or "refused", code="invalid_request")
    refused.status = error.status
    return refused


@web.middleware
async def render_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Outermost but one: every exception of a handler ends here, except a client's going away."""
    metrics = request.app[METRICS]
    try:
        return await handler(request)
    except OmniBusError as error:
        refused = error
    except web.HTTPException as error:
        if error.status < 400:
            raise
        refused = _of_http(error, request)
    except TimeoutError:
        refused = DeadlineExceeded("the request ran past its deadline")
    except ConnectionError:
        return web.Response(status=Cancelled.status)  # the client is gone: nobody reads this
    except Exception:
        log.exception("request %s failed inside the server", request[REQUEST_ID])
        refused = internal_error()
    metrics.failed(refused.code)
    return error_response(refused)
