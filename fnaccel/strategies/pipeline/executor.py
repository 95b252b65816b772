"""Runs a schedule: the forwards and backwards of this rank's stages, and what they send each other."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import attrs
import torch
from torch import nn

from fnaccel.collectives import gather_objects
from fnaccel.extend import CapabilityError, MeshAxis, enter, note
from fnaccel.strategies.pipeline.caches import cache_of, lasting
from fnaccel.strategies.pipeline.halves import backward_of_inputs
from fnaccel.strategies.pipeline.messages import Header, Links, signature, unpack
from fnaccel.strategies.pipeline.passes import Known, Pass, StagedModel, StageEnds
from fnaccel.strategies.pipeline.schedules import READY, Table, check_places, check_same, schedule_of, timed
from fnaccel.strategies.pipeline.unknown import check_known

Run = Callable[..., Any]


class _Arrival(torch.autograd.Function):
    """What came from another stage, as the beginning of a graph. Its gradients go to `kept`."""

    @staticmethod
    def forward(ctx: Any, kept: list[Any], anchor: torch.Tensor, *tensors: torch.Tensor) -> Any:  # noqa: ARG004  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.kept = kept
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.kept[:] = grads
        return None, None, *(None for _ in grads)


@attrs.define(eq=False)
class Open:
    """A forward whose backward has not run.

    Attributes:
        came: the tensors from the stage before that take a gradient, without their graph.
        kept: their gradients, after the backward.
        left: the tensors for the next stage that get a gradient from it.
        anchor: the leaf in which their graph begins.
        rest: the backward of the weights, after that of the inputs.
    """

    came: Sequence[torch.Tensor] = ()
    kept: list[torch.Tensor | None] = attrs.field(factory=list)
    left: Sequence[torch.Tensor] = ()
    anchor: torch.Tensor | None = None
    rest: Callable[[], None] | None = None


class Executor:
    """The stages of this rank.

    Args:
        model: the user's module.
        staged: its forwards.
        inner: `run(fn, *args)` of the engine of the other axes.
        axis: the ranks along the axis of stages.
        homes: by stage, its rank.
        name: of the schedule.
        links: to other ranks.
        abandon: tells ranks that may wait in the call of this one that an error has ended it.

    Attributes:
        links: to other ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        staged: StagedModel,
        inner: Run,
        axis: MeshAxis,
        homes: tuple[int, ...],
        name: str,
        links: Links,
        abandon: Callable[[Exception], None],
    ) -> None:
        self.links = links
        self._abandon = abandon
        self._staged, self._inner, self._axis = staged, inner, axis
        self._homes, self._stages = homes, len(homes)
        self._own = [stage for stage, home in enumerate(homes) if home == axis.rank]
        self._weights = [p for p in model.parameters() if p.requires_grad and p.numel()]
        self._name = name
        self._tables: dict[int, Table] = {}
        self._at: tuple[int, int] | None = None  # the stage and the micro-batch of the action under way
        self._in_halves = False  # whether its backward is that of the inputs alone
        self._open: dict[tuple[int, int], Open] = {}
        for module in staged.around():
            forward = functools.partial(self._forward, module, module.forward)
            module.forward = functools.update_wrapper(forward, module.forward)  # generate reads its signature

    def drive(
        self,
        n: int,
        forward: Callable[..., Any],
        backward: Callable[..., None],
        sync: Callable[[bool], AbstractContextManager[Any]],
    ) -> None:
        """Run the actions of this rank for n micro-batches. `sync(True)` is around its last backward."""
        self.links.check()
        actions = self.table(n)[self._axis.rank]
        last = max((place for place, (kind, *_) in enumerate(actions) if kind != "F"), default=-1)
        results: dict[tuple[int, int], Any] = {}
        self._open.clear()
        try:
            for place, (kind, stage, i) in enumerate(actions):
                self._at = stage, i
                if kind == "F":
                    results[stage, i] = forward(i, stage)
                    continue
                with sync(place == last):
                    if kind == "W":
                        enter("backward", i, stage)
                        self._finish(self._open.pop((stage, i)))
                        continue
                    total, counts = results.pop((stage, i))
                    self._in_halves = kind == "I" and counts
                    backward(i, (total, counts), stage)
                    if kind == "B":
                        del self._open[stage, i]
        finally:
            self._at = None
        note("waits for other stages")
        self.links.settle()

    def table(self, n: int) -> Table:
        """The schedule of n micro-batches, which is checked before its first use.

        Raises:
            ArgumentError: it can't run, or ranks have different ones.
        """
        if n not in self._tables:
            table = schedule_of(self._name)(self._axis.size, self._stages // self._axis.size, n)
            if self._name not in READY:  # a function of the user's may read the rank
                check_same(gather_objects(table, over=self._axis), self._name)
            timed(table, self._stages, n, self._name)
            check_places(table, self._homes, self._name)
            self._tables[n] = table
        return self._tables[n]

    def run(self, fn: Run, *args: Any) -> Any:
        """`fn(model, *args)` as the stage of the action under way. None if the loss is on another stage.

        Outside of a step: with the output of each call of the model on all ranks.
        """
        if self._at is None:
            return self._inner(self._looked, fn, *args)
        stage, i = self._at
        last = stage == self._stages - 1
        about = "loss", signature(args), torch.is_grad_enabled()
        opened = self._open[stage, i] = Open()
        known = self._received(stage, i, about, opened)

        def one(model: Any, *inner_args: Any) -> Any:
            done: Pass | None = None
            try:
                with self._staged.one_pass(stage, known) as done:
                    total = fn(model, *inner_args)
            except StageEnds:
                assert done is not None
                opened.left = self._send(done, stage, i, about)
                return tuple(opened.left)
            if not last:
                raise CapabilityError(
                    f"the loss ended on stage {stage} of {self._stages}, before the blocks of the next one",
                    where="the loss function under fa.pipeline()",
                    fix="call the whole model in the loss",
                )
            return total

        returned = self._inner(one, *args)
        return returned if last else None

    def _looked(self, model: Any, fn: Run, *args: Any) -> Any:
        with self._staged.hiding():
            try:
                result = fn(model, *args)
                check_known(result)
            except Exception as error:
                self._abandon(error)
                raise
        return result

    def backward(self, total: torch.Tensor | None) -> None:
        """The backward of the action under way: of the loss, or with gradients from the next stage."""
        assert self._at is not None
        stage, i = self._at
        opened = self._open[stage, i]
        outputs, opened.left = opened.left, ()
        if total is not None:
            outputs, grads = [total], [torch.ones_like(total)]
        else:
            note(f"waits for stage {stage + 1}")
            grads = self.links.receive_gradients(outputs, self._homes[stage + 1], self._tag(stage, i))
        note(f"runs stage {stage}")
        whole = functools.partial(torch.autograd.backward, outputs, grads)
        if not outputs:
            pass
        elif not self._in_halves:
            whole()
        elif opened.anchor is None:  # no gradient goes further back
            opened.rest = whole
        else:
            opened.rest = backward_of_inputs(outputs, grads, opened.anchor, self._weights)
        if opened.came:
            kept = opened.kept or [None] * len(opened.came)
            found = [torch.zeros_like(x) if g is None else g for x, g in zip(opened.came, kept, strict=True)]
            self.links.send_gradients(found, self._homes[stage - 1], self._tag(stage - 1, i))
            opened.came, opened.kept = (), []

    @staticmethod
    def _finish(opened: Open) -> None:
        """The backward of the weights."""
        if opened.rest is not None:
            opened.rest()

    def _forward(self, module: nn.Module, run: Run, *args: Any, **kwargs: Any) -> Any:
        """The forward of a module that has all blocks in it. Outside of a step it runs on all stages."""
        if self._staged.running or not self._staged.hides:
            return run(*args, **kwargs)
        self.links.check()
        cache = cache_of(module, args, kwargs)
        shapes = signature((args, lasting(kwargs, module)))
        about = "look", shapes, self._staged.modes(), torch.is_grad_enabled()
        output, known, streams = None, Known(), self._staged.streams()
        source = self._homes[-1]
        self.links.own = cache.cache
        for stage in self._own:
            done: Pass | None = None
            known = self._received(stage, 0, about, Open())
            try:
                with self._staged.one_pass(stage, known) as done, cache.one_pass(known):
                    output = run(*args, **kwargs)
                check_known(output)
            except StageEnds:
                assert done is not None
                self._send(done, stage, 0, about)
        drawn = self._staged.streams().states if streams.moved() else []
        parts = output, known.cached, drawn
        output, cached, drawn = self.links.share(parts, source, about, own=source == self._axis.rank)
        self.links.settle()
        self.links.own = None
        cache.fill(cached, self.links.device)
        if drawn:
            self._staged.draw_on(drawn)
        return output

    def _received(self, stage: int, i: int, about: Hashable, opened: Open) -> Known:
        """What came from the stage before, in the order of its messages. The first stage gets nothing.

        Args:
            stage: this one.
            i: the micro-batch.
            about: equal for micro-batches of the same shapes.
            opened: gets the tensors that take a gradient.
        """
        if stage == 0:
            note("runs stage 0")
            return Known()
        note(f"waits for stage {stage - 1}")
        source, tag = self._homes[stage - 1], self._tag(stage - 1, i)
        header, tensors = self.links.receive(source, tag, (about, stage))
        note(f"runs stage {stage}")
        if torch.is_grad_enabled():
            tensors = _begun(header, tensors, opened)
        return unpack(header, tensors, self.links.own)

    def _send(self, done: Pass, stage: int, i: int, about: Hashable) -> list[torch.Tensor]:
        """Send what the next stage needs. Returns the tensors that get a gradient from it."""
        known = self._staged.sends(done)
        to, tag = self._homes[stage + 1], self._tag(stage, i)
        tensors = self.links.send(known, to, tag, (about, stage + 1))
        return [tensor for tensor in tensors if tensor.requires_grad]

    def _tag(self, stage: int, i: int) -> int:
        return 1 + i * self._stages + stage


def _begun(header: Header, tensors: list[torch.Tensor], opened: Open) -> list[torch.Tensor]:
    """The tensors of a message, those that take a gradient as the beginning of a graph."""
    places = [place for place, (*_, takes) in enumerate(header.tensors) if takes]
    if not places:
        return tensors
    opened.came = [tensors[place] for place in places]
    opened.anchor = torch.empty((), device=tensors[0].device, requires_grad=True)
    begun = list(tensors)
    for place, tensor in zip(places, _Arrival.apply(opened.kept, opened.anchor, *opened.came), strict=True):  # pyright: ignore
        begun[place] = tensor
    return begun
