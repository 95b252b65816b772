"""The processes of this machine, forked from the launcher: one `Rank` each."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs

from fnaccel.launch.ending import end, end_function, forget_handlers, leave
from fnaccel.launch.failure import Failure
from fnaccel.launch.job import Job
from fnaccel.launch.rank import live
from fnaccel.launch.variables import variables


@attrs.define
class Rank:
    """One process: its rank, and the end of the pipe that it reports to.

    Attributes:
        rank: its number among all ranks.
        pid: its process id.
        pipe: the end that the launcher reads, or None once the other end is closed.
        partial: the beginning of an incomplete line.
        start: `"joining"` while it waits in `fa.start`, `"joined"` afterwards, `""` before.
    """

    rank: int
    pid: int
    pipe: int | None
    partial: bytes = b""
    start: str = ""

    def hear(self) -> Failure | None:
        """Read the reports of the process. Returns its failure once that line is complete."""
        failure: Failure | None = None
        while self.pipe is not None:
            try:
                chunk = os.read(self.pipe, 65_536)
            except BlockingIOError:
                break
            *lines, self.partial = (self.partial + chunk).split(b"\n")
            for line in lines:
                start = json.loads(line).get("start")
                if start is None:
                    failure = Failure.of(line)
                else:
                    self.start = start
            if not chunk or failure is not None:
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
    trace: Callable[[int], None] = lambda _: None,
    tee: Callable[[int], None] = lambda _: None,
    presets: Mapping[str, str] | None = None,
) -> list[Rank]:
    """Fork the ranks of this machine while signals are blocked.

    Args:
        job: the job to run.
        port: the port of the ranks' store.
        interface: the network interface for gloo, or None.
        restarts: the number of earlier starts.
        several: whether the job has several machines.
        mask: the signal mask to restore in the ranks.
        forget: called in each rank, to close the launcher's files and sockets.
        trace: called in each rank with its local rank, to write where it is.
        tee: called in each rank with its local rank, before anything is written.
        presets: variables under those of the job.

    Raises:
        OSError: not all ranks can be started. Those that were started are killed.
    """
    launcher = os.getpid()
    number = f"{launcher}.{time.time_ns()}"
    gc.freeze()  # the ranks' garbage collector skips the launcher's objects, so their pages are not copied
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
            try:
                for other in [read, *(rank.pipe for rank in ranks if rank.pipe is not None)]:
                    os.close(other)
                forget()
                if job.function is not None:
                    forget_handlers()
                tee(local_rank)
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                environ = variables(
                    job,
                    local_rank,
                    port=port,
                    environ=os.environ,
                    interface=interface,
                    restarts=restarts,
                    several=several,
                    presets=presets,
                    number=number,
                )
                trace(local_rank)
                code = live(job, local_rank, environ=environ, launcher=launcher, pipe=write)
            except BaseException:  # above are the frames of the launcher, or of a notebook's cell
                traceback.print_exc()
                leave(1)
            (end if job.function is None else end_function)(code)
        os.close(write)
        os.set_blocking(read, False)
        ranks.append(Rank(job.rank(local_rank), pid, read))
    return ranks


def send(ranks: Iterable[Rank], number: signal.Signals) -> None:
    """Send a signal to the ranks that still run."""
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.pid, number)
