"""Loading: tensors straight to the card are those read on the CPU; random weights of the real size take seconds and only their own bytes;
what each stage then holds is what the memory plan reckoned."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterator

import torch
from safetensors.torch import save_file

from omni_bus.config import load_deployment
from omni_bus.deployment import Deployment
from omni_bus.memory import plan
from omni_bus.spec import load_pipeline
from omni_bus.stages.ar.fp8 import dequantise
from omni_bus.stages.contract import Stage, StageContext
from omni_bus.stages.qwen3_omni import card_lane, checkpoint, fixture
from omni_bus.stages.qwen3_omni.checkpoint import Checkpoint
from omni_bus.stages.qwen3_omni.random_weights import RandomCheckpoint

CARD = torch.device("cuda:0")
CONFIG = pathlib.Path(__file__).parents[2] / "configs" / "qwen3_omni.toml"
STAGES = ("code2wav", "talker", "thinker")
SLACK_BYTES = 1 << 30  # of cached blocks between the figures of a load


def checks() -> Iterator[tuple[str, Callable[[], str]]]:
    for dtype in (None, torch.bfloat16):
        for buffer in (1 << 10, 32 << 20):
            yield f"tiny checkpoint, {dtype or 'own dtype'}, buffers of {buffer} B", functools.partial(tiny, dtype, buffer)
    yield "a layer of experts from the page cache", experts
    yield "random talker of the real size", functools.partial(random, "talker.", 20)
    yield "random thinker of the real size", functools.partial(random, "thinker.", 30)
    yield "random thinker of the real size in FP8", functools.partial(random, "thinker.", 30, fp8=True)
    for stage in STAGES:
        yield f"{stage} keeps to its plan", functools.partial(planned, stage)
    yield "thinker in FP8 keeps to its plan", functools.partial(planned, "thinker", "stages.thinker.weights=fp8")


def tiny(dtype: torch.dtype | None, buffer: int) -> str:
    runs = replaced(checkpoint, "RUN_BYTES", 64 << 10)
    with directory("tiny", weights=True) as path, replaced(card_lane, "BUFFER_BYTES", buffer), runs:
        count = 0
        for prefix in ("thinker.", "talker.", "code2wav."):
            read, sent = (Checkpoint(path).tensors(prefix, dtype=dtype, device=device) for device in ("cpu", CARD))
            assert read.keys() == sent.keys()
            for name, tensor in sent.items():
                assert tensor.device == CARD and torch.equal(tensor.cpu(), read[name]), name
            count += len(sent)
    return f"{count} tensors, bit for bit"


def experts() -> str:
    """1.2 GB in 384 matrices, as the Thinker's layers have them."""
    with tempfile.TemporaryDirectory() as folder:
        names = [f"x.experts.{expert}.{part}_proj.weight" for expert in range(128) for part in checkpoint.PARTS]
        tensors = {
            name: torch.randn(2048, 768).bfloat16() if "down" in name else torch.randn(768, 2048).bfloat16() for name in names
        }
        save_file(tensors, f"{folder}/model.safetensors")
        taken = []
        for _ in range(2):  # the first time pins the buffers
            torch.cuda.synchronize()
            began = time.perf_counter()
            sent = Checkpoint(folder).tensors("x.", dtype=torch.bfloat16, device=CARD)
            torch.cuda.synchronize()
            taken.append(time.perf_counter() - began)
        for expert in range(0, 128, 5):
            gate, up = sent["experts.gate_up_proj"][expert].cpu().chunk(2)
            assert torch.equal(gate, tensors[f"x.experts.{expert}.gate_proj.weight"])
            assert torch.equal(up, tensors[f"x.experts.{expert}.up_proj.weight"])
            assert torch.equal(sent["experts.down_proj"][expert].cpu(), tensors[f"x.experts.{expert}.down_proj.weight"])
        size = sum(tensor.nbytes for tensor in sent.values())
    return f"{size / 1e9:.2f} GB in {taken[0]:.2f} s, again {taken[1]:.2f} s: {size / taken[1] / 1e9:.1f} GB/s"


def random(prefix: str, limit: float, *, fp8: bool = False) -> str:
    with directory("full", weights=False) as path:
        config = json.loads((path / "config.json").read_text())
        before = free()
        torch.cuda.reset_peak_memory_stats(CARD)
        began = time.perf_counter()
        source = RandomCheckpoint(path, fp8=fp8)
        tensors = source.tensors(prefix, dtype=torch.bfloat16, device=CARD)
        torch.cuda.synchronize()
        taken = time.perf_counter() - began
        after = free()
        size = sum(tensor.nbytes for tensor in tensors.values())
        assert size == source.bytes(prefix, torch.bfloat16)
        peak = torch.cuda.max_memory_allocated(CARD) - size
        assert peak < 4 << 30, f"{peak / 1e9:.1f} GB beside the tensors"
        assert taken < limit, f"{taken:.1f} s"
        for name, tensor in tensors.items():
            if name.endswith("experts.gate_up_proj"):
                hidden = tensor.shape[-1]
                if fp8:
                    tensor = dequantise(tensor, tensors[f"{name}_scale"], torch.bfloat16)
                assert abs(float(tensor.float().std()) * hidden**0.5 - 1) < 0.02, name
                assert not torch.equal(tensor[0], tensor[1])
            elif name.endswith("layernorm.weight"):
                assert abs(float(tensor.float().mean()) - 1) < 0.02, name
        if prefix == "talker.":
            end, head = config["talker_config"]["codec_eos_token_id"], tensors["codec_head.weight"].float()
            assert 1.2 < float(head[end].std() / head[: end - 200].std()) < 1.4
        again = source.tensors(f"{prefix}model.norm.", dtype=torch.bfloat16, device=CARD)["weight"]
        assert torch.equal(again, tensors["model.norm.weight"])
        del tensors
    return (
        f"{size / 1e9:.1f} GB in {taken:.1f} s, {peak / 1e9:.1f} GB beside it; free {before / 1e9:.1f} → {after / 1e9:.1f} GB"
    )


def planned(name: str, *sets: str) -> str:
    """The stage as a worker loads it, graphs and all; `sets` as --set takes them."""
    with directory("full", weights=False) as path:
        deployment, pipeline = placed(path, *sets), load_pipeline("qwen3_omni")
        share = next(share for share in plan(deployment, pipeline).shares if share.stage == name)
        reckoned = share.need.weights + share.need.workspace + share.state
        before = free()
        began = time.perf_counter()
        stage: Stage = pipeline.stage(name).factory()
        stage.load(
            StageContext(
                stage=name,
                pipeline=pipeline,
                model_path=deployment.model.path,
                device=str(CARD),
                config=deployment.stages[name],
                edges=deployment.edges,
                progress=lambda fraction, detail: None,
                state_bytes=share.state,
            )
        )
        torch.cuda.synchronize()
        taken = time.perf_counter() - began
        held, used = torch.cuda.memory_reserved(CARD), before - free()
        said = stage.stats()
        del stage
    figures = (
        f"ready in {taken:.1f} s; {used / 2**30:.1f} GiB used ({held / 2**30:.1f} by torch), {reckoned / 2**30:.1f} reckoned, "
        f"of which {share.state / 2**30:.1f} for requests: {said.kv_blocks_total or said.slots_total} blocks or slots"
    )
    assert used <= reckoned + SLACK_BYTES, figures
    return figures


def placed(path: pathlib.Path, *sets: str) -> Deployment:
    own = [f"model.path={path}", *(f"stages.{stage}.load=random" for stage in STAGES)]
    return load_deployment(CONFIG, sets=[*own, *sets], environ={})


def free() -> int:
    """Bytes free on the card, with nothing cached in this process."""
    gc.collect()
    torch.cuda.synchronize(CARD)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(CARD)[0]


@contextlib.contextmanager
def directory(size: str, *, weights: bool) -> Iterator[pathlib.Path]:
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / size
        fixture.write(
            path, size, 0, lambda fraction, text: None, weights=weights, vocabulary="tiny" if size == "full" else None
        )
        yield path


@contextlib.contextmanager
def replaced(module: object, name: str, value: int) -> Iterator[None]:
    before = vars(module)[name]
    vars(module)[name] = value
    try:
        yield
    finally:
        vars(module)[name] = before
