"""The kernel, the cards, and the needs of several machines: clocks, ports, a shared folder."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import socket
import time
from pathlib import Path

import torch

import fnaccel as fa
from fnaccel.cli.selftest.results import CheckFailedError, NotAvailableError
from fnaccel.cli.selftest.running import Ranks, on_ranks
from fnaccel.launch.network import address_to
from fnaccel.texts import counted

OLDEST_KERNEL = (5, 5)
"""Processes of several ranks may hang on older Linux kernels."""
SKEW = 1.0
"""Seconds that clocks may differ by: log lines and the times of files are compared by people."""
PATIENCE = 10.0
"""Seconds for a connection, and for a file to appear on another machine."""


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


def check_clocks(ranks: Ranks) -> str:
    """How far the clocks of the machines differ.

    Raises:
        NotAvailableError: one machine.
        CheckFailedError: by more than `SKEW`, or ranks failed.
    """
    if ranks.nodes == 1:
        raise NotAvailableError("one machine: --nnodes")
    offsets = on_ranks(ranks, _clock_offsets)[0]
    skew = max(offsets) - min(offsets)
    if skew > SKEW:
        raise CheckFailedError(f"clocks differ by {skew:.1f} s: synchronise them, with chrony or ntpd")
    return f"clocks differ by {skew * 1e3:.0f} ms at most"


def _clock_offsets() -> list[float]:
    """In a rank: each rank's clock less that of rank 0, in seconds, in the round that took the least time."""
    with fa.start() as world:
        rounds: list[tuple[float, list[float]]] = []
        for _ in range(5):
            world.barrier()
            begin = time.perf_counter()
            clock = torch.tensor([time.time()], dtype=torch.float64)
            clocks = [float(each) for each in fa.collectives.gather_objects(float(clock))]
            rounds.append((time.perf_counter() - begin, [each - clocks[0] for each in clocks]))
        return min(rounds)[1]


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


def check_folder(ranks: Ranks, folder: Path | None) -> str:
    """Whether all machines see the same files in a folder.

    Raises:
        NotAvailableError: one machine, or no folder was named.
        CheckFailedError: a file of rank 0 is not seen elsewhere.
    """
    if folder is None:
        raise NotAvailableError("no folder was named: --folder")
    if ranks.nodes == 1:
        raise NotAvailableError("one machine: --nnodes")
    blind = sorted({text for text in on_ranks(ranks, _see, folder) if text})
    if blind:
        raise CheckFailedError(blind[0])
    return f"all machines see the files in {folder}"


def _see(folder: Path) -> str:
    """In a rank: what is missing, or nothing."""
    with fa.start() as world:
        name = fa.collectives.broadcast_objects(f".fnaccel-test-{os.getpid()}-{time.time_ns()}")
        file = folder / name
        if world.is_main:
            file.write_text("here")
        world.barrier()
        end = time.monotonic() + PATIENCE
        while not file.exists() and time.monotonic() < end:
            with contextlib.suppress(OSError):
                os.listdir(folder)  # noqa: PTH208 - asks a network file system again
            time.sleep(0.1)
        seen = file.exists()
        world.barrier()
        if world.is_main:
            file.unlink()
        return "" if seen else f"{socket.gethostname()} does not see a file of rank 0 in {folder}"
