"""Repeated blocks: a trace runs four of each run of equal blocks, and the others are arithmetic.

Four, since the first and the last may hold other buffers than those between. Bytes change from block to block
by the same amount, so the peak is in one of the first two or the last two. A model may use its blocks in
another way: every second one, or with fewer rows each time. So a trace of six blocks has to agree.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import nn

from fnaccel.estimate.account import GRADIENTS, Account, Moment
from fnaccel.models import _torch
from fnaccel.models.blocks import blocks

TRACED = 4
"""How many blocks of a run are traced."""
CHECKED = 6
"""How many are traced to check that the others are arithmetic."""


@attrs.frozen
class Repeated:
    """A run of equal blocks that was shortened.

    Attributes:
        second, third, fourth: of the blocks that are left.
        left_out: how many equal blocks were taken away between the second and the third.
    """

    second: nn.Module
    third: nn.Module
    fourth: nn.Module
    left_out: int


def shorten(model: nn.Module, within: Sequence[str], most: int = TRACED) -> list[Repeated]:
    """Leave the first blocks of each longer run of equal blocks. Changes the model.

    Args:
        model: the model.
        most: how many blocks are left.
        within: names of modules that must be blocks, or inside of blocks. If one is not, nothing changes.
    """
    named = blocks(model)
    names = [name for name, _ in named]
    if not all(any(name == each or name.startswith(f"{each}.") for each in names) for name in within):
        return []
    by_parent: dict[str, list[tuple[str, nn.Module]]] = {}
    for name, block in named:
        parent, _, key = name.rpartition(".")
        by_parent.setdefault(parent, []).append((key, block))
    shortened: list[Repeated] = []
    for parent, members in by_parent.items():
        container = model.get_submodule(parent)
        if [key for key, _ in members] != [key for key, _ in container.named_children()]:
            continue
        remaining, runs = _runs([block for _, block in members], most)
        shortened += runs
        if runs:
            for key, _ in members:
                delattr(container, key)
            for number, block in enumerate(remaining):
                container.add_module(str(number), block)
    return shortened


def multiply(run: Repeated, account: Account, label_gradients: Callable[[], None] = lambda: None) -> None:
    """Let a trace count the blocks of a run that were taken away, like those beside them.

    In forward they add what the second block adds. In backward they free it, and add the gradients of the
    third block. At the beginning of each block the strategy has as many buffers as at the one before, and
    also at the end of each block's backward.

    Args:
        run: the run, on whose blocks the strategy has its hooks already.
        account: of the trace.
        label_gradients: labels the gradients that exist.
    """
    forward: list[Moment] = []
    backward: list[Moment] = []
    added: dict[str, int] = {}

    def second_begins() -> None:
        forward.append(account.moment())

    def third_begins() -> None:
        if len(forward) != 1:
            raise RuntimeError("the blocks of a run are not called one after the other")
        added.update(account.repeat(forward.pop(), run.left_out))

    def fourth_ends() -> None:
        label_gradients()
        backward.append(account.moment())

    def third_ends() -> None:
        label_gradients()
        if len(backward) != 1:
            raise RuntimeError("the blocks of a run are not differentiated one after the other")
        before = backward.pop()
        # not what the third block frees: autocast freed its copies of the weights before backward began
        gradients = account.held(GRADIENTS) - before.kinds.get(GRADIENTS, 0)
        freed = {kind: -size for kind, size in added.items()}
        account.add({**freed, GRADIENTS: freed.get(GRADIENTS, 0) + gradients * run.left_out})
        account.work.repeat(before.work, run.left_out)

    _watch(run.second, second_begins, None)
    _watch(run.third, third_begins, third_ends)
    _watch(run.fourth, None, fourth_ends)


def _watch(
    module: nn.Module, before_forward: Callable[[], None] | None, after_backward: Callable[[], None] | None
) -> None:
    """Call a function before a module's forward, and one as soon as the gradients of its inputs exist."""

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if before_forward is not None:
            before_forward()
        values, structure = _torch.tree_flatten((args, kwargs))
        chosen = [
            i for i, value in enumerate(values) if isinstance(value, torch.Tensor) and value.requires_grad
        ]
        if after_backward is not None and chosen and torch.is_grad_enabled():
            results = _torch.applied(_Enter, after_backward, *[values[i] for i in chosen])
            for i, value in zip(chosen, results, strict=True):
                values[i] = value
        return _torch.tree_unflatten(values, structure)

    # ahead of the hooks of the strategy, whose part in backward then ends before `after_backward`
    module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True)


class _Enter(torch.autograd.Function):
    """The identity. In backward it calls a function."""

    @staticmethod
    def forward(ctx: Any, after: Callable[[], None], *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.after = after
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        ctx.after()
        return (None, *grads)


def _runs(members: list[nn.Module], most: int) -> tuple[list[nn.Module], list[Repeated]]:
    remaining: list[nn.Module] = []
    shortened: list[Repeated] = []
    for _, equal in itertools.groupby(members, _signature):
        run = list(equal)
        remaining += run[:most]
        if len(run) > most:
            shortened.append(Repeated(run[1], run[2], run[3], len(run) - most))
    return remaining, shortened


def _signature(block: nn.Module) -> object:
    """Equal for blocks of one class with equal shapes and dtypes of parameters, and equal switches.

    A switch is an attribute that is a truth value or a text, or the window of an attention.
    """
    parameters = [
        (name, tuple(param.shape), param.dtype, param.requires_grad)
        for name, param in block.named_parameters()
    ]
    switches = [
        (name, key, value)
        for name, module in block.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, bool | str) or key == "sliding_window"
    ]
    return type(block), parameters, switches
