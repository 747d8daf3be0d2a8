"""A session under many clients' wishes in random order: whatever comes between, what it tells has one grammar, and nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
from collections.abc import Awaitable, Callable

import pytest

from omni_bus.api.voice import events
from omni_bus.api.voice.events import SessionEvent
from omni_bus.api.voice.items import InputImage, InputText, Item
from omni_bus.api.voice.settings import ResponseWish, Transcription
from omni_bus.errors import OmniBusError, PromptTooLong, StageFailed, UndecodableMedia
from tests.api.voice.conftest import Seen, StartSession
from tests.support.scripted_bus import FOREVER, Script, audio, heard, text

TOOL = {"type": "function", "name": "look", "parameters": {"type": "object"}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"city": "Paris"}}\n</tool_call>'
PIECE = b"\x01\x00" * 600  # 25 ms
WISHES = 120  # of one session


PIECES: dict[type[SessionEvent], type[SessionEvent]] = {  # what ends → its deltas
    events.OutputTextDone: events.OutputTextDelta,
    events.OutputTranscriptDone: events.OutputTranscriptDelta,
    events.OutputAudioDone: events.OutputAudioDelta,
    events.CallArgumentsDone: events.CallArgumentsDelta,
    events.InputTranscriptDone: events.InputTranscriptDelta,
    events.InputTranscriptFailed: events.InputTranscriptDelta,
}


class Grammar:
    """Reads the events of one session as a client does: what is out of order, twice or about something that is gone is an error."""

    def __init__(self) -> None:
        self.items: list[str] = []  # the conversation, as it was told
        self.open: set[str] = set()  # items that were added and are not done
        self.running: dict[str, events.ResponseState] = {}
        self.ended: set[str] = set()
        self.outputs: dict[str, list[str]] = {}  # response → its items so far
        self.writing: dict[str, str] = {}  # response → the item that is open
        self.silenced: set[str] = set()
        self.told: set[tuple[type[SessionEvent], str]] = set()  # kinds of deltas that are complete, by item

    def read(self, event: SessionEvent) -> None:
        self._read_order_in_part(event)
        match event:
            case events.ItemAdded(item, previous):
                assert item.id not in self.items
                at = 0 if previous is None else self.items.index(previous) + 1
                self.items.insert(at, item.id)
                self.open.add(item.id)
            case events.ItemDone(item, previous):
                at = self.items.index(item.id)
                assert previous == (self.items[at - 1] if at else None)
                assert item.status != "in_progress"
                self.open.remove(item.id)
            case events.ItemDeleted(item_id):
                self.items.remove(item_id)
                self.open.discard(item_id)
            case events.ResponseCreated(response):
                assert response.id not in self.running and response.id not in self.ended
                if response.conversation_id is not None:
                    assert all(other.conversation_id is None for other in self.running.values()), (
                        "two of the conversation's own"
                    )
                self.running[response.id] = response
                self.outputs[response.id] = []
            case events.ResponseDone(response):
                del self.running[response.id]
                self.ended.add(response.id)
                assert response.id not in self.writing, "it ends with an item open"
                assert [item.id for item in response.output] == self.outputs[response.id]
                assert response.status != "in_progress" and response.usage is not None
                assert all(item.status != "in_progress" for item in response.output)
            case events.OutputItemAdded(response_id, index, item):
                assert response_id in self.running and response_id not in self.writing
                assert index == len(self.outputs[response_id])
                self.outputs[response_id].append(item.id)
                self.writing[response_id] = item.id
            case events.OutputItemDone(response_id, index, item):
                assert index == len(self.outputs[response_id]) - 1
                assert self.writing.pop(response_id) == item.id
            case events.InPart() | events.CallArgumentsDelta() | events.CallArgumentsDone():
                assert self.writing.get(event.response_id) == event.item_id
                assert not (isinstance(event, events.OutputAudioDelta) and event.item_id in self.silenced)
            case events.AnswerInterrupted(item_id):
                self.silenced.add(item_id)
            case events.InputTranscriptDone() | events.InputTranscriptDelta() | events.InputTranscriptFailed():
                assert event.item_id in self.items, "what was said in an item that is gone"

    def _read_order_in_part(self, event: SessionEvent) -> None:
        """No delta comes behind the end of what it is a delta of, and no part ends twice."""
        item_id = getattr(event, "item_id", "")
        if type(event) in PIECES.values():
            assert (type(event), item_id) not in self.told, "a delta behind its end"
        piece = PIECES.get(type(event))
        if piece is not None:
            assert (piece, item_id) not in self.told, "it ends twice"
            self.told.add((piece, item_id))


class Client:
    """Wishes at random, of one seed."""

    def __init__(self, seen: Seen, dice: random.Random) -> None:
        self.seen = seen
        self.session = seen.session
        self.dice = dice
        self.gates: list[asyncio.Event] = []

    @property
    def known(self) -> list[str]:
        return [item.id for item in self.session._conversation.items]

    def an_item(self) -> str:
        return self.dice.choice([*self.known, "nobody"])

    def a_message(self) -> Item:
        return Item.message("user", [InputText("hi")], item_id=self.dice.choice([None, None, "mine"]))

    def a_fetch(self) -> Callable[[], Awaitable[None]]:
        gate = asyncio.Event()
        self.gates.append(gate)
        wrong = self.dice.choice([None, UndecodableMedia("not there"), ValueError("a fault")])

        async def fetch() -> None:
            await gate.wait()
            if wrong is not None:
                raise wrong

        return fetch

    def a_wish(self) -> ResponseWish:
        wish = ResponseWish(settings=self.session.settings, in_conversation=self.dice.random() < 0.8)
        if self.dice.random() < 0.3:
            known = list(self.session._conversation.items)
            items = (*self.dice.sample(known, min(2, len(known))), Item.message("user", [InputText("now")]))
            fetch = self.a_fetch() if self.dice.random() < 0.5 else None
            wish = dataclasses.replace(wish, input=items, fetch=fetch)
        return wish

    def a_script(self) -> Script:
        dice = self.dice
        pieces = [text("Hello "), audio(PIECE, spoken=3), text("you."), audio(PIECE), audio(PIECE, spoken=10)]
        if dice.random() < 0.3:
            pieces = [*pieces[: dice.randrange(3)], *(text(part) for part in (CALL[:30], CALL[30:]))]
        if self.seen.services.model.pipeline.transcript_edge and dice.random() < 0.5:
            pieces.insert(0, heard("what was said", last=False))
        end = dice.choice(["good", "good", "good", "length", "failed", "too long", "fault", "forever"])
        wrong = {
            "failed": StageFailed("no"),
            "too long": PromptTooLong("no"),
            "fault": ValueError("a fault"),
            "forever": FOREVER,
        }
        if end in wrong:
            return [*pieces[: dice.randrange(len(pieces))], wrong[end]]
        return [*pieces, text("", "length" if end == "length" else "stop"), audio(PIECE), audio(b"", last=True)]

    async def one(self) -> None:
        session, dice = self.session, self.dice
        self.seen.bus.script = self.a_script()
        match dice.randrange(18):
            case 0 | 1:
                session.add_item(self.a_message(), dice.choice([None, "root", self.an_item()]))
            case 2:
                image = Item.message("user", [InputText("this"), InputImage(b"picture")])
                session.add_unfetched(image, dice.choice([None, self.an_item()]), self.a_fetch(), "mine")
            case 3 | 4 | 5:
                session.create_response(self.a_wish())
            case 6:
                session.cancel_response()
            case 7:
                session.cancel_response(dice.choice(["nobody", *self.running]))
            case 8:
                session.delete_item(self.an_item())
            case 9:
                session.truncate_item(self.an_item(), 0, dice.choice([0, 10, 30, 10_000]))
            case 10:
                session.interrupt("turn_detected")
            case 11:
                session.clear_output()
            case 12:
                await session.append_audio(b"\x02\x00" * dice.choice([0, 1, 2400, 12_000]))
            case 13:
                session.commit_audio()
            case 14:
                session.end_turn()
            case 15:
                session.answer_item(self.a_message())
            case 16:
                changed = dice.choice([{"speaks": False}, {"speaks": True}, {"tools": (TOOL,)}, {"tools": ()}])
                await session.configure(dataclasses.replace(session.settings, **changed))
            case 17 if self.gates:
                self.gates.pop(dice.randrange(len(self.gates))).set()
            case _:
                await session.retrieve_item(self.an_item())
        session.report_played(self.an_item(), dice.choice([0.0, 20.0, 1e9]))

    @property
    def running(self) -> list[str]:
        run = self.session._responses.own
        return [] if run is None else [run.id]


@pytest.mark.parametrize("seed", range(12))
async def test_whatever_is_wished_the_events_have_one_grammar(start: StartSession, seed: int) -> None:
    dice = random.Random(seed)
    transcription = Transcription() if seed % 3 else None
    ear = bool(seed % 2)
    seen = await start(
        ear=ear,
        voice_lead_s=600.0,
        session_history_s=2,
        session_buffer_s=2,
        settings={"transcription": transcription, "tools": (TOOL,) if seed % 4 else ()},
    )
    client = Client(seen, dice)
    for _ in range(WISHES):
        with contextlib.suppress(OmniBusError):  # a refusal: nothing has changed
            await client.one()
        for _ in range(dice.choice([0, 1, 3, 10, 40])):
            await asyncio.sleep(0)
        if dice.random() < 0.3:
            async with asyncio.timeout(30):
                await seen.session.drained()
    for gate in client.gates:
        gate.set()
    seen.session.interrupt("client_cancelled")
    for run in list(seen.session._responses._beside):
        run.cancel("client_cancelled")
    async with asyncio.timeout(30):
        await seen.session.drained()
        await seen.session._arrivals.have_ended(seen.session._conversation.items)
        await seen.session.drained()
    grammar = Grammar()
    for event in seen.events:
        grammar.read(event)
    assert not grammar.running and not grammar.writing and not grammar.open
    assert grammar.items == client.known, "what the client was told is what there is"
    async with asyncio.timeout(30):
        await seen.session.close()
    told = len(seen.events)
    assert all(stream.ended.is_set() or stream.cancelled.is_set() for stream in seen.bus.streams)
    assert not seen.session._responses._tasks and not seen.session._arrivals._tasks
    assert len(seen.events) == told


WHERE = ("resp", "item", 0, 0)
CALL_OF = ("resp", "item", 0, "call")
LATE: dict[str, tuple[SessionEvent, SessionEvent]] = {
    "text": (events.OutputTextDone(*WHERE, "Hi"), events.OutputTextDelta(*WHERE, "Hi")),
    "transcript": (events.OutputTranscriptDone(*WHERE, "Hi"), events.OutputTranscriptDelta(*WHERE, "Hi")),
    "audio": (events.OutputAudioDone(*WHERE), events.OutputAudioDelta(*WHERE, PIECE)),
    "arguments": (events.CallArgumentsDone(*CALL_OF, "look", "{}"), events.CallArgumentsDelta(*CALL_OF, "{}")),
    "heard": (events.InputTranscriptDone("item", 0, "Hi", 1.0), events.InputTranscriptDelta("item", 0, "Hi")),
}


@pytest.mark.parametrize("kind", LATE)
def test_the_grammar_has_no_delta_behind_its_end(kind: str) -> None:
    end, delta = LATE[kind]
    grammar = Grammar()
    grammar.items, grammar.writing = ["item"], {"resp": "item"}
    grammar.read(delta)
    grammar.read(end)
    with pytest.raises(AssertionError, match="a delta behind its end"):
        grammar.read(delta)
    with pytest.raises(AssertionError, match="it ends twice"):
        grammar.read(end)
