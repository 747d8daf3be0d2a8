"""A request's media, from how it was given (base64, data URL, http URL) to the tensors that travel with it.

audio → float32 [samples], mono, 16 kHz. image, video → uint8 [bytes], the encoded file: a stage decodes it.
"""

from __future__ import annotations

import asyncio
import binascii
import dataclasses
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Literal
from urllib.parse import unquote_to_bytes

from omni_bus.api.audio_decode import MAX_SECONDS, SAMPLE_RATE, AudioFormat, decode_audio
from omni_bus.api.intake import IntakeShare
from omni_bus.api.media_fetch import MediaFetcher
from omni_bus.errors import InvalidRequest
from omni_bus.wire import HostTensor

Kind = Literal["audio", "image", "video"]

AUDIO_FORMATS: tuple[AudioFormat, ...] = ("wav", "mp3", "flac", "ogg", "opus", "webm", "m4a", "mp4", "aac", "pcm16")
THREAD_ABOVE = 64 * 1024  # bytes: less is decoded on the loop, which is quicker than handing it to a thread
_SLICE = 256 * 1024  # characters of base64 at a time: one call holds the interpreter, and with it the loop, for < 1 ms


@dataclasses.dataclass(frozen=True, kw_only=True)
class MediaSource:
    """One piece of media as the client gave it; exactly one of `base64` and `url` is not empty."""

    kind: Kind
    param: str  # the request field, for errors
    base64: str = ""
    url: str = ""
    pcm16: bool = False

    @classmethod
    def of_base64(cls, kind: Kind, data: str, given_format: str | None, param: str) -> MediaSource:
        if given_format is not None and given_format not in AUDIO_FORMATS:
            raise InvalidRequest(f"{param}.format must be one of {', '.join(AUDIO_FORMATS)}", param=f"{param}.format")
        if not data:
            raise InvalidRequest(f"{param}.data must be base64 and not empty", param=f"{param}.data")
        return cls(kind=kind, base64=data, pcm16=given_format == "pcm16", param=f"{param}.data")

    @classmethod
    def of_url(cls, kind: Kind, url: str, param: str) -> MediaSource:
        if not url:
            raise InvalidRequest(f"{param} must be a data URL or an http(s) URL", param=param)
        return cls(kind=kind, url=url, param=param)

    @property
    def remote(self) -> bool:
        return bool(self.url) and self.url[:5].lower() != "data:"


async def load_media(
    sources: Sequence[MediaSource], fetcher: MediaFetcher, threads: Executor, share: IntakeShare
) -> dict[str, HostTensor]:
    """Tensors "media0", "media1", … in the order of `sources`; one after the other, so that one request holds one thread.

    Raises InvalidRequest (bad base64, refused or dead URL), TooLarge, UndecodableMedia, each naming the request field, or Overloaded.
    """
    tensors: dict[str, HostTensor] = {}
    seconds = MAX_SECONDS
    fetchable = fetcher.max_bytes  # by one request, over all its URLs
    for index, source in enumerate(sources):
        if source.remote:
            content: bytes | bytearray = await fetcher.fetch(source.url, source.param, fetchable)
            fetchable -= len(content)
        else:
            content = await _given_content(source, threads)
        share.add(len(content))
        if source.kind != "audio":
            tensors[f"media{index}"] = HostTensor("uint8", (len(content),), content)
            continue
        loop = asyncio.get_running_loop()
        samples = await loop.run_in_executor(threads, decode_audio, content, source.pcm16, source.param, seconds)
        share.add(len(samples))
        count = len(samples) // 4
        seconds -= count / SAMPLE_RATE
        tensors[f"media{index}"] = HostTensor("float32", (count,), samples)
    return tensors


async def _given_content(source: MediaSource, threads: Executor) -> bytes | bytearray:
    decode, data = (data_url_content, source.url) if source.url else (base64_content, source.base64)
    if len(data) <= THREAD_ABOVE:
        return decode(data, source.param)
    return await asyncio.get_running_loop().run_in_executor(threads, decode, data, source.param)


def data_url_content(url: str, param: str) -> bytes | bytearray:
    """`data:[type][;base64],…` to its bytes."""
    head, comma, data = url.partition(",")
    if not comma:
        raise InvalidRequest(f"{param}: a data URL needs a comma in front of its data", param=param)
    if head.lower().endswith(";base64"):
        return base64_content(unquote_to_bytes(data).decode("latin-1") if "%" in data else data, param)
    content = unquote_to_bytes(data)
    if not content:
        raise InvalidRequest(f"{param}: the data URL is empty", param=param)
    return content


def base64_content(data: str, param: str) -> bytearray:
    """Base64, with line breaks or without, in slices."""
    if not data.isascii():
        raise InvalidRequest(f"{param} is not base64", param=param)
    if any(white in data for white in "\r\n \t"):
        data = data.translate({ord(white): None for white in "\r\n \t"})
    content = bytearray()
    try:
        for start in range(0, len(data), _SLICE):
            piece = data[start : start + _SLICE]
            content += binascii.a2b_base64(piece + "=" * (-len(piece) % 4), strict_mode=True)
    except binascii.Error:
        raise InvalidRequest(f"{param} is not base64", param=param) from None
    if not content:
        raise InvalidRequest(f"{param} is empty", param=param)
    return content
