"""What a soak puts under load: a deployment of two replicas a stage and the load for it; one stage has a third, brought from elsewhere."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import tempfile
from collections.abc import Callable, Iterator

from tests.soak.speakers import Expected, Speakers
from tests.support.steady_load import SteadyLoad
from tests.support.steady_voice import FRAMES, STAGES, TOKENS
from tests.support.steady_voice import SETS as VOICE_SETS

REPLICAS = 2  # of each stage, on the server's host


@dataclasses.dataclass(frozen=True, slots=True)
class Subject:
    config: str
    sets: tuple[str, ...]
    stages: tuple[str, ...]
    load: Callable[[str], SteadyLoad]  # from the server's address


@contextlib.contextmanager
def probe() -> Iterator[Subject]:
    stages = ("source", "relay", "sink")
    sets = [f"stages.{stage}.{key}" for stage in stages for key in ("faults=true", "threads=1", f"replicas={REPLICAS}")]
    sets.append("stages.source.tensor_bytes=100000")
    yield Subject("probe.toml", tuple(sets), stages, lambda url: SteadyLoad(url, words=60, text_only=4))


@contextlib.contextmanager
def qwen3_omni_tiny() -> Iterator[Subject]:
    from omni_bus.stages.qwen3_omni import fixture

    expected = Expected()
    sets = [f"stages.{stage}.{key}" for stage in STAGES for key in ("threads=1", f"replicas={REPLICAS}")]
    sets += [f"stages.thinker.sampling.max_tokens={TOKENS}", f"stages.talker.sampling.max_tokens={FRAMES}"]
    with tempfile.TemporaryDirectory(prefix="omni-soak-") as base:
        checkpoint = pathlib.Path(base) / "tiny"
        fixture.write(checkpoint, "tiny", 2, lambda fraction, detail: None)
        said = (f"model.path={checkpoint}", *VOICE_SETS, *sets)
        yield Subject("qwen3_omni_tiny.toml", said, STAGES, lambda url: Speakers(url, expected))


SUBJECTS = {"probe": probe, "qwen3-omni-tiny": qwen3_omni_tiny}
