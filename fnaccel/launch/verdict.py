"""The decision when the ranks of all machines have ended: another attempt, or the end of the job."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from fnaccel.errors import Preempted


@attrs.frozen(kw_only=True)
class MachineResult:
    """How the ranks of one machine ended.

    Attributes:
        code: the exit code.
        failed: whether a rank failed by itself, so not because the launcher ended it.
        follows: whether that rank only reported that another rank was gone.
        told: whether a signal came to the launcher, so that nothing may be started again.
        stopped: whether the launcher ended ranks so that a machine can join: another one, or this one again.
        lost: whether the launcher itself is gone.
        silent: whether it counts as gone only because it showed no sign of life. It may be frozen.
        order: the place of this failure among those of the attempt, by time.
    """

    code: int = 0
    failed: bool = False
    follows: bool = False
    told: bool = False
    stopped: bool = False
    lost: bool = False
    silent: bool = False
    order: int = 0


@attrs.frozen(kw_only=True)
class Decision:
    """The next thing on all machines: another attempt, or the end.

    Attributes:
        again: whether the ranks are started again.
        code: the exit code of the job if they are not.
        counted: whether the next attempt uses up one of the restarts.
    """

    again: bool
    code: int = 0
    counted: bool = False


@attrs.frozen(kw_only=True)
class Place:
    """This machine's place in one attempt.

    Attributes:
        number: how many attempts there were before.
        machine, machines: which of how many machines this is.
        failures: how many restarts are used up.
    """

    number: int = 0
    machine: int = 0
    machines: int = 1
    failures: int = 0


def decide(results: Iterable[MachineResult], *, more: bool) -> Decision:
    """Decide by the results of all machines.

    Args:
        results: one for each machine.
        more: whether a restart is left.

    Example:
        >>> decide([MachineResult(), MachineResult(code=1, failed=True)], more=True).again
        True
    """
    ended = list(results)
    told = any(result.told for result in ended)
    failed = [result for result in ended if result.failed]
    causes = [result for result in failed if not result.follows]
    if not causes and not told and any(result.stopped for result in ended):
        return Decision(again=True)
    if not causes and any(result.code == Preempted.CODE for result in ended):
        return Decision(again=False, code=Preempted.CODE)
    if failed and more and not told:
        return Decision(again=True, counted=True)
    if causes:
        return Decision(again=False, code=min(causes, key=lambda result: (result.lost, result.order)).code)
    # a signal comes before ranks that only missed the ranks that it ended
    codes = [result.code for result in sorted(ended, key=lambda result: result.failed) if result.code]
    return Decision(again=False, code=codes[0] if codes else 0)
