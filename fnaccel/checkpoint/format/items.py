"""What is to be written, tensor by tensor: each item says its bytes in advance, and makes them when asked.

An item of a live state gathers its tensor from all ranks; one of a checkpoint reads it in blocks of rows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import attrs
import torch

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
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    blocks: Callable[[], Iterator[torch.Tensor]]

    @property
    def nbytes(self) -> int:
        """The bytes of its values."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def of_tensors(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None, *, keep: bool) -> list[Item]:
    """Items of tensors in memory; every rank must ask for the blocks of each, in the same order.

    Args:
        tensors: by name, plain or sharded.
        dtype: what floating-point ones become; as they are by default.
        keep: whether this rank writes; the others only take part in gathering.
    """
    return [
        Item(name, cast_of(value.dtype, dtype), tuple(value.shape), _gathering(value, dtype, keep=keep))
        for name, value in tensors.items()
    ]


def of_found(tensors: Mapping[str, Found], dtype: torch.dtype | None) -> list[Item]:
    """Items of tensors in a checkpoint."""
    return [
        Item(name, cast_of(found.dtype, dtype), found.shape, _streaming(found, cast_of(found.dtype, dtype)))
        for name, found in tensors.items()
    ]


def pick(
    tensors: Mapping[str, Any], only: Patterns, skip: Patterns, rename: Rename, where: str
) -> dict[str, Any]:
    """The tensors that are wanted, under their new names and in the same order."""
    chosen = choose(tensors, only, skip, where)
    kept = {name: value for name, value in tensors.items() if name in chosen}
    names = renamed(kept, rename, where)
    return {names[name]: value for name, value in kept.items()}


def check_items(items: Iterable[Item], where: str) -> None:
    """Raise ArgumentError where there is nothing to write, or something that safetensors can't hold."""
    known = list(items)
    if not known:
        raise ArgumentError("there is no tensor to write", where=where, fix="leave out only= and skip=")
    for item in known:
        if item.dtype not in CODES or item.name == "__metadata__":
            raise ArgumentError(
                f"{item.name} is {name_of(item.dtype)}, and safetensors can't hold that under that name",
                where=where,
                fix="skip= it, or rename= it",
            )


def cast_of(stored: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """What a dtype becomes: floating-point ones as wanted, all others as they are."""
    return wanted if wanted is not None and stored.is_floating_point else stored


def bytes_of(block: torch.Tensor) -> memoryview:
    """The values of a contiguous CPU tensor, which lives as long as this view of it."""
    # numpy() would need numpy, which torch does without
    data: Any = (ctypes.c_ubyte * block.nbytes).from_address(block.data_ptr())
    data.owner = block
    return memoryview(data).cast("B")


def _gathering(value: torch.Tensor, dtype: torch.dtype | None, *, keep: bool) -> Callable[[], Iterator[Any]]:
    def blocks() -> Iterator[torch.Tensor]:
        whole: Any = value.detach()
        if hasattr(whole, "full_tensor"):
            whole = whole.full_tensor()  # sharded, or kept by a runtime: every rank takes part
        if keep and whole.numel():
            plain = whole.resolve_conj().resolve_neg()
            yield plain.to("cpu", cast_of(value.dtype, dtype)).contiguous()

    return blocks


def _streaming(found: Found, dtype: torch.dtype) -> Callable[[], Iterator[torch.Tensor]]:
    def blocks() -> Iterator[torch.Tensor]:
        most = found.nbytes if found.at_once else _BUFFER
        for box in _rows(found.shape, found.dtype.itemsize, most):
            out = torch.empty(box.shape, dtype=dtype)
            found.read(box, out)
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
        rest = (0,) * (len(shape) - 1)
        yield Box((start, *rest), (min(count, shape[0] - start), *shape[1:]))
