"""Put streaming chats on a server, in a closed loop or as they arrive, and measure what its listeners notice."""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import os
import pathlib
import platform
import sys
from collections.abc import Iterator
from typing import Any

import uvloop

from omni_bus import __version__
from omni_bus.bench_load import Load, Measured, closed_loop, open_loop
from omni_bus.bench_picture import Series, picture
from omni_bus.bench_report import markdown, report, row, summarise
from omni_bus.commands.chat import audio_part
from omni_bus.errors import ConfigError
from omni_bus.http_client import Refused, base_url, first_model, request

NAME = "bench"
PASS_NUMBERS = 1_000_000  # more than a pass has requests
ARRIVING_S = 30.0  # of arrivals, where nobody says how many requests
EPILOG = """\
TTFT  request sent -> first text       TTFP  request sent -> first packet that holds a sample of audio
TPOT  time between two tokens of text  E2EL  request sent -> end of the answer
RTF   E2EL / seconds of audio          underrun  silence heard by who plays from the first packet on, summed over a request
OMNI_BUS_API_KEY holds the key of a server that asks for one.
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="the server, e.g. http://127.0.0.1:8091")
    arrivals = parser.add_mutually_exclusive_group()
    arrivals.add_argument(
        "--concurrency", metavar="1,8,32", type=_counts, default=(1,), help="streams at once, one pass each (default: 1)"
    )
    arrivals.add_argument(
        "--rate", metavar="2.5,5", type=_rates, help="or requests a second, Poisson, however many are under way; one pass each"
    )
    parser.add_argument(
        "--requests", metavar="N", type=_count, help="in each pass (default: 3 x concurrency, or 30 s of arrivals; at least 6)"
    )
    parser.add_argument(
        "--warmup",
        metavar="N",
        type=_count_or_none,
        help="requests before each pass, not counted (default: its concurrency, or 6)",
    )
    parser.add_argument(
        "--repeat", metavar="N", type=_count, default=1, help="run all passes N times; the last time counts (default: 1)"
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
    parser.add_argument(
        "--temperature", metavar="T", type=float, help="of the text (default: 0 with --text-tokens, else the server's)"
    )
    parser.add_argument("--frames", metavar="N", type=_count, help="hold each answer to exactly N codec frames")
    parser.add_argument(
        "--speech-stage", metavar="NAME", default="talker", help="the stage that --frames speaks of (default: talker)"
    )
    parser.add_argument("--model", help="default: the first that the server names")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and sampling (default: 0)")
    parser.add_argument("--json", metavar="FILE", type=pathlib.Path, help="write the figures here, with every request's own")
    parser.add_argument("--picture", metavar="FILE.svg", type=pathlib.Path, help="draw TTFP and underrun over concurrency here")
    parser.add_argument(
        "--baseline", metavar="FILE.json", type=pathlib.Path, help="compare with the figures of an earlier --json"
    )


def run(arguments: argparse.Namespace) -> int:
    for file in (arguments.json, arguments.picture):
        if file and not file.absolute().parent.is_dir():
            raise ConfigError(f"{file.parent}: no such directory")
    baseline = read_baseline(arguments.baseline) if arguments.baseline else None
    return uvloop.run(_run(arguments, baseline))


def read_baseline(file: pathlib.Path) -> Series:
    """The `rows` of a --json, under its `name`, or the file's. Raises ConfigError for another file."""
    try:
        saved = json.loads(file.read_bytes())
        series = Series(str(saved.get("name") or file.stem), saved["rows"])
        markdown([(series.name, series.rows)])
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ConfigError(f"{file}: holds no rows as `omni-bus bench --json` writes them") from None
    return series


async def _run(arguments: argparse.Namespace, baseline: Series | None) -> int:
    url = base_url(arguments.url)
    load = Load(
        url=url,
        model=arguments.model or await first_model(url),
        ours=await is_ours(url),
        prompt=arguments.prompt,
        prompt_words=arguments.prompt_words,
        audio=audio_part(arguments.audio) if arguments.audio else None,
        speech=arguments.modality == "audio",
        text_tokens=arguments.text_tokens,
        temperature=arguments.temperature,
        frames=arguments.frames,
        speech_stage=arguments.speech_stage,
        seed=arguments.seed,
    )
    passes: list[dict[str, Any]] = []
    begins = itertools.count(0, PASS_NUMBERS)  # no pass has the prompts of another: a server may have kept what it made of them
    for time in range(1, arguments.repeat + 1):
        if arguments.repeat > 1:
            print(f"pass {time} of {arguments.repeat}", flush=True)
        if arguments.rate:
            passes = [await _arriving(arguments, load, rate, begins) for rate in arguments.rate]
        else:
            passes = [await _at_once(arguments, load, concurrency, begins) for concurrency in arguments.concurrency]
    rows = [row(one) for one in passes]
    if baseline is not None:
        print("\n" + markdown([(load.model, rows), (baseline.name, baseline.rows)]))
    if arguments.json:
        result = {"name": load.model, **_circumstances(arguments, load), "rows": rows, "passes": passes}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    if arguments.picture:
        series = [Series(load.model, rows), *([baseline] if baseline else [])]
        arguments.picture.write_text(picture(series, f"{load.model}, {datetime.date.today().isoformat()}"))
    return 1 if any(one["errors"] for one in passes) else 0


async def _at_once(arguments: argparse.Namespace, load: Load, concurrency: int, begins: Iterator[int]) -> dict[str, Any]:
    count = arguments.requests or max(3 * concurrency, 6)
    await closed_loop(load, concurrency, concurrency if arguments.warmup is None else arguments.warmup, first=next(begins))
    measured, seconds = await closed_loop(load, concurrency, count, first=next(begins))
    return _told(summarise(concurrency, measured, seconds), measured)


async def _arriving(arguments: argparse.Namespace, load: Load, rate: float, begins: Iterator[int]) -> dict[str, Any]:
    count = arguments.requests or max(math.ceil(rate * ARRIVING_S), 6)
    await open_loop(load, rate, 6 if arguments.warmup is None else arguments.warmup, first=next(begins))
    measured, seconds = await open_loop(load, rate, count, first=next(begins))
    return _told(summarise(None, measured, seconds, rate=rate), measured)


def _told(summary: dict[str, Any], measured: list[Measured]) -> dict[str, Any]:
    """The pass as it is saved, after it was printed."""
    print("\n".join(report(summary)), flush=True)
    for error in dict.fromkeys(summary["errors"]):
        print(f"omni-bus: {summary['errors'].count(error)} failed: {error}", file=sys.stderr)
    return {**summary, "each": [own(one) for one in measured]}


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
            "temperature": arguments.temperature,
            "frames": arguments.frames,
            "seed": arguments.seed,
            "repeat": arguments.repeat,
        },
    }


def own(measured: Measured) -> dict[str, Any]:
    return {
        "error": measured.error,
        "ttft_s": measured.first_text_s,
        "ttfp_s": measured.packets[0][0] if measured.packets else None,
        "e2el_s": measured.end_s,
        "packets": [[round(arrival, 4), round(length, 4)] for arrival, length in measured.packets],
        "text_tokens": measured.text_tokens,
        "first_chunk_ms": measured.first_chunks_ms,
    }


async def is_ours(url: str) -> bool:
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


def _rates(text: str) -> tuple[float, ...]:
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError:
        rates = (0.0,)
    if not all(0 < rate <= 1e6 for rate in rates):
        raise argparse.ArgumentTypeError(f'"{text}" must be numbers above 0, such as 2.5 or 1,2.5')
    return rates
