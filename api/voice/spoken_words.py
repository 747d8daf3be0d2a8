"""Which words of a spoken answer were said by a moment of its audio: by the model's marks, or by what speech takes."""

from __future__ import annotations

from omni_bus.api.voice.items import OutputAudio


def spoken_part(part: OutputAudio, audio_end_ms: float, *, finished: bool) -> None:
    """Cut `part`, in place, to the words said when `audio_end_ms` of its audio has been played.

    finished: its audio says the whole transcript. Otherwise the text runs ahead of the audio, and without marks the length of
    what is unsaid is estimated from it.
    """
    raise NotImplementedError
