"""`UpdateFacts`: the facts of one update from which each micro-batch's `LossInfo` is made."""

from __future__ import annotations

from typing import Any

import torch

from fnaccel import _torch, random, tree
from fnaccel.data.cut import rows_of
from fnaccel.data.micro_batches import MicroBatch
from fnaccel.step.loss import Scalar
from fnaccel.step.loss_info import LossInfo
from fnaccel.tree import Tree


class UpdateFacts:
    """The facts of one update that a loss function may know.

    Args:
        root: the root seed of the state.
        step, updates, extras: of the state.
        device: of this rank.
        traced: whether the loss function runs in compiled code, which takes numbers as tensors.
        dynamic: whether the number of rows varies in compiled code.
    """

    def __init__(
        self,
        root: int | torch.Tensor,
        step: int | torch.Tensor,
        updates: Scalar,
        extras: Tree,
        device: torch.device,
        *,
        traced: bool = False,
        dynamic: bool = False,
    ) -> None:
        self._device = device
        self._dynamic = dynamic
        self._key = random.key(root, step, device=device)
        if traced:
            tree.learn_records(extras)
            extras = tree.map(self._as_input, extras)
        self._facts: dict[str, Any] = {
            "step": self._as_input(step) if traced else step,
            "updates": self._as_input(updates) if traced else updates,
            "extras": extras,
        }

    def of(self, part: MicroBatch) -> LossInfo:
        """The info of a micro-batch."""
        valid = torch.full((), part.valid > 0, dtype=torch.bool, device=self._device)
        return self.at(self._rows(part), valid)

    def at(self, rows: torch.Tensor | None, valid: torch.Tensor | bool = True) -> LossInfo:
        """The info of rows at these places. None if they are not known."""
        return LossInfo(self._key, rows=rows, valid=valid, **self._facts)

    def _rows(self, part: MicroBatch) -> torch.Tensor | None:
        if part.first is None:
            return None
        count = part.valid or rows_of(part.data)
        rows = torch.arange(part.first, part.first + count, device=self._device)
        if self._dynamic:
            _torch.mark_dynamic(rows, 0)
        return rows

    def _as_input(self, value: Any) -> Any:
        """A number as a 0-d tensor, filled on the device: a graph would compile its value in."""
        if type(value) is int:
            return torch.full((), value, dtype=torch.int64, device=self._device)
        if type(value) is float:
            return torch.full((), value, device=self._device)
        return value
