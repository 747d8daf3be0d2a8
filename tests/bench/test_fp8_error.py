"""bench/fp8_error.py on tiny sizes: its figures are those of their definitions, and in the order that the formats set."""

from __future__ import annotations

import pathlib
import re

import pytest
import torch

from bench import fp8_error
from omni_bus.stages.qwen3_omni import fixture
from omni_bus.stages.qwen3_omni.config import read_config
from omni_bus.stages.qwen3_omni.random_weights import RandomCheckpoint
from omni_bus.stages.qwen3_omni.weights import decoder_config


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    directory = tmp_path_factory.mktemp("bare") / "tiny"
    fixture.write(directory, "tiny", 0, lambda fraction, text: None, weights=False)
    return directory


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def share(cell: str) -> float:
    return float(cell.removesuffix(" %"))


def test_an_error_is_a_length_over_a_length() -> None:
    true, got = torch.tensor([[3.0, 4.0], [0.0, 2.0]]), torch.tensor([[3.0, 4.5], [2.0, 2.0]])
    assert fp8_error.relative(got, true).tolist() == [0.1, 1.0]
    assert fp8_error.percent(torch.tensor([0.1, 0.3])) == "20.00 % | 30.00 %"


@torch.no_grad()
def test_experts_and_layers(bare: pathlib.Path) -> None:
    torch.set_num_threads(1)
    checkpoint, config = RandomCheckpoint(bare), decoder_config(read_config(str(bare)).thinker.text)
    rows = [cells(line) for line in fp8_error.expert_rows(checkpoint, config.hidden, count=2, tokens=8)]
    assert [name for _, name, *_ in rows[1:4]] == [fp8_error.BF16, fp8_error.FP8_ONLY, fp8_error.FP8] and len(rows) == 8
    matrices, bf16, only, both = (share(row[2]) for row in rows[:4])
    assert 1.5 < matrices < 3.5 and 0.1 < bf16 < 1 and 3 * matrices > only > matrices and bf16 < both
    layers = [cells(line) for line in fp8_error.layer_rows(checkpoint, config, layers=2, tokens=12)]
    assert [(row[0], row[1]) for row in layers] == [
        (str(layer), name) for layer in (0, 1) for name in (fp8_error.BF16, fp8_error.FP8_ONLY, fp8_error.FP8)
    ]
    for row in layers:
        assert all(share(cell) >= 0 for cell in row[2:]) and share(row[2]) <= share(row[3]) < 100
    assert layers[0][2:4] == layers[0][4:6] and layers[3][2:4] != layers[3][4:6]


@torch.no_grad()
def test_logits_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(fp8_error, "TINY_SEEDS", 1)
    first, _, _, _, *rows = fp8_error.model_rows()
    assert re.match(rf"{12 * 48} positions, ", first)
    figures = {row[0]: row[1:] for row in map(cells, rows)}
    assert figures.keys() == {fp8_error.BF16, fp8_error.FP8_ONLY, fp8_error.FP8}
    mean = {name: float(row[1]) for name, row in figures.items()}
    assert 0 < mean[fp8_error.BF16] < mean[fp8_error.FP8_ONLY] < 0.2
    for largest, average, kl, most, same in figures.values():
        assert float(largest) > float(average) and 0 < float(kl) < float(most) and 70 < share(same) <= 100
