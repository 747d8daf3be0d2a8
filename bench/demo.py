"""`make demo`: starts the quickstart server, asks it a spoken question, prints what happened, and goes on serving.

python -m bench.demo [--once] [--port N] [--out reply.wav]
"""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

from bench.spoken import QUESTION, Answer, ask, spoken
from omni_bus.process import die_with_parent

ROOT = pathlib.Path(__file__).resolve().parent.parent
CONFIG = ROOT / "configs" / "quickstart.toml"
ADDRESS = re.compile(r"http://[\w.\[\]:-]+:\d+")
STOP_S = 30.0  # the server itself drains for `bus.drain_s`, 10 s, and then stops in order within 7


def free_port(wanted: int) -> int:
    """`wanted`, or a port that is free where something else listens there."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wanted))
        except OSError:
            probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Server:
    """`omni-bus up` as a child process. Its progress passes through; `address` is where it serves."""

    def __init__(self, config: pathlib.Path, port: int, *settings: str) -> None:
        command = [sys.executable, "-m", "omni_bus", "up", str(config), "--port", str(port)]
        for setting in settings:
            command += ["--set", setting]
        # A session of its own: Ctrl-C reaches the server through `stop` alone, as one signal and not two.
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=die_with_parent
        )
        self.address = self._until_ready()
        self._echo = threading.Thread(target=self._copy, daemon=True)
        self._echo.start()

    def _until_ready(self) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            print(f"  {line}", end="", flush=True)
            if found := ADDRESS.search(line):
                return found.group()
        raise SystemExit(f"the server did not start (exit code {self.process.wait()})")

    def _copy(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            print(f"  {line}", end="", flush=True)

    def until_told(self) -> int:
        """Serve until SIGINT or SIGTERM, which go on to the server; its exit code.

        Not by an exception: one that a signal raises inside a destructor is lost. And whoever starts this in the background of a
        script has it ignore SIGINT.
        """
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: self.process.send_signal(number))
        print(f"serving on {self.address}, until Ctrl-C: open it in a browser and talk, or try", flush=True)
        command = pathlib.Path(sys.executable).with_name("omni-bus")
        print(f"  {command} chat 'Who are you?' --url {self.address} --out reply.wav", flush=True)
        return self.process.wait()

    def stop(self) -> int:
        """Stop in order; the server's exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise SystemExit(f"the server did not stop within {STOP_S:.0f} s") from None
        self._echo.join()
        return code


@contextlib.contextmanager
def serving(port: int, *settings: str, config: pathlib.Path = CONFIG) -> Iterator[Server]:
    """A running server; leaving the block stops it."""
    server = Server(config, port, *settings)
    try:
        yield server
    finally:
        server.stop()


def show(answer: Answer, out: pathlib.Path) -> None:
    out.write_bytes(answer.wav())
    first = "none came" if answer.first_audio_s is None else f"{answer.first_audio_s:.2f} s after the end of the question"
    print(f"\n  asked (spoken)   {QUESTION}")
    print(f"  heard            {answer.heard}")
    print(f"  answered         {answer.text}")
    print(f"  first audio      {first}")
    print(f"  spoken answer    {out.resolve()} ({len(answer.pcm) / 48_000:.1f} s)\n")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.demo", description=__doc__.splitlines()[0])
    parser.add_argument("--once", action="store_true", help="stop the server after its turn")
    parser.add_argument("--port", type=int, default=8091)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("reply.wav"), help="where the spoken answer goes")
    arguments = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    port = free_port(arguments.port)
    if port != arguments.port:
        print(f"port {arguments.port} is taken; using {port}")
    print("starting the quickstart server (the first start converts the language model, once)", flush=True)
    try:
        with serving(port) as server:
            question = spoken(QUESTION)
            answer = ask(server.address, question)
            show(answer, arguments.out)
            good = bool(answer.pcm and answer.text)
            if not good:
                print("the answer is not complete", file=sys.stderr)
            if good and not arguments.once:
                good = server.until_told() == 0
    except KeyboardInterrupt:
        return 0
    except (RuntimeError, OSError) as error:
        print(f"the demo failed: {error}", file=sys.stderr)
        return 1
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
