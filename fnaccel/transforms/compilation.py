"""`compile`: which part of a step torch.compile sees, and the proof that it compiled something."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import attrs
import torch
from torch import nn

from fnaccel import _torch
from fnaccel.errors import NotCompiledError, UnknownNameError, nearest
from fnaccel.step import Capability, Phase, Step, Transform, append
from fnaccel.units import Units, find_units

Scope = Literal["block", "loss", "step"]

_NEEDS = {
    "block": Capability.COMPILE_BLOCK,
    "loss": Capability.COMPILE_LOSS,
    "step": Capability.COMPILE_STEP,
}


@attrs.frozen(kw_only=True)
class Compile:
    """What to compile, and how; `mode`, `dynamic` and `fullgraph` as `torch.compile` takes them."""

    scope: Scope = "loss"
    backend: Any = "inductor"
    mode: str | None = None
    dynamic: bool | None = None
    fullgraph: bool = False
    units: Units = "block"

    def on_module(self, module: nn.Module, where: str) -> None:
        """Compile the forward of each block in place; equal blocks share one compilation."""
        found = find_units(module, self.units, where)
        if not found:
            raise NotCompiledError(
                "compile(scope='block') found no blocks in the model, so nothing would be compiled",
                where=where,
                fix="fa.compile(step, scope='loss'), or name the blocks: units=('Block',)",
            )
        for _, unit in found:
            unit.forward = self.compiled(unit.forward)

    def compiled(self, fn: Callable[..., Any], *, fullgraph: bool | None = None) -> Callable[..., Any]:
        """`fn` under torch.compile with these settings."""
        return torch.compile(
            fn,
            backend=self.backend,
            mode=self.mode,
            dynamic=self.dynamic,
            fullgraph=self.fullgraph if fullgraph is None else fullgraph,
        )


def compile(  # noqa: A001 - the field's name for it; the module keeps a noun
    step: Any,
    scope: Scope = "loss",
    *,
    backend: Any = "inductor",
    mode: str | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = False,
    units: Units = "block",
) -> Step:
    """Compile a step with `torch.compile`.

    Args:
        step: a step or a loss function.
        scope: `"block"` compiles each repeated block (every strategy), `"loss"` the whole loss
            function (unsharded strategies), `"step"` forward and backward as one graph (`local`).
        backend, mode, dynamic, fullgraph: as `torch.compile` takes them.
        units: for `"block"`, which modules are blocks: see `fnaccel.units`.

    Raises:
        UnknownNameError: no such scope.
        NotCompiledError: at `init` or after the first call, where nothing was compiled.

    Example: `step = fa.compile(step, scope="block")`.
    """
    if scope not in get_args(Scope):
        raise UnknownNameError(
            f"no scope is called {scope!r}", where="fa.compile", fix=nearest(str(scope), get_args(Scope))
        )
    record = Compile(
        scope=scope,
        backend=backend,
        mode=mode,
        dynamic=dynamic,
        fullgraph=fullgraph,
        units=tuple(units) if isinstance(units, list) else units,
    )
    phase = Phase.MODULE if scope == "block" else Phase.CALL
    return append(step, Transform("compile", phase, apply=record, needs=frozenset({_NEEDS[scope]})))


def check_compiled(before: int, where: str) -> None:
    """Raise NotCompiledError where no graph was compiled since `before` were counted."""
    if _torch.compiled_graphs() <= before:
        raise NotCompiledError(
            "compile was asked for, and the first call compiled nothing",
            where=where,
            fix="look for torch._dynamo.disable or a graph break at once (TORCH_LOGS=graph_breaks), "
            "or remove fa.compile",
        )
