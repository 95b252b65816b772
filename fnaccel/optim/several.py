"""`optimizer_groups`: several optimizers for the parameters of one model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from fnaccel.errors import ArgumentError, require
from fnaccel.models.parameter import Leaf
from fnaccel.optim.description import Optimizer
from fnaccel.optim.selection import Select, choose, refuse_unmatched
from fnaccel.step.callables import plan_text
from fnaccel.step.spec import Spec


@attrs.frozen
class Assigned:
    """One optimizer of a model, its label ("" if it is the only one), and the indices of its parameters."""

    label: str
    optimizer: Optimizer
    indices: tuple[int, ...]


@attrs.frozen(kw_only=True)
class OptimizerGroups:
    """Several optimizers for one model. Each parameter belongs to the first that selects it.

    Attributes:
        members: (selection, optimizer) pairs.
        optional: the selections that may match no parameter.

    Example:
        >>> both = fa.optim.optimizer_groups([("*bias", fa.sgd(0.1)), ("*", fa.adamw(3e-4))])
        >>> both.name
        'sgd + adamw'
    """

    members: tuple[tuple[Select, Optimizer], ...]
    optional: tuple[Select, ...] = ()

    @property
    def name(self) -> str:
        """The names of its optimizers."""
        return " + ".join(self.labels)

    @property
    def labels(self) -> tuple[str, ...]:
        """The name of each optimizer, numbered if two have one name: `metrics["lr/<label>"]` is its rate."""
        names = [optimizer.name for _, optimizer in self.members]
        return tuple(
            name if names.count(name) == 1 else f"{name}.{names[:index].count(name)}"
            for index, name in enumerate(names)
        )

    @property
    def traceable(self) -> bool:
        """Whether the updates of all of them can be captured in a graph."""
        return all(optimizer.traceable for _, optimizer in self.members)

    def plan_notes(self, spec: Spec) -> list[str]:
        """Notes for the plan."""
        return [note for _, optimizer in self.members for note in optimizer.plan_notes(spec)]

    def describe(self) -> str:
        """One line for the plan."""
        return "; ".join(f"{plan_text(select)}: {one.describe()}" for select, one in self.members)


OptimizerLike = Optimizer | OptimizerGroups | Mapping[str, Optimizer | OptimizerGroups | None]
"""What users give: one description, or one for each model of a dict of models."""


def optimizer_groups(
    members: Mapping[Select, Optimizer] | Iterable[tuple[Select, Optimizer]],
    *,
    optional: Sequence[Select] = (),
) -> OptimizerGroups:
    """Several optimizers for one model: each parameter belongs to the first member that selects it.

    Each optimizer keeps its own rate, schedule and groups. `metrics["lr/<name>"]` holds its rate.

    Args:
        members: (selection, optimizer) pairs, or a mapping of them. A selection is a pattern of parameter
            names, as a shell matches them, or a function `(name, parameter) -> bool`. The parameter has its
            whole shape.
        optional: the selections that may match no parameter.

    Raises:
        ArgumentError: no members, or one that is no optimizer. At `init`: a parameter that no member
            selects, or a selection that matches nothing and is not optional.

    Example:
        >>> matrices = fa.optim.from_torch(torch.optim.Muon, lr=0.02)
        >>> optimizer = fa.optim.optimizer_groups(
        ...     [(lambda name, p: p.ndim == 2, matrices), ("*", fa.adamw(3e-4))]
        ... )
        >>> train_step = fa.train_step(loss_fn, model=fa.distribute(GPT, "local"), optimizer=optimizer)
        >>> state, metrics = train_step(train_step.init(seed=0), batch)
        >>> metrics["lr/Muon"], metrics["lr/adamw"]
        (0.02, 0.0003)
    """
    where, fix = "fa.optim.optimizer_groups", 'fa.optim.optimizer_groups([("*", fa.adamw(3e-4))])'
    require(not isinstance(members, Optimizer), "one optimizer is no list of pairs", where, fix)
    listed: list[Any] = list(members.items() if isinstance(members, Mapping) else members)
    for one in listed:
        pair = isinstance(one, tuple | list) and len(one) == 2
        require(
            pair, f"a member is {type(one).__name__}, not a pair of a selection and an optimizer", where, fix
        )
    pairs: tuple[tuple[Select, Optimizer], ...] = tuple((select, optimizer) for select, optimizer in listed)
    require(bool(pairs), "there is no optimizer", where, fix)
    for select, optimizer in pairs:
        require(
            isinstance(select, str) or callable(select),
            f"{select!r} selects no parameters",
            where,
            'give a pattern such as "*bias", or a function (name, parameter) -> bool',
        )
        require(
            isinstance(optimizer, Optimizer),
            f"the member of {plan_text(select)} is {type(optimizer).__name__}, and no optimizer",
            where,
            f"({plan_text(select)}, fa.adamw(3e-4))",
        )
    selections = [select for select, _ in pairs]
    for select in optional:
        require(
            select in selections,
            f"{plan_text(select)} is optional, and no member",
            where,
            "name a selection of a member",
        )
    return OptimizerGroups(members=pairs, optional=tuple(optional))


def starting_at(updates: int, optimizer: Optimizer) -> Optimizer:
    """An optimizer that leaves its parameters as they are for the first `updates` updates.

    Its schedule and its bias correction count from there, and until then its gradients are left out of
    `clip_norm`. So parameters train as if they had been frozen, and `requires_grad` set at that update.
    For gradual unfreezing, as a member of `optimizer_groups`.

    Args:
        updates: updates of the train step before the first of this optimizer, 0 or more.
        optimizer: the optimizer.

    Raises:
        ArgumentError: a negative number, no whole number, no optimizer, or one that starts later already.

    Example:
        >>> optimizer = fa.optim.optimizer_groups([
        ...     ("head*", fa.adamw(1e-3)),
        ...     ("*", fa.optim.starting_at(500, fa.adamw(1e-4))),
        ... ])
    """
    where, fix = "fa.optim.starting_at", "starting_at(500, fa.adamw(1e-4))"
    whole = isinstance(updates, int) and not isinstance(updates, bool)
    require(whole, f"{type(updates).__name__} is no number of updates", where, fix)
    require(updates >= 0, f"updates={updates} is negative", where, fix)
    if isinstance(optimizer, OptimizerGroups):
        fix = "give each member its own: (pattern, starting_at(500, fa.adamw(1e-4)))"
    require(isinstance(optimizer, Optimizer), f"{type(optimizer).__name__} is no optimizer", where, fix)
    require(
        optimizer.starts == 0, f"this one starts at update {optimizer.starts} already", where, "say it once"
    )
    return attrs.evolve(optimizer, starts=updates)


def layer_decay(decay: float, optimizer: Optimizer) -> Optimizer:
    """An optimizer whose rates fall from the head down to the embeddings, for fine-tuning (ELECTRA, BEiT).

    Of `n` blocks, block `k` has the rate `lr * decay ** (n - k)`. What is before the blocks in the model has
    `lr * decay ** (n + 1)`, and what is after them has `lr`. Blocks are found by the numbers in parameter
    names. Groups keep their options, and their rates fall alike. The metric of a rate is `lr/layer<number>`.

    Args:
        decay: the factor from a layer to the one below, in (0, 1].
        optimizer: the optimizer. A member of `optimizer_groups` sees the layers of its own parameters.

    Raises:
        ArgumentError: no such factor, or an optimizer with one rate for all. At `init`: no numbered blocks,
            or two lists with as many.

    Source: https://arxiv.org/abs/2003.10555

    Example:
        >>> optimizer = fa.optim.layer_decay(0.75, fa.adamw(1e-3, groups={"*bias": {"weight_decay": 0.0}}))
    """
    where, fix = "fa.optim.layer_decay", "layer_decay(0.75, fa.adamw(1e-3))"
    require(0 < decay <= 1, f"decay={decay} is not in (0, 1]", where, fix)
    require(isinstance(optimizer, Optimizer), f"{type(optimizer).__name__} is no optimizer", where, fix)
    one_rate = hasattr(optimizer.kernel, "chain") or hasattr(optimizer.lr, "runtime")
    require(not one_rate, f"{optimizer.name} has one rate for all parameters", where, fix)
    return attrs.evolve(optimizer, layer_decay=float(decay))


def optimizers_of(described: Optimizer | OptimizerGroups) -> tuple[Optimizer, ...]:
    """The optimizers of one model."""
    if isinstance(described, Optimizer):
        return (described,)
    return tuple(optimizer for _, optimizer in described.members)


def assign(described: Optimizer | OptimizerGroups, leaves: Sequence[Leaf]) -> list[Assigned]:
    """Divide the parameters of one model among its optimizers.

    Raises:
        ArgumentError: a parameter that no member selects, or a selection that matches nothing.
    """
    if isinstance(described, Optimizer):
        return [Assigned("", described, tuple(range(len(leaves))))]
    selections = [select for select, _ in described.members]
    chosen = [choose(selections, leaf) for leaf in leaves]
    names = [leaf.name for leaf in leaves]
    missed = [name for name, which in zip(names, chosen, strict=True) if which < 0]
    if missed:
        more = f" and {len(missed) - 1} more" if len(missed) > 1 else ""
        raise ArgumentError(
            f"no optimizer was given for {missed[0]!r}{more}",
            where="fa.optim.optimizer_groups",
            fix='end with ("*", fa.adamw(3e-4)), or leave parameters out: fa.train_step(frozen=("pattern",))',
        )
    refuse_unmatched(selections, chosen, described.optional, names, "members of fa.optim.optimizer_groups")
    return [
        Assigned(label, optimizer, tuple(i for i, which in enumerate(chosen) if which == number))
        for number, (label, (_, optimizer)) in enumerate(
            zip(described.labels, described.members, strict=True)
        )
    ]
