"""`Notice`: this process was asked to stop, and whether all ranks know that one of them was.

The question travels in the all-reduce that every step makes anyway, so it costs no collective, and
all ranks get the answer after the same step. The requests are made in `loop/preemption.py`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from fnaccel.world.host_copy import HostCopy


class Notice:
    """A request to stop, which all ranks learn of. `fa.preemption` makes it.

    Args:
        beyond: a group of all ranks, if only some of the ranks share a batch. Then
            the answer takes one more all-reduce.

    Attributes:
        at_once: whether an accelerator's answer is read in its own step, since no other step asks soon.

    Example:
        >>> with fa.preemption(train_step) as notice:
        ...     state, metrics = train_step(state, batch)
        ...     notice.stopping
        False
    """

    __slots__ = ("_asked", "_beyond", "_late", "_stopping", "at_once")

    def __init__(self, beyond: dist.ProcessGroup | None = None) -> None:
        self._beyond = beyond
        self.at_once = False
        self._asked = False
        self._stopping = False
        self._late: HostCopy | None = None

    @property
    def asked(self) -> bool:
        """Whether this process was asked to stop. Other ranks may not have learned of it yet."""
        return self._asked

    @property
    def stopping(self) -> bool:
        """Whether any rank was asked to stop: after each call of a train step equal on all ranks."""
        return self._stopping

    def ask(self) -> None:
        """Ask all ranks to stop after the step that shares the request (safe in a signal handler)."""
        self._asked = True

    def agree(self, stopping: bool) -> None:
        """Take a decision that ranks made in another way, in the same step on all of them."""
        self._stopping = self._stopping or stopping

    @property
    def numbers(self) -> tuple[float]:
        """1 if this process was asked to stop: what ranks sum in a step (`engine.totals.Question`)."""
        return (float(self._asked),)

    def hear(self, sums: torch.Tensor | None, device: torch.device) -> None:
        """Take a step's answer: the number of ranks with a stop request, or None on a single rank."""
        count = None if sums is None else sums[0]
        if self._beyond is not None:
            local = torch.full((), float(self._asked), device=device)
            count = local if count is None else count.clone()
            dist.all_reduce(count, group=self._beyond)
        if count is None:
            self.agree(self._asked)
        elif self.at_once or count.device.type == "cpu":
            self.agree(bool(count > 0))
        else:
            self._hear_later(count)

    def check(self) -> None:
        """Nothing to raise: a step goes on, and the loop stops after it."""

    def _hear_later(self, count: torch.Tensor) -> None:
        """On an accelerator: take the answer of the step before, so that no step waits for its own.

        It is always the previous step's, even if a later answer has arrived: ranks must not differ.
        """
        before, self._late = self._late, HostCopy(count)
        if before is not None:
            self.agree(bool(before.read() > 0))


class NoNotice:
    """Stands for a `Notice` on a rank that has none: other ranks may, and ranks sum by position."""

    numbers = (0.0,)

    def hear(self, sums: torch.Tensor | None, device: torch.device) -> None:
        """Nothing to do."""

    def check(self) -> None:
        """Nothing to raise."""
