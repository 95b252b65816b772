"""`from_torch`: any torch.optim optimizer as a description, its state made before step 0."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections import defaultdict
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import attrs
import torch

from fnaccel import _torch, tree
from fnaccel.errors import ArgumentError, CapabilityError, nearest, require
from fnaccel.models.parameter import Leaf
from fnaccel.optim.description import Group, Optimizer, options_of
from fnaccel.optim.schedules import Rate
from fnaccel.optim.selection import Groups, pairs_of
from fnaccel.step.loss import Scalar
from fnaccel.texts import error_line
from fnaccel.tree import Tree

if TYPE_CHECKING:
    from fnaccel.optim.whole import BoundWhole

# their updates are no sums over elements: they orthogonalise matrices, or factor them
_WHOLE = (torch.optim.Muon, torch.optim.Adafactor)


class _Recorder(dict[str, Any]):
    """Optimizer state that keeps a copy of the first value of each slot."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[str, Any] = {}

    def __setitem__(self, slot: str, value: Tree) -> None:
        if slot not in self.first:
            self.first[slot] = value.detach().clone() if isinstance(value, torch.Tensor) else value
        super().__setitem__(slot, value)


@attrs.frozen
class TorchKernel:
    """A class of torch optimizers. `whole`: its update needs whole parameters, not shards."""

    cls: Any
    whole: bool = False

    @property
    def schedulable(self) -> list[str]:
        """The options that may be schedules: those whose default is a number, or a tuple of numbers."""
        parameters = inspect.signature(self.cls).parameters.values()
        return [p.name for p in parameters if p.name != "lr" and type(p.default) in (int, float, tuple)]

    def bind(self, groups: Sequence[Group]) -> BoundTorch | BoundWhole:
        """Make the optimizer over the real parameters, with state found on clones."""
        if not (self.whole and _sharded(groups)):
            return BoundTorch(self.cls, groups)
        from fnaccel.optim.whole import BoundWhole  # noqa: PLC0415 - DTensor is slow to import

        slots = first_slots(self.cls, groups, whole=True)
        kept = [name for group in groups for name in kept_numbers(self.cls, group)]
        if kept or _switches(self.cls):
            raise CapabilityError(
                f"{named(self.cls)} keeps {[*kept, 'train_mode'][0]!r} for all parameters of a group, and "
                "whole parameters are updated one parameter at a time",
                where="fa.optim.from_torch",
                fix="fa.ddp(), or whole=False if the update of an element depends on that element alone",
            )
        # the optimizer keeps its options: the parameters come later, one at a time
        stand_ins = {m.index: _zeros(m.leaf.shown, whole=True) for g in groups for m in g.members}
        copied = {index: names for group in groups for index, names in copied_slots(self.cls, group).items()}
        return BoundWhole(_make(self.cls, groups, stand_ins), groups, slots, copied)


class BoundTorch:
    """A torch optimizer over real parameters (DTensors if they are sharded).

    `switched` is the optimizer if it has `train()` and `eval()`: it evaluates at other parameters.
    """

    reads_host = True

    def __init__(self, cls: type[Any], groups: Sequence[Group]) -> None:
        self._leaves = {m.index: m.leaf for group in groups for m in group.members}
        self._numbers: list[_Number] = []
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []  # slots that begin at a parameter's value
        self.slots: dict[str, dict[str, Any]] = {}
        initial = first_slots(cls, groups)
        self._optimizer = _make(cls, groups, {m.index: m.leaf.param for g in groups for m in g.members})
        self.switched = self._optimizer if _switches(cls) else None
        for group, options in zip(groups, self._optimizer.param_groups, strict=True):
            copied = copied_slots(cls, group)
            for member in group.members:
                state = initial[member.index]
                self._copies += [(state[slot], member.leaf.param) for slot in copied[member.index]]
                if state:
                    self._optimizer.state[member.leaf.param] = state
                self.slots[member.leaf.name] = _shown(state, member.leaf)
            for name, (kind, first) in kept_numbers(cls, group).items():
                slots = [torch.tensor(first, dtype=torch.float64) for _ in group.members]
                self._numbers.append(_Number(options, name, kind, slots))
                for member, slot in zip(group.members, slots, strict=True):
                    self.slots[member.leaf.name][f"group.{name}"] = slot
        self._copy_parameters()

    @torch.no_grad()
    def _copy_parameters(self) -> None:
        for slot, parameter in self._copies:
            slot.copy_(parameter)

    def apply(
        self,
        grads: Sequence[torch.Tensor | None],
        rates: Sequence[Any],
        multiplier: Scalar | None,
        skip: torch.Tensor | None,
        updates: torch.Tensor,
    ) -> None:
        """One update in place: see `Bound.apply`. `skip` and copied slots cost one host read each."""
        if skip is not None and bool(skip):
            return
        if self._copies and int(updates) == 1:  # weights may have been adopted or restored since `bind`
            self._copy_parameters()
        for index, leaf in self._leaves.items():
            grad = grads[index]
            if grad is not None and _torch.local_of(leaf.param.grad) is not grad:
                leaf.param.grad = leaf.own(grad)  # a transform put another in its place
        present = [g for g in grads if g is not None]
        if multiplier is not None and present:
            _torch.foreach_mul_(present, multiplier)
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            group.update(tree.map(float, rate) if isinstance(rate, dict) else {"lr": float(rate)})
        for number in self._numbers:
            number.put()
        self._optimizer.step()
        for number in self._numbers:
            for slot in number.slots:
                slot.fill_(number.options[number.name])


@attrs.frozen
class _Number:
    """A number that an optimizer keeps in `options` of a group, and its slot of each parameter there."""

    options: dict[str, Any]
    name: str
    kind: type
    slots: list[torch.Tensor]

    def put(self) -> None:
        """Give the group the value of the state. NaN is a number that the first update makes.

        Raises:
            ArgumentError: parameters of the group have different values.
        """
        values = sorted({repr(float(slot)) for slot in self.slots})
        require(
            len(values) == 1,
            f"parameters of one group have different {self.name!r}: {', '.join(values)}",
            "fa.optim.from_torch",
            "parameters that were not restored need an optimizer by themselves: fa.optim.optimizer_groups",
        )
        self.options.pop(self.name, None)
        if values != ["nan"]:
            self.options[self.name] = self.kind(float(values[0]))


def _shown(state: dict[str, Any], leaf: Leaf) -> dict[str, Any]:
    """The slots of a parameter as states show them: the same dict, unless the parameter is shown otherwise.

    Raises:
        CapabilityError: a slot is no tensor, so that what is shown would not follow it.
    """
    if not leaf.shown_otherwise:
        return state
    odd = [name for name, value in state.items() if not isinstance(value, torch.Tensor)]
    if odd:
        raise CapabilityError(
            f"the slot {odd[0]!r} is no tensor, and shards beside other axes show tensors only",
            where="fa.optim.from_torch",
            fix="fa.fsdp() alone, or an optimizer whose slots are tensors",
        )
    return {
        name: leaf.like(_torch.local_of(value)) if value.shape == leaf.param.shape else value
        for name, value in state.items()
    }


def _make(cls: type[Any], groups: Sequence[Group], params: dict[int, Any]) -> Any:
    """The optimizer over `params`. The first rate matters to state that is made from it (ASGD, Rprop)."""
    optimizer = cls(
        [{"params": [params[m.index] for m in g.members], "lr": g.first_rate, **g.options} for g in groups],
        **shared_options(cls, groups),
    )
    if _switches(cls):
        optimizer.train()
    return optimizer


def shared_options(cls: type[Any], groups: Sequence[Group]) -> dict[str, Any]:
    """The options on which all groups agree: some matter to the constructor alone (Adagrad's first sum)."""
    first, *later = groups
    taken = _arguments(cls)
    return {
        name: value
        for name, value in first.options.items()
        if (taken is None or name in taken)  # a group may have marks that only the update reads
        and all(name in other.options and other.options[name] == value for other in later)
    }


def _arguments(cls: type[Any]) -> set[str] | None:
    """The names of a constructor's arguments. None if it takes any name."""
    parameters = inspect.signature(cls).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return None if takes_any else set(parameters)


def first_slots(cls: type[Any], groups: Sequence[Group], *, whole: bool = False) -> dict[int, dict[str, Any]]:
    """The state that an optimizer class makes for each parameter, found on clones of them.

    Args:
        cls: the class.
        groups: the parameters.
        whole: whether the clones are whole where the parameters are sharded.

    Raises:
        CapabilityError: it can't update these parameters.
    """
    slots: dict[int, dict[str, Any]] = {}
    with _explained(cls, groups):
        for group in groups:  # each by itself: its options may matter to the constructor alone
            slots.update(_first_slots(cls, group, whole=whole))
    return slots


@contextlib.contextmanager
def _explained(cls: type[Any], groups: Sequence[Group]) -> Generator[None]:
    """Errors of an optimizer class that is tried on clones, as CapabilityError."""
    try:
        yield
    except (TypeError, NotImplementedError, RuntimeError, ValueError) as error:
        if issubclass(cls, torch.optim.SparseAdam):
            raise CapabilityError(
                "torch.optim.SparseAdam takes sparse gradients only, and a train step tries each optimizer "
                "with dense ones",
                where="fa.optim.from_torch",
                fix="nn.Embedding(..., sparse=False) and fa.adam(lr), whose moments decay in each update",
            ) from error
        raise CapabilityError(
            f"{named(cls)} can't update these parameters: {error_line(error)}",
            where="fa.optim.from_torch",
            fix="give them to another one: fa.optim.optimizer_groups([(selection, fa.optim.from_torch(...)), "
            '("*", fa.adamw(3e-4))])'
            + ("; or whole=True: each parameter is gathered" if _sharded(groups) else ""),
        ) from error


def named(cls: type) -> str:
    """A class as a user imports it: `torch.optim.Adagrad`, `package.module.Name`."""
    if cls.__module__.startswith("torch.optim."):
        return f"torch.optim.{cls.__name__}"
    return f"{cls.__module__}.{cls.__qualname__}"


def _sharded(groups: Sequence[Group]) -> bool:
    return any(member.leaf.sharded for group in groups for member in group.members)


def _switches(cls: type[Any]) -> bool:
    """Whether a class has `train()` and `eval()`, which move the parameters, as schedule-free ones have."""
    return callable(getattr(cls, "train", None)) and callable(getattr(cls, "eval", None))


def _needs_closure(cls: type[Any]) -> bool:
    """Whether `step` has to be given the loss as a function."""
    closure = inspect.signature(cls.step).parameters.get("closure")
    return issubclass(cls, torch.optim.LBFGS) or (closure is not None and closure.default is closure.empty)


def _zeros(param: Any, *, whole: bool) -> torch.nn.Parameter:
    """A clone without values: weight decay would make of a value a gradient, and of that a slot."""
    zeros = (
        torch.zeros(param.shape, dtype=param.dtype, device=param.device) if whole else torch.zeros_like(param)
    )
    return torch.nn.Parameter(zeros)


def _first_slots(cls: type[Any], group: Group, *, whole: bool) -> dict[int, dict[str, Any]]:
    clones: dict[int, torch.nn.Parameter] = {}
    for member in group.members:
        clone = _zeros(member.leaf.shown if whole else member.leaf.param, whole=whole)
        clone.grad = torch.zeros_like(clone)
        clones[member.index] = clone
    return _slots_of(cls, group, clones, {})


def _slots_of(
    cls: type[Any], group: Group, params: dict[int, torch.nn.Parameter], changes: dict[str, Any]
) -> dict[int, dict[str, Any]]:
    """The first value of each slot after one step on `params`, with some options of the group changed."""
    probe = _make(cls, [group], params)
    for options in probe.param_groups:
        options.update({name: value for name, value in changes.items() if name in options})
    first_state = probe.state  # Adagrad makes its state as it is constructed
    probe.state = defaultdict(_Recorder)
    for param, slots in first_state.items():
        for slot, value in slots.items():
            probe.state[param][slot] = value
    probe.step()
    return {index: dict(probe.state[param].first) for index, param in params.items()}


_PROBED = -0.5
"""A value that no slot begins with by itself, that every floating-point dtype holds, and that is no size."""


def copied_slots(cls: type[Any], group: Group) -> dict[int, list[str]]:
    """For each parameter, the slots that begin as a copy of it, as z of a schedule-free optimizer does.

    Found on tensors of at most 2 elements in each dimension. Without weight decay and gradient nothing but a
    copy has the value of the parameter.
    """
    probes = {member.index: _small(member.leaf, 0.0) for member in group.members}
    with _explained(cls, [group]):
        slots = _slots_of(cls, group, probes, {"weight_decay": 0.0})
    return {
        index: [name for name, value in slots[index].items() if _is_copy(value, probe)]
        for index, probe in probes.items()
    }


def kept_numbers(cls: type[Any], group: Group) -> dict[str, tuple[type, float]]:
    """The kind and first value of each number that an optimizer keeps in its group, by name.

    These are the numbers that one update on small tensors changes, and those that no constructor takes. NaN
    is the first value of a number that is not there before an update.

    Raises:
        CapabilityError: the update changes something else in the group, which no state holds.
    """
    probes = {m.index: _small(m.leaf, 1.0) for m in group.members}
    with _explained(cls, [group]):
        probe = _make(cls, [group], probes)
        (options,) = probe.param_groups
        before = {name: value for name, value in options.items() if name != "params"}
        texts = {name: str(value) for name, value in before.items()}
        probe.step()
    # a class may set options of the class that it extends
    taken = {name for base in cls.__mro__ for name in inspect.signature(base.__init__).parameters}
    given = options if _arguments(cls) is None else {*taken, *group.options}
    numbers: dict[str, tuple[type, float]] = {}
    for name in options.keys() - {"params"}:
        value, changed = options[name], texts.get(name) != str(options[name])
        number = type(value) in (int, float)
        if changed and (name == "lr" or not number):
            keeps = f"keeps {name!r} in its groups, a {type(value).__name__}, and states hold numbers"
            raise CapabilityError(
                f"{named(cls)} {'changes its rate in an update' if name == 'lr' else keeps}",
                where="fa.optim.from_torch",
                fix="keep a number there, or tensors in optimizer.state[parameter]. A schedule is lr=",
            )
        if number and (changed or name not in given):
            numbers[name] = type(value), float(before.get(name, math.nan))
    return dict(sorted(numbers.items()))


def _small(leaf: Leaf, grad: float) -> torch.nn.Parameter:
    """A tensor of at most 2 elements in each dimension, with a gradient."""
    param, sizes = leaf.param, [min(size, 2) for size in leaf.shown.shape]
    small = torch.nn.Parameter(torch.full(sizes, _PROBED, dtype=param.dtype, device=param.device))
    small.grad = torch.full_like(small, grad)
    return small


def _is_copy(value: object, probe: torch.Tensor) -> bool:
    if not isinstance(value, torch.Tensor) or value.shape != probe.shape or not probe.numel():
        return False
    return bool(torch.all(value == _PROBED))


def _default_rate(cls: type[Any]) -> float:
    """The learning rate that a class takes if none is given."""
    parameter = inspect.signature(cls).parameters.get("lr")
    default = None if parameter is None else parameter.default
    require(
        isinstance(default, float | int),
        f"{cls.__name__} has no default learning rate",
        "fa.optim.from_torch",
        f"fa.optim.from_torch({cls.__name__}, lr=1e-3)",
    )
    return float(default)  # pyright: ignore[reportArgumentType] - checked above


def from_torch(
    cls: type[torch.optim.Optimizer],
    *,
    lr: Rate | None = None,
    groups: Groups = None,
    whole: bool | None = None,
    **options: Any,
) -> Optimizer:
    """Any optimizer of `torch.optim` (or one that follows its rules).

    Its state is found on clones of the parameters before step 0, so that consecutive states have
    one structure. Numbers that it keeps in its `param_groups` are slots `group.<name>` of each parameter.
    Under `skip_nonfinite` or fp16 each step reads one number on the host. If a slot begins as a copy of its
    parameter, it has the parameter's value at the first update, even if weights were adopted.

    A class with `train()` and `eval()`, such as schedule-free ones, evaluates at other parameters: so do
    `fa.evaluate`, `train_step.look` and `fa.interchange.export_hf` of a live state. All else has the
    parameters that are trained: states, checkpoints and their export, averages, lent models.

    Args:
        cls: the optimizer class, not an instance: it is made after the parameters are sharded.
        lr: a number, or a schedule `updates -> rate`. None: the default of the class.
        groups: `{selection: options}`, as for `fa.sgd`.
        whole: whether an update needs the whole parameter, so that under `fsdp` each is gathered for it, one
            at a time. None: for `torch.optim.Muon` and `torch.optim.Adafactor`.
        options: further arguments of the class. A number that `step` reads may be a schedule.

    Raises:
        ArgumentError: not an optimizer class, an option that it does not take, or a schedule of a flag.
        CapabilityError: at `init`, if it can't run on these parameters, or changes something in its groups
            that is no number.

    Example:
        >>> fa.optim.from_torch(torch.optim.RMSprop, lr=1e-3, alpha=0.9)
    """
    require(
        isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer),
        f"{cls!r} is not an optimizer class",
        "fa.optim.from_torch",
        "pass the class: fa.optim.from_torch(torch.optim.RMSprop, lr=1e-3)",
    )
    pairs = pairs_of(groups)
    require(
        not _needs_closure(cls),
        f"{cls.__name__} evaluates the loss several times in a step",
        "fa.optim.from_torch",
        "choose an optimizer that needs one gradient for an update",
    )
    require(
        not any(settings.get("dampening") for settings in (options, *(extra for _, extra in pairs))),
        "dampening treats the first update apart, which a state made before step 0 can't tell",
        "fa.optim.from_torch",
        "leave dampening at 0",
    )
    taken = _arguments(cls)
    for name in options:
        if taken is not None and name not in taken:
            raise ArgumentError(
                f"{cls.__name__} takes no {name!r}", where="fa.optim.from_torch", fix=nearest(name, taken)
            )
    defaults = {**{name: None for _, extra in pairs for name in extra if name != "lr"}, **options}
    kernel = TorchKernel(cls, issubclass(cls, _WHOLE) if whole is None else whole)
    flags = {name for name, p in inspect.signature(cls).parameters.items() if isinstance(p.default, bool)}
    _, group_options = options_of(cls.__name__, defaults, pairs, defaults.keys() - flags)
    return Optimizer(
        name=cls.__name__,
        lr=_default_rate(cls) if lr is None else lr,
        options=tuple(options.items()),
        groups=group_options,
        kernel=kernel,
        elementwise=False,
    )


class AdafactorOptions(TypedDict, total=False):
    """The options of `torch.optim.Adafactor`, for type checkers of a call of `adafactor`."""

    beta2_decay: Rate
    eps: tuple[float | None, float]
    d: Rate
    weight_decay: Rate
    foreach: bool | None
    maximize: bool


def adafactor(lr: Rate = 1e-2, *, groups: Groups = None, **options: Unpack[AdafactorOptions]) -> Optimizer:
    """Adafactor (Shazeer and Stern 2018), `torch.optim.Adafactor`: second moments by row and column.

    Under `fsdp` each parameter is gathered for its update: see `whole` of `fa.optim.from_torch`.

    Args:
        lr: a number, or a schedule `updates -> rate`.
        groups: `{selection: options}`, as for `fa.sgd`.
        options: as `torch.optim.Adafactor` takes them.

    Raises:
        ArgumentError: an option that it does not take.

    Example:
        >>> fa.optim.adafactor(1e-2)
    """
    return from_torch(torch.optim.Adafactor, lr=lr, groups=groups, **options)
