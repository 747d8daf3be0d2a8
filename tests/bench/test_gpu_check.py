"""bench/gpu_check.py goes on after every way in which a check can fail."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]
GOOD = """
def checks():
    yield "first", lambda: "max error 0"
    yield "second", lambda: "1.5 ms"
"""
BAD = """
import os, time

def differs():
    assert 1 == 2, "largest difference 3"

def broken():
    raise RuntimeError("CUDA error")

def checks():
    yield "differs", differs
    yield "after", lambda: str(os.getpid())
    yield "broken", broken
    yield "fresh", lambda: str(os.getpid())
    yield "killed", lambda: os._exit(9)
    yield "hangs", lambda: time.sleep(60)
    yield "last", lambda: "done"
"""


def run(directory: pathlib.Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    package = directory / "some_checks"
    package.mkdir(exist_ok=True)
    (package / "__init__.py").write_text("")
    (package / "good.py").write_text(GOOD)
    (package / "bad.py").write_text(BAD)
    (package / "unreadable.py").write_text("import no_such_module\n")
    command = [sys.executable, "-m", "bench.gpu_check", "--package", "some_checks", *arguments]
    path = os.pathsep.join((str(directory), str(ROOT)))
    return subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)


def test_good_checks_pass(tmp_path: pathlib.Path) -> None:
    done = run(tmp_path, "--only", "good")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| good: first | PASS |" in done.stdout and "max error 0" in done.stdout
    assert done.stdout.splitlines()[-1] == "2 PASS, 0 FAIL, 0 LEFT"


def test_goes_on_after_failures(tmp_path: pathlib.Path) -> None:
    log = tmp_path / "log"
    done = run(tmp_path, "--limit", "5", "--log", str(log))
    assert done.returncode == 1
    status = {}
    for line in done.stdout.splitlines():
        if line.startswith("| ") and ": " in line:
            name, how, _, figure = (cell.strip() for cell in line.strip("| ").split("|"))
            status[name] = (how, figure)
    assert {name: how for name, (how, _) in status.items()} == {
        "bad: differs": "FAIL",
        "bad: after": "PASS",
        "bad: broken": "FAIL",
        "bad: fresh": "PASS",
        "bad: killed": "FAIL",
        "bad: hangs": "FAIL",
        "bad: last": "PASS",
        "good: first": "PASS",
        "good: second": "PASS",
        "unreadable: import": "FAIL",
    }
    assert status["bad: after"][1] != status["bad: fresh"][1], "a broken CUDA context must not be used again"
    assert "largest difference 3" in status["bad: differs"][1] and "exit code 9" in status["bad: killed"][1]
    assert "Traceback" in log.read_text()
