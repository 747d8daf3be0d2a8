"""GET /v1/models and /v1/models/{id}: the one model that is served."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from omni_bus.api.keys import MODEL
from omni_bus.api.served import ServedModel


def json_response(body: object, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(body), content_type="application/json", headers=headers)


def _entry(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "omni-bus",
        "pipeline": model.pipeline.name,
        "input_modalities": sorted(model.pipeline.input_kinds),
        "output_modalities": sorted(model.pipeline.output_modalities),
        "voices": list(model.voices),
        "generating_stages": list(model.generating_stages),
    }


async def list_models(request: web.Request) -> web.Response:
    return json_response({"object": "list", "data": [_entry(request.app[MODEL])]})


async def one_model(request: web.Request) -> web.Response:
    """A name may hold slashes."""
    model = request.app[MODEL]
    model.check_name(request.match_info["name"])
    return json_response(_entry(model))
