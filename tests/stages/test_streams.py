"""Who gets which stream of a card, where torch deals out 32 of them again and again. The card is a stand-in: only handles matter."""

from __future__ import annotations

import itertools

import pytest
import torch

from omni_bus.stages import streams


class User:
    """Of a stream."""


@pytest.fixture(autouse=True)
def dealt(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = itertools.cycle(range(1000, 1032))

    class Stream:
        def __init__(self, device: str) -> None:
            self.cuda_stream = next(numbers)

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(streams, "_taken", set())


def test_no_two_users_have_one_stream_however_many_came_and_went() -> None:
    stays = User()
    own = streams.take_stream("cuda:0", stays).cuda_stream
    for _ in range(100):
        passing = [User() for _ in range(4)]
        taken = [streams.take_stream("cuda:0", user).cuda_stream for user in passing]
        assert len({own, *taken}) == 5


def test_the_33rd_user_is_refused_until_one_has_ended() -> None:
    users = [User() for _ in range(32)]
    assert len({streams.take_stream("cuda:0", user).cuda_stream for user in users}) == 32
    late = User()
    with pytest.raises(RuntimeError, match="every stream of the card has a user"):
        streams.take_stream("cuda:0", late)
    users.pop()
    streams.take_stream("cuda:0", late)
