"""Which part of a tensor lies on this rank, and whether this rank is the one that writes it.

This module does not know the files.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch

from fnaccel import _torch
from fnaccel.engine.runtime_tensor import Remote


@attrs.frozen
class Box:
    """A block of a tensor: its offset and its size along each dimension."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """How many elements lie in it."""
        return math.prod(self.shape)  # of Python's numbers, which do not wrap around

    def within(self, other: Box) -> tuple[slice, ...]:
        """Indices that cut this block out of a tensor that holds `other`."""
        return tuple(
            slice(start - base, start - base + size)
            for start, size, base in zip(self.offset, self.shape, other.offset, strict=True)
        )


def overlap(first: Box, second: Box) -> Box | None:
    """The intersection of two blocks of one tensor, or None if it is empty."""
    if first.shape == second.shape and first.offset == second.offset:  # as on one rank
        return first if 0 not in first.shape else None
    starts = tuple(map(max, first.offset, second.offset))
    ends = [
        min(a + m, b + n)
        for a, m, b, n in zip(first.offset, first.shape, second.offset, second.shape, strict=True)
    ]
    shape = tuple(end - start for start, end in zip(starts, ends, strict=True))
    return Box(starts, shape) if all(size > 0 for size in shape) else None


def whole(shape: tuple[int, ...]) -> Box:
    """The block that is all of a tensor."""
    return Box((0,) * len(shape), shape)


def make_up(blocks: Sequence[Box], everything: Box) -> bool:
    """Whether blocks make up a whole: each of its elements is in exactly one block.

    The time grows with the number of blocks, not with its square. If each block were compared with each, a
    small file could keep a reader busy for hours.

    Args:
        blocks: each lies within `everything`.
        everything: starts at 0.
    """
    if sum(block.numel for block in blocks) != everything.numel:
        return False
    if len(blocks) <= 1 or not everything.numel:
        return True
    cut = [dim for dim, size in enumerate(everything.shape) if any(b.shape[dim] != size for b in blocks)]
    if len(cut) > _MOST_CUT:
        return False
    # A corner counts 1, times -1 for each dimension along which it ends its block. Where blocks meet, corners
    # cancel. How often an element is covered is the sum over the corners before it. So what is left are the
    # corners of the whole exactly if each element is covered once.
    corners: Counter[tuple[int, ...]] = Counter()
    for sign, box in (*((1, block) for block in blocks), (-1, everything)):
        for ends in itertools.product((0, 1), repeat=len(cut)):
            corner = tuple(box.offset[dim] + end * box.shape[dim] for dim, end in zip(cut, ends, strict=True))
            corners[corner] += -sign if sum(ends) % 2 else sign
    return not any(corners.values())


_MOST_CUT = 8
"""Dimensions of a tensor that are cut: a mesh has fewer. A block has a corner for each subset of them."""


@attrs.frozen
class Part:
    """A block of a tensor on this rank: its place, its values, whether this rank writes it."""

    box: Box
    local: torch.Tensor
    writes: bool


def parts_of(value: torch.Tensor, rank: int) -> tuple[Part, ...]:
    """The blocks of `value` on this rank: one, or one of each matrix of a packed parameter that is cut.

    Of copies, one is written: a plain tensor by rank 0, a replicated shard by the ranks with
    coordinate 0 on every replicated mesh dimension.
    """
    if type(value) is torch.Tensor:  # the rest is looked at for every tensor of a state
        plain = value.detach()
        return (Part(whole(tuple(plain.shape)), plain, rank == 0),)
    if isinstance(value, Remote):
        offset, rows, writes = value.part()
        return (Part(Box(offset, tuple(rows.shape)), rows, writes),)
    if not is_sharded(value):
        plain = value.detach()
        return (Part(whole(tuple(plain.shape)), plain, rank == 0),)
    spread: Any = value
    local = _torch.local_of(value).detach()
    coordinate = spread.device_mesh.get_coordinate()
    if coordinate is None:  # this rank is not in the mesh
        dims = value.dim()
        return (Part(Box((0,) * dims, (0,) * dims), local, False),)
    pairs = zip(spread.placements, coordinate, strict=True)
    writes = all(at == 0 for placement, at in pairs if placement.is_replicate())
    part = Part(Box(_torch.local_offset(value), tuple(local.shape)), local, writes)
    for placement, at in zip(spread.placements, coordinate, strict=True):
        if is_packed(placement):
            return tuple(_packed(part, placement, at, value.shape[placement.dim]))
    return (part,)


def _packed(part: Part, placement: Any, coordinate: int, length: int) -> Iterator[Part]:
    """The blocks of a dimension of `length` that holds several matrices, of which each is cut alike."""
    dim, matrices = placement.dim, placement.split_factor
    size = part.local.shape[dim] // matrices
    for number in range(matrices):
        start = number * (length // matrices) + coordinate * size
        offset = (*part.box.offset[:dim], start, *part.box.offset[dim + 1 :])
        shape = (*part.box.shape[:dim], size, *part.box.shape[dim + 1 :])
        yield Part(Box(offset, shape), part.local.narrow(dim, number * size, size), part.writes)


def blocks_of(value: torch.Tensor, rank: int) -> tuple[Box, ...]:
    """The places of the blocks of `value` on this rank."""
    return tuple(part.box for part in parts_of(value, rank))


def is_packed(placement: Any) -> bool:
    """Whether a placement of a DTensor cuts each of several matrices that are packed in one dimension."""
    return type(placement).__name__ == "_StridedShard"


def is_sharded(value: torch.Tensor) -> bool:
    """Whether a tensor is a DTensor."""
    return hasattr(value, "placements")
