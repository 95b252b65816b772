"""The TCP connections of this process's gloo groups and stores: how to cut them, and how to bound a wait.

A collective of gloo waits in C++ until its peers answer or its timeout is over, and torch has no call that
ends such a wait (2.13). A connection that is shut down ends it at once, with an error. Linux only: elsewhere
nothing is found, and a wait ends with its timeout.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

_DESCRIPTORS = Path("/proc/self/fd")


def listening_ports() -> set[int]:
    """The TCP ports that this process listens on. Each gloo group has its own port."""
    return {
        int(connection.getsockname()[1])
        for connection in _tcp_sockets()
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    }


def cut(own: Collection[int], others: Collection[int]) -> int:
    """Shut down the connections that begin or end at a port of a gloo group. Returns their number.

    Args:
        own: ports that this process listens on: connections that were accepted there.
        others: ports that other ranks listen on: connections that this process has opened.
    """
    count = 0
    for connection in _tcp_sockets():
        with contextlib.suppress(OSError):  # not connected, or shut down by the other end in this moment
            local, remote = connection.getsockname()[1], connection.getpeername()[1]
            if local in own or remote in others:
                connection.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


# a process that is forked while the watching thread has a duplicate would keep that connection open
_duplicating = threading.RLock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_duplicating.acquire,
        after_in_parent=_duplicating.release,
        after_in_child=_duplicating.release,
    )


def bounded_client(store: Any, seconds: float) -> tuple[Any, Callable[[], bool]]:
    """A client of a store for one thread, whose operations raise RuntimeError after some seconds.

    The timeout of torch's store limits the wait for a key, and not the wait for an answer: if the process
    that keeps the store is stopped, `check` never returns. The kernel's limit of a socket ends it.

    Returns:
        The client, and a function for the time after such an error. It returns whether the late answer has
        come, so that the process goes on, and raises RuntimeError if the process has ended. The client itself
        can't be used any more: it would take the late answer for that of its next operation.
    """
    before = socket_names()
    client = store.clone()
    client.set_timeout(timedelta(seconds=seconds))
    numbers = [number for number, name in _names().items() if name not in before]
    limit = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
    for connection in _tcp_sockets(numbers):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)

    def answers() -> bool:
        for connection in _tcp_sockets(numbers):
            try:
                if connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                    return True
            except BlockingIOError:  # nothing has come
                continue
            except OSError as error:
                raise RuntimeError(f"the process that keeps the store has ended: {error}") from error
            raise RuntimeError("the process that keeps the store has ended")
        return False

    return client, answers


_groups: dict[int, str] = {}
"""Descriptors of the sockets of this process's groups, and the kernel's name of each socket."""


def remember(before: Collection[str]) -> None:
    """Note the sockets of groups: those that are new since `before`, which `socket_names` returned."""
    _groups.update({number: name for number, name in _names().items() if name not in before})


def socket_names() -> set[str]:
    """The kernel's names of this process's sockets."""
    return set(_names().values())


def drop_inherited() -> None:
    """In a forked process: let go of the sockets of the parent's groups.

    If a rank is killed while its workers live, its connections would stay open as long as they do, and the
    other ranks would wait. The descriptors stay in use, since torch's objects name them by number.
    """
    names = _names() if _groups else {}
    inherited = [number for number, name in _groups.items() if names.get(number) == name]
    _groups.clear()
    if not inherited:
        return
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in inherited:
        os.dup2(nothing, number)
    os.close(nothing)


def _names() -> dict[int, str]:
    names: dict[int, str] = {}
    if _DESCRIPTORS.is_dir():
        for number in os.listdir(_DESCRIPTORS):  # noqa: PTH208 - a path for each name would cost more
            with contextlib.suppress(OSError):  # closed since it was listed
                name = os.readlink(_DESCRIPTORS / number)  # noqa: PTH115 - no path exists
                if name.startswith("socket:"):
                    names[int(number)] = name
    return names


def _tcp_sockets(numbers: Iterable[int] | None = None) -> Iterator[socket.socket]:
    """The TCP sockets of this process or of some descriptors, each as a duplicate that is closed again."""
    for number in _names() if numbers is None else numbers:
        with contextlib.suppress(OSError), _duplicating, socket.socket(fileno=os.dup(number)) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and (
                connection.type == socket.SOCK_STREAM
            ):
                yield connection
