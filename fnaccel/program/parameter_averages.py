"""For a while parameters hold other values: averages, an anchor, or those at which an optimizer evaluates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fnaccel import _torch
from fnaccel.engine.engine import Engine
from fnaccel.engine.exchange import Exchange
from fnaccel.state import Lease, refuse_averaged
from fnaccel.step.loss import Scalar
from fnaccel.world.undo import Swapped


class _Moved(Swapped):
    """In the body parameters hold other values than those that are trained, and the lease says so."""

    _lease: Lease

    def lose(self) -> None:
        """Let the state be dead."""
        self._lease.owner.donate_live()
        self._lease.averaged = False


class Averaged(_Moved, Exchange):
    """A context in whose body parameters hold other values, such as averages, and the lease says so.

    If the parameters can't be put back (memory runs out twice), the state is dead.

    Args:
        engine: the parameters.
        values: of each parameter: the averages of `with_ema`, or the anchor of replicas that train apart.
        lease: of the live state.
        buffers: those with averages, and their averages.
    """

    def __init__(
        self,
        engine: Engine,
        values: Sequence[torch.Tensor],
        lease: Lease,
        buffers: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
    ) -> None:
        pairs = zip(engine.layout.leaves, values, strict=True)
        super().__init__([*((leaf.shard, value) for leaf, value in pairs), *buffers])
        self._lease = lease

    def change(self) -> None:
        """Exchange parameters and averages."""
        refuse_averaged(self._lease, "train_step.averaged(state)")
        self._lease.averaged = True
        super().change()

    def undo(self) -> None:
        """Exchange them again."""
        super().undo()
        self._lease.averaged = False


class EvaluationPoint(_Moved):
    """A context in whose body parameters are where optimizers with `train()` and `eval()` evaluate.

    `train()` alone does not give the bits back, so the parameters are put back from copies.

    Args:
        optimizers: those that have made an update, so that the two points differ.
        parameters: this rank's parts of all parameters.
        lease: of the live state.
    """

    def __init__(self, optimizers: Sequence[Any], parameters: Sequence[torch.Tensor], lease: Lease) -> None:
        self._optimizers = optimizers
        self._parameters = parameters
        self._lease = lease
        self._kept: list[torch.Tensor] = []

    @torch.no_grad()
    def change(self) -> None:
        """Let the optimizers move the parameters."""
        self._kept = [parameter.clone() for parameter in self._parameters]
        self._lease.averaged = True
        for optimizer in self._optimizers:
            optimizer.eval()

    @torch.no_grad()
    def undo(self) -> None:
        """Put the parameters back."""
        if self._kept:
            for optimizer in self._optimizers:
                optimizer.train()
            _torch.foreach_copy_(list(self._parameters), self._kept)
            self._kept = []
            self._lease.averaged = False


def average_of(tensor: torch.Tensor) -> torch.Tensor:
    """The first average of a tensor: a copy, in fp32 at least.

    An average in bf16 would not move: a step of 0.001 of a difference is less than half of its last digit.
    """
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32), copy=True)


def averages_of(buffers: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The first averages of buffers. None of integers and codes, or of an infinity: it would become NaN."""
    return {
        name: average_of(value)
        for name, value in buffers.items()
        if value.is_floating_point()
        and value.itemsize > 1
        and (value.is_meta or bool(value.isfinite().all()))
    }


@torch.no_grad()
def move(
    buffers: Sequence[tuple[torch.Tensor, torch.Tensor]], decay: Scalar, *left_out: Scalar | None
) -> None:
    """Move the averages of buffers towards them after an update, unless it was left out.

    Args:
        buffers: those with averages, and their averages.
        decay: the share of the old average.
        left_out: 0-d tensors that are 1 if the update was left out. Anything else says that it was not.
    """
    averages = [average for _, average in buffers]
    values = [buffer.to(average.dtype) for buffer, average in buffers]
    for flag in (each for each in left_out if isinstance(each, torch.Tensor)):
        pairs = zip(averages, values, strict=True)  # no factor of 0: the buffers may be NaN
        values = [torch.where(flag.to(a.device).bool(), a, value) for a, value in pairs]
    _torch.foreach_lerp_(averages, values, 1.0 - decay)
