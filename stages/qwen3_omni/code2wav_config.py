"""Code2Wav's part of a checkpoint's config.json, typed."""

from __future__ import annotations

import dataclasses
import math

from omni_bus.errors import CheckpointError
from omni_bus.stages.qwen3_omni.json_fields import Section


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Code2WavConfig:
    codebook_size: int
    num_quantizers: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    sliding_window: int  # frames a frame attends to, itself included
    upsampling_ratios: tuple[int, ...]
    upsample_rates: tuple[int, ...]
    decoder_dim: int

    @property
    def frame_samples(self) -> int:
        """Samples per codec frame: 1,920 at 24 kHz, 80 ms."""
        return math.prod(self.upsampling_ratios) * math.prod(self.upsample_rates)

    @property
    def lookahead_samples(self) -> int:
        """Samples by which the decoder looks ahead, so many fewer come of a stream's first chunk: 555, 23 ms."""
        return sum(math.prod(self.upsample_rates[index:]) for index in range(len(self.upsample_rates)))


def parse(section: Section) -> Code2WavConfig:
    """From `code2wav_config` in either spelling; CheckpointError names the field."""
    if section.fields.get("rope_parameters") is not None:
        theta = section.section("rope_parameters").get(float, "rope_theta")
    else:
        theta = section.get(float, "rope_theta")
    hidden, heads = section.get(int, "hidden_size"), section.get(int, "num_attention_heads")
    config = Code2WavConfig(
        codebook_size=section.get(int, "codebook_size"),
        num_quantizers=section.get(int, "num_quantizers"),
        hidden_size=hidden,
        intermediate_size=section.get(int, "intermediate_size"),
        num_layers=section.get(int, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=section.get(int, "num_key_value_heads"),
        head_dim=section.get_or(hidden // max(heads, 1), "head_dim"),
        rms_norm_eps=section.get(float, "rms_norm_eps"),
        rope_theta=theta,
        sliding_window=section.get(int, "sliding_window"),
        upsampling_ratios=section.ints("upsampling_ratios"),
        upsample_rates=section.ints("upsample_rates"),
        decoder_dim=section.get(int, "decoder_dim"),
    )
    sizes = [value for value in dataclasses.astuple(config) if isinstance(value, int)]
    rates = (*config.upsampling_ratios, *config.upsample_rates)
    rules = (
        (min(sizes) >= 1 and min(rates, default=1) >= 1, "sizes and rates must be at least 1"),
        (config.sliding_window >= 2, "sliding_window must be at least 2"),
        (config.num_heads % config.num_kv_heads == 0, "num_attention_heads must be a multiple of num_key_value_heads"),
        (config.decoder_dim % 2 ** len(config.upsample_rates) == 0, "decoder_dim must halve once for each of upsample_rates"),
        (math.prod(config.upsampling_ratios) >= 2, "upsampling_ratios must multiply to at least 2"),
        (section.get(str, "hidden_act") == "silu", "hidden_act must be 'silu'"),
        (not section.get_or(False, "attention_bias"), "attention_bias must be false"),
    )
    for good, rule in rules:
        if not good:
            raise CheckpointError(f"config.json: {section.path}{rule}")
    return config


def expected_shapes(config: Code2WavConfig) -> dict[str, tuple[int, ...]]:
    """Tensors of the checkpoint that show whether every part of Code2Wav is there in the shape that its configuration says."""
    hidden, width, blocks = config.hidden_size, config.decoder_dim, len(config.upsample_rates)
    layers = range(config.num_layers)
    return {
        "code2wav.code_embedding.weight": (config.codebook_size * config.num_quantizers, hidden),
        **{
            f"code2wav.pre_transformer.layers.{n}.self_attn.q_proj.weight": (config.num_heads * config.head_dim, hidden)
            for n in layers
        },
        **{f"code2wav.pre_transformer.layers.{n}.mlp.up_proj.weight": (config.intermediate_size, hidden) for n in layers},
        **{f"code2wav.upsample.{n}.0.conv.weight": (hidden, hidden, ratio) for n, ratio in enumerate(config.upsampling_ratios)},
        "code2wav.decoder.0.conv.weight": (width, hidden, 7),
        **{
            f"code2wav.decoder.{n + 1}.block.1.conv.weight": (width >> n, width >> (n + 1), 2 * rate)
            for n, rate in enumerate(config.upsample_rates)
        },
        f"code2wav.decoder.{blocks + 2}.conv.weight": (1, width >> blocks, 7),
    }


def slot_values(config: Code2WavConfig, fused_frames: int = 0) -> int:
    """Numbers that one stream's state holds: kept keys and values, and each convolution's last inputs. The fused form has room for
    the `fused_frames` of a call among the keys and values, and the inputs twice."""
    kept = config.sliding_window - 1 + fused_frames
    keys = 2 * config.num_layers * config.num_kv_heads * kept * config.head_dim
    inputs = _input_values(config)
    return keys + (2 * inputs if fused_frames else inputs)


def _input_values(config: Code2WavConfig) -> int:
    values = 6 * config.hidden_size * (len(config.upsampling_ratios) + 1)  # kernels of 7, undilated
    width = config.decoder_dim
    for _ in config.upsample_rates:
        values += width  # the newest step of a transposed convolution
        width //= 2
        values += 6 * (1 + 3 + 9) * width  # three residual units
    return values + 6 * width
