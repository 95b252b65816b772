"""`train_step`: a step lowered on an engine, as a function `(state, batch) -> (state, metrics)`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar, cast

from fnaccel.collectives import gather_objects
from fnaccel.engine.engine import Engine
from fnaccel.engine.stop_request import Notice
from fnaccel.models.building import check_factories
from fnaccel.optim.several import OptimizerLike
from fnaccel.program.assemble import assemble
from fnaccel.program.compile_meter import Compilation
from fnaccel.program.doubled_row import check_loss, check_metrics
from fnaccel.program.launcher_flags import choose
from fnaccel.program.lent_models import Given
from fnaccel.program.look import LOOK, flops_of, look_at
from fnaccel.program.lower import Lowered
from fnaccel.program.model_notes import warn_of, with_notes
from fnaccel.program.plan import Plan, compare
from fnaccel.program.planned import mesh_of, planned
from fnaccel.program.probe import Probed, check_forward, fits, is_split, probe_first, short
from fnaccel.program.put_back import put_back
from fnaccel.program.state_owner import StateOwner
from fnaccel.program.undo import TorchModes, keeping_modes
from fnaccel.program.update import update
from fnaccel.state import TrainState, check_ema, lease_of
from fnaccel.step.html_table import table
from fnaccel.step.spec import Rng, Spec, loss_part
from fnaccel.step.step import StepLike
from fnaccel.strategies.distribute import Distributed
from fnaccel.strategies.runtime import Delegation
from fnaccel.tree import Tree
from fnaccel.world.every_rank import every_rank
from fnaccel.world.flags import take_for_steps
from fnaccel.world.progress_marks import within, within_step
from fnaccel.world.world import World, current

P = ParamSpec("P")
R = TypeVar("R")


class TrainStep:
    """A compiled `train_step(state, batch) -> (state, metrics)`. `fa.train_step` makes it.

    Attributes:
        mesh: the mesh of ranks. `train_step.mesh["batch"]` is an argument for `over=`.

    Example:
        >>> state, metrics = train_step(state, batch)
        >>> state.step, metrics["loss"].shape
        (1, torch.Size([]))
    """

    def __init__(self, spec: Spec, lowered: Lowered, plan: Plan, delegation: Delegation | None) -> None:
        mesh = spec.mesh
        self.mesh = mesh
        self._spec = spec
        self._delegation = delegation
        self._lowered = lowered
        self._name = f"TrainStep({plan.title}, {spec.strategy})"
        self._owner = StateOwner(plan, mesh, self._name)
        self._autocast_on = lowered.autocast_on(mesh.world.device)
        # the CALL transforms around the update
        self._call, self._layers = lowered.around(functools.partial(update, self._owner, self._check_first))
        if mesh.world.calls is not None:
            self._call = mesh.world.calls.wrap("train_step(state, batch)", self._call)

    def __repr__(self) -> str:
        return self._name

    def _repr_html_(self) -> str:
        live = self.live_state
        state = "no live state" if live is None else f"live state: step {live.step}, {live.data}"
        return table(repr(self), [(state,)]) + self.plan._repr_html_()  # pyright: ignore[reportPrivateUsage]

    @property
    def plan(self) -> Plan:
        """The plan of a call, in order. Print it. After `init` it has notes about the modules."""
        return self._owner.plan

    @property
    def engine(self) -> Engine:
        """The engine that runs it.

        Raises:
            OwnershipError: before `init`, or after `close`.
        """
        return self._owner.engine

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
        compiler, meter = self._lowered.settings.compiler, self._owner.meter
        if compiler is None:
            return None
        return Compilation(scope=compiler.scope) if meter is None else meter.found

    @property
    def notice(self) -> Notice | None:
        """The stop request of all ranks. `fa.preemption` sets it."""
        return self._owner.notice

    @notice.setter
    def notice(self, notice: Notice | None) -> None:
        self._owner.notice = notice

    @every_rank
    @within("init")
    def init(self, seed: int = 0, *, extras: Tree = None) -> TrainState:
        """Build the model, shard it, make all optimizer state, and lease the first state.

        Values are those of `torch.manual_seed(seed)` and the factory, on every strategy.

        Args:
            seed: root of initial values and of all later randomness.
            extras: any pytree of yours to keep in the state.

        Raises:
            PlanMismatchError: ranks hold different plans. Nothing was built.
            OwnershipError: the model is in use, or this train step holds a built module already.

        Example:
            >>> state = train_step.init(seed=0, extras={"best": 0.0})
            >>> state.extras
            {'best': 0.0}
        """
        if seed < 0:  # as torch.manual_seed does, so that states hold no sign
            seed += (1 << 64) - 1
        again = self._owner.initialised
        self._compare(self.plan, seed)
        if again:
            check_factories(self._spec.model, repr(self))
            self._owner.forget()
        instance = assemble(self._spec, self._lowered, self._name, seed, self._delegation)
        try:
            self._compare(with_notes(self.plan, instance.notes), seed)
        except BaseException:
            instance.close()
            raise
        if self.mesh.world.is_main:
            warn_of(instance.notes)
        instance.claim(self, self._owner.close)
        return self._owner.own(instance, instance.first_state(seed, extras))

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
        self, state: TrainState, batch: Tree, *, given: Mapping[str, TrainState] | None = None
    ) -> tuple[TrainState, dict[str, Any]]:
        """One update.

        Args:
            state: the live state, which is donated.
            batch: this rank's rows (any pytree), a `fa.data.Batch`, or a `fa.data.Window` of micro-batches.
            given: states of other train steps. The loss gets their models as its third argument.

        Returns:
            The next state, and metrics: `loss`, `weight`, `lr`, those of transforms, and aux.
            Tensors among them stay on the device until they are read.

        Raises:
            StaleStateError, UnleasedStateError: not the live state.
            CapabilityError: a model in `given` is cut over ranks that have different rows here.
            MicroBatchError, LossError: see there. The state stays live. At step 0 an `fa.Mean` is checked for
                a mean in the place of its total, and a cut model against the whole one: see `probe`.
            RankMismatchError: the batches of ranks have different positions, here or in the step before. Or
                ranks that share the rows of a batch have different rows in the first batch of an epoch.
            PeerLostError: another rank left, exited or made another call. The message names it.
        """
        return self._call(state, batch, given=given)

    def _check_first(self, batch: Tree, lent: Given | None) -> None:
        """Compare a cut model with the whole one, and totals with their weights, before the first update."""
        instance, step = self._owner.instance, self._spec.step
        if lent is None and not instance.probed and self.can_probe():  # a lent model may be cut as well
            probe_first(instance, self.probe, batch)
        with self._keeping(), within_step(0, self._name, shares=instance.shares):
            check_loss(instance, self._lowered, self._run_of(step.forward()), step.loss_fn, batch, lent)

    def _keeping(self) -> contextlib.AbstractContextManager[None]:
        """If the body is interrupted, grad mode and autocast are as before."""
        return keeping_modes(self._autocast_on)

    def check_totals(self, state: TrainState, fn: Callable[..., Any], batch: Tree) -> None:
        """See that each `fa.Mean` that a metric function returns holds a total and its weight, not a mean.

        The function gets the first row, and that row twice, once for each function. `fa.evaluate` does it.

        Args:
            state: the live state.
            fn: `fn(model, batch)`, as for `fa.evaluate`.
            batch: this rank's batch.

        Raises:
            LossError: a mean in the place of a total, or the other way round.

        Example:
            >>> rows = lambda model, batch: fa.Mean(len(batch["tokens"]), weight=1)
            >>> train_step.check_totals(state, rows, batch)
        """
        instance = self._owner.instance
        lease_of(state, LOOK, averaged=True)
        with self._keeping():
            check_metrics(instance, self._run_of(fn), fn, batch)

    def _run_of(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """A function of the model and a batch as the step runs it: its part, under its precision."""
        return self._lowered.settings.precision(self.as_loss(fn))

    @within("evaluate")
    def look(
        self, state: TrainState, fn: Callable[..., R], *args: Any, train: bool = False, whole: bool = False
    ) -> R:
        """`fn(model, *args)` without gradients, under the step's precision. Nothing is donated.

        Every rank must call it. Under `fsdp` each unit is gathered while its forward runs. A parameter that
        `fn` reads by itself is a part, unless `whole`.

        Args:
            state: the live state.
            fn: any function of the model, such as sampling.
            args: its further arguments.
            train: run each module in the mode in which it trains (dropout on).
            whole: gather copies of all parameters first, each in its own dtype, for `fn` to read:
                `train_step.look(state, lambda m: m.save_pretrained(d), whole=True)`.

        Raises:
            StaleStateError, UnleasedStateError: not the live state.
            CapabilityError: `fn` read the part of a sharded parameter, or `whole` under DeepSpeed.

        Example:
            >>> train_step.look(state, lambda model: float(loss_fn(model, batch).total) > 0)
            True
        """
        instance = self._owner.instance
        lease_of(state, LOOK, averaged=True)
        instance.check_modules()
        # without contexts, which would take a fifth of a small forward
        modes, evaluating = TorchModes(self._autocast_on), instance.modes.switch(training=train)
        try:
            return look_at(instance, self._lowered.settings.precision(fn), *args, whole=whole)
        except BaseException:
            modes.put_back()
            raise
        finally:
            instance.modes.switch_back(evaluating)

    def evaluating(self) -> contextlib.AbstractContextManager[None]:
        """In the body modules are in evaluation mode. Each module's own mode comes back at its end.

        `look` switches by itself. Around many calls of `look` this switches once.

        Example:
            >>> with train_step.evaluating():
            ...     totals = [train_step.look(state, loss_fn, batch).total for _ in range(3)]
        """
        return self._owner.instance.modes.during(training=False)

    @property
    def low_precision(self) -> bool:
        """Whether it computes in 16 bits or fewer."""
        precision = self._lowered.settings.precision
        return precision.autocast or self._lowered.settings.casts

    def flops(self, state: TrainState, batch: Tree) -> float:
        """Floating-point operations of one row, forward and backward, of this rank: three times a forward.

        Matrix products, convolutions and attention are counted while the first row of the batch runs. What
        `fa.remat` computes again is not counted.

        Args:
            state: the live state.
            batch: this rank's batch.

        Example:
            >>> train_step.flops(state, batch) > 0
            True
        """
        return 3 * flops_of(
            lambda row: self.look(state, self.as_loss(self._spec.step.forward()), row), short(batch)
        )

    def as_loss(self, fn: Callable[P, R]) -> Callable[P, R]:
        """`fn(model, batch, *args)`, called as the loss function is: on this rank's part of a whole batch.

        Under `fa.context` the part is some tokens of each row, and attention reaches the tokens of all ranks.
        On other strategies it is `fn` itself. `fa.evaluate` calls metric functions so.

        Args:
            fn: a function of the model and a batch, for `look`.

        Example:
            >>> loss = train_step.look(state, train_step.as_loss(loss_fn), batch)
        """
        part = self._lowered.part
        if part is None:
            return fn
        checked = part.checked(fn)

        def run(model: object, batch: Tree, *args: Any) -> Any:
            (data,), around = part.cut([batch])
            with around:
                return checked(model, data, *args)

        return cast(Callable[P, R], run)

    def can_probe(self) -> bool:
        """Whether `probe` has anything to compare, and half of the free memory holds the whole model."""
        layout = self._owner.engine.layout
        # otherwise the user's loss takes the parts of rows itself
        whole_rows = not self.mesh.partial_rows or self._lowered.part is not None
        return whole_rows and is_split(self.mesh) and fits(self._spec.model, layout.parameters, self.mesh)

    def probe(self, batch: Tree) -> Probed:
        """Compare the cut model's loss of one row with that of the whole model, gathered on every rank.

        For strategies with `fa.tensor` or `fa.context`, after `init`. The call of step 0 does it if
        `can_probe()`. Modules are in evaluation mode, nothing is differentiated, and the state stays.

        Args:
            batch: this rank's batch. Its first row is taken.

        Raises:
            CapabilityError: the two differ, on any rank. Names the usual causes.
            ArgumentError: a built module was given, which can't be built a second time.

        Example:
            >>> round(train_step.probe(batch).difference, 6)
            0.0
        """
        instance = self._owner.instance
        instance.probed = True
        settings, step, layout = self._lowered.settings, self._spec.step, instance.engine.layout
        modules, device = layout.modules, self.mesh.world.device
        instance.moving_buffers.begin()
        try:
            with (
                self._keeping(),
                instance.modes.during(training=False),
                put_back([step.loss_fn], modules, device),
            ):
                return check_forward(
                    settings.precision(step.forward()),
                    lambda fn, row: look_at(instance, self.as_loss(fn), row, whole=False),
                    self._spec.model,
                    layout.parameters,
                    layout.buffers,
                    self.mesh,
                    short(batch),
                    low=settings.precision.autocast or settings.casts or bool(self._lowered.modules),
                )
        finally:
            instance.moving_buffers.put_back()

    @contextlib.contextmanager
    def averaged(self, state: TrainState) -> Generator[None]:
        """In the body the model holds the averages of `with_ema`, and afterwards its own values again.

        Saving, copying, changing or lending the state raises in the body, since it holds averages.

        Raises:
            StaleStateError, UnleasedStateError: not the live state.
            AveragedError: inside of another `averaged`.
            ArgumentError: a step without `with_ema`.

        Example:
            >>> train_step = fa.config.apply(fa.config.Recipe(ema=0.99), loss_fn, GPT)
            >>> state, metrics = train_step(train_step.init(), batch)
            >>> with train_step.averaged(state):
            ...     loss = fa.evaluate(train_step, state, loss_fn, fa.shard(loader))
        """
        instance = self._owner.instance
        lease = lease_of(state, "train_step.averaged(state)")
        check_ema(state, "train_step.averaged(state)")
        instance.check_modules()
        exchange = instance.averages_in_place()
        with exchange:
            lease.averaged = True
            try:
                yield
            finally:
                lease.averaged = False

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
    frozen: str | Iterable[str] = (),
    rng: Rng = "fold",
    world: World | None = None,
) -> TrainStep:
    """Make a train step of a step and a strategy: validate, order, plan. Nothing is built before `init`.

    Args:
        step: a loss function `loss_fn(model, batch[, given])`, or a Step made of one by transforms.
        model: the result of `fa.distribute`. What it and `step` leave open, flags of the launcher fill in.
        optimizer: a description such as `fa.adamw(3e-4)`, a dict of them for a dict of models, or
            None for a model that is only looked at or lent.
        frozen: patterns of parameter names that are not trained.
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
