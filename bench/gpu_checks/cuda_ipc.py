"""connectors/cuda_ipc.py between real processes on one GPU: order, reuse under load, overrun, a crash of either side, times beside shm.

Each with both kinds of fence. What the peers do is in bench/cuda_ipc_peer.py; tests/bench/test_cuda_ipc_check.py runs the same without a card.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

from bench.cuda_ipc_peer import MIB, TAG, CardKind, Peer, comes, pair
from omni_bus import segments

SLOTS = 8
BUSY_S = 20.0  # a stream, where nobody may wait for it
FREED_S = 30.0  # within which a stream must go on that waited for a dead process
SLOW = 24  # tensors of which each is made, or read, long after its ref has come
SLOW_MS = 20.0
SIZES = {"4 KB": 4 << 10, "64 KB": 64 << 10, "1 MB": MIB, "16 MB": 16 * MIB, "64 MB": 64 * MIB}


def fill(sender: Peer, value: int) -> list[Any]:
    """Refs to as many tensors of 1 MiB as there is room for."""
    refs: list[Any] = []
    while (ref := sender.ask("put", value=value + len(refs), nbytes=MIB)) is not None:
        refs.append(ref)
    return refs


def warm(sender: Peer, receiver: Peer, nbytes: int) -> None:
    """Buffer made and opened, kernels loaded, memory in torch's cache: what is left is what a server does in each step."""
    for _ in range(2):
        ref = sender.ask("put", value=0, nbytes=nbytes)
        for peer in (sender, receiver):
            assert peer.ask("get", ref=ref) == "here" and peer.ask("values")
            peer.ask("forget")
        sender.ask("release", ref=ref)


def many(
    peers: tuple[Peer, Peer], count: int, *, made_ms: float = 0.0, read_ms: float = 0.0, every: int = 1, unfenced: str = ""
) -> tuple[int, int]:
    """(how often the sender found no room, how many of the tensors came torn)"""
    sender, receiver = peers
    sender.tell("send_many", count=count, busy_ms=made_ms, unfenced=unfenced == "sender")
    receiver.tell("receive_many", count=count, busy_ms=read_ms, every=every, unfenced=unfenced == "receiver")
    return sender.answer(), receiver.answer()


def order_and_reuse(kind: CardKind, count: int = 1000) -> str:
    """Streams that are hardly behind, then the two loads of `controls`."""
    with pair(kind, SLOTS * MIB) as peers:
        started = time.monotonic()
        full, wrong = many(peers, count, made_ms=0.3, read_ms=6.0, every=7)
        took = time.monotonic() - started
        assert wrong == 0, f"{wrong} of {count} tensors came torn"
        assert full > count // 10, f"the sender met a full buffer {full} times only: nothing was reused under load"
        for load in ({"made_ms": SLOW_MS}, {"read_ms": SLOW_MS}):
            _, wrong = many(peers, SLOW, **load)
            assert wrong == 0, f"{wrong} of {SLOW} tensors came torn with {load}"
        return f"{count} tensors of 1 MiB through {SLOTS} slots in {took:.2f} s, {full} times full, none torn"


def controls(kind: CardKind) -> str:
    """The same loads without a fence come torn: the check above can fail. Only streams far behind their hosts tell."""
    with pair(kind, SLOTS * MIB) as peers:
        _, early = many(peers, SLOW, made_ms=SLOW_MS, unfenced="receiver")
        _, late = many(peers, SLOW, read_ms=SLOW_MS, unfenced="sender")
        assert early, "without waiting for the sender's copy nothing came torn: the load proves nothing"
        assert late, "without waiting for the reader nothing came torn: the load proves nothing"
        return f"torn of {SLOW} without the fence of the write: {early}, of the read: {late}"


def overrun_and_stale(kind: CardKind) -> str:
    with pair(kind, SLOTS * MIB) as (sender, receiver):
        refs = fill(sender, 0)
        assert len(refs) == SLOTS
        assert sender.ask("release", ref=refs[2]) == SLOTS - 1
        again = sender.ask("put", value=100, nbytes=MIB)
        assert again is not None and sender.ask("put", value=0, nbytes=MIB) is None
        assert receiver.ask("get", ref=refs[2]) == "stale"
        for ref in [*refs[:2], *refs[3:], again]:
            assert receiver.ask("get", ref=ref) == "here"
            sender.ask("release", ref=ref)
        expected = [0, 1, 3, 4, 5, 6, 7, 100]
        values = receiver.ask("values")
        assert values == [[value, value] for value in expected], values
        return f"full at {SLOTS} slots, room again after one release, a returned slot is stale"


def receiver_crash(kind: CardKind, returned_first: bool, busy_s: float = BUSY_S) -> str:
    """Killed with its copy still to come; the slot is returned afterwards, or before with the sender's stream already waiting for it."""
    with pair(kind, SLOTS * MIB) as (sender, receiver):
        warm(sender, receiver, SLOTS * MIB)
        ref = sender.ask("put", value=7, nbytes=SLOTS * MIB)
        assert sender.ask("finished", within_s=FREED_S)
        assert receiver.ask_at_once("get", busy_s, ref=ref, behind_ms=busy_s * 1e3) == "here"
        if returned_first:
            sender.ask("release", ref=ref)
            fresh = sender.ask_at_once("put", busy_s, value=8, nbytes=SLOTS * MIB)
            assert not sender.ask("finished", within_s=0.3), "the slot was overwritten while it was to be read"
            gone = receiver.kill()
            started = time.monotonic()
        else:
            gone = receiver.kill()
            started = time.monotonic()
            assert sender.ask("release", ref=ref) == 0
            fresh = sender.ask("put", value=8, nbytes=SLOTS * MIB)
        assert fresh is not None, "the dead receiver's slot has not come back"
        how = "that already waited for it" if returned_first else "that comes to the slot later"
        assert sender.ask("finished", within_s=FREED_S), f"the dead receiver holds up a stream {how}"
        took = time.monotonic() - started
        assert sender.ask("get", ref=fresh) == "here" and sender.ask("values") == [[8, 8]]
        sender.ask("forget")
        assert sender.ask("release", ref=fresh) == 0
        for value in range(3 * SLOTS):  # all of the buffer is of use again
            ref = sender.ask("put", value=value, nbytes=MIB)
            assert ref is not None and sender.ask("release", ref=ref) == 0
        return f"receiver gone {gone * 1e3:.0f} ms after the kill, sender goes on {took * 1e3:.0f} ms later"


def sender_crash(kind: CardKind) -> str:
    """Killed at rest: what is unread is stale, the memory comes back."""
    with pair(kind, SLOTS * MIB) as (sender, receiver):
        sender.ask("open", buffer_bytes=512 * MIB)
        refs = [sender.ask("put", value=value, nbytes=MIB) for value in (1, 2)]
        assert receiver.ask("get", ref=refs[0]) == "here"
        assert receiver.ask("values") == [[1, 1]] and len(receiver.ask("pruned")) == 1
        held = receiver.ask("free_memory")
        sender.kill()
        assert receiver.ask("get", ref=refs[1]) == "stale"
        assert segments.sweep(tag=TAG) == [refs[0][5]]
        assert receiver.ask("pruned") == []
        assert comes(lambda: receiver.ask("free_memory") >= held + 500 * MIB, FREED_S), (
            "the dead sender's buffer is still taken"
        )
        back = (receiver.ask("free_memory") - held) >> 20
        receiver.ask("put", value=3, nbytes=MIB)
        assert receiver.ask("finished", within_s=FREED_S)
        return f"unread tensors stale, {back} MiB back (buffer 512 MiB and the context)"


def sender_crash_under_way(kind: CardKind, busy_s: float = BUSY_S) -> str:
    """Killed with the copy still to come and the receiver's stream waiting for it."""
    with pair(kind, SLOTS * MIB) as (sender, receiver):
        warm(sender, receiver, MIB)
        ref = sender.ask_at_once("put", busy_s, value=1, nbytes=MIB, behind_ms=busy_s * 1e3)
        assert receiver.ask_at_once("get", busy_s, ref=ref) == "here"
        assert not receiver.ask("finished", within_s=0.3), "the receiver did not wait for the copy"
        gone = sender.kill()
        started = time.monotonic()
        assert receiver.ask("finished", within_s=FREED_S), "the dead sender holds up the receiver's stream"
        took = time.monotonic() - started
        assert receiver.ask("get", ref=ref) == "stale"
        assert segments.sweep(tag=TAG) == [ref[5]] and receiver.ask("pruned") == []
        return f"sender gone {gone * 1e3:.0f} ms after the kill, receiver's stream goes on {took * 1e3:.0f} ms later"


def times(kind: CardKind) -> str:
    with pair(kind, SLOTS * MIB) as (sender, receiver):
        for peer in (sender, receiver):
            peer.ask("open", buffer_bytes=256 * MIB)
        figures = []
        print("| tensor | cuda_ipc, one way | shm, one way | put, get (host): cuda_ipc | shm |  (p50, µs)", flush=True)
        for label, nbytes in SIZES.items():
            whole, host = {}, {}
            for connector in ("cuda_ipc", "shm"):
                count = 40 if nbytes > 16 * MIB else 200
                sender.tell("send_timed", connector=connector, nbytes=nbytes, count=count)
                receiver.tell("receive_timed", connector=connector, count=count)
                put = sender.answer()
                whole[connector], get = receiver.answer()
                host[connector] = f"{put:.0f}, {get:.0f}"
            print(
                f"| {label} | {whole['cuda_ipc']:.0f} | {whole['shm']:.0f} | {host['cuda_ipc']} | {host['shm']} |", flush=True
            )
            figures.append(f"{label} {whole['cuda_ipc']:.0f}/{whole['shm']:.0f}")
        return "p50 µs, cuda_ipc/shm: " + ", ".join(figures)


def checks() -> Iterator[tuple[str, Callable[[], str]]]:
    kinds: tuple[CardKind, ...] = ("events", "words")
    for kind in kinds:
        for name, check in {
            "order and reuse": order_and_reuse,
            "controls": controls,
            "overrun and stale refs": overrun_and_stale,
            "times beside shm": times,
        }.items():
            yield f"{name} ({kind})", functools.partial(check, kind)
    either = {
        "crash of the sender": sender_crash,
        "crash of the receiver": functools.partial(receiver_crash, returned_first=False),
    }
    under_way = {
        "crash of the sender under way": sender_crash_under_way,
        "crash of a receiver that is waited for": functools.partial(receiver_crash, returned_first=True),
    }
    for kind in kinds:
        for name, crash in either.items():
            yield f"{name} ({kind})", functools.partial(crash, kind)
    # Events do not pass these: a dead process's event is never recorded, and its waiters wait on. That is why words are the default.
    for name, crash in under_way.items():
        yield f"{name} (words)", functools.partial(crash, "words")
