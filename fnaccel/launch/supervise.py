"""`launch`: fork the ranks of this machine, wait for them, and end them all when one fails.

What a rank does in its process is in `rank.py`; what is printed of a failure in `failure.py`.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import sys
import time
from collections.abc import Generator
from typing import Any

import attrs

from fnaccel.errors import LaunchError
from fnaccel.launch.ending import end
from fnaccel.launch.failure import Failure, cause, describe
from fnaccel.launch.job import STATIC_PORT, Job, check
from fnaccel.launch.network import free_port, interface_to
from fnaccel.launch.rank import live
from fnaccel.launch.variables import variables

SETTLE = 0.5
"""Seconds in which ranks may still report after the first did: it may not be the one to blame."""

_TO_THE_LAUNCHER = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_WATCHED = (*_TO_THE_LAUNCHER, signal.SIGCHLD)


@attrs.define
class _Rank:
    """One process: its rank, and the end of the pipe that it reports to."""

    rank: int
    pid: int
    pipe: int | None
    said: bytes = b""


def launch(job: Job) -> int:
    """Run a job's processes on this machine until they end.

    The ranks are forks of the caller, and know what it has imported: call it before anything
    starts a thread or an accelerator's driver.

    Args:
        job: what to start.

    Returns:
        0; or the exit code of the rank that failed first, 128 + the number where a signal ended it,
        its traceback or message printed once; or 128 + the number of the signal that the launcher got.

    Raises:
        LaunchError: not all processes can be started; then none is left.

    Example: `sys.exit(launch(Job(script="train.py", processes=2)))`.
    """
    check(job)
    several = job.machines > 1
    port = job.port or (STATIC_PORT if several else free_port())
    interface = interface_to(job.address) if several else None
    sys.stdout.flush()  # or every fork would write what is buffered here once more
    sys.stderr.flush()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    try:
        ranks = _fork(job, port, interface, mask)
    except OSError as error:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        raise LaunchError(
            f"not all of {job.processes} processes can be started: {error.strerror}",
            where="fnaccel launch",
            fix="raise the limit of processes or open files (ulimit -u, ulimit -n), or ask for fewer",
        ) from error
    with _signals(mask) as signals:
        return _Watch(job, ranks, signals).run()


def _fork(job: Job, port: int, interface: str | None, mask: set[Any]) -> list[_Rank]:
    launcher = os.getpid()
    gc.freeze()  # what is here stays here: ranks need not look through it, nor copy its pages
    ranks: list[_Rank] = []
    for local_rank in range(job.processes):
        try:
            read, write = os.pipe()
            pid = os.fork()
        except OSError:
            _send(ranks, signal.SIGKILL)
            for rank in ranks:
                os.waitpid(rank.pid, 0)
            raise
        if pid == 0:
            for other in [read, *(rank.pipe for rank in ranks if rank.pipe is not None)]:
                os.close(other)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            environ = variables(job, local_rank, port=port, environ=os.environ, interface=interface)
            end(live(job, local_rank, environ=environ, launcher=launcher, pipe=write))
        os.close(write)
        os.set_blocking(read, False)
        ranks.append(_Rank(job.rank(local_rank), pid, read))
    return ranks


@contextlib.contextmanager
def _signals(mask: set[Any]) -> Generator[int]:
    """A descriptor from which the numbers of signals are read as bytes."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    os.set_blocking(read, False)
    handlers = {number: signal.signal(number, lambda *_: None) for number in _WATCHED}
    before = signal.set_wakeup_fd(write)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        yield read
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(before)
        os.close(read)
        os.close(write)


@attrs.define
class _Watch:
    """The launcher's view of its ranks, and what it still means to do to them."""

    job: Job
    alive: list[_Rank]
    signals: int
    failures: list[Failure] = attrs.field(factory=list)
    interrupted: int | None = None
    ending: bool = False
    due: list[tuple[float, signal.Signals]] = attrs.field(factory=list)

    def run(self) -> int:
        """Wait until all have ended; the launcher's exit code."""
        self._reap()  # one may have ended before its signal could be seen
        while self.alive:
            now = time.monotonic()
            limit = max(0.0, self.due[0][0] - now) if self.due else None
            pipes = [rank.pipe for rank in self.alive if rank.pipe is not None]
            ready = select.select([self.signals, *pipes], [], [], limit)[0]
            if self.signals in ready:  # before the ranks: Ctrl-C makes them report too
                self._obey(os.read(self.signals, 4096))
            for rank in self.alive:
                self._hear(rank)
            self._reap()
            self._act()
        if not self.failures:
            return 0 if self.interrupted is None else 128 + self.interrupted
        first = cause(self.failures)
        print(describe(first, self.job), file=sys.stderr, flush=True)
        return first.code

    def _obey(self, numbers: bytes) -> None:
        """Pass a signal on to the ranks; at the second one they end at once."""
        for number in numbers:
            if number not in _TO_THE_LAUNCHER:
                continue
            now = time.monotonic()
            if self.interrupted is not None:
                self.due = [(now, signal.SIGKILL)]
                continue
            self.interrupted = number
            self.ending = True
            self.due = [(now + self.job.grace, signal.SIGKILL)]
            # a terminal has sent Ctrl-C to the ranks as well: once more would interrupt their clean-up
            if number != signal.SIGINT or not _in_foreground():
                self.due.insert(0, (now, signal.Signals(number)))

    def _hear(self, rank: _Rank) -> None:
        """Take what a rank reports, which is one line at most."""
        while rank.pipe is not None:
            try:
                said = os.read(rank.pipe, 65_536)
            except BlockingIOError:
                return
            rank.said += said
            if rank.said.endswith(b"\n"):
                self._note(Failure.of(rank.said))
            if not said or rank.said.endswith(b"\n"):
                os.close(rank.pipe)
                rank.pipe = None

    def _note(self, failure: Failure) -> None:
        if any(known.rank == failure.rank for known in self.failures):
            return
        if not self.ending:  # what ends from here on was ended by the launcher
            self.failures.append(failure)
            if not self.due:
                now = time.monotonic()
                self.due = [
                    (now + SETTLE, signal.SIGTERM),
                    (now + SETTLE + self.job.grace, signal.SIGKILL),
                ]

    def _reap(self) -> None:
        """See which ranks have ended, and how."""
        for rank in list(self.alive):
            pid, status = os.waitpid(rank.pid, os.WNOHANG)
            if pid == 0:
                continue
            self._hear(rank)
            code = os.waitstatus_to_exitcode(status)
            if code != 0:
                end = 128 - code if code < 0 else code
                self._note(Failure(rank=rank.rank, code=end, when=time.monotonic()))
            self.alive.remove(rank)

    def _act(self) -> None:
        """Send the signals whose time has come."""
        while self.due and self.due[0][0] <= time.monotonic():
            self.ending = True
            _send(self.alive, self.due.pop(0)[1])


def _send(ranks: list[_Rank], number: signal.Signals) -> None:
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.pid, number)


def _in_foreground() -> bool:
    """Whether Ctrl-C at a terminal would reach this process, and so the ranks."""
    with contextlib.suppress(OSError):
        terminal = os.open("/dev/tty", os.O_RDONLY)
        try:
            return os.tcgetpgrp(terminal) == os.getpgrp()
        finally:
            os.close(terminal)
    return False
