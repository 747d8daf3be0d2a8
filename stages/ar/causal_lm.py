"""A text model on the engine: prompt ids in, text out. A family composes it with a loader, or overrides its two hooks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec
import torch
import torch.nn.functional as F

from omni_bus.errors import CheckpointError
from omni_bus.payloads import TextDelta
from omni_bus.stages.ar.decoder import Decoder, DecoderConfig
from omni_bus.stages.ar.mlp import DenseConfig
from omni_bus.stages.ar.program import Row, isolated
from omni_bus.stages.ar.text import FastTokenizer, Release, TextStream
from omni_bus.stages.contract import Chunk, StageContext


class PromptIds(msgspec.Struct, frozen=True):
    """A prompt, or a piece of one, as token ids."""

    token_ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CausalLM:
    """A loaded language model."""

    decoder: Decoder
    embedding: torch.Tensor  # [vocab, hidden]
    head: torch.Tensor  # [vocab, hidden]; the embedding itself where the two are tied
    tokenizer: FastTokenizer
    eos_ids: frozenset[int]


@dataclasses.dataclass(slots=True)
class TextState:
    """A row's text so far."""

    stream: TextStream
    prompt_tokens: int = 0
    told: bool = False  # what the prompt had, with the first text


class CausalLMProgram:
    """Program of a text model.

    `load_model` is called once, in `load`. `text_edges` are the edges on which text leaves; those that a request does not have
    open are skipped. Override `prompt_ids` to make prompts of another payload than PromptIds, and `emit_text` to send something
    other than TextDelta.
    """

    suppressed_ids: torch.Tensor | None = None
    capture_layer: int | None = None
    deepstack_taps = 0
    decoder: Decoder
    eos_ids: frozenset[int]
    max_length: int
    model: CausalLM

    def __init__(self, load_model: Callable[[StageContext], CausalLM], *, text_edges: Sequence[str]) -> None:
        self._load_model = load_model
        self._text_edges = tuple(text_edges)

    def prompt_ids(self, row: Row, chunk: Chunk) -> Sequence[int]:
        """The token ids that a chunk adds to the prompt. OmniBusError fails the request."""
        payload = chunk.payload
        assert isinstance(payload, PromptIds)
        return payload.token_ids

    def emit_text(self, row: Row, release: Release, finish_reason: Literal["stop", "length"] | None) -> None:
        """Send what may leave; the last call for a row has a finish_reason."""
        if release.token_ids or release.text or finish_reason:
            usage = self._usage_so_far(row, finish_reason is not None)
            delta = TextDelta(text=release.text, token_ids=release.token_ids, finish_reason=finish_reason, usage=usage)
            for edge in self._text_edges:
                row.emit(edge, delta, last=finish_reason is not None)

    def load(self, ctx: StageContext) -> None:
        self.model = self._load_model(ctx)
        self.decoder = self.model.decoder
        self.eos_ids = self.model.eos_ids
        self.max_length = self.decoder.config.max_positions

    def start(self, row: Row) -> None:
        row.data = TextState(TextStream(self.model.tokenizer, row.request.sampling.stop or ()))

    def feed(self, row: Row, chunk: Chunk) -> None:
        token_ids = list(self.prompt_ids(row, chunk))
        if token_ids:
            row.append_text(token_ids=token_ids)
            row.penalty_ids += token_ids
        row.consume(chunk.edge)
        if chunk.last:
            row.close_prompt()
            row.data.prompt_tokens = row.length

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(token_ids, self.model.embedding)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self.model.head).float()

    def computed(self, row: Row, start: int, captured: torch.Tensor) -> None:
        raise AssertionError("capture_layer is not set")

    def sampled(self, rows: Sequence[Row], tokens: Sequence[int], hidden: torch.Tensor) -> None:
        for row, token in zip(rows, tokens, strict=True):
            with isolated(row):
                self._sampled(row, token)

    def prepared(self, row: Row) -> None:
        self.emit_text(row, Release(), "stop")
        row.finish({"prompt_tokens": row.data.prompt_tokens, "completion_tokens": 0})

    def release(self, row: Row) -> None:
        row.data = None

    def _usage_so_far(self, row: Row, ended: bool) -> dict[str, int]:
        """What goes with a delta: the first and the last tell, and those of an answer that no token was sampled for do not."""
        state: TextState = row.data
        if not row.output_ids or (state.told and not ended):
            return {}
        state.told = True
        figures = {"prompt_tokens": state.prompt_tokens}
        return row.usage({**figures, "completion_tokens": len(row.output_ids)} if ended else figures)

    def _sampled(self, row: Row, token: int) -> None:
        state: TextState = row.data
        release = state.stream.push(token)
        reason: Literal["stop", "length"] | None = "stop" if release.stopped else row.finish_reason
        if reason is not None and not release.stopped:
            rest = state.stream.flush()
            release = Release(release.token_ids + rest.token_ids, release.text + rest.text, rest.stopped)
            reason = "stop" if rest.stopped else reason
        self.emit_text(row, release, reason)
        if reason is None:
            row.append_text(token_ids=[token])
        else:
            row.finish({"prompt_tokens": state.prompt_tokens, "completion_tokens": len(row.output_ids)})


def llama_config(config: Mapping[str, Any]) -> DecoderConfig:
    """DecoderConfig of a LlamaForCausalLM's config.json, in the old spelling (`rope_theta`) or the new one (`rope_parameters`)."""
    try:
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if rope.get("rope_type", rope.get("type", "default")) != "default":
            raise CheckpointError("config.json asks for scaled rotary positions, which this engine does not have")
        heads = config["num_attention_heads"]
        return DecoderConfig(
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            mlp=DenseConfig(intermediate=config["intermediate_size"]),
            max_positions=config["max_position_embeddings"],
            rms_eps=config.get("rms_norm_eps", 1e-6),
            rope_theta=rope.get("rope_theta", config.get("rope_theta", 10000.0)),
            attention_bias=config.get("attention_bias", False),
        )
    except KeyError as error:
        raise CheckpointError(f"config.json lacks {error.args[0]!r}") from None


def llama_model(
    config: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    tokenizer: FastTokenizer,
    eos_ids: frozenset[int],
    *,
    dtype: torch.dtype,
    device: torch.device | str,
) -> CausalLM:
    """A LlamaForCausalLM of its config.json and its tensors by their Hugging Face names; without `lm_head.weight` the head is tied."""
    prefix, embedding_name, head_name = "model.", "model.embed_tokens.weight", "lm_head.weight"
    if embedding_name not in tensors:
        raise CheckpointError(f"the checkpoint lacks {embedding_name!r}")
    inner = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name not in (embedding_name, head_name)}
    embedding = tensors[embedding_name].to(device=device, dtype=dtype)
    head = embedding
    if head_name in tensors and not config.get("tie_word_embeddings", False):
        head = tensors[head_name].to(device=device, dtype=dtype)
    decoder = Decoder.from_tensors(llama_config(config), inner, dtype=dtype, device=device)
    return CausalLM(decoder=decoder, embedding=embedding, head=head, tokenizer=tokenizer, eos_ids=eos_ids)
