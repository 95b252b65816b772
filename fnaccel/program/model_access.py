"""`ModelAccess`: the calls of a train step that do not train: looks, averages in place, the first checks."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch

from fnaccel.data.batch import Batch
from fnaccel.data.cut import rows_of
from fnaccel.data.micro_batches import MicroBatch
from fnaccel.engine.update_facts import UpdateFacts
from fnaccel.models.moving_buffers import passes_put_back
from fnaccel.program.doubled_row import OF_WEIGHT_FN, check_doubled
from fnaccel.program.look import LOOK, flops_of, look_at
from fnaccel.program.lower import Lowered
from fnaccel.program.parameter_averages import Averaged
from fnaccel.program.probe import Probed, check_forward, fits, is_split, short
from fnaccel.program.state_owner import StateOwner
from fnaccel.state import TrainState, check_ema, lease_of
from fnaccel.step.loss import Mean, read_loss
from fnaccel.step.loss_info import LossInfo, takes_info
from fnaccel.step.spec import Spec
from fnaccel.tree import Tree
from fnaccel.world.progress_marks import within
from fnaccel.world.undo import StreamStates, TorchSettings

P = ParamSpec("P")
R = TypeVar("R")


class ModelAccess:
    """The calls of a `TrainStep` that do not train. The live state stays as it is.

    Args:
        spec, lowered: the step.
        owner: of its state.

    Attributes:
        mesh: the mesh of ranks. `train_step.mesh["batch"]` is an argument for `over=`.
    """

    def __init__(self, spec: Spec, lowered: Lowered, owner: StateOwner) -> None:
        self.mesh = spec.mesh
        self._spec = spec
        self._lowered = lowered
        self._owner = owner
        self._autocast_device = lowered.autocast_device(spec.mesh.world.device)

    @within("evaluate")
    def look(
        self, state: TrainState, fn: Callable[..., R], *args: Any, train: bool = False, whole: bool = False
    ) -> R:
        """`fn(model, *args)` without gradients, under the step's precision. Nothing is donated.

        Every rank must call it. Under `fsdp` each unit is gathered while its forward runs. A parameter that
        `fn` reads by itself is a part, unless `whole`.

        Args:
            state: the live state.
            fn: any function of the model, such as sampling. A parameter `info` gets `loss_info(state)`.
            args: its further arguments.
            train: run each module in the mode in which it trains (dropout on), with the values that are
                trained. Else the anchor is read between two averages of `fa.diloco`, on all replicas.
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
        point = None if train else self._owner.evaluation_point()
        if point is not None:
            with point:
                return self.look(state, fn, *args, whole=whole)
        instance.check_modules()
        if takes_info(fn, 1 + len(args)):
            fn = functools.partial(fn, info=self.loss_info(state))
        # without contexts, which would take a fifth of a small forward
        settings = TorchSettings(self._autocast_device)
        evaluating = instance.module_modes.switch(training=train)
        try:
            return look_at(instance, self._lowered.settings.precision(fn), *args, whole=whole)
        except BaseException:
            settings.put_back()
            raise
        finally:
            instance.module_modes.switch_back(evaluating)

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

        @functools.wraps(fn)
        def run(model: object, batch: Tree, *args: Any, **info: Any) -> Any:
            (data,), around = part.cut([batch])
            with around:
                return checked(model, data, *args, **info)

        return cast(Callable[P, R], run)

    def loss_info(self, state: TrainState, batch: Tree = None) -> LossInfo:
        """The `info` that a loss function gets at a state: see `fa.LossInfo`.

        `look` gives a function with `info` one without rows. With rows:
        `train_step.look(state, functools.partial(fn, info=train_step.loss_info(state, batch)), batch.data)`.

        Args:
            state: any state that was not donated.
            batch: of `fa.shard`, for `info.rows`.

        Example:
            >>> train_step.loss_info(state, next(iter(fa.shard(loader)))).rows
            tensor([0, 1, 2, 3])
        """
        facts = self._facts(state)
        if not isinstance(batch, Batch):
            return facts.at(None)
        return facts.of(MicroBatch(batch.data, batch.valid, batch.first))

    def _facts(self, state: TrainState) -> UpdateFacts:
        device = self.mesh.world.device
        return UpdateFacts(state.rng.root, state.step, state.updates, state.extras, device)

    def _told(self, fn: Callable[..., Any], state: TrainState | None) -> Callable[..., Any]:
        """A loss or metric function for batches of a check: equal rows have the same place, 0."""
        if state is None or not takes_info(fn):
            return fn
        facts = self._facts(state)

        def told(model: object, batch: Tree, *given: Any) -> Any:
            rows = torch.zeros(rows_of(batch), dtype=torch.int64, device=self.mesh.world.device)
            return fn(model, batch, *given, info=facts.at(rows))

        return told

    def _forward(self, state: TrainState | None) -> Callable[..., Any]:
        """The loss function under its FORWARD transforms, for batches of a check."""
        step = self._spec.step
        return step.forward(self._told(step.loss_fn, state))

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
            lambda row: self.look(state, self.as_loss(self._forward(state)), row), short(batch)
        )

    @property
    def low_precision(self) -> bool:
        """Whether it computes in 16 bits or fewer."""
        precision = self._lowered.settings.precision
        return precision.autocast or self._lowered.settings.casts

    def evaluating(self) -> contextlib.AbstractContextManager[None]:
        """In the body modules are in evaluation mode. Each module's own mode comes back at its end.

        `look` switches by itself. Around many calls of `look` this switches once.

        Example:
            >>> with train_step.evaluating():
            ...     totals = [train_step.look(state, loss_fn, batch).total for _ in range(3)]
        """
        return self._owner.instance.module_modes.during(training=False)

    def averaged(self, state: TrainState) -> contextlib.AbstractContextManager[None]:
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
        return Averaged(instance.engine, instance.engine.averages, lease, instance.averaged_buffers())

    def check_totals(self, state: TrainState, fn: Callable[..., Any], batch: Tree) -> None:
        """See that each `fa.Mean` that a function returns holds a total and its weight, not a mean.

        The function gets the first row, and that row twice: a sum doubles, a mean stays. It is called two to
        four times, in evaluation mode. Afterwards buffers, modes and torch's random streams are as before.
        What else it changes, such as a list or another model's optimizer, stays changed.

        Args:
            state: the live state.
            fn: the loss function, or a metric function as for `fa.evaluate`.
            batch: this rank's batch.

        Raises:
            LossError: a mean in the place of a total, or the other way round.

        Example:
            >>> rows = lambda model, batch: fa.Mean(len(batch["tokens"]), weight=1)
            >>> train_step.check_totals(state, rows, batch)
        """
        instance, step = self._owner.instance, self._spec.step
        lease_of(state, LOOK, averaged=True)
        is_loss, weight_fn = fn is step.loss_fn, step.settings.weight_fn

        def parts(output: Any, rows: Tree) -> Any:
            if is_loss and weight_fn is not None:
                loss = read_loss(output, "train_step.check_totals")
                return {OF_WEIGHT_FN: Mean(loss.total, weight_fn(rows)), "aux": loss.aux}
            return {"the result": output, "aux": output.aux} if isinstance(output, Mean) else output

        told = self._forward(state) if is_loss else self._told(fn, state)
        run = self._lowered.settings.precision(self.as_loss(told))
        with TorchSettings(self._autocast_device), within("evaluate"):
            check_doubled(instance, run, fn, batch, parts)

    def can_probe(self) -> bool:
        """Whether `probe` has anything to compare, and half of the free memory holds the whole model."""
        layout = self._owner.instance.engine.layout
        # otherwise the user's loss takes the parts of rows itself
        whole_rows = not self.mesh.partial_rows or self._lowered.part is not None
        return whole_rows and is_split(self.mesh) and fits(self._spec.model, layout.parameters, self.mesh)

    def probe(self, batch: Tree) -> Probed:
        """Compare the cut model's loss of one row with that of the whole model, gathered on every rank.

        For strategies with `fa.tensor` or `fa.context`, after `init`. The call of step 0 does it if
        `can_probe()`, and the plan says so. Modules are in evaluation mode, nothing is differentiated, and
        the state stays. What the loss changes beside buffers and torch's random streams stays changed.

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
        instance.learned.probed = True
        settings, layout = self._lowered.settings, instance.engine.layout
        with (
            TorchSettings(self._autocast_device),
            instance.module_modes.during(training=False),
            passes_put_back(layout.modules, StreamStates.of(self.mesh.world.device)),
        ):
            return check_forward(
                settings.precision(self._forward(self._owner.live_state)),
                lambda fn, row: look_at(instance, self.as_loss(fn), row, whole=False),
                self._spec.model,
                layout.parameters,
                layout.buffers,
                self.mesh,
                short(batch),
                low=settings.precision.autocast or settings.casts or bool(self._lowered.modules),
            )
