"""`Notice`: this process was asked to stop, and whether all ranks know that one of them was.

The question travels in the all-reduce that every step makes anyway, so it costs no collective, and
all ranks hear the answer after the same step. Who asks is in `loop/preemption.py`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class Notice:
    """A request to stop, which all ranks learn of. `fa.preemption` makes it.

    Args:
        beyond: a group of all ranks, if only some of the ranks share a batch. Then
            the answer takes one more all-reduce.

    Example:
        >>> with fa.preemption(train_step) as notice:
        ...     state, metrics = train_step(state, batch)
        ...     notice.stopping
        False
    """

    __slots__ = ("_asked", "_beyond", "_late", "_stopping")

    def __init__(self, beyond: dist.ProcessGroup | None = None) -> None:
        self._beyond = beyond
        self._asked = False
        self._stopping = False
        self._late: tuple[torch.Tensor, Any] | None = None

    @property
    def asked(self) -> bool:
        """Whether this process was asked to stop. Other ranks may not have learned of it yet."""
        return self._asked

    @property
    def stopping(self) -> bool:
        """Whether any rank was asked to stop: after each call of a train step equal on all ranks."""
        return self._stopping

    def ask(self) -> None:
        """Ask all ranks to stop after the step in which they hear of it (safe in a signal handler)."""
        self._asked = True

    def agree(self, stopping: bool) -> None:
        """Take what ranks have agreed on in another way, at the same place on all of them."""
        self._stopping = self._stopping or stopping

    def hear(self, asked: torch.Tensor | None, device: torch.device) -> None:
        """Take a step's answer: how many ranks asked, or None where there is nobody to ask."""
        if self._beyond is not None:
            own = torch.full((), float(self._asked), device=device)
            asked = own if asked is None else asked.clone()
            dist.all_reduce(asked, group=self._beyond)
        if asked is None:
            self.agree(self._asked)
        elif asked.device.type == "cpu":
            self.agree(bool(asked > 0))
        else:
            self._hear_later(asked)

    def _hear_later(self, asked: torch.Tensor) -> None:
        """On an accelerator: take the answer of the step before, so that no step waits for its own.

        It is always the one before, even where a later one has arrived: ranks must not differ.
        """
        before, self._late = self._late, None
        host = torch.empty_like(asked, device="cpu", pin_memory=True)
        host.copy_(asked, non_blocking=True)
        event: Any = torch.Event(asked.device.type)
        event.record()
        self._late = host, event
        if before is not None:
            arrived, known = before
            known.synchronize()
            self.agree(bool(arrived > 0))
