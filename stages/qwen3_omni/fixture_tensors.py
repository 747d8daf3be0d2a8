"""Every tensor of a Qwen3-Omni checkpoint: its name on disk, its shape as it follows from the configuration, and how a fixture fills it.

The usual initialisation (std 0.02, layer scale 0.01, ConvNeXt gamma 1e-6, Snake at 0) would make a lost cache row or a wrong window
change next to nothing. Here every tensor gets a scale at which it counts: projections keep the variance of their input, norms lie
around 1, residual scales around 0.5, embeddings at 1. Speakers are told apart loudly, and the end tokens are likely enough that
sequences end by themselves at varying lengths.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from omni_bus.stages.qwen3_omni.fixture_config import Config

TEXT_END_GAIN = 1.5
CODEC_END_GAIN = 1.3
SPEAKER_GAIN = 4.0
UNPRINTABLE_GAIN = 0.2  # of output rows behind the end token, which no text should use
WAVEFORM_GAIN = 0.025  # measured: a standard deviation of about 0.1, so that the clamp at 1 hides nothing


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Normal with `mean` and `std`; then rows [start, stop) are scaled; `zero_sum` takes the mean over the last axis away."""

    name: str
    shape: tuple[int, ...]
    std: float
    mean: float = 0.0
    row_gains: tuple[tuple[int, int, float], ...] = ()
    zero_sum: bool = False

    @property
    def count(self) -> int:
        return math.prod(self.shape)


def tensor_specs(config: Mapping[str, Any]) -> Iterator[TensorSpec]:
    """All tensors in the order in which the shards hold them. `config`: config.json in either spelling."""
    thinker, talker = config["thinker_config"], config["talker_config"]
    yield from _audio_tower("thinker.audio_tower.", thinker["audio_config"])
    yield from _vision_tower("thinker.visual.", thinker["vision_config"])
    yield from _thinker(thinker["text_config"], config)
    yield from _talker(talker)
    yield from _code_predictor("talker.code_predictor.", talker["code_predictor_config"])
    yield from _code2wav("code2wav.", config["code2wav_config"])


def _linear(
    name: str, out: int, into: int, *, bias: bool = False, gains: tuple[tuple[int, int, float], ...] = ()
) -> Iterator[TensorSpec]:
    yield TensorSpec(name=f"{name}.weight", shape=(out, into), std=into**-0.5, row_gains=gains)
    if bias:
        yield _bias(name, out)


def _bias(name: str, size: int) -> TensorSpec:
    return TensorSpec(name=f"{name}.bias", shape=(size,), std=0.02)


def _norm(name: str, size: int, *, bias: bool = False) -> Iterator[TensorSpec]:
    yield TensorSpec(name=f"{name}.weight", shape=(size,), std=0.1, mean=1.0)
    if bias:
        yield _bias(name, size)


def _embedding(name: str, rows: int, size: int, gains: tuple[tuple[int, int, float], ...] = ()) -> TensorSpec:
    return TensorSpec(name=f"{name}.weight", shape=(rows, size), std=1.0, row_gains=gains)


def _convolution(name: str, shape: tuple[int, ...], *, fan_in: int, gain: float = 1.0) -> Iterator[TensorSpec]:
    """`shape` as torch keeps it; the bias has as many entries as there are output channels (axis 0)."""
    yield TensorSpec(name=f"{name}.weight", shape=shape, std=gain * fan_in**-0.5)
    yield _bias(name, shape[0])


def _audio_tower(at: str, audio: Config) -> Iterator[TensorSpec]:
    width, channels = audio["d_model"], audio["downsample_hidden_size"]
    yield from _convolution(f"{at}conv2d1", (channels, 1, 3, 3), fan_in=9)
    yield from _convolution(f"{at}conv2d2", (channels, channels, 3, 3), fan_in=9 * channels)
    yield from _convolution(f"{at}conv2d3", (channels, channels, 3, 3), fan_in=9 * channels)
    bins = audio["num_mel_bins"]
    for _ in range(3):  # each convolution has stride 2 and padding 1
        bins = (bins + 1) // 2
    yield from _linear(f"{at}conv_out", width, channels * bins)
    for index in range(audio["encoder_layers"]):
        layer = f"{at}layers.{index}."
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from _linear(f"{layer}self_attn.{name}", width, width, bias=True)
        yield from _norm(f"{layer}self_attn_layer_norm", width, bias=True)
        yield from _linear(f"{layer}fc1", audio["encoder_ffn_dim"], width, bias=True)
        yield from _linear(f"{layer}fc2", width, audio["encoder_ffn_dim"], bias=True)
        yield from _norm(f"{layer}final_layer_norm", width, bias=True)
    yield from _norm(f"{at}ln_post", width, bias=True)
    yield from _linear(f"{at}proj1", width, width, bias=True)
    yield from _linear(f"{at}proj2", audio["output_dim"], width, bias=True)


def _vision_tower(at: str, vision: Config) -> Iterator[TensorSpec]:
    width, patch, out = vision["hidden_size"], vision["patch_size"], vision["out_hidden_size"]
    kernel = (vision["in_channels"], vision["temporal_patch_size"], patch, patch)
    yield from _convolution(f"{at}patch_embed.proj", (width, *kernel), fan_in=math.prod(kernel))
    yield _embedding(f"{at}pos_embed", vision["num_position_embeddings"], width)
    for index in range(vision["depth"]):
        block = f"{at}blocks.{index}."
        yield from _norm(f"{block}norm1", width, bias=True)
        yield from _linear(f"{block}attn.qkv", 3 * width, width, bias=True)
        yield from _linear(f"{block}attn.proj", width, width, bias=True)
        yield from _norm(f"{block}norm2", width, bias=True)
        yield from _linear(f"{block}mlp.linear_fc1", vision["intermediate_size"], width, bias=True)
        yield from _linear(f"{block}mlp.linear_fc2", width, vision["intermediate_size"], bias=True)
    merged = width * vision["spatial_merge_size"] ** 2
    mergers = [("merger", width)]  # the last merger normalises before it merges, those of the deepstack taps behind it
    mergers += [(f"merger_list.{index}", merged) for index in range(len(vision["deepstack_visual_indexes"]))]
    for name, normalised in mergers:
        yield from _norm(f"{at}{name}.ln_q", normalised, bias=True)
        yield from _linear(f"{at}{name}.mlp.0", merged, merged, bias=True)
        yield from _linear(f"{at}{name}.mlp.2", out, merged, bias=True)


def _attention(at: str, part: Config, *, head_norms: bool) -> Iterator[TensorSpec]:
    hidden, heads, kv_heads = part["hidden_size"], part["num_attention_heads"], part["num_key_value_heads"]
    head = part.get("head_dim", hidden // heads)
    yield from _linear(f"{at}q_proj", heads * head, hidden)
    yield from _linear(f"{at}k_proj", kv_heads * head, hidden)
    yield from _linear(f"{at}v_proj", kv_heads * head, hidden)
    yield from _linear(f"{at}o_proj", hidden, heads * head)
    if head_norms:
        yield from _norm(f"{at}q_norm", head)
        yield from _norm(f"{at}k_norm", head)


def _gated_mlp(at: str, hidden: int, intermediate: int) -> Iterator[TensorSpec]:
    yield from _linear(f"{at}gate_proj", intermediate, hidden)
    yield from _linear(f"{at}up_proj", intermediate, hidden)
    yield from _linear(f"{at}down_proj", hidden, intermediate)


def _expert_layers(at: str, text: Config) -> Iterator[TensorSpec]:
    hidden = text["hidden_size"]
    experts = text["num_experts"] if "num_experts" in text else text["num_local_experts"]
    for index in range(text["num_hidden_layers"]):
        layer = f"{at}layers.{index}."
        yield from _norm(f"{layer}input_layernorm", hidden)
        yield from _attention(f"{layer}self_attn.", text, head_norms=True)
        yield from _norm(f"{layer}post_attention_layernorm", hidden)
        yield from _linear(f"{layer}mlp.gate", experts, hidden)
        for expert in range(experts):
            yield from _gated_mlp(f"{layer}mlp.experts.{expert}.", hidden, text["moe_intermediate_size"])
        if text.get("shared_expert_intermediate_size"):
            yield from _gated_mlp(f"{layer}mlp.shared_expert.", hidden, text["shared_expert_intermediate_size"])
            yield from _linear(f"{layer}mlp.shared_expert_gate", 1, hidden)
    yield from _norm(f"{at}norm", hidden)


def _thinker(text: Config, config: Mapping[str, Any]) -> Iterator[TensorSpec]:
    rows, end, start = text["vocab_size"], config["im_end_token_id"], config["im_start_token_id"]
    yield _embedding("thinker.model.embed_tokens", rows, text["hidden_size"])
    yield from _expert_layers("thinker.model.", text)
    gains = ((start - 1, start + 1, UNPRINTABLE_GAIN), (end, end + 1, TEXT_END_GAIN), (end + 1, rows, UNPRINTABLE_GAIN))
    yield from _linear("thinker.lm_head", rows, text["hidden_size"], gains=gains)


def _talker(talker: Config) -> Iterator[TensorSpec]:
    text, thinker_hidden = talker["text_config"], talker["thinker_hidden_size"]
    hidden, end = text["hidden_size"], talker["codec_eos_token_id"]
    for name in ("text_projection", "hidden_projection"):
        yield from _linear(f"talker.{name}.linear_fc1", text["intermediate_size"], thinker_hidden, bias=True)
        yield from _linear(f"talker.{name}.linear_fc2", hidden, text["intermediate_size"], bias=True)
    speakers = tuple((row, row + 1, SPEAKER_GAIN) for row in talker["speaker_id"].values())
    yield _embedding("talker.model.codec_embedding", text["vocab_size"], hidden, speakers)
    yield from _expert_layers("talker.model.", text)
    yield from _linear("talker.codec_head", text["vocab_size"], hidden, gains=((end, end + 1, CODEC_END_GAIN),))


def _code_predictor(at: str, part: Config) -> Iterator[TensorSpec]:
    hidden, rows = part["hidden_size"], part["vocab_size"]
    for index in range(part["num_code_groups"] - 1):
        yield _embedding(f"{at}model.codec_embedding.{index}", rows, hidden)
    for index in range(part["num_hidden_layers"]):
        layer = f"{at}model.layers.{index}."
        yield from _norm(f"{layer}input_layernorm", hidden)
        yield from _attention(f"{layer}self_attn.", part, head_norms=True)
        yield from _norm(f"{layer}post_attention_layernorm", hidden)
        yield from _gated_mlp(f"{layer}mlp.", hidden, part["intermediate_size"])
    yield from _norm(f"{at}model.norm", hidden)
    for index in range(part["num_code_groups"] - 1):
        yield from _linear(f"{at}lm_head.{index}", rows, hidden)


def _code2wav(at: str, part: Config) -> Iterator[TensorSpec]:
    hidden = part["hidden_size"]
    yield _embedding(f"{at}code_embedding", part["codebook_size"] * part["num_quantizers"], hidden)
    for index in range(part["num_hidden_layers"]):
        layer = f"{at}pre_transformer.layers.{index}."
        yield from _norm(f"{layer}input_layernorm", hidden)
        yield from _attention(f"{layer}self_attn.", part, head_norms=False)
        yield _residual_scale(f"{layer}self_attn_layer_scale.scale", hidden)
        yield from _norm(f"{layer}post_attention_layernorm", hidden)
        yield from _gated_mlp(f"{layer}mlp.", hidden, part["intermediate_size"])
        yield _residual_scale(f"{layer}mlp_layer_scale.scale", hidden)
    yield from _norm(f"{at}pre_transformer.norm", hidden)
    for index, ratio in enumerate(part["upsampling_ratios"]):
        yield from _transposed(f"{at}upsample.{index}.0.conv", hidden, hidden, kernel=ratio, stride=ratio)
        yield from _conv_next(f"{at}upsample.{index}.1.", hidden)
    width = part["decoder_dim"]
    yield from _convolution(f"{at}decoder.0.conv", (width, hidden, 7), fan_in=7 * hidden, gain=0.8)
    for index, rate in enumerate(part["upsample_rates"], start=1):
        block = f"{at}decoder.{index}.block."
        yield from _snake(f"{block}0", width)
        yield from _transposed(f"{block}1.conv", width, width // 2, kernel=2 * rate, stride=rate)
        width //= 2
        for unit in range(2, 5):
            yield from _snake(f"{block}{unit}.act1", width)
            yield from _convolution(f"{block}{unit}.conv1.conv", (width, width, 7), fan_in=7 * width, gain=0.8)
            yield from _snake(f"{block}{unit}.act2", width)
            yield from _convolution(f"{block}{unit}.conv2.conv", (width, width, 1), fan_in=width, gain=0.8)
    count = len(part["upsample_rates"])
    yield from _snake(f"{at}decoder.{count + 1}", width)
    # Snake has a positive mean: taps that add up to zero keep the waveform centred whatever the weights before are.
    name = f"{at}decoder.{count + 2}.conv"
    yield TensorSpec(name=f"{name}.weight", shape=(1, width, 7), std=WAVEFORM_GAIN * (7 * width) ** -0.5, zero_sum=True)
    yield TensorSpec(name=f"{name}.bias", shape=(1,), std=0.002)


def _residual_scale(name: str, size: int) -> TensorSpec:
    return TensorSpec(name=name, shape=(size,), std=0.1, mean=0.5)


def _snake(name: str, channels: int) -> Iterator[TensorSpec]:
    for parameter in ("alpha", "beta"):  # logarithms of frequency and magnitude
        yield TensorSpec(name=f"{name}.{parameter}", shape=(channels,), std=0.1)


def _transposed(name: str, into: int, out: int, *, kernel: int, stride: int) -> Iterator[TensorSpec]:
    """torch keeps a transposed kernel as [in, out, kernel]; kernel/stride input steps reach each output step."""
    yield TensorSpec(name=f"{name}.weight", shape=(into, out, kernel), std=0.8 * (into * kernel // stride) ** -0.5)
    yield _bias(name, out)


def _conv_next(at: str, width: int) -> Iterator[TensorSpec]:
    yield from _convolution(f"{at}dwconv.conv", (width, 1, 7), fan_in=7, gain=0.8)
    yield from _norm(f"{at}norm", width, bias=True)
    yield from _linear(f"{at}pwconv1", 4 * width, width, bias=True)
    yield from _linear(f"{at}pwconv2", width, 4 * width, bias=True)
    yield _residual_scale(f"{at}gamma", width)
