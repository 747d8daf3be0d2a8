"""Prompts of every kind for Qwen3-Omni, and what transformers makes of them, put together by transformers' own parts."""

from __future__ import annotations

import dataclasses
import io
import pathlib
from collections.abc import Sequence
from typing import Any

import av
import numpy as np
import torch
from PIL import Image

from omni_bus.events import RequestOptions
from omni_bus.payloads import ChatInput, MediaPart, Message, TextPart
from omni_bus.sampling import SamplingParams
from tests.support.stage_pipeline import StagePipeline

MAX_TEXT = 32
MAX_FRAMES = 40


# ---- media


def chirp(seconds: float, seed: int) -> np.ndarray:
    """float32 at 16 kHz: a rising tone with some noise."""
    time = np.arange(int(seconds * 16000)) / 16000
    noise = np.random.default_rng(seed).standard_normal(time.shape)
    return (0.4 * np.sin(2 * np.pi * (200 + 400 * time) * time) + 0.02 * noise).astype(np.float32)


def picture(height: int, width: int, seed: int) -> np.ndarray:
    """uint8 [height, width, 3]: smooth colours with a grain."""
    grid = np.stack(np.meshgrid(np.linspace(0, 3, height), np.linspace(0, 5, width), indexing="ij"))
    waves = np.stack(
        [np.sin(grid[0] * (channel + 1) + seed) + np.cos(grid[1] * (channel + 2)) for channel in range(3)], axis=-1
    )
    grain = np.random.default_rng(seed).standard_normal(waves.shape)
    return np.clip(128 + 50 * waves + 10 * grain, 0, 255).astype(np.uint8)


def png(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "png")
    return buffer.getvalue()


def lossless_video(frames: Sequence[np.ndarray], fps: int) -> bytes:
    """Matroska with FFV1: the frames come back bit for bit."""
    buffer = io.BytesIO()
    with av.open(buffer, mode="w", format="matroska") as container:
        stream = container.add_stream("ffv1", rate=fps)
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = "bgr0"
        for pixels in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24").reformat(format="bgr0")))
        container.mux(stream.encode())
    return buffer.getvalue()


def tensor_of(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


# ---- prompts


@dataclasses.dataclass(frozen=True)
class Case:
    """A conversation: (role, parts), where a part is a text or ("audio" | "image" | "video", content)."""

    turns: tuple[tuple[str, tuple[Any, ...]], ...]

    def chat(self) -> tuple[ChatInput, dict[str, torch.Tensor]]:
        messages, tensors = [], {}
        for role, parts in self.turns:
            out: list[TextPart | MediaPart] = []
            for part in parts:
                if isinstance(part, str):
                    out.append(TextPart(part))
                    continue
                kind, content = part
                if kind == "audio":
                    tensor = torch.from_numpy(content)
                elif kind == "image":
                    tensor = tensor_of(png(content))
                else:
                    tensor = tensor_of(lossless_video(content, fps=4))
                tensors[f"media{len(tensors)}"] = tensor
                out.append(MediaPart(kind, len(tensors) - 1))
            messages.append(Message(role, tuple(out)))  # type: ignore[arg-type]
        return ChatInput(tuple(messages)), tensors

    def media(self, kind: str) -> list[Any]:
        return [part[1] for _, parts in self.turns for part in parts if not isinstance(part, str) and part[0] == kind]


AUDIO = ("audio", chirp(1.7, 0))
IMAGE = ("image", picture(64, 96, 1))
CASES = {
    "text": Case((("user", ("Tell me a story.",)),)),
    "text_system": Case((("system", ("You are terse.",)), ("user", ("Say hello to everyone, please.",)))),
    "history": Case(
        (
            ("system", ("S",)),
            ("user", ("Who are you?",)),
            ("assistant", ("A voice.",)),
            ("user", ("Whose voice?\n\n",)),
        )
    ),
    "audio": Case((("user", (AUDIO, "What is said here?")),)),
    "audios": Case(
        (
            ("system", ("S",)),
            ("user", (("audio", chirp(0.63, 1)), "one")),
            ("assistant", ("Yes.",)),
            ("user", ("two", ("audio", chirp(2.5, 2)))),
        )
    ),
    "image": Case((("user", (IMAGE, "Describe it.")),)),
    "images": Case(
        (("user", (IMAGE, "and", ("image", picture(96, 64, 4)))), ("assistant", ("Two.",)), ("user", ("Compare.",)))
    ),
    "image_audio": Case((("user", (IMAGE, AUDIO, "Describe both.")),)),
    "video": Case((("user", (("video", [picture(64, 64, index) for index in range(8)]), "What happens?")),)),
    "mixture": Case(
        (
            ("user", (AUDIO, ("video", [picture(64, 96, index) for index in range(6)]))),
            ("assistant", ("Aha.",)),
            ("user", (IMAGE, "now this", ("audio", chirp(0.5, 3)))),
        )
    ),
}


# ---- transformers


@dataclasses.dataclass
class Expected:
    """What transformers generates: text tokens, talker tokens and codes [16, frames], and each decision's margin."""

    text: list[int]
    talker: list[int] = dataclasses.field(default_factory=list)
    codes: torch.Tensor = dataclasses.field(default_factory=lambda: torch.zeros(16, 0, dtype=torch.int64))
    text_margins: list[float] = dataclasses.field(default_factory=list)
    talker_margins: list[float] = dataclasses.field(default_factory=list)


class Reference:
    """Qwen3OmniMoeForConditionalGeneration.generate, batch 1, and what goes into it, made without any code of ours."""

    def __init__(self, directory: pathlib.Path, pipeline: StagePipeline) -> None:
        from transformers import AutoTokenizer, Qwen3OmniMoeForConditionalGeneration, WhisperFeatureExtractor
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        self.model = Qwen3OmniMoeForConditionalGeneration.from_pretrained(directory, dtype=torch.float32).eval()
        self.config = self.model.config
        # transformers' Talker reads audio_config, which its configuration lacks, when a prompt has both pictures and audio.
        self.config.talker_config.audio_config = self.config.thinker_config.audio_config
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        self.mel = WhisperFeatureExtractor.from_pretrained(directory)
        self.images = Qwen2VLImageProcessorPil.from_pretrained(directory)
        self.processor = pipeline.stages["processor"]

    def inputs(self, case: Case) -> dict[str, torch.Tensor]:
        messages = [
            {
                "role": role,
                "content": [{"type": "text", "text": part} if isinstance(part, str) else {"type": part[0]} for part in parts],
            }
            for role, parts in case.turns
        ]
        text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        out: dict[str, torch.Tensor] = {}
        lengths: dict[str, list[int]] = {"audio": [], "image": [], "video": []}
        if audios := case.media("audio"):
            mel = self.mel(
                audios, sampling_rate=16000, padding=True, truncation=False, return_attention_mask=True, return_tensors="pt"
            )
            out["input_features"], out["feature_attention_mask"] = mel["input_features"], mel["attention_mask"]
            from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import _get_feat_extract_output_lengths

            lengths["audio"] = _get_feat_extract_output_lengths(mel["attention_mask"].sum(-1)).tolist()
        if images := case.media("image"):
            features = self.images([Image.fromarray(pixels) for pixels in images], return_tensors="pt")
            out["pixel_values"], out["image_grid_thw"] = features["pixel_values"], features["image_grid_thw"]
            lengths["image"] = (features["image_grid_thw"].prod(-1) // 4).tolist()
        if case.media("video"):  # transformers' video processor needs torchvision: ours, which has tests of its own
            prepared = self.processor._processor.prepare(*case.chat())  # type: ignore[attr-defined]
            out["pixel_values_videos"] = prepared.tensors["pixel_values_videos"]
            out["video_grid_thw"] = torch.tensor(prepared.media.video_grids)
            out["video_second_per_grid"] = torch.tensor(prepared.media.video_seconds)
            lengths["video"] = (out["video_grid_thw"].prod(-1) // 4).tolist()
        for kind, counts in lengths.items():
            for count in counts:
                text = text.replace(f"<|{kind}_pad|>", "<|hold|>" * count, 1)
            text = text.replace("<|hold|>", f"<|{kind}_pad|>")
        encoded = self.tokenizer(text, return_tensors="pt")
        return {**out, "input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"]}

    def generate(
        self,
        case: Case,
        *,
        max_text: int = MAX_TEXT,
        max_frames: int = MAX_FRAMES,
        speaker: str = "Ethan",
        seed: int | None = None,
    ) -> Expected:
        """Greedy Thinker; greedy Talker, or sampled with the global generator seeded right before the Talker begins."""
        model, seen = self.model, {}
        thinker_generate, talker_generate, decode = model.thinker.generate, model.talker.generate, model.code2wav.chunked_decode

        def thinker(*args: Any, **kwargs: Any) -> Any:
            seen["thinker"] = thinker_generate(*args, output_scores=True, **kwargs)
            return seen["thinker"]

        def talker(**kwargs: Any) -> Any:
            if seed is not None:
                torch.manual_seed(seed)
            seen["talker"] = talker_generate(output_scores=True, **kwargs)
            return seen["talker"]

        def codes(codes: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            seen["codes"] = codes[0]
            return torch.zeros(1, 1, 1)

        inputs = self.inputs(case)
        model.thinker.generate, model.talker.generate, model.code2wav.chunked_decode = thinker, talker, codes
        try:
            with torch.no_grad():
                model.generate(
                    **inputs,
                    speaker=speaker,
                    return_audio=True,
                    thinker_do_sample=False,
                    thinker_eos_token_id=self.config.im_end_token_id,
                    thinker_max_new_tokens=max_text,
                    talker_do_sample=seed is not None,
                    talker_max_new_tokens=max_frames,
                )
        finally:
            model.thinker.generate, model.talker.generate, model.code2wav.chunked_decode = (
                thinker_generate,
                talker_generate,
                decode,
            )
        return Expected(
            text=seen["thinker"].sequences[0, inputs["input_ids"].shape[1] :].tolist(),
            talker=seen["talker"].sequences[0].tolist(),
            codes=seen["codes"],
            text_margins=_margins(seen["thinker"].scores),
            talker_margins=_margins(seen["talker"].scores),
        )


def _margins(scores: Sequence[torch.Tensor]) -> list[float]:
    best = torch.cat(list(scores)).topk(2, dim=-1).values
    return (best[:, 0] - best[:, 1]).tolist()


def options(
    *,
    max_text: int = MAX_TEXT,
    max_frames: int = MAX_FRAMES,
    seed: int | None = None,
    voice: str | None = "Ethan",
    **thinker: Any,
) -> RequestOptions:
    """Text and speech; greedy, or with a sampled Talker where a seed is given."""
    talker = SamplingParams(max_tokens=max_frames, temperature=0.0) if seed is None else SamplingParams(max_tokens=max_frames)
    return RequestOptions(
        modalities=("text", "audio"),
        voice=voice,
        seed=seed,
        sampling={"thinker": SamplingParams(temperature=0.0, max_tokens=max_text, **thinker), "talker": talker},
    )
