"""Block keys: equal exactly where contents and positions are, from the beginning of the row on."""

from __future__ import annotations

import random

import pytest
import torch

from omni_bus.events import RequestOptions
from omni_bus.sampling import SamplingParams
from omni_bus.stages.ar.block_keys import BlockKeys
from omni_bus.stages.ar.program import Inputs, Row
from omni_bus.stages.contract import StageRequest

SIZE = 4


def make_row() -> Row:
    request = StageRequest(id=1, options=RequestOptions(), sampling=SamplingParams(), inputs=("in",), outputs=(), deadline=1e9)
    return Row(request, None, keys=BlockKeys(SIZE))


def plain(count: int, begin: int = 0) -> torch.Tensor:
    return torch.arange(begin, begin + count).expand(3, -1)


def keys_of(content: list[int], positions: torch.Tensor | None = None) -> list[bytes]:
    keys = BlockKeys(SIZE)
    keys.extend(plain(len(content)) if positions is None else positions, content)
    return keys.keys


def test_the_cuts_between_appends_do_not_matter():
    rng = random.Random(1)
    content = [rng.randrange(1 << 256) for _ in range(41)]
    expected = keys_of(content)
    assert len(expected) == len(set(expected)) == 10
    for _ in range(50):
        keys, at = BlockKeys(SIZE), 0
        while at < len(content):
            count = rng.randint(1, 9)
            if rng.random() < 0.4:
                keys.extend_one(at, content[at])
                at += 1
            else:
                part = content[at : at + count]
                keys.extend(plain(len(part), at), part)
                at += len(part)
        assert keys.keys == expected


@pytest.mark.parametrize("changed", range(12))
def test_what_differs_at_one_position_differs_in_its_block_and_all_behind_it(changed):
    content = list(range(12))
    other = [*content[:changed], 99, *content[changed + 1 :]]
    before = changed // SIZE
    assert keys_of(content)[:before] == keys_of(other)[:before]
    assert not set(keys_of(content)[before:]) & set(keys_of(other)[before:])
    for axis in range(3):
        positions = plain(12).clone()
        positions[axis, changed] += 1
        assert keys_of(content)[:before] == keys_of(content, positions)[:before]
        assert not set(keys_of(content)[before:]) & set(keys_of(content, positions)[before:])


def test_a_content_of_many_bytes_is_not_a_row_of_small_ones():
    assert keys_of([1, 0, 0, 0]) != keys_of([1 << 8, 0, 0, 0])
    assert keys_of([(1 << 64) + 1, 0, 0, 0]) != keys_of([1, 1, 0, 0])
    with pytest.raises(OverflowError):
        keys_of([1 << 256, 0, 0, 0])


def test_tokens_have_the_same_keys_as_ids_and_as_embeddings_with_content():
    ids = list(range(20, 31))
    told = make_row()
    told.append(Inputs(plain(11), token_ids=ids))
    spoken = make_row()
    spoken.append(Inputs(plain(5), token_ids=ids[:5]))
    for token in ids[5:9]:
        spoken.append_text(token_ids=[token])
    spoken.append_text(token_ids=ids[9:])
    embedded = make_row()
    embedded.append(Inputs(plain(11), embeds=torch.zeros(11, 8), content=ids))
    assert told.keys is not None and spoken.keys is not None and embedded.keys is not None
    assert told.keys.keys == spoken.keys.keys == embedded.keys.keys == keys_of(ids)


def test_behind_embeddings_without_content_no_block_has_a_key():
    row = make_row()
    assert row.keys is not None and row.keys.empty
    row.append(Inputs(plain(6), token_ids=list(range(6))))
    assert not row.keys.empty
    row.append_text(embeds=torch.zeros(1, 8))
    row.append_text(token_ids=list(range(20)))
    row.append_text(token_ids=[3])
    assert row.keys.keys == keys_of(list(range(4)))
