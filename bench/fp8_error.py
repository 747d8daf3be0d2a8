"""What `stages.thinker.weights = "fp8"` costs in accuracy, beside what bfloat16 costs: experts and layers of the real size, whole tiny models.

    python -m bench.fp8_error [--layers 6] [--tokens 32] [--out bench/results]

On the CPU, in the plain form of the operators. Weights are drawn as the fixture draws them and rounded to bfloat16, as a checkpoint's
are; the truth is float32 arithmetic with them. One layer of the real size is in memory at a time (5 GB), half a minute each on two cores.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.metadata
import os
import pathlib
import platform
import tempfile
from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F

from omni_bus.stages.ar.attention import ContiguousAttention
from omni_bus.stages.ar.decoder import Decoder, DecoderConfig, DecoderLayer
from omni_bus.stages.ar.fp8 import dequantise, quantise, quantised_experts
from omni_bus.stages.ar.mlp import MoE, MoEConfig
from omni_bus.stages.ar.ops import silu_mul_plain
from omni_bus.stages.qwen3_omni import fixture
from omni_bus.stages.qwen3_omni.checkpoint import Checkpoint
from omni_bus.stages.qwen3_omni.config import read_config
from omni_bus.stages.qwen3_omni.random_weights import RandomCheckpoint
from omni_bus.stages.qwen3_omni.weights import decoder_config

TRUTH = "float32"
BF16 = "bfloat16 (`model`)"
FP8_ONLY = "FP8 experts, all else float32"
FP8 = "FP8 experts, all else bfloat16 (`fp8`)"
FORMS = {
    TRUTH: (False, torch.float32),
    BF16: (False, torch.bfloat16),
    FP8_ONLY: (True, torch.float32),
    FP8: (True, torch.bfloat16),
}
OUTLIERS, OUTLIER_GAIN = 0.001, 50.0  # the share of weights that are made that much larger, in one row of the first table
TINY_PROMPTS, TINY_LENGTH, TINY_SEEDS = 12, 48, 3


def relative(got: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    """Length of the error over the length of the truth, row by row."""
    off: torch.Tensor = (got.double() - true.double()).norm(dim=-1) / true.double().norm(dim=-1)
    return off


def percent(values: torch.Tensor) -> str:
    return f"{100 * float(values.mean()):.2f} % | {100 * float(values.max()):.2f} %"


# ---- experts of the real size


def expert_rows(checkpoint: RandomCheckpoint, hidden: int, count: int = 8, tokens: int = 64) -> Iterator[str]:
    """Outputs of the first experts of layer 0 for normalised inputs, every expert for every token."""
    x = torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(1))
    layer = checkpoint.tensors("thinker.model.layers.0.mlp.", dtype=torch.bfloat16)
    drawn = [
        (layer["experts.gate_up_proj"][expert].clone(), layer["experts.down_proj"][expert].clone()) for expert in range(count)
    ]
    del layer
    larger = [(with_outliers(gate_up), with_outliers(down)) for gate_up, down in drawn]
    for weights, matrices in (("as drawn", drawn), ("one in a thousand 50 times larger", larger)):
        lost: list[torch.Tensor] = []
        errors: dict[str, list[torch.Tensor]] = {name: [] for name in FORMS if name != TRUTH}
        for part in matrices:
            true = output(x, *(one.float() for one in part))
            rough = [quantise(one) for one in part]
            lost += [relative(dequantise(*codes, torch.float32), one) for codes, one in zip(rough, part, strict=True)]
            for name, rows in errors.items():
                fp8, dtype = FORMS[name]
                used = [dequantise(*codes, dtype) for codes in rough] if fp8 else [one.to(dtype) for one in part]
                rows.append(relative(output(x.to(dtype), *used), true))
        yield f"| {weights} | FP8: the matrices themselves, row by row | {percent(torch.cat(lost))} |"
        for name, rows in errors.items():
            yield f"| {weights} | {name} | {percent(torch.cat(rows))} |"


def output(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return F.linear(silu_mul_plain(F.linear(x, gate_up)), down)


def with_outliers(weight: torch.Tensor) -> torch.Tensor:
    chosen = torch.rand(weight.shape, generator=torch.Generator().manual_seed(2)) < OUTLIERS
    return torch.where(chosen, weight * OUTLIER_GAIN, weight)


# ---- layers of the real size, one in memory at a time


def layer_rows(checkpoint: RandomCheckpoint, config: DecoderConfig, layers: int, tokens: int) -> Iterator[str]:
    one = dataclasses.replace(config, layers=1)
    states = {name: torch.randn(tokens, config.hidden, generator=torch.Generator().manual_seed(3)) for name in FORMS}
    for number in range(layers):
        tensors = checkpoint.tensors(f"thinker.model.layers.{number}.", dtype=torch.bfloat16)
        plain = {f"layers.0.{name}": tensor for name, tensor in tensors.items()}
        rough = quantised_experts(plain)
        before = states[TRUTH]
        true_choice = torch.empty(0)
        for name, (fp8, _) in FORMS.items():
            (alone, states[name]), (_, choice) = apply(make(one, rough if fp8 else plain, name), before, states[name])
            if name == TRUTH:
                true_choice = choice
                continue
            same = (choice[:, :, None] == true_choice[:, None]).any(-1).float().mean()
            yield (
                f"| {number} | {name} | {percent(relative(alone, states[TRUTH]))} | {percent(relative(states[name], states[TRUTH]))} | "
                f"{100 * (1 - float(same)):.1f} % |"
            )


def make(config: DecoderConfig, tensors: Mapping[str, torch.Tensor], form: str) -> Decoder:
    """tensors: of all layers, the experts as the form has them; a last norm of ones is added where there is none."""
    assert isinstance(config.mlp, MoEConfig)
    fp8, dtype = FORMS[form]
    config = dataclasses.replace(config, mlp=dataclasses.replace(config.mlp, fp8=fp8))
    return Decoder.from_tensors(config, {"norm.weight": torch.ones(config.hidden), **tensors}, dtype=dtype, device="cpu")


def apply(decoder: Decoder, *prompts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states float32 [N, hidden] of each prompt → those behind the decoder's one layer [prompts, N, hidden], and the experts
    chosen there [prompts, N, top_k]."""
    [layer] = decoder.layers
    assert isinstance(layer, DecoderLayer) and isinstance(layer.mlp, MoE)
    chosen: list[torch.Tensor] = []
    hook = layer.mlp.gate.register_forward_hook(lambda module, inputs, output: chosen.append(output[1]))
    rows, count, dtype = len(prompts), len(prompts[0]), layer.input_layernorm.weight.dtype
    x = torch.cat(prompts).to(dtype)
    cache = ContiguousAttention(decoder.config, rows=rows, capacity=count, dtype=dtype, device="cpu")
    cache.reset(rows)
    cache.extend(count)
    rotary = decoder.rotary(torch.arange(count).repeat(rows).expand(3, -1), dtype)
    _, out = layer(layer.input_layernorm(x), x, decoder.norm, rotary, cache, "torch")
    hook.remove()
    return out.float().view(rows, count, -1), chosen[0].view(rows, count, -1)


# ---- whole tiny models


def model_rows() -> Iterator[str]:
    """Logits of random prompts, over several models."""
    scores: dict[str, list[torch.Tensor]] = {name: [] for name in FORMS}
    for seed in range(TINY_SEEDS):
        with tempfile.TemporaryDirectory() as folder:
            fixture.write(pathlib.Path(folder), "tiny", seed, lambda fraction, text: None)
            tensors = Checkpoint(folder).tensors("thinker.model.", dtype=torch.bfloat16)
            head = Checkpoint(folder).tensors("thinker.lm_head.", dtype=torch.bfloat16)["weight"]
            stack = read_config(folder).thinker.text
        table = tensors.pop("embed_tokens.weight")
        ids = torch.randint(0, len(table), (TINY_PROMPTS, TINY_LENGTH), generator=torch.Generator().manual_seed(seed))
        for name, (fp8, dtype) in FORMS.items():
            decoder = make(decoder_config(stack), quantised_experts(tensors) if fp8 else tensors, name)
            cache = ContiguousAttention(decoder.config, rows=TINY_PROMPTS, capacity=TINY_LENGTH, dtype=dtype, device="cpu")
            cache.reset(TINY_PROMPTS)
            hidden = decoder.forward_rows(F.embedding(ids, table).to(dtype), cache)
            scores[name].append(F.linear(hidden, head.to(dtype)).float().flatten(0, 1))
    true = torch.cat(scores.pop(TRUTH))
    margin = true.topk(2).values
    yield (
        f"{len(true)} positions, {true.shape[1]} tokens each; the true logits have a standard deviation of {float(true.std()):.2f}, and "
        f"the best is ahead of the next by {float((margin[:, 0] - margin[:, 1]).median()):.2f} at the median."
    )
    yield ""
    yield "| | largest error of a logit | mean error | KL, mean, nats | KL, largest | same best token |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for name, parts in scores.items():
        got = torch.cat(parts)
        off = (got - true).abs()
        kl = F.kl_div(got.double().log_softmax(-1), true.double().log_softmax(-1), log_target=True, reduction="none").sum(-1)
        same = (got.argmax(-1) == true.argmax(-1)).float().mean()
        yield (
            f"| {name} | {float(off.max()):.3f} | {float(off.mean()):.4f} | {float(kl.mean()):.2e} | {float(kl.max()):.2e} | "
            f"{100 * float(same):.1f} % |"
        )


# ---- the page


def page(layers: int, tokens: int) -> Iterator[str]:
    yield f"# FP8 experts against float32, {datetime.datetime.now(datetime.UTC).date()}"
    yield ""
    yield f"`python -m bench.fp8_error --layers {layers} --tokens {tokens}`"
    yield ""
    yield (
        f"cpu {cpu()}, cores {os.cpu_count()}, python {platform.python_version()}, torch {importlib.metadata.version('torch')}; plain form "
        "of the operators, no GPU"
    )
    yield ""
    yield (
        "Weights are random, drawn as the fixture draws them (projections keep the variance of their input) and rounded to bfloat16; the "
        "truth is float32 arithmetic with them. **Random weights have no outliers such as trained ones have, and no redundancy either: "
        "these figures say what the format does to a matrix, not what a trained model's answers lose.** That needs a trained checkpoint "
        "and an evaluation, which were not to be had here. Errors are lengths: |got - true| / |true| of a vector, mean and largest."
    )
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        fixture.write(pathlib.Path(folder), "full", 0, lambda fraction, text: None, weights=False, vocabulary="tiny")
        checkpoint, stack = RandomCheckpoint(folder), read_config(folder).thinker.text
        config = decoder_config(stack)
        yield ""
        yield "## Outputs of single experts of the real size (2048 x 768)"
        yield ""
        yield "| weights | | mean | largest |"
        yield "| --- | --- | --- | --- |"
        yield from expert_rows(checkpoint, config.hidden)
        yield ""
        yield f"## Hidden states behind layers of the real size ({tokens} tokens of one prompt)"
        yield ""
        yield (
            "Alone: the layer's input is the true one. In a row: the errors of the layers before it are in its input. Experts changed: "
            "choices, of eight a token, that the true model did not make, in a row. Where a choice changed, two scores of the router were "
            "near each other, and the token's error is many times that of the others."
        )
        yield ""
        yield "| layer | | alone, mean | largest | in a row, mean | largest | experts changed |"
        yield "| --- | --- | --- | --- | --- | --- | --- |"
        yield from layer_rows(checkpoint, config, layers, tokens)
        yield ""
        yield f"## Logits of whole tiny models ({TINY_SEEDS} fixtures of 5 layers, 8 experts)"
        yield ""
        yield from model_rows()


def cpu() -> str:
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.fp8_error", description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=6, help="of the real size (default: 6)")
    parser.add_argument("--tokens", type=int, default=32, help="of the prompt that goes through them (default: 32)")
    parser.add_argument("--out", type=pathlib.Path, help="folder for DATE-fp8-error.md")
    arguments = parser.parse_args()
    lines = []
    for line in page(arguments.layers, arguments.tokens):
        print(line, flush=True)
        lines.append(line)
    if arguments.out:
        name = f"{datetime.datetime.now(datetime.UTC).date()}-fp8-error.md"
        (arguments.out / name).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
