"""Qwen3-Omni at full size on one GPU under load, with random weights: figures, logs and memory into a directory.

    python -m bench.h200 --out DIR [--concurrency 1,4,8,16,32,64] [--budget 480] [--placement processes|mps|threads|one]
                         [--set KEY=VALUE]…
    python -m bench.h200 --out DIR --size tiny --device cpu --concurrency 1,4        # the script itself, tried on a CPU

The load: a closed loop of streaming chats, a prompt of 60 words, 64 text tokens forced, speech held to 128 codec frames, 3 x
concurrency requests; for each concurrency a warm-up pass, then the pass that counts. Written: FILE.json (`rows`, as `omni-bus
bench --json` writes them), FILE.md (beside the baseline), FILE.log (ends of all logs, metrics, GPU memory). What fails is told, and
the rest goes on; the files are written anew after each pass, so that a run that is cut short leaves what it has.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import datetime
import importlib.metadata
import itertools
import json
import os
import pathlib
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import uvloop

from bench.demo import ROOT, free_port
from bench.measured_server import MeasuredServer
from bench.trace import profile
from omni_bus.bench_load import Load, Measured, closed_loop
from omni_bus.bench_report import markdown, report, row, summarise
from omni_bus.commands.bench import own, read_baseline
from omni_bus.errors import ConfigError, OmniBusError
from omni_bus.http_client import first_model, request
from omni_bus.speech_stream import underrun_s

CONFIGS = {"full": ROOT / "configs" / "qwen3_omni.toml", "tiny": ROOT / "configs" / "qwen3_omni_tiny.toml"}
BASELINE = ROOT / "bench" / "results" / "2026-11-30-vllm-omni-0.26.0-h200.json"
ON_DEVICE = ("thinker", "talker", "code2wav")
CLOSING_S = 20.0  # of the budget, kept for stopping the server and writing
PACKAGES = ("torch", "triton", "transformers", "cupy-cuda13x", "pyzmq", "msgspec", "aiohttp", "uvloop")


@dataclasses.dataclass
class Result:
    """What there is to write, at any time."""

    about: dict[str, Any]
    passes: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    problems: list[str] = dataclasses.field(default_factory=list)
    log: str = ""
    trace: list[str] = dataclasses.field(default_factory=list)  # lines of the note
    timeline: dict[str, Any] | None = None

    def problem(self, text: str) -> None:
        print(f"bench.h200: {text}", file=sys.stderr, flush=True)
        self.problems.append(text)

    def counting(self) -> list[dict[str, Any]]:
        """The last pass of each concurrency."""
        return list({one["concurrency"]: one for one in self.passes}.values())

    def rows(self) -> list[dict[str, Any]]:
        return [row(one) for one in self.counting()]


# ---- what is started


def deployment_sets(arguments: argparse.Namespace, model: pathlib.Path) -> list[str]:
    """--set of `omni-bus up`; the user's own come last and win."""
    sets = [f"model.path={model}", "model.name=omni-bus"]
    for stage in ON_DEVICE:
        sets.append(f'stages.{stage}.devices=["{arguments.device}"]')
        if arguments.weights == "random":
            sets.append(f'stages.{stage}.load="random"')
        if arguments.placement in ("one", "threads"):
            sets.append(f'stages.{stage}.process="gpu"')
        if arguments.placement == "threads":
            sets.append(f'stages.{stage}.loop="own"')
    sets += [f"stages.{stage}.max_batch={arguments.max_batch}" for stage in ON_DEVICE]
    sets.append(f'bus.mps="{"on" if arguments.placement == "mps" else "off"}"')
    if arguments.trace:
        sets += [f"bus.trace={arguments.trace_directory}", "bus.heartbeat_s=0.5"]
    return [*sets, *arguments.sets]


def write_fixture(size: str, weights: str, directory: pathlib.Path) -> None:
    command = [sys.executable, "-m", "omni_bus", "fixture", "qwen3-omni", str(directory), "--size", size]
    if weights == "random":
        command += ["--no-weights", "--tokenizer", "tiny"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode != 0:
        raise ConfigError(f"the fixture cannot be written: {done.stderr.strip()[-500:]}")


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def smi(what: str) -> list[str]:
    """Lines of nvidia-smi; none where there is no such command."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", f"--query-{what}", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout.strip().splitlines()


# ---- what is measured


def load_of(arguments: argparse.Namespace, url: str, model: str) -> Load:
    return Load(
        url=url,
        model=model,
        ours=True,
        prompt=None,
        prompt_words=arguments.prompt_words,
        audio=None,
        speech=True,
        text_tokens=arguments.text_tokens,
        temperature=arguments.temperature,
        frames=arguments.frames,
        speech_stage="talker",
        seed=arguments.seed,
    )


async def measure(arguments: argparse.Namespace, server: MeasuredServer, end: float, result: Result) -> None:
    """All passes, until `end` (time.monotonic). What fails is noted, and the next one tried."""
    url = server.address
    load = load_of(arguments, url, await first_model(url))
    begins = itertools.count(0, 100_000)  # no pass has the prompts of another: nothing of it may be cached
    for concurrency in arguments.concurrency:
        count = max(3 * concurrency, 6)
        for number in range(arguments.warmups + 1):
            left = end - time.monotonic()
            name = f"{concurrency} streams, pass {number + 1} of {arguments.warmups + 1}"
            if left <= 1:
                result.problem(f"{name}: left out, the budget is used up")
                break
            before = await steps(url)
            try:
                async with asyncio.timeout(left):
                    measured, seconds = await closed_loop(load, concurrency, count, first=next(begins))
            except TimeoutError:
                result.problem(f"{name}: not finished when the budget was used up")
                break
            summary = summarise(concurrency, measured, seconds)
            for error in dict.fromkeys(summary["errors"]):
                result.problem(f"{name}: {summary['errors'].count(error)} of {count} failed: {error}")
            if summary["figures"]:
                warm = number == arguments.warmups or arguments.warmups == 0
                said = {**summary, "warm": warm, "pass": number + 1, "stages": per_step(before, await steps(url))}
                result.passes.append({**said, "worst": worst(measured)})
                print("\n".join([f"-- {name}", *report(summary), *steps_told(said["stages"])]), flush=True)
                write_all(arguments, result)
            if summary["errors"]:
                print(server.tails(25), flush=True)
                if not await ready_again(server, min(end, time.monotonic() + arguments.ready_limit)):
                    result.problem("the server is not ready again")
                    return
        if concurrency == 1 and arguments.trace:
            await traced(arguments, load, end, result)


async def traced(arguments: argparse.Namespace, load: Load, end: float, result: Result) -> None:
    """Where the time of one first packet went."""
    try:
        async with asyncio.timeout(end - time.monotonic()):
            result.trace, result.timeline = await profile(load, arguments.trace_directory, 5, "code2wav->client")
    except (OmniBusError, ValueError, OSError, TimeoutError) as error:
        result.problem(f"the trace: {type(error).__name__}: {error}")
    else:
        print("\n".join(result.trace), flush=True)
        write_all(arguments, result)


def worst(measured: Sequence[Measured]) -> dict[str, Any] | None:
    """The request that left its listener in silence for longest, with its packets."""
    heard = [one for one in measured if one.error is None and one.packets]
    return own(max(heard, key=lambda one: underrun_s(one.packets))) if heard else None


async def ready_again(server: MeasuredServer, until: float) -> bool:
    """Whether the server takes requests, or does so again by `until` (time.monotonic): it starts again what has died."""
    while server.running and time.monotonic() < until:
        with contextlib.suppress(OmniBusError, TimeoutError):
            async with asyncio.timeout(5), request("GET", f"{server.address}/ready") as response:
                await response.body()
                return True
        await asyncio.sleep(0.5)
    return False


async def steps(url: str) -> dict[str, tuple[int, float]]:
    """Stage → (steps run, seconds in them), as of the workers' last heartbeat."""
    try:
        async with asyncio.timeout(5), request("GET", f"{url}/v1/status") as response:
            stages = json.loads(await response.body())["stages"]
    except (OmniBusError, TimeoutError):
        return {}
    loads = {stage["name"]: [replica["load"] for replica in stage["replicas"] if replica["load"]] for stage in stages}
    return {name: (sum(one["steps"] for one in found), sum(one["busy_s"] for one in found)) for name, found in loads.items()}


def per_step(before: dict[str, tuple[int, float]], after: dict[str, tuple[int, float]]) -> dict[str, dict[str, float]]:
    """What each stage did between two looks; a heartbeat's time of it may be missing or too much."""
    done = {}
    for name in before.keys() & after.keys():
        count, busy = after[name][0] - before[name][0], after[name][1] - before[name][1]
        done[name] = {"steps": count, "busy_s": round(busy, 3), "ms_per_step": round(1e3 * busy / count, 3) if count else 0.0}
    return {name: done[name] for name in after if name in done}


def steps_told(stages: dict[str, dict[str, float]]) -> Iterator[str]:
    for name, one in stages.items():
        yield f"  {name}: {one['steps']:.0f} steps of {one['ms_per_step']:.2f} ms"


# ---- what is written


def note(arguments: argparse.Namespace, result: Result) -> str:
    baseline = read_baseline(arguments.baseline)
    about = result.about
    cold = [str(one["concurrency"]) for one in result.counting() if not one["warm"]]
    lines = [
        f"# Qwen3-Omni ({arguments.size}, {arguments.weights} weights) under load, {about['date'][:10]}",
        "",
        f"`{about['command']}`",
        "",
        f"{', '.join(about['gpu']) or about['cpu']}; {', '.join(f'{name} {value}' for name, value in about['versions'].items())}",
        "",
        f"Placement: {arguments.placement}. Ready after {about.get('ready_s', '-')} s. A prompt of {arguments.prompt_words} words "
        f"({', '.join(sorted({str(one['prompt_tokens']) for one in result.passes})) or '-'} tokens), {arguments.text_tokens} text tokens "
        f"at temperature {arguments.temperature:g}, "
        f"speech held to {arguments.frames} frames, 3 x c requests, pass {arguments.warmups + 1} counts.",
        "",
        markdown([("Omni-Bus", result.rows()), (baseline.name, baseline.rows)]),
        "",
    ]
    if cold:
        lines += [f"At {', '.join(cold)} streams the time was used up after a warm-up pass, which is shown.", ""]
    for one in result.counting():
        split = ", ".join(f"{edge} {at:.1f}" for edge, at in one["first_chunk_ms"].items())
        lines.append(
            f"- {one['concurrency']} streams, first chunk of each edge (p50, ms since the broker had the request): {split}"
        )
        lines += [f"  - {text.strip()}" for text in steps_told(one["stages"])]
    if result.trace:
        lines += ["", "## One time to first packet at one stream", "", *result.trace]
    lines += ["", *(f"- problem: {text}" for text in result.problems)]
    return "\n".join(lines).rstrip() + "\n"


def write_all(arguments: argparse.Namespace, result: Result) -> None:
    path = arguments.out / f"{result.about['date'][:10]}-{arguments.label}"
    saved = {"name": "Omni-Bus", **result.about, "rows": result.rows(), "problems": result.problems, "passes": result.passes}
    path.with_name(f"{path.name}.json").write_text(json.dumps(saved, indent=1) + "\n")
    path.with_name(f"{path.name}.md").write_text(note(arguments, result))
    path.with_name(f"{path.name}.log").write_text(result.log)
    if result.timeline is not None:
        path.with_name(f"{path.name}-trace.json").write_text(json.dumps(result.timeline) + "\n")


async def metrics(url: str) -> str:
    async with asyncio.timeout(10), request("GET", f"{url}/metrics") as response:
        return (await response.body()).decode()


# ---- the whole


def run(arguments: argparse.Namespace, end: float, scratch: pathlib.Path, result: Result) -> None:
    model = arguments.model or scratch / "checkpoint"
    if arguments.model is None:
        write_fixture(arguments.size, arguments.weights, model)
    sets = deployment_sets(arguments, model)
    print("starting: " + " ".join(sets), flush=True)
    server = MeasuredServer(arguments.config or CONFIGS[arguments.size], free_port(0), sets, scratch)
    try:
        ready = server.wait_ready(min(arguments.ready_limit, end - time.monotonic()))
        result.about["gpu_memory_ready"] = smi("gpu=memory.used,memory.total")
        if ready is None:
            result.problem("the server did not become ready; the ends of its logs:")
            print(server.tails(25), flush=True)
            return
        result.about["ready_s"] = round(ready, 1)
        print(f"ready after {ready:.1f} s; GPU memory {result.about['gpu_memory_ready']}", flush=True)
        uvloop.run(measure(arguments, server, end, result))
        result.log += uvloop.run(metrics(server.address))
    finally:
        result.about["gpu_memory_end"] = smi("gpu=memory.used,memory.total")
        memory = "\n".join(smi("compute-apps=pid,name,used_memory"))
        result.log = f"{server.tails()}\n==== GPU memory\n{memory}\n==== metrics\n{result.log}"
        if killed := server.stop():
            result.problem(f"{len(killed)} processes did not stop in order and were killed")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.h200", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True, help="directory for the results")
    parser.add_argument(
        "--concurrency", default="1,4,8,16,32,64", type=lambda text: tuple(int(part) for part in text.split(","))
    )
    parser.add_argument("--budget", type=float, default=480.0, metavar="S", help="seconds for all of it (default: 480)")
    parser.add_argument("--ready-limit", type=float, default=240.0, metavar="S", help="to become ready (default: 240)")
    parser.add_argument(
        "--warmups", type=int, default=1, help="passes before the one that counts, for each concurrency (default: 1)"
    )
    parser.add_argument("--placement", choices=("processes", "one", "mps", "threads"), default="processes")
    parser.add_argument("--size", choices=("full", "tiny"), default="full")
    parser.add_argument("--weights", choices=("random", "file"), help="made in memory, or written (default: random for full)")
    parser.add_argument("--device", default="cuda:0", help="of thinker, talker and code2wav (default: cuda:0)")
    parser.add_argument(
        "--max-batch", type=int, help="of each of them (default: the highest concurrency; for full at least 64)"
    )
    parser.add_argument("--model", type=pathlib.Path, help="an existing checkpoint instead of a fixture")
    parser.add_argument("--config", type=pathlib.Path, help="default: configs/qwen3_omni.toml, or its _tiny")
    parser.add_argument("--set", dest="sets", action="append", default=[], metavar="KEY=VALUE", help="as of `omni-bus up`")
    parser.add_argument("--trace", action="store_true", help="after the passes at one stream: where a first packet's time goes")
    parser.add_argument("--prompt-words", type=int, default=60)
    parser.add_argument("--text-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0, help="of the text (default: 0)")
    parser.add_argument("--frames", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--baseline", type=pathlib.Path, default=BASELINE, help="rows to stand beside (default: vllm-omni's)")
    parser.add_argument("--label", help="of the files' names (default: h200 or tiny, and the placement)")
    arguments = parser.parse_args()
    arguments.weights = arguments.weights or ("random" if arguments.size == "full" else "file")
    arguments.max_batch = arguments.max_batch or max(64 if arguments.size == "full" else 1, *arguments.concurrency)
    kind = "h200" if arguments.size == "full" else "tiny"
    arguments.label = arguments.label or (kind if arguments.placement == "processes" else f"{kind}-{arguments.placement}")
    return arguments


def main() -> int:
    arguments = parsed()
    arguments.out.mkdir(parents=True, exist_ok=True)
    result = Result(
        {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": " ".join(["python", "-m", "bench.h200", *sys.argv[1:]]),
            "gpu": smi("gpu=name,driver_version"),
            "cpu": f"{platform.machine()}, {os.cpu_count()} cores",
            "versions": versions(),
            "placement": arguments.placement,
        }
    )
    end = time.monotonic() + arguments.budget - CLOSING_S
    # Unix sockets need a short path.
    scratch = pathlib.Path(tempfile.mkdtemp(prefix="ob-", dir="/tmp"))
    arguments.trace_directory = scratch / "trace"
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was started is to be ended then, too
    try:
        run(arguments, end, scratch, result)
    except KeyboardInterrupt:
        result.problem("interrupted")
    except (OmniBusError, RuntimeError, OSError, TimeoutError, subprocess.TimeoutExpired) as error:
        result.problem(f"{type(error).__name__}: {error}")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        write_all(arguments, result)
    print("\n" + note(arguments, result))
    return 0 if result.passes and not result.problems else 1


if __name__ == "__main__":
    sys.exit(main())
