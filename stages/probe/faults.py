"""Words that make a stage misbehave, for tests of isolation, restarts and deadlines. They act only with `faults = true`.

| word | what happens in STAGE when the word is its turn |
| --- | --- |
| `!raise:STAGE` | an exception in the row: this request fails |
| `!panic:STAGE` | an exception out of `step`: every request of the stage fails |
| `!oom:STAGE` | the system has no memory for the step: every request of the stage fails |
| `!device:STAGE` | the step finds that its GPU is lost: the process ends |
| `!exit:STAGE` | the process ends at once with status 13 |
| `!hang:STAGE` | the row never goes on |
| `!spin:STAGE` | the step never returns, and holds the interpreter |
| `!sleep:STAGE:MS` | the step blocks for MS milliseconds, then the word goes on as any other |
| `!repeat:N` | source puts the words "0" … "N-1" in its place |
"""

from __future__ import annotations

import enum
import os
import time

import torch


class Verdict(enum.Enum):
    """What the row does with the word after the fault."""

    GO_ON = enum.auto()
    HANG = enum.auto()


class StagePanic(Exception):
    """Leaves `step` on purpose."""


def spin() -> None:
    """Never returns. Its name is what a traceback of a hung step shows."""
    while True:
        pass


def act(word: str, stage: str) -> Verdict:
    """Provoke the fault that `word` names, if it names one for this stage."""
    kind, _, rest = word.partition(":")
    target, _, argument = rest.partition(":")
    if target != stage:
        return Verdict.GO_ON
    match kind:
        case "!raise":
            raise RuntimeError("the probe was told to raise")
        case "!panic":
            raise StagePanic("the probe was told to panic")
        case "!oom":
            raise MemoryError
        case "!device":
            raise torch.AcceleratorError("the probe was told to lose its device")
        case "!spin":
            spin()
        case "!exit":
            os._exit(13)
        case "!hang":
            return Verdict.HANG
        case "!sleep":
            time.sleep(int(argument) / 1000)
    return Verdict.GO_ON


def repeats(word: str) -> int | None:
    """N of `!repeat:N`; None for any other word."""
    kind, _, count = word.partition(":")
    return int(count) if kind == "!repeat" and count.isdecimal() else None
