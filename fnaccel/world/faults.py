"""The records of ranks if one waits for too long, and the fault that follows from them.

Only a certain fault counts: a rank that left, or ranks that made different calls. A rank without a record
may still come. Everything here is a pure function. `peers.py` sends the records.
"""

from __future__ import annotations

import json
from collections.abc import Collection

import attrs


@attrs.frozen(kw_only=True)
class Record:
    """The record of one rank.

    Attributes:
        rank: which rank.
        count: the number of calls of all ranks that it has begun.
        names: the newest of these calls. The last is call number `count`.
        inside: whether it is inside that call.
        place: the line of the script that made the call, if that can be told.
        left: why the rank left the world, as the predicate of a sentence, or None if it has not left.
        failed: whether it left because call number `count` raised.
        follows: whether it left because it had lost another rank.
        abandoned: the number of the newest call in whose middle its memory ran out, or 0.
        ports: the TCP ports of its gloo groups.
        answers: the number of the newest roll call that it answers.
    """

    rank: int
    count: int = 0
    names: tuple[str, ...] = attrs.field(default=(), converter=tuple[str, ...])
    inside: bool = False
    place: str = ""
    left: str | None = None
    failed: bool = False
    follows: bool = False
    abandoned: int = 0
    ports: tuple[int, ...] = attrs.field(default=(), converter=tuple[int, ...])
    answers: int = 0

    def text(self) -> str:
        """As JSON, for a store."""
        return json.dumps(attrs.asdict(self))

    @staticmethod
    def of(text: str | bytes) -> Record:
        """The inverse of `text`."""
        return Record(**json.loads(text))

    def name(self, number: int) -> str | None:
        """The name of one call, or None if it is too old or was not made."""
        at = number - self.count - 1
        return self.names[at] if -len(self.names) <= at < 0 else None

    def at(self, number: int) -> str:
        """One call, and the line of the script that made it if it is the newest one."""
        place = f" ({self.place})" if self.place and number == self.count else ""
        return f"{self.name(number)}{place}"

    @property
    def call(self) -> str:
        """The newest call, and the line of the script that made it."""
        return self.at(self.count)

    @property
    def departure(self) -> str:
        """How and after which call the rank left."""
        if self.failed:
            return f"{self.left}, in call {self.count}, {self.call}"
        if self.count == 0:
            return f"{self.left}, before its first call"
        return f"{self.left}, after call {self.count}, {self.call}"


def find_fault(me: Record, peers: Collection[Record], *, idle: bool = True) -> str | None:
    """The reason why this rank's newest call will never end, if that is certain. Else None.

    Args:
        me: the record of this rank.
        peers: the records of the others.
        idle: whether this rank only waits. If it still computes, its own memory may run out too, and then
            all ranks can try again.

    Example:
        >>> me = Record(rank=0, count=1, names=("fa.gather",))
        >>> find_fault(me, [Record(rank=1, left="exited")])
        'rank 0 waits in call 1, fa.gather, for rank 1, which exited, before its first call'
    """
    ordered = sorted(peers, key=lambda record: record.rank)
    for other in ordered:
        number = _first_difference(me, other)
        if number is not None:
            low, high = sorted((me, other), key=lambda record: record.rank)
            return (
                f"ranks make different calls: call {number} of this world is {low.at(number)} "
                f"on rank {low.rank} and {high.at(number)} on rank {high.rank}"
            )
    for other in ordered:
        stopped = other.left is not None and not other.follows
        if stopped and (other.count < me.count or (other.failed and other.count == me.count)):
            return (
                f"rank {me.rank} waits in call {me.count}, {me.call}, for rank {other.rank}, "
                f"which {other.departure}"
            )
        if idle and me.inside and other.abandoned == me.count > 0:
            return (
                f"rank {me.rank} waits in call {me.count}, {me.call}, for rank {other.rank}, "
                "whose memory ran out in it: batches of one shape let memory run out on all ranks"
            )
    return None


def _first_difference(me: Record, other: Record) -> int | None:
    """The number of the first call that two ranks made differently, as far back as both remember."""
    last = min(me.count, other.count)
    first = max(me.count - len(me.names), other.count - len(other.names)) + 1
    return next((number for number in range(first, last + 1) if me.name(number) != other.name(number)), None)
