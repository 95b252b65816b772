"""Dispatch: rank 0 reads for everyone, and sends each rank its own rows and nothing else.

A step is up to three messages to each rank: two sizes, a pickled description (structure, shapes,
plain values, position), and one buffer with all tensors. They leave without waiting, and rank 0
looks after them when the next step is asked for. An error while reading reaches every rank in
place of a batch.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist

from fnaccel import tree
from fnaccel.data.batch import Batch
from fnaccel.data.order import span
from fnaccel.data.reader_ranks import Link, portable
from fnaccel.data.stream import shares
from fnaccel.tree import Tree

_ALIGN = 16  # bytes. Every dtype may begin at a multiple of it


@attrs.frozen
class _Slot:
    """The place of a tensor of a batch in the buffer that is sent beside its description."""

    first: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@attrs.frozen
class _End:
    """No batch is left."""


@attrs.frozen
class _Failed:
    """Rank 0 could not read on."""

    error: Exception


@attrs.frozen
class _Parcel:
    """The message to one rank: a description, and the bytes of its tensors."""

    message: bytes
    columns: torch.Tensor


def pack(message: object) -> _Parcel:
    """Describe any pytree in bytes, its tensors apart in one uint8 buffer."""
    chunks: list[torch.Tensor] = []
    filled = 0

    def stow(tensor: torch.Tensor) -> _Slot:
        nonlocal filled
        chunk = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
        padding = -chunk.numel() % _ALIGN
        slot = _Slot(filled, tuple(tensor.shape), tensor.dtype)
        chunks.extend((chunk, torch.zeros(padding, dtype=torch.uint8)))
        filled += chunk.numel() + padding
        return slot

    if isinstance(message, Batch):
        message = attrs.evolve(message, data=tree.map_tensors(stow, message.data))
    columns = torch.cat(chunks) if chunks else torch.empty(0, dtype=torch.uint8)
    return _Parcel(pickle.dumps(message), columns)


def unpack(parcel: _Parcel) -> Any:
    """The inverse of `pack`. Tensors are views of the one buffer."""
    message = pickle.loads(parcel.message)
    if not isinstance(message, Batch):
        return message

    def fetch(leaf: Tree) -> Any:
        if not isinstance(leaf, _Slot):
            return leaf
        chunk = parcel.columns[leaf.first : leaf.first + leaf.size]
        return chunk.view(leaf.dtype).reshape(leaf.shape)

    tree.learn(message.data)
    return attrs.evolve(message, data=tree.map(fetch, message.data))


def dispatch(batches: Iterator[Batch] | None, link: Link) -> Iterator[Batch]:
    """Each rank's part of the global batches that rank 0 reads.

    Args:
        batches: global batches, on rank 0. None on other ranks.
        link: which rank this is, and the process group.

    Raises:
        Exception: the error of reading on rank 0, on every rank.
    """
    if batches is None:
        return _receive(link)
    return _deal(batches, link) if link.ranks > 1 else batches


def _portions(batch: Batch, ranks: int) -> list[Batch]:
    """Every rank's part of a global batch. A rank without rows gets rank 0's, none of them valid."""
    parts, sizes = shares(batch.data, batch.valid, ranks, batch.per_sample)
    return [
        attrs.evolve(
            batch,
            data=data,
            valid=valid,
            rows=span(batch.rows, rank=rank, ranks=ranks)[1],
            first=span(batch.valid, rank=rank, ranks=ranks)[0],
            samples=batch.samples and span(batch.samples, rank=rank, ranks=ranks)[1],
        )
        for rank, (data, valid) in enumerate(zip(parts, sizes, strict=True))
    ]


def _deal(batches: Iterator[Batch], link: Link) -> Iterator[Batch]:
    works: list[dist.Work] = []
    while True:
        try:
            batch = next(batches, None)
            portions = None if batch is None else _portions(batch, link.ranks)
            messages = [_End()] * link.ranks if portions is None else portions
            parcels = [pack(message) for message in messages[1:]]
        except Exception as error:
            failed = [pack(_Failed(portable(error)))] * (link.ranks - 1)
            link.talk(_send, works, failed, link, last=True)
            raise
        works = link.talk(_send, works, parcels, link, last=portions is None)
        if portions is None:
            return
        yield portions[0]


def _send(before: list[dist.Work], parcels: Sequence[_Parcel], link: Link, *, last: bool) -> list[dist.Work]:
    """Send a parcel to each rank but the first, once the parcels before have arrived."""
    _wait(before)
    works = _post(parcels, link)
    if last:
        _wait(works)
    return works


def _post(parcels: Sequence[_Parcel], link: Link) -> list[dist.Work]:
    """Begin to send a parcel to each rank but the first."""
    posted: list[dist.Work] = []
    for rank, parcel in enumerate(parcels, start=1):
        message = torch.frombuffer(bytearray(parcel.message), dtype=torch.uint8)
        sizes = torch.tensor([message.numel(), parcel.columns.numel()])
        contents = [content for content in (sizes, message, parcel.columns) if content.numel() > 0]
        works = [dist.isend(content.to(link.wire), group=link.group, group_dst=rank) for content in contents]
        posted.extend(work for work in works if work is not None)
    return posted


def _wait(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()


def _receive(link: Link) -> Iterator[Batch]:
    while True:
        message = unpack(link.talk(_take, link))
        if isinstance(message, _Failed):
            raise message.error
        if isinstance(message, _End):
            return
        yield message


def _take(link: Link) -> _Parcel:
    lengths = _arrival(2, torch.int64, link).tolist()
    described = bytearray(lengths[0])
    torch.frombuffer(described, dtype=torch.uint8).copy_(_arrival(lengths[0], torch.uint8, link))
    columns = torch.empty(0, dtype=torch.uint8)
    if lengths[1]:
        columns = _arrival(lengths[1], torch.uint8, link).cpu()
    return _Parcel(bytes(described), columns)


def _arrival(length: int, dtype: torch.dtype, link: Link) -> torch.Tensor:
    """The next tensor that rank 0 sends."""
    content = torch.empty(length, dtype=dtype, device=link.wire)
    dist.recv(content, group=link.group, group_src=0)
    return content
