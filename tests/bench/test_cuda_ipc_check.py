"""The check of cuda_ipc between real processes, on a GPU in shared memory: each of its parts can run, and the crashes are real."""

from __future__ import annotations

import pytest

from bench.gpu_checks import cuda_ipc

BUSY_S = 120.0  # longer than any machine takes to come to the kill: nothing waits for its end


def test_order_reuse_and_overrun() -> None:
    assert "none torn" in cuda_ipc.order_and_reuse("host", 60)
    assert "stale" in cuda_ipc.overrun_and_stale("host")


def test_tensors_come_torn_without_the_fences() -> None:
    assert "torn" in cuda_ipc.controls("host")


@pytest.mark.parametrize("returned_first", [False, True], ids=["slot returned after it", "sender waits already"])
def test_a_receiver_that_is_killed_gives_its_slot_back(returned_first: bool) -> None:
    assert "goes on" in cuda_ipc.receiver_crash("host", returned_first, BUSY_S)


def test_a_sender_that_is_killed_makes_its_tensors_stale() -> None:
    assert "stale" in cuda_ipc.sender_crash("host")


def test_a_sender_that_is_killed_while_its_copy_is_awaited_sets_the_receiver_free() -> None:
    assert "goes on" in cuda_ipc.sender_crash_under_way("host", BUSY_S)
