"""ARStage: the stage contract over an engine and a program. Every model that makes one token after another is hosted by it."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Literal

import torch

from omni_bus.errors import ConfigError, ModelRefused, OmniBusError, PromptTooLong
from omni_bus.stages import failures
from omni_bus.stages.ar import flash_attention, spans
from omni_bus.stages.ar.attention import DecodeAttention, PagedAttention
from omni_bus.stages.ar.block_keys import BlockKeys
from omni_bus.stages.ar.blocks import BlockManager
from omni_bus.stages.ar.capture import Capture
from omni_bus.stages.ar.engine import Engine
from omni_bus.stages.ar.graphs import StepGraphs
from omni_bus.stages.ar.kv_budget import block_count
from omni_bus.stages.ar.kv_cache import KVCache
from omni_bus.stages.ar.options import AROptions
from omni_bus.stages.ar.program import GraphedProgram, Program, Row, isolated
from omni_bus.stages.ar.prompt_graphs import PromptGraphs, largest_size
from omni_bus.stages.ar.sampler import Sampler, is_greedy
from omni_bus.stages.ar.scheduler import Scheduler
from omni_bus.stages.contract import Chunk, Emission, StageContext, StageRequest, StageStats, WokenByEvents

_GATHERED = 4096  # the most positions of a row where decode steps have no attention kernel: they gather them all
logger = logging.getLogger(__name__)

Kernel = Literal["", "triton", "flash"]  # "": torch's operators


class ARStage(WokenByEvents):
    """`options` is the type that the family's StageSpec declares for this stage."""

    def __init__(self, program: Program, options: type[AROptions] = AROptions) -> None:
        self.program = program
        self._options = options
        self._rows: dict[int, Row] = {}
        self._batch = 0
        self._device = torch.device("cpu")
        self._shared_block = 0  # positions of a KV block; 0 = blocks are not shared
        self._scheduler: Scheduler | None = None
        self._engine: Engine | None = None

    def load(self, ctx: StageContext) -> None:
        self.program.load(ctx)
        options = ctx.options(self._options)
        decoder = self.program.decoder
        decoder.kernels = options.kernels
        parameter = next(decoder.parameters())
        self._device = parameter.device
        max_length = min(self.program.max_length, options.max_length or self.program.max_length)
        of_prompts, of_steps = self._kernels(ctx, options)
        logger.info("attention: prompts by %s, decode steps by %s", of_prompts or "torch", of_steps or "torch")
        steps = self._steps(options)
        if steps is not None and not of_steps:
            max_length = min(max_length, _GATHERED)
        self._shared_block = options.block_size if options.prefix_cache else 0
        captures = options.prefix_cache and self.program.capture_layer is not None
        one = KVCache.block_bytes(decoder.config, options.block_size, parameter.dtype, captures=captures)
        total = block_count(ctx, options, self._device, block_bytes=one, max_length=max_length)
        max_length = min(max_length, total * options.block_size)
        if max_length < 2:
            raise ConfigError(f"stage {ctx.stage}: there is no memory for one KV block; give it more (memory or kv_memory_mb)")
        blocks = BlockManager(total, options.block_size)
        cache = KVCache(
            decoder.config,
            blocks=total,
            block_size=options.block_size,
            dtype=parameter.dtype,
            device=parameter.device,
            captures=captures,
        )
        self._scheduler = Scheduler(
            blocks,
            max_batch=ctx.config.max_batch,
            max_prefill_tokens=options.max_prefill_tokens,
            max_length=max_length,
            whole_prompts=steps is not None,
        )
        sampler = Sampler(self.program.eos_ids, self.program.suppressed_ids)
        fused = spans.kernel(of_prompts) if of_prompts else None
        attention = PagedAttention(decoder.config, cache, fused)
        self._engine = Engine(self.program, attention, sampler, blocks, max_length=max_length)
        if steps is not None:
            max_batch = ctx.config.max_batch
            max_tokens = min(options.max_prefill_tokens, max_length)
            decode = DecodeAttention(
                decoder.config,
                cache,
                slots=max_batch,
                max_length=max_length,
                kernel=of_steps == "triton",
                fused=spans.kernel(of_steps) if of_steps == "flash" else None,
                filling=largest_size(max_tokens),
            )
            prompts = None
            if options.graphs != "decode" and (fused is not None or self._device.type == "cpu"):
                prompts = PromptGraphs(
                    decoder,
                    decode,
                    fused or spans.attend_plain,
                    capture_layer=steps.capture_layer,
                    max_tokens=max_tokens,
                    max_batch=max_batch,
                    taps=steps.deepstack_taps,
                )
            self._engine.use(
                StepGraphs(steps, decode, max_batch=max_batch),
                prompts,
                Capture(self._device, captures=options.graphs != "plain"),
                ctx.progress,
            )
        ctx.progress(1.0, f"{total} KV blocks of {options.block_size} positions")

    def open(self, request: StageRequest) -> None:
        assert request.id not in self._rows
        generator = self._generator(request)
        row = Row(request, generator, seed=0 if generator is None else generator.initial_seed() % 2**63)
        row.keys = BlockKeys(self._shared_block) if self._shared_block else None
        row.prompt_only = request.options.prepare
        self.program.start(row)
        self._rows[request.id] = row
        self._loaded[0].add(row)

    def feed(self, request_id: int, chunk: Chunk) -> None:
        row = self._rows.get(request_id)
        if row is None or row.ended:
            return  # it ended before its last input came, at a stop string for instance
        try:
            self.program.feed(row, chunk)
            self._check(row)
            if row.request.options.prepare and row.prompt_closed and row.keys is None and not row.ended:
                self.program.prepared(row)  # nothing is kept, so there is nothing to compute
        except OmniBusError:
            self._release(row)
            raise
        except Exception as error:
            self._release(row)
            failures.raise_if_device_is_lost(error)
            logger.exception("request %d failed on its input", request_id)
            raise failures.for_client(error, "the model failed on this request's input; the server's log says why") from error

    def cancel(self, request_id: int) -> None:
        row = self._rows.get(request_id)
        if row is not None:
            row.ended = True
            self._release(row)

    def pause(self, request_id: int) -> None:
        row = self._rows.get(request_id)
        if row is not None:
            row.paused = True

    def resume(self, request_id: int) -> None:
        row = self._rows.get(request_id)
        if row is not None:
            row.paused = False

    def has_work(self) -> bool:
        scheduler, engine = self._loaded
        return engine.has_begun or scheduler.has_work() or any(row.outbox for row in self._rows.values())

    def step(self) -> Iterable[Emission]:
        scheduler, engine = self._loaded
        if engine.has_begun:
            self._batch = engine.finish()
        else:
            self._admit()
            pieces = scheduler.schedule()
            self._batch = engine.run(pieces) if pieces else 0
        emissions: list[Emission] = []
        for row in [row for row in self._rows.values() if row.outbox or row.ended]:
            emissions += row.outbox
            row.outbox.clear()
            if row.ended:
                self._release(row)
        return emissions

    def ahead(self) -> None:
        """Nobody who waits is passed over: a step is begun only where all that could be computed are rows of it. Where more rows run than
        a step holds, it is better to wait for those that are about to be ready: they fill it."""
        scheduler, engine = self._loaded
        graphs = engine.graphs
        if graphs is None or engine.has_begun or len(scheduler.running) > graphs.max_rows:
            return
        if not scheduler.can_admit():
            pieces = scheduler.schedule()
            if pieces:
                engine.begin(pieces)

    def _admit(self) -> None:
        scheduler, engine = self._loaded
        for row in scheduler.admit():
            engine.admit(row)
            if row.request.options.prepare and row.prompt_closed and not row.ended and not self._leaves_blocks(row):
                with isolated(row):
                    self.program.prepared(row)

    def _leaves_blocks(self, row: Row) -> bool:
        """Whether computing the row would fill a block that is not kept yet: a block that is not full is kept for nobody."""
        return row.computed // self._shared_block < row.length // self._shared_block

    def stats(self) -> StageStats:
        scheduler, engine = self._loaded
        return StageStats(
            waiting=len(scheduler.waiting),
            running=len(scheduler.running),
            queued=scheduler.queued,
            per_step=scheduler.max_prefill_tokens,
            batch=self._batch,
            kv_blocks_used=scheduler.blocks.used,
            kv_blocks_total=scheduler.blocks.total,
            prompt_computed=engine.prompt_computed,
            prompt_cached=engine.prompt_cached,
        )

    @property
    def _loaded(self) -> tuple[Scheduler, Engine]:
        assert self._scheduler is not None and self._engine is not None, "load comes first"
        return self._scheduler, self._engine

    def _generator(self, request: StageRequest) -> torch.Generator | None:
        if is_greedy(request.sampling):
            return None
        generator = torch.Generator(self._device)
        seed = request.options.seed if request.sampling.seed is None else request.sampling.seed
        if seed is None:
            generator.seed()
        else:
            generator.manual_seed(seed)
        return generator

    def _steps(self, options: AROptions) -> GraphedProgram | None:
        """The program, where it is to run in steps of fixed size."""
        wanted = options.graphs == "plain" or (options.graphs != "off" and self._device.type == "cuda")
        return self.program if wanted and isinstance(self.program, GraphedProgram) else None

    def _kernels(self, ctx: StageContext, options: AROptions) -> tuple[Kernel, Kernel]:
        """What computes attention of prompts, and that of decode steps. "auto": FlashAttention where it is installed for prompts, of which
        it computes long ones and long contexts faster; for steps our own, which is faster up to about a thousand positions."""
        wanted, config = options.attention, self.program.decoder.config
        if wanted == "torch" or (wanted == "auto" and self._device.type == "cpu"):
            return "", ""
        parameter = next(self.program.decoder.parameters())
        no_flash = flash_attention.refusal(self._device, parameter.dtype, config.head_dim)
        no_triton = "it needs a GPU" if self._device.type == "cpu" else None
        if no_triton is None and not DecodeAttention.has_kernel(config):
            no_triton = "it has no kernel for this head size"
        why = no_flash if wanted == "flash" else no_triton if wanted == "triton" else None
        if why is not None:
            raise ConfigError(f'stage {ctx.stage}: attention = "{wanted}": {why}; leave it at "auto"')
        ours: Kernel = "" if no_triton else "triton"
        flash: Kernel = ours if no_flash or wanted == "triton" else "flash"
        return flash, flash if wanted == "flash" else ours

    def _check(self, row: Row) -> None:
        """Refuse a prompt that is empty, or leaves no room for one token of output."""
        limit = self._loaded[1].max_length
        if row.prompt_closed and not row.length and not row.ended:
            raise ModelRefused("the prompt is empty")
        if not row.output_ids and row.length >= limit:
            raise PromptTooLong(f"the prompt has {row.length} positions; prompt and output together may have {limit}")

    def _release(self, row: Row) -> None:
        scheduler, engine = self._loaded
        scheduler.remove(row)
        engine.sampler.release(row)
        del self._rows[row.request.id]
        self.program.release(row)
