"""The result of a check, and the way to run a function as ranks for it."""

from __future__ import annotations

import contextlib
import io
import itertools
from collections.abc import Callable
from typing import Any, Literal

import attrs

import fnaccel as fa
from fnaccel.errors import LaunchError
from fnaccel.launch.job import STATIC_PORT

Status = Literal["pass", "fail", "not available"]
_calls = itertools.count()
LIMIT = 60.0
"""Seconds for which the ranks of a check may wait for each other."""


@attrs.frozen
class Result:
    """The verdict of one check.

    Attributes:
        check: its name.
        status: `"pass"`, `"fail"` or `"not available"`.
        detail: the finding, in one line.
        output: everything that the ranks printed, if it failed.
    """

    check: str
    status: Status
    detail: str = ""
    output: str = ""


@attrs.frozen(kw_only=True)
class Ranks:
    """The ranks of all checks: arguments of `fa.notebook_launch`."""

    processes: int
    nodes: int = 1
    node_rank: int | None = None
    address: str | None = None
    port: int | None = None
    cpu: bool = False

    @property
    def several(self) -> bool:
        """Whether there are several machines."""
        return self.nodes > 1

    @property
    def size(self) -> int:
        """The number of ranks on all machines."""
        return self.processes * self.nodes


class CheckFailedError(Exception):
    """A check found a fault, or could not be run.

    Args:
        detail: one line.
        output: the output of the ranks.
    """

    def __init__(self, detail: str, output: str = "") -> None:
        super().__init__(detail)
        self.output = output


class NotAvailableError(Exception):
    """A check has nothing to check on this machine, for the reason given."""


def on_ranks(ranks: Ranks, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Run a function as ranks, in silence.

    Returns:
        The results of this machine's ranks.

    Raises:
        CheckFailedError: the ranks failed. The output of the ranks is part of it.
    """
    printed = io.StringIO()
    if (
        ranks.several
    ):  # a port of its own: a machine may be late, and would find the job before at the same port
        ranks = attrs.evolve(ranks, port=(ranks.port or STATIC_PORT) + next(_calls))
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            return fa.notebook_launch(fn, args, **attrs.asdict(ranks), watchdog=LIMIT)
    except LaunchError as error:
        raise CheckFailedError(error.what.splitlines()[0], printed.getvalue()) from None


def judged(check: str, run: Callable[[], str]) -> Result:
    """The result of a check whose function returns its finding.

    Example:
        >>> judged("two", lambda: "2 of 2 are there")
        Result(check='two', status='pass', detail='2 of 2 are there', output='')
    """
    try:
        return Result(check, "pass", run())
    except NotAvailableError as reason:
        return Result(check, "not available", str(reason))
    except CheckFailedError as fault:
        return Result(check, "fail", str(fault), fault.output)
