"""Optimizers over an engine's leaves: slots, schedules, and the update of one step."""

from __future__ import annotations

import functools
import operator
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import attrs
import torch

from fnaccel import _torch, tree
from fnaccel.engine.gradients import Gradients
from fnaccel.errors import ArgumentError, CapabilityError
from fnaccel.models.parameter import Leaf
from fnaccel.optim import kernels
from fnaccel.optim.description import Bound, Group, Optimizer, group_leaves, takes_tensors
from fnaccel.optim.several import OptimizerGroups, assign, optimizers_of
from fnaccel.step.loss import Scalar
from fnaccel.texts import first_of
from fnaccel.world.mesh import MeshAxis

_exists = functools.partial(operator.is_not, None)
Optimizers = dict[str | None, Optimizer | OptimizerGroups]


def by_model(optimizer: object, keys: Sequence[str | None]) -> Optimizers:
    """The optimizers of the models that are trained: from a dict with keys of models, or one for all.

    Raises:
        ArgumentError: not an optimizer, the key of no model, or no optimizer at all.
    """
    named: dict[str | None, Any] = (
        dict(optimizer) if isinstance(optimizer, dict) else dict.fromkeys(keys, optimizer)
    )
    if not set(named) <= set(keys) or not any(named.values()):
        alone = list(keys) == [None]
        models = "there is one model, without a key" if alone else f"the models {sorted(map(str, keys))}"
        raise ArgumentError(
            f"optimizers are keyed {sorted(map(str, named))}, and {models}"
            if any(named.values())
            else "no model has an optimizer",
            where="fa.train_step(optimizer=...)",
            fix="give one optimizer, not a dict; groups= sets options by parameter name"
            if alone
            else "give one optimizer for each model that is trained, under the same key; or optimizer=None, "
            "if all are only looked at or lent",
        )
    named = {key: described for key, described in named.items() if described is not None}
    for key, description in named.items():
        if not isinstance(description, Optimizer | OptimizerGroups):
            kind = (
                f"a {type(description).__name__}"
                if not isinstance(description, type)
                else f"the class {description.__name__}"
            )
            raise ArgumentError(
                f"the optimizer{'' if key is None else f' of {key!r}'} is {kind}, not a description",
                where="fa.train_step(optimizer=...)",
                fix="fa.adamw(lr=3e-4), or fa.optim.from_torch(torch.optim.RMSprop, lr=1e-3): "
                "it is made after the parameters are sharded",
            )
    return named


def check_own(optimizers: Optimizers) -> None:
    """Raise CapabilityError if an optimizer or a schedule belongs to a runtime of another strategy."""
    for optimizer in (one for described in optimizers.values() for one in optimizers_of(described)):
        for part in (optimizer.kernel, optimizer.lr):
            runtime = getattr(part, "runtime", None)
            if runtime is not None:
                raise CapabilityError(
                    f"fa.{optimizer.name} is named by {runtime}'s configuration, and the strategy is another",
                    where="fa.train_step(optimizer=)",
                    fix=f"fa.distribute(model, fa.{runtime}(config=...)), or fa.adamw(lr=...)",
                )


def traceable(optimizers: Optimizers) -> bool:
    """Whether updates can be part of a compiled graph."""
    return all(optimizer.traceable for optimizer in optimizers.values())


@attrs.define
class _Part:
    """One optimizer, the name of its rate in the metrics, its leaves, name and schedule of each group.

    `groups` are empty if no number besides rates has a schedule.
    """

    rate: str
    bound: Bound
    indices: tuple[int, ...]
    base: Callable[[Any], Any]
    own: tuple[tuple[str, Callable[[Any], Any] | None], ...]
    whole: bool
    starts: int
    groups: Sequence[Group]
    not_started: bool = False


class Updater:
    """Applies all optimizers of a train step to its leaves."""

    def __init__(
        self,
        leaves: Sequence[Leaf],
        optimizers: Optimizers,
        device: torch.device,
        *,
        on_device: bool,
        bound: Bound | None = None,
        over: MeshAxis | None = None,
        ema_decay: Any = None,
    ) -> None:
        self._over, self._leaves = over, leaves
        self._ema_decay = ema_decay if callable(ema_decay) else None
        self.slots: dict[str, dict[str, Any]] = {}
        self._parts: list[_Part] = []
        self.switching: list[tuple[int, Any]] = []  # when they start, those with `train()` and `eval()`
        self._on_device = on_device
        self._runtime_optimizer = bound
        self._keys = list(optimizers)
        if bound is not None:  # one optimizer over all models
            optimizers = {None: next(iter(optimizers.values()))}
        for key, described in optimizers.items():
            of_model = [i for i, leaf in enumerate(leaves) if key is None or leaf.name.startswith(f"{key}/")]
            for each in assign(described, [leaves[i] for i in of_model]):
                indices = [of_model[i] for i in each.indices]
                self._add("/".join(filter(None, ("lr", key, each.label))), each.optimizer, leaves, indices)
        self._counted = {} if bound is not None else _counted(leaves, self.slots)
        self._absent: set[int] | None = None  # those without a gradient in the last update
        where = leaves[0].shard.device if leaves else device
        self._count = torch.zeros((), dtype=torch.float32, device=where)

    def _add(self, rate: str, optimizer: Optimizer, leaves: Sequence[Leaf], indices: list[int]) -> None:
        """Bind an optimizer to its parameters."""
        members = [leaves[i] for i in indices]
        groups = group_leaves(optimizer, members, self._over) if members else []
        binding = self._runtime_optimizer or optimizer.kernel.bind(groups)
        if not (hasattr(binding, "slots") and callable(getattr(binding, "apply", None))):
            raise ArgumentError(
                f"the kernel of {optimizer.name!r} bound {type(binding).__name__}, without slots and apply",
                where=f"{type(optimizer.kernel).__name__}.bind(groups)",
                fix="return an object with slots, reads_host and apply(...): docs/extending.md",
            )
        _check_slots(binding.slots, members, optimizer)
        self.slots.update(binding.slots)
        switched = getattr(binding, "switched", None)
        if switched is not None:
            self.switching.append((optimizer.starts, switched))
        own = tuple((f"{rate}/{group.name}", group.lr) for group in groups)
        whole = len(indices) == len(leaves)
        scheduled = groups if any(group.scheduled for group in groups) else ()
        self._parts.append(
            _Part(rate, binding, tuple(indices), optimizer.lr, own, whole, optimizer.starts, scheduled)
        )

    def of_runtime(self, reported: dict[str, Any]) -> dict[str, Any]:
        """The rates as metrics, after an update by a runtime, which may have schedules of its own."""
        reported = {**reported, **getattr(self._runtime_optimizer, "metrics", {})}
        if self._keys != [None]:
            lr = reported.pop("lr")
            reported.update({f"lr/{key}": lr for key in self._keys})
        return reported

    def number(self, updates: Any) -> torch.Tensor:
        """The number of the next update, from 1: a 0-d tensor."""
        if self._on_device:
            return updates + 1.0
        if self._count.device.type == "xla":
            return kernels.as_input(updates + 1.0, self._count.device)
        return self._count.fill_(updates + 1)

    def rates(self, updates: Scalar) -> tuple[dict[str, Any], list[list[Any]]]:
        """The rates as metrics, and those of each optimizer's groups. Notes which optimizers start later."""
        reported: dict[str, Any] = {}
        rates: list[list[Any]] = []
        for part in self._parts:
            # below 0 until it starts. Of a part that starts at once nothing is read on the host
            since = int(updates) - part.starts if part.starts else updates
            part.not_started = waits = bool(part.starts and since < 0)
            base = 0.0 if waits else self.scheduled(part.base, since)
            reported[part.rate] = base
            rates.append(
                [base if waits or own is None else self.scheduled(own, since) for _, own in part.own]
            )
            for (name, own), rate in zip(part.own, rates[-1], strict=True):
                if own is not None:
                    reported[name] = rate
            for place, group in enumerate(part.groups):
                value_of = functools.partial(self.scheduled, updates=0 if waits else since)
                numbers, shown = group.numbers(value_of, part.rate)
                reported.update(shown)
                rates[-1][place] = {"lr": rates[-1][place], **numbers} if numbers else rates[-1][place]
        if self._ema_decay is not None:  # last, as the numbers of a part
            decay = self.scheduled(self._ema_decay, updates)
            rates.append([kernels.on_device(decay, self._count.device)])
            reported.update(self.ema_decay(rates))
        return reported, rates

    def ema_decay(self, rates: Any) -> dict[str, Any]:
        """The decay of averages among the numbers of an update, as a metric, if a schedule gives it."""
        return {} if self._ema_decay is None else {"ema_decay": rates[-1][0]}

    def as_tensors(self, rates: Any) -> Any:
        """Rates and other numbers that a compiled graph takes: a number would be compiled in."""
        make = functools.partial(torch.full, (), device=self._count.device)
        return [
            [
                tree.map(
                    lambda number: number if isinstance(number, torch.Tensor) else make(float(number)), rate
                )
                if isinstance(rate, dict)
                else (rate if isinstance(rate, torch.Tensor) else make(float(rate)))
                for rate in each
            ]
            for each in rates
        ]

    def drop_waiting(self, grads: list[Any], updates: Scalar, *, warns: bool) -> None:
        """Drop the gradients of optimizers that start later, so that no norm counts them. After `rates`.

        Warns once of parameters that get a gradient in some updates only, if a bias correction counts all. In
        the first update of a process second moments show which parameters had one before.

        Args:
            grads: by leaf, None if it got none. Changed in place.
            updates: updates applied before this one.
            warns: whether this rank warns.
        """
        for part in self._parts:
            if part.not_started:
                for index in part.indices:
                    grads[index] = None
        if not (warns and self._counted):
            return
        before = self._absent
        self._absent = absent = set() if all(map(_exists, grads)) else self._without_gradient(grads)
        if before is None:
            before = self._never_updated() if updates else absent
        if before != absent:
            names = [self._counted[index] for index in sorted(before ^ absent)]
            self._counted = {}
            warnings.warn(
                f"{first_of(names)} get a gradient in some updates only. The bias correction of fa.adam, "
                "fa.adamw and their like counts all updates of the run, that of torch.optim those of each "
                "parameter. fa.optim.from_torch(torch.optim.AdamW, lr=...) counts as torch does",
                UserWarning,
                stacklevel=2,
            )

    def pass_over(self) -> None:
        """Note an update that counts without a gradient, since this replica had no rows."""
        self._absent = set() if self._absent is None else self._absent

    def refuse_late(self, kept: Collection[str], updates: int, where: str) -> None:
        """Raise ArgumentError if first slots would go on at a later update, and their rule reads its number.

        Args:
            kept: the names of the parameters whose slots stay at their first values.
            updates: the number of updates so far.
            where: the function that restores, for the message.
        """
        pairs = [(index, part) for part in self._parts for index in part.indices]
        names = [
            name
            for index, part in pairs
            if (name := self._leaves[index].name) in kept
            and part.starts < updates
            and (index in self._counted or _copies(self.slots.get(name, {}), self._leaves[index]))
        ]
        if names:
            raise ArgumentError(
                f"the slots of {first_of(names)} begin now, and {updates} updates would count for them: the "
                "first updates of Adam would be too large",
                where=where,
                fix=f"fa.optim.starting_at({updates}, fa.adamw(3e-4)) counts from here: for them, in "
                'fa.optim.optimizer_groups. Or skip all of "opt" and "updates"',
            )

    def switched(self, updates: Scalar) -> list[Any]:
        """The optimizers that evaluate at other parameters than they train, after so many updates.

        Before its first update an optimizer evaluates where it trains.
        """
        return [each for starts, each in self.switching if int(updates) > starts]

    def _without_gradient(self, grads: Sequence[Any]) -> set[int]:
        waiting = {index for part in self._parts if part.not_started for index in part.indices}
        return {index for index in self._counted if grads[index] is None and index not in waiting}

    def _never_updated(self) -> set[int]:
        later = {index for part in self._parts if part.starts for index in part.indices}
        slots = {index: self.slots[name] for index, name in self._counted.items() if index not in later}
        return {index for index, own in slots.items() if not any(_moved(own[key]) for key in own)}

    def update(self, grads: Gradients, rates: Sequence[Sequence[Any]], number: torch.Tensor) -> None:
        """Update the parameters in place.

        Args:
            grads: the gradient of this step. The kernels apply its multiplier and skip.
            rates: the rates of each optimizer's groups.
            number: of this update, as `number` makes it.
        """
        for part, each in zip(self._parts, rates[: len(self._parts)], strict=True):
            if part.not_started:
                continue
            shards = grads.shards if part.whole else [grads.shards[i] for i in part.indices]
            # an optimizer that reads on the host would wait for the device in each step
            skip = grads.skip if part.bound.reads_host else grads.skipped()
            skipped = part.bound.apply(
                shards, each, grads.multiplier, skip, number - part.starts if part.starts else number
            )
            if skipped is not None:
                grads.skip = torch.tensor(skipped, device=number.device)

    def scheduled(self, schedule: Callable[[Any], Any], updates: Scalar) -> Any:
        """The value of a schedule. One of a user is read on the host, unless it takes tensors."""
        if self._on_device and not takes_tensors(schedule):
            return schedule(int(updates))
        return schedule(updates)


def _counted(leaves: Sequence[Leaf], slots: Mapping[str, Mapping[str, Any]]) -> dict[int, str]:
    """The names, by index, of leaves with a second moment and no count of their own."""
    names = [" ".join(slots.get(leaf.name, {})) for leaf in leaves]
    return {
        index: leaf.name
        for index, leaf in enumerate(leaves)
        if "exp_avg_sq" in names[index] and "step" not in names[index]
    }


def _copies(slots: Mapping[str, Any], leaf: Leaf) -> bool:
    """Whether a slot begins as a copy of its parameter, which the first update makes."""
    local = [_torch.local_of(slot) for slot in slots.values() if isinstance(slot, torch.Tensor)]
    alike = [slot for slot in local if slot.shape == leaf.shard.shape and _moved(slot)]
    return any(not _moved(slot, leaf.shard) for slot in alike)


def _moved(slot: torch.Tensor, start: torch.Tensor | int = 0) -> bool:
    """Whether a slot holds anything but its start. So says one of a rank that holds no part."""
    local = _torch.local_of(slot)
    return not local.numel() or bool((local != start).sum())  # float8 and torch-xla have both kernels


def _check_slots(
    slots: Mapping[str, Mapping[str, Any]], leaves: Sequence[Leaf], optimizer: Optimizer
) -> None:
    """Raise ArgumentError if a checkpoint would lack a slot: it is of no parameter, or of one rank only."""
    unknown = sorted(set(slots) - {leaf.name for leaf in leaves})
    if unknown and leaves:
        raise ArgumentError(
            f"the kernel of {optimizer.name!r} keeps slots for {unknown[0]!r}, which is no parameter",
            where=f"{type(optimizer.kernel).__name__}.bind(groups).slots",
            fix=f"name slots after the leaves that it was given, such as {leaves[0].name!r}",
        )
    for leaf in [leaf for leaf in leaves if leaf.sharded and optimizer.elementwise]:
        for name, value in slots.get(leaf.name, {}).items():
            if isinstance(value, torch.Tensor) and not hasattr(value, "placements") and value.numel() > 1:
                raise ArgumentError(
                    f"the slot {name!r} of {leaf.name} is a plain tensor, and each rank holds a part of "
                    f"{leaf.name}: a checkpoint would keep the part of one rank",
                    where=f"{type(optimizer.kernel).__name__}.bind(groups).slots",
                    fix="show the part as the parameter is shown: leaf.like(part)",
                )
