"""`Exchange`: tensors hold the values of others for a while, and are put back exactly."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fnaccel import _torch
from fnaccel.world.interrupts import Swapped


class Exchange(Swapped):
    """A context in whose body the first tensor of each pair holds the value of the second.

    The second holds that of the first, so nothing is allocated. If it has another dtype it would round that
    value: it is left as it is, and the value is kept in a copy. The pairs that were exchanged are put back,
    and no others, also if the exchange itself fails.

    Args:
        pairs: tensors of equal shape.
        copies: keep the values of the first tensors in copies, all at once, and leave the second ones as they
            are. It is quicker for many small tensors.
    """

    def __init__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], *, copies: bool = False) -> None:
        self._pairs = pairs
        self._copies = copies
        self._kept: list[torch.Tensor | None] = []

    @torch.no_grad()
    def change(self) -> None:
        """Exchange the values of each pair."""
        if self._copies:
            firsts = [first for first, _ in self._pairs]
            self._kept = [first.clone() for first in firsts]
            _torch.foreach_copy_(firsts, [second for _, second in self._pairs])
            return
        for first, second in self._pairs:
            self._kept.append(_exchange(first, second))

    @torch.no_grad()
    def undo(self) -> None:
        """Exchange them again."""
        if self._copies and self._kept:
            _torch.foreach_copy_([first for first, _ in self._pairs], self._kept)
            self._kept = []
        while self._kept:
            first, second = self._pairs[len(self._kept) - 1]
            value = self._kept[-1]
            if value is None:
                _exchange(first, second)
            else:
                first.copy_(value)
            self._kept.pop()


def _exchange(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor | None:
    """Give `first` the value of `second`. Returns its own value if `second` can't hold that."""
    # the copy may fail if memory runs out, so it comes before any change
    value = first.clone()
    first.copy_(second)
    if first.dtype != second.dtype:
        return value
    second.copy_(value)
    return None
