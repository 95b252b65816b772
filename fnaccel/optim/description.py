"""An optimizer is a description: nothing is made before the parameters are sharded.

`Optimizer` holds the choice. Its `kernel` makes slots and applies an update.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
_NOTHING: dict[str, Any] = {}
_RANGES = {"lr": (0.0, math.inf, "a rate from 0 on"), "betas": (0.0, 1.0, "a number in [0, 1)")}


@attrs.frozen
class Member:
    """One parameter of an optimizer group: its index among the leaves, and the leaf."""

    index: int
    leaf: Leaf


@attrs.frozen
class ScheduledNumber:
    """An option that a schedule gives, or the element at a `place` of it, as of `betas`.

    `group` is the name of the group whose schedule it is. "" if it is the optimizer's.
    """

    option: str
    place: int | None
    schedule: Schedule
    group: str

    def metric(self, rate: str) -> str:
        """Its name in the metrics, made as the name of the rate: `beta1/adamw` beside `lr/adamw`."""
        name = (
            self.option if self.place is None else f"{self.option.replace('betas', 'beta')}{self.place + 1}"
        )
        return "/".join(filter(None, (name, *rate.split("/")[1:], self.group)))


@attrs.frozen
class Group:
    """Parameters that share options, the schedule of their rate (None: the optimizer's), its first value.

    `over` are the ranks that together hold the parameters, over which the norm of a whole tensor is added up.
    None if each rank holds all. `name` is the selection. `options` has the first values of `scheduled`.
    """

    members: tuple[Member, ...]
    options: dict[str, Any]
    lr: Schedule | None
    first_rate: float
    over: MeshAxis | None = None
    name: str = ""
    scheduled: tuple[ScheduledNumber, ...] = ()

    def numbers(
        self, value_of: Callable[[Schedule], Any], rate: str, given: Mapping[str, Any] = _NOTHING
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The scheduled options in one update, and as metrics beside a rate of this name.

        `value_of(schedule)` is a value in that update. `given` take the place of the optimizer's schedules.
        """
        numbers: dict[str, Any] = {}
        reported: dict[str, Any] = {}
        for each in self.scheduled:
            chosen = None if each.group else given.get(each.option)
            if chosen is not None and each.place is not None:
                chosen = chosen[each.place]
            reported[each.metric(rate)] = value = value_of(each.schedule) if chosen is None else chosen
            if each.place is not None:
                elements = [*numbers.get(each.option, self.options[each.option])]
                elements[each.place] = value
                value = tuple(elements)
            numbers[each.option] = value
        return numbers, reported

    @property
    def options_of_parts(self) -> dict[str, Any]:
        """The options, 1 for a scheduled number: parts leave out what is 0, where a schedule may begin."""
        return {**self.options, **{each.option: 1.0 for each in self.scheduled if each.place is None}}


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
            rates: the learning rate of each group, a float or a 0-d tensor. For a group with `scheduled`
                numbers a dict of these options, and of the rate as `"lr"`.
            multiplier: the first factor of the gradients. None means 1.
            skip: 0-d float tensor, 1 if nothing may change. None if no update is ever skipped.
            updates: 0-d float32 tensor, the number of this update, from 1.

        Returns:
            1.0 if a runtime left the update out, 0.0 if it did not. None if `skip` decides.
        """
        ...


class Kernel(Protocol):
    """A frozen record that makes the slots of one optimizer and applies its updates.

    It may have `schedulable`, the names of the options that may be schedules: see `Bound.apply`.
    """

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
        layer_decay: the factor between the rates of neighbouring layers. None: they have one rate.

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
    layer_decay: float | None = None
    if not TYPE_CHECKING:
        __getattr__ = _lazy.absent

    @property
    def traceable(self) -> bool:
        """Whether its update can be captured in a graph."""
        return getattr(self.kernel, "traceable", False) and not self.starts

    @property
    def parts(self) -> tuple[Any, ...] | None:
        """The parts of `fa.optim.chain` that compute the same, without the options of groups.

        None if there are none, as for `fa.optim.from_torch`, or if an option is a schedule.

        Example:
            >>> fa.sgd(0.1, momentum=0.9).parts
            (trace(decay=0.9, nesterov=False),)
        """
        parts = getattr(self.kernel, "parts", None)
        scheduled = _scheduled_in(self, dict(self.options))
        return None if parts is None or scheduled else parts(dict(self.options))

    @property
    def scheduled(self) -> list[ScheduledNumber]:
        """The numbers besides the rate that schedules give."""
        groups = [_scheduled_in(self, dict(options), plan_text(select)) for select, options in self.groups]
        return sum(groups, start=_scheduled_in(self, dict(self.options)))

    def plan_notes(self, spec: Spec) -> list[str]:
        """Notes for the plan: the values that each step reads on the host."""
        notes: list[str] = []
        if not spec.step.settings.skips:
            return notes
        if self.starts:
            notes.append(f"{self.name} starts later: one host read each step, to know the update")
        if not self.elementwise:
            notes.append(f"{self.name} reads one number on the host each step, to know whether to skip")
        if not all(map(takes_tensors, [self.lr, *(number.schedule for number in self.scheduled)])):
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
        parts += [] if self.layer_decay is None else [f"layer_decay={self.layer_decay}"]
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
    where: str, defaults: Mapping[str, Any], groups: Groups, schedulable: Collection[str] = ()
) -> tuple[Options, tuple[tuple[Select, Options], ...]]:
    """Check the options of groups against the names an optimizer knows.

    Raises:
        ArgumentError: a schedule for an option that is not `schedulable`.
        ConfigError: an unknown option. Names the nearest.
    """
    _refuse_schedules(where, defaults, schedulable)
    checked: list[tuple[Select, Options]] = []
    for select, options in pairs_of(groups):
        _refuse_schedules(where, options, ("lr", *schedulable))
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


def _refuse_schedules(where: str, options: Mapping[str, Any], schedulable: Collection[str]) -> None:
    """Raise ArgumentError for a schedule of an option that takes values only."""
    for name, value in options.items():
        if name not in schedulable and any(callable(each) for _, each in _elements(value)):
            raise ArgumentError(
                f"{name}={plan_text(value)} is a function, and {name} takes no schedule",
                where=f"{where}({name}=)",
                fix=f"give its value. Schedules are for {', '.join(dict.fromkeys(['lr', *schedulable]))}",
            )


def _elements(value: Any) -> list[tuple[int | None, Any]]:
    """The places and elements of an option that is a tuple. Another value as the only one."""
    return [*enumerate(value)] if isinstance(value, tuple | list) else [(None, value)]  # pyright: ignore[reportUnknownArgumentType]


def _scheduled_in(optimizer: Optimizer, options: Mapping[str, Any], group: str = "") -> list[ScheduledNumber]:
    return [
        ScheduledNumber(option, place, each, group)
        for option in getattr(optimizer.kernel, "schedulable", ())
        for place, each in _elements(options.get(option))
        if callable(each)
    ]


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
    layers = [0] * len(names) if optimizer.layer_decay is None else layers_of(names)
    sorted_leaves: dict[tuple[int, int, torch.dtype, str, bool], list[Member]] = {}
    for index, (which, layer, leaf) in enumerate(zip(chosen, layers, everything, strict=True)):
        key = (which, layer, leaf.shard.dtype, str(leaf.shard.device), memory_of(leaf.shard) == "dense")
        sorted_leaves.setdefault(key, []).append(Member(index, leaf))
    groups: list[Group] = []
    for (which, layer, *_), members in sorted_leaves.items():
        select, options = optimizer.groups[which] if which >= 0 else ("", ())
        extra = dict(options)
        extra.pop("optional", None)
        lr = extra.pop("lr", None)
        name = select if isinstance(select, str) else plan_text(select)
        rate = _first_value(lr or optimizer.lr, optimizer.name)
        base = {option: value for option, value in optimizer.options if option not in extra}
        numbers = (*_scheduled_in(optimizer, base), *_scheduled_in(optimizer, extra, name))
        if optimizer.layer_decay is not None:
            factor = optimizer.layer_decay ** (max(layers) - layer)
            name = "/".join(filter(None, (f"layer{layer}", name if lr else "")))
            lr, rate = ScaledSchedule(lr or optimizer.lr, factor), rate * factor
        group = Group(tuple(members), {**base, **extra}, lr, rate, over, name, numbers)
        for each in numbers:
            _first_value(each.schedule, optimizer.name, each.option)
        first, _ = group.numbers(lambda schedule: float(schedule(0)), "lr")
        groups.append(attrs.evolve(group, options={**group.options, **first}))
    return groups


@attrs.frozen
class ScaledSchedule:
    """The values of another schedule times a factor."""

    schedule: Schedule
    factor: float

    def __call__(self, updates: Any) -> Any:
        """The value after `updates` updates."""
        return self.factor * self.schedule(updates)


def layers_of(names: Sequence[str]) -> list[int]:
    """The layer of each parameter: 0 before the blocks, k + 1 in block k, and one more after the blocks.

    Blocks are numbered in the names. Of several lists the one with the most numbers is taken.

    Raises:
        ArgumentError: no numbers, or two lists with as many.
    """
    matches = [re.search(r"(?:^|[./])(\d+)\.", name) for name in names]
    blocks = [(m.string[: m.start()], int(m[1])) if m else ("", -1) for m in matches]
    numbers: dict[str, set[int]] = {}
    for prefix, number in (block for block in blocks if block[1] >= 0):
        numbers.setdefault(prefix, set()).add(number)
    most = max(map(len, numbers.values()), default=0)
    lists = [prefix for prefix, own in numbers.items() if len(own) == most]
    if len(lists) != 1:
        several = f"the blocks may be those of {' or '.join(map(repr, lists))}"
        raise ArgumentError(
            several if lists else "no parameter is in a numbered block",
            where="fa.optim.layer_decay",
            fix='rates by hand: groups={"blocks.0.*": {"lr": 1e-4}, ...}',
        )
    layers: list[int] = []
    for prefix, number in blocks:
        outside = max(numbers[lists[0]]) + 2 if any(layers) else 0
        layers.append(number + 1 if number >= 0 and prefix == lists[0] else outside)
    return layers


def _first_value(schedule: Callable[[Any], Any], name: str, option: str = "lr") -> float:
    """The value of a schedule for update 0.

    Raises:
        ArgumentError: it is no finite number, a negative rate, or a beta outside of [0, 1).
    """
    low, high, kind = _RANGES.get(option, (-math.inf, math.inf, "a finite number"))
    value = schedule(0)
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if not (low <= number < high and math.isfinite(number)):
        raise ArgumentError(
            f"the schedule gives {value!r} for update 0, not {kind}",
            where=f"fa.{name}({option}=)",
            fix=f"return {kind}, or a 0-d tensor: {option}=lambda updates: 0.1 / (updates + 1)",
        )
    return number


def takes_tensors(schedule: Callable[[Any], Any]) -> bool:
    """Whether a schedule gives a tensor for a tensor, so that no host read is needed."""
    host_only = getattr(schedule, "host_only", None)
    if host_only is not None:
        return not host_only
    try:
        return isinstance(schedule(torch.zeros(())), torch.Tensor)
    except (TypeError, ValueError, RuntimeError):
        return False
