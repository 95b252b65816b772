"""One rank among those that share the data, and its messages from rank 0.

Only lists of indices and errors are sent here. The rows that rank 0 deals out are in `dispatch.py`.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import attrs
import torch
import torch.distributed as dist

from fnaccel.errors import LoaderError
from fnaccel.world.world import find_current

P = ParamSpec("P")
T = TypeVar("T")


@attrs.frozen(kw_only=True)
class Link:
    """One rank of the batch axis.

    Attributes:
        rank, ranks: this part of each global batch, and the number of parts.
        device: the device of batches.
        group: the process group of the ranks. None on a single rank, or if no process group is running.
    """

    rank: int
    ranks: int
    device: torch.device
    group: dist.ProcessGroup | None = None

    @property
    def wire(self) -> torch.device:
        """The device of messages: the CPU if the process group has a CPU backend."""
        on_cpu = self.group is None or "cpu:" in str(dist.get_backend_config(self.group))
        return torch.device("cpu") if on_cpu else self.device

    def talk(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `fn`, in which the ranks exchange their index lists or rows.

        Raises:
            PeerLostError: a rank left, exited or made another call.
        """
        world = find_current()
        if world is None or world.calls is None or self.group not in (dist.group.WORLD, world.groups.data):
            return fn(*args, **kwargs)
        return world.calls.run("the next batch of fa.shard", fn, *args, **kwargs)

    def agree(self, make: Callable[[], T]) -> T:
        """The result of `make` on rank 0, on every rank. Only rank 0 calls it.

        Raises:
            Exception: the error of `make` on rank 0, on every rank.
        """
        if self.group is None:
            return make()
        answer: list[Any] = [None]
        raised: Exception | None = None
        if self.rank == 0:
            try:
                answer = [(True, make())]
            except Exception as error:
                raised, answer = error, [(False, portable(error))]
        self.talk(dist.broadcast_object_list, answer, group_src=0, group=self.group, device=self.wire)
        if raised is not None:
            raise raised
        fine, value = answer[0]
        if not fine:
            raise value
        return value


def portable(error: Exception) -> Exception:
    """`error` as it can be raised on another rank: itself, or its text if it can't be pickled."""
    copied: Exception | None = None
    with contextlib.suppress(Exception):  # whatever a user's exception class does when it is pickled
        copied = pickle.loads(pickle.dumps(error))
    if copied is not None and type(copied) is type(error):
        copied.add_note("raised on rank 0, which reads the data of all ranks")
        return copied
    return LoaderError(
        f"rank 0 failed to read: {type(error).__name__}: {error}",
        where="the loader on rank 0, which reads the data of all ranks",
        fix="see the traceback of rank 0",
    )
