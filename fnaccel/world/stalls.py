"""Which rank keeps the others waiting: pure functions of the records of all ranks.

- `find_fault` compares the calls of ranks. It returns a fault only if it is certain: a rank that left, or
  ranks that made different calls. The call that waits raises then.
- `judge` compares places and seconds: ranks that are late without any error. The job ends then.

Nothing here reads a process, a clock or a store. `StallClock` counts the seconds between an observer's looks.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Sequence

import attrs

from fnaccel.texts import ranks_of
from fnaccel.world.progress_marks import PHASES, WAITS
from fnaccel.world.rank_record import RankRecord

OWN_CODE = 5.0
"""Code of the script may take this many limits: a rank may evaluate alone while the others wait for it.

Data sets are code of the script too, and workers take long to start.
"""

APART = 2
"""Ranks that wait for each other in each step are never this many steps apart."""

FIRST = 30.0
"""A first step, `init` and what comes before may take this many limits: an hour for the default of 120 s."""

_UNLIMITED = ("compile", "save", "restore")
_OF_THE_SCRIPT = ("outside", "evaluate")
_STOPPED, _TRACED = "T", "t"

STATES = {"R": "running", "S": "sleeping", "D": "in the kernel", "T": "stopped", "t": "traced", "Z": "ended"}
"""Names of the states of a process, by the letters of `/proc/PID/stat`."""


@attrs.frozen(kw_only=True)
class Finding:
    """Why the ranks do not go on.

    Attributes:
        ranks: the ranks that keep the others waiting. Empty if none stands out.
        what: the sentence.
        fix: what to look at.
    """

    ranks: tuple[int, ...] = attrs.field(converter=tuple[int, ...])
    what: str
    fix: str


def find_fault(me: RankRecord, peers: Collection[RankRecord], *, idle: bool = True) -> str | None:
    """The reason why this rank's newest call will never end, if that is certain. Else None.

    Args:
        me: the record of this rank.
        peers: the records of the others. A rank without a record may still come.
        idle: whether this rank only waits. If it still computes, its own memory may run out too, and then
            all ranks can try again.

    Example:
        >>> me = RankRecord(rank=0, calls=1, names=("fa.gather",))
        >>> find_fault(me, [RankRecord(rank=1, left="exited")])
        'rank 0 waits in call 1, fa.gather, for rank 1, which exited, before its first call'
    """
    ordered = sorted(peers, key=lambda record: record.rank)
    for other in ordered:
        number = _first_difference(me, other)
        if number is not None:
            low, high = sorted((me, other), key=lambda record: record.rank)
            return (
                f"ranks make different calls: call {number} of this world is {low.call(number)} "
                f"on rank {low.rank} and {high.call(number)} on rank {high.rank}"
            )
    waits = f"rank {me.rank} waits in call {me.calls}, {me.call()}, for"
    for other in ordered:
        stopped = other.left is not None and not other.follows
        if stopped and (other.calls < me.calls or (other.failed and other.calls == me.calls)):
            return f"{waits} rank {other.rank}, which {other.departure}"
        if idle and me.inside and other.abandoned == me.calls > 0:
            return f"{waits} rank {other.rank}, {other.why}"
    return None


def _first_difference(me: RankRecord, other: RankRecord) -> int | None:
    """The number of the first call that two ranks made differently, as far back as both remember."""
    last = min(me.calls, other.calls)
    first = max(me.calls - len(me.names), other.calls - len(other.names)) + 1
    return next((number for number in range(first, last + 1) if me.name(number) != other.name(number)), None)


def judge(records: Sequence[RankRecord], limit: float, *, apart: float = 0.0) -> Finding | None:
    """The reason why ranks do not go on, or None if all may still move.

    Args:
        records: all ranks that have not left.
        limit: seconds that a phase may last.
        apart: for how many seconds ranks have been `steps_apart`.

    Example:
        >>> from fnaccel.world.stalls import RankRecord, judge
        >>> waits = dict(step=5, sequence=9, first=False, shares=True)
        >>> records = [
        ...     RankRecord(rank=0, phase="gradients", age=630.0, **waits),
        ...     RankRecord(rank=1, phase="data", age=631.0, **waits),
        ... ]
        >>> judge(records, limit=120.0).what
        'rank 1 has waited 631 s for its next batch, in step 5, and rank 0 waits for it'
    """
    if not any(record.shares or record.inside for record in records):
        return None
    stopped = [record for record in records if record.state == _STOPPED]
    if stopped:
        certain = [record for record in stopped if record.stopped >= limit]
        return _stopped(certain, records) if certain else None
    # a first step may compile for minutes, but not while another rank waits in another step
    compiles = len({(record.of, record.step) for record in records if _in_step(record)}) < 2
    past_first = any(_in_step(record) and not record.first for record in records)
    uneven = len({record.calls for record in records}) > 1
    allowed = [
        _allowed(record, limit, compiles=compiles, past_first=past_first, uneven=uneven) for record in records
    ]
    late = all(record.age >= seconds for record, seconds in zip(records, allowed, strict=True))
    if late and any(map(_waits, records)):
        return _explain(records)
    return _diverged(records, apart) if apart >= limit and steps_apart(records) else None


def steps_apart(records: Sequence[RankRecord]) -> bool:
    """Whether ranks of one train step, which wait for each other in each step, are steps apart."""
    if not all(record.shares and not record.first for record in records):
        return False
    steps = [record.step for record in records]
    return len({record.of for record in records}) == 1 and max(steps) - min(steps) >= APART


def _allowed(record: RankRecord, limit: float, *, compiles: bool, past_first: bool, uneven: bool) -> float:
    """The seconds that a rank may stay where it is. `uneven`: ranks have made different numbers of calls."""
    if record.silent and past_first and record.phase not in ("save", "restore"):
        return limit  # its place is old: it has gone through its first step as the others have
    if record.phase in _UNLIMITED or record.state == _TRACED:
        return math.inf
    before = not record.sequence or record.phase == "init"
    if before or (record.first and (compiles or not _in_step(record))):
        return FIRST * limit
    if uneven and record.inside:  # it waits, or the others do
        return limit
    if record.phase in ("data", "evaluate") or (record.phase == "outside" and not record.inside):
        return OWN_CODE * limit
    return limit


def _in_step(record: RankRecord) -> bool:
    """Whether it is in a step of a train step, in a phase that has a limit."""
    return record.phase not in ("data", "init", *_OF_THE_SCRIPT, *_UNLIMITED)


def _in_own_code(record: RankRecord) -> bool:
    """Whether it does something that no other rank takes part in: data, or code of the script."""
    return record.phase in ("data", *_OF_THE_SCRIPT) and not record.inside


def _waits(record: RankRecord) -> bool:
    """Whether a rank is where it should go on by itself, or because other ranks do."""
    return record.phase not in _OF_THE_SCRIPT or record.inside


def _explain(records: Sequence[RankRecord]) -> Finding:
    """The finding for ranks that have all been at their places for too long."""
    silent = [record for record in records if record.silent]
    if silent:
        return Finding(
            ranks=_numbers(silent),
            what=f"{_names(silent)} {_verb(silent, 'does', 'do')} not answer{_waiting(silent, records)}",
            fix="see whether its machine is reachable, and whether its process was stopped (SIGSTOP)",
        )
    ahead = _ahead(records)
    if ahead is not None:
        return ahead
    own_code = [record for record in records if _in_own_code(record)]
    if own_code and len(own_code) < len(records):
        return _explain_own_code(own_code, records)
    by_step = _group(records, lambda record: (record.of, record.step))
    if by_step is not None:
        return _at_other_steps(by_step, records)
    least = min(map(_progress, records))
    behind = [record for record in records if _progress(record) == least]
    if len(behind) < len(records):
        places = [f"rank {each.rank} has been in {each.place} for {each.age:.0f} s" for each in behind]
        return Finding(
            ranks=_numbers(behind),
            what=f"{', '.join(places)}{_waiting(behind, records)}{_doing(records)}",
            fix="see the stack: a loss function that blocks, or a collective that other ranks do not make",
        )
    return _together(records)


def _ahead(records: Sequence[RankRecord]) -> Finding | None:
    """The finding for ranks that have left a call outside of steps, in which others still wait for them."""
    number = min(record.calls for record in records)
    behind = [record for record in records if record.calls == number]
    ahead = [record for record in records if record.calls > number]
    if not ahead or not all(record.inside and record.phase in _OF_THE_SCRIPT for record in behind):
        return None
    return Finding(
        ranks=_numbers(ahead),
        what=f"{_names(ahead)} {_verb(ahead, 'has', 'have')} ended call {number}, {behind[0].call()}, and "
        f"{_names(behind)} still {_verb(behind, 'waits', 'wait')} in it",
        fix="call the same parts of the model, equally often, on every rank: this rank has gathered fewer "
        "than the others",
    )


def _stopped(stopped: Sequence[RankRecord], records: Sequence[RankRecord]) -> Finding:
    seconds = max(record.stopped for record in stopped)
    return Finding(
        ranks=_numbers(stopped),
        what=f"{_names(stopped)} {_verb(stopped, 'was', 'were')} stopped {seconds:.0f} s ago"
        f"{_waiting(stopped, records)}",
        fix="find out who sent SIGSTOP: a debugger, a scheduler, or Ctrl-Z",
    )


def _explain_own_code(own_code: Sequence[RankRecord], records: Sequence[RankRecord]) -> Finding:
    data = [record for record in own_code if record.phase == "data"]
    culprits = data or list(own_code)
    age, step = max(record.age for record in culprits), _steps(culprits)
    if data:
        return Finding(
            ranks=_numbers(data),
            what=f"{_names(data)} {_verb(data, 'has', 'have')} waited {age:.0f} s for "
            f"{_verb(data, 'its', 'their')} next batch, in {step}{_waiting(data, records)}",
            fix="see the stack: a dataset that blocks, a worker that died, a file system that hangs",
        )
    return Finding(
        ranks=_numbers(culprits),
        what=f"{_names(culprits)} {_verb(culprits, 'has', 'have')} been in code of the script for {age:.0f} "
        f"s, before {step}{_waiting(culprits, records)}",
        fix="see the stack. Code that needs longer on some ranks needs a longer limit: --watchdog, or "
        "fa.start(watchdog=)",
    )


def _at_other_steps(minority: Sequence[RankRecord], records: Sequence[RankRecord]) -> Finding:
    several = len({record.of for record in records}) > 1
    where = (
        [f"rank {record.rank} runs step {record.step} of {record.of}" for record in records]
        if several
        else [f"rank {record.rank} runs step {record.step}" for record in records]
    )
    return Finding(
        ranks=_numbers(minority),
        what=f"ranks run different steps: {', '.join(where)}",
        fix="call the same train steps on every rank, equally often (fa.shard gives all as many batches)",
    )


def _diverged(records: Sequence[RankRecord], apart: float) -> Finding:
    minority = _group(records, lambda record: record.step) or records
    where = ", ".join(f"rank {record.rank} at step {record.step}" for record in records)
    return Finding(
        ranks=_numbers(minority),
        what=f"ranks have been steps apart for {apart:.0f} s: {where}. Each all-reduce adds up gradients of "
        "different steps",
        fix="call the train step equally often on every rank, and begin on all from one checkpoint",
    )


def _together(records: Sequence[RankRecord]) -> Finding:
    age = min(record.age for record in records)
    where = records[0].activity
    if where == "data":
        what, fix = "all ranks have waited {:.0f} s for their next batch", "see whether the files can be read"
    else:
        what = f"all ranks have been in {where} for {{:.0f}} s"
        fix = (
            "see the stacks: another collective on one of the ranks, a network that fails, or a phase that "
            "needs a longer limit (--watchdog, fa.start(watchdog=))"
        )
    return Finding(ranks=(), what=f"{what.format(age)}, in {_steps(records)}{_doing(records)}", fix=fix)


def _progress(record: RankRecord) -> tuple[int, int]:
    """How far it is in its step. The others wait for the rank that is behind, whichever phase they are in.

    Stages take micro-batches in different orders. One that waits for another stage is not behind.
    """
    phase = PHASES.index(record.phase)
    within_micro_batch = record.phase in ("forward", "backward") and not record.does.startswith(WAITS)
    return (record.micro_batch, phase) if within_micro_batch else (sys.maxsize, phase)


def _group(records: Sequence[RankRecord], key: Callable[[RankRecord], Hashable]) -> list[RankRecord] | None:
    """The ranks that differ from the majority, all if there is none, or None if all are equal."""
    counts = Counter(map(key, records))
    if len(counts) == 1:
        return None
    (most, count), *_ = counts.most_common()
    if 2 * count <= len(records):
        return list(records)
    return [record for record in records if key(record) != most]


def _numbers(records: Sequence[RankRecord]) -> tuple[int, ...]:
    return tuple(sorted(record.rank for record in records))


def _names(records: Sequence[RankRecord]) -> str:
    return ranks_of(_numbers(records))


def _steps(records: Sequence[RankRecord]) -> str:
    steps = sorted({record.step for record in records})
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"


def _verb(records: Sequence[RankRecord], one: str, several: str) -> str:
    return one if len(records) == 1 else several


def _waiting(culprits: Sequence[RankRecord], records: Sequence[RankRecord]) -> str:
    """The end of the sentence: the ranks that wait."""
    others = [record for record in records if record.rank not in _numbers(culprits)]
    if not others:
        return ""
    return f", and {_names(others)} {_verb(others, 'waits', 'wait')} for {_verb(culprits, 'it', 'them')}"


def _doing(records: Sequence[RankRecord]) -> str:
    """The end of the sentence: what each rank has begun last, if ranks differ in that."""
    if len({record.does for record in records}) == 1:
        return ""
    listed = (f"rank {record.rank} {record.does or 'no part of the model'}" for record in records)
    return f". Last, {', and '.join(listed)}"


@attrs.define
class StallClock:
    """For how long each rank has not moved, by the looks of one observer.

    Time in which the observer itself did not run does not count: a whole job may be suspended and go on.

    Attributes:
        interval: seconds between two looks. A longer pause counts as twice that.
        apart: for how many seconds ranks have been `steps_apart`.
    """

    interval: float
    apart: float = 0.0
    _seconds: float = attrs.field(default=0.0, init=False)
    _looked: float | None = attrs.field(default=None, init=False)
    _seen: dict[int, RankRecord] = attrs.field(factory=dict, init=False)

    def tick(self, now: float) -> None:
        """Begin a look at `now`, in seconds."""
        self._seconds = 0.0 if self._looked is None else min(now - self._looked, 2 * self.interval)
        self._looked = now

    def see(self, record: RankRecord, state: str) -> RankRecord:
        """One rank in this look: its record with its age, its state and for how long it has been stopped."""
        before = self._seen.get(record.rank, record)
        age = before.age + self._seconds if before.sequence == record.sequence else 0.0
        stopped = before.stopped + self._seconds if state == _STOPPED else 0.0
        seen = attrs.evolve(record, age=age, state=state, stopped=stopped)
        self._seen[record.rank] = seen
        return seen

    def compare(self, records: Sequence[RankRecord]) -> float:
        """For how many seconds the steps of these ranks have been apart. Call it once a look."""
        self.apart = self.apart + self._seconds if steps_apart(records) else 0.0
        return self.apart
