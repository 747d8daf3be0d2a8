"""Cuts the connections of a running process, as it sees a wire cut: the sockets are shut down under it, and it lives."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
from collections.abc import Callable, Iterable

import psutil

_SYS_PIDFD_GETFD = 438  # the same number on every architecture of Linux


def cut_unix_sockets(pid: int, path_end: str) -> int:
    """Shut down each connected Unix stream socket of `pid` whose own or whose peer's path ends so. Returns how many."""
    connections = psutil.Process(pid).net_connections("unix")
    return _cut(pid, [one.fd for one in connections if one.fd >= 0], lambda found: _leads_to(found, path_end))


def cut_tcp_sockets(pid: int) -> int:
    """Shut down each TCP connection of `pid`, whomever it leads to; what listens goes on listening. Returns how many."""
    connections = psutil.Process(pid).net_connections("tcp")
    return _cut(pid, [one.fd for one in connections if one.fd >= 0 and one.status == psutil.CONN_ESTABLISHED], _connected)


def _cut(pid: int, descriptors: Iterable[int], wanted: Callable[[socket.socket], bool]) -> int:
    cut = 0
    pidfd = os.pidfd_open(pid)
    try:
        for descriptor in descriptors:
            taken = _take(pidfd, descriptor)
            if taken is None:
                continue
            with socket.socket(fileno=taken) as found:
                if wanted(found):
                    found.shutdown(socket.SHUT_RDWR)
                    cut += 1
    finally:
        os.close(pidfd)
    return cut


def _connected(found: socket.socket) -> bool:
    """Its number may have become another file's since it was looked up."""
    if found.family not in (socket.AF_INET, socket.AF_INET6) or found.type != socket.SOCK_STREAM:
        return False
    with contextlib.suppress(OSError):
        return found.getpeername() is not None
    return False


def _take(pidfd: int, descriptor: int) -> int | None:
    """A descriptor of ours for one of that process; None where it has been closed meanwhile."""
    libc = ctypes.CDLL(None, use_errno=True)
    taken = int(libc.syscall(_SYS_PIDFD_GETFD, pidfd, descriptor, 0))
    if taken >= 0:
        return taken
    number = ctypes.get_errno()
    if number in (9, 3):  # EBADF, ESRCH
        return None
    raise OSError(number, f"pidfd_getfd: {os.strerror(number)} (it needs the right to trace the process)")


def _leads_to(found: socket.socket, path_end: str) -> bool:
    if found.family != socket.AF_UNIX or found.type != socket.SOCK_STREAM:
        return False
    with contextlib.suppress(OSError):
        return any(isinstance(name, str) and name.endswith(path_end) for name in (found.getpeername(), found.getsockname()))
    return False
