"""Audio files as clients send them (wav, also mu-law, mp3, flac, ogg, webm, m4a, aac, raw pcm16) to what the models take.

Runs in a thread. The container is told by its first bytes and named to FFmpeg, so that no playlist or other format that opens
further addresses is ever tried. Decoding goes frame by frame and stops at the limit: a small file that unpacks to hours costs
no more than the limit's memory.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Literal

import av
from av.audio.resampler import AudioResampler
from av.container import InputContainer

from omni_bus.errors import TooLarge, UndecodableMedia

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

AudioFormat = Literal["wav", "mp3", "flac", "ogg", "opus", "webm", "m4a", "mp4", "aac", "pcm16"]

SAMPLE_RATE = 16_000
PCM16_RATE = 24_000  # of raw input, as of raw output
MAX_SECONDS = 1800.0  # of audio in one request: 115 MB as float32
_RATES = range(4_000, 384_001)
_MAX_CHANNELS = 8
_READABLE = "wav, mp3, flac, ogg, webm, m4a or aac"


def decode_audio(content: bytes | bytearray, pcm16: bool, param: str, max_seconds: float = MAX_SECONDS) -> bytearray:
    """float32 samples, mono (the mean of the channels), 16 kHz, little-endian.

    `pcm16`: the content is raw int16 mono at 24 kHz. Raises UndecodableMedia, or TooLarge above `max_seconds`.
    """
    if pcm16:
        if len(content) % 2:
            raise UndecodableMedia(f"{param}: pcm16 has two bytes a sample, but the length is odd", param=param)
        container_format, options = "s16le", {"sample_rate": str(PCM16_RATE), "ch_layout": "mono"}
    else:
        container_format, options = _container_format(content, param), {}
    try:
        with av.open(_Content(content), "r", format=container_format, options=options) as container:
            samples = _decode(container, param, max_seconds)
    except (av.FFmpegError, ValueError, EOFError):
        raise UndecodableMedia(f"{param}: the audio is damaged or not really {_READABLE}", param=param) from None
    if not samples:
        raise UndecodableMedia(f"{param}: there is no audio in it", param=param)
    return samples


class _Content(io.RawIOBase):
    """A file over bytes that are there already. BytesIO would copy them first, and hold the interpreter, with it the loop, meanwhile."""

    def __init__(self, content: bytes | bytearray) -> None:
        self._view = memoryview(content)
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._view)}[whence]
        self._at = max(0, start + offset)
        return self._at

    def readinto(self, buffer: WriteableBuffer) -> int:
        into = memoryview(buffer).cast("B")
        piece = self._view[self._at : self._at + len(into)]
        into[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)


def _container_format(content: bytes | bytearray, param: str) -> str:
    """FFmpeg's name of the container, from its first bytes."""
    head = bytes(content[:12])
    if head[:4] in (b"RIFF", b"RF64") and head[8:12] == b"WAVE":
        return "wav"
    if head[:4] == b"fLaC":
        return "flac"
    if head[:4] == b"OggS":
        return "ogg"
    if head[:4] == b"\x1aE\xdf\xa3":
        return "matroska"
    if head[4:8] == b"ftyp":
        return "mov"
    if head[:2] in (b"\xff\xf1", b"\xff\xf9"):
        return "aac"
    if head[:3] == b"ID3" or (len(head) > 1 and head[0] == 0xFF and head[1] & 0xE0 == 0xE0):
        return "mp3"
    raise UndecodableMedia(f"{param}: send {_READABLE}; for raw samples say format = pcm16", param=param)


def _decode(container: InputContainer, param: str, max_seconds: float) -> bytearray:
    stream = next(iter(container.streams.audio), None)
    if stream is None:
        raise UndecodableMedia(f"{param}: there is no audio in it", param=param)
    limit = int(max_seconds * SAMPLE_RATE) * 4
    # Where the layouts differ FFmpeg mixes by gains that keep the power; with a ceiling of 1 on their sum it takes the mean.
    resampler = AudioResampler(format="flt", layout="mono", rate=SAMPLE_RATE, options={"rematrix_maxval": "1.0"})
    samples = bytearray()
    for frame in container.decode(stream):
        if frame.sample_rate not in _RATES or not 0 < frame.layout.nb_channels <= _MAX_CHANNELS:
            raise UndecodableMedia(
                f"{param}: audio needs a rate of 4 to 384 kHz and at most {_MAX_CHANNELS} channels", param=param
            )
        frame.pts = None  # gaps and jumps of the container's clock do not stretch the samples
        for part in resampler.resample(frame):
            samples += memoryview(part.planes[0])[: part.samples * 4]
        if len(samples) > limit:
            raise TooLarge(f"{param}: the audio of one request may last up to {MAX_SECONDS / 60:g} minutes", param=param)
    for part in resampler.resample(None):
        samples += memoryview(part.planes[0])[: part.samples * 4]
    return samples
