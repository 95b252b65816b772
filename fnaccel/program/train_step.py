"""`train_step`: a step lowered on an engine, as a function `(state, batch) -> (state, metrics)`."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import attrs

from fnaccel import _lazy
from fnaccel.collectives import gather_objects
from fnaccel.engine.engine import Engine
from fnaccel.engine.stop_request import Notice
from fnaccel.errors import ArgumentError, CapabilityError
from fnaccel.models.building import check_factories
from fnaccel.models.parameter import Select
from fnaccel.optim.several import OptimizerLike
from fnaccel.program.assemble import assemble
from fnaccel.program.compile_meter import Compilation
from fnaccel.program.launcher_flags import choose
from fnaccel.program.lent_models import LentModels
from fnaccel.program.lower import Lowered
from fnaccel.program.model_access import ModelAccess
from fnaccel.program.model_notes import parameter_count, warn_of, with_notes
from fnaccel.program.plan import Plan, compare
from fnaccel.program.planned import mesh_of, planned
from fnaccel.program.probe import probe_first
from fnaccel.program.state_owner import StateOwner, check_outside_of_func
from fnaccel.program.update import update
from fnaccel.program.value_and_grad import GRADIENT, gradient
from fnaccel.state import TrainState
from fnaccel.step.html_table import table
from fnaccel.step.spec import Rng, Spec, loss_part
from fnaccel.step.step import StepLike
from fnaccel.strategies.distribute import Distributed
from fnaccel.strategies.runtime import Delegation
from fnaccel.tree import Tree
from fnaccel.world._torch import limit_collectives
from fnaccel.world.every_rank import every_rank, outside_inference
from fnaccel.world.flags import take_for_steps
from fnaccel.world.mesh import resolve
from fnaccel.world.progress_marks import within
from fnaccel.world.undo import SigintHeld
from fnaccel.world.world import World, current

if TYPE_CHECKING:
    from fnaccel.program.parameter_layout import Summary


class TrainStep(ModelAccess):
    """A compiled `train_step(state, batch) -> (state, metrics)`. `fa.train_step` makes it.

    Attributes:
        mesh: the mesh of ranks. `train_step.mesh["batch"]` is an argument for `over=`.
        gradient: what `fa.value_and_grad(train_step)` returns.

    Example:
        >>> state, metrics = train_step(state, batch)
        >>> state.step, metrics["loss"].shape
        (1, torch.Size([]))
    """

    made_of_step: ClassVar[bool] = True

    def __init__(self, spec: Spec, lowered: Lowered, plan: Plan, delegation: Delegation | None) -> None:
        mesh = spec.mesh
        self._delegation = delegation
        self._name = f"TrainStep({plan.title}, {spec.strategy})"
        super().__init__(spec, lowered, StateOwner(plan, mesh, self._name))
        # the CALL transforms around the update
        self._call, self._layers = lowered.around(functools.partial(update, self._owner, self._check_first))
        self.gradient: ValueAndGrad = functools.partial(gradient, self._owner, self._check_first)
        if mesh.world.calls is not None:
            self.gradient = mesh.world.calls.wrap(GRADIENT, self.gradient)
            self._call = mesh.world.calls.wrap("train_step(state, batch)", self._call)

    def __repr__(self) -> str:
        return self._name

    def _repr_html_(self) -> str:
        live = self.live_state
        state = "no live state" if live is None else f"live state: step {live.step}, {live.data}"
        return table(repr(self), [(state,)]) + self.plan._repr_html_()  # pyright: ignore[reportPrivateUsage]

    @property
    def plan(self) -> Plan:
        """The plan of a call, in order. Print it. `init` adds notes about the modules, and counts parameters.

        So does the first update if the graph of the loss does not show whether its total is one, and one of
        a bare loss whose ranks or micro-batches differ in rows.
        """
        plan, check = self._owner.plan, self._lowered.loss.check
        if self._owner.built is not None:
            plan = with_notes(plan, [parameter_count(self._owner.built.engine.layout)])
        notes = filter(None, (check.note, check.uneven))
        return attrs.evolve(plan, notes=(*plan.notes, *notes))

    def summary(self, depth: int = 2) -> Summary:
        """The layers with their shapes and parameters: all, trained, on this rank. And its memory.

        No value is read, and other ranks need not call it. `fa.simulate` shows it on any number of ranks, and
        `fa.estimate.training` counts activations.

        Args:
            depth: how many levels of layers are shown. A layer counts those in it.

        Raises:
            OwnershipError: before `init`, or after `close`.

        Example:
            >>> state = train_step.init()
            >>> print(train_step.summary(depth=1))
            local(): 9,488 parameters
            ...
        """
        return _lazy.load("fnaccel.program.parameter_layout").summary(self, depth)

    @property
    def spec(self) -> Spec:
        """The description that it was made of."""
        return self._spec

    @property
    def engine(self) -> Engine:
        """The engine that runs it.

        Raises:
            OwnershipError: before `init`, or after `close`.
        """
        return self._owner.instance.engine

    @property
    def live_state(self) -> TrainState | None:
        """The state that the next call takes. None before `init`, or if its tensors are not consistent.

        After a Ctrl-C go on from it: `fa.scan(train_step, train_step.live_state, shards)`. It is None after
        an error in the middle of an update: then `adopt(snapshot)` or `fa.resume_or_init` lead back.
        """
        return self._owner.live_state

    @property
    def compilation(self) -> Compilation | None:
        """The compilation of this train step so far. None without `fa.compile`."""
        compiler = self._lowered.settings.compiler
        if compiler is None:
            return None
        meter = None if self._owner.built is None else self._owner.built.meter
        return Compilation(scope=compiler.scope) if meter is None else meter.found

    @property
    def notice(self) -> Notice | None:
        """The stop request of all ranks. `fa.preemption` sets it."""
        return self._owner.notice

    @notice.setter
    def notice(self, notice: Notice | None) -> None:
        self._owner.notice = notice

    @every_rank
    @outside_inference
    @within("init")
    def init(self, seed: int = 0, *, extras: Tree = None) -> TrainState:
        """Build the model, shard it, make all optimizer state, and lease the first state.

        Values are those of `torch.manual_seed(seed)` and the factory, on every strategy.

        Args:
            seed: root of initial values and of all later randomness.
            extras: any pytree of yours to keep in the state, dataclasses and attrs classes in it too.

        Raises:
            AxisProductError: `fa.local()` on several ranks, where `fa.pure` alone takes this train step.
            NotSerializableError: `extras` holds what no checkpoint can. Nothing was built.
            PlanMismatchError: ranks hold different plans. Nothing was built.
            CapabilityError: inside of `torch.func` or `torch.compile`, as a call of the train step.
            OwnershipError: the model is in use, or this train step holds a built module already.

        Example:
            >>> state = train_step.init(seed=0, extras={"best": 0.0})
            >>> state.extras
            {'best': 0.0}
        """
        check_outside_of_func("train_step.init")
        resolve(self._spec.strategy.degrees(), self.mesh.world.size, str(self._spec.strategy))
        if seed < 0:  # as torch.manual_seed does, so that states hold no sign
            seed += (1 << 64) - 1
        if extras is not None:  # the check learns their classes as well
            saving = _lazy.load("fnaccel.checkpoint.saving")
            saving.check_extras(extras, "train_step.init(extras=)", self.mesh.world)
        again = self._owner.initialised
        self._compare(self._owner.plan, seed)
        if again:
            check_factories(self._spec.model, repr(self))
            self._owner.forget()
        instance = assemble(self._spec, self._lowered, self._name, seed, self._delegation)
        limit_collectives()
        try:
            self._compare(with_notes(self._owner.plan, instance.learned.notes), seed)
        except BaseException:
            instance.close()
            raise
        if self.mesh.world.is_main:
            warn_of(instance.learned.notes)
        state = instance.first_state(seed, extras)
        with SigintHeld():  # modules that are claimed and not owned would be locked for good
            try:
                instance.claim(self, self._owner.close)
                return self._owner.own(instance, state)
            except BaseException:  # a second SIGINT, which is not held
                if self._owner.live_state is None:
                    self._owner.built = instance
                    self._owner.forget()
                raise

    def _compare(self, plan: Plan, seed: int) -> None:
        """Raise PlanMismatchError if ranks hold different plans."""
        world = self.mesh.world
        if world.size > 1:
            compare(plan, seed, functools.partial(gather_objects, world=world))

    def adopt(self, state: TrainState) -> TrainState:
        """Copy a state's values into the parameters that are trained, and lease the result.

        Takes any state of the same architecture: made by `evolve` or a tree map, or a snapshot.
        The state that was live before is donated.

        Raises:
            TreeMismatchError: every path, shape, dtype and layout that differs. Nothing was changed.
            ArgumentError: no state, or a count in it is no whole number (a step of 4.5). Nothing was changed.
            StaleStateError: `state` was donated.
            AveragedError: inside of `averaged`.

        Example:
            >>> params = {name: torch.zeros_like(value) for name, value in state.params.items()}
            >>> state = train_step.adopt(attrs.evolve(state, params=params))
        """
        return self._owner.adopt(state)

    def __call__(
        self, state: TrainState, batch: Tree, *, given: Mapping[str, Any] | None = None
    ) -> tuple[TrainState, dict[str, Any]]:
        """One update.

        Args:
            state: the live state, which is donated.
            batch: this rank's rows (any pytree), a `fa.data.Batch`, or a `fa.data.Window` of micro-batches.
            given: by name, states of other train steps, numbers, tensors and schedules. The loss gets a dict
                as its third argument, with the models of states, and with 0-d tensors for numbers and for
                values of schedules, which are called with `state.updates`. New values compile nothing again.

        Returns:
            The next state, and metrics: `loss`, `weight`, `lr`, those of transforms, and aux.
            Tensors among them stay on the device until they are read.

        Raises:
            StaleStateError, UnleasedStateError: not the live state.
            CapabilityError: a model in `given` is cut over ranks that have different rows here. Or inside of
                `torch.func` or `torch.compile`, which take `fa.pure(train_step)`.
            MicroBatchError, LossError: see there. The state stays live. At step 0 the graph of an `fa.Mean`
                is read for a mean in the place of its total, and a cut model is compared with the whole one:
                see `probe`.
            RankMismatchError: the batches of ranks have different positions, here or in the step before. Or
                ranks that share the rows of a batch have different rows in the first batch of an epoch.
            PeerLostError: another rank left, exited or made another call. The message names it.
        """
        return self._call(state, batch, given=given)

    def _check_first(self, batch: Tree, lent: LentModels | None) -> None:
        """Compare a cut model with the whole one before the first update."""
        learned = self._owner.instance.learned
        if lent is None and not learned.probed and self.can_probe():  # a lent model may be cut as well
            probe_first(learned, self.probe, batch, self.mesh)

    def settle(self) -> None:
        """Let transforms act on the last steps, as they would in the next call. `fa.scan` does so at its end.

        Raises:
            LossError: `fa.transforms.on_spike(do="stop")` found a spike in the last step.

        Example:
            >>> train_step.settle()
        """
        for layer in self._layers:
            layer.settle()

    def close_with(self, world: World) -> None:
        """Close when a world is left, also if only a state of this train step is still held."""
        world.close_with(self._owner)

    def close(self) -> None:
        """Free everything: the live state is donated, gradients and hooks go, modules are released."""
        self._owner.close()


def train_step(
    step: StepLike,
    *,
    model: Distributed,
    optimizer: OptimizerLike | None,
    frozen: Select | Iterable[Select] = (),
    rng: Rng = "fold",
    world: World | None = None,
) -> TrainStep:
    """Make a train step of a step and a strategy: validate, order, plan. Nothing is built before `init`.

    Args:
        step: a loss function `loss_fn(model, batch[, given])`, or a Step made of one by transforms.
        model: the result of `fa.distribute`. What it and `step` leave open, flags of the launcher fill in.
        optimizer: a description such as `fa.adamw(3e-4)`, or a dict of them for a dict of models. A model
            with None there, or that is left out, is frozen, and runs in evaluation mode. None for a model
            that is only looked at or lent.
        frozen: what is not trained: patterns of parameter names, or functions `(name, parameter) -> bool`.
        rng: `"fold"` seeds each micro-batch from (seed, step, micro-batch, rank). `"stream"` leaves
            PyTorch's generators alone.
        world: the world. By default the one that `fa.start()` set.

    Raises:
        AxisProductError: the strategy's degrees don't make up the ranks.
        CapabilityError: a transform that the strategy can't carry out.
        FlagMismatchError, UnusedOverrideError: the launcher was told something else, or what no step can use.
        ArgumentError: a model that was not distributed, or no optimizer description.

    Example:
        >>> model = fa.distribute(GPT, fa.local())
        >>> train_step = fa.train_step(fa.clip_norm(loss_fn, 1.0), model=model, optimizer=fa.adamw(3e-4))
        >>> state = train_step.init(seed=0)
        >>> state, metrics = train_step(state, batch)
        >>> sorted(metrics)
        ['grad_norm', 'loss', 'lr', 'weight']
    """
    joined = current(world)
    chosen = choose(step, model, joined.size, take_for_steps(joined.flags), trains=optimizer is not None)
    made = planned(chosen, optimizer, mesh_of(chosen.strategy, joined), frozen=frozen, rng=rng)
    result = TrainStep(made.spec, made.lowered(loss_part(made.spec)), made.plan, made.delegation)
    result.close_with(joined)
    return result


class ValueAndGrad(Protocol):
    """`fn(state, batch, *, given=None) -> (metrics, grads)`."""

    def __call__(
        self, state: TrainState, batch: Tree, *, given: Mapping[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Metrics and gradients at a live state."""
        ...


def value_and_grad(train_step: TrainStep) -> ValueAndGrad:
    """The gradient of a step as a value: `metrics, grads = fa.value_and_grad(train_step)(state, batch)`.

    It is the gradient that the next update would have: of all micro-batches and ranks, divided by the global
    weight, without the loss scale, before transforms of gradients such as `fa.clip_norm`. The state stays
    live, and nothing moves: buffers, random streams and the loss scale are as before, so the next step is the
    same to the bit as one without this call. Every rank calls it.

    Args:
        train_step: a train step with an optimizer.

    Returns:
        `fn(state, batch, *, given=None)`, with the arguments of the train step. It returns the metrics
        `loss`, `weight` and those of aux, and the gradients, laid out as the trained part of `state.params`:
        by name, DTensors if sharded, zeros for a parameter that the loss does not reach.

    Raises:
        CapabilityError: a transform hides the gradient, as the noise of `fa.per_example` does.
        As a call of the train step, and CapabilityError in a call under a runtime (deepspeed, xla).

    Example:
        >>> train_step = make(loss_fn)
        >>> state = train_step.init()
        >>> metrics, grads = fa.value_and_grad(train_step)(state, batch)
        >>> sorted(metrics), grads.keys() == state.params.keys()
        (['loss', 'weight'], True)
    """
    if not isinstance(train_step, TrainStep):  # pyright: ignore[reportUnnecessaryIsInstance] - the user's
        raise ArgumentError(
            f"fa.value_and_grad takes a train step, not {type(train_step).__name__}",
            where="fa.value_and_grad(train_step)",
            fix="train_step = fa.train_step(loss_fn, model=..., optimizer=...) first. Inside of a loss: "
            "torch.func.grad of fa.call",
        )
    for transform in train_step.spec.step.transforms:
        if getattr(transform.apply, "hides", False):
            raise CapabilityError(
                f"{transform.name} comes after the gradient, which would show what it hides",
                where="fa.value_and_grad(train_step)",
                fix="let the train step make the update; or leave the noise out, if the gradient may be seen",
            )
    return train_step.gradient
