"""A torch optimizer whose update needs whole parameters, over shards of them.

One parameter at a time is gathered, with its gradient and slots. Each rank computes the same update,
and keeps its part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fnaccel import tree
from fnaccel.models.parameter import Leaf
from fnaccel.optim.description import Group
from fnaccel.step.loss import Scalar


class BoundWhole:
    """A torch optimizer over sharded parameters that are gathered for their update.

    Args:
        optimizer: made over stand-ins of the parameters, one group for each of `groups`.
        groups: the parameters, with their options.
        first: the first slots of each parameter, whole, by index.
        copied: the names of the slots that begin as a copy of their parameter, by index.
    """

    reads_host = True

    def __init__(
        self,
        optimizer: Any,
        groups: Sequence[Group],
        first: dict[int, dict[str, Any]],
        copied: dict[int, list[str]],
    ) -> None:
        self._optimizer = optimizer
        self._options = [
            {k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups
        ]
        optimizer.param_groups.clear()  # the stand-ins go
        self._groups = groups
        self.slots: dict[str, dict[str, Any]] = {
            member.leaf.name: {slot: _slot(value, member.leaf) for slot, value in first[member.index].items()}
            for group in groups
            for member in group.members
        }
        self._copies = [
            (_local(self.slots[member.leaf.name][slot]), member.leaf.shard)
            for group in groups
            for member in group.members
            for slot in copied[member.index]
        ]
        self._copy_parameters()

    @torch.no_grad()
    def _copy_parameters(self) -> None:
        for slot, shard in self._copies:
            slot.copy_(shard)

    def apply(
        self,
        grads: Sequence[torch.Tensor | None],
        rates: Sequence[Any],
        multiplier: Scalar | None,
        skip: torch.Tensor | None,
        updates: torch.Tensor,
    ) -> None:
        """One update in place: see `Bound.apply`. `skip` and copied slots cost one host read each."""
        if skip is not None and bool(skip):
            return
        if self._copies and int(updates) == 1:  # weights may have been adopted or restored since `bind`
            self._copy_parameters()
        for group, options, rate in zip(self._groups, self._options, rates, strict=True):
            own = tree.map(float, rate) if isinstance(rate, dict) else {"lr": float(rate)}
            for member in group.members:
                grad = grads[member.index]
                if grad is not None:
                    slope = _gathered(member.leaf.like(grad))
                    if multiplier is not None:
                        slope = slope * multiplier
                    self._update(member.leaf, slope, {**options, **own})

    def _update(self, leaf: Leaf, grad: torch.Tensor, options: dict[str, Any]) -> None:
        param = torch.nn.Parameter(_gathered(leaf.shown).clone())
        param.grad = grad.to(param.dtype)
        slots = self.slots[leaf.name]
        whole = {slot: _gathered(value) for slot, value in slots.items()}
        self._optimizer.param_groups.append({**options, "params": [param]})
        self._optimizer.state[param] = whole
        try:
            self._optimizer.step()
        finally:
            self._optimizer.param_groups.clear()
            after = self._optimizer.state.pop(param)
        with torch.no_grad():
            leaf.shard.copy_(_part(param.detach(), leaf))
            for slot, value in slots.items():
                if isinstance(value, torch.Tensor):
                    _local(value).copy_(_part(after[slot], leaf))
                else:
                    slots[slot] = after[slot]


def _gathered(value: Any) -> Any:
    """A slot or a parameter as one rank would hold it."""
    whole = tree.whole(value)
    return whole.clone() if whole is value and isinstance(value, torch.Tensor) else whole


def _local(value: Any) -> torch.Tensor:
    return value.to_local() if hasattr(value, "to_local") else value


def _fits(value: Any, leaf: Leaf) -> bool:
    """Whether a slot is laid out as its parameter. One of another shape (a count, a factor) stays whole."""
    return isinstance(value, torch.Tensor) and leaf.sharded and value.shape == leaf.shown.shape


def _slot(value: Any, leaf: Leaf) -> Any:
    """A whole slot as states show it."""
    return leaf.like(_part(value, leaf)) if _fits(value, leaf) else value


def _part(value: Any, leaf: Leaf) -> Any:
    """This rank's part of a whole slot or parameter."""
    return tree.laid_out(value, leaf.shown).to_local() if _fits(value, leaf) else value
