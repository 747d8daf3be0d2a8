"""Put a closed loop of streaming chats on a server and measure what its listeners notice."""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import pathlib
import platform
import sys
from typing import Any

from omni_bus import __version__
from omni_bus.bench_load import Load, Measured, closed_loop
from omni_bus.bench_report import report, summarise
from omni_bus.commands.chat import audio_part
from omni_bus.errors import ConfigError
from omni_bus.http_client import Refused, base_url, first_model, request

NAME = "bench"
EPILOG = """\
TTFT  request sent -> first text       TTFP  request sent -> first packet that holds a sample of audio
TPOT  time between two tokens of text  E2EL  request sent -> end of the answer
RTF   E2EL / seconds of audio          underrun  silence heard by who plays from the first packet on, summed over a request
OMNI_BUS_API_KEY holds the key of a server that asks for one.
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="the server, e.g. http://127.0.0.1:8091")
    parser.add_argument(
        "--concurrency", metavar="1,8,32", type=_counts, default=(1,), help="streams at once, one pass each (default: 1)"
    )
    parser.add_argument("--requests", metavar="N", type=_count, help="in each pass (default: 3 x concurrency, at least 6)")
    parser.add_argument(
        "--warmup", metavar="N", type=_count_or_none, help="requests before each pass, not counted (default: its concurrency)"
    )
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="what each request says")
    prompt.add_argument(
        "--prompt-words", metavar="N", type=_count, default=60, help="or that many words of its own for each (default: 60)"
    )
    parser.add_argument("--audio", metavar="FILE", type=pathlib.Path, help="speech that each request sends along")
    parser.add_argument(
        "--modality", choices=("text", "audio"), default="audio", help="of the answer (default: audio, with its text)"
    )
    parser.add_argument("--text-tokens", metavar="N", type=_count, help="hold each answer to exactly N tokens of text")
    parser.add_argument("--frames", metavar="N", type=_count, help="hold each answer to exactly N codec frames")
    parser.add_argument(
        "--speech-stage", metavar="NAME", default="talker", help="the stage that --frames speaks of (default: talker)"
    )
    parser.add_argument("--model", help="default: the first that the server names")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and sampling (default: 0)")
    parser.add_argument("--json", metavar="FILE", type=pathlib.Path, help="write the figures here, with every request's own")


def run(arguments: argparse.Namespace) -> int:
    if arguments.json and not arguments.json.absolute().parent.is_dir():
        raise ConfigError(f"{arguments.json.parent}: no such directory")
    return asyncio.run(_run(arguments))


async def _run(arguments: argparse.Namespace) -> int:
    url = base_url(arguments.url)
    load = Load(
        url=url,
        model=arguments.model or await first_model(url),
        ours=await _is_ours(url),
        prompt=arguments.prompt,
        prompt_words=arguments.prompt_words,
        audio=audio_part(arguments.audio) if arguments.audio else None,
        speech=arguments.modality == "audio",
        text_tokens=arguments.text_tokens,
        frames=arguments.frames,
        speech_stage=arguments.speech_stage,
        seed=arguments.seed,
    )
    passes, failed = [], 0
    for concurrency in arguments.concurrency:
        count = arguments.requests or max(3 * concurrency, 6)
        await closed_loop(load, concurrency, concurrency if arguments.warmup is None else arguments.warmup, first=1_000_000)
        measured, seconds = await closed_loop(load, concurrency, count)
        summary = summarise(concurrency, measured, seconds)
        passes.append({**summary, "each": [_own(one) for one in measured]})
        failed += len(summary["errors"])
        print("\n".join(report(summary)), flush=True)
        for error in dict.fromkeys(summary["errors"]):
            print(f"omni-bus: {summary['errors'].count(error)} failed: {error}", file=sys.stderr)
    if arguments.json:
        arguments.json.write_text(json.dumps({**_circumstances(arguments, load), "passes": passes}, indent=1) + "\n")
    return 1 if failed else 0


def _circumstances(arguments: argparse.Namespace, load: Load) -> dict[str, Any]:
    return {
        "omni_bus": __version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "client": {
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "system": platform.platform(),
            "python": platform.python_version(),
        },
        "model": load.model,
        "load": {
            "prompt": arguments.prompt or f"{arguments.prompt_words} words",
            "audio": arguments.audio.name if arguments.audio else None,
            "modality": arguments.modality,
            "text_tokens": arguments.text_tokens,
            "frames": arguments.frames,
            "seed": arguments.seed,
        },
    }


def _own(measured: Measured) -> dict[str, Any]:
    return {
        "error": measured.error,
        "ttft_s": measured.first_text_s,
        "ttfp_s": measured.packets[0][0] if measured.packets else None,
        "e2el_s": measured.end_s,
        "packets": [[round(arrival, 4), round(length, 4)] for arrival, length in measured.packets],
        "text_tokens": measured.text_tokens,
    }


async def _is_ours(url: str) -> bool:
    """Whether per-stage sampling may be named by stage; other servers take a list of one object for each of theirs."""
    try:
        async with request("GET", f"{url}/v1/status") as response:
            return "pipeline" in json.loads(await response.body())
    except (Refused, ValueError):
        return False


def _count(text: str) -> int:
    try:
        count = int(text)
    except ValueError:
        count = 0
    if not 1 <= count <= 1_000_000:
        raise argparse.ArgumentTypeError(f'"{text}" must be an integer from 1 to 1000000')
    return count


def _count_or_none(text: str) -> int:
    return 0 if text == "0" else _count(text)


def _counts(text: str) -> tuple[int, ...]:
    return tuple(_count(part) for part in text.split(","))
