"""The processes of this machine, forked from the launcher: one `Rank` each."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
from collections.abc import Callable, Iterable
from typing import Any

import attrs

from fnaccel.launch.ending import end
from fnaccel.launch.failure import Failure
from fnaccel.launch.job import Job
from fnaccel.launch.rank import live
from fnaccel.launch.variables import variables


@attrs.define
class Rank:
    """One process: its rank, and the end of the pipe that it reports to.

    Attributes:
        rank: its number among all ranks.
        pid: its process.
        pipe: the end that the launcher reads; None once the other end is closed.
        said: the beginning of a line that is not complete.
        start: `"joining"` while it waits in `fa.start`, `"joined"` afterwards, `""` before.
    """

    rank: int
    pid: int
    pipe: int | None
    said: bytes = b""
    start: str = ""

    def hear(self) -> Failure | None:
        """Read what the process reports; the failure, once its line is complete."""
        failure: Failure | None = None
        while self.pipe is not None:
            try:
                said = os.read(self.pipe, 65_536)
            except BlockingIOError:
                break
            *lines, self.said = (self.said + said).split(b"\n")
            for line in lines:
                start = json.loads(line).get("start")
                if start is None:
                    failure = Failure.of(line)
                else:
                    self.start = start
            if not said or failure is not None:
                os.close(self.pipe)
                self.pipe = None
        return failure


def fork(
    job: Job,
    *,
    port: int,
    interface: str | None,
    restarts: int,
    several: bool,
    mask: set[Any],
    forget: Callable[[], None] = lambda: None,
) -> list[Rank]:
    """Fork the ranks of this machine; signals are blocked meanwhile.

    Args:
        job: what they run.
        port: where they meet.
        interface: for gloo, or None.
        restarts: how often they were started before.
        several: whether the job has several machines.
        mask: of signals, which ranks go back to.
        forget: called in each of them: closes what is the launcher's.

    Raises:
        OSError: not all can be started; then none is left.
    """
    launcher = os.getpid()
    gc.freeze()  # what is here stays here: ranks need not look through it, nor copy its pages
    ranks: list[Rank] = []
    for local_rank in range(job.processes):
        try:
            read, write = os.pipe()
            pid = os.fork()
        except OSError:
            send(ranks, signal.SIGKILL)
            for rank in ranks:
                os.waitpid(rank.pid, 0)
            raise
        if pid == 0:
            for other in [read, *(rank.pipe for rank in ranks if rank.pipe is not None)]:
                os.close(other)
            forget()
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            environ = variables(
                job,
                local_rank,
                port=port,
                environ=os.environ,
                interface=interface,
                restarts=restarts,
                several=several,
            )
            end(live(job, local_rank, environ=environ, launcher=launcher, pipe=write))
        os.close(write)
        os.set_blocking(read, False)
        ranks.append(Rank(job.rank(local_rank), pid, read))
    return ranks


def send(ranks: Iterable[Rank], number: signal.Signals) -> None:
    """Send a signal to ranks, where they still are."""
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.pid, number)
