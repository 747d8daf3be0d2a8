"""Who asks: listeners in a closed loop, or requests as they come. The same ones for the same seed."""

from __future__ import annotations

import dataclasses
import random

from bench.simulation.answers import Answer
from bench.simulation.server import Server
from bench.simulation.step_times import Profile
from omni_bus import events

SPREAD_S = 12.0  # over which listeners of a closed loop begin, about an answer and a pause: they do not all ask at once
TURNS = 8  # of a conversation, after which its listener begins a new one


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """streams: listeners who each ask, hear, pause and ask again; or rate: requests a second, Poisson. One of the two.

    hear: listeners ask again once they have heard the answer to its end, and paused `pause_s` on average (exponential); otherwise at once when it has come,
    as `omni-bus bench` does. sessions: a listener's next question comes with all that was said before, at most TURNS turns.
    varied: answers are of different lengths (uniform, 0.5 to 1.5 times the profile's), as those of people are.
    """

    streams: int = 0
    rate: float = 0.0
    hear: bool = True
    pause_s: float = 2.0
    sessions: bool = False
    affinity: bool = True  # whether the broker is told which session a request belongs to
    varied: bool = True
    count: int = 0  # requests in all; 0: as many as the time allows


class Listeners:
    def __init__(self, load: Load, profile: Profile, seed: int, until: float) -> None:
        """until: seconds after which nobody asks any more."""
        self.load, self.profile = load, profile
        self.answers: list[Answer] = []
        self.refused = 0
        self._draw = random.Random(f"{seed} listeners")
        self._until = until
        self._turn: dict[str, tuple[int, int]] = {}  # session → (turns, positions of the conversation)
        self._conversation: dict[int, int] = {}  # listener → which one it has
        self._owner: dict[int, int] = {}  # answer → listener
        self.server: Server

    def begin(self, server: Server) -> None:
        self.server = server
        clock = server.clock
        for listener in range(self.load.streams):
            clock.at(self._draw.uniform(0.0, SPREAD_S if self.load.hear else 0.0), self._ask, listener)
        if self.load.rate:
            clock.at(self._draw.expovariate(self.load.rate), self._arrive, 0)

    def ended(self, answer: Answer, event: events.Event) -> None:
        """What the server calls."""
        self._owner_next(answer, event)

    def _arrive(self, number: int) -> None:
        self._ask(-1 - number)
        self.server.clock.at(self.server.clock.now + self._draw.expovariate(self.load.rate), self._arrive, number + 1)

    def _ask(self, listener: int) -> None:
        if self.server.clock.now >= self._until or (self.load.count and len(self.answers) >= self.load.count):
            return
        profile, index = self.profile, len(self.answers)
        scale = self._draw.uniform(0.5, 1.5) if self.load.varied else 1.0
        tokens, frames = max(2, round(profile.text_tokens * scale)), max(2, round(profile.speech_frames * scale))
        session, before = "", 0
        if self.load.sessions:
            session = f"{listener}.{self._conversation.setdefault(listener, 0)}"
            before = self._turn.get(session, (0, 0))[1]
        answer = Answer(index, session, before + profile.prompt_tokens, tokens, frames, self.server.clock.now)
        self.answers.append(answer)
        self._owner[index] = listener
        options = events.RequestOptions(
            modalities=("text", "audio"), seed=index, affinity=session if self.load.affinity else ""
        )
        self.server.submit(answer, options)

    def _owner_next(self, answer: Answer, event: events.Event) -> None:
        listener, now = self._owner.pop(answer.index), self.server.clock.now
        if listener < 0:
            return
        if isinstance(event, events.RequestFailed):
            self.refused += 1
            wait = getattr(event.error, "retry_after_s", None) or 1.0
            self.server.clock.at(now + wait, self._ask, listener)
            return
        self._remember(listener, answer)
        if not self.load.hear:
            self._ask(listener)
            return
        heard_out = answer.asked + _heard_out_s(answer)
        pause = self._draw.expovariate(1 / self.load.pause_s) if self.load.pause_s else 0.0
        self.server.clock.at(max(now, heard_out) + pause, self._ask, listener)

    def _remember(self, listener: int, answer: Answer) -> None:
        if not answer.session:
            return
        turns = self._turn.pop(answer.session, (0, 0))[0] + 1
        if turns >= TURNS:
            self._conversation[listener] += 1
        else:
            self._turn[answer.session] = (turns, answer.prompt + answer.tokens)


def _heard_out_s(answer: Answer) -> float:
    """When the listener has heard it all, since it asked."""
    played_until = 0.0
    for arrival, length in answer.packets:
        played_until = max(played_until, arrival) + length
    return played_until
