"""`StateOwner`: the engine and the lease behind the states of a train step, which may outlive it.

Saving, restoring, adopting and lending reach the engine through the lease of a state. A train step that is
garbage-collected gives its modules up, even if one of its states is still held.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch

from fnaccel import _torch, tree
from fnaccel.engine.runtime_tensor import Remote
from fnaccel.engine.stop_request import Notice
from fnaccel.errors import CapabilityError, OwnershipError, UnleasedStateError
from fnaccel.models._torch import break_graph
from fnaccel.models.note import Note
from fnaccel.program.adopted import absorb
from fnaccel.program.instance import Instance
from fnaccel.program.model_notes import with_notes
from fnaccel.program.parameter_averages import Averaged, EvaluationPoint
from fnaccel.program.plan import Plan
from fnaccel.state import (
    Lease,
    TrainState,
    check_state,
    donate,
    following,
    is_stale,
    lease,
    lease_of,
    refuse_averaged,
    scale_of,
)
from fnaccel.texts import size_of
from fnaccel.world.mesh import Mesh
from fnaccel.world.undo import SigintHeld

_HELD = "the loss takes whole parameters (fa.params)"


def check_outside_of_func(where: str) -> None:
    """Raise CapabilityError if torch.func or torch.compile runs a function that calls a train step."""
    fix = "update = fa.pure(train_step) is such a function; fa.compile(step) compiles a train step"
    if torch.compiler.is_compiling():  # a graph can't make the error: torch's own shows this text
        break_graph(fix)
    elif _torch.transform_now() is None:
        return
    what = "a train step writes to its state, and torch.func and torch.compile take functions of tensors"
    raise CapabilityError(what, where=where, fix=fix)


class StateOwner:
    """The engine and optimizers of one train step, and the lease of its live state.

    Args:
        plan: the plan of the train step, as it was made before the modules.
        mesh: its mesh.
        where: its name, for messages.

    Attributes:
        lease: of the live state.
        notice: the stop request of all ranks, or None.
        built: the engine and optimizers. None before `init`, and after `close`.
        closed: whether `close` was called.
    """

    def __init__(self, plan: Plan, mesh: Mesh, where: str) -> None:
        self._plan = plan
        self.mesh = mesh
        self.lease = Lease(self)
        self._where = where
        self.notice: Notice | None = None
        self.built: Instance | None = None
        self.closed = False

    @property
    def plan(self) -> Plan:
        """The plan of the train step, with the notes about its modules once they are built."""
        if self.built is None:
            return self._plan
        whole = self.built.engine.forward.whole
        held = [] if whole is None or not whole.most else [Note(f"{_HELD}: {size_of(whole.most)} a rank")]
        return with_notes(self._plan, (*self.built.learned.notes, *held))

    @property
    def instance(self) -> Instance:
        """The engine and optimizers.

        Raises:
            OwnershipError: before `init`, or after `close`.
        """
        if self.built is None:
            raise OwnershipError(
                "this train step was closed" if self.closed else "this train step has no parameters yet",
                where=self._where,
                fix="make a new one" if self.closed else "state = train_step.init(seed=0) first",
            )
        return self.built

    @property
    def initialised(self) -> bool:
        """Whether `init` was called. Raises after `close`."""
        if self.closed:
            _ = self.instance
        return self.built is not None

    @property
    def live_state(self) -> TrainState | None:
        """The live state. None if there is none, or if an update was interrupted in its middle."""
        live = self.lease.live
        return None if live is None or is_stale(live) else live

    def instance_of(self, state: TrainState) -> Instance:
        """The engine and optimizers that a live state is updated by.

        Raises:
            OwnershipError: as `instance`.
            StaleStateError, UnleasedStateError, AveragedError: not the live state of this train step.
        """
        check_outside_of_func("train_step(state, batch)")
        instance, lease = self.built or self.instance, self.lease
        if lease.live is state and not lease.averaged and not is_stale(state):
            return instance
        lease_of(state, "train_step(state, batch)")
        raise UnleasedStateError(
            "this state belongs to another train step",
            where=self._where,
            fix="pass each train step its own state; lend others with given={...}",
        )

    def evaluation_point(self) -> Averaged | EvaluationPoint | None:
        """In the body the parameters of the live state are where its optimizers evaluate.

        Between two averages of replicas they are their anchor, if there is one. None if the parameters are
        there already, or hold averages.
        """
        instance, live = self.instance, self.lease.live
        engine, layout = instance.engine, instance.engine.layout
        if live is None or self.lease.averaged:
            return None
        if layout.read_between is not None and layout.whole_from(live.step) != live.step:
            return Averaged(engine, layout.read_between(live.transforms[engine.name]), self.lease)
        switched = instance.updater.switched(live.updates)
        if not switched:
            return None
        return EvaluationPoint(switched, [leaf.shard for leaf in layout.leaves], self.lease)

    def own(self, instance: Instance, state: TrainState) -> TrainState:
        """Take a new engine and its first state."""
        self.built = instance
        return lease(state, self.lease)

    def adopt(self, state: TrainState) -> TrainState:
        """See `TrainStep.adopt`."""
        instance = self.instance
        check_state(state, "train_step.adopt(state)")
        refuse_averaged(self.lease, "train_step.adopt(state)")
        if state is self.lease.live:
            return state
        with SigintHeld():
            # from the first copy on the live state is half old, half new
            return lease(absorb(instance, state, self.donate_live), self.lease)

    def succeed(self, state: TrainState) -> TrainState:
        """Lease a state that shows this owner's own tensors. The previous state is donated."""
        with SigintHeld():
            self.donate_live()
            return lease(state, self.lease)

    def refuse_late(
        self, state: TrainState, kept: Callable[[list[str]], bool], updates: int, where: str
    ) -> None:
        """Raise ArgumentError if first slots would count more updates than were made of them.

        Args:
            state: the live state, into which other slots are restored.
            kept: whether a slot stays as it is, by its keys in `state.opt`.
            updates: the number of updates that is restored.
            where: the function that restores.
        """
        if updates and not int(state.updates):
            slots = self.instance.updater.slots.items()
            keys = {name: [name] if name in state.opt else name.split("/", 1) for name, _ in slots}
            names = [name for name, own in slots if any(kept([*keys[name], slot]) for slot in own)]
            self.instance.updater.refuse_late(names, updates, where)

    def refill(
        self,
        state: TrainState,
        fill: Callable[[TrainState], TrainState],
        *,
        complete: bool = True,
        fresh: bool = True,
    ) -> TrainState:
        """Let `fill` write into the tensors of the live state, and lease the state that it returns.

        If `fill` fails, the tensors may be part old, part new, so `state` is donated all the same.

        Args:
            state: the live state.
            fill: gets it with its current buffers.
            complete: whether all parameters and buffers get values.
            fresh: whether the state of an axis begins anew, since it gets none.

        Raises:
            CapabilityError: they don't, and the model was built without any.
            StaleStateError, UnleasedStateError: not the live state. `fill` was not called.
        """
        instance = self.instance
        lease_of(state, "restoring into a state")
        instance.check_filled(complete)
        instance.check_modules()
        target = following(state, trees=instance.trees(scale_of(state)))  # with the buffers of this moment
        self.donate_live()
        full = _filled(target, fill)
        instance.restored()
        if fresh and instance.engine.hooks.init is not None:
            own = {instance.engine.name: instance.engine.hooks.init()}
            full = attrs.evolve(full, transforms={**full.transforms, **own})
        return lease(full, self.lease)

    def donate_live(self) -> None:
        """Kill the live state: its tensors are about to change."""
        if self.lease.live is not None:
            donate(self.lease.live)
            self.lease.live = None

    def close(self) -> None:
        """Free everything: the live state is donated, gradients and hooks go, modules are released."""
        if self.built is not None and self.built.meter is not None:
            self.built.meter.close()
        self.forget()
        self.closed = True

    def forget(self) -> None:
        """Free the engine, so that another `init` can begin."""
        self.donate_live()
        instance, self.built = self.built, None
        if instance is not None:
            instance.close()


def _filled(state: TrainState, fill: Callable[[TrainState], TrainState]) -> TrainState:
    """The state that `fill` returns, in the tensors of the state. A runtime's are copied in and out."""
    if not any(isinstance(leaf, Remote) for leaf in tree.leaves(state.params)):
        return fill(state)
    full = fill(tree.map_tensors(lambda x: x.solid() if isinstance(x, Remote) else x, state))
    with torch.no_grad():
        for name in ("params", "opt"):
            targets, values = (tree.leaves(getattr(source, name)) for source in (state, full))
            for target, value in zip(targets, values, strict=True):
                if isinstance(target, Remote):
                    target.copy_(value)
    return attrs.evolve(full, params=state.params, opt=state.opt)
