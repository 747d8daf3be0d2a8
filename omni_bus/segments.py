"""Names of shared memory segments, and the sweep of those whose owner is dead. No torch: supervisor and connectors both use it.

A segment is the file `omnibus-{tag}-{boot}-{pid}-{n}` in /dev/shm: the server's tag (`RunDir.tag`), where its owner's pid means
something (`boot_id`), the pid, and a number that the owner counts up.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pathlib
import re

SHM = pathlib.Path("/dev/shm")
_NAME = re.compile(r"omnibus-(?P<tag>[A-Za-z0-9_]+)-(?P<boot>[0-9a-f]{12})-(?P<pid>\d+)-(?P<n>\d+)")


@functools.cache
def boot_id() -> str:
    """12 hex digits, equal for two processes exactly when they see the same boot and the same pid namespace.

    Containers may share /dev/shm without sharing pids: there a pid that looks dead says nothing about the owner.
    """
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return hashlib.sha256(f"{boot} {os.readlink('/proc/self/ns/pid')}".encode()).hexdigest()[:12]


def segment_name(tag: str, number: int) -> str:
    """The name of this process's segment `number`."""
    return f"omnibus-{tag}-{boot_id()}-{os.getpid()}-{number}"


def is_segment_name(name: str) -> bool:
    """Whether `name` is one that `segment_name` makes, here or in another process."""
    return _NAME.fullmatch(name) is not None


def sweep(*, tag: str | None = None, pid: int | None = None) -> list[str]:
    """Unlink segments whose owner is dead, of any server or of that tag and owner only; returns their names.

    With `pid` the owner is taken for dead without a look: the supervisor has waited for it, and the number may be in use again.
    """
    swept = []
    for entry in SHM.glob("omnibus-*"):
        match = _NAME.fullmatch(entry.name)
        if match is None or match["boot"] != boot_id() or tag not in (None, match["tag"]):
            continue
        owner = int(match["pid"])
        if (owner != pid) if pid is not None else is_alive(owner):
            continue
        # Gone already, or another user's: neither is ours to remove.
        with contextlib.suppress(FileNotFoundError, PermissionError):
            entry.unlink()
            swept.append(entry.name)
    return swept


def is_alive(pid: int) -> bool:
    """Whether a process of that number exists, in this process's pid namespace."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
