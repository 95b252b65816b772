"""The cores of the NUMA node of a rank's GPU. Linux only.

Memory comes from the node of the core that first writes to it. So a rank that stays on these cores has its
pinned buffers next to its GPU.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path

from fnaccel.errors import LaunchError
from fnaccel.launch.affinity import nodes

_PROC = Path("/proc/driver/nvidia/gpus")
_PCI = Path("/sys/bus/pci/devices")


def node_cores(local_rank: int, processes: int, *, visible: str | None = None) -> tuple[int, ...]:
    """The cores of the node of this rank's GPU. Without GPUs the ranks are spread over the nodes.

    Args:
        local_rank: which process of this machine.
        processes: how many there are.
        visible: the value of CUDA_VISIBLE_DEVICES, or None.

    Raises:
        LaunchError: a system without affinity.
    """
    if not hasattr(os, "sched_getaffinity"):
        raise LaunchError(
            "this system can't keep a process on chosen cores",
            where="fnaccel launch --numa",
            fix="leave --numa out",
        )
    allowed = os.sched_getaffinity(0)
    return choose_node(local_rank, processes, allowed, nodes(), gpu_nodes(visible))


def choose_node(
    local_rank: int,
    processes: int,
    allowed: Collection[int],
    grouped: Sequence[Collection[int]],
    of_gpus: Sequence[int],
) -> tuple[int, ...]:
    """The cores of one rank.

    Args:
        local_rank: which process of this machine.
        processes: how many there are.
        allowed: the cores that may be used.
        grouped: the cores of each NUMA node.
        of_gpus: the node of each GPU. Empty without GPUs, and -1 if the machine has one node.

    Example:
        >>> choose_node(1, 2, range(8), [range(4), range(4, 8)], of_gpus=[1, 0])
        (0, 1, 2, 3)
    """
    usable = [cores for node in grouped if (cores := sorted({*node} & {*allowed}))]
    everything = tuple(sorted(allowed))
    if local_rank < len(of_gpus):
        node = of_gpus[local_rank]
        known = 0 <= node < len(grouped)
        return tuple(sorted({*grouped[node]} & {*allowed})) or everything if known else everything
    if not usable:
        return everything
    return tuple(usable[local_rank * len(usable) // processes])


def gpu_nodes(visible: str | None, *, gpus: Path = _PROC, devices: Path = _PCI) -> list[int]:
    """The NUMA node of each NVIDIA GPU, in the order of their bus. -1 if the kernel does not know it.

    Args:
        visible: numbers of GPUs, as in CUDA_VISIBLE_DEVICES. Other texts (UUIDs) stand for all GPUs.
        gpus, devices: folders of the driver and of the kernel.
    """
    nodes_of: list[int] = []
    for path in sorted(gpus.glob("*")):
        try:
            nodes_of.append(int((devices / path.name.lower() / "numa_node").read_text()))
        except (OSError, ValueError):
            nodes_of.append(-1)
    numbers = [part.strip() for part in (visible or "").split(",")]
    if visible is None or not all(number.isdecimal() for number in numbers):
        return nodes_of
    return [nodes_of[int(number)] for number in numbers if int(number) < len(nodes_of)]
