"""Whether a checkpoint directory can be served, told before any process starts: config, tensors' headers, tokenizer files."""

from __future__ import annotations

import pathlib

from omni_bus.errors import CheckpointError
from omni_bus.stages.qwen3_omni import code2wav_config
from omni_bus.stages.qwen3_omni.checkpoint_files import CheckpointFiles, resolve
from omni_bus.stages.qwen3_omni.config import OmniConfig, StackConfig, parse_config
from omni_bus.stages.qwen3_omni.json_fields import Section, read_json

Shape = tuple[int, ...]


READS = {  # stage → what its tensors' names begin with
    "thinker": ("thinker.",),
    "talker": ("talker.", "thinker.model.embed_tokens."),
    "code2wav": ("code2wav.",),
}


def check_checkpoint(model_path: str, *, random: frozenset[str] = frozenset(), fp8: bool = False) -> None:
    """CheckpointError says what is missing or malformed, and what to do. Stages in `random` make their own tensors. `fp8`: whether the
    Thinker's experts are to be in FP8."""
    directory = resolve(model_path)
    fields = read_json(directory / "config.json")
    config = parse_config(fields)
    code2wav = code2wav_config.parse(Section(fields).section("code2wav_config"))
    if fp8 and not config.thinker.text.num_experts:
        raise CheckpointError(
            'stages.thinker.weights = "fp8" is for the matrices of experts, and the thinker of this model has none; '
            'take weights = "model"'
        )
    _check_tokenizer(directory)
    read = tuple(prefix for stage, prefixes in READS.items() if stage not in random for prefix in prefixes)
    if not read:
        return
    files = CheckpointFiles(directory)
    shapes = {entry.name: entry.shape for entry in files.entries()}
    for name, shape in {**_expected(config), **code2wav_config.expected_shapes(code2wav)}.items():
        if not name.startswith(read):
            continue
        if name not in shapes:
            raise CheckpointError(f"the checkpoint lacks tensor {name!r} that its config.json calls for; fetch all its shards")
        if shapes[name] != shape:
            raise CheckpointError(
                f"tensor {name!r} is {list(shapes[name])}, but config.json calls for {list(shape)}; "
                "config.json and the tensors are not of the same model"
            )


def _check_tokenizer(directory: pathlib.Path) -> None:
    if not (directory / "tokenizer.json").is_file() and not all(
        (directory / name).is_file() for name in ("vocab.json", "merges.txt")
    ):
        raise CheckpointError(
            f"{directory} has neither tokenizer.json nor vocab.json and merges.txt; fetch the whole checkpoint"
        )
    tokenizer = read_json(directory / "tokenizer_config.json")
    legacy = directory / "chat_template.json"
    if (
        "chat_template" not in tokenizer
        and not (directory / "chat_template.jinja").is_file()
        and not (legacy.is_file() and "chat_template" in read_json(legacy))
    ):
        raise CheckpointError(f"{directory} has no chat template (chat_template.jinja or tokenizer_config.json)")
    preprocessor = read_json(directory / "preprocessor_config.json")
    for key in ("feature_size", "patch_size", "image_mean"):
        if key not in preprocessor:
            raise CheckpointError(f"preprocessor_config.json lacks {key}; take the checkpoint's own file")


def _expected(config: OmniConfig) -> dict[str, Shape]:
    """Tensors that show whether every part is there in the shape that config.json says: each stack's ends, embeddings and heads."""
    thinker, talker = config.thinker.text, config.talker.text
    predictor = config.talker.code_predictor
    return {
        "thinker.model.embed_tokens.weight": (thinker.vocab_size, thinker.hidden_size),
        "thinker.lm_head.weight": (thinker.vocab_size, thinker.hidden_size),
        "thinker.audio_tower.proj2.weight": (config.thinker.audio["output_dim"], config.thinker.audio["d_model"]),
        "thinker.visual.pos_embed.weight": (
            config.thinker.vision["num_position_embeddings"],
            config.thinker.vision["hidden_size"],
        ),
        **_stack("thinker.model.", thinker),
        "talker.model.codec_embedding.weight": (talker.vocab_size, talker.hidden_size),
        "talker.codec_head.weight": (talker.vocab_size, talker.hidden_size),
        "talker.text_projection.linear_fc2.weight": (talker.hidden_size, talker.intermediate_size),
        "talker.hidden_projection.linear_fc2.weight": (talker.hidden_size, talker.intermediate_size),
        **_stack("talker.model.", talker),
        **_stack("talker.code_predictor.model.", predictor),
        **{
            f"talker.code_predictor.lm_head.{group}.weight": (predictor.vocab_size, predictor.hidden_size)
            for group in range(config.talker.num_code_groups - 1)
        },
    }


def _stack(prefix: str, config: StackConfig) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {f"{prefix}norm.weight": (config.hidden_size,)}
    for layer in range(config.num_layers):
        shapes[f"{prefix}layers.{layer}.self_attn.q_proj.weight"] = (config.num_heads * config.head_dim, config.hidden_size)
        shapes[f"{prefix}layers.{layer}.self_attn.k_proj.weight"] = (config.num_kv_heads * config.head_dim, config.hidden_size)
        if config.num_experts:
            expert = f"{prefix}layers.{layer}.mlp.experts.{config.num_experts - 1}.gate_proj.weight"
            shapes[expert] = (config.moe_intermediate_size, config.hidden_size)
        else:
            shapes[f"{prefix}layers.{layer}.mlp.gate_proj.weight"] = (config.intermediate_size, config.hidden_size)
    return shapes
