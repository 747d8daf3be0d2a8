"""Every error a user or a client can meet: a stable code, the HTTP status and a sentence that says what to do.

An error is raised in one place and rendered in one place (the API renders to HTTP, the CLI to an exit code). What travels on
the bus is `ErrorInfo`; `OmniBusError.info()` and `from_info()` convert.
"""

from __future__ import annotations

import msgspec


class ErrorInfo(msgspec.Struct, frozen=True, array_like=True):
    """An error as it travels in an event. `message` is shown to clients: no path, stack, prompt or key may be in it."""

    code: str
    message: str
    status: int = 500
    param: str | None = None
    retry_after_s: float | None = None


class OmniBusError(Exception):
    """Base of the hierarchy. `code` is stable; `status` is the HTTP status; `param` names the offending request field.

    `retry_after_s`: seconds after which it may be tried again, where that was computed.
    """

    code = "internal_error"
    status = 500

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        if code is not None:
            self.code = code

    def info(self) -> ErrorInfo:
        return ErrorInfo(self.code, self.message, self.status, self.param, self.retry_after_s)


class InvalidRequest(OmniBusError):
    """A known field has a wrong type or value."""

    code = "invalid_request"
    status = 400


class Unauthorized(OmniBusError):
    code = "invalid_api_key"
    status = 401


class NotFound(OmniBusError):
    code = "not_found"
    status = 404


class DeadlineExceeded(OmniBusError):
    code = "deadline_exceeded"
    status = 408


class TooLarge(OmniBusError):
    code = "too_large"
    status = 413


class UndecodableMedia(OmniBusError):
    """Audio, image or video bytes that no decoder reads."""

    code = "undecodable_media"
    status = 415


class ModelRefused(OmniBusError):
    """The request is well-formed, but the model cannot serve it (prompt too long, unknown voice, unsupported modality)."""

    code = "model_refused"
    status = 422


class PromptTooLong(ModelRefused):
    """A prompt that has no room in the model with an answer behind it. A conversation may be asked again without its oldest part."""

    code = "context_length_exceeded"


class RateLimited(OmniBusError):
    code = "rate_limit_exceeded"
    status = 429


class Cancelled(OmniBusError):
    """The client went away or asked for it; logged only, never rendered to a client that is still there."""

    code = "cancelled"
    status = 499


class StageFailed(OmniBusError):
    """An exception inside a stage; fails the one request that met it."""

    code = "stage_failed"
    status = 500


class OutOfMemory(OmniBusError):
    """A stage found no memory for what it was to compute; what it held of the request is free again."""

    code = "out_of_memory"
    status = 503


class ReplicaLost(OmniBusError):
    """The process that held the request died, and output of it had left already, or no retry was left."""

    code = "replica_lost"
    status = 500


class SequenceGap(OmniBusError):
    """A chunk of a (request, edge) went missing: its sequence number jumped."""

    code = "sequence_gap"
    status = 500


class SequenceDuplicate(OmniBusError):
    """A chunk of a (request, edge) came twice."""

    code = "sequence_duplicate"
    status = 500


class ProtocolViolation(OmniBusError):
    """A peer broke a rule of the bus: a malformed frame, an unknown edge, a chunk after the last one."""

    code = "protocol_violation"
    status = 500


class StaleTensor(OmniBusError):
    """A TensorRef whose slot was reused or whose owner is gone."""

    code = "stale_tensor"
    status = 500


class NoReadyReplica(OmniBusError):
    code = "no_ready_replica"
    status = 503


class Overloaded(OmniBusError):
    code = "overloaded"
    status = 503


class ShuttingDown(OmniBusError):
    code = "shutting_down"
    status = 503


class BrokerLost(ShuttingDown):
    """The broker ended, or this process's connection to it; another one is on its way."""

    code = "broker_lost"


class ConfigError(OmniBusError):
    """The user's input at the command line or in a TOML file (exit code 2): says file, line, key and the nearest valid name."""

    code = "invalid_config"
    status = 400


class CheckpointError(ConfigError):
    """The model directory lacks something or holds something malformed (exit code 2)."""

    code = "invalid_checkpoint"


class DeviceUnavailable(ConfigError):
    """A device the configuration names does not exist here (exit code 2)."""

    code = "device_unavailable"


def _subclasses(cls: type[OmniBusError]) -> list[type[OmniBusError]]:
    return [cls, *(leaf for child in cls.__subclasses__() for leaf in _subclasses(child))]


def from_info(info: ErrorInfo) -> OmniBusError:
    """The exception of the class whose code `info` carries; the plain base class for a code this version does not know."""
    by_code = {cls.code: cls for cls in reversed(_subclasses(OmniBusError))}
    kind = by_code.get(info.code, OmniBusError)
    error = kind(info.message, param=info.param, code=info.code, retry_after_s=info.retry_after_s)
    error.status = info.status
    return error
