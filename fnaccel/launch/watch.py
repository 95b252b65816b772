"""`Watch`: watches the ranks until they have ended, and sends them signals."""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import sys
import time
from typing import TYPE_CHECKING

import attrs

from fnaccel.errors import LaunchError, Preempted
from fnaccel.launch.failure import Failure, cause
from fnaccel.launch.forking import Rank, send
from fnaccel.launch.job import Job
from fnaccel.launch.verdict import Decision, MachineResult
from fnaccel.launch.watchdog import Watchdog, signals
from fnaccel.texts import ranks_of

if TYPE_CHECKING:
    from fnaccel.launch.coordinator import Coordinator

SETTLE = 0.5
"""Seconds to wait for further reports after the first failure: the first may not be the cause."""

UNHEARD = 5.0
"""The same if a rank only reports that another one has gone: that one may still be about to report why."""

AFTER_FAILURE = 10.0
"""Seconds for ranks to clean up after another rank has failed. They can't save without that rank."""

NOTICE = 30.0
"""Seconds until a line is printed if ranks wait in `fa.start` for another rank."""

TO_END = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end the launcher and all ranks."""

TO_PASS_ON = (signal.SIGUSR1,)
"""Signals that the launcher only passes on to the ranks."""


@attrs.frozen(kw_only=True)
class Outcome:
    """The result of an attempt.

    Attributes:
        code: the launcher's exit code.
        failure: the failure that caused the other failures, or None.
        killed: the number of ranks that were killed from outside the launcher.
        preempted: the message of the ranks that ended because of a stop request, or None.
        told: whether a signal came to the launcher. If so, nothing is started again.
        stopped: whether the launcher ended ranks so that another machine can join.
    """

    code: int
    failure: Failure | None = None
    killed: int = 0
    preempted: str | None = None
    told: bool = False
    stopped: bool = False

    @property
    def result(self) -> MachineResult:
        """The result for the launchers of other machines."""
        failure = self.failure
        return MachineResult(
            code=self.code,
            failed=failure is not None,
            follows=failure is not None and failure.follows,
            told=self.told,
            stopped=self.stopped,
        )


@attrs.define
class Watch:
    """The state of the ranks, and the signals that are due."""

    job: Job
    alive: list[Rank]
    signals: int
    coordinator: Coordinator | None = None
    watchdog: Watchdog | None = None
    failures: list[Failure] = attrs.field(factory=list)
    preempted: dict[int, str] = attrs.field(factory=dict)
    told: bool = False
    interrupted: int | None = None
    leaving: bool = False
    ending: bool = False
    stopped: bool = False
    absent: list[int] = attrs.field(factory=list)
    waits_since: float | None = None
    noticed: bool = False
    due: list[tuple[float, signal.Signals]] = attrs.field(factory=list)

    def run(self) -> Outcome:
        """Wait until all ranks have ended."""
        self._reap()  # a rank may have ended before SIGCHLD could be received
        while self.alive:
            self._look()
        return self._outcome()

    def wait_for_machines(self) -> tuple[Outcome, Decision]:
        """Report the result of this machine, and wait until a decision or a signal comes."""
        decision: Decision | None = None
        if self.coordinator is not None:
            self.coordinator.end(self._outcome().result)
            while self.coordinator.decision is None and not self.leaving:
                self._look()
            decision = self.coordinator.decision
        return self._outcome(), Decision(again=False) if decision is None or self.leaving else decision

    def _look(self) -> None:
        """Wait for one event (a signal, a report, the end of a rank, a deadline), and react to it."""
        now = time.monotonic()
        limit = max(0.0, self.due[0][0] - now) if self.due else None
        if limit is None and self.waits_since is not None and not self.noticed:
            limit = max(0.0, self.waits_since + NOTICE - now)
        if self._watches and self.watchdog is not None:
            limit = min(self.watchdog.wait(), math.inf if limit is None else limit)
        pipes = [rank.pipe for rank in self.alive if rank.pipe is not None]
        coordinators = [] if self.coordinator is None else [self.coordinator.fileno()]
        ready = select.select([self.signals, *pipes, *coordinators], [], [], limit)[0]
        if self.signals in ready:  # before the ranks: Ctrl-C makes them report too
            self._obey(os.read(self.signals, 4096))
        for rank in self.alive:
            self._hear(rank)
        self._reap()
        if self.coordinator is not None:
            self.coordinator.hear()
            self._end_with_others(self.coordinator.ending)
        self._see_absent()
        self._see_hang()
        while self.due and self.due[0][0] <= time.monotonic():  # signals to send
            self.ending = True
            send(self.alive, self.due.pop(0)[1])

    @property
    def _watches(self) -> bool:
        """Whether ranks have to go on: nothing has failed, and none was told to end."""
        return self.watchdog is not None and bool(self.alive) and not (self.due or self.ending)

    def _see_hang(self) -> None:
        """End the ranks if they wait for each other for too long."""
        if not self._watches or self.watchdog is None:
            return
        failure = self.watchdog.look(self.alive)
        if failure is not None:
            self._note(failure)
            self.due = signals(time.monotonic())

    def _end_with_others(self, ending: str | None) -> None:
        """Schedule the end of the ranks if the ranks of all machines must end."""
        if ending is None or not self.alive or self.ending or self.due:
            return
        if ending == "join":
            self.stopped = True
            self._end_in(0.0, self.job.grace)
        else:
            self._end_in(SETTLE, min(self.job.grace, AFTER_FAILURE))

    def _see_absent(self) -> None:
        """Report ranks that do not call `fa.start`: as a failure if they have ended, else as a notice."""
        waiting = [rank.rank for rank in self.alive if rank.start == "joining"]
        if not waiting or self.ending or self.due:
            self.waits_since = None
            return
        if self.absent:
            self._note(_absence(self.absent[0], waiting, self.job))
            return
        now = time.monotonic()
        self.waits_since = self.waits_since or now
        late = [rank.rank for rank in self.alive if not rank.start]
        if late and not self.noticed and now - self.waits_since >= NOTICE:
            self.noticed = True
            text = f"{_wait(waiting)} in fa.start for {ranks_of(late)}, for {NOTICE:g} s by now"
            print(f"fnaccel launch: {text}", file=sys.stderr, flush=True)

    def _outcome(self) -> Outcome:
        killed = sum(failure.killed for failure in self.failures)
        # a rank that has saved decides for all. Another may have failed only because that rank was gone
        if self.preempted and all(failure.follows for failure in self.failures):
            message = next((text for text in self.preempted.values() if text), "")
            return Outcome(code=Preempted.CODE, preempted=message, told=self.told, stopped=self.stopped)
        if self.failures:
            first = cause(self.failures)
            return Outcome(code=first.code, failure=first, killed=killed, told=self.told)
        code = 0 if self.interrupted is None else 128 + self.interrupted
        return Outcome(code=code, told=self.told, stopped=self.stopped)

    def _obey(self, numbers: bytes) -> None:
        """Pass a signal on to the ranks. A second signal to end kills them at once."""
        for number in numbers:
            if number in TO_PASS_ON:
                self.told = True
                send(self.alive, signal.Signals(number))
            if number not in TO_END:
                continue
            now = time.monotonic()
            self.leaving = self.leaving or not self.alive or self.interrupted is not None
            if self.interrupted is not None:
                self.due = [(now, signal.SIGKILL)]
                continue
            self.told = True
            self.interrupted = number
            self.ending = True
            self.due = [(now + self.job.grace, signal.SIGKILL)]
            # a terminal has sent Ctrl-C to the ranks as well: once more would interrupt their clean-up
            if number != signal.SIGINT or not _in_foreground():
                self.due.insert(0, (now, signal.Signals(number)))

    def _hear(self, rank: Rank) -> None:
        heard = rank.hear()
        if heard is not None:
            self._note(heard)

    def _note(self, failure: Failure) -> None:
        if failure.rank in self.preempted or any(noted.rank == failure.rank for noted in self.failures):
            return
        if failure.preempted:
            self.preempted[failure.rank] = failure.text
            self._end_in(self.job.grace, self.job.grace)
        elif not self.ending:  # from here on the launcher itself ends the ranks
            if not (failure.follows or self.preempted) and all(noted.follows for noted in self.failures):
                self.due = []  # this is the cause that was waited for
            self.failures.append(failure)
            if self.coordinator is not None:
                self.coordinator.fail()
            self._end_in(UNHEARD if failure.follows else SETTLE, min(self.job.grace, AFTER_FAILURE))

    def _end_in(self, seconds: float, grace: float) -> None:
        """Schedule the end of the remaining ranks, unless it is scheduled already."""
        if not self.due:
            now = time.monotonic()
            self.due = [(now + seconds, signal.SIGTERM), (now + seconds + grace, signal.SIGKILL)]

    def _reap(self) -> None:
        """Collect the ranks that have ended, and note their failures."""
        for rank in list(self.alive):
            pid, status = os.waitpid(rank.pid, os.WNOHANG)
            if pid == 0:
                continue
            self._hear(rank)
            failure = Failure.ended(rank.rank, status)
            if failure is not None:
                self._note(failure)
            elif not rank.start:
                self.absent.append(rank.rank)
            self.alive.remove(rank)


def _absence(rank: int, waiting: list[int], job: Job) -> Failure:
    error = LaunchError(
        f"rank {rank} exited with code 0 before fa.start, where {_wait(waiting)} for it",
        where=f"fnaccel launch {job.name}",
        fix="call fa.start() on every rank, or on none",
    )
    return Failure(rank=rank, code=1, when=time.monotonic(), text=str(error), absent=True)


def _wait(ranks: list[int]) -> str:
    return f"{ranks_of(ranks)} wait{'s' if len(ranks) == 1 else ''}"


def _in_foreground() -> bool:
    """Whether Ctrl-C at a terminal would reach this process, and so the ranks."""
    with contextlib.suppress(OSError):
        terminal = os.open("/dev/tty", os.O_RDONLY)
        try:
            return os.tcgetpgrp(terminal) == os.getpgrp()
        finally:
            os.close(terminal)
    return False
