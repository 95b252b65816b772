"""The output of each rank in a file of its own, and on the launcher's streams as well.

A process for each rank copies: the launcher has no threads, and a rank that ends at once loses no output.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs

from fnaccel.world.paths import output_file

WAIT = 2.0
"""Seconds for which the launcher waits for the last output. A process that a rank leaves behind holds it."""


@attrs.frozen
class Copier:
    """The process that copies the output of one rank.

    Attributes:
        pid: its process id.
        out, err: the descriptors that the rank writes to.
    """

    pid: int
    out: int
    err: int

    def enter(self) -> None:
        """In the rank: write to the copier from now on."""
        os.dup2(self.out, 1)
        os.dup2(self.err, 2)

    def close(self) -> None:
        """Close the launcher's ends, or in a rank those of another rank."""
        os.close(self.out)
        os.close(self.err)


def log_path(folder: str, rank: int) -> Path:
    """The file of a rank's output.

    Example:
        >>> log_path("logs", 3).as_posix()
        'logs/rank3.log'
    """
    return Path(folder) / f"rank{rank}.log"


def start_copiers(folder: str, ranks: Sequence[int]) -> list[Copier]:
    """Start a process for each rank that appends the rank's output to its file.

    Args:
        folder: it is made if it does not exist.
        ranks: the ranks of this machine.

    Raises:
        ArgumentError: there is something that is no regular file in the place of a log.
        OSError: a file can't be written, or no process can be started.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    copiers: list[Copier] = []
    for rank in ranks:
        # a pipe would wait for a reader here
        log = output_file(log_path(folder, rank), "fnaccel launch --tee")
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        (out_read, out), (err_read, err) = os.pipe(), os.pipe()
        pid = os.fork()
        if pid == 0:
            for descriptor in (out, err, *(end for other in copiers for end in (other.out, other.err))):
                os.close(descriptor)
            _become_copier(file, {out_read: 1, err_read: 2})
        for descriptor in (file, out_read, err_read):
            os.close(descriptor)
        copiers.append(Copier(pid, out, err))
    return copiers


def entering(copiers: Sequence[Copier]) -> Callable[[int], None]:
    """What each rank calls with its local rank: its own output is copied, and it holds no other stream."""

    def enter(local_rank: int) -> None:
        if copiers:
            copiers[local_rank].enter()
        for copier in copiers:
            copier.close()

    return enter


def finish(copiers: Sequence[Copier]) -> None:
    """In the launcher: close the streams, and wait until the output of ranks that have ended is written."""
    for copier in copiers:
        copier.close()
    end = time.monotonic() + WAIT
    for copier in copiers:
        while os.waitpid(copier.pid, os.WNOHANG)[0] == 0:
            if time.monotonic() > end:
                os.kill(copier.pid, signal.SIGKILL)
                os.waitpid(copier.pid, 0)
                break
            time.sleep(0.005)


def _become_copier(file: int, streams: dict[int, int]) -> None:
    """Copy until all writers have closed their ends. Signals to end are for the ranks."""
    told = False
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
        with selectors.DefaultSelector() as selector:
            for read in streams:
                selector.register(read, selectors.EVENT_READ)
            while selector.get_map():
                for key, _ in selector.select():
                    data = os.read(key.fd, 65_536)
                    if not data:
                        selector.unregister(key.fd)
                    with contextlib.suppress(OSError):  # a reader that is gone
                        _write(streams[key.fd], data)
                    try:
                        _write(file, data)
                    except OSError as error:  # a full disk
                        if not told:
                            _say(f"fnaccel launch --tee: output is missing in a log: {error.strerror}")
                        told = True
    finally:
        os._exit(0)


def _say(line: str) -> None:
    with contextlib.suppress(OSError):
        _write(2, f"{line}\n".encode())


def _write(sink: int, data: bytes) -> None:
    while data:
        data = data[os.write(sink, data) :]
