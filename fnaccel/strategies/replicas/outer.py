"""The outer optimizer of DiLoCo: read from a text, and applied to the anchor."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch

from fnaccel import _torch, optim
from fnaccel.errors import ConfigError
from fnaccel.extend import Leaf, Optimizer, group_leaves
from fnaccel.strategies.strategy import arguments_of

_MAKERS = {"sgd": optim.sgd, "adam": optim.adam, "adamw": optim.adamw}


def read_outer(text: str) -> Optimizer:
    """The optimizer that a text makes, which is a call of one with literals.

    Raises:
        ConfigError: it is no such call. Says why.
    """
    try:
        call: Any = ast.parse(text.strip(), mode="eval").body
        args, options = arguments_of(call)
        return _MAKERS[call.func.id](*args, **options)
    except (SyntaxError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{text!r} makes no optimizer: {error}",
            where="fa.diloco(outer=)",
            fix=f'a call with numbers, such as "sgd(0.7, momentum=0.9)", of {", ".join(_MAKERS)}',
        ) from error


def outer_text(optimizer: Optimizer) -> str:
    """The text that makes an optimizer.

    Raises:
        ConfigError: none does: it has a schedule, groups, or a kernel of one's own.
    """
    text = optimizer.describe()
    if read_outer(text) != optimizer:
        raise ConfigError(
            f"the text {text!r} makes another optimizer",
            where="fa.diloco(outer=)",
            fix="leave out schedules and groups: a strategy is a text in recipes and checkpoints",
        )
    return text


class Outer:
    """The anchor of one model, and the optimizer that moves it.

    Args:
        text: makes the optimizer.
        leaves: the trained parameters.
        on_host: whether the anchor and the slots are in host memory.
    """

    def __init__(self, text: str, leaves: Sequence[Leaf], *, on_host: bool = False) -> None:
        copy = _host_copy if on_host else torch.clone
        self._leaves = [attrs.evolve(leaf, shard=copy(leaf.shard)) for leaf in leaves]
        optimizer = read_outer(text)
        self._rate = optimizer.lr
        groups = group_leaves(optimizer, self._leaves)
        self._groups = len(groups)
        self._bound = optimizer.kernel.bind(groups)

    @property
    def anchor(self) -> list[torch.Tensor]:
        """This rank's part of each parameter of the anchor."""
        return [leaf.shard for leaf in self._leaves]

    def state(self, updates: int) -> dict[str, Any]:
        """What a state shows: the anchor, the slots, and the number of outer updates."""
        anchor = {leaf.name: leaf.like(leaf.shard) for leaf in self._leaves}
        return {"anchor": anchor, "slots": self._bound.slots, "updates": updates}

    def take(self, own: Mapping[str, Any]) -> None:
        """Take the values of a state, which may be a restored one. A tensor takes its own for free."""
        for name, leaf in zip(own["anchor"], self._leaves, strict=True):
            leaf.shard.copy_(_torch.local_of(own["anchor"][name]))
            for slot, value in self._bound.slots[name].items():
                _torch.local_of(value).copy_(_torch.local_of(own["slots"][name][slot]))

    def step(self, changes: Sequence[torch.Tensor], updates: int) -> None:
        """One update of the anchor by the mean changes of replicas. `updates` is its number, from 1."""
        rate = float(self._rate(updates - 1))
        changes = [change.to(x.device) for change, x in zip(changes, self.anchor, strict=True)]
        number = torch.tensor(float(updates), device=changes[0].device)
        self._bound.apply(changes, [rate] * self._groups, None, None, number)


def _host_copy(shard: torch.Tensor) -> torch.Tensor:
    """A copy in host memory, pinned if the tensor is on an accelerator."""
    return torch.empty_like(shard, device="cpu", pin_memory=shard.device.type != "cpu").copy_(shard)
