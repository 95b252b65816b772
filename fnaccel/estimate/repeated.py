"""Repeated blocks: a trace runs four of each run of equal blocks, and the others are arithmetic.

Four, since the first and the last may hold other buffers than those between. Bytes change from block to block
by the same amount, so the peak is in one of the first two or the last two. A model may use its blocks in
another way: every second one, or with fewer rows each time. So a trace of six blocks has to agree.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
from torch import nn

from fnaccel.models.blocks import blocks

TRACED = 4
"""How many blocks of a run are traced."""
CHECKED = 6
"""How many are traced to check that the others are arithmetic."""


@attrs.frozen
class Repeated:
    """A run of equal blocks that was shortened.

    Attributes:
        second, third: of the blocks that are left.
        left_out: how many equal blocks were taken away between the second and the third.
    """

    second: nn.Module
    third: nn.Module
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


def _runs(members: list[nn.Module], most: int) -> tuple[list[nn.Module], list[Repeated]]:
    remaining: list[nn.Module] = []
    shortened: list[Repeated] = []
    start = 0
    while start < len(members):
        end = start + 1
        while end < len(members) and _signature(members[end]) == _signature(members[start]):
            end += 1
        run = members[start:end]
        remaining += run[:most]
        if len(run) > most:
            shortened.append(Repeated(run[1], run[2], len(run) - most))
        start = end
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
