"""What one codec frame costs the hosts of Talker and Code2Wav, without any model: microseconds of Python between two replays.

    python -m bench.host_frame [--rows 1,16,64] [--frames 150] [--rounds 7] [--profile] [--json FILE]

The tiny Qwen3-Omni's own stages, hosted as a worker hosts them, with the form that a card runs by graphs; what a graph would hold
is replaced by results that lie there already. So what is timed is what the card waits for between two steps: schedule, inputs' table,
hand-over, emission, sequence numbers, encoding, and the consumer's credits coming back. Sockets and the broker are left out
(bench/hop.py has those).
"""

from __future__ import annotations

import argparse
import collections
import cProfile
import functools
import json
import os
import pathlib
import platform
import pstats
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from bench.bare_stages import checkpoint, prompts
from omni_bus import events, wire
from omni_bus.connectors.base import Frame
from omni_bus.connectors.select import Connectors
from omni_bus.deployment import EdgeConfig, StageConfig
from omni_bus.events import EdgeRoute, RequestOptions
from omni_bus.payloads import AudioDelta
from omni_bus.sampling import SamplingParams
from omni_bus.spec import load_pipeline
from omni_bus.stages.ar.stage import ARStage
from omni_bus.stages.contract import StageContext
from omni_bus.stages.qwen3_omni.code2wav import Code2WavStage
from omni_bus.stages.qwen3_omni.code2wav_graphs import GraphedDecoder
from omni_bus.stages.qwen3_omni.payloads import TalkerPrompt, ThinkerTokens
from omni_bus.workers.host import StageHost
from omni_bus.workers.outgoing import Outgoing

TEXT, CODES, AUDIO = "thinker->talker", "talker->code2wav", "code2wav->client"
PROMPT = "processor->talker"
PIPELINE = load_pipeline("qwen3_omni")


class Hosted:
    """One stage as its worker has it. What it sends is kept, encoded as it would be for the socket."""

    def __init__(self, name: str, path: str, rows: int, options: dict[str, Any]) -> None:
        self.name = name
        self.sent: collections.deque[tuple[bytes, Sequence[Frame]]] = collections.deque()
        edges = {edge.name: EdgeConfig(credits=edge.credits) for edge in PIPELINE.edges}
        self.stage = PIPELINE.stage(name).factory()
        self.stage.load(
            StageContext(
                stage=name,
                pipeline=PIPELINE,
                model_path=path,
                device="cpu",
                config=StageConfig(devices=("cpu",), max_batch=rows, options={"load": "random", "graphs": "plain", **options}),
                edges=edges,
                progress=lambda fraction, detail: None,
            )
        )
        connectors = Connectors("hostframe")
        self.host = StageHost(
            name,
            self.stage,
            pipeline=PIPELINE,
            sampling=PIPELINE.stage(name).sampling or SamplingParams(),
            connectors=connectors,
            outgoing=Outgoing(connectors, self._send),
            send=self._send,
        )

    def _send(self, event: events.Event, frames: Sequence[Frame]) -> None:
        self.sent.append((wire.encode(event), frames))

    def open(self, request: int, inputs: tuple[str, ...], output: str, frames: int) -> None:
        sampling = SamplingParams(max_tokens=frames + 1, min_tokens=frames + 1, seed=request)
        self.host.open(
            events.Open(
                request=request,
                stage=self.name,
                options=RequestOptions(modalities=("text", "audio"), sampling={"talker": sampling}),
                inputs=inputs,
                outputs=(EdgeRoute(output, "shm" if output == CODES else "inline", 64),),
                deadline_s=3600.0,
            )
        )

    def chunk(self, request: int, edge: str, payload: Any) -> None:
        """The one and last chunk of an edge."""
        self.host.chunk(events.Chunk(request, edge, 0, True, ()), [wire.encode(payload)])

    def turn(self, arrived: Sequence[list[bytes]], profile: cProfile.Profile | None = None) -> float:
        """One round of the engine loop over these messages of the broker: seconds of this thread."""
        if profile is not None:
            profile.enable()
        begun = time.thread_time()
        for header, *frames in arrived:
            event = wire.at_worker(header)
            if isinstance(event, events.Consumed):
                self.host.consumed(event)
            elif isinstance(event, events.Chunk):
                self.host.chunk(event, frames)
        if self.host.has_work():
            self.host.step()
        self.host.send()
        spent = time.thread_time() - begun
        if profile is not None:
            profile.disable()
        return spent

    def chunks(self, edge: str) -> list[tuple[events.Chunk, list[bytes]]]:
        """Those on that edge that were sent since the last call, as messages. Raises AssertionError where a request failed."""
        found = []
        while self.sent:
            header, frames = self.sent.popleft()
            event = wire.at_broker(header)
            assert not isinstance(event, events.Failed), event
            if isinstance(event, events.Chunk) and event.edge == edge:
                found.append((event, [header, *map(bytes, frames)]))
        return found

    def close(self, requests: Sequence[int]) -> None:
        for request in requests:
            self.host.close(events.Close(request, self.name))


def consumed(chunks: Sequence[tuple[events.Chunk, list[bytes]]]) -> list[list[bytes]]:
    return [[wire.encode(events.Consumed(event.request, event.edge, 1))] for event, _ in chunks]


def without_talker(hosted: Hosted) -> None:
    """Every step's results lie there already."""
    stage = hosted.stage
    assert isinstance(stage, ARStage)
    graphs = stage._loaded[1].graphs
    assert graphs is not None
    for bucket in graphs._buckets:
        for name in ("decode", "tail"):
            form = getattr(bucket, name)
            bucket.fill_up(0)
            bucket.device.copy_(bucket.host)
            result = form.step()
            result[0][:, -1] = 1  # all are finite
            form.step = functools.partial(lambda found: found, result)


def without_code2wav(hosted: Hosted) -> None:
    stage = hosted.stage
    assert isinstance(stage, Code2WavStage) and isinstance(stage._decoder, GraphedDecoder)
    steps = stage._decoder._steps
    for shape in steps:
        steps[shape] = lambda: None


def talk(
    talker: Hosted, prompt: TalkerPrompt, requests: Sequence[int], frames: int, profile: cProfile.Profile | None
) -> tuple[float, list[list[bytes]]]:
    """(µs a frame, the chunks that left, as messages)"""
    for request in requests:
        talker.open(request, (TEXT, PROMPT), CODES, frames)
        talker.chunk(request, PROMPT, prompt)
        talker.chunk(request, TEXT, ThinkerTokens(tuple(range(20, 60)), True))
    messages: list[list[bytes]] = []
    arrived: list[list[bytes]] = []
    spent, counted = 0.0, 0
    while talker.host.has_work():
        seconds = talker.turn(arrived, profile if len(messages) >= len(requests) else None)
        made = talker.chunks(CODES)
        if len(messages) >= len(requests):  # the prompts are computed by then, with all that a model does
            spent, counted = spent + seconds, counted + len(made)
        messages += [message for _, message in made]
        arrived = consumed(made)
    talker.turn(arrived)
    talker.close(requests)
    assert len(messages) == len(requests) * (frames + 1), len(messages)  # the last one has no frame
    return spent / counted * 1e6, messages


def decode(
    code2wav: Hosted,
    requests: Sequence[int],
    messages: Sequence[list[bytes]],
    frames: int,
    profile: cProfile.Profile | None,
) -> float:
    """µs a frame. Frames come as the Talker makes them: one of each row a turn."""
    for request in requests:
        code2wav.open(request, (CODES,), AUDIO, frames)
    arrived: list[list[bytes]] = []
    spent, spoken = 0.0, 0
    payload = wire.PayloadDecoder(PIPELINE)
    begin = 0
    while begin < len(messages) or code2wav.host.has_work():
        spent += code2wav.turn([*arrived, *messages[begin : begin + len(requests)]], profile)
        begin += len(requests)
        made = code2wav.chunks(AUDIO)
        for _, (_, audio, *_) in made:
            delta = payload(AUDIO, audio)
            assert isinstance(delta, AudioDelta)
            spoken += delta.frames
        arrived = consumed(made)
    code2wav.turn(arrived)
    assert spoken == len(requests) * frames, spoken
    code2wav.close(requests)
    return spent / (len(requests) * frames) * 1e6


def measure(
    path: str, prompt: TalkerPrompt, rows: int, frames: int, rounds: int, profile: cProfile.Profile | None = None
) -> dict[str, Any]:
    """CPU time of the one thread that does it all; the smallest of the rounds and their median: a busy machine only ever adds."""
    talker = Hosted("talker", path, rows, {"kv_blocks": rows * ((frames + len(prompt.token_ids)) // 16 + 3)})
    code2wav = Hosted("code2wav", path, rows, {})
    without_talker(talker)
    without_code2wav(code2wav)
    found: dict[str, list[float]] = {"talker": [], "code2wav": []}
    for number in range(rounds):
        requests = range(number * rows + 1, number * rows + rows + 1)
        each, messages = talk(talker, prompt, requests, frames, profile)
        found["talker"].append(each)
        found["code2wav"].append(decode(code2wav, requests, messages, frames, profile))
    return {
        "rows": rows,
        **{f"{stage}_us": round(min(times), 1) for stage, times in found.items()},
        **{f"{stage}_p50_us": round(statistics.median(times), 1) for stage, times in found.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.host_frame", description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="1,16,64", help="rows in a step (default: 1,16,64)")
    parser.add_argument("--frames", type=int, default=150, help="of each row (default: 150)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--profile", action="store_true", help="print where the time goes, too (and then it is longer)")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    with checkpoint("tiny") as path:
        payload = prompts(path)[PROMPT][0].payload
        assert isinstance(payload, TalkerPrompt)
        results = []
        for rows in map(int, arguments.rows.split(",")):
            profile = cProfile.Profile(time.thread_time) if arguments.profile else None
            results.append(measure(path, payload, rows, arguments.frames, arguments.rounds, profile))
            print(json.dumps(results[-1]), flush=True)
            if profile is not None:
                pstats.Stats(profile).sort_stats("tottime").print_stats(40)
    if arguments.json:
        about = {"cpu": platform.processor(), "cores": os.cpu_count(), "load": os.getloadavg()[0], "torch": torch.__version__}
        arguments.json.write_text(json.dumps({**about, "frames": arguments.frames, "rows": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
