"""The Talker on the AR engine: the Thinker's token ids in, frames of 16 codes out, one frame for each step.

Step g speaks text token g+1, so a row waits until the Thinker has decided that token and whether it is the last one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import msgspec
import torch
import torch.nn.functional as F

from omni_bus.errors import InvalidRequest, ModelRefused
from omni_bus.names import did_you_mean
from omni_bus.stages.ar.decoder import Decoder
from omni_bus.stages.ar.device_sampler import adjust, sample
from omni_bus.stages.ar.program import Inputs, Row, StepTensors, isolated
from omni_bus.stages.contract import Chunk, StageContext
from omni_bus.stages.qwen3_omni.code_predictor import CodePredictor
from omni_bus.stages.qwen3_omni.config import OmniConfig, read_config
from omni_bus.stages.qwen3_omni.line_end import token_id_of_line_end
from omni_bus.stages.qwen3_omni.payloads import CodecFrames, TalkerPrompt, ThinkerTokens
from omni_bus.stages.qwen3_omni.talker_prompt import TalkerPrompts
from omni_bus.stages.qwen3_omni.weights import load_stack, load_tensor, open_checkpoint

CODE2WAV = "talker->code2wav"


@dataclasses.dataclass(slots=True)
class TalkerState:
    """What the Talker keeps of one request."""

    speaker: int
    prompt: TalkerPrompt | None = None
    placeholder_rows: torch.Tensor | None = None
    prompt_rows: int = 0  # 0 = not built yet
    first_position: torch.Tensor | None = None  # int64 [3, 1] of the prompt's last row
    text: list[int] = dataclasses.field(default_factory=list)  # the Thinker's tokens so far
    text_ended: bool = False
    frames: int = 0
    unspoken: bool = False  # whether the newest frame waits for its text
    codec_sum: torch.Tensor | None = None  # [hidden]: that frame's embedding, where the device does not keep it by slot


@dataclasses.dataclass(frozen=True, slots=True)
class SlotState:
    """What the device keeps of every slot."""

    seen: torch.Tensor  # bool [slots, vocab]: codes 0 made so far, for the repetition penalty
    frame_sum: torch.Tensor  # [slots, hidden]: the newest frame's embedding
    true: torch.Tensor  # bool []


class TalkerProgram:
    decoder: Decoder
    eos_ids: frozenset[int]
    suppressed_ids: torch.Tensor | None
    capture_layer: int | None = None
    deepstack_taps = 0
    max_length: int
    slots: SlotState | None = None  # None = frames are made row by row, by `sampled`

    def load(self, ctx: StageContext) -> None:
        """Reads the tensors under `talker.` and the Thinker's embedding table."""
        checkpoint = open_checkpoint(ctx, "talker.", "thinker.model.embed_tokens.")
        self.config: OmniConfig = read_config(ctx.model_path)
        talker = self.config.talker
        device, dtype = torch.device(ctx.device), getattr(torch, ctx.config.dtype)
        self.device = device
        self.decoder, tables = load_stack(
            checkpoint, "talker.model.", talker.text, embeddings="codec_embedding.", dtype=dtype, device=device
        )
        self.codec_head = load_tensor(checkpoint, "talker.codec_head.weight", dtype=dtype, device=device)
        self.code_predictor = CodePredictor(talker, checkpoint, max_rows=ctx.config.max_batch, dtype=dtype, device=device)
        line_end = token_id_of_line_end(checkpoint.directory)
        self.prompts = TalkerPrompts(
            self.config, checkpoint, tables["codec_embedding.weight"], line_end=line_end, dtype=dtype, device=device
        )
        self.eos_ids = frozenset((talker.codec_eos,))
        self.suppressed_ids = torch.tensor(talker.suppressed_ids, device=device)
        self.max_length = talker.text.max_positions

    def start(self, row: Row) -> None:
        talker = self.config.talker
        voice = row.request.options.voice or talker.voices[0]
        if voice.lower() not in talker.speaker_ids:
            raise ModelRefused(f"unknown voice {voice!r}{did_you_mean(voice.lower(), talker.voices)}", param="audio.voice")
        row.data = TalkerState(talker.speaker_ids[voice.lower()])
        sampling = row.request.sampling
        if sampling.ignore_eos:  # the end token is no code: going on past it means never to draw it
            sampling = msgspec.structs.replace(sampling, ignore_eos=None, min_tokens=sampling.max_tokens or self.max_length)
            row.request = dataclasses.replace(row.request, sampling=sampling)

    def feed(self, row: Row, chunk: Chunk) -> None:
        state = self._state(row)
        if isinstance(chunk.payload, TalkerPrompt):
            state.prompt = chunk.payload
        elif isinstance(chunk.payload, ThinkerTokens):
            if "placeholder_rows" in chunk.tensors:
                state.placeholder_rows = chunk.tensors["placeholder_rows"]
            state.text += chunk.payload.token_ids
            state.text_ended = chunk.payload.last
        else:
            raise InvalidRequest(f"the talker has no use for a chunk on {chunk.edge}")
        row.consume(chunk.edge)
        self._prefill(row, state)
        self._next_input(row, state)

    def _prefill(self, row: Row, state: TalkerState) -> None:
        """Append the prompt's rows as soon as they can be made; the last one once the first token to speak is known."""
        if state.text_ended and len(state.text) <= 1:  # the end token alone, or nothing but a token that is never spoken
            row.emit(CODE2WAV, CodecFrames(0), last=True)
            row.finish({"prompt_rows": 0, "frames": 0})
            return
        if state.prompt is None:
            return
        if not state.prompt_rows:
            needed = self.prompts.placeholders(state.prompt)
            if needed and state.placeholder_rows is None:
                return
            if needed and len(state.placeholder_rows) != needed:  # type: ignore[arg-type]
                raise InvalidRequest("the thinker's rows do not fit the prompt's placeholders")
            positions = self.prompts.positions(state.prompt)
            rows = self.prompts.before_speech(state.prompt, state.placeholder_rows, state.speaker)
            row.prompt_length = positions.shape[1]  # so that waiting for the first token reserves no more than needed
            row.append(Inputs(positions=positions[:, :-1], embeds=rows))
            state.prompt_rows = positions.shape[1]
            state.first_position = positions[:, -1:]
            state.placeholder_rows = None
        # One token alone may still turn out to be the last one, which is never spoken; the Thinker says so with the token.
        if not row.prompt_closed and state.text and state.first_position is not None:
            row.append(Inputs(positions=state.first_position, embeds=self.prompts.first_speech(state.text[0])))
            row.close_prompt()

    def _next_input(self, row: Row, state: TalkerState) -> None:
        """The newest frame's embedding plus the text of its step, once that is known."""
        if not state.unspoken:
            return
        spoken = state.frames  # step g = frames - 1 speaks text token g + 1
        last = len(state.text) - 1 if state.text_ended else None
        if last is not None and spoken > last:
            text = self.config.ids.tts_pad
        elif spoken == last:
            text = self.config.ids.tts_eos
        elif spoken < len(state.text):
            text = state.text[spoken]
        else:
            return
        state.unspoken = False
        if state.codec_sum is None:
            row.append_text(token_ids=[text])
        else:
            row.append_text(embeds=(state.codec_sum + self.prompts.text_table[text])[None])
            state.codec_sum = None

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        raise AssertionError("what a token id adds to depends on the row's slot: graph_embed knows it")

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self.codec_head).float()

    def computed(self, row: Row, start: int, captured: torch.Tensor) -> None:
        raise AssertionError("the talker captures no layer")

    def sampled(self, rows: Sequence[Row], tokens: Sequence[int], hidden: torch.Tensor) -> None:
        # The end token, or the one at which the length was reached, makes no frame.
        going = [index for index, row in enumerate(rows) if row.finish_reason is None]
        if going:
            self._frames(
                [rows[index] for index in going],
                torch.tensor([tokens[index] for index in going], device=hidden.device),
                hidden[torch.tensor(going, device=hidden.device)],
            )
        for row in rows:
            if row.finish_reason is not None:
                with isolated(row):
                    self._finish(row)

    def _frames(self, rows: Sequence[Row], tokens: torch.Tensor, hidden: torch.Tensor) -> None:
        """The rest of each row's frame; sent on, and fed back together with the next text."""
        generators = [row.generator for row in rows]
        codes, sums = self.code_predictor.predict(hidden, tokens, self.prompts.codec(tokens), generators)
        frames = codes.to("cpu", torch.int16)
        for index, row in enumerate(rows):
            with isolated(row):
                self._state(row).codec_sum = sums[index]
                self._send(row, frames[index : index + 1].clone())

    def _send(self, row: Row, codes: torch.Tensor) -> None:
        """A frame is made: codes int16 [1, groups]."""
        state = self._state(row)
        row.emit(CODE2WAV, CodecFrames(1), {"codes": codes})
        state.frames += 1
        state.unspoken = True
        self._next_input(row, state)

    def prepared(self, row: Row) -> None:
        self._finish(row)

    def _finish(self, row: Row) -> None:
        state = self._state(row)
        row.emit(CODE2WAV, CodecFrames(0), last=True)
        row.finish({"prompt_rows": state.prompt_rows, "frames": state.frames})

    def graph_prepare(self, max_batch: int) -> None:
        vocab, hidden = self.codec_head.shape
        self.slots = SlotState(
            seen=torch.zeros(max_batch + 1, vocab, dtype=torch.bool, device=self.device),
            frame_sum=torch.zeros(max_batch + 1, hidden, dtype=self.codec_head.dtype, device=self.device),
            true=torch.tensor(True, device=self.device),
        )
        ending = torch.zeros(vocab, dtype=torch.bool)
        ending[list(self.eos_ids)] = True
        suppressed = torch.zeros(vocab, dtype=torch.bool)
        suppressed[list(self.config.talker.suppressed_ids)] = True
        self._ending, self._suppressed = ending.to(self.device), suppressed.to(self.device)

    def graph_reset(self, row: Row) -> None:
        self._slots.seen[row.slot].zero_()

    def graph_embed(self, step: StepTensors) -> torch.Tensor:
        """The newest frame of each slot, and the text that step.tokens names."""
        return self._slots.frame_sum.index_select(0, step.slots) + F.embedding(step.tokens, self.prompts.text_table)

    def graph_output(self, hidden: torch.Tensor, step: StepTensors) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The frame of each row, int64 [rows, groups]. Every row is sampled here."""
        slots = self._slots
        scores = adjust(
            F.linear(hidden, self.codec_head),
            slots.seen,
            step.slots,
            step.penalty,
            self._suppressed,
            self._ending,
            step.no_eos,
        )
        draws = self.code_predictor.draws(step)
        code0 = sample(scores, step.seeds, draws[0], step.temperature, step.top_k, step.top_p)
        slots.seen.index_put_((step.slots, code0), slots.true)
        frame, sums = self.code_predictor.predict_on_device(hidden, code0, self.prompts.codec(code0), step, draws)
        slots.frame_sum.index_copy_(0, step.slots, sums)
        return frame, None

    def graph_sampled(self, rows: Sequence[Row], output: torch.Tensor) -> None:
        codes = output.to(torch.int16)
        for index, row in enumerate(rows):
            with isolated(row):
                if row.finish_reason is None:
                    self._send(row, codes[index : index + 1])
                else:
                    self._finish(row)

    @property
    def _slots(self) -> SlotState:
        assert self.slots is not None, "graph_prepare comes first"
        return self.slots

    def release(self, row: Row) -> None:
        row.data = None

    @staticmethod
    def _state(row: Row) -> TalkerState:
        assert isinstance(row.data, TalkerState)
        return row.data
