"""`Exchange`: tensors hold the values of others for a while, and are put back exactly."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fnaccel.world.interrupts import Swapped


class Exchange(Swapped):
    """A context in whose body the first tensor of each pair holds the value of the second.

    The second holds that of the first, so nothing is allocated. If it has another dtype it would round that
    value: it is left as it is, and the value is kept in a copy. The pairs that were exchanged are put back,
    and no others, also if the exchange itself fails.

    Args:
        pairs: tensors of equal shape.
    """

    def __init__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._pairs = pairs
        self._kept: list[torch.Tensor | None] = []

    @torch.no_grad()
    def change(self) -> None:
        """Exchange the values of each pair."""
        for first, second in self._pairs:
            self._kept.append(_exchange(first, second))

    @torch.no_grad()
    def undo(self) -> None:
        """Exchange them again."""
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
