"""One child process of the supervisor: started in a session of its own, its output in a log, its end told by the kernel."""

from __future__ import annotations

import asyncio
import os
import pathlib
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

from omni_bus.child_log import CHECK_S, LIMIT, ChildLog
from omni_bus.process import die_with_parent

BACKOFF_LIMIT_S = 30.0
STEADY_S = 30.0  # a process that lived longer than this starts over with the first delay
DOUBLINGS = 60  # past every limit, and short of what a float holds: a process may die for days


class Child:
    """A role that is to be kept filled (broker, worker, api) and the process that fills it now.

    Must be used from the main thread: children ask the kernel to die with their parent *thread*.
    """

    def __init__(
        self,
        name: str,
        log: pathlib.Path,
        on_exit: Callable[[Child, int], None],
        log_bytes: int = LIMIT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.workers: tuple[str, ...] = (name,)  # of a process of stages: its workers, by the names that the broker knows
        self.log = ChildLog(log, log_bytes)
        self.incarnation = 0
        self.expected = False  # its end was asked for
        self.leaving = False  # it is being drained: nobody starts it again
        self.on_trial = False  # whoever started it waits for it to be ready, and sees to its end if it is not to be
        self.early_deaths = 0  # in a row, without having become ready
        self.pid = 0
        self.beats = 0  # that it has sent through its pipe, in all its lives
        self._on_exit = on_exit
        self._clock = clock
        self._deaths = 0
        self._born = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._log_check: asyncio.TimerHandle | None = None
        self._pipe: int | None = None  # our end, until the process has closed its own, or ended
        self._ready = asyncio.Event()
        self._gone = asyncio.Event()
        self._gone.set()

    @property
    def alive(self) -> bool:
        return self._process is not None

    @property
    def age_s(self) -> float:
        """Seconds since its process was started."""
        return self._clock() - self._born

    @property
    def title(self) -> str:
        """Its name, and what else ends with it."""
        return self.name if self.workers == (self.name,) else f"{self.name} ({', '.join(self.workers)})"

    @property
    def ready(self) -> bool:
        """Of the process that fills the role, or filled it last."""
        return self._ready.is_set()

    @ready.setter
    def ready(self, value: bool) -> None:
        if value:
            self._ready.set()
        else:
            self._ready.clear()

    async def settled(self) -> bool:
        """Until its process is ready, or there is none: whether it is ready."""
        either = {asyncio.ensure_future(self._ready.wait()), asyncio.ensure_future(self._gone.wait())}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for future in either:
                future.cancel()
        return self.alive and self.ready

    def start(
        self,
        command: Sequence[str],
        on_ready: Callable[[], None] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """With `on_ready` the command gets one more argument: the descriptor of a pipe into which it writes a byte when it is ready.

        It may write more of them, as a sign that it goes on: `beats` counts what came.
        `environment` is the process's instead of ours.
        """
        assert not self.alive
        self.incarnation += 1
        self.ready = self.expected = False
        self._gone.clear()
        self._born = self._clock()
        inherited = () if on_ready is None else (self._open_pipe(on_ready),)
        with self.log.open() as output:
            self._process = subprocess.Popen(
                [*command, *map(str, inherited)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**(os.environ if environment is None else environment), "PYTHONUNBUFFERED": "1"},
                # From its first instruction on: a process that still imports torch has not yet come to ask for it itself.
                preexec_fn=die_with_parent,
                pass_fds=inherited,
            )
        for descriptor in inherited:
            os.close(descriptor)
        self.pid = self._process.pid
        self._check_log()
        descriptor = os.pidfd_open(self.pid)
        asyncio.get_running_loop().add_reader(descriptor, self._reap, self._process, descriptor)

    def send_signal(self, number: signal.Signals) -> None:
        """Does nothing for a process that has ended."""
        if self._process is not None:
            self._process.send_signal(number)

    async def gone(self) -> None:
        """Returns once no process fills the role."""
        await self._gone.wait()

    def backoff(self, first_s: float) -> float:
        """Seconds until the next start, after an end that nobody asked for."""
        return float(min(BACKOFF_LIMIT_S, first_s * 2 ** min(max(0, self._deaths - 1), DOUBLINGS)))

    def last_lines(self, count: int) -> list[str]:
        """Of what it wrote, without empty ones."""
        lines = self.log.tail(65536).decode(errors="replace").splitlines()
        return [line.rstrip() for line in lines if line.strip()][-count:]

    def _check_log(self) -> None:
        self.log.bound()
        self._log_check = asyncio.get_running_loop().call_later(CHECK_S, self._check_log)

    def _open_pipe(self, on_ready: Callable[[], None]) -> int:
        """Returns the process's end."""
        self._pipe, theirs = os.pipe()
        asyncio.get_running_loop().add_reader(self._pipe, self._heard, self._pipe, on_ready)
        return theirs

    def _heard(self, pipe: int, on_ready: Callable[[], None]) -> None:
        said = os.read(pipe, 4096)
        if not said:
            self._close_pipe()  # it has no more to say, or has ended, which `_reap` is told of
            return
        self.beats += len(said)
        if not self.ready:
            self.ready = True
            on_ready()

    def _close_pipe(self) -> None:
        if self._pipe is not None:
            asyncio.get_running_loop().remove_reader(self._pipe)
            os.close(self._pipe)
            self._pipe = None

    def _reap(self, process: subprocess.Popen[bytes], descriptor: int) -> None:
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)
        code = process.wait()
        self._close_pipe()
        if self._log_check is not None:
            self._log_check.cancel()
        self.log.bound()
        self._process = None
        if not self.expected:
            self.early_deaths = 0 if self.ready else self.early_deaths + 1
            self._deaths = 1 if self._clock() - self._born > STEADY_S else self._deaths + 1
        self._gone.set()
        self._on_exit(self, code)


def how_it_ended(code: int) -> str:
    """An exit status in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
