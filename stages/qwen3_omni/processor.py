"""The processor stage: messages and media in, prompt tokens and the encoders' input features out. On the CPU, a piece at a time."""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from collections.abc import Generator, Iterable, Mapping

import numpy as np
import torch

from omni_bus.errors import InvalidRequest, ModelRefused, OmniBusError, PromptTooLong
from omni_bus.payloads import ChatInput, MediaPart
from omni_bus.stages import failures
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
from omni_bus.stages.qwen3_omni.checkpoint_files import resolve
from omni_bus.stages.qwen3_omni.config import OmniConfig, read_config
from omni_bus.stages.qwen3_omni.encoder_units import CHUNK_FRAMES
from omni_bus.stages.qwen3_omni.json_fields import Section, read_json
from omni_bus.stages.qwen3_omni.media_input import Audios, MediaInput, Seen, mel_extractor
from omni_bus.stages.qwen3_omni.options import ProcessorOptions
from omni_bus.stages.qwen3_omni.payloads import Grid, Media, MediaContent, ModelInputs, TalkerPrompt
from omni_bus.stages.qwen3_omni.prompt import PromptEncoder, expand
from omni_bus.stages.qwen3_omni.rope_index import audio_tokens, grid_tokens
from omni_bus.stages.qwen3_omni.turns import user_turns
from omni_bus.stages.qwen3_omni.vision_input import VIDEO_FPS, VisionInput, VisionInputConfig

log = logging.getLogger(__name__)

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
    """A prompt as both readers get it: `tensors` as in ModelInputs; `user_positions`: what the Talker reads of its token ids."""

    inputs: ModelInputs
    tensors: dict[str, torch.Tensor]
    user_positions: list[int]

    @property
    def token_ids(self) -> list[int]:
        return list(self.inputs.token_ids)

    @property
    def media(self) -> Media:
        return self.inputs.media


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
            MediaInput(
                mel_extractor(Section(preprocessor, "", "preprocessor_config.json")),
                VisionInput(VisionInputConfig.parse(preprocessor, read_json(video) if video.is_file() else {})),
                window=config.thinker.audio["n_window_infer"],
                kept_bytes=ctx.options(ProcessorOptions).media_cache_mb << 20,
            ),
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
        """The next request in turn that can be worked on, one that only prepares behind all others; those that were cancelled are
        dropped from the queue on the way."""
        while self._ready and self._ready[0] not in self._jobs:
            self._ready.popleft()
        first = None
        for request in self._ready:
            job = self._jobs.get(request)
            if job is None or job.paused:
                continue
            if not job.request.options.prepare:
                return job
            first = first or job
        return first

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
                job.work = self._processor.prepare_in_steps(
                    job.chunk.payload, job.chunk.tensors, unfinished=job.request.options.prepare
                )
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
            told = failures.for_client(error, f"the prompt could not be prepared ({type(error).__name__})")
            return [StageError(request, told.info())]
        self._ready.append(request)
        return []

    def _emissions(self, request: StageRequest, entry: str, prompt: Prepared) -> list[Emission]:
        out: list[Emission] = [Consumed(request.id, entry)]
        inputs = prompt.inputs
        out.append(Output(request.id, THINKER, inputs, prompt.tensors, last=True))
        if TALKER in request.outputs:
            user = TalkerPrompt(tuple(inputs.token_ids[position] for position in prompt.user_positions), inputs.media)
            out.append(Output(request.id, TALKER, user, last=True))
        out.append(Finished(request.id, {"prompt_tokens": len(inputs.token_ids)}))
        return out

    def stats(self) -> StageStats:
        return StageStats(waiting=len(self._jobs))


class Processor:
    """The work itself, without the stage around it."""

    def __init__(self, config: OmniConfig, encoder: PromptEncoder, media: MediaInput) -> None:
        self.config = config
        self.encoder = encoder
        self.media = media

    def prepare(self, chat: ChatInput, tensors: Mapping[str, torch.Tensor], *, unfinished: bool = False) -> Prepared:
        """The whole work at once. OmniBusError refuses a conversation that the model cannot take."""
        work = self.prepare_in_steps(chat, tensors, unfinished=unfinished)
        while True:
            try:
                next(work)
            except StopIteration as done:
                prepared: Prepared = done.value
                return prepared

    def prepare_in_steps(
        self, chat: ChatInput, tensors: Mapping[str, torch.Tensor], *, unfinished: bool = False
    ) -> Generator[None, None, Prepared]:
        """The same, with a pause behind each audio, each picture and each frame taken of a video: none takes long.

        unfinished: more of the conversation is still to come. Where its last message ends in a user's audio, the prompt is cut
        behind the part of that audio which will stay as it is.
        """
        if chat.messages:
            token_ids = self.encoder.encode(chat.messages, chat.tools)
        elif chat.say is not None:
            token_ids = list(self.encoder.opening)
        else:
            raise ModelRefused("the conversation is empty; send at least one message", param="messages")
        self._check_length(len(token_ids))
        parts = [part for message in chat.messages for part in message.parts if isinstance(part, MediaPart)]
        missing = [part.index for part in parts if f"media{part.index}" not in tensors]
        if missing:
            raise InvalidRequest(f"media {missing[0]} of the conversation was not sent", param="messages")

        def of_kind(kind: str) -> list[np.ndarray]:
            return [tensors[f"media{part.index}"].numpy() for part in parts if part.kind == kind]

        growing = unfinished and _ends_in_users_audio(chat)
        sounds = of_kind("audio")
        audios = (yield from self.media.audio(sounds, growing=growing)) if sounds else Audios([], CHUNK_FRAMES)
        images = yield from self._images(of_kind("image"))
        videos = yield from self._videos(of_kind("video"))
        features: dict[str, torch.Tensor] = {}
        if audios.heard:
            features["input_features"] = torch.cat([one.features for one in audios.heard], dim=1)
        if images:
            features["pixel_values"] = torch.cat([one.patches for one in images])
        if videos:
            features["pixel_values_videos"] = torch.cat([one.patches for one in videos])
        seconds = self.media.vision.config.temporal_patch_size / VIDEO_FPS
        media = Media(
            tuple(one.frames for one in audios.heard),
            tuple(one.grid for one in images),
            tuple(one.grid for one in videos),
            (seconds,) * len(videos),
        )
        token_ids, user = self._place(token_ids, media, growing=growing)
        content = MediaContent(*(tuple(one.digests for one in kind) for kind in (audios.heard, images, videos)))
        say = None if chat.say is None else tuple(self._given_answer(chat.say))
        return Prepared(ModelInputs(tuple(token_ids), media, content, audios.chunk_width, say), features, user)

    def _given_answer(self, text: str) -> list[int]:
        token_ids = self.encoder.encode_answer(text)
        limit = self.config.thinker.text.max_positions - 1
        if len(token_ids) > limit:
            raise ModelRefused(f"the text to speak has {len(token_ids)} tokens; the model takes at most {limit}", param="input")
        return token_ids

    def _place(self, token_ids: list[int], media: Media, *, growing: bool) -> tuple[list[int], list[int]]:
        """Placeholders repeated to their media's lengths, and which of the ids the Talker reads. With `growing` the last audio is
        the prompt's end; its length may be missing, which is none."""
        ids = self.config.thinker.media
        lengths = {
            ids.audio: [audio_tokens(frames) for frames in media.audio_lengths],
            ids.image: [self._tokens(grid) for grid in media.image_grids],
            ids.video: [self._tokens(grid) for grid in media.video_grids],
        }
        if growing and ids.audio in token_ids:
            last = len(token_ids) - token_ids[::-1].index(ids.audio)
            token_ids = token_ids[:last]
            lengths[ids.audio] += [0] * (token_ids.count(ids.audio) - len(lengths[ids.audio]))
        if any(token_ids.count(token) != len(counts) for token, counts in lengths.items()):
            raise ModelRefused("the model's chat template has no place for media in one of these messages", param="messages")
        token_ids = expand(token_ids, lengths)
        self._check_length(len(token_ids))
        user = user_turns(token_ids, self.config.ids)
        if sum(token_ids[position] in ids.placeholders for position in user) != sum(map(sum, lengths.values())):
            raise ModelRefused("audio, images and videos are taken in user messages only", param="messages")
        return token_ids, user

    def _tokens(self, grid: Grid) -> int:
        return grid_tokens(grid, self.config.thinker.media.spatial_merge_size)

    def _check_length(self, tokens: int) -> None:
        limit = self.config.thinker.text.max_positions
        if tokens >= limit:
            raise PromptTooLong(f"the prompt has {tokens} tokens; the model takes at most {limit - 1}", param="messages")

    def _images(self, encoded: list[np.ndarray]) -> Generator[None, None, list[Seen]]:
        seen: list[Seen] = []
        for data in encoded:
            seen.append(self.media.image(data.tobytes()))
            self._check_length(sum(self._tokens(one.grid) for one in seen))
            yield
        return seen

    def _videos(self, encoded: list[np.ndarray]) -> Generator[None, None, list[Seen]]:
        """A video that is too long for the model is refused before a frame of it is decoded."""
        seen: list[Seen] = []
        tokens = 0
        for array in encoded:
            data = array.tobytes()
            tokens += self._tokens(self.media.plan_video(data))
            self._check_length(tokens)
            seen.append((yield from self.media.video(data)))
        return seen


def _ends_in_users_audio(chat: ChatInput) -> bool:
    if not chat.messages or chat.messages[-1].role != "user" or not chat.messages[-1].parts:
        return False
    last = chat.messages[-1].parts[-1]
    return isinstance(last, MediaPart) and last.kind == "audio"
