"""`Watchdog`: ends a job whose ranks have not gone on for too long, with the place and the stacks of each.

It belongs to a launcher of one machine. On several machines, and under other launchers, the watcher of each
rank does the same (`fnaccel.world.watcher`), with the same record, judge and report.
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
from fnaccel.world.rank_record import RankRecord, SharedRecords, process_state
from fnaccel.world.stalls import Finding, StallClock, judge

WRITING = 1.0
"""Seconds that ranks get to write their stacks."""

GRACE = 2.0
"""Seconds between SIGTERM and SIGKILL after a finding. Ranks that wait in C++ run no handler."""


@attrs.define
class Watchdog:
    """Looks at the ranks of one attempt. Made before they are forked: they write into its memory and files.

    Attributes:
        limit: seconds that a phase may last.
        count: the number of ranks on this machine.
        first: the rank of the first of them.
        interval: seconds between two looks.
    """

    limit: float
    count: int
    first: int
    interval: float
    _records: SharedRecords = attrs.field(init=False)
    _dumps: list[IO[bytes]] = attrs.field(init=False)
    _clock: StallClock = attrs.field(init=False)
    _next: float = attrs.field(default=0.0, init=False)
    _suspects: bool = attrs.field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        self._records = SharedRecords.make(self.count)
        self._dumps = [stacks.open_dump() for _ in range(self.count)]
        self._clock = StallClock(self.interval)

    def trace(self, local_rank: int) -> None:
        """In a rank: write its place from now on, and the stacks whenever the launcher asks."""
        self._records.write(local_rank)
        stacks.dump_on_signal(self._dumps[local_rank])

    def close(self) -> None:
        """Close the memory and the files."""
        for dump in self._dumps:
            dump.close()
        self._records.close()

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
        records = [self._see(rank) for rank in alive]
        finding = judge(records, self.limit, apart=self._clock.compare(records))
        if finding is not None and self._suspects:
            return self._failure(finding, records)
        self._suspects = finding is not None
        if self._suspects:
            self._ask(alive)
            self._next = now + WRITING
        return None

    def _see(self, rank: Rank) -> RankRecord:
        process = RankRecord(rank=rank.rank, pid=rank.pid, host=socket.gethostname())
        record = self._records.read(rank.rank - self.first, process)
        return self._clock.see(record, process_state(rank.pid))

    def _ask(self, alive: Sequence[Rank]) -> None:
        """Make the ranks write their stacks, in the place of those that they wrote before."""
        for rank in alive:
            self._dumps[rank.rank - self.first].truncate(0)
            if stacks.SIGNAL is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.pid, stacks.SIGNAL)

    def _failure(self, finding: Finding, records: Sequence[RankRecord]) -> Failure:
        written: dict[int, str] = {}
        for record in records:
            number = record.rank - self.first
            dump = stacks.read_dump(self._dumps[number])
            written[record.rank] = stacks.shorten(dump, self._records.thread(number))
        rank = finding.ranks[0] if finding.ranks else records[0].rank
        text = report(finding, records, written, limit=self.limit)
        return Failure(rank=rank, code=CODE, when=time.monotonic(), text=text, hung=True)


def signals(now: float) -> list[tuple[float, signal.Signals]]:
    """The signals that end the ranks after a finding, and when."""
    return [(now, signal.SIGTERM), (now + GRACE, signal.SIGKILL)]
