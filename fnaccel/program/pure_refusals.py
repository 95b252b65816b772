"""What a pure update can't carry out, by name, before anything is built."""

from __future__ import annotations

from typing import Any

from fnaccel.errors import CapabilityError
from fnaccel.optim.pure_rules import check_optimizer
from fnaccel.optim.several import optimizers_of
from fnaccel.program.lower import Lowered, UserGradients, UserUpdate
from fnaccel.step.spec import Spec
from fnaccel.step.step import Capability
from fnaccel.transforms.per_example import PerExample

_WHERE = "fa.pure(train_step)"


def refuse(spec: Spec, lowered: Lowered) -> None:
    """Raise CapabilityError for a train step whose update is no function of tensors."""
    what, fix = _problem(spec, lowered)
    if what:
        raise CapabilityError(what, where=_WHERE, fix=fix)
    optimizers: dict[str | None, Any] = dict(spec.optimizers or {})
    for described in optimizers.values():
        for optimizer in optimizers_of(described):
            check_optimizer(optimizer)


def _problem(spec: Spec, lowered: Lowered) -> tuple[str, str]:
    """The first obstacle as a clause, and the way around it. Empty without one."""
    settings = lowered.settings
    if spec.runtime or any(axis.maker != "ddp" for axis in spec.strategy.axes):
        return (
            f"each rank computes its pure updates with the whole model, and the strategy is {spec.strategy}",
            "fa.local() or fa.ddp(), also for inner steps in the loss of a train step under fa.fsdp()",
        )
    if spec.optimizers is None:
        return "this train step has no optimizer", "give one; fa.call is a model as a function of parameters"
    if settings.precision.scaled:
        return (
            "fp16 needs a loss scale that moves with the gradients found",
            'fa.with_precision(step, "bf16"), which needs none',
        )
    if settings.compiler is not None:
        return (
            f"fa.compile(scope={settings.compiler.scope!r}) compiles a step with its state",
            "leave fa.compile out, and compile your function: torch.compile(fn, fullgraph=True)",
        )
    if lowered.calls:
        return (
            f"{lowered.calls[0][0]} stands around the call of a train step, which a pure update is not",
            "leave it out, or write it around your own loop",
        )
    for transform in spec.step.transforms:
        if isinstance(transform.apply, PerExample):
            return (
                "gradients of rows are given to a total, and have no derivative of their own",
                "leave fa.per_example out: torch.func.vmap of torch.func.grad in the loss has derivatives",
            )
        if Capability.SECOND_GRADIENT in transform.needs:
            return (
                f"{transform.name} takes a second gradient of the same micro-batches",
                "torch.func.grad(update.loss) is the gradient at any values",
            )
    for name, hook in (*lowered.tail.gradients, *lowered.tail.updates):
        if not isinstance(hook, UserGradients | UserUpdate) and not getattr(hook, "pure", False):
            return f"{name} changes tensors in place", "leave it out, or write it as a function: fa.Transform"
    return "", ""
