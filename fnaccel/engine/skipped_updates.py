"""`SkippedUpdates`: a run whose every update is skipped warns, and then ends."""

from __future__ import annotations

import warnings
from collections import deque

import torch

from fnaccel.errors import NonfiniteError
from fnaccel.step.loss import Scalar
from fnaccel.world.host_copy import HostCopy

WARN_AFTER = 25
"""Skipped updates in a row that are worth a warning: a loss scale of 65,536 needs 16 to come down to 1."""

_LAG = 8  # on an accelerator, steps until a flag is read: the same on every rank, so that all raise together


class SkippedUpdates:
    """Counts updates that were skipped in a row.

    Args:
        limit: how many skipped updates in a row are an error. None for any number.
        speaks: whether this rank warns.
    """

    def __init__(self, limit: int | None, *, speaks: bool = True) -> None:
        self._limit = limit
        self._speaks = speaks
        self._in_a_row = 0
        self._waiting: deque[HostCopy] = deque()

    def put(self, skip: Scalar | None) -> None:
        """Take whether an update was skipped: a number or a 0-d tensor, 1 if it was."""
        if not isinstance(skip, torch.Tensor) or skip.device.type == "cpu":
            self._count(bool(skip))
            return
        self._waiting.append(HostCopy(skip))
        if len(self._waiting) > _LAG:
            self._count(bool(self._waiting.popleft().read()))

    def _count(self, skipped: bool) -> None:
        self._in_a_row = self._in_a_row + 1 if skipped else 0
        if self._in_a_row == WARN_AFTER and self._speaks:
            warnings.warn(
                f"{WARN_AFTER} updates in a row were skipped: no gradient was finite",
                RuntimeWarning,
                stacklevel=2,
            )

    def check(self) -> None:
        """Raise NonfiniteError if too many updates were skipped in a row. The count begins again."""
        if self._limit is None or self._in_a_row < self._limit:
            return
        count, self._in_a_row = self._in_a_row, 0
        raise NonfiniteError(
            f"{count} updates in a row were skipped: no gradient was finite",
            where="train_step(state, batch)",
            fix="look for a NaN in the data or the model, lower the rate, or clip (the state stays live); "
            "max_skipped= of fa.transforms.Precision and fa.skip_nonfinite sets the number",
        )
