"""`gather_objects` and `broadcast_objects`: Python objects between the ranks of one job.

Objects are sent as pickles, and unpickling executes code. The bytes come from a process group, whose members
are ranks of this job: they run the same program as the same user. Bytes of a store come from any process that
reaches its port, and are never unpickled here.
"""

from __future__ import annotations

import pickle
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fnaccel.collectives.exchange import exchange_one
from fnaccel.collectives.over import Over, scope
from fnaccel.collectives.signature import Call, agree, bad_source, room
from fnaccel.errors import NotSerializableError
from fnaccel.tree import Tree
from fnaccel.world.every_rank import every_rank_of, outer_call
from fnaccel.world.world import World

T = TypeVar("T")


@every_rank_of("fa.collectives")
def gather_objects(value: T, *, over: Over = None, world: World | None = None) -> list[T]:
    """The objects of all ranks, on all ranks, as a list in rank order.

    Objects are pickled between the ranks of this job only.

    Args:
        value: anything that pickles. It may be of another kind and size on each rank.
        over: the ranks that take part. By default all.
        world: the world, if none was started in this context.

    Raises:
        NotSerializableError: `value` does not pickle. The other ranks raise RankMismatchError.
        RankMismatchError: another rank makes another call.
        PeerLostError: a rank left, exited or made another call.

    Example, on 2 ranks:
        >>> fa.collectives.gather_objects({"rank": world.rank, "rows": 8 - world.rank})
        [{'rank': 0, 'rows': 8}, {'rank': 1, 'rows': 7}]
    """
    where = scope(over, world, "collectives.gather_objects")
    if where.size == 1:
        return [value]
    data, problem = _dumped(value, "collectives.gather_objects")
    # a rank does not know yet whether the objects of the others fit in a signature too
    beginning = torch.frombuffer(data.ljust(room(where), b"\0"), dtype=torch.uint8)[: room(where)]
    # a save and a gather exchange objects of other kinds: they must not take each other's
    call = Call("fa.collectives.gather_objects", outer_call(world, "fa.collectives.gather_objects"))
    agreed = agree(where, call, number=len(data), payload=beginning, problem=problem)
    sizes, parts = agreed.numbers, agreed.payloads
    most = max(sizes)
    if parts is None or most > room(where):
        local = torch.frombuffer(data.ljust(most, b"\0"), dtype=torch.uint8)
        parts = exchange_one(where, local, where.signature_device()).cpu().view(where.size, most)
    return [_loaded(part[:size]) for part, size in zip(parts, sizes, strict=True)]


@every_rank_of("fa.collectives")
def broadcast_objects(value: T, *, src: int = 0, over: Over = None, world: World | None = None) -> T:
    """The object of rank `src`, on every rank.

    Objects are pickled between the ranks of this job only.

    Args:
        value: anything that pickles. Values of the other ranks are ignored.
        src: the rank, counted within `over`.
        over: the ranks that take part. By default all.
        world: the world, if none was started in this context.

    Raises:
        NotSerializableError: `value` does not pickle. The other ranks raise RankMismatchError.
        RankMismatchError: another rank makes another call.
        PeerLostError: a rank left, exited or made another call.
        ArgumentError: there is no rank `src`.

    Example, on 2 ranks:
        >>> fa.collectives.broadcast_objects("run-17" if world.is_main else None)
        'run-17'
    """
    where = scope(over, world, "collectives.broadcast_objects")
    problem = bad_source(src, where.size, "collectives.broadcast_objects")
    if where.size == 1:
        agree(where, Call("fa.collectives.broadcast_objects"), problem=problem)
        return value
    data = bytearray()
    trouble: NotSerializableError | None = None
    if where.rank == src:
        data, trouble = _dumped(value, "collectives.broadcast_objects")
    call = Call("fa.collectives.broadcast_objects", f"src={src}")
    sizes = agree(where, call, number=len(data), problem=problem or trouble).numbers
    device = where.signature_device()
    buffer = torch.frombuffer(data.ljust(sizes[src], b"\0"), dtype=torch.uint8).to(device)
    dist.broadcast(buffer, group_src=src, group=where.group)
    return value if where.rank == src else _loaded(buffer.cpu())


def _dumped(value: Tree, name: str) -> tuple[bytearray, NotSerializableError | None]:
    try:
        return bytearray(pickle.dumps(value)), None
    except Exception as error:  # anything at all may be raised by a user's __reduce__
        return bytearray(), NotSerializableError(
            f"{type(value).__name__} does not pickle: {error}",
            where=f"fa.{name}",
            fix="pass plain data: numbers, strings, lists, dicts, tensors, functions of a module",
        )


def _loaded(part: torch.Tensor) -> Any:
    return pickle.loads(part.numpy().tobytes())
