"""A world of any number of ranks in one process, to plan and to count. Its collectives move nothing."""

from __future__ import annotations

import torch
import torch.distributed as dist

from fnaccel.errors import WorldError, require
from fnaccel.world._torch import begin_fake_group
from fnaccel.world.devices import HOSTED, open_device
from fnaccel.world.world import World


def check_ranks(ranks: int, where: str) -> None:
    """Raise ArgumentError unless this many ranks can train."""
    require(
        type(ranks) is int and ranks >= 1,
        f"{ranks!r} ranks can't train",
        where,
        "ranks=1, or another whole number",
    )


def check_machines(ranks: int, local: int, where: str) -> None:
    """Raise ArgumentError if machines of `local` ranks do not make `ranks`."""
    require(
        type(local) is int and local >= 1 and ranks % local == 0,
        f"{ranks} ranks do not make machines of {local!r}",
        where,
        "a number that divides the ranks",
    )


def absent_world(ranks: int, local: int, source: str) -> World:
    """A world of ranks that do not exist, to plan with. It has no collectives: see `simulate` for some.

    Args:
        ranks: how many there would be.
        local: how many of them on one machine.
        source: of the world, for messages.
    """
    return World(
        rank=0, size=ranks, local_rank=0, local_size=local, machine=0, machines=ranks // local,
        device=torch.device("cpu"), backend="none", source=source,
    )  # fmt: skip


def simulate(
    *, ranks: int, per_machine: int | None = None, rank: int = 0, device: torch.device | str = "cpu"
) -> World:
    """One rank of a world whose other ranks do not exist. Use it as a context manager.

    Train steps build, print their plan and run: collectives return at once and leave their results as they
    were. So values are wrong, and shapes, bytes and the number of collectives are right.

    Args:
        ranks: how many ranks there would be.
        per_machine: how many of them on one machine. By default all.
        rank: the rank that this process is.
        device: on which it computes.

    Raises:
        ArgumentError: no such rank, or machines that do not divide the ranks.
        WorldError: this process is part of a process group already.

    Example:
        >>> with fa.simulate(ranks=8, per_machine=4) as pretended:
        ...     pretended.size, pretended.machines
        (8, 2)
    """
    check_ranks(ranks, "fa.simulate(ranks=)")
    local = ranks if per_machine is None else per_machine
    check_machines(ranks, local, "fa.simulate(per_machine=)")
    require(type(rank) is int, f"rank={rank!r} is no whole number", "fa.simulate(rank=)", "an int")
    require(0 <= rank < ranks, f"there is no rank {rank}", "fa.simulate(rank=)", f"0 to {ranks - 1}")
    if dist.is_initialized():
        raise WorldError(
            "this process is part of a process group, and a second one can't begin",
            where="fa.simulate",
            fix="leave the world first: close it, or end its `with` block",
        )
    chosen = open_device(device)
    if chosen.type not in HOSTED:
        torch.accelerator.set_device_index(chosen.index or 0)
    begin_fake_group(rank, ranks)
    world = World(
        rank=rank,
        size=ranks,
        local_rank=rank % local,
        local_size=local,
        machine=rank // local,
        machines=ranks // local,
        device=chosen,
        backend="fake",
        source="fa.simulate",
        owns_group=True,
    )
    world.enter()
    return world
