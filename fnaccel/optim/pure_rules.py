"""`PureOptimizers`: the optimizers of a train step as functions of parameters, gradients and slots.

The rules are those of `rules.py` over the operations `PURE`. Numbers of the description may be given for one
update, as tensors that a derivative or a map goes through. Rules run in compiled code, which makes no record
of attrs in the usual way: see `with_number`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fnaccel.errors import ArgumentError, CapabilityError
from fnaccel.models.parameter import Leaf
from fnaccel.optim.chain_kernel import numbers_of, with_numbers
from fnaccel.optim.description import Optimizer, group_leaves, takes_tensors
from fnaccel.optim.operations import PURE
from fnaccel.optim.rules import (
    PlacedPart,
    UpdateInfo,
    first_slots,
    free_name,
    part_name,
    placed,
    run_parts,
    wide,
)
from fnaccel.optim.several import assign

_WHERE = "fa.pure(train_step)"
Slots = Mapping[str, Mapping[str, torch.Tensor]]


class _Rule:
    """Parts over some parameters that share a rate. A plain class, since a graph reads it.

    Attributes:
        rate: the name of its rate in the metrics.
        schedule: of the rate.
        overridable: whether a given rate takes the place of the schedule. Not if a group has its own.
        indices: of its parameters, among all that are trained.
        parts: in the order in which they change gradients.
        shown: for each part the names of its slots in a state.
        fields: for each part, option -> field.
        fixed: the options that a call can't give, since a group has its own.
        numbers: gives its scheduled numbers, as `Group.numbers`.
    """

    def __init__(
        self,
        rate: str,
        schedule: Callable[[Any], Any],
        overridable: bool,
        indices: Sequence[int],
        leaves: Sequence[Leaf],
        parts: Sequence[Any],
        fixed: Sequence[str] = (),
        numbers: Callable[..., Any] | None = None,
    ) -> None:
        self.fixed, self.numbers = set(fixed), numbers
        self.rate, self.schedule, self.overridable = rate, schedule, overridable
        self.indices = list(indices)
        self.names = [leaf.name for leaf in leaves]
        self.parts = [placed(part, leaves) for part in parts]
        self.shown: list[dict[str, str]] = []
        self.fields: list[dict[str, str]] = []
        taken: set[str] = set()
        for each in self.parts:
            own = first_slots(each.part, PURE, [leaves[i].shard.detach() for i in self.places(each)])
            self.shown.append({name: free_name(name, taken) for name in own})
            taken.update(self.shown[-1].values())
            self.fields.append(numbers_of(each.part))

    def places(self, each: PlacedPart) -> list[int]:
        """The parameters of a part, by their place among those of the rule."""
        return list(range(len(self.names)) if each.places is None else each.places)


class Updated(NamedTuple):
    """What an update leaves: parameters in order, slots by parameter name, rates by their name."""

    params: list[torch.Tensor]
    opt: dict[str, dict[str, torch.Tensor]]
    rates: dict[str, Any]


class PureOptimizers:
    """All optimizers of a train step, as one function.

    Args:
        optimizers: by model.
        leaves: all parameters that are trained.

    Attributes:
        options: the names of the numbers that a call may give.

    Raises:
        CapabilityError: an optimizer that has no rule, or one that starts later.
    """

    def __init__(self, optimizers: Mapping[str | None, Any], leaves: Sequence[Leaf]) -> None:
        self._names = [leaf.name for leaf in leaves]
        # the dtype of the number of an update, and of rates: bias corrections in fp32 would be 1e-8 off
        self.dtype = (
            torch.float64 if any(leaf.shard.dtype is torch.float64 for leaf in leaves) else torch.float32
        )
        self._rules: list[_Rule] = []
        self._decaying: dict[
            int, _Rule
        ] = {}  # rules that decay only if a call says so, by the place of the rule
        self.host_only: list[str] = []
        for key, described in optimizers.items():
            own = [i for i, leaf in enumerate(leaves) if key is None or leaf.name.startswith(f"{key}/")]
            for each in assign(described, [leaves[i] for i in own]):
                members = [own[i] for i in each.indices]
                if members:
                    rate = "/".join(filter(None, ("lr", key, each.label)))
                    self._add(rate, each.optimizer, leaves, members)
        self.options = self._named_options()
        self._rates = {_name_of(rule): rule.schedule for rule in self._rules if rule.overridable}
        self._apart = any(rate != next(iter(self._rates.values())) for rate in self._rates.values())

    def _add(self, rate: str, optimizer: Optimizer, leaves: Sequence[Leaf], indices: list[int]) -> None:
        """Add the rules of one optimizer."""
        check_optimizer(optimizer)
        members = [leaves[i] for i in indices]
        groups = group_leaves(optimizer, members)
        if getattr(optimizer.kernel, "chain", None) is not None:  # groups differ in layout, and norms are one
            self._rules.append(
                _Rule(rate, optimizer.lr, True, indices, members, optimizer.kernel.parts(groups[0].options))
            )
            self._watch(rate, optimizer.lr)
            return
        base = dict(optimizer.options)
        for group in groups:
            places = [member.index for member in group.members]
            options: dict[str, Any] = group.options
            own = {each.option: each.group for each in group.scheduled}
            fixed = [name for name in base if own.get(name, options[name] != base[name])]
            schedule = optimizer.lr if group.lr is None else group.lr
            name = rate if group.lr is None else f"{rate}/{group.name}"
            members = [member.leaf for member in group.members]
            common = name, schedule, group.lr is None, [indices[i] for i in places], members
            numbers = functools.partial(group.numbers, rate=rate) if group.scheduled else None
            options = group.options_of_parts
            self._rules.append(_Rule(*common, optimizer.kernel.parts(options), fixed, numbers))
            for each in (schedule, *(number.schedule for number in group.scheduled)):
                self._watch(rate, each)
            if options.get("weight_decay") == 0 and "weight_decay" not in fixed:
                parts = optimizer.kernel.parts({**options, "weight_decay": 1.0})
                self._decaying[len(self._rules) - 1] = _Rule(*common, parts, fixed, numbers)

    def _watch(self, rate: str, schedule: Callable[[Any], Any]) -> None:
        if not takes_tensors(schedule):
            self.host_only.append(rate)

    def _named_options(self) -> dict[str, tuple[str, str]]:
        """Option -> (part, field). A field of two different parts has the part's name in front."""
        owners: dict[str, dict[tuple[str, str], None]] = {}
        for rule in [*self._rules, *self._decaying.values()]:
            for each, fields in zip(rule.parts, rule.fields, strict=True):
                for option, field in ((name, fields[name]) for name in fields if name not in rule.fixed):
                    owners.setdefault(option, {})[part_name(each.part), field] = None
        named: dict[str, tuple[str, str]] = {}
        for option, parts in owners.items():
            for part, field in parts:
                named[option if len(parts) == 1 else f"{part}_{option}"] = part, field
        return named

    def check_rate(self, lr: Any) -> None:
        """Raise ArgumentError for one rate of optimizers that differ in theirs, or one of no optimizer."""
        problem = ""
        if isinstance(lr, Mapping):
            problem = "".join(
                f"no optimizer has the name {name!r}; " for name in lr if name not in self._rates
            )
        elif lr is not None and not self._rates:
            problem = "one rate, and each group has its own"
        elif lr is not None and self._apart:
            problem = "one rate, and the optimizers have several"
        if problem:
            names = ", ".join(f"{name!r}: ..." for name in self._rates)
            raise ArgumentError(
                problem,
                where="update(values, batch, lr=)",
                fix=f"lr={{{names}}}, or None for their schedules",
            )

    def update(
        self,
        params: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        opt: Slots,
        updates: torch.Tensor,
        lr: Any,
        options: Mapping[str, Any],
    ) -> Updated:
        """The next parameters and slots. Nothing is written.

        Args:
            params, grads: of all parameters that are trained, in order.
            opt: slots by the name of the parameter.
            updates: the number of updates before this one, a 0-d tensor.
            lr: the rate, or rates by the names of optimizers. None for the schedules of the description.
            options: numbers by the names of `options`.
        """
        count = updates.to(self.dtype)
        moved, slots = list(params), {name: dict(own) for name, own in opt.items()}
        rates: dict[str, Any] = {}
        given = {self.options[name]: value for name, value in options.items()}
        for place, rule in enumerate(self._rules):
            if "weight_decay" in options and place in self._decaying:
                rule = self._decaying[place]
            chosen = lr.get(_name_of(rule)) if isinstance(lr, Mapping) else lr
            rate = rule.schedule(count) if chosen is None or not rule.overridable else chosen
            if rule.rate not in rates:
                rates[rule.rate] = rate
            numbers: dict[str, Any] = {}
            if rule.numbers is not None:
                numbers, reported = rule.numbers(lambda schedule: schedule(count), given=options)
                rates.update(reported)
            self._run(rule, moved, grads, slots, UpdateInfo(count + 1, rate), numbers, given)
        return Updated(moved, slots, rates)

    def _run(
        self,
        rule: _Rule,
        params: list[torch.Tensor],
        grads: Sequence[torch.Tensor],
        slots: dict[str, dict[str, torch.Tensor]],
        info: UpdateInfo,
        scheduled: Mapping[str, Any],
        given: Mapping[tuple[str, str], Any],
    ) -> None:
        """One rule. Puts its results into `params` and `slots`, which are new containers."""
        own = [params[i] for i in rule.indices]
        parts: list[PlacedPart] = []
        before: list[dict[str, list[torch.Tensor]]] = []
        for each, shown, fields in zip(rule.parts, rule.shown, rule.fields, strict=True):
            name = part_name(each.part)
            numbers = dict(scheduled)
            for option, field in fields.items():
                if given and option not in rule.fixed and given.get((name, field)) is not None:
                    numbers[option] = given[name, field]
            parts.append(with_numbers(each, fields, numbers) if numbers else each)
            names = [rule.names[i] for i in rule.places(each)]
            before.append({name: [wide(slots[n][label]) for n in names] for name, label in shown.items()})
        moved, after = run_parts(
            PURE, parts, [wide(grads[i]) for i in rule.indices], before, [wide(p) for p in own], info
        )
        for i, old, new in zip(rule.indices, own, moved, strict=True):
            params[i] = new.to(old.dtype)
        for each, shown, values in zip(rule.parts, rule.shown, after, strict=True):
            names = [rule.names[i] for i in rule.places(each)]
            for name, label in shown.items():
                for n, value in zip(names, values[name], strict=True):
                    slots[n][label] = value.to(slots[n][label].dtype)


def _name_of(rule: _Rule) -> str:
    return rule.rate.removeprefix("lr/")


def check_optimizer(optimizer: Optimizer) -> None:
    """Raise CapabilityError for an optimizer without a rule on lists of tensors."""
    problem = ""
    if getattr(optimizer.kernel, "parts", None) is None:
        problem = f"{optimizer.name} has no rule that is a function of tensors"
    elif optimizer.starts:
        problem = f"{optimizer.name} starts at update {optimizer.starts}, which the host has to know"
    if problem:
        raise CapabilityError(
            problem,
            where=_WHERE,
            fix="fa.sgd, fa.adam, fa.adamw, or fa.optim.chain of parts from update 0 on",
        )
