"""Runs every check of bench/gpu_checks on this machine's GPU, goes on after one that fails, and ends with a table.

    python -m bench.gpu_check [--only engine,layers] [--limit 120] [--budget 500] [--jobs 1] [--log FILE]

Each file's checks run in a process of their own, so that neither a hang nor a CUDA context that an illegal access has broken
takes the others with it: after anything but a plain AssertionError, the file's remaining checks start in a fresh process.
Exit code 1 if any failed or was left out.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import importlib
import json
import os
import pathlib
import pkgutil
import select
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any, TextIO

from omni_bus.process import die_with_parent

START_S = 60.0  # for a process to import torch and the checks, on top of a check's own limit
SHOWN_LINES = 6  # of a traceback on the terminal; the log has it whole


@dataclasses.dataclass(frozen=True)
class Result:
    name: str
    status: str  # PASS, FAIL, or LEFT where the budget was used up
    figure: str
    seconds: float
    trace: str = ""

    def line(self) -> str:
        return f"{self.status} {self.name:<44} {self.seconds:>7.1f} s  {self.figure}"


class Output:
    """Lines for the terminal and for the log, from several threads."""

    def __init__(self, log: TextIO | None) -> None:
        self._log = log
        self._lock = threading.Lock()

    def say(self, text: str, *, log_only: bool = False) -> None:
        with self._lock:
            if not log_only:
                print(text, flush=True)
            if self._log is not None:
                print(text, file=self._log, flush=True)


# ---- the process that runs one file's checks


def run_file(package: str, role: str, start: int, report: TextIO) -> None:
    """Run the checks from number `start` on, each told before and after as one line of JSON."""

    def tell(**said: Any) -> None:
        report.write(json.dumps(said) + "\n")
        report.flush()

    def failed(error: BaseException, seconds: float) -> None:
        sound = isinstance(error, AssertionError)
        text = " ".join(str(error).split()) or traceback.format_exception_only(error)[-1].strip()
        tell(
            end=False,
            figure=f"{type(error).__name__}: {text}"[:400],
            seconds=seconds,
            trace=traceback.format_exc(),
            sound=sound,
        )
        if not sound:
            raise SystemExit(1)

    began = time.perf_counter()
    try:
        checks = enumerate(importlib.import_module(f"{package}.{role}").checks())
    except Exception as error:
        tell(begin="import")
        failed(error, time.perf_counter() - began)
        return
    while True:
        began = time.perf_counter()
        try:
            index, (name, check) = next(checks)
        except StopIteration:
            tell(finished=True)
            return
        except Exception as error:
            tell(begin="checks()")
            failed(error, time.perf_counter() - began)
            return
        if index < start:
            continue
        tell(begin=name)
        began = time.perf_counter()
        try:
            figure = check()
        except Exception as error:
            failed(error, time.perf_counter() - began)
        else:
            tell(end=True, figure=" ".join(str(figure).split()), seconds=time.perf_counter() - began)


# ---- the process that the user starts


class Lines:
    """Lines of a pipe, each waited for no longer than until a given time."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._rest = b""

    def next(self, until: float) -> dict[str, Any] | None:
        """None where the other end has closed. Raises TimeoutError."""
        while b"\n" not in self._rest:
            left = until - time.monotonic()
            if left <= 0 or not select.select([self._descriptor], [], [], left)[0]:
                raise TimeoutError
            block = os.read(self._descriptor, 65536)
            if not block:
                return None
            self._rest += block
        line, self._rest = self._rest.split(b"\n", 1)
        said: dict[str, Any] = json.loads(line)
        return said


def run_role(package: str, role: str, limit: float, end: float, output: Output) -> list[Result]:
    """All checks of one file, in as many processes as it takes. `end`: time.monotonic() at which to stop."""
    results: list[Result] = []
    while True:
        if time.monotonic() >= end:
            results.append(Result(f"{role}: the rest", "LEFT", "the budget is used up", 0.0))
            output.say(results[-1].line())
            return results
        fresh, complete = _one_process(package, role, len(results), limit, end, output)
        results += fresh
        if complete or not fresh:
            return results


def _one_process(package: str, role: str, start: int, limit: float, end: float, output: Output) -> tuple[list[Result], bool]:
    """(results, whether the file's checks have all run or cannot go on)."""
    reader, writer = os.pipe()
    command = [sys.executable, "-m", "bench.gpu_check", "--child", role, "--package", package]
    command += ["--start", str(start), "--report", str(writer)]
    process = subprocess.Popen(
        command, pass_fds=(writer,), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=die_with_parent
    )
    os.close(writer)
    said = threading.Thread(target=_copy, args=(process, role, output), daemon=True)
    said.start()
    results: list[Result] = []
    lines, name, began = Lines(reader), "", time.monotonic()

    def add(status: str, figure: str, trace: str = "", seconds: float | None = None) -> None:
        took = time.monotonic() - began if seconds is None else seconds
        results.append(Result(f"{role}: {name or 'start'}", status, figure, took, trace))
        output.say(results[-1].line())
        if trace:
            output.say("\n".join(f"    {line}" for line in trace.splitlines()[-SHOWN_LINES:]))
            output.say(trace, log_only=True)

    complete = False
    try:
        while True:
            event = lines.next(min(end, began + limit + (0.0 if name else START_S)))
            if event is None:
                if name or not results:
                    add("FAIL", f"the process ended (exit code {process.wait(10)})")
                    complete = not name
                break
            if "finished" in event:
                complete = True
                break
            if "begin" in event:
                name, began = event["begin"], time.monotonic()
                continue
            add("PASS" if event["end"] else "FAIL", event["figure"], event.get("trace", ""), event["seconds"])
            complete = name in ("import", "checks()")
            name, began = "", time.monotonic()
    except TimeoutError:
        over = time.monotonic() >= end
        add("FAIL", "not finished when the budget was used up" if over else f"not finished within {limit:.0f} s")
        complete = over or not name
    finally:
        process.kill()
        process.wait()
        said.join()
        os.close(reader)
    return results, complete


def _copy(process: subprocess.Popen[str], role: str, output: Output) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        output.say(f"    {role} | {line.rstrip()}")


def roles(package: str) -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(importlib.import_module(package).__path__))


def table(results: list[Result]) -> Iterator[str]:
    yield ""
    yield "| check | | s | figure |"
    yield "| --- | --- | --- | --- |"
    for one in results:
        yield f"| {one.name} | {one.status} | {one.seconds:.1f} | {one.figure[:120].replace('|', '/')} |"
    counts = {status: sum(one.status == status for one in results) for status in ("PASS", "FAIL", "LEFT")}
    yield ", ".join(f"{count} {status}" for status, count in counts.items())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_check", description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="NAME,…", help="files of bench/gpu_checks, without .py (default: all)")
    parser.add_argument("--limit", type=float, default=120.0, metavar="S", help="for each check (default: 120)")
    parser.add_argument("--budget", type=float, default=3600.0, metavar="S", help="for all of them (default: 3600)")
    parser.add_argument("--jobs", type=int, default=1, help="files at a time; more than one spoils the timings (default: 1)")
    parser.add_argument("--log", type=pathlib.Path, metavar="FILE", help="write everything here too, with whole tracebacks")
    parser.add_argument("--package", default="bench.gpu_checks", help=argparse.SUPPRESS)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--start", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--report", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        with os.fdopen(arguments.report, "w") as report:
            run_file(arguments.package, arguments.child, arguments.start, report)
        return 0
    found = roles(arguments.package)
    wanted = arguments.only.split(",") if arguments.only else found
    if unknown := [name for name in wanted if name not in found]:
        parser.error(f"no checks named {', '.join(unknown)}; there are: {', '.join(found) or 'none'}")
    log = arguments.log.open("w") if arguments.log else None
    try:
        output = Output(log)
        end = time.monotonic() + arguments.budget
        with concurrent.futures.ThreadPoolExecutor(max(1, arguments.jobs)) as pool:
            running = [pool.submit(run_role, arguments.package, role, arguments.limit, end, output) for role in wanted]
            results = [result for future in running for result in future.result()]
        for line in table(results):
            output.say(line)
    finally:
        if log is not None:
            log.close()
    return 0 if results and all(one.status == "PASS" for one in results) else 1


if __name__ == "__main__":
    sys.exit(main())
