"""The decoder equals transformers' models in fp32, paged or contiguous, whole or in pieces."""

from __future__ import annotations

import pytest
import torch

from omni_bus.errors import CheckpointError
from omni_bus.stages.ar.attention import ContiguousAttention, PagedAttention, Span
from omni_bus.stages.ar.decoder import Decoder, DecoderConfig
from omni_bus.stages.ar.kv_cache import KVCache
from omni_bus.stages.ar.mlp import DenseConfig, MoEConfig


def paged(config: DecoderConfig) -> PagedAttention:
    return PagedAttention(config, KVCache(config, blocks=32, block_size=4, dtype=torch.float32, device="cpu"))


def close(ours: torch.Tensor, reference: torch.Tensor) -> None:
    torch.testing.assert_close(ours, reference, atol=3e-6, rtol=1e-5)


def image_positions(length: int) -> torch.Tensor:
    """int64 [3, length]: text, a 1 x 3 x 4 image, text again."""
    before = torch.arange(4).expand(3, -1)
    grid = torch.stack([torch.full((12,), 4), 4 + torch.arange(12) // 4, 4 + torch.arange(12) % 4])
    after = (8 + torch.arange(length - 16)).expand(3, -1)
    return torch.cat([before, grid, after], dim=1)


@pytest.fixture(scope="module")
def thinker(randomise):
    from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeTextConfig
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeThinkerTextModel

    config = Qwen3OmniMoeTextConfig(
        vocab_size=64,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        norm_topk_prob=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": [6, 5, 5], "mrope_interleaved": True},
    )
    model = randomise(Qwen3OmniMoeThinkerTextModel._from_config(config, attn_implementation="sdpa"), 3)
    ours = DecoderConfig(
        hidden=48,
        layers=5,
        heads=4,
        kv_heads=2,
        head_dim=32,
        mlp=MoEConfig(experts=8, top_k=2, intermediate=24, norm_topk_prob=True),
        max_positions=1024,
        rms_eps=config.rms_norm_eps,
        rope_theta=1e6,
        mrope_section=(6, 5, 5),
        qk_norm=True,
    )
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name != "embed_tokens.weight"}
    return model, Decoder.from_tensors(ours, tensors, dtype=torch.float32, device="cpu")


@pytest.fixture(scope="module")
def talker(randomise):
    from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeTalkerTextConfig
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeTalkerModel

    config = Qwen3OmniMoeTalkerTextConfig(
        vocab_size=64,
        hidden_size=40,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=36,
        norm_topk_prob=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 4, 4], "mrope_interleaved": True},
    )
    model = randomise(Qwen3OmniMoeTalkerModel._from_config(config, attn_implementation="sdpa"), 4)
    ours = DecoderConfig(
        hidden=40,
        layers=3,
        heads=4,
        kv_heads=2,
        head_dim=32,
        mlp=MoEConfig(experts=6, top_k=3, intermediate=24, norm_topk_prob=False, shared_intermediate=36),
        max_positions=1024,
        rms_eps=config.rms_norm_eps,
        rope_theta=1e6,
        mrope_section=(8, 4, 4),
        qk_norm=True,
    )
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name != "codec_embedding.weight"}
    return model, Decoder.from_tensors(ours, tensors, dtype=torch.float32, device="cpu")


@pytest.fixture(scope="module")
def predictor(randomise):
    from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeTalkerCodePredictorConfig
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeTalkerCodePredictorModel

    config = Qwen3OmniMoeTalkerCodePredictorConfig(
        vocab_size=32,
        hidden_size=40,
        intermediate_size=56,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_code_groups=16,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    model = randomise(Qwen3OmniMoeTalkerCodePredictorModel._from_config(config, attn_implementation="sdpa"), 5)
    ours = DecoderConfig(
        hidden=40,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=16,
        mlp=DenseConfig(intermediate=56),
        max_positions=16,
        rms_eps=config.rms_norm_eps,
        rope_theta=1e6,
        qk_norm=True,
    )
    tensors = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("codec_embedding.")}
    return model, Decoder.from_tensors(ours, tensors, dtype=torch.float32, device="cpu")


def test_llama_equals_transformers(tiny_llama, llama_decoder):
    ids = torch.randint(0, 97, (1, 23), generator=torch.Generator().manual_seed(0))
    reference = tiny_llama.model(input_ids=ids).last_hidden_state[0]
    attention = paged(llama_decoder.config)
    attention.plan([Span(range(1, 7), 0, 23)])
    hidden, _ = llama_decoder(tiny_llama.model.embed_tokens(ids[0]), torch.arange(23).expand(3, -1), attention)
    close(hidden, reference)


def test_thinker_equals_transformers_with_image_positions_deepstack_and_capture(thinker):
    model, decoder = thinker
    generator = torch.Generator().manual_seed(6)
    length = 30
    embeds = torch.randn(length, 48, generator=generator)
    positions = image_positions(length)
    visual = torch.zeros(length, dtype=torch.bool)
    visual[4:16] = True
    taps = torch.randn(3, 12, 48, generator=generator)
    reference = model(
        inputs_embeds=embeds[None],
        position_ids=positions[:, None],
        visual_pos_masks=visual[None],
        deepstack_visual_embeds=list(taps),
        output_hidden_states=True,
    )
    deepstack = torch.zeros(3, length, 48)
    deepstack[:, visual] = taps
    for layer in (0, 1, 2, 4, 5):
        attention = paged(decoder.config)
        attention.plan([Span(range(3, 11), 0, length)])
        hidden, captured = decoder(embeds, positions, attention, deepstack=deepstack, capture_layer=layer)
        close(hidden, reference.last_hidden_state[0])
        close(captured, reference.hidden_states[layer][0])


@pytest.mark.parametrize("model_name", ["thinker", "talker"])
@pytest.mark.parametrize("cuts", [(1,), (7, 8, 20), (5, 9, 13, 29), tuple(range(1, 30))])
def test_pieces_through_the_paged_cache_equal_the_whole(model_name, cuts, request):
    model, decoder = request.getfixturevalue(model_name)
    length = 30
    embeds = torch.randn(length, decoder.config.hidden, generator=torch.Generator().manual_seed(7))
    positions = image_positions(length)
    reference = model(inputs_embeds=embeds[None], position_ids=positions[:, None]).last_hidden_state[0]
    attention = paged(decoder.config)
    blocks = [9, 2, 30, 31, 5, 1, 17, 8]
    parts = []
    for start, stop in zip((0, *cuts), (*cuts, length), strict=True):
        attention.plan([Span(blocks, start, stop - start)])
        parts.append(decoder(embeds[start:stop], positions[:, start:stop], attention)[0])
    close(torch.cat(parts), reference)


def test_a_mixed_batch_equals_each_row_alone(talker):
    model, decoder = talker
    generator = torch.Generator().manual_seed(8)
    lengths, starts = [9, 21, 4, 14], [8, 10, 0, 13]
    tables = [[1, 5, 9], [2, 3, 4, 6, 7, 8], [12], [20, 19, 18, 17]]
    rows = [torch.randn(length, decoder.config.hidden, generator=generator) for length in lengths]
    attention = paged(decoder.config)
    for row, start, blocks in zip(rows, starts, tables, strict=True):
        if start:
            attention.plan([Span(blocks, 0, start)])
            decoder(row[:start], torch.arange(start).expand(3, -1), attention)
    attention.plan([Span(b, s, n - s) for b, s, n in zip(tables, starts, lengths, strict=True)])
    hidden, _ = decoder(
        torch.cat([row[start:] for row, start in zip(rows, starts, strict=True)]),
        torch.cat([torch.arange(start, length) for start, length in zip(starts, lengths, strict=True)]).expand(3, -1),
        attention,
    )
    alone = [
        model(inputs_embeds=row[None], position_ids=torch.arange(len(row)).expand(3, 1, -1)).last_hidden_state[0, start:]
        for row, start in zip(rows, starts, strict=True)
    ]
    close(hidden, torch.cat(alone))


def test_padding_of_a_decode_batch_never_sees_other_rows_values(talker):
    _, decoder = talker
    embeds = torch.randn(2, decoder.config.hidden, generator=torch.Generator().manual_seed(9))
    attention = paged(decoder.config)
    attention.plan([Span([4], 0, 1)])
    alone, _ = decoder(embeds[:1], torch.zeros(3, 1, dtype=torch.int64), attention)
    for layer in range(decoder.config.layers):
        for cache in attention.cache.layer(layer):
            cache[4:] = float("nan")  # every block but the null block
    attention.plan([Span([4], 0, 1), Span([5, 6], 6, 1)])
    both, _ = decoder(embeds, torch.tensor([0, 6]).expand(3, -1), attention)
    close(both[0], alone[0])
    assert both[1].isnan().all()


@pytest.mark.parametrize("rows", [1, 3])
def test_code_predictor_on_a_contiguous_cache_equals_transformers(predictor, rows):
    model, decoder = predictor
    embeds = torch.randn(rows, 16, 40, generator=torch.Generator().manual_seed(10))
    reference = model(inputs_embeds=embeds).last_hidden_state
    cache = ContiguousAttention(decoder.config, rows=4, capacity=16, dtype=torch.float32, device="cpu")
    for _ in range(2):  # the second time on a cache that was used
        cache.reset(rows)
        parts = [decoder.forward_rows(embeds[:, :2], cache)]
        parts += [decoder.forward_rows(embeds[:, step : step + 1], cache) for step in range(2, 16)]
        close(torch.cat(parts, dim=1), reference)


def test_a_checkpoint_that_does_not_fit_is_refused(llama_decoder):
    tensors = dict(llama_decoder.state_dict())
    for wrong in (
        {name: tensor for name, tensor in tensors.items() if name != "norm.weight"},
        tensors | {"layers.0.self_attn.q_norm.weight": torch.ones(8)},
        tensors | {"norm.weight": torch.ones(47)},
    ):
        with pytest.raises(CheckpointError, match=r"norm\.weight"):
            Decoder.from_tensors(llama_decoder.config, wrong, dtype=torch.float32, device="cpu")
