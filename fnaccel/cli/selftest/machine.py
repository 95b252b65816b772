"""The kernel, and whether cards reach each other, and ranks each other's ports."""

from __future__ import annotations

import platform
import re
import socket

import torch

import fnaccel as fa
from fnaccel.cli.selftest.results import CheckFailedError, NotAvailableError
from fnaccel.cli.selftest.running import Ranks, on_ranks
from fnaccel.launch.network import address_to
from fnaccel.texts import counted

OLDEST_KERNEL = (5, 5)
"""Processes of several ranks may hang on older Linux kernels."""
PATIENCE = 10.0
"""Seconds for a connection."""


def check_kernel(system: str = platform.system(), release: str = platform.release()) -> str:
    """The version of the Linux kernel.

    Raises:
        NotAvailableError: this is not Linux.
        CheckFailedError: the kernel is too old.

    Example:
        >>> check_kernel("Linux", "6.1.0-18-amd64")
        'Linux 6.1.0-18-amd64'
    """
    if system != "Linux":
        raise NotAvailableError(f"for Linux, and this is {system}")
    version = tuple(map(int, re.findall(r"\d+", release)[:2]))
    if version < OLDEST_KERNEL:
        raise CheckFailedError(
            f"Linux {release} is below {'.'.join(map(str, OLDEST_KERNEL))}: ranks may hang"
        )
    return f"Linux {release}"


def check_cards(ranks: Ranks) -> str:
    """Whether each card can read the memory of each other one.

    Raises:
        NotAvailableError: fewer than two cards of CUDA.
        CheckFailedError: two cards can't.
    """
    if ranks.cpu or (torch.version.cuda is None and torch.version.hip is None):
        raise NotAvailableError("no cards of CUDA or ROCm")
    single = Ranks(processes=1, cpu=True)  # the driver is asked in a process of its own
    count, apart = on_ranks(single, _cards)[0]
    if count < 2:
        raise NotAvailableError(counted(count, "card"))
    if apart:
        pairs = ", ".join(f"{a}-{b}" for a, b in apart)
        raise CheckFailedError(f"no peer-to-peer between cards {pairs}: NCCL goes through host memory")
    return f"{count} cards reach each other"


def _cards() -> tuple[int, list[tuple[int, int]]]:
    """In a process: the number of cards, and the pairs that can't read each other's memory."""
    count = torch.cuda.device_count()
    pairs = [(a, b) for a in range(count) for b in range(a + 1, count)]
    return count, [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]


def check_ports(ranks: Ranks) -> str:
    """Whether each rank reaches a port of each other rank, as gloo and NCCL need.

    Raises:
        NotAvailableError: there is one rank.
        CheckFailedError: a port is not reached.
    """
    if ranks.size == 1:
        raise NotAvailableError("one rank has nobody to reach: -n 2")
    missed = sorted(
        {text for texts in on_ranks(ranks, _reach, ranks.address or "127.0.0.1") for text in texts}
    )
    if missed:
        raise CheckFailedError(f"{missed[0]} (of {len(missed)}): open the ports between the machines")
    return f"each of {ranks.size} ranks reaches a port of each other"


def _reach(address: str) -> list[str]:
    """In a rank: the connections that failed, as text."""
    with fa.start() as world, socket.create_server((address_to(address), 0), backlog=world.size) as server:
        places = fa.collectives.gather_objects((socket.gethostname(), *server.getsockname()[:2]))
        missed: list[str] = []
        for host, where, port in places:
            try:
                socket.create_connection((where, port), timeout=PATIENCE).close()
            except OSError as error:
                reason = error.strerror or str(error)
                missed.append(f"{socket.gethostname()} does not reach {host} at {where}:{port}: {reason}")
        world.barrier()  # nobody closes a port that another one still tries
        return missed
