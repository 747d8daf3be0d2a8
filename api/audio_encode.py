"""PCM16 to the audio formats that clients ask for, piece by piece as it is made, or a whole answer at once."""

from __future__ import annotations

import dataclasses
import io

import av
from av.audio.fifo import AudioFifo
from av.audio.frame import AudioFrame
from av.audio.resampler import AudioResampler
from av.audio.stream import AudioStream
from av.container import OutputContainer

from omni_bus.api.tempo import Tempo
from omni_bus.api.wav import wav_header

_PIECE = 48_000  # bytes of PCM that go through FFmpeg at a time: bounds what a large push needs


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Codec:
    container: str
    codec: str
    rate: int | None = None  # the one that the codec insists on
    bit_rate: int | None = None
    streamed: dict[str, str] = dataclasses.field(default_factory=dict)  # options of a file that is not gone back to


_CODECS = {
    "mp3": _Codec(container="mp3", codec="libmp3lame", bit_rate=96_000, streamed={"write_xing": "0"}),
    "opus": _Codec(
        container="ogg", codec="libopus", rate=48_000, bit_rate=64_000, streamed={"page_duration": "100000"}
    ),  # microseconds
    "aac": _Codec(container="adts", codec="aac", bit_rate=96_000),
    "flac": _Codec(container="flac", codec="flac", streamed={"metadata_header_padding": "0"}),
}
FORMATS = ("pcm16", "wav", *_CODECS)


class AudioEncoder:
    """One answer's audio. `push` and `close` may run in a thread, one at a time.

    audio_format: one of FORMATS. speed: 0.25 to 4 times as fast, the pitch kept. streamed: what was given out is not gone back to:
    a wav header has no length, an mp3 no index, a flac no count of samples. Without it everything comes from `close`, and all of
    these are right.
    """

    def __init__(self, audio_format: str, sample_rate: int, *, speed: float = 1.0, streamed: bool = True) -> None:
        self._streamed = streamed
        self._tempo = Tempo(sample_rate, speed) if speed != 1.0 else None
        self._file = _CodecFile(_CODECS[audio_format], sample_rate, streamed) if audio_format in _CODECS else None
        self._wav = audio_format == "wav"
        self._rate = sample_rate
        self._pcm = bytearray()
        self._begun = False

    def push(self, pcm: bytes | bytearray | memoryview) -> bytes:
        """pcm: int16 mono, whole samples. What of the file is made by now, maybe nothing."""
        for start in range(0, len(pcm), _PIECE):
            piece = bytes(pcm[start : start + _PIECE])
            self._take(piece if self._tempo is None else self._tempo.push(piece))
        return self._given() if self._streamed else b""

    def close(self) -> bytes:
        """The rest of the file; of one without a sample at least its header."""
        if self._tempo is not None:
            self._take(self._tempo.flush())
        if self._file is not None:
            self._file.close()
        return self._given()

    def _take(self, pcm: bytes) -> None:
        if self._file is None:
            self._pcm += pcm
        elif pcm:
            self._file.write(pcm)

    def _given(self) -> bytes:
        if self._file is not None:
            return self._file.taken()
        made, self._pcm = bytes(self._pcm), bytearray()
        if not self._wav or self._begun:
            return made
        self._begun = True
        return wav_header(self._rate, None if self._streamed else len(made)) + made


def encode_audio(pcm: bytes | bytearray, sample_rate: int, audio_format: str) -> bytes:
    """A whole answer. pcm: int16 mono."""
    encoder = AudioEncoder(audio_format, sample_rate, streamed=False)
    encoder.push(pcm)
    return encoder.close()


class _Pipe(io.RawIOBase):
    """Takes what FFmpeg writes, and cannot be gone back in."""

    def __init__(self) -> None:
        self.written = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]
        self.written += data
        return len(data)


class _CodecFile:
    """A file with a codec's packets."""

    def __init__(self, codec: _Codec, sample_rate: int, streamed: bool) -> None:
        self._sample_rate = sample_rate
        self._sink: _Pipe | io.BytesIO = _Pipe() if streamed else io.BytesIO()
        options = {"flush_packets": "1", **codec.streamed} if streamed else {}
        self._container: OutputContainer = av.open(self._sink, "w", format=codec.container, container_options=options)
        rate = codec.rate or sample_rate
        stream = self._container.add_stream(codec.codec, rate=rate)
        assert isinstance(stream, AudioStream)
        stream.layout = "mono"
        if codec.bit_rate is not None:
            stream.bit_rate = codec.bit_rate
        stream.codec_context.open()
        self._stream = stream
        self._resampler = AudioResampler(format=stream.codec_context.format, layout="mono", rate=rate)
        self._fifo = AudioFifo()
        self._position = 0

    def write(self, pcm: bytes) -> None:
        frame = AudioFrame(format="s16", layout="mono", samples=len(pcm) // 2)
        frame.planes[0].update(pcm)
        frame.sample_rate = self._sample_rate
        frame.pts = self._position
        self._position += frame.samples
        self._encode(frame)

    def close(self) -> None:
        if self._position:
            self._encode(None)
            while piece := self._fifo.read():
                self._container.mux(self._stream.encode(piece))
        self._container.mux(self._stream.encode(None))
        self._container.close()

    def taken(self) -> bytes:
        """What was written since the last time."""
        if isinstance(self._sink, io.BytesIO):
            return self._sink.getvalue()
        written, self._sink.written = bytes(self._sink.written), bytearray()
        return written

    def _encode(self, frame: AudioFrame | None) -> None:
        for part in self._resampler.resample(frame):
            self._fifo.write(part)
        while piece := self._fifo.read(self._stream.codec_context.frame_size or 4096):
            self._container.mux(self._stream.encode(piece))
