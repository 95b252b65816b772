"""`broadcast`: the tensors of one rank, on all ranks."""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.distributed as dist

from fnaccel import tree
from fnaccel.collectives.flat_buffer import layout, pack, unpack
from fnaccel.collectives.over import Over, carrier_of, scope
from fnaccel.collectives.signature import Call, agree, bad_source, tensor_leaves
from fnaccel.world.every_rank import every_rank
from fnaccel.world.world import World

T = TypeVar("T")


@every_rank
def broadcast(value: T, *, src: int = 0, over: Over = None, world: World | None = None) -> T:
    """The tensors of rank `src` on every rank. Nothing is changed in place.

    One collective moves all leaves. On a single rank nothing is copied, so results share memory with
    the input.

    Args:
        value: a tree of tensors. On the other ranks only structure, shapes and dtypes matter.
        src: the rank, counted within `over`.
        over: the ranks that take part. By default all.
        world: the world, if none was started in this context.

    Returns:
        The same tree of new tensors, without gradients, on the devices of the leaves passed.

    Raises:
        PeerLostError: a rank left, exited or made another call.
        RankMismatchError: on every rank, if ranks pass different structures, shapes or dtypes.
        ArgumentError: a leaf is no plain tensor, or there is no rank `src`.

    Example, on 2 ranks:
        >>> mask = fa.broadcast(torch.rand(8) < 0.15)
        >>> fa.broadcast(torch.tensor(world.rank), src=1)
        tensor(1)
    """
    where = scope(over, world, "broadcast")
    leaves, structure, problem = tensor_leaves(value, "broadcast")
    shapes = tuple(leaf.shape for leaf in leaves)
    dtypes = tuple(leaf.dtype for leaf in leaves)
    carrier = carrier_of(where, leaves)
    call = Call("broadcast", f"{carrier.type}, src={src}", value, structure, shapes, dtypes)
    agree(where, call, problem=problem or bad_source(src, where.size, "broadcast"))
    if where.size == 1:
        return tree.unflatten(structure, [leaf.detach() for leaf in leaves])
    plan = layout(shapes, dtypes)
    with torch.no_grad():
        buffer = pack([leaf.to(carrier) for leaf in leaves], plan)
        if plan.nbytes:
            dist.broadcast(buffer, group_src=src, group=where.group)
        parts = unpack(buffer.view(1, plan.nbytes), plan)
        received = [
            part.to(leaf.device, copy=True).view(leaf.shape) for part, leaf in zip(parts, leaves, strict=True)
        ]
    return tree.unflatten(structure, received)
