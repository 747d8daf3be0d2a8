"""Every dtype and shape through every connector, and refs that no connector of ours made."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

import msgspec
import pytest
import torch

from omni_bus.connectors.base import DTYPES
from omni_bus.connectors.inline import InlineConnector
from omni_bus.connectors.select import INLINE_BYTES, Connectors
from omni_bus.errors import ProtocolViolation, StaleTensor, TooLarge
from omni_bus.events import EdgeRoute, TensorRef
from omni_bus.keys import KeyPair
from omni_bus.segments import SHM, boot_id
from tests.support.data_sockets import all_let_go, arrive, tcp_connector

LARGE = INLINE_BYTES // 4 + 1  # float32 elements that do not go inline


@dataclasses.dataclass
class Pair:
    sender: Connectors
    receiver: Connectors


@pytest.fixture
def pair() -> Iterator[Pair]:
    keys = KeyPair.new()
    pair = Pair(
        Connectors("pair", segment_bytes=1 << 20, limit=4 << 20, tcp=tcp_connector(keys, limit=4 << 20)),
        Connectors("pair", tcp=tcp_connector(keys)),
    )
    yield pair
    pair.sender.close()
    pair.receiver.close()
    assert not list(SHM.glob("omnibus-pair-*"))


def route(connector: str, pair: Pair | None = None) -> EdgeRoute:
    return EdgeRoute("a->b", connector, 8, "" if pair is None else pair.receiver.tcp.endpoint)


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.dtype, a.shape) == (b.dtype, b.shape) and _bits(a) == _bits(b)


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def some_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    count = torch.empty(shape, dtype=dtype).nbytes
    if dtype is torch.bool:
        return torch.randint(0, 2, shape).bool()
    return torch.randint(0, 256, (count,), dtype=torch.uint8).view(dtype).reshape(shape)


@pytest.mark.parametrize("connector", ["inline", "local", "shm", "tcp"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (7, 5), (300, 401)])
def test_every_dtype_comes_back_bit_for_bit(pair: Pair, connector: str, shape: tuple[int, ...]) -> None:
    receiver = pair.sender if connector == "local" else pair.receiver
    for name, dtype in DTYPES.items():
        tensor = some_tensor(dtype, shape)
        parcel = pair.sender.put(route(connector, pair), b"payload", {name: tensor})
        assert parcel is not None
        refs = tuple(msgspec.msgpack.decode(msgspec.msgpack.encode(ref), type=TensorRef) for ref in parcel.refs)
        assert refs[0].connector == (connector if tensor.nbytes > INLINE_BYTES else "inline")
        arrive(receiver, refs)
        back = receiver.get(refs, [bytes(frame) for frame in parcel.frames])[name]
        assert equal(back, tensor)
        pair.sender.release(refs)
    assert all_let_go(pair.sender)


@pytest.mark.parametrize("connector", ["inline", "shm", "tcp"])
def test_views_travel_by_value(pair: Pair, connector: str) -> None:
    base = torch.randn(400, 500)
    views = {
        "transposed": base.t(),
        "strided": base[::2, 1::2],
        "expanded": torch.randn(1, 500).expand(400, 500),
        "conjugate": torch.randn(300, 300, dtype=torch.complex64).conj(),
        "with gradient": torch.randn(400, 400, requires_grad=True),
        "a row of a big one": base[3],
    }
    for name, view in views.items():
        parcel = pair.sender.put(route(connector, pair), b"", {name: view})
        assert parcel is not None
        arrive(pair.receiver, parcel.refs)
        assert equal(pair.receiver.get(parcel.refs, parcel.frames)[name], view.detach())
        pair.sender.release(parcel.refs)


@pytest.mark.parametrize("connector", ["shm", "tcp"])
def test_what_arrives_belongs_to_the_receiver(pair: Pair, connector: str) -> None:
    for size in (4, LARGE):
        sent = torch.zeros(size)
        parcel = pair.sender.put(route(connector, pair), b"", {"x": sent})
        assert parcel is not None
        sent.fill_(1)  # a copy has left
        arrive(pair.receiver, parcel.refs)
        first = pair.receiver.get(parcel.refs, parcel.frames)["x"]
        first.fill_(2)
        assert not pair.receiver.get(parcel.refs, parcel.frames)["x"].any()
        pair.sender.release(parcel.refs)
        assert first.eq(2).all()


@pytest.mark.parametrize("connector", ["shm", "tcp"])
def test_a_chunk_is_put_whole_or_not_at_all(pair: Pair, connector: str) -> None:
    large = torch.zeros(300_000)  # 1.2 MB: three fit into 4 MiB
    assert pair.sender.put(route(connector, pair), b"", {name: large for name in "abcd"}) is None
    assert all_let_go(pair.sender)
    with pytest.raises(TooLarge):
        pair.sender.put(route(connector, pair), b"", {"a": large, "b": torch.zeros(2_000_000)})
    assert all_let_go(pair.sender)
    with pytest.raises(TypeError):
        pair.sender.put(route(connector, pair), b"", {"a": large, "b": torch.zeros(300, 300).to_sparse()})
    assert all_let_go(pair.sender)
    with pytest.raises(ProtocolViolation):
        pair.sender.put(route("no such"), b"", {"a": large})
    with pytest.raises(ProtocolViolation):
        pair.sender.put(route("tcp"), b"", {"a": large})  # to nowhere


def test_the_client_is_sent_any_size_inline() -> None:
    frames: list[bytes | memoryview] = [b"payload"]
    connector = InlineConnector()
    tensor = torch.arange(1_000_000)
    ref = connector.put("x", tensor, frames)
    assert (ref.offset, len(frames)) == (1, 2)
    assert equal(connector.get(ref, frames), tensor)


def test_a_local_tensor_is_the_same_object_until_it_is_released(pair: Pair) -> None:
    tensor = torch.zeros(LARGE)
    parcel = pair.sender.put(route("local"), b"", {"x": tensor})
    assert parcel is not None
    assert pair.sender.get(parcel.refs, parcel.frames)["x"] is tensor
    with pytest.raises(StaleTensor):
        pair.receiver.get(parcel.refs, parcel.frames)
    pair.sender.release(parcel.refs)
    with pytest.raises(StaleTensor):
        pair.sender.get(parcel.refs, parcel.frames)


def bad(**changes: object) -> TensorRef:
    return msgspec.structs.replace(TensorRef("x", "inline", "int16", (2,), 4, offset=1), **changes)


@pytest.mark.parametrize(
    "ref",
    [
        bad(dtype="int17"),
        bad(dtype="__class__"),
        bad(shape=(3,)),
        bad(shape=(-1, -2)),
        bad(shape=(1,) * 100),
        bad(shape=(2**63, 2**63, 0), nbytes=0),
        bad(shape=(2**40, 2**40), nbytes=2**81),
        bad(nbytes=-4),
        bad(offset=0),
        bad(offset=2),
        bad(offset=-1),
        bad(shape=(1,), nbytes=2),
        bad(connector="carrier pigeon"),
        bad(connector="shm", segment="/etc/passwd", offset=80),
        bad(connector="shm", segment="../../etc/passwd", offset=80),
        bad(connector="shm", segment="", offset=80),
        bad(connector="shm", segment=f"omnibus-a-{boot_id()}-1-0\n", offset=80),
        bad(connector="shm", generation=-1),
        bad(connector="tcp", nbytes=-4),
        bad(connector="tcp", generation=-1),
    ],
)
def test_an_impossible_ref_is_a_protocol_violation(pair: Pair, ref: TensorRef) -> None:
    with pytest.raises(ProtocolViolation):
        pair.receiver.get([ref], [b"payload", b"1234"])


def test_a_ref_into_a_segment_is_checked_against_its_bounds(pair: Pair) -> None:
    parcel = pair.sender.put(route("shm"), b"", {"x": torch.zeros(LARGE)})
    assert parcel is not None
    good = parcel.refs[0]
    size = (SHM / good.segment).stat().st_size
    for offset in (0, 16, good.offset + 1, good.offset - 64, size, size + 64 - size % 64 + 16, 2**62):
        with pytest.raises(ProtocolViolation):
            pair.receiver.get([msgspec.structs.replace(good, offset=offset)], parcel.frames)
    with pytest.raises(ProtocolViolation):
        pair.receiver.get([msgspec.structs.replace(good, shape=(size,), nbytes=4 * size)], parcel.frames)
    for changes in ({"generation": 0}, {"generation": good.generation + 1}, {"offset": good.offset + 64}):
        with pytest.raises(StaleTensor):
            pair.receiver.get([msgspec.structs.replace(good, shape=(1,), nbytes=4, **changes)], parcel.frames)


def test_two_tensors_of_one_name_and_a_clients_segment_are_refused(pair: Pair) -> None:
    parcel = pair.sender.put(route("shm"), b"", {"x": torch.zeros(LARGE)})
    assert parcel is not None
    with pytest.raises(ProtocolViolation):
        pair.receiver.get([*parcel.refs, *parcel.refs], parcel.frames)
    with pytest.raises(ProtocolViolation):
        pair.receiver.get(parcel.refs, parcel.frames, inline_only=True)


def test_random_refs_never_do_more_than_raise(pair: Pair) -> None:
    dice = random.Random(3)
    parcel = pair.sender.put(route("shm"), b"", {"x": torch.zeros(LARGE)})
    assert parcel is not None
    good = parcel.refs[0]
    numbers = [
        -1,
        0,
        1,
        2,
        16,
        63,
        64,
        80,
        144,
        2**20,
        2**31,
        2**32,
        2**62,
        2**63 - 1,
        good.offset,
        good.generation,
        good.nbytes,
    ]
    refused = 0
    for _ in range(3000):
        ref = TensorRef(
            "x",
            dice.choice(["inline", "local", "shm", "tcp"]),
            dice.choice([*DTYPES, "", "x"]),
            tuple(dice.choice(numbers) for _ in range(dice.randint(0, 3))),
            dice.choice(numbers),
            dice.choice([good.segment, good.segment, "", "x"]),
            dice.choice(numbers),
            dice.choice(numbers),
        )
        try:
            pair.receiver.get([ref], parcel.frames)
        except (ProtocolViolation, StaleTensor):
            refused += 1
    assert refused > 2500
