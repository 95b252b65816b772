"""What a step reports: total, weight and aux, summed over micro-batches and ranks.

Everything travels in one flat all-reduce, sent before the last backward so that it overlaps.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from fnaccel.aux_values import Agreement, AuxValues, divide, packed, plain
from fnaccel.notice import Notice


class Report:
    """Collects one step's totals; `weight` and `finish()` are global once `wait()` returned."""

    __slots__ = (
        "_agreement", "_aux", "_device", "_dtype", "_group", "_known", "_notice", "_sent", "_total", "weight",
    )  # fmt: skip

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device,
        agreement: Agreement,
        notice: Notice | None = None,
    ) -> None:
        self._group = group
        self._agreement = agreement
        self._notice = notice
        self._device = device
        self._total: Any = 0.0
        self._aux = AuxValues()
        self._sent: tuple[torch.Tensor, Any] | None = None
        self._dtype = torch.float32
        self._known = False
        self.weight: Any = 0

    def know_weights(self, weights: list[Any]) -> None:
        """Take the weights of all micro-batches before any forward, and sum them over ranks."""
        total: Any = sum(weights[1:], start=weights[0])
        if self._group is not None:
            total = packed([total], self._device)[0]
            dist.all_reduce(total, group=self._group)
        self.weight = total
        self._known = True

    def take(self, total: torch.Tensor, weight: Any, aux: Any, *, valid: bool) -> None:
        """Add one micro-batch; a filler counts for nothing but gives its structure."""
        self._dtype = torch.promote_types(total.dtype, torch.float32)
        if valid:
            self._total = plain(total) if isinstance(self._total, float) else self._total + plain(total)
            if not self._known:
                weight = plain(weight)
                self.weight = (
                    weight if isinstance(self.weight, int) and self.weight == 0 else self.weight + weight
                )
        self._aux.take(aux, valid=valid)

    def send(self) -> None:
        """Start the all-reduce of everything collected; nothing to do on one rank."""
        if self._group is None:
            return
        self._agreement.check(self._aux.shape, self._group)
        # the third is for `fa.preemption`; always there, since ranks add up by place
        values = [self._total, 0.0 if self._known else self.weight, float(self.asked), *self._aux.values]
        vector = packed(values, self._device)
        self._sent = vector, dist.all_reduce(vector, group=self._group, async_op=True)

    @property
    def asked(self) -> bool:
        """Whether this rank was asked to stop."""
        return self._notice is not None and self._notice.asked

    def hear(self, asked: torch.Tensor) -> None:
        """Take how many ranks were asked to stop, where the sums went another way."""
        if self._notice is not None:
            self._notice.hear(None if self._group is None else asked, self._device)

    def wait(self) -> None:
        """Wait for the all-reduce and take the global sums."""
        if self._sent is None:
            if self._notice is not None:
                self._notice.hear(None, self._device)
            return
        vector, work = self._sent
        work.wait()
        parts = vector.unbind()
        self._total = parts[0]
        if not self._known:
            self.weight = parts[1]
        if self._notice is not None:
            self._notice.hear(parts[2], self._device)
        self._aux.put(parts[3:])

    def finish(self) -> dict[str, Any]:
        """`{"loss": ..., "weight": ...}` and aux, as device tensors; call after `wait()`."""
        loss = divide(self._total, self.weight, self._device).to(self._dtype)
        return {"loss": loss, "weight": self.weight, **self._aux.finish(self._group, self._device)}
