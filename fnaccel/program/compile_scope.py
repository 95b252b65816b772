"""What `compile` compiles where nobody said: the largest scope that the strategy and the step allow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs

from fnaccel import _torch
from fnaccel.errors import CapabilityError
from fnaccel.step.step import Capability, Phase, Step
from fnaccel.strategies.ddp import Ddp
from fnaccel.strategies.fsdp import Fsdp
from fnaccel.strategies.strategy import Strategy
from fnaccel.transforms.compilation import Compile, Scope, as_transform
from fnaccel.transforms.rematerialisation import Remat

_TAIL = (Phase.GRADS, Phase.UPDATE)


def resolve_scope(step: Step, strategy: Strategy) -> Step:
    """A step whose `compile` says what it compiles.

    Raises:
        CapabilityError: scope `"step"` was asked for, beside something that one graph can't hold.
    """
    record: Compile | None = step.find(Compile)
    if record is None:
        return step
    obstacle = _obstacle(step, strategy)
    if record.scope == "step" and obstacle:
        raise CapabilityError(
            f"compile(scope='step') can't be: {obstacle}",
            where=f"strategy {strategy}",
            fix="fa.compile(step) without a scope chooses one that can",
        )
    if record.scope != "auto":
        return step
    scope, why = _choose(strategy, obstacle)
    resolved = as_transform(attrs.evolve(record, scope=scope, why=f"chosen: {why}"))
    return Step(step.loss_fn, tuple(resolved if isinstance(t.apply, Compile) else t for t in step.transforms))


def compile_notes(step: Step, strategy: Strategy, optimizers: Iterable[Any]) -> list[str]:
    """What a plan has to say of a captured step: what is left out of it."""
    record: Compile | None = step.find(Compile)
    if record is None or record.scope != "step":
        return []
    after = [t.name for t in step.transforms if t.phase in _TAIL and not attrs.has(type(t.apply))]
    after += [one.name for one in optimizers if not getattr(one.kernel, "traceable", False)]
    notes: list[str] = []
    if after:
        notes.append(f"{', '.join(after)} can't be captured: what follows the gradients runs after the graph")
    fsdp: Fsdp | None = strategy.find(Fsdp)
    if fsdp is not None and fsdp.reshard_after_forward and record.backend != "inductor":
        notes.append("only inductor gathers parameters again for backward: here they stay gathered (ZeRO-2)")
    return notes


def _choose(strategy: Strategy, obstacle: str) -> tuple[Scope, str]:
    able = strategy.capabilities()
    if Capability.COMPILE_STEP in able and not obstacle:
        return "step", "no hooks in the way, so all of it is one program"
    if Capability.COMPILE_LOSS in able:
        return "loss", obstacle
    return "block", "parameters are gathered by hooks between the blocks"


def _obstacle(step: Step, strategy: Strategy) -> str:
    """What keeps a step from being captured whole; empty where nothing does."""
    if not _torch.can_trace_autograd():
        return "this torch can't capture torch.autograd.grad (2.11 or newer does)"
    if step.find(Remat) is not None:
        return "remat needs forward and backward as two programs"
    ddp: Ddp | None = strategy.find(Ddp)
    if ddp is not None and ddp.unused_parameters:
        return "ddp(unused_parameters=True) looks for parameters without a gradient in each step"
    if ddp is not None and ddp.hook is not None and not ddp.hook.casts_only:
        return f"the hook {ddp.hook.name!r} of ddp keeps state outside of the graph"
    fsdp: Fsdp | None = strategy.find(Fsdp)
    if fsdp is not None:
        lacking = [name for name in ("policy", "offload", "ignore") if getattr(fsdp, name)]
        lacking += [] if fsdp.init == "seeded" else ["init"]
        if lacking:
            return f"fsdp({lacking[0]}=...) is carried out by hooks"
    return ""
