"""SIGTERM while stages load, when nobody looks at a flag."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap

import pytest


@pytest.mark.parametrize(("abort", "said"), [(True, "cleaned up"), (False, "slept on\ncleaned up")])
def test_a_signal_aborts_a_load_in_order_and_is_a_flag_otherwise(abort: bool, said: str) -> None:
    code = f"""
        import os, signal, time
        from omni_bus.workers.stop_signal import StopSignal
        stop = StopSignal()
        stop.abort = {abort}
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)
            assert stop.raised and os.read(stop.fd, 10)
            print("slept on")
        finally:
            print("cleaned up")
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True, timeout=60)
    assert (ended.returncode, ended.stdout.strip()) == (0, said)


@pytest.mark.parametrize(("abort", "said"), [(True, ""), (False, "goes on")])
def test_a_wish_to_leave_ends_a_load_and_is_a_flag_otherwise(abort: bool, said: str) -> None:
    code = f"""
        import os, signal, time
        from omni_bus.workers.stop_signal import StopSignal
        stop = StopSignal()
        stop.abort = {abort}
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.1)
        assert stop.leave and not stop.raised and os.read(stop.fd, 10)
        print("goes on")
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True, timeout=60)
    assert (ended.returncode, ended.stdout.strip()) == (0, said)


def test_what_hangs_after_a_signal_is_ended_by_the_kernel() -> None:
    code = """
        import os, signal, time
        from omni_bus.workers import stop_signal
        stop_signal.GRACE_S = 1
        stop_signal.StopSignal()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    """
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(code)], timeout=50).returncode == -signal.SIGALRM
