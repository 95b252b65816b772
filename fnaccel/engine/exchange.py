"""`Exchange`: tensors hold the values of others for a while, and are put back exactly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fnaccel import _torch
from fnaccel.world.undo import Swapped


class Exchange(Swapped):
    """A context in whose body the first tensor of each pair holds the value of the second.

    The second holds that of the first, so nothing is allocated. If it has another dtype it would round that
    value: it is left as it is, and the value is kept in a copy. An error may end the exchange at any moment
    (a timeout, memory): all pairs are put back exactly, also the one in work.

    Args:
        pairs: tensors of equal shape.
        copies: keep the values of the first tensors in copies, all at once, and leave the second ones as they
            are. It is quicker for many small tensors.
    """

    def __init__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], *, copies: bool = False) -> None:
        self._pairs = pairs
        self._copies = copies
        # of each pair so far: the first's own value while `second` is as it was; in a tuple, once `first`
        # holds the value of `second`, which may be half written; None if both are exchanged
        self._kept: list[Any] = []

    @torch.no_grad()
    def change(self) -> None:
        """Exchange the values of each pair."""
        if self._copies:
            firsts = [first for first, _ in self._pairs]
            self._kept = [first.clone() for first in firsts]
            _torch.foreach_copy_(firsts, [second for _, second in self._pairs])
            return
        for first, second in self._pairs:
            value = first.clone()  # may fail if memory runs out, so it comes before any change
            self._kept.append(value)
            first.copy_(second)
            if first.dtype == second.dtype:
                self._kept[-1] = (value,)
                second.copy_(value)
                self._kept[-1] = None

    @torch.no_grad()
    def undo(self) -> None:
        """Exchange them again. If an error has ended this or `change`, the next call goes on from there."""
        if self._copies and self._kept:
            _torch.foreach_copy_([first for first, _ in self._pairs], self._kept)
            self._kept = []
        while self._kept:
            first, second = self._pairs[len(self._kept) - 1]
            if self._kept[-1] is None:
                self._kept[-1] = (second.clone(),)
            if isinstance(self._kept[-1], tuple):
                second.copy_(first)
                self._kept[-1] = self._kept[-1][0]
            first.copy_(self._kept[-1])
            self._kept.pop()
