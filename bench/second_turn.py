"""What a conversation's second turn costs where its first one is kept, and where it is not: the prefix cache, media included.

    python -m bench.second_turn --out DIR --model FIXTURE [--size full|tiny] [--device cuda:0] [--rounds 8] [--budget 120]

Each round is one conversation, text answers only: a first turn; its second turn, of which all but the last question was computed
before; and the same two turns with other words and other sound, of which nothing was. Time to the first token of each, in turns.
Two kinds: a question with 30 s of sound, and a long text. Written: DATE-second-turn.md.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import dataclasses
import datetime
import pathlib
import random
import shutil
import statistics
import sys
import tempfile
import time
from typing import Any

import numpy as np
import uvloop

from bench.demo import free_port
from bench.h200 import CONFIGS, ON_DEVICE, smi, versions
from bench.measured_server import MeasuredServer
from bench.spoken import wav
from omni_bus.bench_load import WORDS, Load, Measured, one
from omni_bus.http_client import first_model

RATE = 16000  # of the sound
SOUND_S = 30.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Turns(Load):
    """One conversation: its first question, or both with the first answer between them. Only equal `seed`s say the same."""

    sound_s: float
    turns: int

    def body(self, index: int) -> dict[str, Any]:
        draw = random.Random(f"{self.seed} words")
        text = " ".join(draw.choice(WORDS) for _ in range(self.prompt_words))
        first: Any = text
        if self.sound_s:
            noise = np.random.default_rng(self.seed).normal(0.0, 3000.0, int(RATE * self.sound_s)).astype(np.int16)
            sound = {"data": base64.b64encode(wav(noise.tobytes(), RATE)).decode(), "format": "wav"}
            first = [{"type": "input_audio", "input_audio": sound}, {"type": "text", "text": text}]
        messages = [{"role": "user", "content": first}]
        if self.turns == 2:
            messages += [{"role": "assistant", "content": "silver river"}, {"role": "user", "content": "And under the bridge?"}]
        return {
            "model": self.model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            "modalities": ["text"],
            "temperature": 0.0,
            "max_tokens": 8,
            "ignore_eos": True,
        }


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.second_turn", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--model", type=pathlib.Path, required=True, help="a checkpoint, or a fixture without weights")
    parser.add_argument("--size", choices=tuple(CONFIGS), default="full")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--words", type=int, default=1500, help="of the long text (default: 1500)")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--budget", type=float, default=120.0, metavar="S", help="for the passes, once the server is ready")
    parser.add_argument("--set", dest="sets", action="append", default=[], metavar="KEY=VALUE")
    return parser.parse_args()


async def measure(arguments: argparse.Namespace, url: str) -> dict[str, list[dict[str, Measured]]]:
    """Kind → rounds, each with its three requests. Raises RuntimeError where one fails."""
    name, seeds = await first_model(url), iter(range(1, 1_000_000))

    async def ask(seed: int, sound_s: float, words: int, turns: int) -> Measured:
        load = Turns(
            url=url,
            model=name,
            ours=True,
            prompt=None,
            prompt_words=words,
            audio=None,
            speech=False,
            text_tokens=8,
            frames=None,
            speech_stage="",
            seed=seed,
            sound_s=sound_s,
            turns=turns,
        )
        said = await one(load, 0)
        if said.error is not None or said.first_text_s is None:
            raise RuntimeError(said.error or "an answer without text")
        return said

    kinds = {f"{SOUND_S:.0f} s of sound": (SOUND_S, 10), f"{arguments.words} words": (0.0, arguments.words)}
    found: dict[str, list[dict[str, Measured]]] = {kind: [] for kind in kinds}
    async with asyncio.timeout(arguments.budget):
        for number in range(arguments.rounds + 1):
            for kind, (sound_s, words) in kinds.items():
                seed, other = next(seeds), next(seeds)
                turns = {"first": await ask(seed, sound_s, words, 1), "kept": await ask(seed, sound_s, words, 2)}
                turns["anew"] = await ask(other, sound_s, words, 2)
                if number:  # the first round warms up
                    found[kind].append(turns)
    return found


def table(found: dict[str, list[dict[str, Measured]]]) -> list[str]:
    lines = [
        "| first question | prompt of the second turn, tokens | of them kept | first turn, TTFT ms | second, kept | second, anew | kept / anew |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for kind, rounds in found.items():
        at = {
            name: statistics.median(1e3 * (one[name].first_text_s or 0.0) for one in rounds)
            for name in ("first", "kept", "anew")
        }
        kept = [one["kept"] for one in rounds]
        lines.append(
            f"| {kind} | {statistics.median(one.prompt_tokens for one in kept):.0f} "
            f"| {statistics.median(one.cached_tokens for one in kept):.0f} | {at['first']:.1f} | {at['kept']:.1f} "
            f"| {at['anew']:.1f} | {at['kept'] / at['anew']:.2f} |"
        )
        assert not any(one["anew"].cached_tokens > 64 for one in rounds), "what was to be computed anew was kept"
    return lines


def main() -> int:
    arguments = parsed()
    arguments.out.mkdir(parents=True, exist_ok=True)
    sets = [f"model.path={arguments.model}", *(f'stages.{stage}.devices=["{arguments.device}"]' for stage in ON_DEVICE)]
    if arguments.size == "full":
        sets += [f'stages.{stage}.load="random"' for stage in ON_DEVICE]
    scratch = pathlib.Path(tempfile.mkdtemp(prefix="ob-", dir="/tmp"))  # Unix sockets need a short path
    server = MeasuredServer(CONFIGS[arguments.size], free_port(0), [*sets, *arguments.sets], scratch)
    try:
        ready = server.wait_ready(240.0)
        if ready is None:
            print(server.tails(25), file=sys.stderr)
            return 1
        began = time.perf_counter()
        found = uvloop.run(measure(arguments, server.address))
    except (RuntimeError, TimeoutError) as error:
        print(f"bench.second_turn: {type(error).__name__}: {error}\n{server.tails(25)}", file=sys.stderr)
        return 1
    finally:
        server.stop()
        shutil.rmtree(scratch, ignore_errors=True)
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    about = [*smi("gpu=name,driver_version"), *(f"{name} {value}" for name, value in versions().items())]
    lines = [
        f"# The second turn of a conversation, {date}",
        "",
        f"`{' '.join(['python', '-m', 'bench.second_turn', *sys.argv[1:]])}`",
        "",
        f"{'; '.join(about)}. Medians of {arguments.rounds} conversations, one at a time, in {time.perf_counter() - began:.0f} s.",
        "",
        *table(found),
    ]
    (arguments.out / f"{date}-second-turn.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
