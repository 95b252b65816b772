"""The part of a forward between column and row layers, in which ranks compute with different features."""

from __future__ import annotations

import torch

from fnaccel.extend import MeshAxis
from fnaccel.strategies.tensor.collectives import (
    Group,
    copied,
    gathered_for_parts,
    summed,
    summed_and_cut,
)
from fnaccel.world.random_streams import fold
from fnaccel.world.undo import StreamStates

SEQUENCE_DIM = 1


class Region:
    """Where column layers begin, and row layers end.

    The copy of one activation is shared by the column layers that take it, such as query, key and value. So
    backward adds the gradients in one all-reduce, not in one for each of them.

    Args:
        axis: the ranks along the tensor axis.
        device: on which the model computes.
        sequence: whether activations outside of the region are cut along the sequence, dimension 1
            (Korthikanti et al. 2022).
        draws: whether modules draw random numbers within the region: ranks then draw different ones.
    """

    def __init__(self, axis: MeshAxis, device: torch.device, *, sequence: bool, draws: bool) -> None:
        assert axis.group is not None
        self.group: Group = axis.group
        self.sequence = sequence
        self._rank = axis.rank
        self._device = device
        self._draws = draws
        self._source: torch.Tensor | None = None
        self._entered: torch.Tensor | None = None
        self._shared: StreamStates | None = None  # what all ranks draw, while each draws its own
        self._opened_by: torch.nn.Module | None = None

    def watch(self, model: torch.nn.Module) -> None:
        """End the region if a forward of the model raises in it. Then the next one draws as if it had not."""
        model.register_forward_hook(self._forward_ended, always_call=True)
        model.register_forward_pre_hook(self._forward_begins)

    def _forward_ended(self, *_: object) -> None:
        if self._shared is not None:
            self.end()

    def _forward_begins(self, *_: object) -> None:
        if self._shared is not None:  # a recomputed block raised, whose generators torch has restored
            self._shared = None
            self.end()

    def enter(self, value: torch.Tensor, layer: torch.nn.Module) -> torch.Tensor:
        """The input of a column layer."""
        if self._opened_by is layer:
            self.end()  # a forward that failed did not reach its row layer
        entered = self._entered
        if entered is not None and value is entered:
            return entered  # the module around this layer has entered
        if entered is None or self._source is not value:
            if self.sequence:
                entered = gathered_for_parts(value, self.group, SEQUENCE_DIM)
            else:
                entered = copied(value, self.group)
            self._source, self._entered = value, entered
        if self._draws and layer.training and self._shared is None and not torch.compiler.is_compiling():
            number = int(torch.randint(1 << 62, ()))  # on the host. The same number on all ranks
            self._opened_by, self._shared = layer, StreamStates.of(self._device)
            self._shared.reseed(fold(number, self._rank, 0, 0))
        return entered

    def leave(self, value: torch.Tensor) -> torch.Tensor:
        """The output of a row layer, from this rank's summand of it."""
        self.end()
        if self.sequence:
            return summed_and_cut(value, self.group, SEQUENCE_DIM)
        return summed(value, self.group)

    def end(self) -> None:
        """Forget the shared activation, and go on with the random numbers that all ranks share."""
        self._source = self._entered = None
        if self._shared is not None:
            self._shared.put_back()
            self._shared = self._opened_by = None
