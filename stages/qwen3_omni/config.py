"""A checkpoint's config.json, typed: every field the stages use must be in the file, in either of its two spellings.

Checkpoints on the hub say `rope_theta` + `rope_scaling` and `num_experts`; transformers 5 writes `rope_parameters` and
`num_local_experts`. Nothing is taken from the defaults of transformers' configuration classes: they differ from the real model.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from omni_bus.errors import CheckpointError
from omni_bus.stages.qwen3_omni.checkpoint_files import resolve
from omni_bus.stages.qwen3_omni.json_fields import Section, read_json

MODEL_TYPE = "qwen3_omni_moe"
DEFAULT_VOICE = "ethan"  # transformers' default speaker, where the checkpoint has it


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StackConfig:
    """A stack of decoder layers. `num_experts` 0 = a dense MLP of `intermediate_size`; `mrope_section` () = one position axis."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    mrope_section: tuple[int, ...] = ()
    max_positions: int
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0
    norm_topk_prob: bool = True


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MediaIds:
    """Token ids and rates by which positions are counted (see rope_index)."""

    audio: int
    image: int
    video: int
    audio_start: int
    vision_start: int
    spatial_merge_size: int
    position_id_per_seconds: int

    @property
    def placeholders(self) -> frozenset[int]:
        return frozenset((self.audio, self.image, self.video))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SpecialIds:
    """Text tokens with a meaning of their own."""

    im_start: int
    im_end: int
    user: int
    assistant: int
    tts_pad: int
    tts_bos: int
    tts_eos: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ThinkerConfig:
    text: StackConfig
    audio: dict[str, Any]  # as transformers' Qwen3OmniMoeAudioEncoderConfig takes it
    vision: dict[str, Any]
    media: MediaIds
    deepstack_layers: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TalkerConfig:
    text: StackConfig
    code_predictor: StackConfig
    media: MediaIds
    thinker_hidden_size: int
    accept_hidden_layer: int
    num_code_groups: int
    codec_pad: int
    codec_bos: int
    codec_eos: int
    codec_nothink: int
    codec_think_bos: int
    codec_think_eos: int
    speaker_ids: dict[str, int]  # lower-case names

    @property
    def voices(self) -> tuple[str, ...]:
        """Speaker names, the default one first."""
        return tuple(sorted(self.speaker_ids, key=lambda name: (name != DEFAULT_VOICE, name)))

    @property
    def suppressed_ids(self) -> tuple[int, ...]:
        """Ids the Talker must not generate: the last 1,024 but the end token (every other one is a code of codebook 0)."""
        vocab = self.text.vocab_size
        return tuple(token for token in range(vocab - 1024, vocab) if token != self.codec_eos)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OmniConfig:
    ids: SpecialIds
    thinker: ThinkerConfig
    talker: TalkerConfig
    codebook_size: int  # of Code2Wav
    num_quantizers: int


AUDIO_FIELDS = (
    "num_mel_bins",
    "encoder_layers",
    "encoder_attention_heads",
    "encoder_ffn_dim",
    "d_model",
    "max_source_positions",
    "n_window",
    "n_window_infer",
    "output_dim",
    "conv_chunksize",
    "downsample_hidden_size",
    "scale_embedding",
    "activation_function",
)
VISION_FIELDS = (
    "depth",
    "hidden_size",
    "intermediate_size",
    "num_heads",
    "in_channels",
    "patch_size",
    "spatial_merge_size",
    "temporal_patch_size",
    "out_hidden_size",
    "num_position_embeddings",
    "deepstack_visual_indexes",
    "hidden_act",
)


def read_config(model_path: str) -> OmniConfig:
    """config.json of a checkpoint directory or cached hub id."""
    return parse_config(read_json(resolve(model_path) / "config.json"))


def parse_config(fields: dict[str, Any]) -> OmniConfig:
    """Checked fields of config.json, including the constraints that join the stages; CheckpointError names the field."""
    root = Section(fields)
    if fields.get("model_type") != MODEL_TYPE:
        raise CheckpointError(
            f"config.json: model_type is {fields.get('model_type')!r}, but pipeline qwen3_omni needs {MODEL_TYPE!r}; "
            "check model.path and model.pipeline"
        )
    names = ("im_start", "im_end", "user", "assistant", "tts_pad", "tts_bos", "tts_eos")
    code2wav = root.section("code2wav_config")
    config = OmniConfig(
        ids=SpecialIds(**{name: root.get(int, f"{name}_token_id") for name in names}),
        thinker=_thinker(root.section("thinker_config")),
        talker=_talker(root.section("talker_config")),
        codebook_size=code2wav.get(int, "codebook_size"),
        num_quantizers=code2wav.get(int, "num_quantizers"),
    )
    _check(config)
    return config


def _decoder(section: Section, *, experts: bool) -> StackConfig:
    theta, mrope = _rope(section)
    if section.get_or(False, "attention_bias"):
        raise CheckpointError(f"config.json: {section.path}attention_bias is true, which no Qwen3-Omni model has")
    sparse: dict[str, Any] = {}
    if experts:
        if section.get_or(1, "decoder_sparse_step") != 1 or section.fields.get("mlp_only_layers"):
            raise CheckpointError(
                f"config.json: {section.path[:-1]} mixes dense and sparse layers, which this engine does not run"
            )
        sparse = {
            "num_experts": section.get(int, "num_experts", "num_local_experts"),
            "num_experts_per_tok": section.get(int, "num_experts_per_tok"),
            "moe_intermediate_size": section.get(int, "moe_intermediate_size"),
            "shared_expert_intermediate_size": section.get_or(0, "shared_expert_intermediate_size"),
            "norm_topk_prob": section.get(bool, "norm_topk_prob"),
        }
    if section.get(str, "hidden_act") != "silu":
        raise CheckpointError(f"config.json: {section.path}hidden_act must be 'silu'")
    return StackConfig(
        vocab_size=section.get(int, "vocab_size"),
        hidden_size=section.get(int, "hidden_size"),
        intermediate_size=section.get(int, "intermediate_size"),
        num_layers=section.get(int, "num_hidden_layers"),
        num_heads=section.get(int, "num_attention_heads"),
        num_kv_heads=section.get(int, "num_key_value_heads"),
        head_dim=section.get(int, "head_dim"),
        rms_norm_eps=section.get(float, "rms_norm_eps"),
        rope_theta=theta,
        mrope_section=mrope,
        max_positions=section.get(int, "max_position_embeddings"),
        **sparse,
    )


def _rope(section: Section) -> tuple[float, tuple[int, ...]]:
    """(theta, mrope_section): from `rope_parameters`, or from `rope_theta` and the optional `rope_scaling`."""
    if section.fields.get("rope_parameters") is not None:
        rope = section.section("rope_parameters")
        theta = rope.get(float, "rope_theta")
    else:
        theta = section.get(float, "rope_theta")
        rope = section.section("rope_scaling") if section.fields.get("rope_scaling") else Section({}, section.path)
    kind = rope.get_or("default", "rope_type", "type")
    if kind not in ("default", "mrope"):
        raise CheckpointError(f"config.json: {rope.path}rope_type is {kind!r}; this engine runs 'default' only")
    return theta, rope.ints("mrope_section") if "mrope_section" in rope.fields else ()


def _media(section: Section, merge: int) -> MediaIds:
    return MediaIds(
        audio=section.get(int, "audio_token_id"),
        image=section.get(int, "image_token_id"),
        video=section.get(int, "video_token_id"),
        audio_start=section.get(int, "audio_start_token_id"),
        vision_start=section.get(int, "vision_start_token_id"),
        spatial_merge_size=merge,
        position_id_per_seconds=section.get(int, "position_id_per_seconds"),
    )


def _thinker(section: Section) -> ThinkerConfig:
    audio, vision = section.section("audio_config"), section.section("vision_config")
    for part, names in ((audio, AUDIO_FIELDS), (vision, VISION_FIELDS)):
        missing = [name for name in names if part.fields.get(name) is None]
        if missing:
            raise CheckpointError(f"config.json lacks {part.path}{missing[0]}; take the checkpoint's config.json as published")
    return ThinkerConfig(
        text=_decoder(section.section("text_config"), experts=True),
        audio=audio.fields,
        vision=vision.fields,
        media=_media(section, vision.get(int, "spatial_merge_size")),
        deepstack_layers=len(vision.ints("deepstack_visual_indexes")),
    )


def _talker(section: Section) -> TalkerConfig:
    speakers = section.section("speaker_id")
    if not speakers.fields:
        raise CheckpointError("config.json: talker_config.speaker_id names no voice")
    return TalkerConfig(
        text=_decoder(section.section("text_config"), experts=True),
        code_predictor=_decoder(section.section("code_predictor_config"), experts=False),
        media=_media(section, section.get(int, "spatial_merge_size")),
        thinker_hidden_size=section.get(int, "thinker_hidden_size"),
        accept_hidden_layer=section.get(int, "accept_hidden_layer"),
        num_code_groups=section.get(int, "num_code_groups"),
        codec_pad=section.get(int, "codec_pad_id"),
        codec_bos=section.get(int, "codec_bos_id"),
        codec_eos=section.get(int, "codec_eos_token_id"),
        codec_nothink=section.get(int, "codec_nothink_id"),
        codec_think_bos=section.get(int, "codec_think_bos_id"),
        codec_think_eos=section.get(int, "codec_think_eos_id"),
        speaker_ids={name.lower(): speakers.get(int, name) for name in speakers.fields},
    )


def _check(config: OmniConfig) -> None:
    """Constraints between the parts, without which the stages would compute nonsense instead of failing."""
    thinker, talker = config.thinker, config.talker
    codec_ids = {talker.codec_pad, talker.codec_bos, talker.codec_eos, talker.codec_nothink}
    codec_ids |= {talker.codec_think_bos, talker.codec_think_eos, *talker.speaker_ids.values()}
    first_special = talker.text.vocab_size - 1024
    rules = (
        (
            talker.num_code_groups == config.num_quantizers,
            "talker_config.num_code_groups must equal code2wav_config.num_quantizers",
        ),
        (
            talker.text.vocab_size == config.codebook_size + 1024,
            "talker_config.text_config.vocab_size must be code2wav_config.codebook_size + 1024",
        ),
        (
            talker.code_predictor.vocab_size == config.codebook_size,
            "talker_config.code_predictor_config.vocab_size must equal code2wav_config.codebook_size",
        ),
        (
            talker.code_predictor.hidden_size == talker.text.hidden_size,
            "talker_config.code_predictor_config.hidden_size must equal talker_config.text_config.hidden_size",
        ),
        (
            talker.thinker_hidden_size == thinker.text.hidden_size,
            "talker_config.thinker_hidden_size must equal thinker_config.text_config.hidden_size",
        ),
        (
            thinker.deepstack_layers < talker.accept_hidden_layer < thinker.text.num_layers,
            "talker_config.accept_hidden_layer must lie between the number of deepstack taps and the thinker's layers",
        ),
        (
            all(first_special <= token < talker.text.vocab_size for token in codec_ids),
            "talker_config's codec and speaker ids must lie in the last 1,024 ids of its vocabulary",
        ),
        (thinker.audio["n_window"] == 50, "thinker_config.audio_config.n_window must be 50"),
        (
            thinker.audio["n_window_infer"] > 0 and thinker.audio["n_window_infer"] % 100 == 0,
            "thinker_config.audio_config.n_window_infer must be a multiple of 100",
        ),
        (
            thinker.audio["output_dim"] == thinker.vision["out_hidden_size"] == thinker.text.hidden_size,
            "thinker_config: audio output_dim and vision out_hidden_size must equal the text hidden_size",
        ),
        *(
            (
                sum(part.mrope_section) == part.head_dim // 2 and len(part.mrope_section) == 3,
                f"{name}.text_config: mrope_section must be three numbers that sum to head_dim / 2",
            )
            for name, part in (("thinker_config", thinker.text), ("talker_config", talker.text))
        ),
        *(
            (
                part.num_heads % part.num_kv_heads == 0 and 0 <= part.num_experts_per_tok <= part.num_experts,
                f"{name}: num_attention_heads must be a multiple of num_key_value_heads, num_experts_per_tok at most num_experts",
            )
            for name, part in (
                ("thinker_config.text_config", thinker.text),
                ("talker_config.text_config", talker.text),
                ("talker_config.code_predictor_config", talker.code_predictor),
            )
        ),
        (
            all(0 <= token < thinker.text.vocab_size for token in dataclasses.astuple(config.ids)),
            "the special token ids must lie inside the thinker's vocabulary",
        ),
    )
    for good, rule in rules:
        if not good:
            raise CheckpointError(f"config.json: {rule}; the file does not belong to this model")
