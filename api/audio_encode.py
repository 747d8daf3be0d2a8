"""A whole answer's PCM16 to the file format that the client asked for. Runs in a thread."""

from __future__ import annotations

import io

import av
from av.audio.fifo import AudioFifo
from av.audio.frame import AudioFrame
from av.audio.resampler import AudioResampler
from av.audio.stream import AudioStream

from omni_bus.api.wav import wav_header

# container, codec, the rate it insists on, bits a second
_CODECS = {
    "mp3": ("mp3", "libmp3lame", None, 96_000),
    "opus": ("ogg", "libopus", 48_000, 64_000),
    "flac": ("flac", "flac", None, None),
}


def encode_audio(pcm: bytes | bytearray, sample_rate: int, audio_format: str) -> bytes:
    """pcm: int16 mono. Formats: pcm16, wav, mp3, opus (in ogg), flac."""
    if audio_format == "pcm16":
        return bytes(pcm)
    if audio_format == "wav":
        return wav_header(sample_rate, len(pcm)) + pcm
    container_format, codec, forced_rate, bit_rate = _CODECS[audio_format]
    rate = forced_rate or sample_rate
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container_format) as container:
        stream = container.add_stream(codec, rate=rate)
        assert isinstance(stream, AudioStream)
        stream.layout = "mono"
        if bit_rate is not None:
            stream.bit_rate = bit_rate
        context = stream.codec_context
        context.open()
        resampler = AudioResampler(format=context.format, layout="mono", rate=rate)
        fifo = AudioFifo()
        for start in range(0, len(pcm), sample_rate * 2):
            for part in resampler.resample(_frame(pcm[start : start + sample_rate * 2], sample_rate, start // 2)):
                fifo.write(part)
        for part in resampler.resample(None):
            fifo.write(part)
        while (piece := fifo.read(context.frame_size or 4096)) or (piece := fifo.read()):
            container.mux(stream.encode(piece))
        container.mux(stream.encode(None))
    return buffer.getvalue()


def _frame(pcm: bytes | bytearray, sample_rate: int, position: int) -> AudioFrame:
    frame = AudioFrame(format="s16", layout="mono", samples=len(pcm) // 2)
    frame.planes[0].update(bytes(pcm))
    frame.sample_rate = sample_rate
    frame.pts = position
    return frame
