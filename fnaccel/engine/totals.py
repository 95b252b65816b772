"""The totals of a step: total, weight and aux, summed over micro-batches and ranks.

Everything travels in one flat all-reduce, sent before the last backward so that it overlaps. Ranks ask each
other questions in it too, such as whether one of them was asked to stop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from fnaccel.engine.aux_values import (
    Agreement,
    AuxValues,
    divide,
    mixed_kinds,
    packed,
    plain,
    structure,
    unpacked,
)
from fnaccel.step.loss import LossParts, is_zero, masked
from fnaccel.world.mesh import Mesh


class Question(Protocol):
    """What ranks ask each other in the all-reduce of a step's totals: `Instance.totals` lists the questions.

    Every rank asks in every step, with as many numbers. A captured step has done its update when it hears the
    sums, and does not call `check`: a question that needs it stays for the next step, as `SamePosition` does.
    """

    @property
    def numbers(self) -> Sequence[float]:
        """This rank's numbers, which ranks sum. Read twice in a step."""
        ...

    def hear(self, sums: torch.Tensor | None, device: torch.device) -> None:
        """Take the sums over all ranks, 1-d. None on a single rank. Of an accelerator: read them later."""
        ...

    def check(self) -> None:
        """Raise, on every rank, if the answer does not let the step go on."""
        ...


class Totals:
    """Collects one step's totals. `weight` and `finish()` are global once `wait()` returned.

    Args:
        group: the process group of the batch. None on a single rank.
        device: the device of the sums.
        agreement: the structure that the losses of all ranks agree on.
        questions: what ranks ask each other beside.
        partial_rows: whether each rank has a part of each row. Then aux may hold no `fa.Concat`.
        apart: the mesh, if it has replicas that train apart.
        by_rows: whether the weight of a replica is the mean of theirs, so that each row counts the same.
        stages: how many ranks run layers of one model. One of them has the loss.

    Attributes:
        rows: those of each micro-batch so far, 0 of a filler.
        weight: of all micro-batches so far, and of all ranks after `wait()`.
        averaged_weight: after `wait()`, what gradients are divided by. It is the weight, or if replicas train
            apart, that of this one.
        counts: False if the newest micro-batch is a filler, or has a weight of 0 that the host can read.
    """

    __slots__ = (
        "_agreement", "_apart", "_aux", "_by_rows", "_device", "_dtype", "_group", "_known", "_questions",
        "_sent", "_stages", "_total", "averaged_weight", "counts", "rows", "weight", "weighted",
    )  # fmt: skip

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device,
        agreement: Agreement,
        questions: Sequence[Question] = (),
        *,
        partial_rows: bool = False,
        apart: Mesh | None = None,
        by_rows: bool = False,
        stages: int = 1,
    ) -> None:
        self._group = group
        self._agreement = agreement
        self._questions = questions
        self._device = device
        self._apart = apart
        self._by_rows = by_rows
        self._stages = stages
        self._total: Any = 0.0
        self._aux = AuxValues(partial_rows=partial_rows)
        self._sent: tuple[torch.Tensor, Any] | None = None
        self._dtype = torch.float32
        self._known: list[Any] | None = None
        self.weighted: bool | None = None
        self.rows: list[int] = []
        self.weight: Any = 0
        self.averaged_weight: Any = 0
        self.counts = True

    def know_weights(self, weights: list[Any]) -> None:
        """Take the weights of all micro-batches before any forward, and sum them over ranks."""
        self._known = weights
        own: Any = sum(weights[1:], start=weights[0])
        self.weight = self._added(own, self._group)
        if self._stages > 1:  # each of them has added it
            self.weight = self.weight / self._stages
        self._weigh_replica(own)

    def _weigh_replica(self, own: Any) -> None:
        """Set `averaged_weight`, from the weight of all ranks or from this rank's own."""
        if self._apart is None:
            self.averaged_weight = self.weight
        elif self._by_rows:
            self.averaged_weight = self.weight * (self._apart.gradient_size / self._apart.loss_size)
        else:
            # stages without a loss have no weight, unless it comes from the batch
            axis = "replica" if self._known is None else "gradient"
            self.averaged_weight = self._added(own, self._apart.group(axis))

    def _added(self, weight: Any, group: dist.ProcessGroup | None) -> Any:
        """A weight added over ranks."""
        if group is None:
            return weight
        total = packed([weight], self._device)[0]
        dist.all_reduce(total, group=group)
        return total

    def weight_of(self, index: int) -> Any:
        """The weight of a micro-batch if it was known before its forward, else 1."""
        return 1 if self._known is None else self._known[index]

    def take(self, parts: LossParts, rows: int) -> torch.Tensor:
        """Add one micro-batch, and return its total as it is differentiated.

        A filler counts for nothing but gives its structure. So does a micro-batch of weight 0, whose total
        may be NaN.

        Raises:
            LossError: one micro-batch returned an `fa.Mean`, and another a bare loss.
        """
        if self._known is None:  # else the weights come from the batch, whatever the loss returns
            if self.weighted is None:
                self.weighted = parts.weighted
            elif self.weighted is not parts.weighted:
                raise mixed_kinds("micro-batch")
        weight = parts.weight if self._known is None else self._known[len(self.rows)]
        self.rows.append(rows)
        valid = rows > 0
        self._dtype = torch.promote_types(parts.total.dtype, torch.float32)
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

    @property
    def numbers(self) -> list[float]:
        """The numbers of all questions, which ranks sum besides total and weight."""
        return [number for question in self._questions for number in question.numbers]

    def hear(self, sums: torch.Tensor | None) -> None:
        """Take the sums of `numbers` over all ranks. None on a single rank. `wait` does so by itself."""
        first = 0
        for question in self._questions:
            end = first + len(question.numbers)
            question.hear(None if sums is None else sums[first:end], self._device)
            first = end

    def send(self) -> None:
        """Start the all-reduce of all totals, once. Nothing to do on a single rank."""
        if self._group is None or self._sent is not None:
            return
        own = structure(self._aux, self.weighted)
        if self._stages == 1:
            self._agreement.check(own, self._group, self.rows)
        else:
            self._agree_on_stages(own, self._group)
        weight = self.weight if self._known is None else 0.0
        if self._known is None and self._apart is not None:
            self._weigh_replica(weight)
        vector = packed([self._total, weight, *self.numbers, *self._aux.values], self._device)
        refuse = getattr(vector, "refuse", None)
        if refuse is not None:  # total or aux depends on a value of another stage
            refuse()
        self._sent = vector, dist.all_reduce(vector, group=self._group, async_op=True)

    def _agree_on_stages(self, own: Any, group: dist.ProcessGroup) -> None:
        """Compare the structure of the loss with that of other ranks. A rank without a loss takes theirs."""
        if self.rows:
            self._agreement.check(own, group, self.rows, (self._aux.emptied(), self._dtype))
        else:
            self._agreement.check(None, group)
            if self._agreement.empty is not None:  # in a simulated world nobody has a loss
                aux, self._dtype = self._agreement.empty
                self._aux = aux.emptied()

    def wait(self) -> None:
        """Wait for the all-reduce and take the global sums.

        Raises:
            MicroBatchError, RankMismatchError: an answer does not let the step go on.
        """
        if self._sent is not None:
            vector, work = self._sent
            work.wait()
            head = 2 + len(self.numbers)
            parts = unpacked(vector, [*[()] * head, *self._aux.shapes])
            self._total = parts[0]
            if self._known is None:
                self.weight = parts[1]
            self._aux.put(parts[head:])
            self.hear(vector[2:head])
        elif self._questions:
            self.hear(None)
        if self._apart is None:
            self.averaged_weight = self.weight
        elif self._by_rows:
            self._weigh_replica(None)
        for question in self._questions:
            question.check()

    def finish(self) -> dict[str, Any]:
        """`{"loss": ..., "weight": ...}` and aux, as device tensors. Call after `wait()`."""
        loss = divide(self._total, self.weight, self._device)
        if loss.dtype is not self._dtype:
            loss = loss.to(self._dtype)
        return {"loss": loss, "weight": self.weight, **self._aux.finish(self._group, self._device)}
