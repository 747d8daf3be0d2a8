"""What a session's prompts are made of: its conversation, without what the model has no room for, and of answers only what was heard."""

from __future__ import annotations

from collections.abc import Mapping

from omni_bus.api.voice.conversation import Conversation
from omni_bus.api.voice.items import Item
from omni_bus.api.voice.pacing import PlaybackClock


class History:
    """conversation: all of it, as the client sees it. clock: of the audio that its answers sent. Times are of time.monotonic.

    What is noted here of an item goes with the item: `forget`.
    """

    def __init__(self, conversation: Conversation) -> None:
        self.conversation = conversation
        self.clock = PlaybackClock()
        self._left_out: set[str] = set()  # items that no prompt has any more
        self._heard_ms: dict[str, float] = {}  # answers that were cut short → how much of them can have been played

    @property
    def items(self) -> list[Item]:
        """Those that prompts have."""
        return [item for item in self.conversation.items if item.id not in self._left_out]

    @property
    def heard_ms(self) -> Mapping[str, float]:
        """Of answers that were cut short, milliseconds that count as heard."""
        return self._heard_ms

    def leave_out_older_half(self) -> bool:
        """Of what was said, not of what instructs, from now on: so that the next turns need not try again. False where too little is left."""
        said = [item for item in self.items if item.role != "system" and item.status != "in_progress"]
        if len(said) < 2:
            return False
        self._left_out.update(item.id for item in said[: (len(said) + 1) // 2])
        return True

    def truncate(self, item_id: str, content_index: int, audio_end_ms: int) -> None:
        """The client says where an answer was cut. Raises ConversationError."""
        self.conversation.truncate(item_id, content_index, audio_end_ms)
        self._heard_ms.pop(item_id, None)  # the client knows better

    def report_played(self, item_id: str, played_ms: float, now: float) -> None:
        """The client has played so much of an answer: of one that was cut short, just this counts as heard."""
        played_ms = min(played_ms, self.clock.sent_ms(item_id))
        if item_id in self._heard_ms:
            self._heard_ms[item_id] = played_ms
        else:
            self.clock.played(item_id, played_ms, now)

    def ended_early(self, item_id: str) -> None:
        """No more of that answer is sent; what was sent may be played to its end."""
        if item_id in self.conversation:
            self._heard_ms.setdefault(item_id, self.clock.sent_ms(item_id))

    def silenced(self, speaking: Item | None, now: float) -> dict[str, float]:
        """Nothing more is played. Returns the answers that were not heard to their end, `speaking` among them → milliseconds heard.

        How much was heard is our clock's guess until the client tells what it has played, or truncates the answer itself.
        """
        unheard = self.clock.unheard(now)
        if speaking is not None:
            unheard.setdefault(speaking.id, self.clock.sent_ms(speaking.id))
        for item_id, played_ms in unheard.items():
            unheard[item_id] = min(played_ms, self._heard_ms.get(item_id, played_ms))
            if item_id in self.conversation:
                self._heard_ms[item_id] = unheard[item_id]
        self.clock.cleared(now)
        return unheard

    def forget(self, item: Item) -> None:
        """The item is no longer part of the conversation."""
        self._heard_ms.pop(item.id, None)
        self._left_out.discard(item.id)
