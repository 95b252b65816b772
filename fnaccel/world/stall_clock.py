"""`StallClock`: for how long each rank has not moved, by the looks of an observer.

Time in which the observer itself did not run does not count: a whole job may be suspended and go on.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import attrs

from fnaccel.world.progress_record import Position
from fnaccel.world.stalls import RankView, steps_apart


@attrs.define
class _Rank:
    sequence: int = -1
    age: float = 0.0
    stopped: float = 0.0


@attrs.define
class StallClock:
    """Counts seconds from look to look.

    Attributes:
        interval: seconds between two looks. A longer pause counts as twice that.
        apart: for how many seconds ranks have been steps apart.
    """

    interval: float
    apart: float = 0.0
    _seconds: float = attrs.field(default=0.0, init=False)
    _looked: float | None = attrs.field(default=None, init=False)
    _ranks: dict[int, _Rank] = attrs.field(factory=dict, init=False)

    def tick(self, now: float) -> None:
        """Begin a look at `now`, in seconds."""
        self._seconds = 0.0 if self._looked is None else min(now - self._looked, 2 * self.interval)
        self._looked = now

    def view(self, rank: int, position: Position, *, pid: int, host: str, state: str) -> RankView:
        """The view of one rank in this look."""
        known = self._ranks.setdefault(rank, _Rank())
        known.age = known.age + self._seconds if known.sequence == position.sequence else 0.0
        known.stopped = known.stopped + self._seconds if state == "T" else 0.0
        known.sequence = position.sequence
        age, stopped = known.age, known.stopped
        return RankView(
            rank=rank, position=position, age=age, state=state, stopped=stopped, pid=pid, host=host
        )

    def compare(self, views: list[RankView]) -> float:
        """For how many seconds the steps of these ranks have been apart. Call it once a look."""
        self.apart = self.apart + self._seconds if steps_apart(views) else 0.0
        return self.apart


def process_state(pid: int) -> str:
    """The state of a process of this machine, as the letter of `/proc/PID/stat`, or "" if unknown."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""
