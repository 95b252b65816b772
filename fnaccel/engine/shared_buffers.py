"""Buffers that forwards change, such as running statistics: after an update all ranks hold the first rank's.

A checkpoint holds the first rank's buffers. So a state evaluates to the same values before it is saved and
after it was restored, and nothing that reads a state has to communicate.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from fnaccel.collectives import gather_objects
from fnaccel.errors import CapabilityError
from fnaccel.models.moving_buffers import MovingBuffers

_EVERY = 100  # steps between two comparisons of the buffers that move


class SharedBuffers:
    """The moving buffers that ranks share: one broadcast an update, and none if nothing moves.

    Args:
        buffers: the buffers of this rank.
        names: by slot, its name. "" for a buffer that the model does not save: modules make it themselves,
            and its size may depend on the rows of a rank.
        group: the ranks.
    """

    def __init__(self, buffers: MovingBuffers, names: list[str], group: dist.ProcessGroup) -> None:
        self._buffers = buffers
        self._names = names
        self._group = group
        self._agreements = 0
        self._shared: list[int] = []
        self._sizes: list[int] = []

    def share(self, step: int) -> None:
        """Take the first rank's values. All ranks call it after the same update.

        Ranks compare which buffers move after the first two updates, after steps of powers of two, and after
        each hundredth.

        Args:
            step: the number of the update's call.

        Raises:
            CapabilityError: a buffer has another size on another rank, or than before.
        """
        if self._agreements < 2 or step & (step + 1) == 0 or step % _EVERY == 0:
            self._agreements += 1
            self._agree()
        if not self._shared:
            return
        self._check_sizes()
        present = (self._buffers.tensor(slot) for slot in self._shared)
        # wide elements first, so that each part begins at a multiple of its size
        tensors = sorted((x for x in present if x is not None), key=lambda tensor: -tensor.itemsize)
        with torch.no_grad():
            flat = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors])
            dist.broadcast(flat, group=self._group, group_src=0)
            for tensor, part in zip(tensors, flat.split([x.nbytes for x in tensors]), strict=True):
                tensor.copy_(part.view(tensor.dtype).view(tensor.shape))

    def _agree(self) -> None:
        """Find the buffers that move on any rank."""
        mine = {slot: self._size(slot) for slot in self._buffers.moving if self._names[slot]}
        moving = sorted(set().union(*gather_objects(mine, over=self._group)))
        sizes = gather_objects([self._size(slot) for slot in moving], over=self._group)
        for place, slot in enumerate(moving):
            each = [of_rank[place] for of_rank in sizes]
            if len(set(each)) > 1:
                raise self._sizes_differ(slot, f"{each} bytes on the ranks, and they share its value")
        self._shared, self._sizes = moving, [self._size(slot) for slot in moving]

    def _check_sizes(self) -> None:
        """Raise CapabilityError if a buffer has another size than the ranks agreed on."""
        for slot, size in zip(self._shared, self._sizes, strict=True):
            now = self._size(slot)
            if now != size:
                raise self._sizes_differ(slot, f"{now} bytes on this rank, and had {size} on all")

    def _sizes_differ(self, slot: int, what: str) -> CapabilityError:
        return CapabilityError(
            f"the buffer {self._names[slot]} has {what}",
            where="train_step(state, batch)",
            fix="register it with persistent=False if each rank is to have its own; or "
            "fa.ddp(sync_buffers=False)",
        )

    def _size(self, slot: int) -> int:
        tensor = self._buffers.tensor(slot)
        return -1 if tensor is None else tensor.nbytes
