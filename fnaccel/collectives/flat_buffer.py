"""Many tensors as one flat buffer and back, so that a tree costs one collective and not one per leaf.

No communication here. Buffers of one dtype are for arithmetic. Buffers of bytes hold any mixture.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch

_ALIGNMENT = 16  # the largest item: complex128


@attrs.frozen
class Run:
    """Adjacent leaves of one dtype in a buffer. `start` and `stop` are bytes."""

    dtype: torch.dtype
    leaves: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    stop: int


@attrs.frozen
class Layout:
    """The place of each leaf in a buffer of `nbytes` bytes, padded so that copies can follow copies."""

    runs: tuple[Run, ...]
    padding: int
    nbytes: int


@functools.lru_cache(maxsize=256)
def layout(shapes: tuple[tuple[int, ...], ...], dtypes: tuple[torch.dtype, ...]) -> Layout:
    """Lay leaves out by dtype, larger items first, so that every item is aligned to its size."""
    runs: list[Run] = []
    at = 0
    for dtype in sorted(dict.fromkeys(dtypes), key=lambda dtype: (-dtype.itemsize, str(dtype))):
        members = tuple(leaf for leaf, its in enumerate(dtypes) if its == dtype)
        sizes = tuple(torch.Size(shapes[leaf]).numel() for leaf in members)
        stop = at + sum(sizes) * dtype.itemsize
        runs.append(Run(dtype, members, sizes, at, stop))
        at = stop
    padding = -at % _ALIGNMENT
    return Layout(tuple(runs), padding, at + padding)


def pack(leaves: Sequence[torch.Tensor], where: Layout, into: torch.Tensor | None = None) -> torch.Tensor:
    """The bytes of all leaves: uint8 of shape `[nbytes]`, written to `into` if it is passed."""
    if into is None:
        into = torch.empty(where.nbytes, dtype=torch.uint8, device=leaves[0].device if leaves else None)
    for run, part in runs(into.view(1, where.nbytes), where):
        if run.start < run.stop:
            torch.cat([leaves[leaf].reshape(-1) for leaf in run.leaves], out=part[0])
    into[where.nbytes - where.padding :] = 0
    return into


def runs(buffer: torch.Tensor, where: Layout) -> Iterator[tuple[Run, torch.Tensor]]:
    """Each dtype of `buffer`, uint8 of shape `[copies, nbytes]`: a view of shape `[copies, items]`."""
    for run in where.runs:
        if run.start == run.stop:  # bytes without a stride can't be viewed as anything
            yield run, buffer.new_empty((buffer.shape[0], 0), dtype=run.dtype)
        else:
            yield run, buffer[:, run.start : run.stop].view(run.dtype)


def unpack(buffer: torch.Tensor, where: Layout) -> list[torch.Tensor]:
    """The leaves of `buffer`, uint8 of shape `[copies, nbytes]`: each `[copies, items]`, as views."""
    leaves: dict[int, torch.Tensor] = {}
    for run, part in runs(buffer, where):
        leaves.update(zip(run.leaves, part.split(run.sizes, dim=1), strict=True))
    return [leaves[leaf] for leaf in range(len(leaves))]


def unpack_copies(buffer: torch.Tensor, where: Layout) -> list[torch.Tensor]:
    """The same as new contiguous tensors, none of which shares memory with another."""
    leaves: dict[int, torch.Tensor] = {}
    for run, part in runs(buffer, where):
        copies: Any = torch.split_with_sizes_copy(part, run.sizes, 1)  # the stubs say that it returns None
        leaves.update(zip(run.leaves, copies, strict=True))
    return [leaves[leaf] for leaf in range(len(leaves))]
