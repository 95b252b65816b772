"""`split_between_processes`: this rank's part of something that every rank has whole."""

from __future__ import annotations

from typing import Any, TypeVar, cast

import torch

from fnaccel.collectives.over import Over, scope
from fnaccel.errors import ArgumentError
from fnaccel.tree import Tree
from fnaccel.world.world import World

T = TypeVar("T", bound="list[Any] | tuple[Any, ...] | dict[Any, Any] | torch.Tensor")


def split_between_processes(
    inputs: T, *, pad: bool = False, over: Over = None, world: World | None = None
) -> T:
    """This rank's part of `inputs`. Parts are consecutive, in rank order. Nothing is communicated.

    n items over W ranks give n // W each, and one more to the first n % W ranks. Slicing a tensor
    does not copy it.

    Args:
        inputs: a list, a tuple, a tensor `[n, ...]`, or a dict of such of one length.
        pad: give every rank ceil(n / W) items instead, repeating the last one at the end, so that the
            parts can be gathered. The first n gathered items are the inputs.
        over: the ranks that take part. By default all.
        world: the world, if none was started in this context.

    Raises:
        ArgumentError: the values of a dict differ in length, or `inputs` can't be cut.

    Example, on 2 ranks:
        >>> prompts = ["a", "b", "c"]
        >>> fa.collectives.gather_objects(fa.split_between_processes(prompts))
        [['a', 'b'], ['c']]
    """
    where = scope(over, world, "split_between_processes")
    length = _length(inputs)
    if pad:
        share = -(-length // where.size)
        start, stop = where.rank * share, (where.rank + 1) * share
    else:
        share, extras = divmod(length, where.size)
        start = where.rank * share + min(where.rank, extras)
        stop = start + share + (where.rank < extras)
    return cast("T", _part(inputs, start, stop, length))


def _length(inputs: Tree) -> int:
    if isinstance(inputs, dict):
        lengths = {key: _length(value) for key, value in cast("dict[Any, Any]", inputs).items()}
        if len(set(lengths.values())) > 1:
            raise ArgumentError(
                "the values differ in length: " + ", ".join(f"{key!r} has {n}" for key, n in lengths.items()),
                where="fa.split_between_processes(dict)",
                fix="pass values of one length",
            )
        return next(iter(lengths.values()), 0)
    if isinstance(inputs, torch.Tensor) and inputs.dim() > 0:
        return inputs.shape[0]
    if isinstance(inputs, list | tuple):
        return len(cast("list[Any]", inputs))
    kind = "a 0-d tensor" if isinstance(inputs, torch.Tensor) else type(inputs).__name__
    raise ArgumentError(
        f"{kind} can't be cut in parts",
        where="fa.split_between_processes",
        fix="pass a list, a tuple, a tensor with a first dimension, or a dict of these",
    )


def _part(inputs: Tree, start: int, stop: int, length: int) -> Any:
    if isinstance(inputs, dict):
        return {
            key: _part(value, start, stop, length) for key, value in cast("dict[Any, Any]", inputs).items()
        }
    rows = inputs[start:stop]
    missing = stop - max(start, length) if length else 0
    if missing <= 0:
        return rows
    last = inputs[length - 1 : length]
    if isinstance(inputs, torch.Tensor):
        return torch.cat([cast("torch.Tensor", rows), last.expand(missing, *inputs.shape[1:])])
    return rows + last * missing
