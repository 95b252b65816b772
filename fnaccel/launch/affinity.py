"""The cores of a rank: one contiguous slice, within one NUMA node if there are several nodes.

Threads that wander between nodes read their weights from the other node's memory. Linux only: other
systems have no call for it.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path

from fnaccel.errors import LaunchError

_NODES = Path("/sys/devices/system/node")


def cores_of(local_rank: int, processes: int) -> tuple[int, ...]:
    """The cores of one rank of this machine, out of those that this process may use.

    Args:
        local_rank: which process of this machine.
        processes: how many there are.

    Raises:
        LaunchError: more processes than cores, or a system without affinity.
    """
    if not hasattr(os, "sched_getaffinity"):
        raise LaunchError(
            "this system can't keep a process on chosen cores",
            where="fnaccel launch --cpu-affinity",
            fix="leave --cpu-affinity out. --threads still sets the number of threads of a rank",
        )
    return share(processes, os.sched_getaffinity(0), nodes())[local_rank]


def nodes(root: Path = _NODES) -> list[list[int]]:
    """The cores of each NUMA node. Empty if the kernel lists no nodes.

    Args:
        root: the kernel's directory of nodes.
    """
    numbered = sorted(root.glob("node[0-9]*"), key=lambda path: int(path.name.removeprefix("node")))
    return [parse(text) for path in numbered if (text := (path / "cpulist").read_text().strip())]


def parse(text: str) -> list[int]:
    """Numbers of a list as the kernel writes it.

    Example:
        >>> parse("0-2,8")
        [0, 1, 2, 8]
    """
    cores: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        cores.extend(range(int(first), int(last or first) + 1))
    return cores


def share(
    processes: int, allowed: Collection[int], grouped: Sequence[Collection[int]]
) -> list[tuple[int, ...]]:
    """The cores of each rank. No two ranks share a core, and no rank spans two nodes.

    Neighbouring ranks share a node. Fewer ranks than nodes get a whole node each.

    Args:
        processes: how many ranks.
        allowed: the cores that may be used.
        grouped: the cores of each NUMA node.

    Raises:
        LaunchError: a rank would have no core.

    Example:
        >>> share(2, range(4), [range(4)])
        [(0, 1), (2, 3)]
    """
    within = [sorted({*node} & {*allowed}) for node in grouped]
    usable = [node for node in within if node] or [sorted(allowed)]
    slices: list[tuple[int, ...]] = []
    for node, ranks in zip(usable, _parts(processes, len(usable)), strict=True):
        if ranks > len(node):
            raise LaunchError(
                f"{processes} processes can't have cores of their own: {len(allowed)} cores in "
                f"{len(usable)} NUMA nodes",
                where="fnaccel launch --cpu-affinity",
                fix=f"-n {min(map(len, usable)) * len(usable)} at most, or leave --cpu-affinity out",
            )
        begin = 0
        for size in _parts(len(node), ranks) if ranks else []:
            slices.append(tuple(node[begin : begin + size]))
            begin += size
    return slices


def _parts(total: int, count: int) -> list[int]:
    """`total` in `count` parts that differ by one at most, the larger first."""
    each, remainder = divmod(total, count)
    return [each + (index < remainder) for index in range(count)]


def pin(cores: Collection[int]) -> None:
    """Keep this process, and the threads it starts from now on, on these cores."""
    os.sched_setaffinity(0, cores)
