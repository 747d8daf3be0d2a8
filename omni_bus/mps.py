"""NVIDIA's multi-process service (MPS) for the workers that share a GPU: when it is wanted, how it starts, how it ends for certain.

Without it a card gives its processes turns; with it their kernels run side by side. The daemon is a process of this user with its sockets
in the run directory: no setting of the card is changed, and no other program's MPS is met.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import os
import pathlib
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator

from omni_bus.child import Child, how_it_ended
from omni_bus.child_log import CHECK_S, ChildLog
from omni_bus.deployment import Deployment, RunDir

PROGRAM = "nvidia-cuda-mps-control"
START_S = 15.0
STOP_S = 1.0  # its clients have ended before it is asked
PIPES, LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
# The daemon's longest socket path must fit into sockaddr_un, as the broker's must.
_PIPE_PATH_BYTES = 107 - len("/control_privileged")
_IN_CREATE, _IN_MOVED_TO = 0x100, 0x80  # linux/inotify.h


def shared_devices(deployment: Deployment) -> list[str]:
    """CUDA devices on which two or more processes have stages, in the order in which they are first named."""
    users: dict[str, set[str]] = {}
    for process, workers in deployment.processes().items():
        index = int(process.rpartition(".")[2])
        for name in itertools.chain.from_iterable(workers.values()):
            devices = deployment.stages[name].devices
            users.setdefault(devices[index % len(devices)], set()).add(process)
    return [device for device, processes in users.items() if device.startswith("cuda:") and len(processes) > 1]


def wanted(deployment: Deployment) -> bool:
    return deployment.bus.mps != "off" and bool(shared_devices(deployment))


def missing() -> str | None:
    """Why it cannot be had on this machine; None where the program is there."""
    return None if shutil.which(PROGRAM) else f"there is no {PROGRAM} on this machine's PATH"


class Mps:
    """The control daemon of one server. `say` is told, in one line, of an end that nobody asked for.

    It runs in the foreground as an ordinary child: the kernel ends it when its supervisor is killed. What it leaves even so, `end_leftovers`
    finds at the next start.
    """

    def __init__(self, run_dir: RunDir, say: Callable[[str], None]) -> None:
        self._pipes = run_dir.mps
        self._say = say
        self._child = Child("mps", run_dir.log("mps"), self._on_exit)
        # The run directory itself for the logs: control.log and server.log are kept with the others when a server has failed.
        self.environment = {PIPES: str(run_dir.mps), LOGS: str(run_dir.path)}
        self._logs = [ChildLog(run_dir.path / name) for name in ("control.log", "server.log")]
        self._log_check: asyncio.TimerHandle | None = None

    async def start(self) -> str | None:
        """Returns once it takes clients; or why it does not, and then nothing of it runs."""
        if (reason := missing()) is not None:
            return reason
        if len(os.fsencode(self._pipes)) > _PIPE_PATH_BYTES:
            return f"{self._pipes.parent.parent} is too long a path for its sockets; set XDG_RUNTIME_DIR to a shorter one"
        self._pipes.mkdir(mode=0o700)
        reason = f"{PROGRAM} was not to start"
        try:
            reason = await self._started()
        finally:  # a cancelled start leaves nothing, too
            if reason is not None:
                await self.stop()
        return reason

    async def stop(self) -> None:
        """In order, and after STOP_S at once. The workers must have ended."""
        if self._log_check is not None:
            self._log_check.cancel()
        if self._child.alive:
            self._child.expected = True
            asking = self._ask_to_quit()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._child.gone(), STOP_S)
            asking.kill()
            asking.wait()
            if self._child.alive:
                self._child.send_signal(signal.SIGKILL)
                await self._child.gone()
        end_leftovers(self._pipes)

    def _ask_to_quit(self) -> subprocess.Popen[bytes]:
        asking = subprocess.Popen(
            [PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **self.environment},
        )
        assert asking.stdin is not None
        with contextlib.suppress(BrokenPipeError), asking.stdin:
            asking.stdin.write(b"quit\n")
        return asking

    async def _started(self) -> str | None:
        loop, control = asyncio.get_running_loop(), self._pipes / "control"
        listens = asyncio.Event()
        watch = _watch(self._pipes)

        def changed() -> None:
            os.read(watch, 65536)
            if control.exists():
                listens.set()

        loop.add_reader(watch, changed)
        try:
            self._child.start([PROGRAM, "-f"], environment={**os.environ, **self.environment})
            first = {asyncio.ensure_future(listens.wait()), asyncio.ensure_future(self._child.gone())}
            try:
                await asyncio.wait(first, timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for future in first:
                    future.cancel()
        except OSError as error:
            return f"{PROGRAM} cannot be run: {error.strerror}"
        finally:
            loop.remove_reader(watch)
            os.close(watch)
        if not self._child.alive:
            return f"{PROGRAM} does not start: {' '.join(self._child.last_lines(1)) or 'it ended without a word'}"
        if not listens.is_set():
            return f"{PROGRAM} did not start within {START_S:g} s"
        self._child.ready = True
        self._bound_logs()
        return None

    def _bound_logs(self) -> None:
        for log in self._logs:
            log.bound()
        self._log_check = asyncio.get_running_loop().call_later(CHECK_S, self._bound_logs)

    def _on_exit(self, child: Child, code: int) -> None:
        if child.ready and not child.expected:
            self._say(f"omni-bus: MPS ended ({how_it_ended(code)}); workers that start from now on do without")


def end_leftovers(pipes: pathlib.Path) -> None:
    """Kill what still runs of the MPS whose sockets are in that directory: control daemon and servers of this user."""
    for pid in _processes(pipes):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _processes(pipes: pathlib.Path) -> Iterator[int]:
    mark = b"\0" + os.fsencode(f"{PIPES}={pipes}") + b"\0"
    for directory in pathlib.Path("/proc").glob("[0-9]*"):
        # Another user's, or one that ended meanwhile, is none of ours. The kernel cuts a name to 15 bytes.
        with contextlib.suppress(OSError):
            ours = (directory / "comm").read_text().startswith("nvidia-cuda-mps")
            if ours and mark in b"\0" + (directory / "environ").read_bytes():
                yield int(directory.name)


def _watch(directory: pathlib.Path) -> int:
    """A descriptor that is readable once there is something new in the directory."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = int(libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK))
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), "inotify_init1 failed")
    if libc.inotify_add_watch(descriptor, os.fsencode(directory), _IN_CREATE | _IN_MOVED_TO) < 0:
        os.close(descriptor)
        raise OSError(ctypes.get_errno(), "inotify_add_watch failed")
    return descriptor
