"""The result of a check, and the two errors that end a check without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import attrs

Status = Literal["pass", "fail", "not available"]


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
