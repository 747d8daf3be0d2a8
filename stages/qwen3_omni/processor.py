"""The processor stage: messages and media in, prompt tokens and the encoders' input features out. On the CPU, a piece at a time."""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from collections.abc import Generator, Iterable, Mapping

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
    WokenByEvents,
)
from omni_bus.stages.media import decode_image, probe_video, read_frames
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
MAX_AMPLITUDE = 1e6  # full scale is 1; the power of much larger samples leaves the range of float32
THINKER = "processor->thinker"
TALKER = "processor->talker"


@dataclasses.dataclass(slots=True)
class _Job:
    request: StageRequest
    chunk: Chunk | None = None
    work: Generator[None, None, Prepared] | None = None
    paused: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Prepared:
    """A prompt as both readers get it. `tensors` as in ModelInputs; `user_positions`: what the Talker reads of `token_ids`."""

    token_ids: list[int]
    media: Media
    tensors: dict[str, torch.Tensor]
    user_positions: list[int]


class ProcessorStage(WokenByEvents):
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
        """The next request in turn that can be worked on; those that were cancelled are dropped from the queue on the way."""
        while self._ready and self._ready[0] not in self._jobs:
            self._ready.popleft()
        return next((job for request in self._ready if (job := self._jobs.get(request)) and not job.paused), None)

    def has_work(self) -> bool:
        return self._next() is not None

    def step(self) -> Iterable[Emission]:
        """One piece of one request's media, or its text; requests take turns, so a long video holds up nobody's text."""
        job = self._next()
        if job is None:
            return []
        request = job.request.id
        self._ready.remove(request)
        assert job.chunk is not None and isinstance(job.chunk.payload, ChatInput)
        try:
            if job.work is None:
                job.work = self._processor.prepare_in_steps(job.chunk.payload, job.chunk.tensors)
            next(job.work)
        except StopIteration as done:
            del self._jobs[request]
            return self._emissions(job.request, job.chunk.edge, done.value)
        except OmniBusError as error:
            del self._jobs[request]
            return [StageError(request, error.info())]
        except Exception as error:  # a request that breaks its own preparation must not fail the others in this stage
            log.exception("request %d: preparing the prompt failed", request)
            del self._jobs[request]
            return [StageError(request, StageFailed(f"the prompt could not be prepared ({type(error).__name__})").info())]
        self._ready.append(request)
        return []

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
        """The whole work at once. OmniBusError refuses a conversation that the model cannot take."""
        work = self.prepare_in_steps(chat, tensors)
        while True:
            try:
                next(work)
            except StopIteration as done:
                prepared: Prepared = done.value
                return prepared

    def prepare_in_steps(self, chat: ChatInput, tensors: Mapping[str, torch.Tensor]) -> Generator[None, None, Prepared]:
        """The same, with a pause behind each picture and each frame taken of a video: none takes long."""
        if not chat.messages:
            raise ModelRefused("the conversation is empty; send at least one message", param="messages")
        token_ids = self.encoder.encode(chat.messages, chat.tools)
        self._check_length(len(token_ids))
        parts = [part for message in chat.messages for part in message.parts if isinstance(part, MediaPart)]
        missing = [part.index for part in parts if f"media{part.index}" not in tensors]
        if missing:
            raise InvalidRequest(f"media {missing[0]} of the conversation was not sent", param="messages")

        def of_kind(kind: str) -> list[np.ndarray]:
            return [tensors[f"media{part.index}"].numpy() for part in parts if part.kind == kind]

        audio_lengths, features = self._audio(of_kind("audio"))
        images, image_grids = yield from self._images(of_kind("image"))
        videos, video_grids = yield from self._videos(of_kind("video"))
        if images:
            features["pixel_values"] = torch.cat(images)
        if videos:
            features["pixel_values_videos"] = torch.cat(videos)
        seconds = self.vision.config.temporal_patch_size / VIDEO_FPS
        media = Media(audio_lengths, tuple(image_grids), tuple(video_grids), (seconds,) * len(video_grids))
        return self._place(token_ids, media, features)

    def _place(self, token_ids: list[int], media: Media, features: dict[str, torch.Tensor]) -> Prepared:
        """Placeholders repeated to their media's lengths."""
        ids = self.config.thinker.media
        lengths = {
            ids.audio: [audio_tokens(frames) for frames in media.audio_lengths],
            ids.image: [self._tokens(grid) for grid in media.image_grids],
            ids.video: [self._tokens(grid) for grid in media.video_grids],
        }
        if any(token_ids.count(token) != len(counts) for token, counts in lengths.items()):
            raise ModelRefused("the model's chat template has no place for media in one of these messages", param="messages")
        token_ids = expand(token_ids, lengths)
        self._check_length(len(token_ids))
        user = user_turns(token_ids, self.config.ids)
        if sum(token_ids[position] in ids.placeholders for position in user) != sum(map(sum, lengths.values())):
            raise ModelRefused("audio, images and videos are taken in user messages only", param="messages")
        return Prepared(token_ids, media, features, user)

    def _tokens(self, grid: Grid) -> int:
        return grid_tokens(grid, self.config.thinker.media.spatial_merge_size)

    def _check_length(self, tokens: int) -> None:
        limit = self.config.thinker.text.max_positions
        if tokens >= limit:
            raise ModelRefused(f"the prompt has {tokens} tokens; the model takes at most {limit - 1}", param="messages")

    def _images(self, encoded: list[np.ndarray]) -> Generator[None, None, tuple[list[torch.Tensor], list[Grid]]]:
        patches, grids = [], []
        for data in encoded:
            made, grid = self.vision.image(decode_image(data.tobytes()))
            patches.append(made)
            grids.append(grid)
            self._check_length(sum(map(self._tokens, grids)))
            yield
        return patches, grids

    def _videos(self, encoded: list[np.ndarray]) -> Generator[None, None, tuple[list[torch.Tensor], list[Grid]]]:
        """A video that is too long for the model is refused before a frame of it is decoded."""
        patches, grids = [], []
        for array in encoded:
            data = array.tobytes()
            info = probe_video(data)
            indices, grid = self.vision.plan_video(info)
            grids.append(grid)
            self._check_length(sum(map(self._tokens, grids)))
            frames = []
            for pixels in read_frames(data, info, indices):
                frames.append(self.vision.frame(pixels, grid))
                yield
            patches.append(self.vision.video(frames, grid))
        return patches, grids

    def _audio(self, samples: list[np.ndarray]) -> tuple[tuple[int, ...], dict[str, torch.Tensor]]:
        """Mel frames of each audio and all of them in a row. Extracted in one call: an audio's last frames depend on its padding."""
        if not samples:
            return (), {}
        if any(len(audio) < MIN_AUDIO_SAMPLES for audio in samples):
            raise UndecodableMedia("an audio is shorter than 25 ms", param="messages")
        # A float WAV may hold anything; NaN fails the comparison too.
        if not all(np.abs(audio).max() <= MAX_AMPLITUDE for audio in samples):
            raise UndecodableMedia("an audio holds samples that are no numbers, or far beyond full scale", param="messages")
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
