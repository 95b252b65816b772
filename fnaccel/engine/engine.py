"""An engine: a strategy as tensors and functions, in four frozen records.

`Forward.drive` orders the forwards and backwards of micro-batches, which are in `passes.py`.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import torch

from fnaccel.data.micro_batches import MicroBatches
from fnaccel.engine.aux_values import Agreement
from fnaccel.engine.totals import Question
from fnaccel.errors import ArgumentError, FnaccelError
from fnaccel.models.parameter import Leaf
from fnaccel.optim.description import Bound
from fnaccel.tree import Tree
from fnaccel.world.mesh import Mesh, MeshAxis

if TYPE_CHECKING:
    from fnaccel.strategies.whole_leaves import WholeLeaves


@attrs.frozen(kw_only=True)
class Layout:
    """The tensors of a model, and their layout over ranks.

    Attributes:
        mesh: the ranks.
        model: a module, or a dict of modules, as the loss sees it.
        leaves: the trainable parameters.
        parameters, buffers: by canonical name, as the state shows them.
        copies: names of parameters that are copies of another rank's, and the canonical names of those.
        shares_buffers: whether all ranks take the first one's buffers after each update.
        next_whole: the first step, from a given one on, after which all ranks of `mesh["loss"]` hold the same
            values. None: after each. States of steps between are not saved or exported.
        of_replicas: the trees of states of which replicas hold values of their own at these steps, too.
            Checkpoints hold those of each replica, and between these steps all values of each. None: states
            of steps between are not saved at all.
        read_between: this rank's values of `leaves` that evaluation reads at these steps in the place of a
            replica's own, given the state of the axis itself. None: there are none, and evaluation raises.
    """

    mesh: Mesh
    model: Any
    leaves: tuple[Leaf, ...]
    parameters: dict[str, Any]
    buffers: dict[str, torch.Tensor]
    copies: Mapping[str, str] = attrs.field(factory=dict)
    shares_buffers: bool = True
    next_whole: Callable[[int], int] | None = None
    of_replicas: tuple[str, ...] | None = None
    read_between: Callable[[Tree], Sequence[torch.Tensor]] | None = None

    def whole_from(self, step: int) -> int:
        """The first step, from this one on, after which all ranks of `mesh["loss"]` hold the same values.

        Raises:
            ArgumentError: `next_whole` returned no such step.
        """
        if self.next_whole is None or self.mesh.loss_size == 1:
            return step
        found = self.next_whole(step)
        if type(found) is not int or found < step:
            raise ArgumentError(
                f"next_whole({step}) returned {found!r}",
                where="Layout(next_whole=)",
                fix=f"return the first step from {step} on after which all ranks hold the same values",
            )
        return found

    @functools.cached_property
    def held_by(self) -> MeshAxis | None:
        """The ranks that together hold the leaves, in parts: norms are added over them.

        None if each rank holds all leaves.
        """
        return self.mesh["model"] if any(leaf.sharded for leaf in self.leaves) else None

    @property
    def modules(self) -> tuple[torch.nn.Module, ...]:
        """The modules of the model."""
        return tuple(self.model.values()) if isinstance(self.model, dict) else (self.model,)


Sync = Callable[[bool], contextlib.AbstractContextManager[Any]]
Drive = Callable[[int, Callable[..., Any], Callable[..., None], Sync], None]
"""`drive(n, forward, backward, sync)` calls `forward(i)` and `backward(i, result)` for n micro-batches.

With stages: `forward(i, stage)` and `backward(i, result, stage)`, which name the stage in messages.
Forwards come in the order of the index. `sync(True)` is the context of the last backward."""


def in_turn(n: int, forward: Callable[..., Any], backward: Callable[..., None], sync: Sync) -> None:
    """F0 B0 F1 B1 ...: each backward right after its forward."""
    for index in range(n):
        with sync(index == n - 1):
            backward(index, forward(index))


Opened = tuple[list[torch.Tensor], Callable[..., Any]]
"""The tensors that gradients are taken of, and `run(fn, *args)`, which calls `fn(model, *args)` with them."""


@attrs.frozen(kw_only=True)
class Capture:
    """How a whole step can be captured as one graph: plain operations in the place of hooks.

    Attributes:
        leaves: the trainable parameters. `shard` is the very tensor that the update changes.
        open: in the graph, before forward. Gathers parameters if ranks hold shards of them.
        blank: zeros laid out as the gradients that `open`'s tensors get, outside of the graph.
        average: in the graph, from these gradients to those of the leaves, averaged over ranks.
        complete: whether a parameter that no rank has a gradient for is an error.
        graph_pass: a change of the graph before inductor lowers it. Other backends run without it.
    """

    leaves: tuple[Leaf, ...]
    open: Callable[[], Opened]
    blank: Callable[[], list[torch.Tensor]]
    average: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]] | None = None
    complete: bool = False
    graph_pass: Any = None


@attrs.frozen(kw_only=True)
class Forward:
    """How a function of the model is called and differentiated.

    Attributes:
        run: `run(fn, *args)` calls `fn(model, *args)` with the strategy's forward hooks armed.
        lend: the same without the hooks that average gradients, for models of other train steps.
        drive: runs the forward and backward passes of all micro-batches, in an order of its own.
        sync: `sync(communicate)` is the context of a micro-batch: gradients are averaged over ranks in its
            backward, or not. The average divides by the number of ranks in `mesh["gradient"]`.
        nests: whether another micro-batch's forward may run between a forward and its backward.
        backward: differentiates a total.
        capture: how a step can be captured as one graph, or None.
        whole: makes parameters whole for a loss that takes them as values. None if modules hold them whole.
        stages: over how many ranks the layers lie. If there are several, `run` returns None for a loss that
            another one computes, and ranks share the totals of an update after the last backward.
    """

    run: Callable[..., Any]
    lend: Callable[..., Any]
    drive: Drive = in_turn
    sync: Sync = contextlib.nullcontext
    nests: bool = True
    backward: Callable[..., Any] = torch.Tensor.backward
    capture: Capture | None = None
    whole: WholeLeaves | None = None
    stages: int = 1


@attrs.frozen(kw_only=True)
class Updated:
    """The argument of `Hooks.after_update`: the values of the state that comes next.

    Attributes:
        step: its step: 1 after the first update.
        params, buffers, opt, ema: its trees. Tensors may be changed in place. `ema` may be None.
        own: the hook's result after the update before. At first: the result of `Hooks.init`.
    """

    step: int
    params: dict[str, Any]
    buffers: dict[str, Any]
    opt: dict[str, Any]
    ema: dict[str, Any] | None
    own: Tree


@attrs.frozen(kw_only=True)
class Hooks:
    """Functions that are called at certain moments, each None if there is nothing to do.

    Attributes:
        micro_batch: before each forward, with whether its micro-batch counts. Before its backward if it does
            not, since its weight is 0. After the last backward, with True.
        settle: after a forward without a backward, and after a failure.
        finish: after the last backward, before gradients are read.
        abandon: with the error that ended a pass on this rank, before anything else is done: other ranks may
            wait for it in that pass.
        recover: after a step that left no update behind: it failed before, or no row counted.
        explain: the error for a user in the place of one of torch's, or None.
        ask: a question to the other ranks about the micro-batches of an update, or None.
        init: the first state of the axis itself, a pytree. States show it in `state.transforms`, by the name
            of the engine, so it is saved and restored.
        after_update: after each update, with its step, before the next state is shown. Returns the next state
            of the axis itself.
        told: what this rank has done in an update, which all ranks do in one order. Each update clears it.
        end: as soon as a state is complete: made, filled, or updated.
        free: at `close()`.
    """

    micro_batch: Callable[[bool], None] | None = None
    settle: Callable[[], None] | None = None
    finish: Callable[[], None] | None = None
    abandon: Callable[[Exception], None] | None = None
    recover: Callable[[], None] | None = None
    explain: Callable[[BaseException], FnaccelError | None] | None = None
    ask: Callable[[MicroBatches], Question] | None = None
    init: Callable[[], Tree] | None = None
    after_update: Callable[[Updated], Tree] | None = None
    told: deque[str] = attrs.field(factory=deque, eq=False)
    end: Callable[[], None] | None = None
    free: Callable[[], None] | None = None


@attrs.frozen(kw_only=True)
class Runtime:
    """The parts of a runtime that does more than an axis: all None without a runtime.

    Attributes:
        bound: its optimizer.
        native: its own engine, for abilities that only it has.
    """

    bound: Bound | None = None
    native: Any = None


@attrs.frozen(kw_only=True)
class Engine:
    """A strategy that is ready to run: four records.

    Attributes:
        name: of the strategy, for messages.
        layout: the tensors.
        forward: how the model is called.
        hooks: functions for certain moments.
        runtime: the parts of a runtime.
        averages: the shards of the EMA, if there is one.
        agreement: the structure of aux on which ranks agreed.
        unfinished: "step" and "look", if one is under way or was cut off. After that the next begins with
            `drop_pass`.
    """

    name: str
    layout: Layout
    forward: Forward
    hooks: Hooks = Hooks()
    runtime: Runtime = Runtime()
    averages: tuple[torch.Tensor, ...] = ()
    agreement: Agreement = attrs.field(factory=Agreement, eq=False, repr=False)
    unfinished: set[str] = attrs.field(factory=set, eq=False, repr=False)

    def clear(self) -> None:
        """Drop all gradients."""
        for leaf in self.layout.leaves:
            leaf.param.grad = None

    def drop_pass(self) -> None:
        """Clear the gradients and gathered parameters of a step or a look that did not reach its end."""
        self.clear()
        for restore in (self.hooks.settle, self.hooks.recover):
            if restore is not None:
                restore()
        self.unfinished.clear()

    def look(self, fn: Callable[..., Any], *args: Any) -> Any:
        """`fn(model, *args)` without gradients: evaluation, sampling."""
        if self.unfinished == {"look"}:  # and no step is under way
            self.drop_pass()
        self.unfinished.add("look")
        with torch.no_grad():
            try:
                result = self.forward.run(fn, *args)
            except Exception as error:
                if self.hooks.abandon is not None:
                    self.hooks.abandon(error)
                raise
            finally:
                if self.hooks.settle is not None:
                    self.hooks.settle()
        self.unfinished.discard("look")
        return result

    def close(self) -> None:
        """Free the strategy's hooks and memory."""
        self.clear()
        if self.hooks.free is not None:
            self.hooks.free()
