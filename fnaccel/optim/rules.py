"""What every optimizer from parts stands on: the parts of SGD and Adam, and how parts are run.

A part is a frozen record with a rule on lists of tensors (`Part`). It sees this rank's part of each
parameter, and calls operations that run in place or as a function (`operations.py`). So these few lines are
the update of `fa.optim.chain`, the oracle of torch's fused kernels, and the update on devices that have no
such kernel. Further parts are in `parts.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import attrs
import torch

from fnaccel import _torch
from fnaccel.errors import ArgumentError
from fnaccel.models.parameter import Leaf
from fnaccel.optim.operations import Operations, Tensors
from fnaccel.optim.selection import Select, choose, refuse_unmatched
from fnaccel.step.callables import plan_text
from fnaccel.step.loss import Scalar
from fnaccel.texts import unmatched

Slots = Mapping[str, Tensors]
"""The state of a part: for each name a tensor for each parameter."""


_NARROW = (torch.bfloat16, torch.float16)


class UpdateInfo(NamedTuple):
    """What a part knows of an update.

    Attributes:
        updates: the number of this update, from 1: a number, or a 0-d tensor if it is known on a device only.
        rate: its learning rate.
    """

    updates: Scalar
    rate: Scalar


class Part:
    """A part of an optimizer. Subclasses are frozen attrs records.

    Write by `ops` only: `ops.mul_(xs, y)` may write to `xs` and returns the result, `ops.mul(xs, y)` returns
    new tensors. Read no list after it was written to, and return what the operations returned.

    Attributes:
        is_optimizer_part: true.
        by_rows: whether the rule asks for rows. Complex parameters raise CapabilityError then.
        whole: whether the rule reads more of a tensor than its elements one by one, as Muon does. Then all
            methods get one parameter at a time, in lists of one, and under `fsdp` it is gathered for them.
            Such a part is not captured.
        traceable: whether the rule can be captured in a graph.
    """

    is_optimizer_part: ClassVar[bool] = True
    by_rows: ClassVar[bool] = False
    whole: ClassVar[bool] = False
    traceable: ClassVar[bool] = True

    def init(self, params: Tensors) -> Slots:
        """The first slots of these parameters, each shaped as its parameter. States show them by name."""
        return {}

    def update(
        self, ops: Operations, grads: Tensors, slots: Slots, params: Tensors, info: UpdateInfo
    ) -> tuple[Tensors, Slots]:
        """Change gradients. The move is minus the rate times the result of the last part.

        Args:
            ops: the operations. Their norms are those of whole tensors, on every layout.
            grads: this rank's part of each gradient, or what the part before returned. May be written to.
            slots: the state of this part. May be written to.
            params: this rank's part of each parameter. Not to be written to.
            info: the number of the update and the rate.

        Returns:
            The changed gradients and the next slots.
        """
        raise NotImplementedError

    def after(
        self, ops: Operations, params: Tensors, slots: Slots, info: UpdateInfo
    ) -> tuple[Tensors, Slots]:
        """Change parameters after the move. Both lists may be written to."""
        return params, slots

    def __repr__(self) -> str:
        names = [field.name for field in attrs.fields(type(self))] if attrs.has(type(self)) else []
        options = ", ".join(f"{name}={plan_text(getattr(self, name))}" for name in names)
        return f"{part_name(self)}({options})"


def free_name(name: str, taken: Container[str]) -> str:
    """The name under which a state shows a slot: a second one of this name gets `.1`."""
    shown, number = name, 0
    while shown in taken:
        number += 1
        shown = f"{name}.{number}"
    return shown


def part_name(part: Part) -> str:
    """The name of a part, `scale_by_adam` of `ScaleByAdam`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", type(part).__name__).lower()


@attrs.frozen(repr=False)
class AddDecayedWeights(Part):
    """Add `decay` times the parameters."""

    decay: float

    def update(
        self, ops: Operations, grads: Tensors, slots: Slots, params: Tensors, info: UpdateInfo
    ) -> tuple[Tensors, Slots]:
        return ops.add_(grads, params, self.decay), slots


@attrs.frozen(repr=False)
class ScaleByAdam(Part):
    """The first moment over the root of the second, both without their bias (Kingma and Ba 2015)."""

    betas: tuple[float, float]
    eps: float

    def init(self, params: Tensors) -> Slots:
        return {"exp_avg": zeros(params), "exp_avg_sq": zeros(params)}

    def update(
        self, ops: Operations, grads: Tensors, slots: Slots, params: Tensors, info: UpdateInfo
    ) -> tuple[Tensors, Slots]:
        beta1, beta2 = self.betas
        mean = ops.lerp_(slots["exp_avg"], grads, 1 - beta1)
        square = ops.addcmul_(ops.mul_(slots["exp_avg_sq"], beta2), grads, grads, 1 - beta2)
        root = ops.root_(ops.div(square, _unbiased(beta2, info.updates)))
        moved = ops.div(mean, _unbiased(beta1, info.updates))
        return ops.div_(moved, ops.add_(root, self.eps)), {"exp_avg": mean, "exp_avg_sq": square}


@attrs.frozen(repr=False)
class Trace(Part):
    """Momentum: a decayed sum of gradients."""

    decay: float
    nesterov: bool

    def init(self, params: Tensors) -> Slots:
        return {"momentum_buffer": zeros(params)}

    def update(
        self, ops: Operations, grads: Tensors, slots: Slots, params: Tensors, info: UpdateInfo
    ) -> tuple[Tensors, Slots]:
        buffer = ops.add_(ops.mul_(slots["momentum_buffer"], self.decay), grads)
        moved = ops.add_(grads, buffer, self.decay) if self.nesterov else ops.copy_(grads, buffer)
        return moved, {"momentum_buffer": buffer}


@attrs.frozen(repr=False)
class Masked(Part):
    """A part for some parameters. The others pass it unchanged, and have no slots of it."""

    part: Part
    mask: Select


def zeros(params: Tensors) -> list[torch.Tensor]:
    """Zeros laid out as these tensors."""
    return [torch.zeros_like(param) for param in params]


def _unbiased(beta: float, updates: Any) -> Any:
    """`1 - beta**updates`: as a difference it would lose half of fp32's digits when beta is near 1."""
    if isinstance(updates, torch.Tensor) or isinstance(beta, torch.Tensor):  # noqa: SIM101, RUF100
        log = beta.log() if isinstance(beta, torch.Tensor) else math.log(beta) if beta else -math.inf
        return -torch.expm1(updates * log)
    return -math.expm1(updates * math.log(beta)) if beta else 1.0


def sgd_parts(*, momentum: float, nesterov: bool, weight_decay: float) -> tuple[Part, ...]:
    """The parts of `fa.sgd`."""
    decay = (AddDecayedWeights(weight_decay),) if weight_decay else ()
    return (*decay, Trace(momentum, nesterov)) if momentum else decay


def adam_parts(*, betas: tuple[float, float], eps: float, weight_decay: float) -> tuple[Part, ...]:
    """The parts of `fa.adam`."""
    decay = (AddDecayedWeights(weight_decay),) if weight_decay else ()
    return (*decay, ScaleByAdam(betas, eps))


def adamw_parts(*, betas: tuple[float, float], eps: float, weight_decay: float) -> tuple[Part, ...]:
    """The parts of `fa.adamw`."""
    decay = (AddDecayedWeights(weight_decay),) if weight_decay else ()
    return (ScaleByAdam(betas, eps), *decay)


@attrs.frozen
class PlacedPart:
    """A part over the parameters of a model.

    Attributes:
        part: the part, without its masks.
        places: the indices of its parameters, or None if it takes all of them.
        after: whether it does something after the move.
    """

    part: Part
    places: tuple[int, ...] | None = None
    after: bool = False


def placed(part: Part, leaves: Sequence[Leaf] = ()) -> PlacedPart:
    """A part with the indices of the parameters that its masks select.

    Raises:
        ArgumentError: a mask selects no parameter. Names the nearest.
    """
    places, names = range(len(leaves)), [leaf.name for leaf in leaves]
    masked = isinstance(part, Masked)
    while isinstance(part, Masked):
        chosen = [choose([part.mask], leaf) for leaf in leaves]
        refuse_unmatched(
            [part.mask], chosen, (), names, f"the mask of {part_name(part.part)} in fa.optim.chain"
        )
        places = [i for i in places if chosen[i] == 0]
        part = part.part
    after = type(part).after is not Part.after
    return PlacedPart(part, tuple(places) if masked else None, after)


def run_parts(
    ops: Any,
    parts: Sequence[PlacedPart],
    grads: Sequence[torch.Tensor | None],
    slots: Sequence[Slots],
    params: Tensors,
    info: UpdateInfo,
) -> tuple[list[torch.Tensor], list[Slots]]:
    """One update by parts: the next parameters, and the next slots of each part.

    Args:
        ops: the operations. With `Fast` all lists but `grads` hold the results afterwards.
        parts: in the order in which they change gradients.
        grads: the gradients, None for a parameter without one, which stays as it is.
        slots: of each part, for its parameters.
        params: the parameters.
        info: the number of the update, and the rate.
    """
    present = [index for index, grad in enumerate(grads) if grad is not None]
    params, slots = list(params), list(slots)
    changed: list[Any] = list(grads)
    if not present:
        return params, slots
    everything = len(present) == len(grads)
    for number, each in enumerate(parts):
        places, own = _chosen(each, present, slots[number], everything)
        if places is None:
            changed, slots[number] = _run(each.part, ops, changed, own, params, info)
        elif places:
            some: Any = _picked(changed, places)
            some, own = _run(each.part, ops.of(places), some, own, _picked(params, places), info)
            changed = _with(changed, places, some)
            slots[number] = _slots_with(each, slots[number], own, places)
    if everything:
        params = list(ops.add_(params, changed, -info.rate))
    else:
        moved = ops.add_(_picked(params, present), _picked(changed, present), -info.rate)
        params = _with(params, present, moved)
    for number, each in enumerate(parts):
        if each.after:
            places, own = _chosen(each, present, slots[number], everything)
            if places is None:
                params, slots[number] = _run(each.part, ops, params, own, None, info)
            elif places:
                some, own = _run(each.part, ops.of(places), _picked(params, places), own, None, info)
                params = _with(params, places, some)
                slots[number] = _slots_with(each, slots[number], own, places)
    return list(params), slots


def first_slots(part: Part, ops: Any, values: Tensors) -> Slots:
    """The first slots of a part for this rank's parts of parameters.

    Raises:
        ArgumentError: they are no lists of tensors, shaped as the parameters.
    """
    if not part.whole:
        return _checked_slots(part, part.init(values), values)
    each: list[Slots] = []
    for place, value in enumerate(values):
        whole = [ops.gathered(place, value)]
        made = _checked_slots(part, part.init(whole), whole)
        each.append({name: [ops.part_at(place, slot)] for name, (slot,) in made.items()})
    names = dict.fromkeys(name for own in each for name in own)
    return _checked_slots(
        part, {name: [s for own in each for s in own.get(name, ())] for name in names}, values
    )


def _checked_slots(part: Part, own: Any, values: Tensors) -> Slots:
    """Slots that are lists of tensors, shaped as the parameters."""
    problem = "" if isinstance(own, Mapping) else f"made {type(own).__name__} in the place of a dict of lists"
    for name, slots in own.items() if isinstance(own, Mapping) else ():  # pyright: ignore[reportUnknownVariableType]
        shapes = [getattr(slot, "shape", None) for slot in slots]  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        if shapes != [value.shape for value in values]:
            problem = f"made a slot {name!r} that is no list with a tensor for each parameter, in its shape"
    if problem:
        raise ArgumentError(
            f"{part_name(part)} {problem}",
            where=f"{type(part).__name__}.init(params)",
            fix='{"last": [torch.zeros_like(param) for param in params]}',
        )
    return own


def _run(
    part: Part, ops: Any, values: Tensors, slots: Slots, params: Tensors | None, info: UpdateInfo
) -> tuple[list[Any], Slots]:
    """Run a part's `update` on gradients, or its `after` on parameters if `params` is None."""
    if not part.whole:
        return _checked(part, ops, values, slots, params, info)
    moved, after = list(values), {name: list(held) for name, held in slots.items()}
    for place, value in enumerate(values):
        own = {name: [ops.gathered(place, held[place])] for name, held in slots.items()}
        beside = None if params is None else [ops.gathered(place, params[place])]
        (new,), own = _checked(part, type(ops)(), [ops.gathered(place, value)], own, beside, info)
        moved[place] = ops.part_at(place, new)
        for name, (held,) in own.items():
            after[name][place] = ops.part_at(place, held)
    return moved, after


def _checked(
    part: Part, ops: Any, values: Tensors, slots: Slots, params: Tensors | None, info: UpdateInfo
) -> tuple[list[Any], Slots]:
    """The results of a part, on whole parameters if it asks for them.

    Raises:
        ArgumentError: it returned lists of other lengths or shapes, or other slots, or wrote to `params`.
    """
    before = None if torch.compiler.is_compiling() else [_torch.version_of(param) for param in params or ()]
    given = list(values)
    returned: Any = (
        part.after(ops, values, slots, info)
        if params is None
        else part.update(ops, values, slots, params, info)
    )
    what = "parameters" if params is None else "gradients"
    if not isinstance(returned, tuple) or len(returned) != 2:  # pyright: ignore[reportUnknownArgumentType]
        problem = f"returned {type(returned).__name__}"
    elif not isinstance(returned[1], Mapping):
        problem = f"returned {type(returned[1]).__name__} in the place of slots"
    elif returned[1].keys() != slots.keys():
        problem = "returned other slots than it was given: " + "; ".join(unmatched(slots, returned[1]))
    else:
        pairs = [(what, returned[0], given), *((name, returned[1][name], slots[name]) for name in slots)]
        problem = next(filter(None, (_unlike(*pair) for pair in pairs)), "")
        if before is not None and before != [_torch.version_of(param) for param in params or ()]:
            problem = "wrote to the parameters that it was given"
    if problem:
        raise ArgumentError(
            f"{part_name(part)} {problem}",
            where=f"{type(part).__name__}.{'after' if params is None else 'update'}",
            fix=f"return two values: a list of {what}, and the slots as init made them, with one tensor for "
            "each tensor given, shaped as it came",
        )
    return list(returned[0]), returned[1]


def _unlike(what: str, new: Any, given: Tensors) -> str:
    """How a list that a part returned differs from what it was given. "" if it does not."""
    if not isinstance(new, list | tuple):
        return f"returned {type(new).__name__} in the place of a list of {what}"
    if len(new) != len(given):
        return f"returned a list of {len(new)} tensors for {len(given)}: {what}"
    for value, old in zip(new, given, strict=True):
        if value is not old and getattr(value, "shape", None) != old.shape:
            shape = getattr(value, "shape", None)
            kind = type(value).__name__ if shape is None else f"a tensor of shape {[*shape]}"
            return f"returned {kind} for one of shape {[*old.shape]}: {what}"
    return ""


def _chosen(each: PlacedPart, present: list[int], slots: Slots, everything: bool) -> tuple[Any, Slots]:
    """The places of a part's parameters that have a gradient, None if these are all; their slots."""
    if everything:
        return each.places, slots
    if each.places is None:
        return present, {name: _picked(values, present) for name, values in slots.items()}
    rows = [row for row, place in enumerate(each.places) if place in present]
    return [each.places[row] for row in rows], {name: _picked(v, rows) for name, v in slots.items()}


def _slots_with(each: PlacedPart, slots: Slots, own: Slots, places: Sequence[int]) -> Slots:
    """All slots of a part, of which those at some places are new."""
    if each.places is None:
        rows = list(places)
    else:
        rows = [row for row, place in enumerate(each.places) if place in places]
    return {name: _with(values, rows, own[name]) for name, values in slots.items()}


def _picked(values: Sequence[Any], places: Sequence[int]) -> list[Any]:
    return [values[place] for place in places]


def _with(values: Sequence[Any], places: Sequence[int], new: Sequence[Any]) -> list[Any]:
    """A list with other values at some places."""
    changed = list(values)
    for place, value in zip(places, new, strict=True):
        changed[place] = value
    return changed


def write_update(
    ops: Any,
    parts: Sequence[PlacedPart],
    grads: Sequence[torch.Tensor | None],
    slots: Sequence[Slots],
    params: Tensors,
    info: UpdateInfo,
    skip: torch.Tensor | None = None,
    *,
    separate: bool = False,
) -> None:
    """One update by parts, written to the parameters and slots. 16-bit tensors are computed in fp32.

    Args:
        ops, parts, slots, params, info: as for `run_parts`.
        grads: the same, in fp32 at least.
        skip: 0-d tensor, 1 if nothing may change. None if the update is not left out.
        separate: whether `ops` may not write to the tensors themselves, since the update may be left out.
    """

    def begun(values: Tensors) -> list[torch.Tensor]:
        pairs = [(value, wide(value)) for value in values]
        return [w.clone() if separate and w is value else w for value, w in pairs]

    first, before = params, slots
    if separate or any(param.dtype in _NARROW for param in params):
        first = begun(params)
        before = [{name: begun(values) for name, values in own.items()} for own in slots]
    moved, after = run_parts(ops, parts, grads, before, first, info)
    numbers: list[tuple[torch.Tensor, torch.Tensor]] = []
    _put(params, moved, skip, numbers)
    for own, new in zip(slots, after, strict=True):
        for name, values in own.items():
            _put(values, new[name], skip, numbers)
    if numbers:
        # torch 2.13 takes a 0-d float64 input of a graph for a number, and drops what is copied to it. By one
        # operation, since inductor computed a value that reads a number after it was written to
        targets, written = zip(*numbers, strict=True)
        torch.ops.fnaccel.put_(list(targets), list(written))


def _put(
    targets: Tensors,
    values: Tensors,
    skip: torch.Tensor | None,
    numbers: list[tuple[torch.Tensor, torch.Tensor]],
) -> None:
    """Write values to targets. In a graph those without dimensions are added to `numbers`."""
    if values is targets:
        return
    for target, value in zip(targets, values, strict=True):
        if value is not target:
            # not a product: a skipped value may be NaN
            value = value if skip is None else torch.where(skip > 0, wide(target), value)
            if target.ndim == 0 and torch.compiler.is_compiling():
                numbers.append((target, value))
            else:
                target.copy_(value)


def wide(value: torch.Tensor) -> torch.Tensor:
    """In fp32 at least, as torch's fused kernels compute."""
    return value.float() if value.dtype in _NARROW else value
