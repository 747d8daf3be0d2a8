"""Say something to a server and read, or hear, the answer as it comes."""

from __future__ import annotations

import argparse
import asyncio
import base64
import mimetypes
import pathlib
import sys
import time
import wave
from typing import Any

from omni_bus.errors import ConfigError
from omni_bus.http_client import DEFAULT_URL, Refused, base_url, first_model, request
from omni_bus.speech_stream import SpeechStream

NAME = "chat"
EPILOG = """\
  omni-bus chat "What is the capital of France?" --out reply.wav
  omni-bus chat --audio question.wav
  omni-bus chat "What is in the picture?" --image photo.jpg --no-audio
OMNI_BUS_API_KEY holds the key of a server that asks for one.
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("text", nargs="?", default="", help="what to say; may be left out beside --audio")
    parser.add_argument(
        "--audio", metavar="IN.wav", type=pathlib.Path, action="append", default=[], help="speech or sound to send"
    )
    parser.add_argument("--image", metavar="X.png", type=pathlib.Path, action="append", default=[], help="a picture to send")
    parser.add_argument("--out", metavar="REPLY.wav", type=pathlib.Path, help="write the spoken answer here")
    parser.add_argument("--voice", help="who speaks; the pipeline's default otherwise")
    parser.add_argument("--no-audio", action="store_true", help="ask for text only")
    parser.add_argument("--system", metavar="TEXT", help="a system message")
    parser.add_argument("--max-tokens", type=int, help="of the answer's text")
    parser.add_argument("--model", help="default: the first that the server names")
    parser.add_argument("--seed", type=int, help="for an answer that can be had again")
    parser.add_argument("--url", help=f"the server (default: OMNI_BUS_URL, or {DEFAULT_URL})")


def run(arguments: argparse.Namespace) -> int:
    if not arguments.text and not arguments.audio:
        raise ConfigError('nothing to say: omni-bus chat "text", or --audio FILE')
    if arguments.no_audio and arguments.out:
        raise ConfigError("--out wants the spoken answer, and --no-audio asks for none")
    url, body = base_url(arguments.url), chat_body(arguments)
    if arguments.out and not arguments.out.parent.is_dir():
        raise ConfigError(f"{arguments.out.parent}: no such directory")
    try:
        asyncio.run(_converse(url, body, arguments.model, arguments.out))
    except Refused as error:
        # What the server finds wrong with a request is the user's input too.
        raise (ConfigError(error.message) if error.status < 500 and error.status not in (408, 429) else error) from None
    return 0


def chat_body(arguments: argparse.Namespace) -> dict[str, Any]:
    """The JSON of the request. Raises ConfigError for files that cannot be read."""
    parts: list[dict[str, Any]] = [audio_part(file) for file in arguments.audio]
    parts += [{"type": "image_url", "image_url": {"url": _data_url(file)}} for file in arguments.image]
    parts += [{"type": "text", "text": arguments.text}] if arguments.text else []
    messages = [{"role": "system", "content": arguments.system}] if arguments.system else []
    said = {"max_tokens": arguments.max_tokens, "seed": arguments.seed}
    audio = {"format": "pcm16", **({"voice": arguments.voice} if arguments.voice else {})}
    return {
        "messages": [*messages, {"role": "user", "content": parts}],
        "stream": True,
        **({"modalities": ["text"]} if arguments.no_audio else {"modalities": ["text", "audio"], "audio": audio}),
        **{name: value for name, value in said.items() if value is not None},
    }


def audio_part(file: pathlib.Path) -> dict[str, Any]:
    """A content part with the file's bytes."""
    data = base64.b64encode(_read(file)).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": file.suffix.removeprefix(".").lower() or "wav"}}


async def _converse(url: str, body: dict[str, Any], model: str | None, out: pathlib.Path | None) -> None:
    body = {**body, "model": model or await first_model(url)}
    start = time.perf_counter()
    stream, spoken = SpeechStream(), bytearray()
    first: dict[str, float] = {}
    async with request("POST", f"{url}/v1/chat/completions", body) as response:
        async for event in response.events():
            if "error" in event:
                print()
                raise Refused(500, str(event["error"].get("message", "the answer failed")))
            text, pcm = stream.read(event)
            now = time.perf_counter() - start
            if text:
                first.setdefault("text", now)
                print(text, end="", flush=True)
            if pcm:
                first.setdefault("audio", now)
                spoken += pcm
    print()
    notes = [f"first {kind} after {seconds * 1000:.0f} ms" for kind, seconds in first.items()]
    if spoken:
        notes.append(f"{len(spoken) / 2 / stream.sample_rate:.1f} s of speech")
    if out is not None:
        if spoken:
            _write_wav(out, bytes(spoken), stream.sample_rate)
            notes.append(f"written to {out}")
        else:
            notes.append(f"no speech came, so {out} was not written")
    print(f"({', '.join(notes)})" if notes else "(an empty answer)", file=sys.stderr)


def _write_wav(file: pathlib.Path, pcm: bytes, rate: int) -> None:
    try:
        with wave.open(str(file), "wb") as out:
            out.setnchannels(1)
            out.setsampwidth(2)
            out.setframerate(rate)
            out.writeframes(pcm)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written: {error.strerror}") from None


def _read(file: pathlib.Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None


def _data_url(file: pathlib.Path) -> str:
    kind = mimetypes.guess_type(file.name)[0] or "application/octet-stream"
    return f"data:{kind};base64,{base64.b64encode(_read(file)).decode()}"
