"""Which rank keeps the others waiting: a pure function of the positions of all ranks.

`RankView` is one rank as an observer sees it, and `judge` turns the views of all ranks into a `Finding`.
Nothing here reads a process, a clock or a store. `stall_clock.py` counts the seconds.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Sequence

import attrs

from fnaccel.texts import ranks_of
from fnaccel.world.progress_marks import PHASES
from fnaccel.world.progress_record import Position

OWN_CODE = 5.0
"""Code of the script may take this many limits: a rank may evaluate alone while the others wait for it."""

APART = 2
"""Ranks that wait for each other in each step are never this many steps apart."""

_UNLIMITED = ("compile", "init", "save", "restore")
_OF_THE_SCRIPT = ("outside", "evaluate")
_STOPPED, _TRACED = "T", "t"

STATES = {"R": "running", "S": "sleeping", "D": "in the kernel", "T": "stopped", "t": "traced", "Z": "ended"}
"""Names of the states of a process, by the letters of `/proc/PID/stat`."""


@attrs.frozen(kw_only=True)
class RankView:
    """One rank, as an observer sees it.

    Attributes:
        rank: which.
        position: its newest position.
        age: for how many seconds it has been there.
        state: the letter of `/proc/PID/stat`, or "" if unknown.
        stopped: for how many seconds its process has been stopped.
        silent: for how many seconds it has not answered.
        pid, host: its process.
    """

    rank: int
    position: Position
    age: float
    state: str = ""
    stopped: float = 0.0
    silent: float = 0.0
    pid: int = 0
    host: str = ""

    @property
    def place(self) -> str:
        """Its step and phase, as `"step 5, backward, micro-batch 1"`."""
        position = self.position
        part = f", micro-batch {position.micro_batch}" if position.phase in ("forward", "backward") else ""
        return f"step {position.step}, {_activity(position)}{part}"

    @property
    def in_own_code(self) -> bool:
        """Whether it does something that no other rank takes part in: data, or code of the script."""
        return self.position.phase in ("data", *_OF_THE_SCRIPT) and not self.position.inside


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


def judge(views: Sequence[RankView], limit: float, *, apart: float = 0.0) -> Finding | None:
    """The reason why ranks do not go on, or None if all may still move.

    Args:
        views: all ranks that have not left.
        limit: seconds that a phase may last.
        apart: for how many seconds ranks have been `steps_apart`.

    Example:
        >>> from fnaccel.world.stalls import RankView, judge
        >>> waits = dict(step=5, sequence=9, first=False, shares=True)
        >>> views = [
        ...     RankView(rank=0, position=Position(phase="gradients", **waits), age=130.0),
        ...     RankView(rank=1, position=Position(phase="data", **waits), age=131.0),
        ... ]
        >>> judge(views, limit=120.0).what
        'rank 1 has waited 131 s for its next batch, in step 5, and rank 0 waits for it'
    """
    if not any(view.position.shares for view in views):
        return None
    stopped = [view for view in views if view.state == _STOPPED]
    if stopped:
        certain = [view for view in stopped if view.stopped >= limit]
        return _stopped(certain, views) if certain else None
    # a first step may compile for minutes, but not while another rank waits in another step
    compiles = len({(view.position.of, view.position.step) for view in views if _in_step(view)}) < 2
    past_first = any(_in_step(view) and not view.position.first for view in views)
    allowed = [_allowed(view, limit, compiles=compiles, past_first=past_first) for view in views]
    late = all(view.age >= seconds for view, seconds in zip(views, allowed, strict=True))
    if late and any(map(_waits, views)):
        return _explain(views)
    return _diverged(views, apart) if apart >= limit and steps_apart(views) else None


def steps_apart(views: Sequence[RankView]) -> bool:
    """Whether ranks of one train step, which wait for each other in each step, are steps apart."""
    positions = [view.position for view in views]
    if not all(position.shares and not position.first for position in positions):
        return False
    steps = [position.step for position in positions]
    return len({position.of for position in positions}) == 1 and max(steps) - min(steps) >= APART


def _allowed(view: RankView, limit: float, *, compiles: bool, past_first: bool) -> float:
    """The seconds that a rank may stay where it is."""
    position = view.position
    if view.silent and past_first and position.phase not in ("save", "restore"):
        return limit  # its position is old: it has gone through its first step as the others have
    if not position.sequence or position.phase in _UNLIMITED or view.state == _TRACED:
        return math.inf
    if position.first and (compiles or not _in_step(view)):
        return math.inf
    if position.phase == "evaluate" or (position.phase == "outside" and not position.inside):
        return OWN_CODE * limit
    return limit


def _in_step(view: RankView) -> bool:
    """Whether it is in a step of a train step, in a phase that has a limit."""
    return view.position.phase not in ("data", *_OF_THE_SCRIPT, *_UNLIMITED)


def _waits(view: RankView) -> bool:
    """Whether a rank is where it should go on by itself, or because other ranks do."""
    return view.position.phase not in _OF_THE_SCRIPT or view.position.inside


def _explain(views: Sequence[RankView]) -> Finding:
    """The finding for ranks that have all been at their places for too long."""
    silent = [view for view in views if view.silent]
    if silent:
        return Finding(
            ranks=_numbers(silent),
            what=f"{_names(silent)} {_verb(silent, 'does', 'do')} not answer{_waiting(silent, views)}",
            fix="see whether its machine is reachable, and whether its process was stopped (SIGSTOP)",
        )
    own_code = [view for view in views if view.in_own_code]
    if own_code and len(own_code) < len(views):
        return _in_own_code(own_code, views)
    by_step = _group(views, lambda view: (view.position.of, view.position.step))
    if by_step is not None:
        return _at_other_steps(by_step, views)
    least = min(map(_progress, views))
    behind = [view for view in views if _progress(view) == least]
    if len(behind) < len(views):
        return Finding(
            ranks=_numbers(behind),
            what=f"{_places(behind)}{_waiting(behind, views)}",
            fix="see the stack: a loss function that blocks, or a collective that other ranks do not make",
        )
    return _together(views)


def _stopped(stopped: Sequence[RankView], views: Sequence[RankView]) -> Finding:
    seconds = max(view.stopped for view in stopped)
    return Finding(
        ranks=_numbers(stopped),
        what=f"{_names(stopped)} {_verb(stopped, 'was', 'were')} stopped {seconds:.0f} s ago"
        f"{_waiting(stopped, views)}",
        fix="find out who sent SIGSTOP: a debugger, a scheduler, or Ctrl-Z",
    )


def _in_own_code(own_code: Sequence[RankView], views: Sequence[RankView]) -> Finding:
    data = [view for view in own_code if view.position.phase == "data"]
    culprits = data or list(own_code)
    age, step = max(view.age for view in culprits), _steps(culprits)
    if data:
        return Finding(
            ranks=_numbers(data),
            what=f"{_names(data)} {_verb(data, 'has', 'have')} waited {age:.0f} s for "
            f"{_verb(data, 'its', 'their')} next batch, in {step}{_waiting(data, views)}",
            fix="see the stack: a dataset that blocks, a worker that died, a file system that hangs",
        )
    return Finding(
        ranks=_numbers(culprits),
        what=f"{_names(culprits)} {_verb(culprits, 'has', 'have')} been in code of the script for {age:.0f} "
        f"s, before {step}{_waiting(culprits, views)}",
        fix="see the stack. Code that needs longer on some ranks needs a longer limit",
    )


def _at_other_steps(minority: Sequence[RankView], views: Sequence[RankView]) -> Finding:
    several = len({view.position.of for view in views}) > 1
    where = (
        [f"rank {view.rank} runs step {view.position.step} of {view.position.of}" for view in views]
        if several
        else [f"rank {view.rank} runs step {view.position.step}" for view in views]
    )
    return Finding(
        ranks=_numbers(minority),
        what=f"ranks run different steps: {', '.join(where)}",
        fix="call the same train steps on every rank, equally often (fa.shard gives all as many batches)",
    )


def _diverged(views: Sequence[RankView], apart: float) -> Finding:
    minority = _group(views, lambda view: view.position.step) or views
    where = ", ".join(f"rank {view.rank} at step {view.position.step}" for view in views)
    return Finding(
        ranks=_numbers(minority),
        what=f"ranks have been steps apart for {apart:.0f} s: {where}. Each all-reduce adds up gradients of "
        "different steps",
        fix="call the train step equally often on every rank, and begin on all from one checkpoint",
    )


def _together(views: Sequence[RankView]) -> Finding:
    age = min(view.age for view in views)
    where = _activity(views[0].position)
    if where == "data":
        what, fix = "all ranks have waited {:.0f} s for their next batch", "see whether the files can be read"
    else:
        what = f"all ranks have been in {where} for {{:.0f}} s"
        fix = (
            "see the stacks: another collective on one of the ranks, a network that fails, or a phase that "
            "needs a longer limit"
        )
    return Finding(ranks=(), what=f"{what.format(age)}, in {_steps(views)}", fix=fix)


def _progress(view: RankView) -> tuple[int, int]:
    """How far it is in its step. The others wait for the rank that is behind, whichever phase they are in."""
    phase = PHASES.index(view.position.phase)
    within_micro_batch = view.position.phase in ("forward", "backward")
    return (view.position.micro_batch, phase) if within_micro_batch else (sys.maxsize, phase)


def _activity(position: Position) -> str:
    """Its phase, or the call that it is in if no phase of a step has begun."""
    inside = position.inside and position.phase == "outside"
    return position.call if inside else position.phase


def _group(views: Sequence[RankView], key: Callable[[RankView], Hashable]) -> list[RankView] | None:
    """The ranks that differ from the majority, all if there is none, or None if all are equal."""
    counts = Counter(map(key, views))
    if len(counts) == 1:
        return None
    (most, count), *_ = counts.most_common()
    return [view for view in views if key(view) != most] if 2 * count > len(views) else list(views)


def _numbers(views: Sequence[RankView]) -> tuple[int, ...]:
    return tuple(sorted(view.rank for view in views))


def _names(views: Sequence[RankView]) -> str:
    return ranks_of(_numbers(views))


def _places(views: Sequence[RankView]) -> str:
    return ", ".join(f"rank {view.rank} has been in {view.place} for {view.age:.0f} s" for view in views)


def _steps(views: Sequence[RankView]) -> str:
    steps = sorted({view.position.step for view in views})
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"


def _verb(views: Sequence[RankView], one: str, several: str) -> str:
    return one if len(views) == 1 else several


def _waiting(culprits: Sequence[RankView], views: Sequence[RankView]) -> str:
    """The end of the sentence: the ranks that wait."""
    others = [view for view in views if view.rank not in _numbers(culprits)]
    if not others:
        return ""
    return f", and {_names(others)} {_verb(others, 'waits', 'wait')} for {_verb(culprits, 'it', 'them')}"
