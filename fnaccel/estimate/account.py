"""A running account of a rank's memory: storages of a trace, and bytes that the strategy adds to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from fnaccel.estimate.storages import LiveStorages
from fnaccel.estimate.work import Work


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


class Account(LiveStorages):
    """Live storages by kind: `hold` adds bytes, and `label` names bytes that are counted already."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = ""
        self.work = Work()
        """The operations and collectives of the step."""
        self.labelled: set[int] = set()
        """The parameters whose gradients have a label."""
        self._kinds: dict[str, int] = {}
        self.highest: dict[str, Peak] = {}
        """The peak of each phase."""

    def hold(self, size: int, kind: str = "") -> None:
        """Count bytes that no storage stands for, of some kind. A negative number frees them."""
        if kind:
            self._kinds[kind] = self._kinds.get(kind, 0) + size
        self.live += size
        highest = self.highest.get(self.phase)
        if highest is None or self.live > highest.total:
            kinds = {**self._kinds, "activations": self.live - sum(self._kinds.values())}
            self.highest[self.phase] = Peak(self.live, self.phase, kinds)

    def observe(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: object) -> None:
        """Count the work of an operation."""
        self.work.observe(operation, args, kwargs, result)

    def label(self, size: int, kind: str) -> None:
        """Give storages that are counted already a kind."""
        self._kinds[kind] = self._kinds.get(kind, 0) + size
        self.hold(0)

    def held(self, kind: str) -> int:
        """The bytes of a kind now."""
        return self._kinds.get(kind, 0)

    @property
    def top(self) -> Peak:
        """The peak of all phases."""
        return max(self.highest.values(), key=lambda peak: peak.total, default=Peak())
