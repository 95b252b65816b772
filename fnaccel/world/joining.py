"""How the processes of one job become a process group: the store in which they meet, and who is missing.

The store of one machine listens on the loopback interface only: it has no password, and whoever reaches
it can end or mislead a job.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping
from concurrent.futures import Future, wait
from datetime import timedelta
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist

from fnaccel import _torch
from fnaccel.errors import WorldError
from fnaccel.texts import ranks_of
from fnaccel.world._torch import limit_collectives
from fnaccel.world.connections import listening_ports, remember, socket_names
from fnaccel.world.launched import Ranks, first_host

LISTENERS: list[Callable[[str], None]] = []
"""Called with "joining" before this process waits for the others, and with "joined" afterwards."""

JOINING = 600.0
"""Seconds that ranks wait for each other to join by default."""

GRACE = 5.0
"""Seconds that an error which names the ranks has after the limit of joining."""

BACKLOG = 1024
"""Connections to a store that may wait to be accepted."""

_MORE_FILES = "raise the limit of open files of a process: ulimit -n 4096"
_OTHER_PORT = "another process listens there: give each job a port of its own (--master-port, MASTER_PORT)"
_REACH = "check that every rank runs and reaches that address (several machines: GLOO_SOCKET_IFNAME)"

_worlds = itertools.count()


@attrs.define(kw_only=True)
class Groups:
    """Process groups of all ranks beside the group of the train steps. None: that group serves.

    gloo aborts the process if two ranks send messages of different lengths to each other. So calls that
    ranks may enter in another order than train steps have their own connections. There they wait, and the
    wait is explained.

    Attributes:
        calls: for `fa.gather`, `fa.save` and all other calls over the whole world.
        data: for messages between ranks while they read data.
        barrier: for `world.barrier`, whose messages are empty.
    """

    calls: dist.ProcessGroup | None = None
    data: dist.ProcessGroup | None = None
    barrier: dist.ProcessGroup | None = None

    def close(self) -> None:
        """Let go of them: a group that is referred to keeps its connections."""
        self.calls = self.data = self.barrier = None


@attrs.frozen(kw_only=True)
class Joined:
    """The process group that `join` began.

    Attributes:
        groups: process groups beside it.
        store: the store that the ranks share.
        host: the rank that keeps the store, or None if a launcher does.
        other_ports: the port of the store, and those that this process listened on before.
    """

    groups: Groups
    store: Any
    host: int | None
    other_ports: frozenset[int]


def join(
    ranks: Ranks,
    device: torch.device,
    backend: str | None,
    timeout: float,
    environ: MutableMapping[str, str],
    *,
    joining: float,
) -> Joined:
    """Begin the process group of all ranks.

    Args:
        ranks: the launcher's values for this process.
        device: the device of this process.
        backend: of collectives. Chosen from the device if None.
        timeout: seconds that ranks wait for each other in a collective.
        environ: the environment. Gets the address of the store if one machine lacks it.
        joining: seconds that ranks wait for each other here.

    Raises:
        WorldError: no address is set, or not all ranks came.
    """
    _set_address(ranks, environ)
    address, port = environ["MASTER_ADDR"], _port_of(environ)
    identity = _identity(ranks, environ)
    if backend is None:
        native = dist.Backend.default_device_backend_map.get(device.type, "gloo")
        backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:{native}"
    limit = timedelta(seconds=joining)
    agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    other_ports = frozenset([port, *listening_ports()])
    if backend == "gloo":
        _check_open_files(ranks, keeps_store=ranks.rank == 0 and not agent)
    _tell("joining")
    try:
        # all attempts of a launcher share one store: without a prefix, a restart reads the addresses of
        # processes that are gone, and half of the restarts fail. Nor may a process that leaves its world and
        # begins another one read keys of the first
        prefix = f"attempt_{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}.{next(_worlds)}" if agent else ""
        store = _met(functools.partial(_meet, ranks, address, port, limit, identity, prefix), ranks, limit)
        before = socket_names()
        if backend == "gloo":
            _lower_debug_level(ranks)
        dist.init_process_group(
            backend,
            store=store,
            rank=ranks.rank,
            world_size=ranks.size,
            timeout=limit,
        )
        # an accelerator's train steps talk by another backend than gloo
        groups = Groups(
            calls=gloo_group(limit) if backend == "gloo" else None,
            data=gloo_group(limit) if "gloo" in backend else None,
            barrier=gloo_group(limit) if backend == "gloo" else None,
        )
        limit_collectives(timedelta(seconds=timeout))
    except (RuntimeError, ValueError, OSError) as error:
        if isinstance(error, WorldError):
            raise
        fixes = {
            "Too many open files": _MORE_FILES,
            "ddress already in use": _OTHER_PORT,
            "wait timeout": "a rank that came to fa.start has ended, or was stopped: see its output",
            "": _REACH,
        }
        raise WorldError(
            f"rank {ranks.rank} could not join {ranks.size} ranks at {address}:{port}: "
            f"{(str(error).splitlines() or [type(error).__name__])[0]}",
            where="fa.start",
            fix=next(fix for text, fix in fixes.items() if text in str(error)),
        ) from error
    remember(before)
    _tell("joined")
    return Joined(
        groups=groups,
        store=store,
        host=None if agent else 0,
        other_ports=other_ports,
    )


def _meet(ranks: Ranks, address: str, port: int, limit: timedelta, identity: str, prefix: str) -> Any:
    """The store of all ranks, once they have come. It is a launcher's if keys in it have a prefix."""
    if prefix:
        tcp = _torch.TCPStore(
            address, port, ranks.size, is_master=False, timeout=limit, wait_for_workers=False
        )
        store: Any = _torch.PrefixStore(prefix, tcp)
    else:
        store = _store_of_ranks(ranks, address, port, limit)
    # torchrun may start its ranks again under one number, if a machine comes or goes
    _wait_for_all(store, ranks, limit, identity, once=not prefix)
    return store


def _met(meet: Callable[[], Any], ranks: Ranks, limit: timedelta) -> Any:
    """What `meet` returns. It runs in a thread: torch waits without a limit for a port that says nothing."""
    met: Future[Any] = Future()

    def run() -> None:
        try:
            met.set_result(meet())
        except Exception as error:
            met.set_exception(error)

    # no executor: it would wait for its thread as the process ends
    threading.Thread(target=run, name="fnaccel-join", daemon=True).start()
    wait([met], limit.total_seconds() + GRACE)
    if not met.done():
        raise WorldError(
            f"rank {ranks.rank} could not join {ranks.size} ranks: {_address()} did not answer within "
            f"{limit.total_seconds():g} s",
            where="fa.start",
            fix="see whether rank 0 runs and was not stopped, and whether another program has its port. "
            f"If it has: {_OTHER_PORT.partition(': ')[2]}",
        )
    return met.result()


def _lower_debug_level(ranks: Ranks) -> None:
    """Undo TORCH_DISTRIBUTED_DEBUG=DETAIL on gloo: DDP ends the process by SIGSEGV then (torch 2.13)."""
    torch_debug: Any = dist  # its stub names none of these
    if torch_debug.get_debug_level() == torch_debug.DebugLevel.DETAIL:
        torch_debug.set_debug_level(torch_debug.DebugLevel.INFO)
        if ranks.rank == 0:
            logging.getLogger("fnaccel").warning(
                "TORCH_DISTRIBUTED_DEBUG=DETAIL is set to INFO: with gloo, DDP would end by SIGSEGV"
            )


def gloo_group(timeout: timedelta | None = None) -> dist.ProcessGroup:
    """A group of all ranks on the CPU, beside the group of the train steps. Every rank calls it."""
    group = dist.new_group(backend="gloo", timeout=timeout)
    if isinstance(group, dist.ProcessGroup):
        return group
    raise WorldError(
        "no process group can be made", where="a process group that runs", fix="make it with gloo for the CPU"
    )


def prefix_of(number: int) -> str:
    """The prefix of a world's keys in its store. Worlds of one process group are counted from 1."""
    return f"fnaccel/world{number}"


def _check_open_files(ranks: Ranks, *, keeps_store: bool) -> None:
    """Raise if the process may not open enough files: torch would try again to connect for ten minutes.

    The counts were measured with torch 2.13: a rank has four connections to each other rank, one for each
    process group on gloo. The rank that keeps the store has three more from each rank.
    """
    if not Path("/dev/fd").exists():  # Windows
        return
    import resource  # noqa: PLC0415 - Windows has no such module

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    opened = sum(1 for _ in Path("/dev/fd").iterdir()) - 1  # the folder itself
    needed = 15 + 4 * ranks.size + (9 + 3 * ranks.size if keeps_store else 0)
    if limit != resource.RLIM_INFINITY and opened + needed > limit:
        raise WorldError(
            f"rank {ranks.rank} needs {needed} more open files to join {ranks.size} ranks, and may open "
            f"{limit - opened}",
            where="fa.start",
            fix=_MORE_FILES,
        )


def is_loopback(address: str) -> bool:
    """Whether only processes of this machine can mean this address."""
    return address in ("localhost", "::1") or address.startswith("127.")


def _set_address(ranks: Ranks, environ: MutableMapping[str, str]) -> None:
    if ranks.machines == 1:
        environ.setdefault("MASTER_ADDR", "127.0.0.1")
        if ranks.source == "mpirun":  # which sets neither, and torch's usual port serves on one machine
            environ.setdefault("MASTER_PORT", "29500")
    if ranks.source == "srun":
        environ.setdefault("MASTER_ADDR", first_host(environ.get("SLURM_NODELIST", "127.0.0.1")))
        environ.setdefault("MASTER_PORT", str(20_000 + int(environ.get("SLURM_JOB_ID", "0")) % 10_000))
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environ]
    if missing:
        raise WorldError(
            f"{ranks.size} ranks were announced by {ranks.source}, and {' and '.join(missing)} are not set",
            where="fa.start",
            fix="start with `fnaccel launch`, or export the address and port of rank 0",
        )


def _port_of(environ: Mapping[str, str]) -> int:
    text = environ["MASTER_PORT"]
    if text.isdecimal() and 0 < int(text) < 65_536:
        return int(text)
    raise WorldError(
        f"MASTER_PORT={text!r} is no port",
        where="fa.start",
        fix="set MASTER_PORT to a number from 1 to 65535",
    )


_OF_A_JOB = {
    "fnaccel launch": ("FNACCEL_JOB",),
    "torchrun": ("TORCHELASTIC_RUN_ID",),
    "mpirun": ("PMIX_NAMESPACE",),
    "srun": ("SLURM_JOB_ID", "SLURM_STEP_ID"),
}
"""Variables that have the same value in all ranks of a job, by the launcher that sets them."""


def _identity(ranks: Ranks, environ: Mapping[str, str]) -> str:
    """What all ranks of one job have in common: their number, the script and the number of the job."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    digest = ""
    if script is not None:
        with contextlib.suppress(OSError):
            digest = hashlib.sha256(Path(script).read_bytes()).hexdigest()
    numbers = [environ.get(name, "") for name in _OF_A_JOB.get(ranks.source, ())]
    return json.dumps([f"{ranks.size} ranks", Path(script or "").name, digest[:16], *numbers])


def _store_of_ranks(ranks: Ranks, address: str, port: int, limit: timedelta) -> Any:
    """A store that rank 0 keeps. Other machines reach it only if the job has ranks there."""
    if ranks.rank != 0:
        return _client_store(ranks, address, port, limit)
    if ranks.machines > 1 or not is_loopback(address):  # torch's own listens on all interfaces
        return _torch.TCPStore(
            address, port, ranks.size, is_master=True, timeout=limit, wait_for_workers=False
        )
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, port), family=family, backlog=BACKLOG) as listener:
        return keep_store(listener, address, limit)


def keep_store(listener: socket.socket, address: str, limit: timedelta) -> Any:
    """A store that this process keeps, on the interface of a listening socket: torch's own listens on all.

    Args:
        listener: the socket. The store has a copy of it.
        address: the address at which this process reaches the store.
        limit: how long an operation on the store may take.
    """
    # libuv: one slow connection would stop the other backend, which reads whole messages
    return _torch.TCPStore(
        address,
        listener.getsockname()[1],
        is_master=True,
        timeout=limit,
        wait_for_workers=False,
        master_listen_fd=os.dup(listener.fileno()),  # torch closes this one
        use_libuv=True,
    )


def _client_store(ranks: Ranks, address: str, port: int, limit: timedelta) -> Any:
    """The store of rank 0. Not the store of an ended world that rank 0 has not closed yet."""
    end, left = time.monotonic() + limit.total_seconds(), f"{prefix_of(1)}/left"
    while True:
        try:
            store = _torch.TCPStore(
                address, port, ranks.size, is_master=False, timeout=limit, wait_for_workers=False
            )
        except RuntimeError as error:
            raise _never_came(ranks, [0], limit) from error
        try:
            if not store.check([left]) or store.get(left) == b"0":
                return store
        except RuntimeError:  # it was closed in this moment
            pass
        if time.monotonic() > end:
            raise _never_came(ranks, [0], limit)
        del store
        time.sleep(0.01)


def _wait_for_all(store: Any, ranks: Ranks, limit: timedelta, identity: str, *, once: bool) -> None:
    """Wait until every rank has come to the store.

    Raises:
        WorldError: ranks did not join within `limit`, or the store belongs to another job. It is named. Also
            if each rank comes `once` to this store, and this rank has come before.
    """
    # a process that came to the port of another job must not count as a rank of that job
    prefix = f"fnaccel/joining/{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    late = list(range(ranks.size))
    end, pause = time.monotonic() + limit.total_seconds(), 0.001
    try:
        _check_identity(store, ranks, identity)
        if store.add(f"{prefix}/{ranks.rank}", 1) > 1 and once:
            raise _other_job(ranks, f"another process came as rank {ranks.rank}")
        # one wait for all would not say whom it misses if rank 0 gives up first and takes the store along
        while late := [rank for rank in late if not store.check([f"{prefix}/{rank}"])]:
            _check_identity(store, ranks, identity)
            if time.monotonic() > end:
                raise _never_came(ranks, late, limit)
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
    except RuntimeError as error:
        if isinstance(error, WorldError):
            raise
        if time.monotonic() > end - 0.1 * limit.total_seconds():  # rank 0 gave up a little earlier
            raise _never_came(ranks, late, limit) from error
        others = [rank for rank in late if rank]
        missing = f", and {ranks_of(others)} had not come" if others else ""
        raise WorldError(
            f"rank {ranks.rank} could not join {ranks.size} ranks: rank 0, or the launcher, which keeps the "
            f"store at {_address()}, has ended{missing}",
            where="fa.start",
            fix="see the output of that process",
        ) from error


def _check_identity(store: Any, ranks: Ranks, identity: str) -> None:
    """See that rank 0, which may not have come yet, belongs to the job of this rank."""
    key = "fnaccel/joining/job"
    if ranks.rank != 0 and not store.check([key]):
        return
    text = store.get(key) if ranks.rank else store.compare_set(key, "", identity)
    first = text.decode(errors="replace")
    if first != identity:
        raise _other_job(ranks, f"rank {ranks.rank} belongs to {identity}, and rank 0 to {first}")


def _other_job(ranks: Ranks, problem: str) -> WorldError:
    return WorldError(
        f"two jobs have the address {_address()}: {problem}",
        where=f"fa.start on rank {ranks.rank} of {ranks.size}",
        fix="give each job a MASTER_PORT (--master-port) of its own, and start the same script on each rank",
    )


def _address() -> str:
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


def _never_came(ranks: Ranks, late: list[int], limit: timedelta) -> WorldError:
    return WorldError(
        f"rank {ranks.rank} could not join {ranks.size} ranks at {_address()}: {ranks_of(late)} did not "
        f"come to fa.start within {limit.total_seconds():g} s",
        where="fa.start",
        fix="see whether the missing ranks run. Call fa.start on every rank, or raise timeout=",
    )


def _tell(event: str) -> None:
    for listener in LISTENERS:
        with contextlib.suppress(OSError):  # the launcher is gone
            listener(event)
