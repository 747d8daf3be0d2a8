"""The wire codec: events and payloads to frames and back. The one place that knows msgpack; nothing is ever pickled.

Frames of a message at a DEALER (worker, client): `[header, payload, tensor…]`; the broker's ROUTER sees the route in front.
"""

from __future__ import annotations

import dataclasses
from typing import Generic, TypeVar

import msgspec

from omni_bus import events
from omni_bus.errors import ProtocolViolation
from omni_bus.spec import PipelineSpec

EventT = TypeVar("EventT")

_encoder = msgspec.msgpack.Encoder()


@dataclasses.dataclass(frozen=True, slots=True)
class HostTensor:
    """A tensor's bytes in host memory, C-contiguous, little-endian, for code that has no torch."""

    dtype: str  # as in TensorRef
    shape: tuple[int, ...]
    data: bytes | bytearray | memoryview


def encode(message: msgspec.Struct) -> bytes:
    """An event to its header frame, or a payload Struct to its payload frame."""
    return _encoder.encode(message)


class HeaderDecoder(Generic[EventT]):
    """Decodes the header frames that one kind of peer receives."""

    def __init__(self, union: object) -> None:
        self._decoder: msgspec.msgpack.Decoder[EventT] = msgspec.msgpack.Decoder(union)

    def __call__(self, header: bytes | memoryview) -> EventT:
        """Raises ProtocolViolation for bytes that are not one of its events."""
        try:
            return self._decoder.decode(header)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ProtocolViolation(f"malformed header: {error}") from error


at_broker: HeaderDecoder[events.ClientToBroker | events.WorkerToBroker] = HeaderDecoder(
    events.ClientToBroker | events.WorkerToBroker
)
from_remote: HeaderDecoder[events.WorkerToBroker] = HeaderDecoder(events.WorkerToBroker)  # of another host: at the broker, too
at_client: HeaderDecoder[events.BrokerToClient] = HeaderDecoder(events.BrokerToClient)
at_worker: HeaderDecoder[events.BrokerToWorker] = HeaderDecoder(events.BrokerToWorker)


class PayloadDecoder:
    """Decodes payload frames by the edge they came on, to the Struct that the pipeline declares there."""

    def __init__(self, pipeline: PipelineSpec) -> None:
        self._decoders = {edge.name: msgspec.msgpack.Decoder(edge.payload) for edge in pipeline.edges}

    def __call__(self, edge: str, frame: bytes | memoryview) -> msgspec.Struct:
        """Raises ProtocolViolation for an unknown edge or a payload of the wrong type."""
        try:
            return self._decoders[edge].decode(frame)
        except KeyError:
            raise ProtocolViolation(f"unknown edge {edge!r}") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ProtocolViolation(f"malformed payload on {edge}: {error}") from error
