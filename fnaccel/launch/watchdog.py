"""`Watchdog`: ends a job whose ranks have not gone on for too long, with the place and the stacks of each.

It belongs to a launcher of one machine. On several machines, and under other launchers, a thread of each rank
does the same: `fnaccel.world.watchdog`. The judgement is `fnaccel.world.stalls`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Sequence
from typing import IO

import attrs

from fnaccel.launch.failure import Failure
from fnaccel.launch.forking import Rank
from fnaccel.world import stacks
from fnaccel.world.hang_report import CODE, report
from fnaccel.world.progress_record import ProgressRecords
from fnaccel.world.stall_clock import StallClock, process_state
from fnaccel.world.stalls import Finding, RankView, judge

INTERVAL = 1.0
"""Seconds between two looks at the ranks."""

WRITING = 1.0
"""Seconds that ranks get to write their stacks."""

GRACE = 2.0
"""Seconds between SIGTERM and SIGKILL after a finding. Ranks that wait in C++ run no handler."""


@attrs.frozen
class Traces:
    """The positions of ranks, and their stacks on demand: memory and files that exist before the forks."""

    records: ProgressRecords
    dumps: tuple[IO[bytes], ...]

    @staticmethod
    def make(count: int) -> Traces:
        """For so many ranks of this machine."""
        return Traces(ProgressRecords.make(count), tuple(stacks.open_dump() for _ in range(count)))

    def write(self, local_rank: int) -> None:
        """In a rank: write the position from now on, and the stacks whenever the launcher asks."""
        self.records.write(local_rank)
        stacks.dump_on_signal(self.dumps[local_rank])

    def close(self) -> None:
        """In the launcher: close the files."""
        for dump in self.dumps:
            dump.close()
        self.records.close()


@attrs.define
class Watchdog:
    """Looks at the ranks of one attempt.

    Attributes:
        limit: seconds that a phase may last.
        traces: of all ranks of this machine.
        first: the rank of the first of them.
        interval: seconds between two looks.
    """

    limit: float
    traces: Traces
    first: int
    interval: float = INTERVAL
    _clock: StallClock = attrs.field(init=False)
    _next: float = attrs.field(default=0.0, init=False)
    _suspicion: tuple[Finding, list[int]] | None = attrs.field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        self._clock = StallClock(self.interval)

    def wait(self) -> float:
        """Seconds until the next look."""
        return max(0.0, self._next - time.monotonic())

    def look(self, alive: Sequence[Rank]) -> Failure | None:
        """Look at the ranks if it is time to. Returns the failure of the job if they will not go on.

        The first look that finds a reason makes the ranks write their stacks. The failure follows a second
        later, if no rank has moved by then.
        """
        now = time.monotonic()
        if now < self._next:
            return None
        self._next = now + self.interval
        self._clock.tick(now)
        views = [self._view(rank) for rank in alive]
        apart = self._clock.compare(views)
        finding = judge(views, self.limit, apart=apart)
        if finding is None:
            self._suspicion = None
            return None
        if self._suspicion is None:
            self._ask(alive)
            self._next = now + WRITING
            self._suspicion = finding, [rank.pid for rank in alive]
            return None
        return self._failure(finding, views)

    def _view(self, rank: Rank) -> RankView:
        position = self.traces.records.read(rank.rank - self.first)
        state = process_state(rank.pid)
        return self._clock.view(rank.rank, position, pid=rank.pid, host=socket.gethostname(), state=state)

    def _ask(self, alive: Sequence[Rank]) -> None:
        """Make the ranks write their stacks, in the place of those that they wrote before."""
        for rank in alive:
            self.traces.dumps[rank.rank - self.first].truncate(0)
            if stacks.SIGNAL is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.pid, stacks.SIGNAL)

    def _failure(self, finding: Finding, views: Sequence[RankView]) -> Failure:
        written: dict[int, str] = {}
        for view in views:
            number = view.rank - self.first
            dump = stacks.read_dump(self.traces.dumps[number])
            written[view.rank] = stacks.shorten(dump, self.traces.records.thread(number))
        rank = finding.ranks[0] if finding.ranks else views[0].rank
        text = report(finding, views, written, limit=self.limit)
        return Failure(rank=rank, code=CODE, when=time.monotonic(), text=text, hung=True)


def signals(now: float) -> list[tuple[float, signal.Signals]]:
    """The signals that end the ranks after a finding, and when."""
    return [(now, signal.SIGTERM), (now + GRACE, signal.SIGKILL)]
