"""The seam as the Thinker and the Talker use it: embeddings with image positions and deepstack, captured hidden states, and rows
that wait for the next input after every token."""

from __future__ import annotations

import msgspec
import pytest
import torch

from omni_bus.deployment import StageConfig
from omni_bus.events import RequestOptions
from omni_bus.sampling import SamplingParams
from omni_bus.stages.ar.decoder import Decoder, DecoderConfig
from omni_bus.stages.ar.mlp import MoEConfig
from omni_bus.stages.ar.program import Inputs, isolated
from omni_bus.stages.ar.stage import ARStage
from omni_bus.stages.contract import Chunk, Finished, Output, StageContext, StageRequest

VOCAB, HIDDEN, LAYERS, TAPS, CAPTURE = 50, 48, 4, 2, 3


class Signal(msgspec.Struct, frozen=True):
    """A prompt (tensors `embeds`, `positions`, `deepstack`), or the vector to add to the next input (tensor `vector`)."""


class Token(msgspec.Struct, frozen=True):
    id: int


@pytest.fixture(scope="module")
def reference(randomise):
    from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeTextConfig
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeThinkerTextModel

    config = Qwen3OmniMoeTextConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        norm_topk_prob=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": [6, 5, 5], "mrope_interleaved": True},
    )
    return randomise(Qwen3OmniMoeThinkerTextModel._from_config(config, attn_implementation="sdpa"), 11)


class FollowingProgram:
    """Samples from embeddings it is fed; each token's own embedding plus a vector from outside is the next input, when that comes."""

    eos_ids: frozenset[int] = frozenset()
    suppressed_ids = None
    capture_layer = CAPTURE
    max_length = 128

    def __init__(self, reference) -> None:
        self.table = reference.embed_tokens.weight
        config = DecoderConfig(
            hidden=HIDDEN,
            layers=LAYERS,
            heads=4,
            kv_heads=2,
            head_dim=32,
            mlp=MoEConfig(experts=6, top_k=2, intermediate=24),
            max_positions=128,
            rms_eps=reference.config.rms_norm_eps,
            rope_theta=1e6,
            mrope_section=(6, 5, 5),
            qk_norm=True,
        )
        tensors = {name: tensor for name, tensor in reference.state_dict().items() if name != "embed_tokens.weight"}
        self.decoder = Decoder.from_tensors(config, tensors, dtype=torch.float32, device="cpu")
        self.captured: dict[int, list[tuple[int, torch.Tensor]]] = {}
        self.released: list[int] = []

    def load(self, ctx) -> None: ...

    def start(self, row) -> None:
        row.data = []
        self.captured[row.request.id] = []

    def feed(self, row, chunk) -> None:
        if "embeds" in chunk.tensors:
            row.append(Inputs(chunk.tensors["positions"], embeds=chunk.tensors["embeds"], deepstack=chunk.tensors["deepstack"]))
            if chunk.last:
                row.close_prompt()
        else:
            row.data.append(chunk.tensors["vector"])
            self._follow(row)

    def embed(self, token_ids):
        return self.table[token_ids]

    def logits(self, hidden):
        return hidden @ self.table.T

    def computed(self, row, start, captured) -> None:
        self.captured[row.request.id].append((start, captured))

    def sampled(self, rows, tokens, hidden) -> None:
        for row, token in zip(rows, tokens, strict=True):
            with isolated(row):
                row.emit("a->b", Token(token), last=row.finish_reason is not None)
                if row.finish_reason is not None:
                    row.finish({})
                else:
                    self._follow(row)

    def release(self, row) -> None:
        self.released.append(row.request.id)

    def _follow(self, row) -> None:
        waiting = row.computed == row.length and row.output_ids and not row.ended
        if waiting and row.data:
            row.append_text(embeds=self.table[row.output_ids[-1:]] + row.data.pop(0))


def make_stage(reference, **options: int | str) -> tuple[ARStage, FollowingProgram]:
    program = FollowingProgram(reference)
    stage = ARStage(program)
    config = StageConfig(devices=("cpu",), options={"block_size": 4, **options})
    stage.load(
        StageContext(stage="s", pipeline=None, model_path="", device="cpu", config=config, edges={}, progress=lambda *_: None)  # type: ignore[arg-type]
    )
    return stage, program


def open_row(stage: ARStage, number: int, tokens: int) -> None:
    stage.open(
        StageRequest(
            id=number,
            options=RequestOptions(),
            sampling=SamplingParams(max_tokens=tokens),
            inputs=("in",),
            outputs=("a->b",),
            deadline=1e9,
        )
    )


def make_prompt(seed: int) -> dict[str, torch.Tensor]:
    """Text, a 1 x 2 x 3 image, text."""
    generator = torch.Generator().manual_seed(seed)
    grid = torch.stack([torch.full((6,), 5), 5 + torch.arange(6) // 3, 5 + torch.arange(6) % 3])
    positions = torch.cat([torch.arange(5).expand(3, -1), grid, (8 + torch.arange(9)).expand(3, -1)], dim=1)
    deepstack = torch.zeros(TAPS, 20, HIDDEN)
    deepstack[:, 5:11] = torch.randn(TAPS, 6, HIDDEN, generator=generator)
    return {"embeds": torch.randn(20, HIDDEN, generator=generator), "positions": positions, "deepstack": deepstack}


def expected(reference, prompt: dict[str, torch.Tensor], vectors: list[torch.Tensor]) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens by whole forwards without a cache, and the hidden states of the prompt at CAPTURE."""
    table = reference.embed_tokens.weight
    embeds, positions = prompt["embeds"], prompt["positions"]
    visual = torch.zeros(len(embeds), dtype=torch.bool)
    visual[5:11] = True
    tokens, captured = [], None
    for vector in [*vectors, torch.zeros(1, HIDDEN)]:
        out = reference(
            inputs_embeds=embeds[None],
            position_ids=positions[:, None],
            visual_pos_masks=torch.nn.functional.pad(visual, (0, len(embeds) - 20))[None],
            deepstack_visual_embeds=list(prompt["deepstack"][:, 5:11]),
            output_hidden_states=True,
        )
        captured = out.hidden_states[CAPTURE][0] if captured is None else captured
        tokens.append(int((out.last_hidden_state[0, -1] @ table.T).argmax()))
        embeds = torch.cat([embeds, table[tokens[-1:]] + vector])
        positions = torch.cat([positions, positions.max() + torch.ones(3, 1, dtype=torch.int64)], dim=1)
    return tokens, captured


@pytest.mark.parametrize("piece", [3, 7, 64])
def test_rows_that_wait_for_each_input_equal_transformers(reference, piece):
    stage, program = make_stage(reference, max_prefill_tokens=piece)
    generator = torch.Generator().manual_seed(5)
    prompts = {number: make_prompt(number) for number in range(3)}
    vectors = {number: [torch.randn(1, HIDDEN, generator=generator) for _ in range(6)] for number in range(3)}
    tokens: dict[int, list[int]] = {number: [] for number in range(3)}
    finished = []

    def step() -> None:
        for emission in stage.step():
            if isinstance(emission, Output):
                tokens[emission.request_id].append(emission.payload.id)  # type: ignore[attr-defined]
            elif isinstance(emission, Finished):
                finished.append(emission.request_id)

    def drain() -> None:
        while stage.has_work():
            step()

    for number in range(3):
        open_row(stage, number, tokens=7)
        cut = 4 * (number + 1)
        first = {"embeds": prompts[number]["embeds"][:cut]}
        first |= {"positions": prompts[number]["positions"][:, :cut], "deepstack": prompts[number]["deepstack"][:, :cut]}
        rest = {"embeds": prompts[number]["embeds"][cut:]}
        rest |= {"positions": prompts[number]["positions"][:, cut:], "deepstack": prompts[number]["deepstack"][:, cut:]}
        stage.feed(number, Chunk("in", Signal(), first, False))
        step()
        stage.feed(number, Chunk("in", Signal(), rest, True))
    drain()
    assert [len(tokens[number]) for number in range(3)] == [1, 1, 1], "each row waits for its next input"
    for number in (2, 0, 1, 1, 2, 0, 0, 0, 1, 2, 2, 1, 1, 0, 2, 2, 0, 1):  # in no particular order
        before = {key: len(value) for key, value in tokens.items()}
        stage.feed(number, Chunk("in", Signal(), {"vector": vectors[number][before[number] - 1]}, False))
        drain()
        assert {key: len(value) for key, value in tokens.items()} == before | {number: before[number] + 1}
    assert sorted(finished) == sorted(program.released) == [0, 1, 2]
    for number in range(3):
        ids, captured = expected(reference, prompts[number], vectors[number])
        assert tokens[number] == ids
        parts = program.captured[number]
        assert [start for start, _ in parts] == [sum(len(part) for _, part in parts[:i]) for i in range(len(parts))]
        torch.testing.assert_close(torch.cat([part for _, part in parts]), captured, atol=1e-5, rtol=1e-5)
    assert stage.stats().kv_blocks_used == 0


def test_inputs_that_come_early_wait_their_turn(reference):
    stage, _ = make_stage(reference)
    prompt = make_prompt(1)
    vectors = [torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(6)) for _ in range(4)]
    open_row(stage, 0, tokens=5)
    stage.feed(0, Chunk("in", Signal(), prompt, True))
    for vector in vectors:
        stage.feed(0, Chunk("in", Signal(), {"vector": vector}, False))
    tokens = []
    while stage.has_work():
        tokens += [emission.payload.id for emission in stage.step() if isinstance(emission, Output)]  # type: ignore[attr-defined]
    assert tokens == expected(reference, prompt, vectors)[0]


def test_cancel_releases_a_waiting_row_at_once(reference):
    stage, program = make_stage(reference)
    open_row(stage, 0, tokens=5)
    stage.feed(0, Chunk("in", Signal(), make_prompt(1), True))
    stage.step()
    assert stage.stats().kv_blocks_used > 0
    stage.cancel(0)
    assert stage.stats().kv_blocks_used == 0 and program.released == [0] and not stage.has_work()


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_the_option_kernels_reaches_the_decoder(reference, kernels):
    _, program = make_stage(reference, kernels=kernels)
    assert program.decoder.kernels == kernels
