"""The Thinker on the AR engine: prompt with media in, text to the client and token ids to the Talker out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F

from omni_bus.errors import InvalidRequest
from omni_bus.payloads import TextDelta
from omni_bus.stages.ar.decoder import Decoder
from omni_bus.stages.ar.program import Inputs, Row, StepTensors, isolated
from omni_bus.stages.ar.text import Release, TextStream
from omni_bus.stages.ar.transfer import ids_to_device
from omni_bus.stages.contract import Chunk, StageContext
from omni_bus.stages.qwen3_omni.config import OmniConfig, read_config
from omni_bus.stages.qwen3_omni.media_rows import MediaRows
from omni_bus.stages.qwen3_omni.options import ThinkerOptions
from omni_bus.stages.qwen3_omni.payloads import ModelInputs, ThinkerTokens
from omni_bus.stages.qwen3_omni.prompt import load_tokenizer
from omni_bus.stages.qwen3_omni.rope_index import rope_index
from omni_bus.stages.qwen3_omni.thinker_encoders import ThinkerEncoders
from omni_bus.stages.qwen3_omni.thinker_media import ThinkerMedia
from omni_bus.stages.qwen3_omni.weights import load_stack, load_tensor, open_checkpoint

TALKER = "thinker->talker"
CLIENT = "thinker->client"
FinishReason = Literal["stop", "length"]


@dataclasses.dataclass(slots=True)
class ThinkerState:
    """What the Thinker keeps of one request."""

    stream: TextStream
    prompt_tokens: int = 0
    media_tokens: dict[str, int] = dataclasses.field(default_factory=dict)  # of them, by usage's name; a video is images
    placeholders: list[int] = dataclasses.field(default_factory=list)  # positions whose accept-layer rows the Talker wants
    captured: list[torch.Tensor] = dataclasses.field(default_factory=list)  # those rows, as far as they are computed
    started: bool = False  # whether the Talker has had its first chunk
    told: bool = False  # whether the client has had what the prompt counts
    unsent_ids: list[int] = dataclasses.field(default_factory=list)  # released, and waiting for text to go with to the client
    media: list[MediaRows] = dataclasses.field(default_factory=list)  # in the prompt's order
    encoded_parts: int | None = None  # of media, that were not kept from before; None = there are none
    say: tuple[int, ...] | None = None  # the answer, where the client gave it

    def drop_media(self) -> None:
        """The prompt is computed: its features are needed no more."""
        if self.media:
            self.encoded_parts = sum(rows.encoded for rows in self.media)
            self.media.clear()


class ThinkerProgram:
    decoder: Decoder
    eos_ids: frozenset[int]
    suppressed_ids: torch.Tensor | None = None
    capture_layer: int | None
    deepstack_taps: int
    max_length: int

    def load(self, ctx: StageContext) -> None:
        """Reads the tensors under `thinker.` only."""
        checkpoint = open_checkpoint(ctx, "thinker.")
        self.config: OmniConfig = read_config(ctx.model_path)
        self.device, self.dtype = torch.device(ctx.device), getattr(torch, ctx.config.dtype)
        self.tokenizer = load_tokenizer(checkpoint.directory)
        encoders = ThinkerEncoders(self.config.thinker, checkpoint, dtype=self.dtype, device=self.device)
        self.media = ThinkerMedia(self.config.thinker, encoders, kept_bytes=ctx.options(ThinkerOptions).media_cache_mb << 20)
        self.decoder, tables = load_stack(
            checkpoint,
            "thinker.model.",
            self.config.thinker.text,
            embeddings="embed_tokens.",
            dtype=self.dtype,
            device=self.device,
        )
        self.embed_tokens = tables["embed_tokens.weight"]
        self.lm_head = load_tensor(checkpoint, "thinker.lm_head.weight", dtype=self.dtype, device=self.device)
        self.eos_ids = frozenset((self.config.ids.im_end,))
        self.capture_layer = self.config.talker.accept_hidden_layer
        self.deepstack_taps = self.config.thinker.deepstack_layers
        self.max_length = self.config.thinker.text.max_positions

    def start(self, row: Row) -> None:
        row.data = ThinkerState(TextStream(self.tokenizer, row.request.sampling.stop or ()))

    def feed(self, row: Row, chunk: Chunk) -> None:
        """The one chunk is the whole prompt."""
        if row.prompt_closed or not isinstance(chunk.payload, ModelInputs):
            raise InvalidRequest("the thinker takes one prompt a request")
        prompt, state = chunk.payload, self._state(row)
        row.consume(chunk.edge)
        state.prompt_tokens = end = len(prompt.token_ids)
        media = self.config.thinker.media
        pictures = prompt.token_ids.count(media.image) + prompt.token_ids.count(media.video)
        counts = {"audio_tokens": prompt.token_ids.count(media.audio), "image_tokens": pictures}
        state.media_tokens = {kind: count for kind, count in counts.items() if count}
        if TALKER in row.request.outputs:
            state.placeholders = [at for at, token in enumerate(prompt.token_ids) if token in media.placeholders]
        if prompt.say is not None and not row.request.options.prepare:
            # The answer is there. Of the prompt only what the Talker needs is computed: up to the last placeholder.
            state.say, row.prompt_only = prompt.say, True
            end = state.placeholders[-1] + 1 if state.placeholders else 0
            if not end:
                self._say(row, prompt.say)
                return
        state.media = self.media.rows(prompt, chunk.tensors)
        self._append(row, prompt, state.media, end)
        row.penalty_ids += prompt.token_ids
        row.close_prompt()

    def _append(self, row: Row, prompt: ModelInputs, rows_of: Sequence[MediaRows], end: int) -> None:
        """The prompt's first `end` positions: stretches of text, and between them media whose rows are made when they are due."""
        media = self.config.thinker.media
        positions = rope_index(prompt.token_ids, prompt.media, media)
        pieces, at = iter(rows_of), 0
        while at < end:
            if prompt.token_ids[at] in media.placeholders:
                rows = next(pieces)
                stop = at + rows.count
                row.append(Inputs(positions=positions[:, at:stop], lazy=rows, content=rows.contents()))
            else:
                stop = next((to for to in range(at, end) if prompt.token_ids[to] in media.placeholders), end)
                row.append(Inputs(positions=positions[:, at:stop], token_ids=prompt.token_ids[at:stop]))
            at = stop

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(token_ids, self.embed_tokens)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self.lm_head).float()

    def computed(self, row: Row, start: int, captured: torch.Tensor) -> None:
        state = self._state(row)
        end = start + len(captured)
        wanted = [position - start for position in state.placeholders if start <= position < end]
        if wanted:
            state.captured.append(captured[ids_to_device(wanted, captured.device)])

    def sampled(self, rows: Sequence[Row], tokens: Sequence[int], hidden: torch.Tensor) -> None:
        self._all_sampled(rows, tokens)

    def _all_sampled(self, rows: Sequence[Row], tokens: Sequence[int]) -> None:
        for row, token in zip(rows, tokens, strict=True):
            with isolated(row):
                self._sampled(row, token)

    def _sampled(self, row: Row, token: int) -> None:
        state = self._state(row)
        state.drop_media()
        stream = state.stream
        ended = row.finish_reason is not None
        # An end token is no text: it closes the stream. One at which the length was reached is.
        release = Release() if row.finish_reason == "stop" else stream.push(token)
        if ended and not release.stopped:
            rest = stream.flush()
            release = Release((*release.token_ids, *rest.token_ids), release.text + rest.text, rest.stopped)
        if release.stopped or row.finish_reason == "stop":
            self._send(row, release, spoken=(*release.token_ids, self.config.ids.im_end), finish_reason="stop")
        elif ended:
            self._send(row, release, spoken=release.token_ids, finish_reason="length")
        else:
            self._send(row, release, spoken=release.token_ids)
            row.append_text(token_ids=[token])
            return
        self._finish(row, len(row.output_ids))

    def prepared(self, row: Row) -> None:
        """As an answer that is there already, or one that ends at once: the Talker hears of an end and says nothing."""
        say = self._state(row).say
        if say is not None:
            self._say(row, say)
            return
        self._send(row, Release(), spoken=(self.config.ids.im_end,), finish_reason="stop")
        self._finish(row, 0)

    def _say(self, row: Row, say: Sequence[int]) -> None:
        """These tokens and the end, as if the model had made them."""
        stream = TextStream(self.tokenizer)  # word for word: a stop string ends no text that was given
        text = "".join([stream.push(token).text for token in say]) + stream.flush().text
        self._send(row, Release(tuple(say), text), spoken=(*say, self.config.ids.im_end), finish_reason="stop")
        self._finish(row, len(say) + 1)

    def _finish(self, row: Row, completion_tokens: int) -> None:
        self._state(row).drop_media()
        row.finish({**self._prompt_usage(row), "completion_tokens": completion_tokens})

    def _prompt_usage(self, row: Row) -> dict[str, int]:
        state = self._state(row)
        usage = {"prompt_tokens": state.prompt_tokens, **state.media_tokens}
        return usage if state.encoded_parts is None else {**usage, "encoded_parts": state.encoded_parts}

    def _usage_so_far(self, row: Row, ended: bool) -> dict[str, int]:
        """What goes with a delta: the first and the last tell, and those of an answer that no token was sampled for do not."""
        state = self._state(row)
        if not row.output_ids or (state.told and not ended):
            return {}
        state.told = True
        figures = self._prompt_usage(row)
        return row.usage({**figures, "completion_tokens": len(row.output_ids)} if ended else figures)

    def _send(self, row: Row, release: Release, *, spoken: tuple[int, ...], finish_reason: FinishReason | None = None) -> None:
        """To the Talker all that is decided, at once; to the client what makes text."""
        state, last = self._state(row), finish_reason is not None
        tensors = {}
        if not state.started and state.captured:
            tensors["placeholder_rows"] = torch.cat(state.captured)
            state.captured.clear()
        if spoken or tensors:
            row.emit(TALKER, ThinkerTokens(spoken, last), tensors, last=last)
            state.started = True
        state.unsent_ids += release.token_ids
        if release.text or last:
            usage = self._usage_so_far(row, last)
            row.emit(CLIENT, TextDelta(release.text, tuple(state.unsent_ids), finish_reason, usage), last=last)
            state.unsent_ids.clear()

    def graph_prepare(self, max_batch: int) -> None:
        self._eos = torch.tensor(sorted(self.eos_ids), device=self.device)

    def graph_reset(self, row: Row) -> None:
        """Nothing is kept by slot."""

    def graph_embed(self, step: StepTensors) -> torch.Tensor:
        return self.embed(step.tokens)

    def graph_output(self, hidden: torch.Tensor, step: StepTensors) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The greedy token, int64 [rows, 1], and the scores, for rows that are not greedy."""
        scores = self.logits(hidden)
        ending = scores.index_select(1, self._eos)
        scores.index_copy_(1, self._eos, ending.masked_fill(step.no_eos[:, None], -torch.inf))
        return scores.argmax(dim=-1, keepdim=True), scores

    def graph_sampled(self, rows: Sequence[Row], output: torch.Tensor) -> None:
        self._all_sampled(rows, output[:, 0].tolist())

    def release(self, row: Row) -> None:
        row.data = None

    @staticmethod
    def _state(row: Row) -> ThinkerState:
        assert isinstance(row.data, ThinkerState)
        return row.data
