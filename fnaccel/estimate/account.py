"""A running account of a rank's memory: storages of a trace, and bytes that the strategy adds to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs
import torch

from fnaccel.estimate.storages import LiveStorages
from fnaccel.estimate.work import Work, along_tp

GATHERED, BUFFERS, GRADIENTS, ACTIVATIONS = "gathered", "buffers", "gradients", "activations"


@attrs.frozen
class Peak:
    """The moment of a step with the most live bytes.

    Attributes:
        total: live bytes.
        phase: the phase of the step.
        kinds: bytes by kind. Tensors of the trace that are no gradients are under `"activations"`.

    Example:
        >>> estimate = fa.estimate.training(
        ...     loss_fn, model=fa.distribute(GPT, "local"), optimizer=fa.sgd(0.1), batch=batch
        ... )
        >>> estimate.peak.phase, sorted(estimate.peak.kinds)[:3]
        ('backward', ['activations', 'averages', 'batch'])
    """

    total: int = 0
    phase: str = ""
    kinds: Mapping[str, int] = attrs.field(factory=dict[str, int])


@attrs.frozen
class Moment:
    """Bytes by kind, and work, at one moment of a trace."""

    kinds: Mapping[str, int]
    work: Work


class Account(LiveStorages):
    """Live storages by kind, and bytes that no storage stands for.

    Storages are activations, unless `label` gives them another kind. The buffers that FSDP2 gathers into and
    reduces are told by the operations that take them.

    Args:
        axis_of: the mesh axis of a process group, by the group's name.
    """

    def __init__(self, axis_of: Callable[[str], str] = along_tp) -> None:
        super().__init__()
        self.phase = ""
        self.work = Work()
        """The operations and collectives of the step."""
        self.highest: dict[str, Peak] = {}
        """The peak of each phase."""
        self._axis_of = axis_of
        self._kinds: dict[str, int] = {ACTIVATIONS: 0}
        self._kind_of: dict[int, str] = {}

    def hold(self, size: int, kind: str = ACTIVATIONS) -> None:
        """Count bytes that no storage stands for, of some kind. A negative number frees them."""
        self.add({kind: size})

    def add(self, sizes: Mapping[str, int]) -> None:
        """Count bytes of several kinds at once."""
        for kind, size in sizes.items():
            self._kinds[kind] = self._kinds.get(kind, 0) + size
            self.live += size
        highest = self.highest.get(self.phase)
        if highest is None or self.live > highest.total:
            self.highest[self.phase] = Peak(self.live, self.phase, dict(self._kinds))

    def changed(self, key: int, size: int) -> None:
        """Count the change under the kind of the storage."""
        self.hold(size, self._kind_of.get(key, ACTIVATIONS))

    def _end(self, key: int) -> None:
        super()._end(key)
        self._kind_of.pop(key, None)

    def label(self, tensors: Iterable[torch.Tensor], kind: str) -> None:
        """Give the storages of tensors a kind."""
        for tensor in tensors:
            key = id(tensor.untyped_storage())
            before, size = self._kind_of.get(key, ACTIVATIONS), self._sizes.get(key, 0)
            if before != kind and size:
                self._kind_of[key] = kind
                self.add({before: -size, kind: size})

    def observe(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: object) -> None:
        """Count the work of an operation, and label the buffers of FSDP2."""
        self.work.observe(operation, args, kwargs, result, self._axis_of)
        name = str(operation)
        if name.startswith("fsdp.split_with_sizes_copy"):
            self.label(kwargs["out"], GATHERED)
        elif name.startswith(("c10d._allgather_base_", "c10d._reduce_scatter_base_")):
            self.label(args[:2], BUFFERS)

    def held(self, kind: str) -> int:
        """The bytes of a kind now."""
        return self._kinds.get(kind, 0)

    def moment(self) -> Moment:
        """The bytes by kind, and the work until now."""
        return Moment(dict(self._kinds), self.work.copy())

    def repeat(self, since: Moment, times: int) -> dict[str, int]:
        """Count what was added since then as often again, and return these bytes by kind."""
        added = {kind: (size - since.kinds.get(kind, 0)) * times for kind, size in self._kinds.items()}
        self.add(added)
        self.work.repeat(since.work, times)
        return added

    @property
    def top(self) -> Peak:
        """The peak of all phases."""
        return max(self.highest.values(), key=lambda peak: peak.total, default=Peak())
