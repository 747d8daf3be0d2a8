"""What one hop through the broker costs: event in at one process, event out at another, on one host.

    python bench/hop.py [--count 2000] [--interval-ms 2] [--out bench/results]

Three processes as in a server: the broker, a worker (a bare DEALER that blocks in poll, as workers do) and a client (BusClient on
uvloop, as in the API). Timestamps are CLOCK_MONOTONIC, which all processes of a host share; a sample runs from before the send
call to the moment the receiver holds the decoded event. In the same run, the yardstick: a bare ZeroMQ round trip between two
asyncio processes, which passes as many sockets as one hop does.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence

import msgspec
import uvloop
import zmq
import zmq.asyncio

from omni_bus import events, wire
from omni_bus.client import BusClient, ClientStream
from omni_bus.deployment import ApiConfig, BusConfig, Deployment, EdgeConfig, ModelConfig, RunDir, StageConfig
from omni_bus.events import RequestOptions, StageReplica
from omni_bus.payloads import ChatInput, Message, TextDelta, TextPart
from omni_bus.spec import load_pipeline

PIPELINE = load_pipeline("probe")
OUT_EDGE, IN_EDGE = "source->client", "client->source"
BARE, BOTH = "bare ZeroMQ round trip, two asyncio processes", "hop, both directions"
WARM_UP = 200  # samples left out


def chat(text: str) -> ChatInput:
    return ChatInput((Message("user", (TextPart(text),)),))


def worker(run_dir: RunDir) -> None:
    """The worker's side: send `count` timestamps at the asked pace, then note how old those are that come from the client."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.ROUTING_ID, b"source.0")
    socket.connect(run_dir.broker)
    decode_input = wire.PayloadDecoder(PIPELINE)
    age_ns: list[int] = []
    request, credits, seq, count, interval_ms = 0, 0, 0, 0, 0

    def send(event: events.Event, *frames: bytes) -> None:
        socket.send_multipart([wire.encode(event), *frames])

    def output(text: str, last: bool = False) -> None:
        nonlocal seq
        send(events.Chunk(request, OUT_EDGE, seq, last), wire.encode(TextDelta(text)))
        seq += 1

    replica = StageReplica("source", "cpu", 1)
    send(events.Register(worker="source.0", pid=os.getpid(), host="", boot="", replicas=(replica,)))
    send(events.Ready("source", 1))
    while True:
        pacing = seq < count and credits > 0
        if not socket.poll(interval_ms if pacing else None):
            credits -= 1
            output(str(time.monotonic_ns()))
            continue
        header, *frames = socket.recv_multipart()
        now = time.monotonic_ns()
        match wire.at_worker(header):
            case events.Open(request=opened, outputs=routes):
                request, credits, seq, count = opened, routes[0].credits, 0, 0
                age_ns.clear()
            case events.Consumed(count=returned):
                credits += returned
            case events.Chunk(last=last):
                payload = decode_input(IN_EDGE, frames[0])
                assert isinstance(payload, ChatInput) and isinstance(payload.messages[0].parts[0], TextPart)
                text = payload.messages[0].parts[0].text
                send(events.Consumed(request, IN_EDGE, 1))
                if count == 0:
                    count, interval_ms = (int(word) for word in text.split())
                    continue
                age_ns.append(now - int(text))
                if last:
                    output(json.dumps(age_ns), last=True)
                    send(events.Done(request, "source"))
            case events.Shutdown():
                return


async def echo(endpoint: str) -> None:
    """The other side of the yardstick."""
    socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
    socket.connect(endpoint)
    while True:
        await socket.send_multipart(await socket.recv_multipart())


async def round_trips(endpoint: str, count: int, interval_s: float) -> list[int]:
    socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
    socket.bind(endpoint)
    took = []
    for _ in range(count):
        await asyncio.sleep(interval_s)
        start = time.monotonic_ns()
        await socket.send_multipart([b"header", b"payload"])
        await socket.recv_multipart()
        took.append(time.monotonic_ns() - start)
    socket.close(0)
    return took


def text_of(payload: msgspec.Struct) -> str:
    assert isinstance(payload, TextDelta)
    return payload.text


async def hops(stream: ClientStream, count: int, interval_s: float) -> tuple[list[int], list[int]]:
    """(worker → client, client → worker), nanoseconds each."""
    items = aiter(stream)
    outward = []
    for _ in range(count):
        item = await anext(items)
        outward.append(time.monotonic_ns() - int(text_of(item.payload)))
    for index in range(count):
        await asyncio.sleep(interval_s)
        await stream.append(chat(str(time.monotonic_ns())), last=index == count - 1)
    inward = json.loads(text_of((await anext(items)).payload))
    return outward, inward


def cpu_s(pid: int) -> float:
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def figures(samples_ns: Sequence[int]) -> dict[str, float]:
    """Percentiles in milliseconds, without the warm-up."""
    kept = sorted(samples_ns[WARM_UP:])
    return {
        name: round(kept[min(len(kept) - 1, int(len(kept) * share))] / 1e6, 3)
        for name, share in (("p50_ms", 0.5), ("p90_ms", 0.9), ("p99_ms", 0.99), ("max_ms", 1.0))
    }


def machine() -> dict[str, str | int | float]:
    info = pathlib.Path("/proc/cpuinfo").read_text()
    model = next((line.split(":", 1)[1].strip() for line in info.splitlines() if line.startswith("model name")), "unknown")
    return {
        "cpu": model,
        "cores": os.cpu_count() or 0,
        "load_1min": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "pyzmq": zmq.__version__,
        "libzmq": zmq.zmq_version(),
        "msgspec": msgspec.__version__,
        "uvloop": importlib.metadata.version("uvloop"),
    }


async def measure(run_dir: RunDir, broker: int, count: int, interval_ms: int) -> dict[str, object]:
    """`broker` is the pid of the broker process."""
    client = await BusClient.connect(run_dir.broker, PIPELINE)
    while not (await client.status()).ready:  # noqa: ASYNC110  (nothing is measured yet)
        await asyncio.sleep(0.05)
    samples = count + WARM_UP
    bare = await round_trips(bare_endpoint(run_dir), samples, interval_ms / 1000)
    before = cpu_s(broker)
    stream = await client.submit(options=RequestOptions(), payload=chat(f"{samples} {interval_ms}"), last=False)
    outward, inward = await hops(stream, samples, interval_ms / 1000)
    used = cpu_s(broker) - before
    await client.close()
    both = [sample for pair in zip(outward, inward, strict=True) for sample in pair]
    return {
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "machine": machine(),
        "samples": count,
        "interval_ms": interval_ms,
        BARE: figures(bare),
        "hop worker → broker → client": figures(outward),
        "hop client → broker → worker": figures(inward),
        BOTH: figures(both),
        "broker_cpu_us_per_chunk": round(used / (2 * samples) * 1e6, 1),
    }


def bare_endpoint(run_dir: RunDir) -> str:
    return f"ipc://{run_dir.path}/bare.sock"


def run(count: int, interval_ms: int) -> dict[str, object]:
    """Start the processes, measure, leave nothing behind."""
    run_dir = RunDir.create()
    run_dir.write(
        Deployment(
            model=ModelConfig(pipeline="probe"),
            api=ApiConfig(),
            bus=BusConfig(lost_after_s=3600.0),
            stages={"source": StageConfig(devices=("cpu",))},
            edges={edge.name: EdgeConfig(credits=edge.credits) for edge in PIPELINE.edges},
        )
    )
    own = [sys.executable, str(pathlib.Path(__file__).resolve()), "--role"]
    broker = subprocess.Popen([sys.executable, "-m", "omni_bus.broker_main", str(run_dir.path)], stderr=subprocess.DEVNULL)
    others = [
        subprocess.Popen([*own, "worker", str(run_dir.path)]),
        subprocess.Popen([*own, "echo", bare_endpoint(run_dir)]),
    ]
    try:
        return uvloop.run(measure(run_dir, broker.pid, count, interval_ms))
    finally:
        for process in (broker, *others):
            process.terminate()
            process.wait(10)
        shutil.rmtree(run_dir.path)


def table(result: dict[str, object]) -> str:
    rows = {name: value for name, value in result.items() if isinstance(value, dict) and "p50_ms" in value}
    lines = ["| | p50 ms | p90 ms | p99 ms | max ms |", "| --- | --- | --- | --- | --- |"]
    lines += [f"| {name} | {' | '.join(f'{value:.3f}' for value in row.values())} |" for name, row in rows.items()]
    return "\n".join(lines)


def ratio(result: dict[str, object]) -> float:
    hop, bare = result[BOTH], result[BARE]
    assert isinstance(hop, dict) and isinstance(bare, dict)
    return float(hop["p50_ms"]) / float(bare["p50_ms"])


def report(result: dict[str, object]) -> str:
    facts = result["machine"]
    assert isinstance(facts, dict)
    return "\n".join(
        (
            f"# One broker hop, {result['date']}",
            "",
            f"`python bench/hop.py --count {result['samples']} --interval-ms {result['interval_ms']}`",
            "",
            ", ".join(f"{name} {value}" for name, value in facts.items()),
            "",
            table(result),
            "",
            f"Hop to bare round trip, p50: {ratio(result):.2f}.",
            f"Broker CPU per chunk, its credit included: {result['broker_cpu_us_per_chunk']} µs.",
            "",
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure one hop through the broker.")
    parser.add_argument("--count", type=int, default=2000, help="samples per direction")
    parser.add_argument("--interval-ms", type=int, default=2, help="pause between samples")
    parser.add_argument("--out", type=pathlib.Path, help="folder for DATE-hop.md and DATE-hop.json")
    parser.add_argument("--role", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role:
        role, where = arguments.role
        if role == "worker":
            worker(RunDir(pathlib.Path(where)))
        else:
            asyncio.run(echo(where))
        return
    result = run(arguments.count, arguments.interval_ms)
    print(report(result))
    if arguments.out:
        stem = arguments.out / f"{result['date']}-hop"
        stem.with_suffix(".md").write_text(report(result))
        stem.with_suffix(".json").write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
