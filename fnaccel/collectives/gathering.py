"""`gather`: the rows of all ranks, on all ranks, in rank order."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Sequence
from typing import TypeVar

import torch

from fnaccel import tree
from fnaccel.collectives.exchange import exchange, exchange_one
from fnaccel.collectives.flat_buffer import Layout, layout, pack, unpack, unpack_copies
from fnaccel.collectives.over import Over, Scope, carrier_of, scope
from fnaccel.collectives.reduction import moves, with_gradient
from fnaccel.collectives.signature import Call, agree, fits, tensor_leaves
from fnaccel.errors import ArgumentError
from fnaccel.world.every_rank import every_rank
from fnaccel.world.world import World

T = TypeVar("T")
_VALID = "fa.gather(valid=...)"


@every_rank
def gather(
    value: T,
    *,
    valid: int | torch.Tensor | None = None,
    gradient: bool = False,
    over: Over = None,
    world: World | None = None,
) -> T:
    """Concatenate each tensor of a tree over the ranks, along dim 0, in rank order.

    One collective moves all leaves, whatever their dtypes. Small trees are part of the signature.
    On one rank nothing is copied, so results share memory with `value`.

    Args:
        value: a tree of tensors of shape `[rows, ...]`. A 0-d tensor becomes `[ranks]`.
        valid: only the first `valid` rows of each tensor count, an int or a 0-d tensor. Ranks may differ in
            it, and in how many rows they pass.
        gradient: in a loss, results carry a gradient: that of the sum of the losses of all ranks. So a loss
            of this rank's rows against those of all has the gradient of one process. A loss that every rank
            computes whole has it too, if its weight is that of all rows: both are counted once for each
            rank. All ranks take part in backward, so the loss of each has to use the results.
        over: the ranks that take part. By default all.
        world: the world, if none was started in this context.

    Returns:
        The same tree, of tensors `[sum of rows, ...]`, on the devices of the leaves passed.

    Raises:
        PeerLostError: a rank left, exited or made another call.
        RankMismatchError: on every rank, if ranks pass different structures, shapes or dtypes.
        ArgumentError: a leaf is no plain tensor, has a graph (in a loss) without `gradient`, or has fewer
            rows than `valid`.

    Example, on 2 ranks:
        >>> fa.gather({"loss": torch.tensor(1.0 + world.rank)})
        {'loss': tensor([1., 2.])}
    """
    where = scope(over, world, "gather")
    leaves, structure, problem = tensor_leaves(value, "gather", gradient=gradient)
    moved = moves(leaves) if gradient else ""
    if valid is None:
        rows, starts = _even(where, value, leaves, structure, problem, moved), None
    else:
        if getattr(valid, "shape", ()) != ():  # a mask, such as info.valid
            what = "valid is a tensor of rows, and their number is asked for"
            count, problem = 0, ArgumentError(what, where=_VALID, fix="valid.sum()")
        else:
            count = operator.index(valid)
        problem = problem or _too_few_rows(value, leaves, count)
        rows, starts = _uneven(where, value, leaves, structure, problem, moved, count)
    if gradient:
        rows = with_gradient(where, leaves, rows, functools.partial(_own_rows, where.rank, starts))
    return tree.unflatten(structure, rows)


def _own_rows(
    rank: int, starts: Sequence[int] | None, total: torch.Tensor, leaf: torch.Tensor
) -> torch.Tensor:
    """The rows of this rank out of those of all, with zeros for rows that do not count."""
    if starts is None:
        size = leaf.shape[0] if leaf.dim() else 1
        return total[rank * size : (rank + 1) * size].view(leaf.shape)
    own = total[starts[rank] : starts[rank + 1]]
    return torch.cat([own, own.new_zeros(leaf.shape[0] - len(own), *leaf.shape[1:])])


def _even(
    where: Scope,
    value: tree.Tree,
    leaves: Sequence[torch.Tensor],
    structure: object,
    problem: ArgumentError | None,
    moved: str,
) -> list[torch.Tensor]:
    shapes = tuple(leaf.shape for leaf in leaves)
    dtypes = tuple(leaf.dtype for leaf in leaves)
    carrier = carrier_of(where, leaves)
    plan = layout(shapes, dtypes)
    with torch.no_grad():
        payload = pack(leaves, plan) if fits(where, carrier, plan) and problem is None else None
    call = Call("gather", carrier.type + moved, value, structure, shapes, dtypes)
    payloads = agree(where, call, payload=payload, problem=problem).payloads
    if where.size == 1:
        return [leaf.detach().reshape(shape or (1,)) for leaf, shape in zip(leaves, shapes, strict=True)]
    if payload is not None and payloads is not None:
        return _concatenated(where, payloads, plan, leaves)
    if len(leaves) == 1:
        everyone = exchange_one(where, leaves[0], carrier)
        return [everyone.view(_joined(where, leaves[0])).to(leaves[0].device)]
    with exchange(where, leaves, plan, carrier) as everyone:
        return _concatenated(where, everyone, plan, leaves)


def _concatenated(
    where: Scope, everyone: torch.Tensor, plan: Layout, leaves: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The rows of all ranks, from the bytes of all ranks."""
    return [
        # copies always: these bytes are overwritten by the next call
        part.view(_joined(where, leaf)).to(leaf.device)
        for part, leaf in zip(unpack_copies(everyone, plan), leaves, strict=True)
    ]


def _joined(where: Scope, leaf: torch.Tensor) -> tuple[int, ...]:
    return (where.size * leaf.shape[0], *leaf.shape[1:]) if leaf.dim() else (where.size,)


def _uneven(
    where: Scope,
    value: tree.Tree,
    leaves: Sequence[torch.Tensor],
    structure: object,
    problem: ArgumentError | None,
    moved: str,
    count: int,
) -> tuple[list[torch.Tensor], list[int]]:
    """The rows of all ranks, and where those of each begin, and the last end."""
    shapes = tuple((None, *leaf.shape[1:]) for leaf in leaves)
    dtypes = tuple(leaf.dtype for leaf in leaves)
    carrier = carrier_of(where, leaves)
    call = Call("gather", f"{carrier.type}{moved}, valid=...", value, structure, shapes, dtypes)
    counts = agree(where, call, number=count, problem=problem).numbers
    starts = [0, *itertools.accumulate(counts)]
    if where.size == 1:
        return [leaf.detach()[:count] for leaf in leaves], starts
    most = max(counts)
    padded = [_rows(leaf.detach(), count, most) for leaf in leaves]
    plan = layout(tuple(leaf.shape for leaf in padded), dtypes)
    gathered: list[torch.Tensor] = []
    with exchange(where, padded, plan, carrier) as everyone:
        for part, leaf in zip(unpack(everyone, plan), padded, strict=True):
            ranks = [row.view(leaf.shape)[:their] for row, their in zip(part, counts, strict=True)]
            gathered.append(torch.cat(ranks).to(leaf.device))
    return gathered, starts


def _rows(leaf: torch.Tensor, count: int, most: int) -> torch.Tensor:
    if count == most:
        return leaf[:count]
    return torch.cat([leaf[:count], leaf.new_zeros(most - count, *leaf.shape[1:])])


def _too_few_rows(value: tree.Tree, leaves: Sequence[torch.Tensor], count: int) -> ArgumentError | None:
    for at, leaf in enumerate(leaves):
        rows = leaf.shape[0] if leaf.dim() else 0
        if leaf.dim() == 0 or not 0 <= count <= rows:
            path = tree.paths(value)[at] or "(root)"
            return ArgumentError(
                f"{path} has {rows} rows, and valid={count}"
                if leaf.dim()
                else f"{path} is 0-d: it has no rows",
                where=_VALID,
                fix="pass tensors with a first dimension of at least `valid` rows, and valid of 0 or more",
            )
    return None
