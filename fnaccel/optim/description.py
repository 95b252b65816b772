"""An optimizer is a description: nothing is made before the parameters are sharded.

`Optimizer` holds the choice. Its `kernel` makes slots and applies an update.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

import attrs
import torch

from fnaccel import _lazy
from fnaccel.errors import ArgumentError, ConfigError, nearest
from fnaccel.models.parameter import Leaf, memory_of
from fnaccel.optim.schedules import Schedule, as_schedule, constant
from fnaccel.optim.selection import Groups, Select, choose, pairs_of, refuse_unmatched
from fnaccel.step.callables import plan_text
from fnaccel.step.loss import Scalar
from fnaccel.step.spec import Spec
from fnaccel.world.mesh import MeshAxis

P = ParamSpec("P")
R = TypeVar("R")
Options = tuple[tuple[str, Any], ...]
_RESERVED = ("lr", "optional")


@attrs.frozen
class Member:
    """One parameter of an optimizer group: its index among the leaves, and the leaf."""

    index: int
    leaf: Leaf


@attrs.frozen
class Group:
    """Parameters that share options, the schedule of their rate (None: the optimizer's), its first value.

    `over` are the ranks that together hold the parameters, over which the norm of a whole tensor is added up.
    None if each rank holds all. `name` is the selection of a group with its own rate.
    """

    members: tuple[Member, ...]
    options: dict[str, Any]
    lr: Schedule | None
    first_rate: float
    over: MeshAxis | None = None
    name: str = ""


class Bound(Protocol):
    """An optimizer over real parameters."""

    slots: dict[str, dict[str, Any]]
    reads_host: bool

    def apply(
        self,
        grads: Sequence[torch.Tensor | None],
        rates: Sequence[Any],
        multiplier: Scalar | None,
        skip: torch.Tensor | None,
        updates: torch.Tensor,
    ) -> float | None:
        """Update the parameters in place.

        Args:
            grads: local gradient of each leaf. None if a leaf got none.
            rates: the learning rate of each group, a float or a 0-d tensor.
            multiplier: the first factor of the gradients. None means 1.
            skip: 0-d float tensor, 1 if nothing may change. None if no update is ever skipped.
            updates: 0-d float32 tensor, the number of this update, from 1.

        Returns:
            1.0 if a runtime left the update out, 0.0 if it did not. None if `skip` decides.
        """
        ...


class Kernel(Protocol):
    """A frozen record that makes the slots of one optimizer and applies its updates."""

    def bind(self, groups: Sequence[Group]) -> Bound:
        """Make all slots for these parameters, before step 0."""
        ...


@attrs.frozen(kw_only=True)
class Optimizer:
    """A frozen choice of optimizer, rate, options and groups.

    Attributes:
        name: the name in the plan.
        lr: the schedule of the rate.
        options: options of every group, by name.
        groups: (selection, options) pairs. The first that selects a parameter holds.
        kernel: how it is carried out.
        elementwise: whether an element's update depends on that element alone, so that a shard
            can be updated by itself. False if the kernel asks other ranks for the rest of a parameter: then
            its slots may have shapes of their own, equal on all ranks.
        starts: updates before its first. Until then its parameters stay as they are.

    Example:
        >>> optimizer = fa.adamw(3e-4)
        >>> optimizer.name, optimizer.elementwise
        ('adamw', True)
    """

    name: str
    lr: Schedule = attrs.field(converter=as_schedule)
    options: Options
    groups: tuple[tuple[Select, Options], ...] = ()
    kernel: Any
    elementwise: bool = True
    starts: int = 0
    if not TYPE_CHECKING:
        __getattr__ = _lazy.absent

    @property
    def traceable(self) -> bool:
        """Whether its update can be captured in a graph."""
        return getattr(self.kernel, "traceable", False) and not self.starts

    @property
    def parts(self) -> tuple[Any, ...] | None:
        """The parts of `fa.optim.chain` that compute the same, without the options of groups.

        None if there are none, as for `fa.optim.from_torch`.

        Example:
            >>> fa.sgd(0.1, momentum=0.9).parts
            (trace(decay=0.9, nesterov=False),)
        """
        parts = getattr(self.kernel, "parts", None)
        return None if parts is None else parts(dict(self.options))

    def plan_notes(self, spec: Spec) -> list[str]:
        """Notes for the plan: the values that each step reads on the host."""
        notes: list[str] = []
        if not spec.step.settings.skips:
            return notes
        if self.starts:
            notes.append(f"{self.name} starts later: one host read each step, to know the update")
        if not self.elementwise:
            notes.append(f"{self.name} reads one number on the host each step, to know whether to skip")
        if not takes_tensors(self.lr):
            notes.append("the schedule takes no tensors: one host read each step, to know the update")
        return notes

    def describe(self) -> str:
        """One line for the plan."""
        rate = self.lr.value if isinstance(self.lr, constant) else plan_text(self.lr)
        chain: tuple[Any, ...] = getattr(self.kernel, "chain", ())
        parts = [*map(plan_text, chain), f"lr={rate}"]
        if not chain:
            parts += [f"{name}={plan_text(value)}" for name, value in self.options]
            parts += [f"{plan_text(select)}: {plan_text(dict(o))}" for select, o in self.groups]
        parts += [f"starts at update {self.starts}"] if self.starts else []
        return f"{self.name}({', '.join(parts)})"


def refuse_unknown(torch_class: type[torch.optim.Optimizer]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator: raise ConfigError for an option that an optimizer does not take.

    The message names the nearest option, or says that `torch_class` takes it. The signature stays as it is,
    so type checkers report the mistake too.
    """

    def decorate(fn: Callable[P, R]) -> Callable[P, R]:
        names = list(inspect.signature(fn).parameters)
        where = f"fa.{fn.__name__}"

        @functools.wraps(fn)
        def run(*args: P.args, **options: P.kwargs) -> R:
            for option in options:
                if option not in names:
                    call = f"fa.optim.from_torch(torch.optim.{torch_class.__name__}, lr=..., {option}=...)"
                    taken = option in inspect.signature(torch_class).parameters
                    raise ConfigError(
                        f"{where} has no option {option!r}",
                        where=f"{where}({option}=...)",
                        fix=f"{call} takes it" if taken else nearest(option, names),
                    )
            return fn(*args, **options)

        return run

    return decorate


def options_of(
    where: str, defaults: Mapping[str, Any], groups: Groups
) -> tuple[Options, tuple[tuple[Select, Options], ...]]:
    """Check the options of groups against the names an optimizer knows.

    Raises:
        ConfigError: an unknown option. Names the nearest.
    """
    checked: list[tuple[Select, Options]] = []
    for select, options in pairs_of(groups):
        for name in options:
            if name not in _RESERVED and name not in defaults:
                raise ConfigError(
                    f"{where} has no option {name!r}",
                    where=f"groups[{plan_text(select)}]",
                    fix=nearest(name, [*defaults, *_RESERVED]),
                )
        converted = {k: as_schedule(v) if k == "lr" else v for k, v in options.items()}
        checked.append((select, tuple(converted.items())))
    return tuple(defaults.items()), tuple(checked)


def group_leaves(optimizer: Optimizer, leaves: Iterable[Leaf], over: MeshAxis | None = None) -> list[Group]:
    """Sort leaves into groups by the first selection that takes them, then by dtype, device and gaps.

    Args:
        optimizer: the description, with its selections.
        leaves: the parameters.
        over: the ranks that together hold them, `Layout.held_by`.

    Raises:
        ArgumentError: a selection takes no parameter, or a schedule gives no rate.
    """
    selections = [select for select, _ in optimizer.groups]
    everything = list(leaves)
    chosen = [choose(selections, leaf) for leaf in everything]
    optional = [select for select, options in optimizer.groups if dict(options).get("optional")]
    names = [leaf.name for leaf in everything]
    refuse_unmatched(selections, chosen, optional, names, f"groups of {optimizer.name}")
    sorted_leaves: dict[tuple[int, torch.dtype, str, bool], list[Member]] = {}
    for index, (which, leaf) in enumerate(zip(chosen, everything, strict=True)):
        key = (which, leaf.shard.dtype, str(leaf.shard.device), memory_of(leaf.shard) == "dense")
        sorted_leaves.setdefault(key, []).append(Member(index, leaf))
    groups: list[Group] = []
    for (which, *_), members in sorted_leaves.items():
        select, options = optimizer.groups[which] if which >= 0 else ("", ())
        extra = dict(options)
        extra.pop("optional", None)
        lr = extra.pop("lr", None)
        name = "" if lr is None else select if isinstance(select, str) else plan_text(select)
        first = _first_rate(lr or optimizer.lr, optimizer.name)
        groups.append(Group(tuple(members), {**dict(optimizer.options), **extra}, lr, first, over, name))
    return groups


def _first_rate(schedule: Callable[[Any], Any], name: str) -> float:
    value = schedule(0)
    try:
        rate = float(value)
    except (TypeError, ValueError, RuntimeError):
        rate = math.nan
    if not 0 <= rate < math.inf:
        raise ArgumentError(
            f"the schedule gives {value!r} for update 0, not a rate",
            where=f"fa.{name}(lr=)",
            fix="return a finite number from 0 on, or a 0-d tensor: lr=lambda updates: 0.1 / (updates + 1)",
        )
    return rate


def takes_tensors(schedule: Callable[[Any], Any]) -> bool:
    """Whether a schedule gives a tensor for a tensor, so that no host read is needed."""
    host_only = getattr(schedule, "host_only", None)
    if host_only is not None:
        return not host_only
    try:
        return isinstance(schedule(torch.zeros(())), torch.Tensor)
    except (TypeError, ValueError, RuntimeError):
        return False
