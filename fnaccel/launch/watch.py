"""`Watch`: the launcher's view of its ranks until they have ended, and what it does to them meanwhile."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time

import attrs

from fnaccel.errors import LaunchError, Preempted
from fnaccel.launch.coordinator import Coordinator
from fnaccel.launch.failure import Failure, cause
from fnaccel.launch.forking import Rank, send
from fnaccel.launch.job import Job
from fnaccel.launch.verdict import Decision, MachineResult

SETTLE = 0.5
"""Seconds in which ranks may still report after the first did: it may not be the one to blame."""

AFTER_FAILURE = 10.0
"""Seconds that ranks get to clean up once another has failed: without it they can't save."""

NOTICE = 30.0
"""Seconds that a rank may take to come to `fa.start`, where others wait, before a line says so."""

TO_END = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that tell the launcher to end everything."""

TO_PASS_ON = (signal.SIGUSR1,)
"""Signals that are for the ranks alone: what they do about it is theirs."""


@attrs.frozen(kw_only=True)
class Outcome:
    """How an attempt ended.

    Attributes:
        code: the launcher's exit code.
        failure: the one that the others followed from, or None.
        killed: how many ranks were killed, by none of us.
        preempted: what the ranks said who ended because they were asked to; None where none did.
        told: whether a signal came: then nothing is started again.
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
        """What the launchers of other machines need to know of it."""
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
    """The launcher's view of its ranks, and what it still means to do to them."""

    job: Job
    alive: list[Rank]
    signals: int
    coordinator: Coordinator | None = None
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
        self._reap()  # one may have ended before its signal could be seen
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
        pipes = [rank.pipe for rank in self.alive if rank.pipe is not None]
        others = [] if self.coordinator is None else [self.coordinator.fileno()]
        ready = select.select([self.signals, *pipes, *others], [], [], limit)[0]
        if self.signals in ready:  # before the ranks: Ctrl-C makes them report too
            self._obey(os.read(self.signals, 4096))
        for rank in self.alive:
            self._hear(rank)
        self._reap()
        if self.coordinator is not None:
            self.coordinator.hear()
            self._end_with_others(self.coordinator.ending)
        self._see_absent()
        self._act()

    def _end_with_others(self, ending: str | None) -> None:
        """Mean to end the ranks if those of all machines are to end."""
        if ending is None or not self.alive or self.ending or self.due:
            return
        if ending == "join":
            self.stopped = True
            self._end_in(0.0, self.job.grace)
        else:
            self._end_in(SETTLE, min(self.job.grace, AFTER_FAILURE))

    def _see_absent(self) -> None:
        """Name ranks that do not come to `fa.start`: as a failure if they have ended, else as a notice."""
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
            text = f"{_wait(waiting)} in fa.start for {_ranks(late)}, for {NOTICE:g} s by now"
            print(f"fnaccel launch: {text}", file=sys.stderr, flush=True)

    def _outcome(self) -> Outcome:
        killed = sum(failure.killed for failure in self.failures)
        # one that has saved says it for all; another may have looked for it after it was gone
        if self.preempted and all(failure.follows for failure in self.failures):
            said = next((text for text in self.preempted.values() if text), "")
            told = self.told or not self.stopped
            return Outcome(code=Preempted.CODE, preempted=said, told=told, stopped=self.stopped)
        if self.failures:
            first = cause(self.failures)
            return Outcome(code=first.code, failure=first, killed=killed, told=self.told)
        code = 0 if self.interrupted is None else 128 + self.interrupted
        return Outcome(code=code, told=self.told, stopped=self.stopped)

    def _obey(self, numbers: bytes) -> None:
        """Pass a signal on to the ranks; at the second one that is to end them they end at once."""
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
        if failure.rank in self.preempted or any(known.rank == failure.rank for known in self.failures):
            return
        if failure.preempted:
            self.preempted[failure.rank] = failure.text
            self._end_in(self.job.grace, self.job.grace)
        elif not self.ending:  # what ends from here on was ended by the launcher
            self.failures.append(failure)
            if self.coordinator is not None:
                self.coordinator.fail()
            self._end_in(SETTLE, min(self.job.grace, AFTER_FAILURE))

    def _end_in(self, seconds: float, grace: float) -> None:
        """Mean to end the ranks that are left, unless that is meant already."""
        if not self.due:
            now = time.monotonic()
            self.due = [(now + seconds, signal.SIGTERM), (now + seconds + grace, signal.SIGKILL)]

    def _reap(self) -> None:
        """See which ranks have ended, and how."""
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

    def _act(self) -> None:
        """Send the signals whose time has come."""
        while self.due and self.due[0][0] <= time.monotonic():
            self.ending = True
            send(self.alive, self.due.pop(0)[1])


def _absence(rank: int, waiting: list[int], job: Job) -> Failure:
    error = LaunchError(
        f"rank {rank} exited with code 0 before fa.start, where {_wait(waiting)} for it",
        where=f"fnaccel launch {job.name}",
        fix="call fa.start() on every rank, or on none",
    )
    return Failure(rank=rank, code=1, when=time.monotonic(), text=str(error), absent=True)


def _wait(ranks: list[int]) -> str:
    return f"{_ranks(ranks)} wait{'s' if len(ranks) == 1 else ''}"


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, sorted(ranks)))


def _in_foreground() -> bool:
    """Whether Ctrl-C at a terminal would reach this process, and so the ranks."""
    with contextlib.suppress(OSError):
        terminal = os.open("/dev/tty", os.O_RDONLY)
        try:
            return os.tcgetpgrp(terminal) == os.getpgrp()
        finally:
            os.close(terminal)
    return False
