"""`launch`: starts the ranks of this machine, waits for them, and restarts them on request.

`rank.py` runs inside a rank's process, `watch.py` watches the ranks, and `failure.py` prints a failure.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import attrs

from fnaccel import _lazy
from fnaccel.errors import LaunchError
from fnaccel.launch.failure import describe
from fnaccel.launch.forking import fork
from fnaccel.launch.job import STATIC_PORT, Job, check
from fnaccel.launch.network import interface_to, reserved_port, wait_for_port
from fnaccel.launch.presets import find_cards, preset_variables
from fnaccel.launch.tee import Copier, entering, finish, start_copiers
from fnaccel.launch.verdict import Decision, Place, decide
from fnaccel.launch.watch import TO_END, TO_PASS_ON, Outcome, Watch
from fnaccel.launch.watchdog import Watchdog
from fnaccel.texts import counted

if TYPE_CHECKING:
    from fnaccel.launch.coordinator import Coordinator

_WATCHED = (*TO_END, *TO_PASS_ON, signal.SIGCHLD)


def launch(job: Job) -> int:
    """Run a job's processes on this machine until they end.

    The ranks are forks of the caller and share its imported modules. Call it before any thread or
    accelerator driver is started.

    Args:
        job: the job to start.

    Returns:
        0 on success. If a rank failed, the exit code of the first failure (128 + the number if a signal
        ended it), after its traceback or message was printed once. 75 if the ranks have saved because
        of a signal. 128 + the number if a signal ended the launcher. With restarts, the code of the last
        attempt.

    Raises:
        LaunchError: not all processes can be started. Those that were started are killed.
    """
    return supervise(job)[0]


def supervise(job: Job) -> tuple[int, Outcome | None]:
    """As `launch`. Also returns the outcome of the last attempt on this machine."""
    check(job)
    presets = _presets(job)
    coordinator = _lazy.load("fnaccel.launch.coordinator").meet(job) if job.several else None
    try:
        place = Place() if coordinator is None else coordinator.begin()
        # pdsh blocks SIGCHLD in its commands, and the launcher would not see the end of a rank
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED) - {signal.SIGCHLD}
        try:
            return _attempts(job, coordinator, place, mask, presets)
        finally:
            while signal.sigpending() & {*TO_END, *TO_PASS_ON}:  # for ranks that have all ended
                signal.sigwait(_WATCHED)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    finally:
        if coordinator is not None:
            coordinator.close()


def _presets(job: Job) -> dict[str, str]:
    """The variables of `--debug` and of NCCL on this machine. Variables that nobody asked for are shown."""
    cards, driver = find_cards()
    presets = preset_variables(job, os.environ, cards=cards, driver=driver)
    if job.nccl is None and "NCCL_P2P_DISABLE" in presets:
        _say("fnaccel launch: NCCL without peer-to-peer copies, for these cards: --nccl default", job)
    return presets


def _attempts(
    job: Job, coordinator: Coordinator | None, place: Place | None, mask: set[Any], presets: dict[str, str]
) -> tuple[int, Outcome | None]:
    """Start the ranks, and restart them on failure while attempts are left."""
    outcome: Outcome | None = None
    elastic = job.least_machines < job.machines
    while place is not None:
        if coordinator is not None:
            job = attrs.evolve(job, machines=place.machines, min_machines=None, machine=place.machine)
        if place.number:
            ranks = "1 rank" if job.size == 1 else f"{job.size} ranks"
            machines = f" on {counted(job.machines, 'machine')}" if elastic else ""
            attempt = f"attempt {place.failures + 1} of {job.restarts + 1}"
            _say(f"fnaccel launch: {attempt}, with {ranks}{machines}", job)
        with reserved_port() as free:  # until the end: a rank may leave its world and join again
            outcome, decision = _attempt(job, place, coordinator, mask, presets, free)
        if not decision.again:
            if coordinator is not None and decision.code not in (0, outcome.code):
                lost = f"; {coordinator.lost}" if coordinator.lost else ""
                _say(f"fnaccel launch: ranks of another machine failed with exit code {decision.code}{lost}")
            return decision.code or outcome.code, outcome
        if coordinator is None:
            number = place.number + 1
            place = Place(number=number, failures=number)
            if job.min_ranks is not None:  # it may go on without the killed ranks
                job = attrs.evolve(job, processes=max(job.min_ranks, job.processes - outcome.killed))
        else:
            place = coordinator.begin()
    code = 0 if coordinator is None or coordinator.decision is None else coordinator.decision.code
    if outcome is None and code == 0:
        raise LaunchError(
            "the job has ended, and this machine was in none of its attempts: nothing ran here",
            where=f"fnaccel launch --nnodes, at {job.store_address}:{job.port or STATIC_PORT}",
            fix="start all machines together. Give each job a --master-port of its own",
        )
    lost = f": {coordinator.lost}" if coordinator is not None and coordinator.lost else ""
    _say(f"fnaccel launch: the job has ended without this machine{lost}", job)
    return code, outcome


def _attempt(
    job: Job,
    place: Place,
    coordinator: Coordinator | None,
    mask: set[Any],
    presets: dict[str, str],
    free: int,
) -> tuple[Outcome, Decision]:
    """Start the ranks once, and wait until they have ended. Signals are blocked before and after."""
    several = coordinator is not None
    port = job.port or (STATIC_PORT if several else free)
    if place.number and job.port is not None and not several:
        wait_for_port(port)  # a worker may outlive its rank for a moment and hold the port
    watchdog = None
    if job.watchdog and job.processes > 1 and not several:
        watchdog = Watchdog(job.watchdog, job.processes, job.rank(0), job.monitor_interval)
    sys.stdout.flush()  # or every fork would write this process's buffer again
    sys.stderr.flush()
    copiers = _copiers(job)
    try:
        ranks = fork(
            job,
            port=port,
            interface=interface_to(job.store_address),
            restarts=place.number,
            several=several,
            mask=mask,
            forget=(lambda: None) if coordinator is None else coordinator.release,
            trace=(lambda _: None) if watchdog is None else watchdog.trace,
            tee=entering(copiers),
            presets=presets,
        )
    except OSError as error:
        finish(copiers)
        raise LaunchError(
            f"not all of {job.processes} processes can be started: {error.strerror}",
            where="fnaccel launch",
            fix="raise the limit of processes or open files (ulimit -u, ulimit -n), or ask for fewer",
        ) from error
    with _signals(mask) as signals, contextlib.ExitStack() as stack:
        if watchdog is not None:
            stack.callback(watchdog.close)
        watch = Watch(job, ranks, signals, coordinator, watchdog)
        outcome = watch.run()
        finish(copiers)
        _report(outcome, job)
        if coordinator is None:
            return outcome, decide([outcome.result], more=place.number < job.restarts)
        return watch.wait_for_machines()


def _copiers(job: Job) -> list[Copier]:
    """The processes that copy the output of the ranks, if the job has a folder for it."""
    if job.tee is None:
        return []
    try:
        return start_copiers(job.tee, [job.rank(number) for number in range(job.processes)])
    except OSError as error:
        raise LaunchError(
            f"the folder {job.tee} can't be written: {error.strerror}",
            where="fnaccel launch --tee",
            fix="name a folder that does not exist yet, or that you may write to",
        ) from error


def _report(outcome: Outcome, job: Job) -> None:
    if outcome.stopped:
        _say("fnaccel launch: the ranks were stopped so that another machine can join", job)
    elif outcome.preempted is not None:
        reason = outcome.preempted or "a rank ended with exit code 75"
        _say(f"fnaccel launch: preempted: {reason}; start it again to go on", job)
    elif outcome.failure is not None:
        _say(describe(outcome.failure, job))


def _say(text: str, job: Job | None = None) -> None:
    """Print a line. With `job` it is a notice, which `--quiet` leaves out."""
    if job is None or not job.quiet:
        print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _signals(mask: set[Any]) -> Generator[int]:
    """A file descriptor that yields the numbers of signals as bytes. In the body no signal is blocked."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    os.set_blocking(read, False)
    handlers = {number: signal.signal(number, lambda *_: None) for number in _WATCHED}
    before = signal.set_wakeup_fd(write)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        yield read
    finally:
        # block signals and send the unread ones again, so that a signal between two attempts reaches
        # the next attempt
        signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
        with contextlib.suppress(BlockingIOError):
            for number in os.read(read, 4096):
                if number != signal.SIGCHLD:  # each attempt begins with a look at its ranks
                    os.kill(os.getpid(), number)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(before)
        os.close(read)
        os.close(write)
