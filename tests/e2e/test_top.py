"""`omni-bus top` on a real server: on a terminal that is resized, piped, and once."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator

import pytest

from tests.support.running_server import Server

LIMIT_S = 60.0  # a hang
TOP = [sys.executable, "-m", "omni_bus", "top"]
CONTROL = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
HOME, OTHER_SCREEN, OWN_SCREEN = b"\x1b[H", b"\x1b[?1049h", b"\x1b[?1049l"


@pytest.fixture(scope="module")
def probe(shared_server: Callable[..., Server]) -> Server:
    return shared_server("probe.toml")


class Terminal:
    """A pseudo terminal, and a command that has it as its input and output."""

    def __init__(self, master: int, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.said = b""
        self._master = master

    def resize(self, columns: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        self.process.send_signal(signal.SIGWINCH)

    def press(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def until(self, holds: Callable[[str], bool], what: str) -> str:
        """The first frame from now on for which it holds, without its control sequences. Frames are looked at when the next one begins."""
        end = time.monotonic() + LIMIT_S
        while True:
            *frames, self.said = self.said.split(HOME)
            for frame in frames:
                text = CONTROL.sub(b"", frame).decode()
                if holds(text):
                    return text
            assert self._read(end), f"never came: {what}: {self.said!r}"

    def rest(self) -> bytes:
        end = time.monotonic() + LIMIT_S
        while self._read(end):
            pass
        return self.said

    def _read(self, end: float) -> bool:
        """Whether there was more; False at the command's end, and when time is over."""
        if not select.select([self._master], [], [], max(0.0, end - time.monotonic()))[0]:
            return False
        with contextlib.suppress(OSError):  # EIO: the command has ended
            block = os.read(self._master, 65536)
            self.said += block
            return bool(block)
        return False


@contextlib.contextmanager
def terminal(server: Server, columns: int = 150) -> Iterator[Terminal]:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color"}
    for name in ("COLUMNS", "LINES", "NO_COLOR"):
        environment.pop(name, None)
    command = [*TOP, "--url", server.url, "--interval", "0.2"]
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment)
    os.close(slave)
    try:
        yield Terminal(master, process)
    finally:
        process.kill()
        process.wait()
        os.close(master)


def ended(text: str) -> int:
    found = re.search(r"ended: (?:.*, )?(\d+) done", text)
    return int(found[1]) if found else 0


def test_a_frame_changes_with_the_server_and_with_the_terminal(probe: Server) -> None:
    with terminal(probe) as seen:
        first = seen.until(lambda text: text.count("ready") >= 4, "each stage's replica, ready")
        assert all(name in first for name in ("source.0", "relay.0", "sink.0", "device", "batch", "restarts"))
        probe.answer("one two three", audio=True)
        seen.until(lambda text: ended(text) > ended(first) and "TTFP p50" in text and "RTF p50" in text, "the turn's figures")
        seen.resize(65)
        narrow = seen.until(lambda text: "device" not in text, "a frame without the less important columns")
        assert "sink.0" in narrow and "restarts" in narrow
        seen.press(b"q")
        assert seen.process.wait(LIMIT_S) == 0
        assert OWN_SCREEN in seen.rest(), "the user's own screen is back"


def test_ctrl_c_ends_it_well(probe: Server) -> None:
    with terminal(probe) as seen:
        seen.until(lambda text: "source.0" in text, "a frame")
        seen.process.send_signal(signal.SIGINT)
        assert seen.process.wait(LIMIT_S) == 0
        assert OWN_SCREEN in seen.rest()


def test_once_is_one_look_in_plain_text(probe: Server) -> None:
    done = subprocess.run([*TOP, "--once", "--url", probe.url], capture_output=True, text=True, timeout=LIMIT_S, check=True)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("probe (pipeline probe): ready, up ")
    assert [line.split()[:2] for line in lines if "cpu" in line] == [
        [name, f"{name}.0"] for name in ("source", "relay", "sink")
    ]
    assert "\x1b" not in done.stdout and done.stderr == ""


def test_piped_it_writes_one_look_after_the_other(probe: Server) -> None:
    command = [*TOP, "--url", probe.url, "--interval", "0.2"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        heads = 0
        for line in process.stdout:
            heads += line.startswith(b"probe (pipeline probe)")
            if heads == 3:
                break
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait(LIMIT_S) == 0
