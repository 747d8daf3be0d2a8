"""Every streaming layer gives, for every split of its input, what its offline form gives for the whole of it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as reference
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig

from omni_bus.stages.qwen3_omni.code2wav_config import Code2WavConfig
from omni_bus.stages.qwen3_omni.code2wav_layers import (
    CausalConv,
    ConvNeXt,
    DecoderBlock,
    LookaheadUpsample,
    ResidualUnit,
    Rows,
    Snake,
    StreamingLayer,
    Upsample,
)
from omni_bus.stages.qwen3_omni.code2wav_transformer import Transformer

SLOTS, SLOT = 3, 1
WIDTH = 6
Run = Callable[[torch.Tensor, Rows], torch.Tensor]

TRANSFORMER = Code2WavConfig(
    codebook_size=8,
    num_quantizers=2,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    rms_norm_eps=1e-5,
    rope_theta=10_000.0,
    sliding_window=4,
    upsampling_ratios=(2,),
    upsample_rates=(2,),
    decoder_dim=8,
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def compositions(total: int) -> Iterator[tuple[int, ...]]:
    """All ways to cut `total` steps into pieces."""
    for cuts in itertools.product((False, True), repeat=total - 1):
        borders = [0, *(index + 1 for index, cut in enumerate(cuts) if cut), total]
        yield tuple(b - a for a, b in itertools.pairwise(borders))


def prepare(layer: nn.Module, offline: nn.Module) -> None:
    """Random weights, the same in both, and state full of NaN: a fresh stream must not read what its slot held."""
    generator = torch.Generator().manual_seed(0)
    offline.double().eval()
    layer.double()
    with torch.no_grad():
        for parameter in offline.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.4)
    layer.load_state_dict(offline.state_dict())
    for module in layer.modules():
        if isinstance(module, StreamingLayer):
            module.allocate(SLOTS, torch.float64, torch.device("cpu"))
            for state in module.state():
                state.fill_(torch.nan)


def stream(run: Run, x: torch.Tensor, pieces: tuple[int, ...], axis: int = -1) -> torch.Tensor:
    out, position = [], 0
    for piece in x.split(list(pieces), axis):
        out.append(run(piece, Rows(torch.tensor([SLOT]), torch.tensor([position]), position == 0)))
        position += piece.shape[axis]
    return torch.cat(out, axis)


def untouched(layer: nn.Module) -> bool:
    states = [state for module in layer.modules() if isinstance(module, StreamingLayer) for state in module.state()]
    return all(bool(state[[0, 2]].isnan().all()) for state in states)


@dataclasses.dataclass(frozen=True)
class Pair:
    streaming: Callable[[], nn.Module]
    offline: Callable[[], nn.Module]
    steps: int


PAIRS = {
    "causal": Pair(lambda: CausalConv(WIDTH, 4, 7), lambda: reference.Qwen3OmniMoeCausalConvNet(WIDTH, 4, 7), 9),
    "dilated": Pair(
        lambda: CausalConv(WIDTH, WIDTH, 3, dilation=3),
        lambda: reference.Qwen3OmniMoeCausalConvNet(WIDTH, WIDTH, 3, dilation=3),
        9,
    ),
    "pointwise": Pair(lambda: CausalConv(WIDTH, 4, 1), lambda: reference.Qwen3OmniMoeCausalConvNet(WIDTH, 4, 1), 5),
    "grouped": Pair(
        lambda: CausalConv(WIDTH, WIDTH, 7, groups=WIDTH),
        lambda: reference.Qwen3OmniMoeCausalConvNet(WIDTH, WIDTH, 7, groups=WIDTH),
        8,
    ),
    "upsample": Pair(lambda: Upsample(WIDTH, 4, 2), lambda: reference.Qwen3OmniMoeCausalTransConvNet(WIDTH, 4, 2, 2), 5),
    **{
        f"lookahead {rate}": Pair(
            lambda rate=rate: LookaheadUpsample(WIDTH, 4, rate),  # type: ignore[misc]
            lambda rate=rate: reference.Qwen3OmniMoeCausalTransConvNet(WIDTH, 4, 2 * rate, rate),
            7,
        )
        for rate in (3, 4, 5, 8)
    },
    "convnext": Pair(lambda: ConvNeXt(WIDTH), lambda: reference.Qwen3OmniMoeConvNeXtBlock(WIDTH), 9),
    "residual unit": Pair(
        lambda: ResidualUnit(WIDTH, 3), lambda: reference.Qwen3OmniMoeCode2WavDecoderResidualUnit(WIDTH, 3), 9
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_convolution_streams_as_it_runs_offline(name: str) -> None:
    pair = PAIRS[name]
    layer, offline = pair.streaming(), pair.offline()
    prepare(layer, offline)
    x = torch.randn(1, WIDTH, pair.steps, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        whole = offline(x)
        assert float(whole.std()) > 0.1
        for pieces in compositions(pair.steps):
            torch.testing.assert_close(stream(layer, x, pieces), whole, rtol=0, atol=1e-12)
    assert untouched(layer)


@pytest.mark.parametrize("stride", [3, 8])
def test_a_decoder_block_streams_as_it_runs_offline(stride: int) -> None:
    config = Qwen3OmniMoeCode2WavConfig(decoder_dim=8, upsample_rates=[stride])
    layer, offline = DecoderBlock(8, stride), reference.Qwen3OmniMoeCode2WavDecoderBlock(config, 0)
    prepare(layer, offline)
    x = torch.randn(1, 8, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        whole = offline(x)
        for pieces in compositions(7):
            if pieces[0] > 1:  # one step alone gives nothing yet; the model never hands a block less than two at first
                torch.testing.assert_close(stream(layer, x, pieces), whole, rtol=0, atol=1e-12)


def test_one_step_of_a_fresh_stream_is_kept_for_the_next() -> None:
    layer, offline = LookaheadUpsample(WIDTH, 4, 3), reference.Qwen3OmniMoeCausalTransConvNet(WIDTH, 4, 6, 3)
    prepare(layer, offline)
    x = torch.randn(1, WIDTH, 1, dtype=torch.float64)
    assert layer(x, Rows(torch.tensor([SLOT]), torch.tensor([0]), True)).shape == (1, 4, 0)


def test_snake_is_the_reference_formula() -> None:
    layer, offline = Snake(WIDTH), reference.Qwen3OmniMoeSnakeBeta(WIDTH)
    prepare(layer, offline)
    x = torch.randn(2, WIDTH, 5, dtype=torch.float64)
    torch.testing.assert_close(layer(x), offline(x), rtol=0, atol=0)


def _transformers() -> tuple[Transformer, Any]:
    config = Qwen3OmniMoeCode2WavConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=4,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )
    layer = Transformer(TRANSFORMER)
    offline = reference.Qwen3OmniMoeCode2WavTransformerModel._from_config(config)
    prepare(layer, offline)
    return layer, offline


def test_the_transformer_streams_as_it_runs_offline() -> None:
    layer, offline = _transformers()
    x = torch.randn(1, 10, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        whole = offline(inputs_embeds=x).last_hidden_state
        for pieces in compositions(10):
            torch.testing.assert_close(stream(layer, x, pieces, 1), whole, rtol=0, atol=1e-12)
    assert untouched(layer)


def test_rows_at_different_positions_do_not_see_each_other() -> None:
    layer, offline = _transformers()
    x = torch.randn(2, 9, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        whole = offline(inputs_embeds=x).last_hidden_state
        first = layer(x[:1, :5], Rows(torch.tensor([2]), torch.tensor([0]), True))
        second = layer(x[1:, :2], Rows(torch.tensor([0]), torch.tensor([0]), True))
        both = layer(torch.stack((x[0, 5:8], x[1, 2:5])), Rows(torch.tensor([2, 0]), torch.tensor([5, 2]), False))
    torch.testing.assert_close(first, whole[:1, :5], rtol=0, atol=1e-12)
    torch.testing.assert_close(second, whole[1:, :2], rtol=0, atol=1e-12)
    torch.testing.assert_close(both, torch.stack((whole[0, 5:8], whole[1, 2:5])), rtol=0, atol=1e-12)
