"""`launch`: start the ranks of this machine and wait for them; start them again where that was asked for.

What a rank does in its process is in `rank.py`, how ranks are watched in `watch.py`, and what is
printed of a failure in `failure.py`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Generator
from typing import Any

import attrs

from fnaccel.errors import LaunchError
from fnaccel.launch.failure import describe
from fnaccel.launch.forking import fork
from fnaccel.launch.job import STATIC_PORT, Job, check
from fnaccel.launch.machines import Machines, Verdict, decide, meet
from fnaccel.launch.network import free_port, interface_to, wait_for_port
from fnaccel.launch.watch import TO_END, TO_PASS_ON, Outcome, Watch

_WATCHED = (*TO_END, *TO_PASS_ON, signal.SIGCHLD)


def launch(job: Job) -> int:
    """Run a job's processes on this machine until they end.

    The ranks are forks of the caller, and know what it has imported: call it before anything
    starts a thread or an accelerator's driver.

    Args:
        job: what to start.

    Returns:
        0; or the exit code of the rank that failed first, 128 + the number where a signal ended it,
        its traceback or message printed once; or 75 where the ranks have saved because a signal asked
        them to; or 128 + the number of the signal that the launcher got. With restarts, that of the
        last attempt.

    Raises:
        LaunchError: not all processes can be started; then none is left.
    """
    check(job)
    machines = meet(job) if job.machines > 1 and job.restarts else None
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    try:
        return _attempts(job, machines, mask)
    finally:
        while signal.sigpending() & {*TO_END, *TO_PASS_ON}:  # all have ended: it has nothing more to say
            signal.sigwait(_WATCHED)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if machines is not None:
            machines.close()


def _attempts(job: Job, machines: Machines | None, mask: set[Any]) -> int:
    """Start the ranks, again and again where they fail and may; the exit code of the last attempt."""
    attempt = 0
    while True:
        outcome = _attempt(job, attempt, machines, mask)
        _report(outcome, job)
        if machines is None:
            verdict = decide([outcome.part], more=attempt < job.restarts)
        else:
            verdict = machines.verdict or Verdict(again=False)
            if not outcome.code and verdict.code:
                lost = f"; lost: {machines.lost}" if machines.lost else ""
                _say(f"fnaccel launch: ranks of another machine failed with exit code {verdict.code}{lost}")
        if not verdict.again:
            return outcome.code or verdict.code
        attempt += 1
        job = _smaller(job, outcome.killed)
        ranks = "1 rank" if job.size == 1 else f"{job.size} ranks"
        _say(f"fnaccel launch: attempt {attempt + 1} of {job.restarts + 1}, with {ranks}")


def _attempt(job: Job, number: int, machines: Machines | None, mask: set[Any]) -> Outcome:
    """Start the ranks once, and wait until they have ended; signals are blocked before and after."""
    several = job.machines > 1
    port = job.port or (STATIC_PORT if several else free_port())
    if machines is not None:
        port = machines.begin()
    elif number and job.port is not None:  # a worker that outlives its rank for a moment may still hold it
        wait_for_port(port)
    sys.stdout.flush()  # or every fork would write what is buffered here once more
    sys.stderr.flush()
    try:
        ranks = fork(
            job,
            port=port,
            interface=interface_to(job.address),
            restarts=number,
            mask=mask,
            forget=(lambda: None) if machines is None else machines.close,
        )
    except OSError as error:
        raise LaunchError(
            f"not all of {job.processes} processes can be started: {error.strerror}",
            where="fnaccel launch",
            fix="raise the limit of processes or open files (ulimit -u, ulimit -n), or ask for fewer",
        ) from error
    with _signals(mask) as signals:
        return Watch(job, ranks, signals, machines).run()


def _smaller(job: Job, killed: int) -> Job:
    """The job with the ranks left out that were killed, where it may go on without."""
    if job.min_ranks is None:
        return job
    return attrs.evolve(job, processes=max(job.min_ranks, job.processes - killed))


def _report(outcome: Outcome, job: Job) -> None:
    if outcome.preempted is not None:
        said = outcome.preempted or "a rank ended with exit code 75"
        _say(f"fnaccel launch: preempted: {said}; start it again to go on")
    elif outcome.failure is not None:
        _say(describe(outcome.failure, job))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _signals(mask: set[Any]) -> Generator[int]:
    """A descriptor from which the numbers of signals are read as bytes; in the body none is blocked."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    os.set_blocking(read, False)
    handlers = {number: signal.signal(number, lambda *_: None) for number in _WATCHED}
    before = signal.set_wakeup_fd(write)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        yield read
    finally:
        # blocked, and sent again where it was not read, so that what comes between two attempts
        # is for the next one
        signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
        with contextlib.suppress(BlockingIOError):
            for number in os.read(read, 4096):
                os.kill(os.getpid(), number)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(before)
        os.close(read)
        os.close(write)
