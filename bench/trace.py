"""A profile of one time to first packet: every millisecond between the request and the first audio, from the workers' own records.

    omni-bus up CONFIG.toml --set bus.trace=DIR --set bus.heartbeat_s=0.5 …
    python -m bench.trace DIR [--url URL] [--requests 5] [--out FILE.json] [--text-tokens 64] [--frames 128]

Sends a few requests, one at a time, to a server that nobody else uses, takes the one with the median time to first packet, and
prints where its time went; FILE.json is a timeline for chrome://tracing or Perfetto. Client and workers share the host's clock.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import pathlib
import sys
import time
from typing import Any

from bench.trace_table import Asked, Traces, chrome, follow_back, table
from omni_bus.bench_load import Load, one
from omni_bus.errors import OmniBusError
from omni_bus.http_client import base_url, first_model

WRITTEN_S = 3.0  # after the last answer: the workers write with their heartbeats


async def asked(load: Load, index: int) -> Asked:
    """Send one request and note its moments. Raises OmniBusError where it brings no audio."""
    sent = time.time_ns()
    measured = await one(load, index)
    if measured.error is not None:
        raise OmniBusError(measured.error)
    text = measured.first_text_s if measured.first_text_s is not None else measured.packets[0][0]
    moments = (text, measured.packets[0][0], measured.end_s)
    return Asked(sent, *(sent + int(1e9 * seconds) for seconds in moments))


async def profile(load: Load, directory: pathlib.Path, count: int, audio_edge: str) -> tuple[list[str], dict[str, Any]]:
    """(the table's lines, the Chrome trace) of the request of `count` that has the median time to first packet."""
    await asked(load, 0)
    found = [await asked(load, index) for index in range(1, count + 1)]
    await asyncio.sleep(WRITTEN_S)
    median = sorted(found, key=lambda moments: moments.first_audio - moments.sent)[len(found) // 2]
    traces = Traces.read(directory)
    pieces = follow_back(traces, median, audio_edge)
    return table(pieces, median), chrome(traces, median, pieces)


async def _main(arguments: argparse.Namespace) -> None:
    url = base_url(arguments.url)
    load = Load(
        url=url,
        model=await first_model(url),
        ours=True,
        prompt=None,
        prompt_words=arguments.prompt_words,
        audio=None,
        speech=True,
        text_tokens=arguments.text_tokens,
        frames=arguments.frames,
        speech_stage="talker",
        seed=arguments.seed,
    )
    lines, timeline = await profile(load, arguments.directory, arguments.requests, arguments.audio_edge)
    print("\n".join(lines))
    if arguments.out:
        arguments.out.write_text(json.dumps(timeline) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.trace", description=__doc__.splitlines()[0])
    parser.add_argument("directory", metavar="DIR", type=pathlib.Path, help="what the server was given as bus.trace")
    parser.add_argument("--url", help="the server (default: where `omni-bus up` listens)")
    parser.add_argument("--requests", type=int, default=5, help="of which the median counts (default: 5)")
    parser.add_argument("--out", metavar="FILE.json", type=pathlib.Path, help="write the timeline here")
    parser.add_argument("--audio-edge", default="code2wav->client", help="that brings audio (default: code2wav->client)")
    parser.add_argument("--prompt-words", type=int, default=60)
    parser.add_argument("--text-tokens", type=int)
    parser.add_argument("--frames", type=int)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    try:
        asyncio.run(_main(arguments))
    except (OmniBusError, ValueError, OSError) as error:
        print(f"bench.trace: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
