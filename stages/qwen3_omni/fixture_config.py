"""The configurations of the fixture checkpoints, as config.json spells them on the hub, and the spelling transformers 5 writes.

`full` is the shape of the 30B-A3B model; `tiny` keeps every part and every relation between the parts that the code depends on
(three deepstack taps below the accept layer, 13 audio tokens a second, 1,920 samples a frame, codec specials in the last 1,024 ids of
the Talker's vocabulary) and shrinks the rest to about two million parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

Config = dict[str, Any]
TokenId = Callable[[str], int]  # token → id

ARCHITECTURE = "Qwen3OmniMoeForConditionalGeneration"
CODEC_SPECIALS = 1024  # ids of the Talker's vocabulary behind the codebook
CODE_GROUPS = 16


def full(token_id: TokenId) -> Config:
    """35.3 B parameters, bfloat16."""
    rope = _rope(mrope_section=[24, 20, 20])
    common = {"attention_bias": False, "hidden_act": "silu", "rms_norm_eps": 1e-6, "use_cache": True}
    thinker_text = {
        **common,
        "model_type": "qwen3_omni_moe_text",
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "hidden_size": 2048,
        "intermediate_size": 768,
        "max_position_embeddings": 65536,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "shared_expert_intermediate_size": 0,
        "vocab_size": 152064,
        **rope,
    }
    audio = {
        "d_model": 1280,
        "downsample_hidden_size": 480,
        "encoder_attention_heads": 20,
        "encoder_ffn_dim": 5120,
        "encoder_layers": 32,
    }
    vision = {
        "deepstack_visual_indexes": [8, 16, 24],
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_heads": 16,
    }
    talker_text = {
        **common,
        "model_type": "qwen3_omni_moe_talker_text",
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "max_position_embeddings": 65536,
        "mlp_only_layers": [],
        "moe_intermediate_size": 384,
        "norm_topk_prob": True,
        "num_attention_heads": 16,
        "num_experts": 128,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 20,
        "num_key_value_heads": 2,
        "shared_expert_intermediate_size": 768,
        **rope,
    }
    code_predictor = {
        **common,
        "head_dim": 128,
        "intermediate_size": 3072,
        "max_position_embeddings": 32768,
        "num_attention_heads": 16,
        "num_hidden_layers": 5,
        "num_key_value_heads": 8,
    }
    code2wav = {
        "decoder_dim": 1536,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_hidden_layers": 8,
        "num_key_value_heads": 16,
        "sliding_window": 72,
    }
    return _assemble(
        token_id,
        dtype="bfloat16",
        codebook=2048,
        accept_hidden_layer=24,
        thinker_text=thinker_text,
        audio=audio,
        vision=vision,
        talker_text=talker_text,
        code_predictor=code_predictor,
        code2wav=code2wav,
    )


def tiny(token_id: TokenId, *, vocab_size: int) -> Config:
    """About 2 M parameters, float32."""
    rope = _rope(mrope_section=[6, 5, 5])
    common = {"attention_bias": False, "hidden_act": "silu", "rms_norm_eps": 1e-6, "use_cache": True}
    thinker_text = {
        **common,
        "model_type": "qwen3_omni_moe_text",
        "decoder_sparse_step": 1,
        "head_dim": 32,
        "hidden_size": 64,
        "intermediate_size": 128,
        "max_position_embeddings": 4096,
        "mlp_only_layers": [],
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "num_attention_heads": 4,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 5,
        "num_key_value_heads": 2,
        "shared_expert_intermediate_size": 0,
        "vocab_size": vocab_size,
        **rope,
    }
    audio = {
        "d_model": 64,
        "downsample_hidden_size": 16,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 128,
        "encoder_layers": 2,
    }
    vision = {
        "deepstack_visual_indexes": [0, 1, 2],
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
    }
    talker_text = {
        **common,
        "model_type": "qwen3_omni_moe_talker_text",
        "decoder_sparse_step": 1,
        "head_dim": 32,
        "hidden_size": 48,
        "intermediate_size": 96,
        "max_position_embeddings": 8192,
        "mlp_only_layers": [],
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "num_attention_heads": 4,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "shared_expert_intermediate_size": 48,
        **rope,
    }
    code_predictor = {
        **common,
        "head_dim": 16,
        "intermediate_size": 96,
        "max_position_embeddings": 8192,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
    }
    code2wav = {
        "decoder_dim": 64,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "sliding_window": 8,
    }
    return _assemble(
        token_id,
        dtype="float32",
        codebook=256,
        accept_hidden_layer=4,
        thinker_text=thinker_text,
        audio=audio,
        vision=vision,
        talker_text=talker_text,
        code_predictor=code_predictor,
        code2wav=code2wav,
    )


def respelled(config: Mapping[str, Any]) -> Config:
    """The same configuration as transformers 5 writes it: `rope_parameters` in place of `rope_theta` and `rope_scaling`, and the
    Talker's `num_experts` as `num_local_experts`."""
    out: Config = copy.deepcopy(dict(config))
    thinker, talker = out["thinker_config"], out["talker_config"]
    for part in (thinker["text_config"], talker["text_config"], talker["code_predictor_config"], out["code2wav_config"]):
        scaling = part.pop("rope_scaling", None) or {"rope_type": "default"}
        part["rope_parameters"] = {**scaling, "rope_theta": part.pop("rope_theta")}
    talker["text_config"]["num_local_experts"] = talker["text_config"].pop("num_experts")
    return out


def _rope(*, mrope_section: list[int]) -> Config:
    scaling = {"interleaved": True, "mrope_interleaved": True, "mrope_section": mrope_section, "rope_type": "default"}
    return {"rope_theta": 1_000_000, "rope_scaling": scaling}


def _assemble(
    token_id: TokenId,
    *,
    dtype: str,
    codebook: int,
    accept_hidden_layer: int,
    thinker_text: Config,
    audio: Config,
    vision: Config,
    talker_text: Config,
    code_predictor: Config,
    code2wav: Config,
) -> Config:
    """What is the same in both sizes, and what follows from another part."""
    hidden, talker_hidden = thinker_text["hidden_size"], talker_text["hidden_size"]
    media = {
        "audio_token_id": token_id("<|audio_pad|>"),
        "image_token_id": token_id("<|image_pad|>"),
        "video_token_id": token_id("<|video_pad|>"),
        "audio_start_token_id": token_id("<|audio_start|>"),
        "audio_end_token_id": token_id("<|audio_end|>"),
        "vision_start_token_id": token_id("<|vision_start|>"),
        "vision_end_token_id": token_id("<|vision_end|>"),
        "position_id_per_seconds": 13,
        "seconds_per_chunk": 2,
    }
    thinker = {
        "model_type": "qwen3_omni_moe_thinker",
        "dtype": dtype,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "user_token_id": token_id("user"),
        **media,
        "audio_config": {
            "model_type": "qwen3_omni_moe_audio_encoder",
            "activation_function": "gelu",
            "conv_chunksize": 500,
            "max_source_positions": 1500,
            "n_window": 50,
            "n_window_infer": 800,
            "num_mel_bins": 128,
            "output_dim": hidden,
            "scale_embedding": False,
            **audio,
        },
        "vision_config": {
            "model_type": "qwen3_omni_moe_vision_encoder",
            "hidden_act": "gelu_pytorch_tanh",
            "image_size": 768,
            "in_channels": 3,
            "num_position_embeddings": 2304,
            "out_hidden_size": hidden,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "tokens_per_second": 2,
            **vision,
        },
        "text_config": thinker_text,
    }
    talker = {
        "accept_hidden_layer": accept_hidden_layer,
        "codec_pad_id": codebook + 100,
        "codec_bos_id": codebook + 101,
        "codec_eos_token_id": codebook + 102,
        "codec_nothink_id": codebook + 107,
        "codec_think_bos_id": codebook + 108,
        "codec_think_eos_id": codebook + 109,
        "num_code_groups": CODE_GROUPS,
        "output_router_logits": False,
        "spatial_merge_size": 2,
        "speaker_id": {"chelsie": codebook + 253, "ethan": codebook + 254, "aiden": codebook + 255},
        "thinker_hidden_size": hidden,
        "tie_word_embeddings": False,
        **media,
        "text_config": {**talker_text, "vocab_size": codebook + CODEC_SPECIALS},
        "code_predictor_config": {
            **code_predictor,
            "model_type": "qwen3_omni_moe_talker_code_predictor",
            "hidden_size": talker_hidden,
            "layer_types": ["full_attention"] * code_predictor["num_hidden_layers"],
            "num_code_groups": CODE_GROUPS,
            "rope_scaling": None,
            "rope_theta": 1_000_000,
            "vocab_size": codebook,
        },
    }
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3_omni_moe",
        "dtype": dtype,
        "enable_audio_output": True,
        "initializer_range": 0.02,
        "im_start_token_id": token_id("<|im_start|>"),
        "im_end_token_id": token_id("<|im_end|>"),
        "system_token_id": token_id("system"),
        "user_token_id": token_id("user"),
        "assistant_token_id": token_id("assistant"),
        "tts_pad_token_id": token_id("<tts_pad>"),
        "tts_bos_token_id": token_id("<tts_text_bos>"),
        "tts_eos_token_id": token_id("<tts_text_eod>"),
        "thinker_config": thinker,
        "talker_config": talker,
        "code2wav_config": {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "codebook_dim": 512,
            "codebook_size": codebook,
            "hidden_act": "silu",
            "layer_scale_initial_scale": 0.01,
            "max_position_embeddings": 8000,
            "num_quantizers": CODE_GROUPS,
            "num_semantic_quantizers": 1,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10_000,
            "semantic_codebook_size": 4096,
            "upsample_rates": [8, 5, 4, 3],
            "upsampling_ratios": [2, 2],
            "vector_quantization_hidden_dimension": 512,
            **code2wav,
        },
    }


def generation_config(config: Mapping[str, Any], token_id: TokenId) -> Config:
    """generation_config.json: what ends the text."""
    return {"eos_token_id": config["im_end_token_id"], "pad_token_id": token_id("<|endoftext|>")}


def preprocessor_config() -> Config:
    """preprocessor_config.json: the keys of the audio and of the image processor side by side, as on the hub."""
    audio = {
        "chunk_length": 300,
        "dither": 0.0,
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": 128,
        "hop_length": 160,
        "n_fft": 400,
        "n_samples": 4_800_000,
        "nb_max_frames": 30_000,
        "padding_side": "right",
        "padding_value": 0.0,
        "return_attention_mask": True,
        "sampling_rate": 16_000,
    }
    image = {
        "image_mean": [0.5, 0.5, 0.5],
        "image_processor_type": "Qwen2VLImageProcessor",
        "image_std": [0.5, 0.5, 0.5],
        "max_pixels": 12_845_056,
        "merge_size": 2,
        "min_pixels": 3136,
        "patch_size": 16,
        "temporal_patch_size": 2,
    }
    return {**audio, **image, "processor_class": "Qwen3OmniMoeProcessor"}
