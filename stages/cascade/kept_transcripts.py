"""What was heard lately, by the samples themselves: the audio in a conversation's history is not recognised again at each turn."""

from __future__ import annotations

import collections
import hashlib

import msgspec
import numpy

from omni_bus.payloads import TranscriptWish
from omni_bus.stages.cascade.recogniser import Heard


class KeptTranscripts:
    """The transcripts of the `most` pieces of audio that were asked for last."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._heard: collections.OrderedDict[bytes, Heard] = collections.OrderedDict()

    @staticmethod
    def key(audio: numpy.ndarray, wish: TranscriptWish) -> bytes | None:
        """Of audio, float32 [samples], heard in this way; None for one that comes out differently each time."""
        if wish.temperature > 0:
            return None
        digest = hashlib.sha256(msgspec.msgpack.encode(wish))
        digest.update(numpy.ascontiguousarray(audio).data)
        return digest.digest()

    def find(self, key: bytes | None) -> Heard | None:
        if key is None or key not in self._heard:
            return None
        self._heard.move_to_end(key)
        return self._heard[key]

    def keep(self, key: bytes | None, heard: Heard) -> None:
        if key is None:
            return
        self._heard[key] = heard
        self._heard.move_to_end(key)
        while len(self._heard) > self._most:
            self._heard.popitem(last=False)

    def __len__(self) -> int:
        return len(self._heard)
