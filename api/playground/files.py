"""GET / and /playground/NAME: the page's files, read once, each with its type, its ETag and a content security policy of their own."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.resources

from aiohttp import web

from omni_bus.api.errors_render import Handler

# Everything from this origin, nothing inline, and nothing that a string could become code in. `blob:` shows a picture before it is sent.
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' blob:",
        "connect-src 'self'",
        "worker-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "Cache-Control": "no-cache",  # asked for again each time, and answered by 304 while nothing has changed
    "Permissions-Policy": "microphone=(self), camera=(), geolocation=()",
}
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_INDEX = "index.html"
_NAMES = (
    _INDEX,
    "audio_in.js",
    "audio_out.js",
    "capture_worklet.js",
    "dialogue.js",
    "dom.js",
    "icon.svg",
    "main.js",
    "pcm.js",
    "picture.js",
    "pipeline.js",
    "playback_worklet.js",
    "realtime.js",
    "server.js",
    "server_panel.js",
    "settings.js",
    "status_feed.js",
    "strip_chart.js",
    "style.css",
    "talk_button.js",
    "timing.js",
    "transcript.js",
)

# Path → file. These say nothing of the server, and the page must open before a key can be typed into it.
PATHS = {"/" if name == _INDEX else f"/playground/{name}": name for name in _NAMES}


@dataclasses.dataclass(frozen=True)
class _File:
    body: bytes
    content_type: str
    etag: str


def add_page(app: web.Application) -> None:
    """Adds a route for each of `PATHS`. Raises FileNotFoundError for an installation that lacks one of the files."""
    folder = importlib.resources.files(__package__)
    for path, name in PATHS.items():
        body = (folder / name).read_bytes()
        file = _File(body, _TYPES[name.rpartition(".")[2]], hashlib.sha256(body).hexdigest()[:32])
        app.router.add_get(path, _handler(file))


def _handler(file: _File) -> Handler:
    async def serve(request: web.Request) -> web.StreamResponse:
        known = any(tag.value in (file.etag, "*") for tag in request.if_none_match or ())
        response = (
            web.Response(status=304) if known else web.Response(body=file.body, content_type=file.content_type, charset="utf-8")
        )
        response.etag = file.etag
        response.headers.update(_HEADERS)
        return response

    return serve
