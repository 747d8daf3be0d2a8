"""Cuts the connections of a running process, as it sees a wire cut: the sockets are shut down under it, and it lives."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket

import psutil

_SYS_PIDFD_GETFD = 438  # the same number on every architecture of Linux


def cut_unix_sockets(pid: int, path_end: str) -> int:
    """Shut down each connected Unix stream socket of `pid` whose own or whose peer's path ends so. Returns how many."""
    cut = 0
    pidfd = os.pidfd_open(pid)
    try:
        for descriptor in _sockets(pid):
            taken = _take(pidfd, descriptor)
            if taken is None:
                continue
            with socket.socket(fileno=taken) as found:
                if _leads_to(found, path_end):
                    found.shutdown(socket.SHUT_RDWR)
                    cut += 1
    finally:
        os.close(pidfd)
    return cut


def _sockets(pid: int) -> list[int]:
    return [connection.fd for connection in psutil.Process(pid).net_connections("unix") if connection.fd >= 0]


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
