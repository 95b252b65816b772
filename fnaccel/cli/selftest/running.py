"""The ranks of the checks, and the way to run a function as these ranks."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import Any

import attrs

import fnaccel as fa
from fnaccel.cli.selftest.meeting import Meeting
from fnaccel.cli.selftest.results import CheckFailedError
from fnaccel.errors import LaunchError

LIMIT = 60.0
"""Seconds for which the ranks of a check may wait for each other."""


@attrs.frozen(kw_only=True)
class Ranks:
    """The ranks of all checks.

    Attributes:
        processes: on each machine.
        cpu: whether they compute on the CPU.
        nodes: the number of machines.
        node_rank: of this machine, or None.
        address: of the first machine.
        meeting: of the machines, if there are several.
    """

    processes: int
    cpu: bool = False
    nodes: int = 1
    node_rank: int | None = None
    address: str | None = None
    meeting: Meeting | None = None

    @property
    def size(self) -> int:
        """The number of ranks on all machines."""
        return self.processes * self.nodes


def on_ranks(ranks: Ranks, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Run a function as ranks, in silence.

    Returns:
        The results of this machine's ranks.

    Raises:
        CheckFailedError: the ranks failed. The output of the ranks is part of it.
    """
    printed = io.StringIO()
    port = None if ranks.meeting is None else ranks.meeting.next_port()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            return fa.notebook_launch(
                fn,
                args,
                ranks.processes,
                nodes=ranks.nodes,
                node_rank=ranks.node_rank,
                address=ranks.address,
                port=port,
                cpu=ranks.cpu,
                watchdog=LIMIT,
                rdzv=None if port is None else {"join_timeout": LIMIT},
            )
    except LaunchError as error:
        raise CheckFailedError(error.what.splitlines()[0], printed.getvalue()) from None
