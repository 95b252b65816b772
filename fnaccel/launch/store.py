"""The store in which the machines of a job meet: which machine keeps it, and on which interface it listens.

A store has no password. So it listens on the interface of --master-addr, not on all of them.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from fnaccel import _torch
from fnaccel.errors import LaunchError
from fnaccel.launch.job import STATIC_PORT, Job
from fnaccel.world.joining import BACKLOG, is_loopback, keep_store

PATIENCE = 600.0
"""Seconds in which the launchers of enough machines have to be started."""


def open_store(job: Job, timeout: float, pause: Callable[[], object]) -> tuple[Any, bool]:
    """The store of the job, and whether this process keeps it.

    Args:
        job: its address and port.
        timeout: seconds that an operation on the store may take.
        pause: waits a moment between two tries to reach it.

    Raises:
        LaunchError: it can't be kept here, or not be reached.
    """
    limit = timedelta(seconds=timeout)
    listener = _listen(job)
    if listener is not None:
        with listener:
            address = listener.getsockname()[0]
            return keep_store(listener, "127.0.0.1" if address == "0.0.0.0" else address, limit), True
    port, end = job.port or STATIC_PORT, time.monotonic() + job.rdzv.get("join_timeout", PATIENCE)
    while True:  # TCPStore tries by itself too, and logs each try
        try:
            socket.create_connection((job.store_address, port), timeout=10.0).close()
            return _torch.TCPStore(
                job.store_address, port, is_master=False, timeout=limit, wait_for_workers=False
            ), False
        except (OSError, RuntimeError) as error:
            if time.monotonic() > end:
                what = f"{endpoint(job)} can't be reached: {error}"
                raise machines_error(
                    job, what, "start the launcher of the machine that has --master-addr"
                ) from error
            pause()


def _listen(job: Job) -> socket.socket | None:
    """A socket for the store if this machine is the one that keeps it, else None.

    That is the machine of --node-rank 0. Without --node-rank it is the one whose address --master-addr is.
    """
    if job.machine not in (None, 0):
        return None
    port = job.port or STATIC_PORT
    try:
        family, *_, place = socket.getaddrinfo(job.store_address, port, type=socket.SOCK_STREAM)[0]
        address = str(place[0])
        if ipaddress.ip_address(address).is_loopback and not is_loopback(job.store_address):
            family, address = socket.AF_INET, ""  # Debian names a machine 127.0.1.1 to itself
        return socket.create_server((address, port), family=family, backlog=BACKLOG)
    except OSError as error:
        elsewhere = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
        if job.machine is None and (elsewhere or error.errno == errno.EADDRINUSE):
            return None
        with contextlib.suppress(OSError):
            if elsewhere:  # an address that is translated on its way here
                return socket.create_server(("", port), backlog=BACKLOG)
        what = f"{endpoint(job)} can't be listened on: {error.strerror}"
        raise machines_error(job, what, "name another --master-port, on every machine the same") from error


def foreign_value(job: Job, key: str, text: bytes) -> LaunchError:
    """The error for a value of the store that no launcher has written."""
    what = f"no launcher has written {text[:40]!r} into the store at {endpoint(job)}, as {key!r}"
    fix = 'keep others from that port: see "Use a private network" in docs/clusters.md'
    return machines_error(job, what, fix)


def endpoint(job: Job) -> str:
    """The address and port of the store."""
    return f"{job.store_address}:{job.port or STATIC_PORT}"


def machines_error(job: Job, what: str, fix: str) -> LaunchError:
    """An error of a job on several machines. Its location is the command of this machine."""
    least, most = job.least_machines, job.machines
    nodes = str(most) if least == most else f"{least}:{most}"
    rank = "" if job.machine is None else f" --node-rank {job.machine}"
    return LaunchError(what, where=f"fnaccel launch --nnodes {nodes}{rank}", fix=fix)
