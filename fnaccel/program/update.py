"""One update of a live state, eager or captured. `program` checks who may call it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Generator, Sequence
from typing import Any

import torch

from fnaccel import _torch, tree
from fnaccel.data.batch import Batch
from fnaccel.engine.eager import Call, Micro, gradients, undo
from fnaccel.engine.gradients import Gradients
from fnaccel.engine.same_position import SamePosition, same_position
from fnaccel.engine.skipped_updates import SkippedUpdates
from fnaccel.engine.stop_request import Notice
from fnaccel.engine.user_draws import drawing
from fnaccel.errors import ArgumentError
from fnaccel.optim import kernels
from fnaccel.program.autocast import torch_modes
from fnaccel.program.compile_meter import Compilation, Meter
from fnaccel.program.lent_models import Given
from fnaccel.program.lower import Lowered
from fnaccel.program.owned import Owned
from fnaccel.seeing.memory import explain_out_of_memory
from fnaccel.state import Lease, Position, TrainState, donate, is_stale, lease, scale_of, state_of
from fnaccel.step.checked_metrics import checked
from fnaccel.step.loss import Scalar, idle
from fnaccel.step.spec import Rng
from fnaccel.step.step import Info
from fnaccel.tree import Tree
from fnaccel.world.interrupts import SigintHeld
from fnaccel.world.progress_marks import NOW, enter, enter_step, leave_step, within
from fnaccel.world.random_streams import generators_of

_NOTHING = contextlib.nullcontext()


class Stepper:
    """Carries out the updates of one train step.

    Args:
        lowered: the step, ready for an engine.
        rng: the source of random numbers.
        where: the name of the train step, for messages.
        device: its compute device.
        speaks: whether this rank warns.
        shares: whether other ranks take part in each update.
    """

    def __init__(
        self,
        lowered: Lowered,
        rng: Rng,
        where: str,
        device: torch.device,
        *,
        speaks: bool = True,
        shares: bool = False,
    ) -> None:
        self._lowered = lowered
        self._rng = rng
        self._where = where
        self._speaks = speaks
        self._shares = shares
        self._cast_on = lowered.autocast_on(device)
        # the library's own hooks draw nothing
        self._library_only = _NOTHING if lowered.own_hooks else None
        self._may_leave_out = bool(lowered.tail.users) and lowered.tail.skips
        self._meter: Meter | None = None
        self.reset()

    def reset(self) -> None:
        """Forget compiled code, if the modules are built again."""
        settings = self._lowered.settings
        self._meter = None if settings.compiler is None else Meter(settings.compiler, self._where)
        self._skips = SkippedUpdates(settings.max_skipped, speaks=self._speaks)
        self._place: SamePosition | None = None
        self._moved = False
        # False while a step runs, and after a step that did not reach its end
        self._clean = True

    @property
    def compilation(self) -> Compilation | None:
        """The compilations so far. None without `fa.compile`."""
        return None if self._meter is None else self._meter.found

    @contextlib.contextmanager
    def checking(self) -> Generator[None]:
        """Mark the body, a check, as a part of step 0 for those who watch this rank."""
        step, of, first, shares = NOW.step, NOW.of, NOW.first, NOW.shares
        enter_step(0, self._where, first=True, shares=self._shares)
        with within("forward"):
            try:
                yield
            finally:
                enter_step(step, of, first=first, shares=shares)

    def move(
        self,
        owned: Owned,
        state: TrainState,
        micros: Sequence[Micro],
        batch: Batch | None,
        models: Given | None,
        notice: Notice | None,
        to: Lease,
        around: contextlib.AbstractContextManager[Any] = _NOTHING,
    ) -> tuple[TrainState, dict[str, Any]]:
        """The next state, leased in the place of `state`, and the metrics.

        `state` is donated before the first change of a parameter. A failure before that leaves it live, and
        its buffers as they were. From there on a Ctrl-C waits until the next state is leased. Everything
        before an eager update runs in the context `around`.
        """
        meter = self._meter
        if meter is not None:
            meter.check()
        self._skips.check()
        if self._shares and not self._moved:
            self._place = same_position(owned.engine.layout.mesh)
        position = state.data
        if batch is not None:
            position, owned.source = batch.position, batch.source
        if self._place is not None:
            self._place.begin(None if batch is None else position)
        enter_step(state.step, self._where, first=not self._moved, shares=self._shares)
        if not self._clean:
            undo(owned.engine)
        self._clean = False
        modes = torch_modes(self._cast_on)
        owned.modes.train()
        owned.gradient_hooks.look_again()
        if owned.gradient_hooks.present:
            self._check_hooks(owned, len(micros))
        before = _Before(state, copies=self._may_leave_out)
        buffers = owned.moving_buffers
        buffers.begin()
        try:
            if owned.whole is None or not self._moved:  # a first call may compile for minutes
                with around:
                    update = self._until_update(owned, state, micros, models, notice, before)
                with SigintHeld():
                    moved = self._finish(owned, state, before, update, position, to)
            else:
                with SigintHeld():
                    with around:
                        update = self._until_update(owned, state, micros, models, notice, before)
                    moved = self._finish(owned, state, before, update, position, to)
        except BaseException as error:
            explain_out_of_memory(error, owned.named_tensors)  # of the update
            leave_step(state.step)
            modes.put_back()
            if not is_stale(state) and (not buffers.put_back() or before.own_changed()):
                donate(state)
            raise
        leave_step(before.step + 1)
        return moved

    def _until_update(
        self,
        owned: Owned,
        state: TrainState,
        micros: Sequence[Micro],
        models: Given | None,
        notice: Notice | None,
        before: _Before,
    ) -> _Update:
        """Run everything before an eager update. A captured step includes the update."""
        meter = self._meter
        call = self._call(owned, state, models, notice)
        watched = _NOTHING if meter is None else meter.watch([m.data for m in micros])
        frozen = _NOTHING if models is None else models.frozen()
        # a schedule of the user's may raise
        reported, rates = owned.updater.rates(before.updates)
        with frozen, watched:
            if owned.whole is not None:
                update = self._captured(owned, state, micros, call, reported, rates)
            else:
                grads, report = gradients(owned.engine, self._lowered.loss, micros, call)
                update = _Update(report.finish(), grads, reported, rates)
        enter("update")
        update.idle = idle(update.metrics["weight"])
        if update.grads is not None and update.idle is not True:
            if owned.updater.starts_later:
                owned.updater.hold(update.grads)
            update.info = _info(state, owned, update.metrics)
            # GRADS hooks
            with self._library_only or self._drawing(owned, before.root, before.step):
                self._lowered.tail.change(update.grads, before.transforms, update.info)
        return update

    def _finish(
        self,
        owned: Owned,
        state: TrainState,
        before: _Before,
        update: _Update,
        position: Position,
        to: Lease,
    ) -> tuple[TrainState, dict[str, Any]]:
        """Update the parameters, unless a captured step has. Returns the next state."""
        metrics, skip = update.metrics, update.skip
        donate(state)
        if update.idle is True:
            undo(owned.engine)
            metrics.update(update.reported)
        elif update.grads is not None:
            skip = self._update(owned, before, update)
        self._clean = True
        if self._meter is not None:
            metrics["recompilations"] = self._meter.found.recompilations
        owned.moving_buffers.end()
        if owned.shared_buffers is not None:
            owned.shared_buffers.share(before.step)
        if before.scale is not None:
            metrics["loss_scale"] = before.scale["scale"].clone()
            if update.idle is not True:
                owned.move_scale(before.scale, skip, metrics["weight"])
        if owned.engine.hooks.end is not None:
            owned.engine.hooks.end()
        following = state_of(
            owned.trees(before.scale),
            step=before.step + 1,
            updates=_counted(before.updates, update.idle, skip),
            rng=state.rng,
            data=position,
            extras=before.extras,
            transforms=before.transforms,
        )
        lease(following, to)
        self._moved = True
        if update.idle is True:
            metrics["skipped"] = 1.0
        elif skip is not None:
            metrics["skipped"] = skip
            self._skips.put(skip)
        return following, checked(metrics, update.idle)

    def _call(self, owned: Owned, state: TrainState, models: Given | None, notice: Notice | None) -> Call:
        scale = scale_of(state)
        return Call(
            root=None if self._rng == "stream" else state.rng.root,
            step=state.step,
            scale=None if scale is None else scale["scale"],
            last_weight=None if scale is None else scale["weight"],
            given=models,
            notice=notice,
            place=self._place,
            explain=functools.partial(explain_out_of_memory, named=owned.named_tensors),
            hooked=owned.gradient_hooks.present,
        )

    def _check_hooks(self, owned: Owned, micro_batches: int) -> None:
        """Warn of backward hooks that see gradients of a total."""
        if self._speaks and micro_batches > 1 and self._lowered.loss.weight_fn is None:
            owned.gradient_hooks.warn()

    def _captured(
        self,
        owned: Owned,
        state: TrainState,
        micros: Sequence[Micro],
        call: Call,
        reported: dict[str, Any],
        rates: list[list[Any]],
    ) -> _Update:
        """Run the compiled programs. `grads` is None if the update is part of them."""
        whole: Any = owned.whole
        updater = owned.updater
        enter("captured step")
        tensors, number = updater.as_tensors(rates), updater.number(state.updates)
        updates_before = kernels.begun()
        try:
            try:
                result = whole.run(micros, call, tensors, number)
            finally:
                if kernels.begun() != updates_before:
                    donate(state)
        finally:
            if kernels.begun() != updates_before:  # an interrupt came in the middle
                donate(state)
        if result.grads is None:
            result.metrics.update(reported)
        return _Update(result.metrics, result.grads, reported, rates, result.skip)

    def _update(self, owned: Owned, before: _Before, update: _Update) -> Any:
        """Update the parameters eagerly, and run the UPDATE hooks. Returns whether the update was skipped."""
        grads, info = update.grads, update.info
        assert grads is not None
        assert info is not None
        if isinstance(update.idle, torch.Tensor):
            grads.idle = update.idle
        update.metrics.update(owned.updater.apply(grads, update.rates, before.updates, update.reported))
        owned.engine.clear()
        tail = self._lowered.tail
        with self._library_only or self._drawing(owned, before.root, before.step):
            skip = tail.finish(owned.engine, grads, before.transforms, info)
        if before.first and (left_out := grads.left_out()) is not None:
            before.check_unchanged()
            tail.stay(before.first, before.transforms, left_out)
        return skip

    def _drawing(self, owned: Owned, root: int, step: int) -> contextlib.AbstractContextManager[None]:
        """A context in which functions of the user draw random numbers that are equal on all ranks."""
        world = owned.engine.layout.mesh.world
        seed = None if self._rng == "stream" else root
        return drawing(seed, step, generators_of(world.device), world.size)


_WHOLE = (torch.Tensor, float, int)


def _info(state: TrainState, owned: Owned, metrics: dict[str, Any]) -> Info:
    """What hooks are told of a call."""

    def record(name: str, value: Tree) -> None:
        # ranks hold parts of sharded values
        metrics[name] = value if type(value) in _WHOLE else tree.map(tree.whole, value)

    return Info(step=state.step, updates=state.updates, params=owned.params, record=record, metrics=metrics)


def _counted(updates: Scalar, left_out: Scalar | None, skip: Scalar | None) -> Any:
    """The number of updates after a step: a tensor if the device decides whether one is left out."""
    if left_out is True:
        return updates
    if skip is None:
        return updates + 1
    return updates + (1.0 - skip if isinstance(updates, torch.Tensor) else int(not skip))


class _Update:
    """A step before its update: metrics, gradients (None: updated already), rates, what hooks are told."""

    __slots__ = ("grads", "idle", "info", "metrics", "rates", "reported", "skip")

    def __init__(
        self,
        metrics: dict[str, Any],
        grads: Gradients | None,
        reported: dict[str, Any],
        rates: list[list[Any]],
        skip: Any = None,
    ) -> None:
        self.metrics = metrics
        self.grads = grads
        self.reported = reported
        self.rates = rates
        self.skip = skip
        self.idle: Any = False
        self.info: Info | None = None


class _Before:
    """The fields of a state that are read after it was donated.

    Args:
        state: the state.
        copies: whether the states of transforms are needed as they were.
    """

    __slots__ = ("_versions", "extras", "first", "root", "scale", "step", "transforms", "updates")

    def __init__(self, state: TrainState, *, copies: bool) -> None:
        self.step = state.step
        self.root = state.rng.root
        self.updates = state.updates
        self.scale = scale_of(state)
        self.extras = state.extras
        self.transforms: dict[str, Any] = dict(state.transforms)
        self.first: dict[str, Any] = {}
        self._versions: list[tuple[torch.Tensor, int]] = []
        if self.transforms:
            self._versions = _versions(state.transforms)
            # containers anew: a hook may write to its own
            self.first = tree.map(lambda leaf: leaf, self.transforms) if copies else {}

    def own_changed(self) -> bool:
        """Whether a transform of the user's changed a tensor of its state in place."""
        return any(_torch.version_of(tensor) != version for tensor, version in self._versions)

    def check_unchanged(self) -> None:
        """Raise ArgumentError if a state can't be put back."""
        if self.own_changed():
            raise ArgumentError(
                "a transform changed a tensor of its state in place, and an update that is left out has to "
                "leave it as it was",
                where="fa.Transform(apply=)",
                fix="return new tensors: own * 0.9 + grad in place of own.mul_(0.9).add_(grad)",
            )


def _versions(states: Tree) -> list[tuple[torch.Tensor, int]]:
    tensors = [leaf for leaf in tree.leaves(states) if isinstance(leaf, torch.Tensor)]
    return [(tensor, _torch.version_of(tensor)) for tensor in tensors]
