"""How many threads torch gets in a worker, by what its stages run on."""

from __future__ import annotations

import pathlib

import msgspec
import pytest

from omni_bus.config import load_deployment
from omni_bus.workers import devices


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ({"source": "cpu"}, 5),  # its part of 16 cores: there are three workers
        ({"source": "cuda:0"}, 1),
        ({"source": "cuda:0", "relay": "cuda:1"}, 1),
        ({"source": "cuda:0", "relay": "cpu"}, 5),  # one that shares the process works on the CPU
    ],
)
def test_a_process_whose_stages_all_run_on_gpus_has_one_thread(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, places: dict[str, str], expected: int
) -> None:
    monkeypatch.setattr(devices, "usable_cores", lambda: 16)
    (tmp_path / "d.toml").write_text('[model]\npipeline = "probe"\n')
    plain = load_deployment(tmp_path / "d.toml", environ={})

    def placed(threads: int) -> int:
        stages = {
            name: msgspec.structs.replace(plain.stages[name], devices=(device,), threads=threads)
            for name, device in places.items()
        }
        return devices.threads_of(msgspec.structs.replace(plain, stages=plain.stages | stages), tuple(places))

    assert placed(threads=0) == expected
    assert placed(threads=3) == 3, "what the configuration says is not what was set"
