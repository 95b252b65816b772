"""`pad_across_processes` and `concatenate`: making tensors of different sizes fit together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fnaccel import tree
from fnaccel.collectives.over import Over, Scope, scope
from fnaccel.collectives.signature import Call, agree, room, tensor_leaves
from fnaccel.errors import ArgumentError, TreeMismatchError
from fnaccel.world.every_rank import every_rank
from fnaccel.world.world import World

T = TypeVar("T")


@every_rank
def pad_across_processes(
    value: T,
    *,
    dim: int = 0,
    pad_value: float = 0,
    first: bool = False,
    over: Over = None,
    world: World | None = None,
) -> T:
    """Pad each tensor of a tree along `dim` to its largest size on any rank.

    A leaf that has no such dim, or that is the largest, comes back as it is.

    Args:
        value: a tree of tensors. Ranks may differ in the size of `dim` only.
        dim: the dimension. Negative ones count from the end.
        pad_value: the value that is filled in.
        first: pad at the beginning and not at the end.
        over: the ranks that take part. By default all.
        world: the world, if none was started in this context.

    Returns:
        The same tree, whose shapes are equal on every rank.

    Raises:
        PeerLostError: a rank left, exited or made another call.
        RankMismatchError: on every rank, if ranks differ in more than the size of `dim`.
        ArgumentError: a leaf is no plain tensor.

    Example, on 2 ranks:
        >>> tokens = torch.ones(1, 2 + world.rank)
        >>> fa.gather(fa.pad_across_processes(tokens, dim=1, pad_value=-100))
        tensor([[   1.,    1., -100.],
                [   1.,    1.,    1.]])
    """
    where = scope(over, world, "pad_across_processes")
    leaves, structure, problem = tensor_leaves(value, "pad_across_processes")
    at = [dim if dim >= 0 else dim + leaf.dim() for leaf in leaves]
    shapes: list[tuple[int | None, ...]] = []
    sizes: list[int] = []
    for leaf, axis in zip(leaves, at, strict=True):
        if 0 <= axis < leaf.dim():
            shapes.append((*leaf.shape[:axis], None, *leaf.shape[axis + 1 :]))
            sizes.append(leaf.shape[axis])
        else:
            shapes.append(leaf.shape)
            sizes.append(-1)
    call = Call(
        "pad_across_processes",
        f"dim={dim}, pad_value={float(pad_value)}, first={first}",
        value,
        structure,
        tuple(shapes),
        tuple(leaf.dtype for leaf in leaves),
    )
    goals = _largest(where, call, sizes, problem)
    if goals == sizes:
        return value
    return tree.unflatten(
        structure,
        [
            leaf if size == goal else _padded(leaf, axis, goal, pad_value, first)
            for leaf, axis, size, goal in zip(leaves, at, sizes, goals, strict=True)
        ],
    )


def _largest(where: Scope, call: Call, sizes: list[int], problem: ArgumentError | None) -> list[int]:
    local = torch.tensor(sizes, dtype=torch.int64)
    payload = local.view(torch.uint8) if local.nbytes <= room(where) else None
    payloads = agree(where, call, payload=payload, problem=problem).payloads
    if payloads is None or not sizes:
        return sizes
    if payload is not None:
        return payloads.view(torch.int64).amax(0).tolist()
    largest = local.to(where.signature_device())
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=where.group)
    return largest.tolist()


def concatenate(trees: Sequence[T], dim: int = 0) -> T:
    """Concatenate the tensors of several trees along `dim`. Nothing is communicated.

    Args:
        trees: trees of one structure. 0-d tensors count as one row.
        dim: the dimension.

    Returns:
        One tree of that structure.

    Raises:
        ArgumentError: there are no trees, or a leaf is not a tensor.
        TreeMismatchError: their structures differ. Names the paths that do.

    Example:
        >>> parts = [{"x": torch.ones(2)}, {"x": torch.zeros(1)}]
        >>> fa.collectives.concatenate(parts)
        {'x': tensor([1., 1., 0.])}
    """
    if not trees:
        raise ArgumentError(
            "there are no trees to put together", where="fa.collectives.concatenate", fix="pass one or more"
        )
    expected = tree.structure(trees[0])
    for index, item in enumerate(trees):
        if tree.structure(item) != expected:
            paths = sorted(set(tree.paths(item)) ^ set(tree.paths(trees[0])))
            raise TreeMismatchError(
                f"tree {index} is not built like tree 0; " + (", ".join(paths) or "the containers differ"),
                where=f"fa.collectives.concatenate(trees), trees[{index}]",
                fix="pass trees with the same keys and lengths",
            )
        _, _, problem = tensor_leaves(item, "collectives.concatenate")
        if problem is not None:
            raise problem
    return tree.map(lambda *parts: _joined(parts, dim), *trees)


def _joined(parts: tuple[Any, ...], dim: int) -> torch.Tensor:
    return torch.cat([part.reshape(1) if part.dim() == 0 else part for part in parts], dim)


def _padded(leaf: torch.Tensor, axis: int, goal: int, pad_value: float, first: bool) -> torch.Tensor:
    size = leaf.shape[axis]
    fill = leaf.new_full((*leaf.shape[:axis], goal - size, *leaf.shape[axis + 1 :]), pad_value)
    return torch.cat([fill, leaf] if first else [leaf, fill], axis)
