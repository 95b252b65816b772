"""What a step reports: totals, weights and aux, summed over micro-batches and ranks.

Everything travels in one flat all-reduce, sent before the last backward so that it overlaps.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from fnaccel import tree
from fnaccel.collectives import gather, gather_objects
from fnaccel.errors import LossError
from fnaccel.loss import Concat, Sum, is_combinable, parts_of
from fnaccel.notice import Notice

RESERVED = frozenset({"loss", "weight", "lr", "grad_norm", "skipped", "loss_scale"})
"""Metrics that a step reports by itself."""


def _plain(value: Any) -> Any:
    """A value to add up: without its graph, and in fp32 at least (bf16 would stop counting at 256)."""
    if not isinstance(value, torch.Tensor):
        return value
    found = value.detach()
    return found.float() if found.dtype in (torch.bfloat16, torch.float16) else found


class Agreement:
    """What aux looks like on every rank; asked once, since ranks add their values up by place."""

    __slots__ = ("seen",)

    def __init__(self) -> None:
        self.seen: str | None = None

    def check(self, shape: str, group: dist.ProcessGroup) -> None:
        """Compare with the other ranks the first time, and with that time afterwards.

        Raises:
            LossError: ranks or calls differ; all ranks raise where ranks do.
        """
        if self.seen is None:
            found = gather_objects(shape, over=group)
            if len(set(found)) > 1:
                listed = "; ".join(f"rank {rank} has {one or 'no aux'}" for rank, one in enumerate(found))
                raise LossError(
                    f"the aux of ranks differs: {listed}",
                    where="the loss function's aux",
                    fix="return the same keys on every rank, whatever its rows are",
                )
            self.seen = shape
        elif self.seen != shape:
            raise LossError(
                f"aux changed its structure between calls: {shape or 'none'} after {self.seen or 'none'}",
                where="the loss function's aux",
                fix="return the same keys in every call: ranks add them up by place",
            )


class Report:
    """Collects one step's totals; `weight` and `finish()` are global once `wait()` returned."""

    __slots__ = (
        "_agreement", "_aux", "_concats", "_device", "_dtype", "_group", "_known", "_notice", "_sent",
        "_structure", "_total", "weight",
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
        self._aux: list[tuple[Any, Any]] = []
        self._concats: list[list[torch.Tensor]] = []
        self._structure: Any = None
        self._sent: tuple[torch.Tensor, Any] | None = None
        self._dtype = torch.float32
        self._known = False
        self.weight: Any = 0

    def know_weights(self, weights: list[Any]) -> None:
        """Take the weights of all micro-batches before any forward, and sum them over ranks."""
        total: Any = sum(weights[1:], start=weights[0])
        if self._group is not None:
            summed = self._double(total)
            dist.all_reduce(summed, group=self._group)
            total = summed
        self.weight = total
        self._known = True

    def take(self, total: torch.Tensor, weight: Any, aux: Any, *, valid: bool) -> None:
        """Add one micro-batch; a filler counts for nothing but gives its structure."""
        self._dtype = torch.promote_types(total.dtype, torch.float32)
        if valid:
            self._total = _plain(total) if isinstance(self._total, float) else self._total + _plain(total)
            if not self._known:
                weight = _plain(weight)
                self.weight = (
                    weight if isinstance(self.weight, int) and self.weight == 0 else self.weight + weight
                )
        if aux is not None:
            self._take_aux(aux, valid=valid)

    def _take_aux(self, aux: Any, *, valid: bool) -> None:
        leaves, structure = tree.flatten(aux, is_leaf=is_combinable)
        if self._structure is None:
            self._structure = [leaf if isinstance(leaf, Concat) else type(leaf) for leaf in leaves], structure
            self._aux = [(0.0, 0.0)] * len(leaves)
            self._concats = [[] for _ in leaves]
        elif structure != self._structure[1]:
            raise LossError(
                f"aux changed its structure between micro-batches: {structure} after {self._structure[1]}",
                where="the loss function's aux",
                fix="return the same keys for every micro-batch",
            )
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Concat):
                rows = _plain(leaf.value)
                self._concats[index].append(rows if valid else rows[:0])
            elif valid:
                total, weight = parts_of(leaf, 1, "the loss function's aux")
                old_total, old_weight = self._aux[index]
                self._aux[index] = (old_total + _plain(total), old_weight + _plain(weight))

    def _kinds(self) -> str:
        return ", ".join("Concat" if isinstance(k, Concat) else k.__name__ for k in self._structure[0])

    def _double(self, value: Any) -> torch.Tensor:
        dtype = torch.float32 if self._device.type == "mps" else torch.float64
        if isinstance(value, torch.Tensor):
            return value.detach().to(self._device, dtype, copy=True)
        # filled on the device: a copy of a host value would wait for all work before it
        return torch.full((), float(value), dtype=dtype, device=self._device)

    def send(self) -> None:
        """Start the all-reduce of everything collected; nothing to do on one rank."""
        if self._group is None:
            return
        shape = "" if self._structure is None else f"{self._kinds()} in {self._structure[1]}"
        self._agreement.check(shape, self._group)
        # the third is for `fa.preemption`; always there, since ranks add up by place
        asked = self._notice is not None and self._notice.asked
        values = [self._total, 0.0 if self._known else self.weight, float(asked)]
        for pair in self._aux:
            values.extend(pair)
        if any(isinstance(v, torch.Tensor) for v in values):
            packed = torch.stack([self._double(v) for v in values])
        else:
            packed = torch.tensor([float(v) for v in values], dtype=torch.float64, device=self._device)
        self._sent = packed, dist.all_reduce(packed, group=self._group, async_op=True)

    def wait(self) -> None:
        """Wait for the all-reduce and take the global sums."""
        if self._sent is None:
            if self._notice is not None:
                self._notice.hear(None, self._device)
            return
        packed, work = self._sent
        work.wait()
        parts = packed.unbind()
        self._total = parts[0]
        if not self._known:
            self.weight = parts[1]
        if self._notice is not None:
            self._notice.hear(parts[2], self._device)
        self._aux = [(parts[3 + 2 * i], parts[4 + 2 * i]) for i in range(len(self._aux))]

    def finish(self) -> dict[str, Any]:
        """`{"loss": ..., "weight": ...}` and aux, as device tensors; call after `wait()`."""
        loss = _divide(self._total, self.weight, self._device).to(self._dtype)
        metrics: dict[str, Any] = {"loss": loss, "weight": self.weight}
        if self._structure is None:
            return metrics
        kinds, structure = self._structure
        values: list[Any] = []
        for index, kind in enumerate(kinds):
            total, weight = self._aux[index]
            if isinstance(kind, Concat):
                rows = torch.cat(self._concats[index])
                values.append(
                    rows if self._group is None else gather(rows, over=self._group, valid=len(rows))
                )
            elif kind is Sum:
                values.append(total)
            else:
                values.append(_divide(total, weight, self._device).float())
        aux = tree.unflatten(structure, values)
        if not isinstance(aux, dict):
            return {**metrics, "aux": aux}
        taken = RESERVED & aux.keys()
        if taken:
            raise LossError(
                f"aux holds {', '.join(map(repr, sorted(taken)))}, which the step itself reports",
                where="the loss function's aux",
                fix="give it another name",
            )
        return {**metrics, **aux}


def _divide(total: Any, weight: Any, device: torch.device) -> torch.Tensor:
    if not isinstance(total, torch.Tensor):
        total = torch.tensor(float(total), device=device)
    return total if isinstance(weight, int) and weight == 1 else total / weight
