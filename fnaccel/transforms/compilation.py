"""`compile`: which part of a step torch.compile sees."""

from __future__ import annotations

import contextlib
import functools
import itertools
import types
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, get_args

import attrs
import torch
from torch import nn

from fnaccel import _lazy, _torch
from fnaccel.errors import (
    ArgumentError,
    CapabilityError,
    MissingBackendError,
    NotCompiledError,
    UnknownNameError,
    nearest,
    require,
)
from fnaccel.models.blocks import Units, find_units
from fnaccel.step.callables import plan_text
from fnaccel.step.chain import takes_step
from fnaccel.step.choices import Scope
from fnaccel.step.settings import Settings
from fnaccel.step.spec import Spec, obstacle_to_capture
from fnaccel.step.step import Capability, Phase, Step, Transform

_NEEDS: dict[str, frozenset[Capability]] = {
    "auto": frozenset(),
    "block": frozenset({Capability.COMPILE_BLOCK}),
    "loss": frozenset({Capability.COMPILE_LOSS}),
    "step": frozenset({Capability.COMPILE_STEP}),
}


def _to_dims(dynamic: object) -> Any:
    """A mapping of patterns to dims as a frozen value. Other values as they are."""
    if not isinstance(dynamic, Mapping):
        return dynamic
    return tuple((name, (dims,) if isinstance(dims, int) else tuple(dims)) for name, dims in dynamic.items())


@attrs.frozen(kw_only=True)
class Compile:
    """The options of `fa.compile`. `mode`, `options` and `fullgraph` are those of `torch.compile`.

    `why` is the reason for the scope, if the user gave none. `process` compiles in the background.
    """

    scope: Scope = "auto"
    backend: Any = "inductor"
    mode: str | None = None
    options: tuple[tuple[str, Any], ...] = ()
    dynamic: Any = attrs.field(default=None, converter=_to_dims)
    fullgraph: bool = False
    units: Units = "block"
    limit: int = 8
    background: bool | int = False
    why: str = ""
    process: Any = attrs.field(default=None, eq=False)
    # blocks are compiled after all other changes to modules: torch.compile sees the final forward
    last_of_phase: ClassVar[bool] = True

    def configure(self, settings: Settings) -> Settings:
        """Compile the step."""
        return attrs.evolve(settings, compiler=self)

    def resolved(self, spec: Spec) -> Transform:
        """The transform with its scope: the largest that the strategy and the step allow, if nobody said.

        Raises:
            CapabilityError: scope `"step"` was asked for, beside something that one graph can't hold.
        """
        obstacle = obstacle_to_capture(spec)
        if torch.__version__ < (2, 11):  # pyright: ignore[reportOperatorIssue] - it compares with tuples
            obstacle = "this torch can't capture torch.autograd.grad (2.11 or newer does)"
        if self.scope == "step" and obstacle:
            raise CapabilityError(
                f"compile(scope='step') can't be: {obstacle}",
                where=f"strategy {spec.strategy}",
                fix="fa.compile(step) without a scope chooses one that can",
            )
        found = self
        if self.scope == "auto":
            scope, why = _choose(spec.strategy.capabilities(), obstacle)
            found = attrs.evolve(self, scope=scope, why=f"chosen: {why}")
        if not self.background or self.process is not None:
            return as_transform(found)
        alone = as_transform(attrs.evolve(found, background=False))
        transforms = tuple(alone if t.apply is self else t for t in spec.step.transforms)
        module = _lazy.load("fnaccel.transforms.background.process")
        beside = attrs.evolve(spec, step=Step(spec.step.loss_fn, transforms))
        return as_transform(attrs.evolve(found, process=module.Background(beside, self.background)))

    def plan_notes(self, spec: Spec) -> list[str]:
        """The parts that run outside of a captured step."""
        if self.scope != "step":
            return []
        tail = (Phase.GRADS, Phase.UPDATE)
        after = [t.name for t in spec.step.transforms if t.phase in tail and not attrs.has(type(t.apply))]
        after += [optimizer.name for optimizer in (spec.optimizers or {}).values() if not optimizer.traceable]
        note = f"{', '.join(after)} can't be captured: clipping and updates run after the graph"
        return [note] if after else []

    def alternative(self, able: frozenset[Capability]) -> str:
        """The scopes that a strategy can carry out, for a message."""
        possible = [repr(name) for name, needs in _NEEDS.items() if needs and needs <= able]
        return f"fa.compile(step, scope={' or '.join(possible)})" if possible else "remove fa.compile"

    def describe(self) -> str:
        """The text in the plan."""
        changed = [
            f"{field.name}={plan_text(getattr(self, field.name))}"
            for field in attrs.fields(type(self))
            if field.name not in ("scope", "why", "process") and getattr(self, field.name) != field.default
        ]
        return ", ".join([f"scope {self.scope}{f' ({self.why})' if self.why else ''}", *changed])

    @property
    def dims(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """(pattern of a leaf's path, dimensions) of the leaves that are dynamic in the batch."""
        return self.dynamic if isinstance(self.dynamic, tuple) else ()

    @property
    def replays(self) -> bool:
        """Whether the programs are CUDA graphs, which write to the same memory each time."""
        return self.mode in ("reduce-overhead", "max-autotune")

    def on_module(self, module: nn.Module, where: str) -> None:
        """Compile the forward of each block in place. Equal blocks share one compilation."""
        units = find_units(module, self.units, where)
        if not units:
            raise NotCompiledError(
                "compile(scope='block') found no blocks in the model, so nothing would be compiled",
                where=where,
                fix="fa.compile(step, scope='loss'), or name the blocks: units=('Block',)",
            )
        functions: dict[Any, Any] = {}
        for _, unit in units:
            forward: Any = unit.forward
            if isinstance(forward, types.MethodType) and isinstance(forward.__func__, types.FunctionType):
                # one code object for equal blocks, so that all use the compilation of the first
                fn = functions.setdefault(forward.__func__, own_code(forward.__func__))
                forward = types.MethodType(fn, unit)
            unit.forward = self._compiled(forward, self.fullgraph)

    def of_loss(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """A loss function under torch.compile."""

        def loss(model: object, *args: Any) -> Any:
            return fn(model, *args)

        return self._compiled(own_code(loss), self.fullgraph)

    def of_step(
        self, fn: Callable[..., Any], graph_pass: Callable[..., Any] | None = None
    ) -> Callable[..., Any]:
        """A part of a train step under torch.compile, always one graph. Inductor runs `graph_pass` on it."""
        return self._compiled(own_code(fn), True, graph_pass if self.backend == "inductor" else None)

    def _compiled(
        self, fn: Callable[..., Any], fullgraph: bool, graph_pass: Callable[..., Any] | None = None
    ) -> Callable[..., Any]:
        process = self.process
        if process is None:
            return self._by_torch(fn, fullgraph, graph_pass)
        # not before it is called: torch's compiler alone takes a second to import
        compiled = functools.cache(functools.partial(self._by_torch, fn, fullgraph, graph_pass))

        @functools.wraps(fn)
        def either(*args: Any, **kwargs: Any) -> Any:
            return (compiled() if process.over else fn)(*args, **kwargs)

        return either

    def _by_torch(
        self, fn: Callable[..., Any], fullgraph: bool, graph_pass: Callable[..., Any] | None
    ) -> Callable[..., Any]:
        if self.backend == "inductor":
            with contextlib.suppress(MissingBackendError):  # slower without, and no different
                _lazy.load("fnaccel.transforms.first_loss._torch").compile_quickly()
        options: dict[str, Any] = {"mode": self.mode}
        more = dict(self.options)
        if graph_pass is not None:  # then keep the order of collectives that it has made
            more["reorder_for_peak_memory"] = False
        if self.backend == "inductor" and _PASS not in more:
            with contextlib.suppress(MissingBackendError):
                graph_pass = _lazy.load("fnaccel.transforms.products._torch").pass_beside(graph_pass)
        if graph_pass is not None:
            more[_PASS] = graph_pass
        try:
            if more:  # torch takes a mode, or options
                options = {"options": {**_torch.mode_options(self.mode), **more}}
            return torch.compile(
                fn,
                backend=self.backend,
                dynamic=None if self.dims else self.dynamic,
                fullgraph=fullgraph,
                **options,
            )
        except (RuntimeError, *_torch.compile_errors()) as error:
            raise ArgumentError(
                f"torch.compile does not take backend={self.backend!r}, mode={self.mode!r}, "
                f"options={dict(self.options)!r}",
                where="fa.compile",
                fix=str(error).strip().splitlines()[0],
            ) from error


_PASS = "post_grad_custom_post_pass"
_numbers = itertools.count()


def own_code(fn: Callable[..., Any]) -> Any:
    """A function, or a method of the same object, with a code object of its own.

    torch keeps compilations with the code object, and varying shapes with its name: train steps that shared
    them would use up each other's limit of recompilations.
    """
    code = fn.__code__.replace(co_name=f"{fn.__code__.co_name}_{next(_numbers)}")
    copy = types.FunctionType(code, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
    copy.__kwdefaults__ = fn.__kwdefaults__
    return types.MethodType(copy, fn.__self__) if isinstance(fn, types.MethodType) else copy


@takes_step
def compile(  # noqa: A001 - the field's name for it
    scope: Scope = "auto",
    *,
    backend: Any = "inductor",
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    dynamic: object = None,
    fullgraph: bool = False,
    units: Units = "block",
    limit: int = 8,
    background: bool | int = False,
) -> Transform:
    """Compile a step with `torch.compile` (https://docs.pytorch.org/docs/stable/torch.compiler.html).

    Args:
        step: a step or a loss function; or none, for `fa.chain`.
        scope: `"step"` captures forward, backward, averaging over ranks, clip and update as one
            program, `"loss"` the loss function, `"block"` each repeated block. `"auto"` takes the
            largest that the strategy and the transforms allow, and the plan says which and why.
        backend, mode, fullgraph: as `torch.compile` takes them. `mode="reduce-overhead"` uses CUDA
            graphs. Scope `"step"` is always one graph.
        options: the backend's own, as `torch.compile` takes them: `{"max_autotune": True}`.
        dynamic: as `torch.compile` takes it. Or the dimensions of batch leaves that vary, by pattern
            of their path: `{"tokens": 1}`, `{"*": (0, 1)}`.
        units: for `"block"`, which modules are blocks: see `fnaccel.models.blocks`.
        limit: how often a train step may compile again because something changed.
        background: steps run uncompiled while a process beside them compiles, and go over to its code. True:
            as soon as all ranks can. A number: at that step, after a wait if need be, so that a run
            repeats to the bit. With the backend `"inductor"`. The process makes a train step of its own on
            the device of rank 0 of each machine.

    Raises:
        UnknownNameError: no such scope.
        ArgumentError: a limit below 0, dims that are no ints, or a step that no other process can be given.
        MissingBackendError: `background=` without the package cloudpickle.
        NotCompiledError: at `init` or after the first call, if nothing was compiled.
        RecompileLimitError: in a call after `limit` recompilations. Names the leaves whose shapes changed.

    Example:
        >>> step = fa.compile(loss_fn)
        >>> step = fa.compile(loss_fn, "block", dynamic={"tokens": 1})  # sequences of any length
        >>> step = fa.compile(loss_fn, background=500)  # step 500 is the first that runs compiled code
    """
    where = "fa.compile"
    if scope not in get_args(Scope):
        raise UnknownNameError(
            f"no scope is called {scope!r}", where=where, fix=nearest(str(scope), get_args(Scope))
        )
    require(
        isinstance(limit, int) and limit >= 0,
        f"a step can't be compiled again {limit!r} times",
        where,
        "a limit of 0 or more",
    )
    require(
        isinstance(background, int) and (background is False or background > 0),
        f"background={background!r} is no step at which compiled code could begin",
        where,
        "background=True, or the number of a step: background=500",
    )
    require(
        not background or backend == "inductor",
        f"backend={backend!r} keeps no code on disk that another process could compile",
        where,
        'backend="inductor", or leave background= out',
    )
    record = Compile(
        scope=scope,
        backend=backend,
        mode=mode,
        options=tuple(dict(options or {}).items()),
        dynamic=dynamic,
        fullgraph=fullgraph,
        units=tuple(units) if isinstance(units, list) else units,
        limit=limit,
        background=background,
    )
    require(
        record.dynamic in (None, True, False)
        or (bool(record.dims) and all(isinstance(d, int) for _, dims in record.dims for d in dims)),
        f"dynamic={dynamic!r} says nothing of which dimensions vary",
        where,
        'dynamic=True, or dynamic={"tokens": 1}',
    )
    return as_transform(record)


def _choose(able: frozenset[Capability], obstacle: str) -> tuple[Scope, str]:
    if Capability.COMPILE_STEP in able and not obstacle:
        return "step", "no hooks in the way, so all of it is one program"
    if Capability.COMPILE_LOSS in able:
        return "loss", obstacle
    return "block", "parameters are gathered by hooks between the blocks"


def as_transform(record: Compile) -> Transform:
    """The record in its phase: blocks are compiled before they are sharded, the rest around the call."""
    phase = Phase.MODULE if record.scope == "block" else Phase.CALL
    return Transform("compile", phase, apply=record, needs=_NEEDS[record.scope])
