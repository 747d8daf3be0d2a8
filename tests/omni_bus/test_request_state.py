"""The state machine of a request, and the arithmetic of one edge."""

from __future__ import annotations

import itertools

import pytest

from omni_bus.errors import OmniBusError, ProtocolViolation, SequenceDuplicate, SequenceGap
from omni_bus.events import RequestOptions
from omni_bus.request import Edge, Request, RequestState, change_state

LEGAL = {
    ("queued", "running"), ("queued", "ended"), ("running", "cancelling"), ("running", "failing"), ("running", "ended"),
    ("cancelling", "ended"), ("failing", "ended"),
}  # fmt: skip


def request(state: RequestState) -> Request:
    entry = Edge("client->a", "client", "a", 4)
    return Request(
        id=1, client=b"c", ticket=1, label="", options=RequestOptions(), stages=("a",), edges={entry.name: entry},
        entry=entry, arrived=0.0, deadline=1.0, retries=0, state=state,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("before", "after"), list(itertools.product(RequestState, RequestState)), ids=lambda state: state.value
)
def test_only_legal_transitions_happen(before: RequestState, after: RequestState) -> None:
    subject = request(before)
    if (before.value, after.value) in LEGAL:
        change_state(subject, after)
        assert subject.state is after
    else:
        with pytest.raises(AssertionError):
            change_state(subject, after)
        assert subject.state is before


def edge(**fields: int | bool) -> Edge:
    made = Edge("a->b", "a", "b", credits=2)
    for name, value in fields.items():
        object.__setattr__(made, name, value)
    return made


@pytest.mark.parametrize(
    ("fields", "seq", "error"),
    [
        ({}, 0, None),
        ({}, 1, SequenceGap),
        ({"next_seq": 1}, 0, SequenceDuplicate),
        ({"next_seq": 1, "closed": True}, 0, SequenceDuplicate),
        ({"next_seq": 1, "closed": True}, 1, ProtocolViolation),
        ({"next_seq": 1}, 1, None),
        ({"next_seq": 2}, 2, ProtocolViolation),
        ({"next_seq": 2, "credited": 1}, 2, None),
        ({"next_seq": 0}, -1, SequenceDuplicate),
    ],
)
def test_an_edge_accepts_the_next_chunk_only(fields: dict[str, int], seq: int, error: type[OmniBusError] | None) -> None:
    subject = edge(**fields)
    if error is None:
        subject.accept(seq, last=True)
        assert (subject.next_seq, subject.closed) == (seq + 1, True)
    else:
        with pytest.raises(error):
            subject.accept(seq, last=False)
        assert subject == edge(**fields)


@pytest.mark.parametrize("count", [-1, 0, 3])
def test_an_edge_takes_back_no_more_than_it_sent(count: int) -> None:
    with pytest.raises(ProtocolViolation):
        edge(next_seq=2).consume(count)


def test_credit_given_before_a_retry_is_not_given_again() -> None:
    before = edge(next_seq=3, consumed=2, credited=2)
    again = edge()
    again.resume(before)
    assert [again.consume(1) for _ in range(3)] == [0, 0, 1]
    assert again.unconsumed == 0
