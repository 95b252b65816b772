"""`perturb`: the gradient of an update is taken at parameters that its first gradient has moved (SAM)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fnaccel import tree
from fnaccel.errors import TreeMismatchError, require
from fnaccel.step.callables import title
from fnaccel.step.chain import takes_step
from fnaccel.step.step import Capability, Info, Phase, Transform
from fnaccel.texts import unmatched
from fnaccel.tree import Tree


@dataclass(frozen=True)  # no attrs record, which would be part of a captured step
class Perturb:
    """The function of a user that moves the parameters."""

    fn: Callable[[dict[str, Any], Info], dict[str, Any]]

    def describe(self) -> str:
        """The text in the plan."""
        return title(self.fn)

    def __call__(self, grads: dict[str, Any], own: Tree, info: Info) -> tuple[dict[str, Any], Tree]:
        """The gradients at the moved parameters."""
        moves = self.fn(dict(grads), info)
        problems = unmatched(grads, moves)
        if problems:
            raise TreeMismatchError(
                f"the moves differ from the gradients: {'; '.join(problems)}",
                where="fa.perturb(step, fn)",
                fix="return a tensor for each gradient, by its name",
            )
        assert info.gradients_at is not None
        moved = tree.axpy(1.0, {name: info.params[name] for name in moves}, dict(moves))
        return info.gradients_at({**info.params, **moved}), own


@takes_step
def perturb(fn: Callable[[dict[str, Any], Info], dict[str, Any]]) -> Transform:
    """Take the gradient of each update at moved parameters: sharpness-aware minimisation, extragradient.

    An update computes its gradient, `fn` returns a move for each parameter, and the update goes on with the
    gradient of the same micro-batches, under the same random numbers, at `params + move`. The parameters
    themselves do not move. Metrics are those of the first pass. It takes about twice the time of a step.
    https://arxiv.org/abs/2010.01412

    Args:
        step: a step or a loss function; or none, for `fa.chain`.
        fn: `fn(grads, info) -> moves`, dicts of tensors by parameter name, DTensors if sharded. The gradients
            are those of all micro-batches and ranks: `fa.tree.norm(grads)` is the norm of the whole gradient,
            which may be 0.

    Raises:
        ArgumentError: `fn` can't be called.
        CapabilityError: at `fa.train_step`, if the strategy has no second gradient (deepspeed, xla).
        TreeMismatchError: in a call, if the moves have other names than the gradients.

    Example:
        >>> def ascend(grads, info):
        ...     return fa.tree.scale(grads, 0.05 / (fa.tree.norm(grads) + 1e-12))
        >>> step = fa.perturb(loss_fn, ascend)
        >>> train_step = fa.train_step(step, model=fa.distribute(GPT, "local"), optimizer=fa.sgd(0.1))
        >>> state, metrics = train_step(train_step.init(), batch)
    """
    require(
        callable(fn), f"fn is {type(fn).__name__}", "fa.perturb", "give a function fn(grads, info) -> moves"
    )
    needs = frozenset({Capability.GRADIENTS, Capability.SECOND_GRADIENT})
    return Transform("perturb", Phase.GRADS, apply=Perturb(fn), needs=needs)
