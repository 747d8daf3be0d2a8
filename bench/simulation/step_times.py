"""How long a step of each stage takes by the rows in it, out of a measured run: a result file of bench/h200.py or of bench/scale.py.

The rows in a step are not in those files; they follow from Little's law. With `rate` requests a second, each of which passes `steps` steps
of `s` seconds, `rate · steps · s` rows are in steps at any time, and at least one is while a step runs. Between the measured points the times
are interpolated, beyond the last one the line through the last two goes on. All stages of a set were under load when they were
measured, so what they cost each other on one card is in the times.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import json
import pathlib
import tomllib
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from omni_bus.stages.qwen3_omni.code2wav_shapes import FRAMES

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent


@dataclasses.dataclass(frozen=True, slots=True)
class Curve:
    """Seconds of a step by its rows, never falling. rows ascend."""

    rows: tuple[float, ...]
    seconds: tuple[float, ...]

    @classmethod
    def through(cls, points: Iterable[tuple[float, float]]) -> Curve:
        """points: (rows, seconds). Several with the same rows count as one, with their mean; one that is lower than one before, as that."""
        by_rows: dict[float, list[float]] = {}
        for rows, seconds in points:
            by_rows.setdefault(max(1.0, rows), []).append(seconds)
        means = [sum(by_rows[rows]) / len(by_rows[rows]) for rows in sorted(by_rows)]
        return cls(tuple(sorted(by_rows)), tuple(itertools.accumulate(means, max)))

    def times(self, factor: float) -> Curve:
        """That of a machine that takes so many times longer."""
        return Curve(self.rows, tuple(seconds * factor for seconds in self.seconds))

    def __call__(self, rows: int) -> float:
        if len(self.rows) == 1 or rows <= self.rows[0]:
            return self.seconds[0]
        after = min(max(1, bisect.bisect_left(self.rows, rows)), len(self.rows) - 1)
        left, right = self.rows[after - 1], self.rows[after]
        low, high = self.seconds[after - 1], self.seconds[after]
        return low + (high - low) * (rows - left) / (right - left)


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One table of profiles.toml: what a result file does not say of the machine, and where that was measured."""

    about: str
    results: str = ""  # a result file, from the repository's root
    step_ms: dict[str, list[list[float]]] = {}  # stage → [rows, milliseconds]…, where no result file is read
    pipeline: str = "qwen3_omni"
    once: str = ""  # the stage that every request passes in one step; "" = there is none
    tokens: str = "thinker"
    frames: str = "talker"
    chunks: str = "code2wav"
    ahead: int = 2  # tokens that the frame stage must know for its next frame, beyond the frames it has made
    prompt_ms: float = 0.0  # least time of a step with a prompt, or a piece of one, in it
    prompt_budget: int = 512  # prompt positions in one step
    frame_s: float = 0.08
    chunk_frames: tuple[int, ...] = FRAMES  # sizes of a chunk of audio
    max_batch: int = 64
    cores: int = 0  # that all replicas share; 0 = each has what it needs
    batches: dict[str, int] = {}  # max_batch of single stages
    turns: bool = False  # rows take turns in steps of max_batch, as in the probe; otherwise they wait for one of so many places
    way_in_ms: float = 0.0  # client → broker: HTTP, API
    way_out_ms: float = 0.0  # broker → client
    hop_ms: float = 0.27  # from process to process, the broker's own work included
    text_tokens: int = 64
    speech_frames: int = 128
    prompt_tokens: int = 76


@dataclasses.dataclass(frozen=True, slots=True)
class StepTimes:
    """A machine: its stages' curves, and everything else of its profile. `measured`: the rows of its result file, as bench printed them."""

    profile: Profile
    curves: dict[str, Curve]
    measured: Sequence[dict[str, Any]]


def profiles() -> dict[str, Profile]:
    with (HERE / "profiles.toml").open("rb") as file:
        return {name: msgspec.convert(table, Profile) for name, table in tomllib.load(file).items()}


def read(profile: Profile) -> StepTimes:
    """Raises OSError, ValueError or KeyError for a result file that cannot be read or is of another kind."""
    if not profile.results:
        curves = {name: Curve.through((rows, ms / 1e3) for rows, ms in points) for name, points in profile.step_ms.items()}
        return StepTimes(profile, curves, ())
    result = json.loads((ROOT / profile.results).read_text())
    return from_result(profile, result)


def from_result(profile: Profile, result: dict[str, Any]) -> StepTimes:
    """result: a file of bench/h200.py; of each concurrency its last pass counts."""
    passes = {one["concurrency"]: one for one in result["passes"]}.values()
    points: dict[str, list[tuple[float, float]]] = {
        name: [] for name in (profile.once, profile.tokens, profile.frames, profile.chunks)
    }
    for one in passes:
        rate = one["requests_per_s"]
        seconds = {name: stage["ms_per_step"] / 1e3 for name, stage in one["stages"].items()}
        steps = {
            profile.once: 1,
            profile.tokens: profile.text_tokens,
            profile.frames: profile.speech_frames + 1,
            profile.chunks: len(one["worst"]["packets"]),
        }
        for name, taken in seconds.items():
            points[name].append((rate * steps[name] * taken, taken))
    return StepTimes(profile, {name: Curve.through(of) for name, of in points.items()}, result["rows"])
