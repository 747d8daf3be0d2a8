"""End of speech → first audio through the Realtime socket, with and without work done during speech; interruption → silence; load.

    python -m bench.realtime [--turns 12] [--sessions 1,8,32] [--out bench/results]

Speech is sent in real time. By hand: the client commits and asks for the answer at the moment its last sample is sent. By the
server's turn detection (server_vad, 500 ms of silence): from the same moment, and from the server's speech_stopped. Both settings of
`api.voice_prepare` are measured in one run, on two servers that take turns. An answer is cancelled at its first audio. The weights of
the Qwen3-Omni are random and small.

With --out each part is written as soon as it has been measured; the same command again goes on behind the last one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from bench.demo import ROOT, free_port, serving
from bench.quickstart import machine
from bench.realtime_report import of_turns, summary, tables
from bench.realtime_socket import RATE
from bench.realtime_turns import LONG, SHORT, Model, Turn, interruption, load, pcm, turns

LENGTH = (
    "stages.thinker.sampling.ignore_eos=true",
    "stages.talker.sampling.ignore_eos=true",
    "stages.talker.sampling.max_tokens=60",
)
PARTS = ("turns", "interruption", "load")
PREPARES = (True, False)  # the two servers, in this order


class Result:
    """What has been measured: a part's name → its figures. `path`: where it is kept as JSON, and beside that as Markdown."""

    def __init__(self, path: pathlib.Path | None, asked: dict[str, Any]) -> None:
        self._path = path
        self._asked = asked
        self.parts: dict[str, Any] = {}
        self.seconds: dict[str, float] = {}
        self.load_average = {"before": round(os.getloadavg()[0], 2)}
        if path is not None and path.exists():
            before = json.loads(path.read_text())
            if before.get("asked") == asked:
                self.parts, self.seconds = before["parts"], before["seconds"]
                self.load_average = before["machine"]["load_average"]

    def add(self, name: str, part: Any, seconds: float) -> None:
        self.parts[name], self.seconds[name] = part, round(seconds, 1)
        self.load_average["after"] = round(os.getloadavg()[0], 2)
        if self._path is None:
            return
        about = machine() | {"load_average": self.load_average}
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        head = {"benchmark": "realtime", "date": today, "machine": about, "asked": self._asked}
        self._path.write_text(json.dumps(head | {"seconds": self.seconds, "parts": self.parts}, indent=1) + "\n")
        said = ", ".join(f"{key} {value}" for key, value in about.items())
        title = f"# The Realtime socket, {today}\n\n`python -m bench.realtime {' '.join(sys.argv[1:])}`\n\n{said}\n\n"
        self._path.with_suffix(".md").write_text(f"{title}{tables(self.parts)}\n")


async def measured_turns(servers: list[str], model: Model, count: int) -> list[dict[str, Any]]:
    """A row for each server."""
    speech = pcm(model.question)
    found = await turns(servers, model, speech, count)
    return [
        {"prepare": prepare, "speech_s": round(len(speech) / 2 / RATE, 1)}
        | {kind: of_turns(taken) for kind, taken in kinds.items()}
        for prepare, kinds in zip(PREPARES, found, strict=True)
    ]


async def measured_interruptions(server: str, model: Model, count: int) -> dict[str, Any]:
    short = pcm(SHORT)
    cuts = [await interruption(server, model, short) for _ in range(count)]
    return {name: summary([cut[name] for cut in cuts]) for name in cuts[0]}


async def measured_load(servers: list[str], model: Model, sizes: list[int]) -> list[dict[str, Any]]:
    """A row for each size and server. The servers take turns in each size, and who is first changes."""
    rows: list[dict[str, Any]] = []
    speech = pcm(model.question)[: int(model.load_s * RATE) * 2]
    for sessions in sizes:
        rounds = model.rounds.get(sessions, 1)
        taken: list[list[Turn]] = [[] for _ in servers]
        for number in range(rounds):
            order = range(len(servers)) if number % 2 == 0 else reversed(range(len(servers)))
            for at in order:
                taken[at] += await load(servers[at], model, speech, sessions)
        for prepare, found in zip(PREPARES, taken, strict=True):
            counts = {
                "speech_s": round(len(speech) / 2 / RATE, 1),
                "sessions": sessions,
                "turns": 2 * sessions * rounds,
                "answered": len(found),
            }
            rows.append({"prepare": prepare, **counts, "figures": of_turns(found)})
    return rows


def measure(model: Model, arguments: argparse.Namespace, result: Result) -> None:
    """The parts of this model that are not there yet."""
    missing = [part for part in arguments.parts if f"{part}: {model.name}" not in result.parts]
    if not missing:
        return
    config = ROOT / "configs" / model.config
    with (
        serving(free_port(0), *model.settings, "api.voice_prepare=true", config=config) as prepares,
        serving(free_port(0), *model.settings, "api.voice_prepare=false", config=config) as waits,
    ):
        servers = [prepares.address, waits.address]
        for server in servers:
            asyncio.run(load(server, model, pcm(SHORT), 1))  # warms it up
        for part in missing:
            began = time.monotonic()
            if part == "turns":
                figures: Any = asyncio.run(measured_turns(servers, model, arguments.turns))
            elif part == "interruption":
                figures = asyncio.run(measured_interruptions(servers[0], model, arguments.interruptions))
            else:
                figures = asyncio.run(measured_load(servers, model, arguments.sessions))
            result.add(f"{part}: {model.name}", figures, time.monotonic() - began)
            print(json.dumps({f"{part}: {model.name}": figures}), flush=True)


@contextlib.contextmanager
def models() -> Iterator[tuple[Model, Model]]:
    """The quickstart, and a tiny Qwen3-Omni whose checkpoint lives as long as the block."""
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = pathlib.Path(scratch) / "tiny"
        command = [sys.executable, "-m", "omni_bus", "fixture", "qwen3-omni", str(checkpoint), "--size", "tiny", "--seed", "2"]
        subprocess.run(command, check=True)
        # Answers of one length: 4.8 s of speech.
        full = (f"model.path={checkpoint}", *LENGTH)
        yield (
            Model("tiny Qwen3-Omni", "qwen3-omni-tiny", "qwen3_omni_tiny.toml", LONG, 24, 2.4, 8.6, {1: 2, 8: 2, 32: 2}, full),
            Model("quickstart", "cascade", "quickstart.toml", SHORT, 24, 2.4, 2.0, {1: 2}),
        )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.realtime", description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=12, help="of each kind and setting")
    parser.add_argument("--interruptions", type=int, default=6)
    parser.add_argument("--sessions", type=lambda text: [int(part) for part in text.split(",")], default=[1, 8, 32])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=pathlib.Path, help="a directory for the result, as JSON and Markdown")
    arguments = parser.parse_args()
    asked = {"turns": arguments.turns, "interruptions": arguments.interruptions, "sessions": arguments.sessions}
    path = None
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        path = arguments.out / f"{datetime.datetime.now(datetime.UTC).date().isoformat()}-realtime.json"
    result = Result(path, asked)
    with models() as each:
        for model in each:
            measure(model, arguments, result)
    print(tables(result.parts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
