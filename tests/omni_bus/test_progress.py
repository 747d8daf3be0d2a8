"""Start-up progress on a terminal and elsewhere."""

from __future__ import annotations

import io

from omni_bus.events import ReplicaStatus, Status
from omni_bus.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def status(**stages: tuple[str, float, str]) -> Status:
    replicas = tuple(
        ReplicaStatus(
            stage=name, worker=f"{name}.0", pid=1, host="h", device="cpu", state=state, progress=progress, detail=detail
        )
        for name, (state, progress, detail) in stages.items()
    )
    return Status(query=1, pipeline="p", ready=False, missing=(), replicas=replicas, requests={}, ended={})


def test_elsewhere_a_line_is_written_at_each_step_only() -> None:
    out = io.StringIO()
    progress = Progress(("asr", "tts"), out)
    for fraction in (0.0, 0.1, 0.2, 0.3, 0.31, 0.9):
        progress.show(status(asr=("loading", fraction, "weights"), tts=("starting", 0.0, "")))
    progress.show(status(asr=("ready", 1.0, ""), tts=("starting", 0.0, "")))
    lines = out.getvalue().splitlines()
    assert [line.split()[1:4] for line in lines if " asr " in line] == [
        ["asr", "loading", "0%"],
        ["asr", "loading", "30%"],
        ["asr", "loading", "90%"],
        ["asr", "ready", "100%"],
    ]
    assert sum(" tts " in line for line in lines) == 1
    assert "\x1b" not in out.getvalue()


def test_a_terminal_is_redrawn_in_place() -> None:
    out = Terminal()
    progress = Progress(("asr", "tts"), out)
    progress.show(status(asr=("loading", 0.5, "weights")))
    assert "\x1b" not in out.getvalue()
    progress.show(status(asr=("ready", 1.0, ""), tts=("loading", 0.25, "x")))
    assert out.getvalue().count("\x1b[2F\x1b[J") == 1
    assert "[##########..........]  50%  weights" in out.getvalue()
    progress.say("a note")
    assert out.getvalue().count("\x1b[2F\x1b[J") == 2
    progress.close()
    progress.say("the end")
    assert out.getvalue().endswith("the end\n")
    assert out.getvalue().count("\x1b[2F\x1b[J") == 2


def test_the_slowest_replica_speaks_for_its_stage() -> None:
    out = io.StringIO()
    shown = status(asr=("ready", 1.0, "")).replicas + status(asr=("loading", 0.5, "")).replicas
    Progress(("asr",), out).show(Status(query=1, pipeline="p", ready=False, missing=(), replicas=shown, requests={}, ended={}))
    assert out.getvalue().split()[1:4] == ["asr", "loading", "50%"]
