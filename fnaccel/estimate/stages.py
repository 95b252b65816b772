"""The stages of a pipeline: a trace of each alone, and the memory of a rank from its schedule.

In the trace of a stage, what runs before it leaves nothing, and its end ends the forward.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

import attrs
import torch
from torch import nn

from fnaccel.estimate.account import ACTIVATIONS, GRADIENTS, Account, Peak
from fnaccel.estimate.work import Work
from fnaccel.extend import Built
from fnaccel.models import _torch


@runtime_checkable
class Schedules(Protocol):
    """An axis of stages whose forwards and backwards follow a schedule."""

    mesh_axis: ClassVar[str]

    def split_of(self, model: nn.Module, size: int) -> Any:
        """The model cut into stages."""
        ...

    def timing(self, size: int, micro_batches: int) -> Any:
        """The schedule in time."""
        ...

    def halves(self) -> Callable[..., Callable[[], None]] | None:
        """Differentiates as far as the inputs, and returns what does the rest. None for whole backwards."""
        ...


class _Ended(BaseException):
    """The forward of the stage is over."""


@attrs.define(eq=False)
class OneStage:
    """A stage that is traced alone, and what the trace finds.

    Attributes:
        axis: the pipeline.
        number: of the stage.
        home: its rank along the axis.
        copies: bytes of weights there that another rank owns.
        others: names of parameters that are not there.
        static: bytes by kind that live for all of a step.
        kept: bytes that wait for the backward of a micro-batch.
        half: bytes that wait for the gradients of weights, after those of inputs.
        gradients: bytes of its gradients.
        sent: bytes that it sends to the next stage.
        peaks: of a phase, in the first micro-batch and in later ones.
        rows: by micro-batch, their number as a share of those of the traced one.
    """

    axis: Schedules
    number: int
    home: int = attrs.field(init=False)
    copies: int = attrs.field(init=False)
    others: list[str] = attrs.field(init=False)
    static: Mapping[str, int] = attrs.field(factory=dict[str, int], init=False)
    kept: int = attrs.field(default=0, init=False)
    half: int = attrs.field(default=0, init=False)
    gradients: int = attrs.field(default=0, init=False)
    sent: int = attrs.field(default=0, init=False)
    peaks: dict[tuple[str, bool], Peak] = attrs.field(factory=dict[tuple[str, bool], Peak], init=False)
    rows: Sequence[float] = attrs.field(default=(), init=False)
    _begin: nn.Module = attrs.field(init=False)
    _end: nn.Module | None = attrs.field(init=False)
    _account: Account = attrs.field(init=False)
    _outside: contextlib.ExitStack = attrs.field(factory=contextlib.ExitStack, init=False)
    _later: bool = attrs.field(default=False, init=False)
    _before: int = attrs.field(default=0, init=False)
    _work: Work = attrs.field(factory=Work, init=False)
    _came: list[torch.Tensor] = attrs.field(factory=list[torch.Tensor], init=False)
    _left: list[torch.Tensor] = attrs.field(factory=list[torch.Tensor], init=False)

    def find(self, built: Built, size: int) -> None:
        """Look for the stage in a model on `size` ranks."""
        split, named = self.axis.split_of(built.model, size), dict(built.named("parameters"))
        self._begin = next(each.module for each in split.elements if each.stage == self.number)
        end = split.end(self.number)
        self._end = None if end is None else end.module
        self.home = split.homes[self.number]
        self.copies = sum(named[name].nbytes for name, users in split.users.items() if self.home in users[1:])
        self.others = [name for name, users in split.users.items() if self.home not in users]

    def watch(self, account: Account) -> None:
        """Put hooks on the modules."""
        self._account, self.static = account, account.moment().kinds
        if self.number:
            self._begin.register_forward_pre_hook(self._begins, with_kwargs=True, prepend=True)
        if self._end is not None:
            self._end.register_forward_hook(self._ends)

    def run(self, forward: Callable[[], torch.Tensor], weights: Sequence[nn.Parameter]) -> None:
        """A micro-batch."""
        account = self._account
        account.highest.clear()
        account.phase = "forward"
        account.hold(0)
        self._before, self._work = account.live, account.work.copy()
        with self._outside:
            if self.number:
                self._outside.enter_context(torch.no_grad())
            try:
                outputs = [forward()]
            except _Ended:
                outputs, self._left = self._left, []
        self.kept = self.half = account.live - self._before
        account.phase = "backward"
        account.hold(0)
        grads = [torch.ones_like(output) for output in outputs]
        halves = self.axis.halves()
        if halves is None or not self._came:
            torch.autograd.backward(outputs, grads)
        else:
            rest = halves(outputs, grads, self._came.pop(), weights)
            outputs.clear()
            grads.clear()
            self.half = account.live - self._before
            rest()
        self._came.clear()

    def ran(self) -> None:
        """The micro-batch is over, and its gradients have their kind."""
        account = self._account
        self.gradients = account.held(GRADIENTS) - self.static.get(GRADIENTS, 0)
        for phase, peak in account.highest.items():
            for later in (True,) if self._later else (False, True):
                self.peaks[phase, later] = peak
        self._later = True

    def _begins(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Count from here on. What came takes a gradient."""
        self._account.highest.clear()
        self._account.work = self._work
        torch.clear_autocast_cache()
        self._outside.close()

        def begun(value: Any) -> Any:
            if not (isinstance(value, torch.Tensor) and value.is_floating_point()):
                return value
            self._came.insert(0, value.detach().requires_grad_())
            return self._came[0]

        return _torch.tree_map(begun, (args, kwargs))

    def _ends(self, _: nn.Module, __: object, output: Any) -> None:
        tensors = [value for value in _torch.tree_leaves(output) if isinstance(value, torch.Tensor)]
        self.sent = sum(value.nbytes for value in tensors)
        self._left = [value for value in tensors if value.requires_grad]
        raise _Ended


def peaks_of_rank(actions: Iterable[tuple[str, int, int]], stages: Sequence[OneStage]) -> dict[str, Peak]:
    """The peak of each phase on a rank that runs some actions of a schedule.

    Args:
        actions: in their order.
        stages: all stages, of which the rank has some.
    """
    waiting: Counter[int] = Counter()  # bytes by stage
    done: set[int] = set()
    highest: dict[str, Peak] = {}
    for kind, number, i in actions:
        stage, share = stages[number], stages[number].rows[i]
        kept, half = round(share * stage.kept), round(share * stage.half)
        phase = "forward" if kind == "F" else "backward"
        if kind in ("B", "I"):
            waiting[number] -= kept
        elif kind == "W":
            waiting[number] -= half
        peak = stage.peaks[phase, number in done]
        gradients = sum(stages[other].gradients for other in done - {number})
        kinds = dict(peak.kinds)
        kinds[ACTIVATIONS] = round(share * kinds.get(ACTIVATIONS, 0)) + waiting.total()
        kinds[GRADIENTS] = kinds.get(GRADIENTS, 0) + gradients
        total = sum(kinds.values())
        if phase not in highest or total > highest[phase].total:
            highest[phase] = Peak(total, phase, kinds)
        if kind == "F":
            waiting[number] += kept
        elif kind == "I":
            waiting[number] += half
        else:
            done.add(number)
    return highest
