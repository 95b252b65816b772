"""The totals of a step: total, weight and aux, summed over micro-batches and ranks.

Everything travels in one flat all-reduce, sent before the last backward so that it overlaps.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from fnaccel.engine.combine import (
    Agreement,
    AuxValues,
    divide,
    mixed_kinds,
    packed,
    plain,
    structure,
    unpacked,
)
from fnaccel.engine.same_position import SamePosition
from fnaccel.engine.stop_request import Notice
from fnaccel.step.loss import LossParts, is_zero, masked


class Report:
    """Collects one step's totals. `weight` and `finish()` are global once `wait()` returned.

    Args:
        group: the process group of the batch. None on a single rank.
        device: the device of the sums.
        agreement: the structure that the losses of all ranks agree on.
        notice: whether this process was asked to stop.
        place: compares the positions of batches. None on a single rank.
        odd: whether a micro-batch of this rank has other rows than declared. None if none are declared.
        partial_rows: whether each rank has a part of each row. Then aux may hold no `fa.Concat`.

    Attributes:
        weight: of all micro-batches so far, and of all ranks after `wait()`.
        counts: False if the newest micro-batch is a filler, or has a weight of 0 that the host can read.
    """

    __slots__ = (
        "_agreement", "_aux", "_device", "_dtype", "_group", "_known", "_notice", "_odd", "_place", "_sent",
        "_taken", "_total", "_weighted", "counts", "weight",
    )  # fmt: skip

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device,
        agreement: Agreement,
        notice: Notice | None = None,
        place: SamePosition | None = None,
        *,
        odd: bool | None = None,
        partial_rows: bool = False,
    ) -> None:
        self._group = group
        self._agreement = agreement
        self._notice = notice
        self._place = place
        self._odd: Any = odd
        self._device = device
        self._total: Any = 0.0
        self._aux = AuxValues(partial_rows=partial_rows)
        self._sent: tuple[torch.Tensor, Any] | None = None
        self._dtype = torch.float32
        self._known: list[Any] | None = None
        self._taken = 0
        self._weighted: bool | None = None
        self.weight: Any = 0
        self.counts = True

    def know_weights(self, weights: list[Any]) -> None:
        """Take the weights of all micro-batches before any forward, and sum them over ranks."""
        self._known = weights
        total: Any = sum(weights[1:], start=weights[0])
        if self._group is not None:
            total = packed([total], self._device)[0]
            dist.all_reduce(total, group=self._group)
        self.weight = total

    def weight_of(self, index: int) -> Any:
        """The weight of a micro-batch if it was known before its forward, else 1."""
        return 1 if self._known is None else self._known[index]

    def take(self, parts: LossParts, *, valid: bool) -> torch.Tensor:
        """Add one micro-batch, and return its total as it is differentiated.

        A filler counts for nothing but gives its structure. So does a micro-batch of weight 0, whose total
        may be NaN.

        Raises:
            LossError: one micro-batch returned an `fa.Mean`, and another a bare loss.
        """
        self._agree_on_kind(parts.weighted)
        index = self._taken
        self._taken += 1
        self._dtype = torch.promote_types(parts.total.dtype, torch.float32)
        weight = parts.weight if self._known is None else self._known[index]
        self.counts = valid and not is_zero(weight)
        total, weight = masked(parts.total, weight)
        if valid:
            self._total = plain(total) if isinstance(self._total, float) else self._total + plain(total)
            if self._known is None:
                weight = plain(weight)
                self.weight = (
                    weight if isinstance(self.weight, int) and self.weight == 0 else self.weight + weight
                )
        self._aux.take(parts.aux, valid=valid)
        return total if valid else total * 0.0

    def _agree_on_kind(self, weighted: bool) -> None:
        if self._known is not None:  # the weights come from the batch, whatever the loss returns
            return
        if self._weighted is None:
            self._weighted = weighted
        elif self._weighted is not weighted:
            raise mixed_kinds("micro-batch")

    def send(self) -> None:
        """Start the all-reduce of all totals. Nothing to do on a single rank."""
        if self._group is None:
            return
        self._agreement.check(structure(self._aux, self._weighted), self._group)
        # the third is for `fa.preemption`: always there, since ranks sum by position
        weight = self.weight if self._known is None else 0.0
        odd = [] if self._odd is None else [float(self._odd)]
        vector = packed([self._total, weight, *self.questions, *odd, *self._aux.values], self._device)
        self._sent = vector, dist.all_reduce(vector, group=self._group, async_op=True)

    @property
    def asked(self) -> bool:
        """Whether this rank was asked to stop."""
        return self._notice is not None and self._notice.asked

    @property
    def questions(self) -> list[float]:
        """The numbers that a captured step sums over ranks besides total and weight."""
        return [float(self.asked), *(() if self._place is None else self._place.codes)]

    def hear(self, answers: torch.Tensor) -> None:
        """Take the sums of `questions`, if a captured step made them."""
        if self._notice is not None:
            self._notice.hear(None if self._group is None else answers[0], self._device)
        if self._place is not None:
            self._place.hear(answers[1:])

    def any_odd(self) -> bool:
        """Whether a micro-batch of any rank has other rows than were declared. Reads the device."""
        return bool(self._odd)

    def wait(self) -> None:
        """Wait for the all-reduce and take the global sums."""
        if self._sent is None:
            if self._notice is not None:
                self._notice.hear(None, self._device)
            return
        vector, work = self._sent
        work.wait()
        head = 3 + 2 * (self._place is not None) + (self._odd is not None)
        parts = unpacked(vector, [*[()] * head, *self._aux.shapes])
        self._total = parts[0]
        if self._known is None:
            self.weight = parts[1]
        if self._notice is not None:
            self._notice.hear(parts[2], self._device)
        if self._place is not None:
            self._place.hear(vector[3:5])
        if self._odd is not None:
            self._odd = parts[head - 1]
        self._aux.put(parts[head:])

    def finish(self) -> dict[str, Any]:
        """`{"loss": ..., "weight": ...}` and aux, as device tensors. Call after `wait()`."""
        loss = divide(self._total, self.weight, self._device)
        if loss.dtype is not self._dtype:
            loss = loss.to(self._dtype)
        return {"loss": loss, "weight": self.weight, **self._aux.finish(self._group, self._device)}
