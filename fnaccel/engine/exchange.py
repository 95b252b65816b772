"""`Exchange`: pairs of tensors that trade their values for a while, and are put back exactly."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fnaccel.world.interrupts import SigintHeld


class Exchange:
    """A context in whose body the tensors of each pair hold each other's values.

    The pairs that were exchanged are put back, and no others, also if the exchange itself fails.

    Args:
        pairs: tensors of equal shape and dtype.
    """

    def __init__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._pairs = pairs
        self._exchanged = 0

    def __enter__(self) -> None:
        try:
            with SigintHeld(), torch.no_grad():
                for first, second in self._pairs:
                    _swap(first, second)
                    self._exchanged += 1
        except BaseException:
            self._put_back()
            raise

    def __exit__(self, *_: object) -> None:
        self._put_back()

    def _put_back(self) -> None:
        with SigintHeld(), torch.no_grad():
            while self._exchanged:
                _swap(*self._pairs[self._exchanged - 1])
                self._exchanged -= 1


def _swap(first: torch.Tensor, second: torch.Tensor) -> None:
    # the copy may fail if memory runs out, so it comes before any change
    value = first.clone()
    first.copy_(second)
    second.copy_(value)
