"""Errors that only HTTP knows, in the hierarchy of omni_bus.errors."""

from __future__ import annotations

from omni_bus.errors import InvalidRequest, NotFound, OmniBusError


class MethodNotAllowed(OmniBusError):
    code = "method_not_allowed"
    status = 405

    def __init__(self, message: str, *, allowed: str) -> None:
        super().__init__(message)
        self.allowed = allowed


class OriginRefused(OmniBusError):
    """A page of a site that this server does not answer."""

    code = "origin_refused"
    status = 403


class MediaRefused(InvalidRequest):
    """A media URL whose scheme, host or address the server does not fetch from."""

    code = "media_url_refused"


class MediaUnreachable(InvalidRequest):
    """A media URL that was allowed, but gave no content."""

    code = "media_unreachable"


class ModelNotFound(NotFound):
    code = "model_not_found"
