"""What the edges between the stages of Qwen3-Omni carry. Tensors that travel beside a payload are named in its docstring."""

from __future__ import annotations

import msgspec

Grid = tuple[int, int, int]  # patches along time, height and width, before the spatial merge


class Media(msgspec.Struct, frozen=True):
    """Sizes of a prompt's media, each kind in the order of its placeholders."""

    audio_lengths: tuple[int, ...] = ()  # mel frames (10 ms each)
    image_grids: tuple[Grid, ...] = ()
    video_grids: tuple[Grid, ...] = ()
    video_seconds: tuple[float, ...] = ()  # seconds that one step of the time axis spans


Digests = tuple[tuple[bytes, ...], ...]


class MediaContent(msgspec.Struct, frozen=True):
    """Names of a prompt's media by content, a digest for each part that an encoder computes by itself: of each audio its windows,
    of each picture the whole, of each video the steps of its time axis. Equal digests are equal inputs of the encoder."""

    audios: Digests = ()
    images: Digests = ()
    videos: Digests = ()


class ModelInputs(msgspec.Struct, frozen=True):
    """processor → thinker, one chunk: the whole prompt.

    token_ids: the chat template's ids with every placeholder repeated to its media's length. Tensors, where there is such media:
    `input_features` float32 [128, mel frames of all audios in a row]; `pixel_values`, `pixel_values_videos` float32
    [patches, 3 * 2 * patch * patch]. chunk_width: mel frames to which the chunks of the audios are padded. say: the answer's
    tokens without the end token, where the client gave the answer itself.
    """

    token_ids: tuple[int, ...]
    media: Media = Media()
    content: MediaContent = MediaContent()
    chunk_width: int = 100
    say: tuple[int, ...] | None = None


class TalkerPrompt(msgspec.Struct, frozen=True):
    """processor → talker, one chunk: the user turns, which are all that the Talker reads of a prompt.

    token_ids: the ids of every user turn from `<|im_start|>` to the line end behind `<|im_end|>`, in order.
    """

    token_ids: tuple[int, ...]
    media: Media = Media()


class ThinkerTokens(msgspec.Struct, frozen=True):
    """thinker → talker: tokens the Thinker has decided, in order; none of them will be taken back.

    `last`: the final id of `token_ids` is the last token of the text (the end token, or the one at which the length was reached);
    it is never spoken. A stop string is left out, with the end token in its place.
    The first chunk carries tensor `placeholder_rows` [rows, hidden]: hidden states of the accept layer at the audio, image and
    video placeholders of the user turns, where the prompt has any.
    """

    token_ids: tuple[int, ...]
    last: bool = False


class CodecFrames(msgspec.Struct, frozen=True):
    """talker → code2wav: tensor `codes` int16 [count, groups]; an empty last chunk (count 0) has no tensor."""

    count: int
