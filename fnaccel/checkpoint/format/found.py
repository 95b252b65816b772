"""The common form of a foreign checkpoint: tensors by name, readable block by block.

`fitting` assigns the names to places in a state. The modules of the formats open the files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import attrs
import torch

from fnaccel.checkpoint.format.boxes import Box, whole
from fnaccel.checkpoint.format.dtypes import name_of
from fnaccel.errors import CheckpointError


@attrs.frozen(eq=False)
class Found:
    """A tensor in a foreign checkpoint.

    Attributes:
        dtype: as stored.
        shape: of the whole tensor.
        read: `read(box, out)` copies one block into a tensor of the block's shape, of any dtype or device.
        at_once: whether reading a block costs as much as reading the whole tensor.
        check: `check(box)` raises CheckpointError if a block can't be read, without reading its values.
            None if only a read can tell.
        view: all of it as the pages of a mapped file, without a copy: they may be let go and read again.
            None if it is not stored as one piece, or was read into memory.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[Box, torch.Tensor], None]
    at_once: bool = False
    check: Callable[[Box], None] | None = None
    view: Callable[[], torch.Tensor] | None = None

    @property
    def nbytes(self) -> int:
        """The bytes of its values."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{name_of(self.dtype)} {list(self.shape)}"


def _nothing(*_: object) -> None:
    """A check that a format does not need."""


Slots = Mapping[str, Mapping[str, Found]]
"""Optimizer state by name of parameter and of slot."""


@attrs.frozen(eq=False)
class Numbered:
    """Optimizer state as torch's `Optimizer.state_dict` has it: by number, without names.

    Attributes:
        groups: the numbers in each parameter group, in order.
        slots: by number. A parameter that never had a gradient has no slots.
    """

    groups: tuple[tuple[int, ...], ...]
    slots: Mapping[int, Mapping[str, Found]]


@attrs.frozen(eq=False, kw_only=True)
class Source:
    """A foreign checkpoint, opened.

    Attributes:
        format: the name of its format.
        path: the file or directory.
        weights: parameters and buffers by name, or in a checkpoint of fnaccel by path
            (see `checkpoint.format.values`), here and below.
        buffers: which of them are known to be buffers.
        transient: which of these the model does not save by itself.
        averages: averaged parameters by name.
        slots: optimizer state with names.
        numbered: optimizer state without names.
        updates: the number of updates of the run, or None if it is unknown.
        counts: the optimizer's number of updates of each parameter.
        step: the number of steps of the run, or None if it is unknown.
        same: names that were left out because they are tied: name -> the name that is stored.
        file_bytes: the size of its files, or None if a look at the files has to tell.
        digest: equal on two ranks if they opened the same checkpoint. "" if the format has none.
        verify: `verify(rank, ranks)` compares the checksums of this rank's share of the files, if the format
            has checksums. Raises CheckpointError.
        check_unchanged: raises CheckpointError if the files were replaced since they were opened.
    """

    format: str
    path: Path
    weights: Mapping[str, Found]
    buffers: frozenset[str] = frozenset()
    transient: frozenset[str] = frozenset()
    averages: Mapping[str, Found] = attrs.field(factory=dict)
    slots: Slots = attrs.field(factory=dict)
    numbered: Numbered | None = None
    updates: int | None = None
    counts: Mapping[str, Found] = attrs.field(factory=dict)
    step: int | None = None
    same: Mapping[str, str] = attrs.field(factory=dict)
    file_bytes: int | None = None
    digest: str = ""
    verify: Callable[[int, int], None] = _nothing
    check_unchanged: Callable[[], None] = _nothing

    @property
    def has_moments(self) -> bool:
        """Whether there is optimizer state."""
        each = [*self.slots.values(), *(self.numbered.slots.values() if self.numbered else ())]
        return any(not slots or any(not slot.startswith("group.") for slot in slots) for slots in each)

    def count_updates(self) -> int | None:
        """The number of updates behind the moments, or None if it is unknown.

        Raises:
            CheckpointError: the optimizer counts different numbers.
        """
        if self.updates is not None:
            return self.updates
        values = {name: float(read_all(count)) for name, count in self.counts.items() if not count.shape}
        distinct = sorted(set(values.values()))
        if len(distinct) > 1:
            few = min(values, key=lambda name: values[name])
            raise CheckpointError(
                f"the optimizer counts {distinct[0]:.0f} updates of {few} and up to {distinct[-1]:.0f} of "
                "others, and a state counts one number for all",
                where=f"reading {self.path}",
                fix='leave its moments out: skip="opt/*"',
            )
        if distinct and not (math.isfinite(distinct[0]) and distinct[0] >= 0):
            raise damaged(f"the optimizer counts {distinct[0]} updates", self.path)
        return int(distinct[0]) if distinct else None


def held(value: torch.Tensor, *, mapped: bool) -> Found:
    """A tensor that is in memory, or that is the pages of a mapped file."""
    plain = value.detach()

    def read(box: Box, out: torch.Tensor) -> None:
        out.copy_(plain[box.within(whole(tuple(plain.shape)))])

    view = (lambda: plain) if mapped else None
    return Found(plain.dtype, tuple(plain.shape), read, check=_nothing, view=view)


def read_all(tensor: Found) -> torch.Tensor:
    """All of one tensor, on the CPU."""
    out = torch.empty(tensor.shape, dtype=tensor.dtype)
    tensor.read(whole(tensor.shape), out)
    return out


def damaged(what: str, path: Path) -> CheckpointError:
    """The error for a file that can't be read in its format."""
    return CheckpointError(
        what, where=f"reading {path}", fix="copy it again if it was moved, or give another checkpoint"
    )


def unescaped(path: str) -> str:
    """A path of `checkpoint.format.values` as it reads: keys as they are, with "/" between them."""
    return path.replace("~1", "/").replace("~0", "~")
