"""The processor stage: messages and media in, prompt tokens and the encoders' input features out. On the CPU, one request a step."""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from transformers import WhisperFeatureExtractor

from omni_bus.errors import CheckpointError, InvalidRequest, ModelRefused, OmniBusError, StageFailed, UndecodableMedia
from omni_bus.payloads import ChatInput, MediaPart
from omni_bus.stages.contract import (
    Chunk,
    Consumed,
    Emission,
    Finished,
    Output,
    StageContext,
    StageError,
    StageRequest,
    StageStats,
)
from omni_bus.stages.media import decode_image, decode_video
from omni_bus.stages.qwen3_omni.checkpoint_files import resolve
from omni_bus.stages.qwen3_omni.config import OmniConfig, read_config
from omni_bus.stages.qwen3_omni.json_fields import Section, read_json
from omni_bus.stages.qwen3_omni.payloads import Grid, Media, ModelInputs, TalkerPrompt
from omni_bus.stages.qwen3_omni.prompt import PromptEncoder, expand
from omni_bus.stages.qwen3_omni.rope_index import audio_tokens, grid_tokens
from omni_bus.stages.qwen3_omni.turns import user_turns
from omni_bus.stages.qwen3_omni.vision_input import VIDEO_FPS, VisionInput, VisionInputConfig

log = logging.getLogger(__name__)

AUDIO_RATE = 16_000
MIN_AUDIO_SAMPLES = 400  # one window of the mel filter bank
THINKER = "processor->thinker"
TALKER = "processor->talker"


@dataclasses.dataclass(slots=True)
class _Job:
    request: StageRequest
    chunk: Chunk | None = None
    paused: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Prepared:
    """A prompt as both readers get it. `tensors` as in ModelInputs; `user_positions`: what the Talker reads of `token_ids`."""

    token_ids: list[int]
    media: Media
    tensors: dict[str, torch.Tensor]
    user_positions: list[int]


class ProcessorStage:
    """Each request brings one ChatInput and leaves as one chunk to the Thinker and, for speech, one to the Talker."""

    def __init__(self) -> None:
        self._jobs: dict[int, _Job] = {}
        self._ready: deque[int] = deque()

    def load(self, ctx: StageContext) -> None:
        directory = resolve(ctx.model_path)
        ctx.progress(0.0, "tokenizer")
        config = read_config(ctx.model_path)
        video = directory / "video_preprocessor_config.json"
        preprocessor = read_json(directory / "preprocessor_config.json")
        self._processor = Processor(
            config,
            PromptEncoder(directory, config),
            _mel(Section(preprocessor, "", "preprocessor_config.json")),
            VisionInput(VisionInputConfig.parse(preprocessor, read_json(video) if video.is_file() else {})),
        )
        ctx.progress(1.0, "ready")

    def open(self, request: StageRequest) -> None:
        self._jobs[request.id] = _Job(request)

    def feed(self, request_id: int, chunk: Chunk) -> None:
        job = self._jobs.get(request_id)
        if job is None:
            return  # it has left already
        if job.chunk is not None or not chunk.last:
            del self._jobs[request_id]
            raise InvalidRequest("this model takes the whole conversation at once; input cannot be appended")
        job.chunk = chunk
        self._ready.append(request_id)

    def cancel(self, request_id: int) -> None:
        self._jobs.pop(request_id, None)

    def pause(self, request_id: int) -> None:
        if request_id in self._jobs:
            self._jobs[request_id].paused = True

    def resume(self, request_id: int) -> None:
        if request_id in self._jobs:
            self._jobs[request_id].paused = False

    def _next(self) -> _Job | None:
        """The first request that can be worked on; those that were cancelled are dropped from the queue on the way."""
        while self._ready and self._ready[0] not in self._jobs:
            self._ready.popleft()
        return next((job for request in self._ready if (job := self._jobs.get(request)) and not job.paused), None)

    def has_work(self) -> bool:
        return self._next() is not None

    def step(self) -> Iterable[Emission]:
        job = self._next()
        if job is None:
            return []
        request = job.request.id
        self._ready.remove(request)
        del self._jobs[request]
        assert job.chunk is not None and isinstance(job.chunk.payload, ChatInput)
        try:
            prompt = self._processor.prepare(job.chunk.payload, job.chunk.tensors)
        except OmniBusError as error:
            return [StageError(request, error.info())]
        except Exception as error:  # a request that breaks its own preparation must not fail the others in this stage
            log.exception("request %d: preparing the prompt failed", request)
            return [StageError(request, StageFailed(f"the prompt could not be prepared ({type(error).__name__})").info())]
        return self._emissions(job.request, job.chunk.edge, prompt)

    def _emissions(self, request: StageRequest, entry: str, prompt: Prepared) -> list[Emission]:
        out: list[Emission] = [Consumed(request.id, entry)]
        inputs = ModelInputs(tuple(prompt.token_ids), prompt.media)
        out.append(Output(request.id, THINKER, inputs, prompt.tensors, last=True))
        if TALKER in request.outputs:
            user = TalkerPrompt(tuple(prompt.token_ids[position] for position in prompt.user_positions), prompt.media)
            out.append(Output(request.id, TALKER, user, last=True))
        out.append(Finished(request.id, {"prompt_tokens": len(prompt.token_ids)}))
        return out

    def stats(self) -> StageStats:
        return StageStats(waiting=len(self._jobs))


class Processor:
    """The work itself, without the stage around it."""

    def __init__(self, config: OmniConfig, encoder: PromptEncoder, mel: WhisperFeatureExtractor, vision: VisionInput) -> None:
        self.config = config
        self.encoder = encoder
        self.mel = mel
        self.vision = vision

    def prepare(self, chat: ChatInput, tensors: Mapping[str, torch.Tensor]) -> Prepared:
        """OmniBusError refuses a conversation that the model cannot take."""
        if not chat.messages:
            raise ModelRefused("the conversation is empty; send at least one message", param="messages")
        token_ids = self.encoder.encode(chat.messages)
        parts = [part for message in chat.messages for part in message.parts if isinstance(part, MediaPart)]
        media, features = self._features(parts, tensors)
        ids, merge = self.config.thinker.media, self.config.thinker.media.spatial_merge_size
        lengths = {
            ids.audio: [audio_tokens(frames) for frames in media.audio_lengths],
            ids.image: [grid_tokens(grid, merge) for grid in media.image_grids],
            ids.video: [grid_tokens(grid, merge) for grid in media.video_grids],
        }
        if any(token_ids.count(token) != len(counts) for token, counts in lengths.items()):
            raise ModelRefused("the model's chat template has no place for media in one of these messages", param="messages")
        token_ids = expand(token_ids, lengths)
        limit = self.config.thinker.text.max_positions
        if len(token_ids) >= limit:
            raise ModelRefused(f"the prompt has {len(token_ids)} tokens; the model takes at most {limit - 1}", param="messages")
        user = user_turns(token_ids, self.config.ids)
        if sum(token_ids[position] in ids.placeholders for position in user) != sum(map(sum, lengths.values())):
            raise ModelRefused("audio, images and videos are taken in user messages only", param="messages")
        return Prepared(token_ids, media, features, user)

    def _features(
        self, parts: Sequence[MediaPart], tensors: Mapping[str, torch.Tensor]
    ) -> tuple[Media, dict[str, torch.Tensor]]:
        """Sizes and encoder inputs of all media, each kind in the order of its parts."""
        missing = [part.index for part in parts if f"media{part.index}" not in tensors]
        if missing:
            raise InvalidRequest(f"media {missing[0]} of the conversation was not sent", param="messages")
        of_kind = {
            kind: [tensors[f"media{part.index}"].numpy() for part in parts if part.kind == kind]
            for kind in ("audio", "image", "video")
        }
        audio_lengths, features = self._audio(of_kind["audio"])
        images = [self.vision.image(decode_image(data.tobytes())) for data in of_kind["image"]]
        videos = [self.vision.video(decode_video(data.tobytes(), self.vision.sample_frames)) for data in of_kind["video"]]
        if images:
            features["pixel_values"] = torch.cat([patches for patches, _ in images])
        if videos:
            features["pixel_values_videos"] = torch.cat([patches for patches, _ in videos])
        grids: tuple[Grid, ...] = tuple(grid for _, grid in videos)
        seconds = self.vision.config.temporal_patch_size / VIDEO_FPS
        return Media(audio_lengths, tuple(grid for _, grid in images), grids, (seconds,) * len(grids)), features

    def _audio(self, samples: list[np.ndarray]) -> tuple[tuple[int, ...], dict[str, torch.Tensor]]:
        """Mel frames of each audio and all of them in a row. Extracted in one call: an audio's last frames depend on its padding."""
        if not samples:
            return (), {}
        if any(len(audio) < MIN_AUDIO_SAMPLES for audio in samples):
            raise UndecodableMedia("an audio is shorter than 25 ms", param="messages")
        if not all(np.isfinite(audio).all() for audio in samples):  # a float WAV may hold anything
            raise UndecodableMedia("an audio holds samples that are not numbers", param="messages")
        mel = self.mel(
            samples,
            sampling_rate=AUDIO_RATE,
            padding="longest",
            truncation=False,
            return_attention_mask=True,
            return_tensors="pt",
        )
        frames = [int(count) for count in mel["attention_mask"].sum(-1)]
        features = torch.cat([row[:, :count] for row, count in zip(mel["input_features"], frames, strict=True)], dim=1)
        return tuple(frames), {"input_features": features}


def _mel(section: Section) -> WhisperFeatureExtractor:
    if section.get(int, "sampling_rate") != AUDIO_RATE:
        raise CheckpointError(f"{section.file}: sampling_rate must be {AUDIO_RATE}")
    return WhisperFeatureExtractor(  # type: ignore[no-untyped-call]
        feature_size=section.get(int, "feature_size"),
        sampling_rate=AUDIO_RATE,
        hop_length=section.get(int, "hop_length"),
        chunk_length=section.get(int, "chunk_length"),
        n_fft=section.get(int, "n_fft"),
        padding_value=section.get(float, "padding_value"),
        dither=section.get_or(0.0, "dither"),
        return_attention_mask=True,
    )
