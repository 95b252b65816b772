"""Several machines begin each check together, also if one of them has failed the last check alone."""

from __future__ import annotations

import contextlib
import time
from typing import Any

from fnaccel import _torch
from fnaccel.cli.selftest.results import CheckFailedError
from fnaccel.errors import LaunchError
from fnaccel.launch.job import STATIC_PORT, Job
from fnaccel.launch.network import check_port
from fnaccel.launch.store import open_store

PATIENCE = 240.0
"""Seconds for a machine to come to the next check. Its ranks may still wait in the last one."""
JOB_PATIENCE = 60.0
"""Seconds for the first machine to begin a job of the same check."""
_PAUSE = 0.1


class Meeting:
    """The machines of a test. They meet in a store, which the first machine keeps at `--master-port`.

    Args:
        nodes: the number of machines.
        node_rank: the number of this machine, or None: the one with the address keeps the store.
        address: of the first machine.
        port: of the store. By default 29500.

    Raises:
        LaunchError: the store can't be kept here, or not be reached.
    """

    def __init__(self, nodes: int, node_rank: int | None, address: str, port: int | None) -> None:
        self._nodes = nodes
        self._port = port or STATIC_PORT
        self._check = self._job = 0
        self._lost: str | None = None
        job = Job(function=lambda: None, machines=nodes, machine=node_rank, address=address, port=self._port)
        try:
            store, self._keeps_store = open_store(job, PATIENCE, lambda: time.sleep(_PAUSE))
        except LaunchError as error:
            raise LaunchError(
                error.what,
                where=f"fnaccel test --nnodes {nodes}",
                fix="run the same command on every machine, with an address and a free port of machine 0",
            ) from error
        self._store: Any = _torch.PrefixStore("fnaccel test", store)

    def begin(self) -> None:
        """Wait until all machines have come to the next check.

        Raises:
            CheckFailedError: a machine has not come, or too many have. All later calls raise it at once.
        """
        try:
            if self._lost is None:
                self._meet()
        except CheckFailedError as error:
            self._lost = str(error)
        except RuntimeError:
            self._lost = "the first machine has ended"
        if self._lost is not None:
            raise CheckFailedError(self._lost)

    def next_port(self) -> int:
        """The port of the next job of a check, free on the first machine.

        Raises:
            CheckFailedError: the first machine runs no such job, or has ended.
        """
        self._job += 1
        key = f"{self._check}/{self._job}/port"
        try:
            if self._keeps_store:
                self._port = next(filter(_is_free, range(self._port + 1, 65_536)))
                self._store.set(key, str(self._port))
            end = time.monotonic() + JOB_PATIENCE
            while not self._store.check([key]):
                if time.monotonic() > end:
                    raise CheckFailedError("the first machine does not run this check")
                time.sleep(_PAUSE)
            return int(self._store.get(key))
        except RuntimeError:
            raise CheckFailedError("the first machine has ended") from None
        except ValueError as error:
            raise CheckFailedError(f"another program writes into the store of this test: {error}") from None

    def leave(self) -> None:
        """End the meeting, after the last check. The first machine waits for the others: it has the store."""
        with contextlib.suppress(RuntimeError):
            self._count("left", PATIENCE if self._keeps_store and self._lost is None else 0.0)

    def _meet(self) -> None:
        self._check, self._job = self._check + 1, 0
        came = self._count(f"{self._check}/came", PATIENCE)
        if came < self._nodes:
            raise CheckFailedError(f"{came} of {self._nodes} machines came within {PATIENCE:g} s")
        if came > self._nodes:
            raise CheckFailedError(f"{came} machines came, and --nnodes is {self._nodes}")

    def _count(self, key: str, seconds: float) -> int:
        """Count this machine, wait until all machines have counted themselves, and return their number."""
        count = self._store.add(key, 1)
        end = time.monotonic() + seconds
        while count < self._nodes and time.monotonic() < end:
            time.sleep(_PAUSE)  # not in the store, where Ctrl-C is not heard
            count = self._store.add(key, 0)
        return count


def _is_free(port: int) -> bool:
    try:
        check_port(port)
    except LaunchError:
        return False
    return True
