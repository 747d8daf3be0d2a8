"""Python runs it when it starts, where PYTHONPATH names this directory: faults of the server's own code, which no input brings about.

The next chunk that a broker handles, or request that an API process sends on, raises: RuntimeError behind SIGUSR1, MemoryError behind
SIGUSR2. Behind SIGPROF what a broker does at the end of every event raises, and behind SIGALRM the process hangs. Who loads a probe's
stage and finds the file that HANGING_LOAD names takes it away, and hangs.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import pathlib
import signal
import sys

PROBE = "omni_bus.stages.probe.stages"


def once(module: str, owner: str, method: str, error: Exception) -> None:
    """The next call raises `error`."""
    cls = getattr(sys.modules.get(module), owner, None)
    if cls is None:
        return
    real = getattr(cls, method)

    def raising(*args: object, **said: object) -> object:
        setattr(cls, method, real)
        raise error

    setattr(cls, method, raising)


def in_a_request(error: Exception) -> None:
    once("omni_bus.flow", "Flow", "chunk", error)
    once("omni_bus.client", "BusClient", "submit", error)


def hang() -> None:
    while True:
        pass


class Patched(importlib.abc.MetaPathFinder):
    """Puts `load` of the probe's stages behind a look at the file."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name != PROBE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        loader = spec.loader
        run = loader.exec_module

        def exec_module(module: object) -> None:
            run(module)
            for stage in (module.Source, module.Relay, module.Sink):
                stage.load = behind(stage.load)

        loader.exec_module = exec_module
        return spec


def behind(load: object) -> object:
    def hangs_or_loads(self: object, ctx: object) -> object:
        flag = pathlib.Path(os.environ["HANGING_LOAD"])
        if flag.exists():
            flag.unlink()
            hang()
        return load(self, ctx)

    return hangs_or_loads


signal.signal(signal.SIGUSR1, lambda number, frame: in_a_request(RuntimeError("broken for a test")))
signal.signal(signal.SIGUSR2, lambda number, frame: in_a_request(MemoryError()))
signal.signal(
    signal.SIGPROF,
    lambda number, frame: once("omni_bus.orchestrator", "Orchestrator", "_flush", RuntimeError("broken for a test")),
)
signal.signal(signal.SIGALRM, lambda number, frame: hang())
if "HANGING_LOAD" in os.environ:
    sys.meta_path.insert(0, Patched())
