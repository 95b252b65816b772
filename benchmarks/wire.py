"""Bytes that a rank hands to torch.distributed while rank 0 deals out batches; counted, not estimated."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from typing import Any
from unittest import mock

import peers
import torch
import torch.distributed as dist
from environment import is_installed
from torch.distributed import distributed_c10d
from torch.utils.data import DataLoader, IterableDataset

import fnaccel as fa

_FUNCTIONS = (
    "broadcast", "send", "isend", "recv", "irecv", "scatter", "gather", "reduce", "all_reduce",
    "all_gather", "all_gather_into_tensor", "all_to_all",
)  # fmt: skip


@contextlib.contextmanager
def counting() -> Generator[dict[str, int]]:
    """Bytes of tensors that this rank hands over in the body, by the function that was called."""
    counted: dict[str, int] = {}
    inside = [False]  # torch's recv calls its irecv: only the outer one counts
    with contextlib.ExitStack() as stack:
        for name in _FUNCTIONS:
            real = getattr(distributed_c10d, name)

            def wrapped(first: Any, *args: Any, _real: Any = real, _name: str = name, **kwargs: Any) -> Any:
                if inside[0]:
                    return _real(first, *args, **kwargs)
                tensors = first if isinstance(first, list) else [first]
                counted[_name] = counted.get(_name, 0) + sum(one.nbytes for one in tensors)
                inside[0] = True
                try:
                    return _real(first, *args, **kwargs)
                finally:
                    inside[0] = False

            # torch's collectives of objects look names up in the module, everyone else in the package
            for module in (distributed_c10d, dist):
                stack.enter_context(mock.patch.object(module, name, wrapped))
        yield counted


class Stream(IterableDataset):
    """Rows that only rank 0 is to read."""

    def __init__(self, count: int, width: int) -> None:
        self.count, self.width = count, width

    def __iter__(self) -> Iterator[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        for _ in range(self.count):
            yield torch.randn(self.width, generator=generator)


def dispatched(batches: int, batch: int, width: int) -> dict[str, tuple[int, float]]:
    """(bytes, sum of rows seen) on this rank for fnaccel and Accelerate; runs on every rank."""
    ranks = dist.get_world_size()
    found: dict[str, tuple[int, float]] = {}
    loader = DataLoader(Stream(batches * batch, width), batch_size=batch)
    with counting() as counted:
        seen = sum(float(part.data.sum()) for part in fa.shard(loader, dispatch=True))
    found["fnaccel"] = sum(counted.values()), seen
    if not is_installed("Accelerate"):
        return found
    accelerator = peers.accelerate()
    # its batch is one rank's: the global batch is the same
    theirs = accelerator.prepare_data_loader(
        DataLoader(Stream(batches * batch, width), batch_size=batch // ranks)
    )
    if type(theirs).__name__ != "DataLoaderDispatcher":
        raise SystemExit(f"Accelerate does not dispatch: {type(theirs).__name__}")
    with counting() as counted:
        seen = sum(float(part.sum()) for part in theirs)
    found["Accelerate"] = sum(counted.values()), seen
    return found
