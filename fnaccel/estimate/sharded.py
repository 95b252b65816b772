"""The memory of FSDP2 in a trace: gathered units, buffers of collectives, and sharded gradients.

The order of events is that of torch's `fully_shard`. A unit is gathered into one buffer and copied out of it.
In forward the buffer lives until the next unit is copied out. In backward the unit before is gathered ahead.
https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

import attrs
import torch
from torch import nn

from fnaccel.estimate.account import Account

GATHERED, BUFFERS, GRADIENTS = "gathered", "buffers", "gradients"


@attrs.define(kw_only=True, eq=False)
class Unit:
    """One group of parameters that is gathered at once.

    Attributes:
        params: its parameters, whole along the axes of shards, as modules compute with them.
        whole: bytes of the gathered unit in the compute dtype, with padding.
        cast: bytes of this rank's part in the compute dtype, if gathering casts it. Else 0.
        moved: bytes of its parameters that are sharded along another dimension than the first, in the
            compute dtype. They are copied once more when they are gathered.
        moved_gradient: bytes of the largest of their gradients, which is copied before it is reduced.
        reduction: bytes of its gradients as they are reduced, with padding.
        part: bytes of its sharded gradients.
        summed: bytes of its gradients as micro-batches that do not communicate add them, if that is in
            another dtype than the gradients'. Else 0.
        resharded: bytes that stay after forward, if it is sharded over fewer ranks until backward.
        frees: whether it is freed after forward.
        compute: the dtype of its gathered parameters.
        casts_gradients: whether gradients are reduced in another dtype than the parameters'.
        dtype: the dtype of floating-point inputs, or None if they are left as they are.
    """

    params: list[nn.Parameter]
    whole: int
    cast: int
    moved: int = 0
    moved_gradient: int = 0
    reduction: int
    part: int
    summed: int
    resharded: int
    frees: bool
    compute: torch.dtype
    casts_gradients: bool = False
    dtype: torch.dtype | None = None
    gathered: bool = False
    ahead: bool = False
    reduced: bool = False
    sums: bool = False
    done: bool = False


class Gathers:
    """The bytes that `fully_shard` holds, event by event.

    Args:
        account: where its bytes are counted.
        root: the unit of the parameters in no other unit.
        shards: over how many ranks.
        replicas: whether shards are averaged over replicas as well.
    """

    def __init__(self, account: Account, root: Unit, *, shards: int, replicas: bool) -> None:
        self._account = account
        self._root = root
        self._shards = shards
        self._replicas = replicas
        self._order: list[Unit] = []
        self._units: list[Unit] = [root]
        self._buffer = 0
        self._reducing = 0
        self._averaging = 0
        self.communicates = True

    def before_forward(self, unit: Unit) -> torch.dtype | None:
        """Gather a unit."""
        if unit not in self._units:
            self._units.append(unit)
        self._gather(unit)
        self._free_buffer()
        self._copy_out(unit)
        if self._shards > 1:
            self._buffer = unit.whole
        return unit.dtype

    def after_forward(self, unit: Unit) -> None:
        """Free a unit, unless it stays for backward."""
        self._order.append(unit)
        unit.done = False
        if unit.frees:
            self._free(unit)
            self._account.hold(unit.resharded, GATHERED)
        if unit is self._root:
            self._free_buffer()

    def before_backward(self, unit: Unit) -> None:
        """Gather a unit again, and begin to gather the unit before it."""
        if not unit.gathered:
            self._gather(unit)
            self._copy_out(unit)
            self._account.hold(-unit.resharded, GATHERED)
            if self._shards > 1:
                self._account.hold(-unit.whole, BUFFERS)
        unit.ahead = False
        index = self._order.index(unit) - 1
        if index >= 0 and not self._order[index].gathered:
            self._gather(self._order[index])

    def after_backward(self, unit: Unit) -> None:
        """Free a unit, and reduce its gradients."""
        if unit.done:
            return
        unit.done = True
        grads = sum(param.grad.nbytes for param in unit.params if param.grad is not None)
        if unit.summed and grads and not unit.sums and not self.communicates:
            unit.sums = True
            self._account.hold(unit.summed, GRADIENTS)
        if unit.sums:
            self._drop(unit, grads)
        self._free(unit)
        if not self.communicates:
            return
        self._account.hold(-self._reducing, BUFFERS)
        self._reducing = unit.reduction
        self._account.hold(-self._averaging, BUFFERS)
        self._averaging = 0
        if not grads:
            self._reducing = 0
            return
        self._account.hold(unit.moved_gradient, BUFFERS)
        self._account.hold(unit.reduction - unit.moved_gradient, BUFFERS)
        if self._shards > 1:
            self._account.work.send("shard", "reduce_scatter", unit.reduction)
        if self._replicas:
            self._account.work.send("dp_replicate", "all_reduce", unit.reduction // self._shards)
        if unit.sums:
            unit.sums = False
            self._account.hold(-unit.summed, GRADIENTS)
        else:
            self._drop(unit, grads)
        output = unit.reduction // self._shards
        if unit.casts_gradients or unit.reduced:
            self._account.hold(output, BUFFERS)
        if not unit.reduced:
            self._account.hold(unit.part, GRADIENTS)
        unit.reduced = True
        if self._replicas and unit.casts_gradients:
            self._averaging = output
        elif unit.casts_gradients:
            self._account.hold(-output, BUFFERS)

    def end(self) -> None:
        """The end of a backward pass."""
        for unit in self._units:
            self.after_backward(unit)
            unit.done = False
            if unit.ahead:
                unit.ahead = False
                self._account.hold(-unit.whole, BUFFERS)
        self._account.hold(-self._reducing - self._averaging, BUFFERS)
        self._reducing = self._averaging = 0
        self._order.clear()

    def _drop(self, unit: Unit, grads: int) -> None:
        """Free the gradients that autograd made."""
        for param in unit.params:
            param.grad = None
            self._account.labelled.discard(id(param))
        self._account.label(-grads, GRADIENTS)

    def _gather(self, unit: Unit) -> None:
        if unit.gathered or unit.ahead or self._shards == 1:
            return
        unit.ahead = True
        self._account.work.send("shard", "all_gather", unit.whole)
        self._account.hold(unit.whole + unit.cast, BUFFERS)
        self._account.hold(-unit.cast, BUFFERS)

    def _copy_out(self, unit: Unit) -> None:
        unit.ahead = False
        if not unit.gathered:
            unit.gathered = True
            self._account.hold(unit.whole, GATHERED)
            self._account.hold(unit.moved, BUFFERS)
            self._account.hold(-unit.moved, BUFFERS)

    def _free(self, unit: Unit) -> None:
        if unit.gathered:
            unit.gathered = False
            self._account.hold(-unit.whole, GATHERED)

    def _free_buffer(self) -> None:
        self._account.hold(-self._buffer, BUFFERS)
        self._buffer = 0
