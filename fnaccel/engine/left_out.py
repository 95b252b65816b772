"""Updates that are left out: `LeftOut` says why, and `SkippedUpdates` ends a run that makes no other."""

from __future__ import annotations

import warnings
from collections import deque
from typing import Any

import attrs
import torch
import torch.distributed as dist

from fnaccel.engine.aux_values import packed, unpacked
from fnaccel.errors import NonfiniteError
from fnaccel.step.loss import Scalar
from fnaccel.world.host_copy import HostCopy

WARN_AFTER = 25
"""Skipped updates in a row that are worth a warning: a loss scale of 65,536 needs 16 to come down to 1."""

_LAG = 8  # on an accelerator, steps until a flag is read: the same on every rank, so that all raise together


@attrs.frozen
class LeftOut:
    """Whether an update is left out, and for which of two reasons.

    Attributes:
        uncounted: no row counts, by the weight: a bool, or a 0-d tensor if only the device can tell.
        skip: 1 if a transform or a check left it out, 0 if not. None if none of them may.
        weight: of the rows whose gradients were averaged.
    """

    uncounted: Any
    skip: Any
    weight: Scalar

    @property
    def nonfinite(self) -> Any:
        """`skip`, but 0 where no row counts: there was no gradient, so none that is not finite."""
        return self.skip * (1.0 - self.uncounted) if isinstance(self.uncounted, torch.Tensor) else self.skip

    def counted(self, updates: Scalar) -> Any:
        """The number of updates after it: a tensor if the device decides."""
        if self.uncounted is True:
            return updates
        if self.skip is None:
            return updates + 1
        return updates + (1.0 - self.skip if isinstance(updates, torch.Tensor) else int(not self.skip))


def agree_counts(
    updates: Scalar,
    scale: dict[str, torch.Tensor] | None,
    skips: SkippedUpdates,
    group: Any,
    device: torch.device,
) -> Any:
    """The largest count of updates of ranks that trained apart, and of updates skipped in a row.

    Their loss scale becomes the smallest one.
    """
    values: list[Any] = [updates, skips.in_a_row]
    if scale is not None:
        values += [-scale["scale"], -scale["growth"], scale["weight"]]
    vector = packed(values, device)
    dist.all_reduce(vector, dist.ReduceOp.MAX, group=group)
    count, in_a_row, *others = unpacked(vector, [()] * len(values))
    skips.in_a_row = int(in_a_row)
    if scale is not None:
        for name, found, sign in zip(("scale", "growth", "weight"), others, (-1, -1, 1), strict=True):
            scale[name].copy_(found * sign)
    return count.to(updates.dtype) if isinstance(updates, torch.Tensor) else int(count)


class SkippedUpdates:
    """Counts updates that were skipped in a row.

    Args:
        limit: how many skipped updates in a row are an error. None for any number.
        speaks: whether this rank warns.

    Attributes:
        in_a_row: how many were skipped in a row.
    """

    def __init__(self, limit: int | None, *, speaks: bool = True) -> None:
        self._limit = limit
        self._speaks = speaks
        self.in_a_row = 0
        self._waiting: deque[HostCopy] = deque()

    def put(self, skip: torch.Tensor) -> None:
        """Take whether an update was skipped: a 0-d tensor, 1 if it was."""
        self._waiting.append(HostCopy(skip))
        if len(self._waiting) > (0 if skip.device.type == "cpu" else _LAG):
            self._count(bool(self._waiting.popleft().read()))

    def _count(self, skipped: bool) -> None:
        self.in_a_row = self.in_a_row + 1 if skipped else 0
        if self.in_a_row == WARN_AFTER and self._speaks:
            warnings.warn(
                f"{WARN_AFTER} updates in a row were skipped: no gradient was finite",
                RuntimeWarning,
                stacklevel=2,
            )

    def check(self) -> None:
        """Raise NonfiniteError if too many updates were skipped in a row. The count begins again."""
        if self._limit is None or self.in_a_row < self._limit:
            return
        count, self.in_a_row = self.in_a_row, 0
        raise NonfiniteError(
            f"{count} updates in a row were skipped: no gradient was finite",
            where="train_step(state, batch)",
            fix="look for a NaN in the data or the model, lower the rate, or clip (the state stays live); "
            "max_skipped= of fa.transforms.Precision and fa.skip_nonfinite sets the number",
        )
