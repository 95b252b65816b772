"""The tensors to write. Each item knows its size in bytes in advance, and makes its bytes when asked.

An item of a live state gathers its tensor from all ranks. An item of a checkpoint reads blocks of rows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import attrs
import torch

from fnaccel import tree
from fnaccel.checkpoint.choosing import Patterns, Rename, choose, renamed
from fnaccel.checkpoint.format.boxes import Box
from fnaccel.checkpoint.format.dtypes import CODES, name_of
from fnaccel.checkpoint.format.found import Found
from fnaccel.errors import ArgumentError

_BUFFER = 8 << 20  # bytes that are read at a time


@attrs.frozen(eq=False)
class Item:
    """One tensor to write.

    Attributes:
        name: in the file.
        dtype: in the file.
        shape: all of it.
        blocks: its values in order, on the CPU, as contiguous tensors of `dtype`.
        also: further names of a tied tensor.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    blocks: Callable[[], Iterator[torch.Tensor]]
    also: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """The bytes of its values."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def of_tensors(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None, *, keep: bool) -> list[Item]:
    """Items of tensors in memory. Every rank must ask for the blocks of each item, in the same order.

    Args:
        tensors: by name, plain or sharded. A tensor that stands under several names is one item.
        dtype: the dtype for floating-point tensors. By default their own.
        keep: whether this rank writes. The other ranks only take part in gathering.
    """
    named: dict[int, list[str]] = {}
    for name, value in tensors.items():
        named.setdefault(id(value), []).append(name)
    return [
        Item(
            name,
            cast_of(value.dtype, dtype),
            tuple(value.shape),
            _gathering(value, dtype, keep=keep),
            tuple(also),
        )
        for name, *also in named.values()
        for value in [tensors[name]]
    ]


def of_part(name: str, part: torch.Tensor) -> Item:
    """An item of a tensor that this rank holds, and writes by itself."""

    def blocks() -> Iterator[torch.Tensor]:
        if part.numel():
            yield part.detach().resolve_conj().resolve_neg().cpu().contiguous()

    return Item(name, part.dtype, tuple(part.shape), blocks)


def of_found(tensors: Mapping[str, Found], dtype: torch.dtype | None) -> list[Item]:
    """Items of tensors in a checkpoint."""
    return [
        Item(
            name, cast_of(tensor.dtype, dtype), tensor.shape, _streaming(tensor, cast_of(tensor.dtype, dtype))
        )
        for name, tensor in tensors.items()
    ]


def pick(
    tensors: Mapping[str, Any], only: Patterns, skip: Patterns, rename: Rename, where: str
) -> dict[str, Any]:
    """The tensors that are wanted, under their new names and in the same order."""
    chosen = choose(tensors, only, skip, where)
    picked = {name: value for name, value in tensors.items() if name in chosen}
    names = renamed(picked, rename, where)
    return {names[name]: value for name, value in picked.items()}


def check_items(items: Iterable[Item], where: str) -> None:
    """Raise ArgumentError if there is nothing to write, or if safetensors can't hold a tensor."""
    listed = list(items)
    if not listed:
        raise ArgumentError("there is no tensor to write", where=where, fix="leave out only= and skip=")
    for item in listed:
        if item.dtype not in CODES or item.name == "__metadata__":
            raise ArgumentError(
                f"{item.name} is {name_of(item.dtype)}, and safetensors can't hold that under that name",
                where=where,
                fix="skip= it, or rename= it",
            )


def cast_of(stored: torch.dtype, target: torch.dtype | None) -> torch.dtype:
    """The written dtype: `target` for floating-point tensors, their own for all others."""
    return target if target is not None and stored.is_floating_point else stored


def bytes_of(block: torch.Tensor) -> memoryview:
    """The values of a contiguous CPU tensor, which lives as long as this view of it."""
    # numpy() would need numpy, which torch does without
    data: Any = (ctypes.c_ubyte * block.nbytes).from_address(block.data_ptr())
    data.owner = block
    return memoryview(data).cast("B")


def _gathering(value: torch.Tensor, dtype: torch.dtype | None, *, keep: bool) -> Callable[[], Iterator[Any]]:
    def blocks() -> Iterator[torch.Tensor]:
        whole = tree.whole(value).detach()  # if it is sharded, every rank takes part
        if keep and whole.numel():
            plain = whole.resolve_conj().resolve_neg()
            yield plain.to("cpu", cast_of(value.dtype, dtype)).contiguous()

    return blocks


def _streaming(tensor: Found, dtype: torch.dtype) -> Callable[[], Iterator[torch.Tensor]]:
    def blocks() -> Iterator[torch.Tensor]:
        most = tensor.nbytes if tensor.at_once else _BUFFER
        for box in _rows(tensor.shape, tensor.dtype.itemsize, most):
            out = torch.empty(box.shape, dtype=dtype)
            tensor.read(box, out)
            yield out

    return blocks


def _rows(shape: tuple[int, ...], itemsize: int, most: int) -> Iterator[Box]:
    """Blocks of whole rows that make up a tensor in order, each of about `most` bytes."""
    if not torch.Size(shape).numel():
        return
    if not shape:
        yield Box((), ())
        return
    count = max(1, most // (torch.Size(shape[1:]).numel() * itemsize))
    for start in range(0, shape[0], count):
        zeros = (0,) * (len(shape) - 1)
        yield Box((start, *zeros), (min(count, shape[0] - start), *shape[1:]))
