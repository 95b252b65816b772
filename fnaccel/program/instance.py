"""`Instance`: what `init` builds of a train step, and what begins and completes each of its updates."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import attrs
import torch

from fnaccel import _lazy, _torch, tree
from fnaccel.data.micro_batches import MicroBatches, micro_batches
from fnaccel.engine.engine import Engine, Updated
from fnaccel.engine.left_out import LeftOut, SkippedUpdates, agree_counts
from fnaccel.engine.passes import Inputs, Passes
from fnaccel.engine.same_position import same_position
from fnaccel.engine.same_rows import SameRows
from fnaccel.engine.shared_buffers import SharedBuffers
from fnaccel.engine.stop_request import NoNotice, Notice
from fnaccel.engine.totals import Question, Totals
from fnaccel.engine.updater import Updater, traceable
from fnaccel.engine.user_draws import drawing
from fnaccel.errors import CapabilityError
from fnaccel.models.building import Built, claim, release
from fnaccel.models.constant_buffers import ConstantBuffers
from fnaccel.models.gradient_hooks import GradientHooks
from fnaccel.models.module_modes import ModuleModes
from fnaccel.models.moving_buffers import MovingBuffers, buffer_slots
from fnaccel.models.note import Note
from fnaccel.models.parameter_values import register
from fnaccel.models.trained_modules import TrainedModules
from fnaccel.program.compile_meter import Meter
from fnaccel.program.lent_models import LentModels
from fnaccel.program.lower import Lowered
from fnaccel.program.parameter_averages import averages_of, move
from fnaccel.program.tail import keep_state
from fnaccel.program.whole_parameters import access_of, is_sharded
from fnaccel.state import Position, ReadOnlyDict, Seed, TrainState, Trees, scale_of, state_of
from fnaccel.step.loss import Scalar, is_uncounted
from fnaccel.step.spec import Spec
from fnaccel.tree import Tree
from fnaccel.world.random_streams import generators_of

if TYPE_CHECKING:
    from fnaccel.program.captured_step import CapturedPasses

AnyPasses = Callable[[MicroBatches, Totals, Inputs], "Passes | CapturedPasses"]


@attrs.define
class Learned:
    """What the calls of a train step have learned of its model and data.

    Attributes:
        notes: for the plan.
        cut_noted: whether one says how the rows of a batch are cut.
        moved: whether an update reached its end.
        probed: whether the cut model was compared with the whole one.
        cut_fails: whether the cut model raised in that.
        source: facts about the loader of the newest batch.
    """

    notes: tuple[Note, ...]
    cut_noted: bool = False
    moved: bool = False
    probed: bool = False
    cut_fails: bool = False
    source: Mapping[str, Any] | None = None


class Instance:
    """Engine, optimizers and the trees of states of one train step. An update writes to their tensors alone.

    Attributes:
        spec, lowered: the step.
        where: the name of the train step, for messages.
        engine, updater, params: the model, its optimizers, and its parameters as states show them.
        captured: whether the step is compiled as a whole.
        no_user_hooks: whether all hooks after the gradients are the library's own.
        passes: `passes(micro_batches, totals, inputs)` are the passes of one update, for `drive`.
        streams: the random streams that are seeded for each micro-batch.
        same_position: compares the positions of batches between ranks, or None.
        meter: counts compilations, or None.
        alone: whether the update under way adds up totals within this replica only: see `Axis.metrics`.
        learned: what its calls have learned.
        buffer_slots: the module, attribute and canonical name of each buffer.
    """

    def __init__(
        self,
        engine: Engine,
        built: Built,
        spec: Spec,
        lowered: Lowered,
        where: str,
        notes: tuple[Note, ...] = (),
        arrived: int = 0,
    ) -> None:
        self.spec = spec
        self.lowered = lowered
        self.where = where
        self.learned = Learned(notes)
        self._built = built
        self._nested = None not in built.modules
        self._empty = built.empty
        self._trains = spec.optimizers is not None
        self.engine = engine
        mesh, leaves, capture = engine.layout.mesh, engine.layout.leaves, engine.forward.capture
        world = mesh.world
        self.autocast_device = lowered.autocast_device(world.device)
        self.streams = [] if spec.rng == "stream" else generators_of(world.device)
        self._device, self._group = world.device, mesh.group("totals")
        self._partial_rows = mesh.partial_rows
        self._apart = mesh if mesh.replicas_apart else None
        axes = [axis for axis in spec.strategy.axes if not axis.averages]
        self._by_rows = any(axis.weighting == "rows" for axis in axes)
        self._at_averages = self._apart is not None and any(axis.metrics == "boundary" for axis in axes)
        self.alone = False
        self.rank = mesh.loss_rank
        self.shares = any(degree > 1 for degree in mesh.degrees.values())
        self.access = access_of(engine)
        register(built, self.access)
        self.same_position = same_position(mesh, engine.hooks.told)
        self.same_rows = SameRows(mesh) if mesh.batch_size < world.size else None
        self.sharded = is_sharded(engine.layout.parameters.values())
        self.skips = SkippedUpdates(lowered.settings.max_skipped, speaks=world.is_main)
        self.meter = None if lowered.settings.compiler is None else Meter(lowered.settings.compiler, where)
        # in the graph, updates go to the tensors that gradients are taken of: no second name for them
        optimizers = spec.optimizers or {}
        self.no_user_hooks = lowered.no_user_hooks
        update_in_graph = capture is not None and self.no_user_hooks and traceable(optimizers)
        updated = capture.leaves if capture is not None and update_in_graph else leaves
        bound = engine.runtime.bound
        self.updater = Updater(
            updated,
            optimizers,
            world.device,
            on_device=lowered.settings.skips,
            bound=bound,
            over=engine.layout.held_by,
            ema_decay=lowered.settings.ema_decay,
        )
        self.params = self._show(engine.layout.parameters)
        self.by_name = ReadOnlyDict(engine.layout.parameters)
        self.captured = self._trains and capture is not None and lowered.settings.compiler is not None
        self.passes = self._passes(update_in_graph)
        self._update_in_graph = update_in_graph
        self.buffer_slots = [
            (module, attribute, full)
            for key, root in built.modules.items()
            for name, module, attribute in buffer_slots(root)
            if (full := name if key is None else f"{key}/{name}") in engine.layout.buffers
        ]
        slots = [slot for slot in self.buffer_slots if not isinstance(slot[0], ConstantBuffers)]
        names, transient = [name for *_, name in slots], set(self.transient())
        saved = {name: engine.layout.buffers[name] for name in names if name not in transient}
        self._first_shapes = {name: [*buffer.shape] for name, buffer in saved.items()}
        self._buffer_averages = averages_of(saved) if lowered.settings.ema_buffers else {}
        averaged = zip(leaves, engine.averages, strict=True)  # there are some under `with_ema` only
        self._trees = Trees(
            params=self.params,
            buffers=self._show(engine.layout.buffers),
            opt=self._show(self.updater.slots),
            ema=None
            if lowered.settings.ema_decay is None
            else self._show({leaf.name: leaf.like(x) for leaf, x in averaged} | self._buffer_averages),
        )
        trained = [key in optimizers for key in built.modules]
        self.module_modes = ModuleModes([*zip(engine.layout.modules, trained, strict=True)])
        self.gradient_hooks = GradientHooks(
            built.modules, captured=self.captured, arrived=arrived, speaks=world.is_main
        )
        self._watched = TrainedModules(built.modules, leaves if bound is None else (), trains=self._trains)
        self.moving_buffers = MovingBuffers([(module, name) for module, name, _ in slots])
        self.shared_buffers: SharedBuffers | None = None
        averaging = mesh.group("gradient")
        if averaging is not None and names and engine.layout.shares_buffers:
            shared = [name if name in saved else "" for name in names]
            self.shared_buffers = SharedBuffers(self.moving_buffers, shared, averaging)

    @functools.cached_property
    def gradient_passes(self) -> AnyPasses:
        """`passes` with gradients as outcome: another program, if that of the step does the update too."""
        return self._passes(False) if self.captured and self._update_in_graph else self.passes

    def _passes(self, update_in_graph: bool) -> AnyPasses:
        """What runs the passes of an update: calls, or compiled programs, with the update in them or not."""
        engine, lowered = self.engine, self.lowered
        compiler, capture = lowered.settings.compiler, engine.forward.capture
        if not self.captured or capture is None or compiler is None:
            return functools.partial(Passes, engine, lowered.loss)
        # a CUDA graph reads and writes these in place
        slots = [
            _torch.local_of(value) for tensors in self.updater.slots.values() for value in tensors.values()
        ]
        _torch.mark_static([*slots, *engine.averages, *(leaf.shard for leaf in capture.leaves)])
        tail = lowered.tail if update_in_graph else None
        captured = _lazy.load("fnaccel.program.captured_step")
        step = captured.CapturedStep(
            engine, capture, lowered.loss, compiler, tail, self.updater, self.by_name
        )
        return functools.partial(captured.CapturedPasses, step)

    def _show(self, flat: dict[str, Any]) -> dict[str, Any]:
        """Names as the state shows them: by model first if there are several."""
        named = self.by_model(flat)
        return ReadOnlyDict({k: ReadOnlyDict(v) for k, v in named.items()} if self._nested else named)

    def by_model(self, flat: dict[str, Any]) -> dict[str, Any]:
        """A dict for each model if there are several, by canonical names."""
        if not self._nested:
            return flat
        models: dict[str, dict[str, Any]] = {str(key): {} for key in self._built.modules}
        for name, value in flat.items():
            key, _, local_name = name.partition("/")
            models[key][local_name] = value
        return models

    def averaged_buffers(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The buffers that have averages, as the modules hold them at this moment, and their averages."""
        self.trees(self._trees.scale)
        return [(self.engine.layout.buffers[name], x) for name, x in self._buffer_averages.items()]

    def first_state(self, seed: int, extras: Tree) -> TrainState:
        """The state before step 0."""
        device = self.engine.layout.mesh.world.device
        scale: dict[str, torch.Tensor] | None = None
        if self.lowered.settings.precision.scaled:
            scale = {
                "scale": torch.tensor(self.lowered.settings.precision.init_scale, device=device),
                "growth": torch.zeros((), dtype=torch.int32, device=device),
                "weight": torch.ones((), device=device),
            }
        updates: Any = torch.zeros((), device=device) if self.lowered.settings.skips else 0
        transforms: dict[str, Tree] = {}
        if self.lowered.inits:
            with self.drawing(seed, 0):
                transforms = {name: init(self.engine.layout.parameters) for name, init in self.lowered.inits}
        if self.engine.hooks.init is not None:
            transforms[self.engine.name] = self.engine.hooks.init()
        if self.engine.hooks.end is not None:
            self.engine.hooks.end()
        return state_of(
            self.trees(scale),
            step=0,
            updates=updates,
            rng=Seed(seed),
            data=Position(),
            extras=extras,
            transforms=transforms,
        )

    def begin(self, state: TrainState, batch: Tree) -> MicroBatches:
        """See that an update may begin, cut its batch, and bring modules into their modes.

        Raises:
            CapabilityError: there is nothing to train, or a hook was added that would never run.
            ReplacedParameterError: as `check_modules`, and if a frozen parameter takes a gradient now.
            MicroBatchError: the batch can't be cut.
            RankMismatchError: ranks that share the rows of a batch have different ones, or all of them had
                batches of different positions in the step before.
            RecompileLimitError, NonfiniteError: too many steps were compiled again, or skipped in a row.
        """
        self._watched.check(frozen=True)
        if not self._trains or self._empty:
            raise self._not_ready()
        cut = micro_batches(batch, self.lowered.settings.micro_batches, self._device)
        learned = self.learned
        if cut.note is not None and not learned.cut_noted:
            learned.cut_noted, learned.notes = True, (*learned.notes, Note(cut.note))
            warnings.warn(cut.note, UserWarning, stacklevel=4)
        if self.same_rows is not None:
            self.same_rows.check(state.data.epoch, cut)
        if self.meter is not None:
            self.meter.begin(state.step, batch)
        apart = self._apart is not None and self.skips.in_a_row  # replicas agree on it when they average
        if not apart or self.engine.layout.whole_from(state.step) == state.step:
            self.skips.check()
        if cut.batch is not None:
            learned.source = cut.batch.source
        if self._at_averages:
            self.alone = self.engine.layout.whole_from(state.step + 1) != state.step + 1
            self._group = self.engine.layout.mesh.group("replica" if self.alone else "totals")
        if self.same_position is not None:
            self.same_position.begin(None if cut.batch is None else cut.batch.position, self._group)
        self.module_modes.train()
        self.gradient_hooks.look_again()
        if self.gradient_hooks.present and len(cut) > 1 and self.lowered.loss.weight_fn is None:
            self.gradient_hooks.warn()
        return cut

    def inputs(self, state: TrainState, rates: list[list[Any]], given: LentModels | None) -> Inputs:
        """What the passes of an update take from a state, its learning rates, and what was lent for it."""
        scale = scale_of(state)
        return Inputs(
            step=state.step,
            updates=state.updates,
            rates=rates,
            root=state.rng.root,
            rank=self.rank,
            streams=self.streams,
            scale=None if scale is None else scale["scale"],
            last_weight=None if scale is None else scale["weight"],
            given=given,
            backward_hooks=self.gradient_hooks.present,
            extras=state.extras,
        )

    def totals(self, micro_batches: MicroBatches, notice: Notice | None) -> Totals:
        """The totals of one update, with the questions that ranks ask each other."""
        engine = self.engine
        questions: list[Question] = [] if self.meter is None else [*self.meter.questions]
        if self.alone:
            notice = None  # other replicas get no answer: the stop request waits for the next average
        elif notice is not None:
            notice.at_once = self._at_averages
        if notice is not None or self._group is not None:  # ranks sum by place in the vector
            questions.append(notice or NoNotice())
        if self.same_position is not None:
            questions.append(self.same_position)
        if engine.hooks.ask is not None:
            questions.append(engine.hooks.ask(micro_batches))
        return Totals(
            self._group,
            self._device,
            engine.agreement,
            questions,
            partial_rows=self._partial_rows,
            apart=None if self.alone else self._apart,
            by_rows=self._by_rows,
            stages=engine.forward.stages,
        )

    def drawing(self, root: int, step: int) -> contextlib.AbstractContextManager[None]:
        """A context in which hooks of the user draw random numbers that are equal on all ranks."""
        world = self.engine.layout.mesh.world
        seed = None if self.spec.rng == "stream" else root
        return drawing(seed, step, self.streams, world.size, sharded=self.sharded)

    def complete(
        self,
        step: int,
        updates: Scalar,
        scale: dict[str, torch.Tensor] | None,
        left_out: LeftOut,
        metrics: dict[str, Any],
        transforms: dict[str, Tree],
    ) -> Any:
        """What follows an update before the next state is shown: buffers, the loss scale, and its metrics.

        Args:
            step: of the update.
            updates: the number of updates before it.
            scale: the loss scale, changed in place, or None.
            left_out: whether the update was.
            metrics: of the update.
            transforms: their states, and that of the axis.

        Returns:
            The number of updates after it.
        """
        if self.meter is not None:
            metrics["recompilations"] = self.meter.found.recompilations
        self.moving_buffers.end()
        if self.shared_buffers is not None:
            self.shared_buffers.share(step)
        if self._buffer_averages and left_out.uncounted is not True:
            decay: Any = self.lowered.settings.ema_decay
            decay = metrics["ema_decay"] if callable(decay) else decay
            move(self.averaged_buffers(), decay, left_out.skip, left_out.uncounted)
        if scale is not None:
            metrics["loss_scale"] = scale["scale"].clone()
            if left_out.uncounted is not True:
                self._move_scale(scale, left_out.nonfinite, left_out.weight)
        if self.engine.hooks.after_update is not None:
            shown, name = self.trees(scale), self.engine.name
            after = Updated(
                step=step + 1,
                params=shown.params,
                buffers=shown.buffers,
                opt=shown.opt,
                ema=shown.ema,
                own=transforms.get(name),
            )
            with torch.no_grad():
                own = self.engine.hooks.after_update(after)
            if own is not None or name in transforms:
                keep_state(transforms, name, own, "axis")
        if self.engine.hooks.end is not None:
            self.engine.hooks.end()
        if left_out.uncounted is True:
            metrics["skipped"] = 1.0
        elif left_out.skip is not None:
            metrics["skipped"] = left_out.skip
            self.skips.put(left_out.nonfinite)
        updates = left_out.counted(updates)
        if self._apart is None:
            return updates
        if left_out.uncounted is True and (self.alone or not is_uncounted(metrics["weight"])):
            updates = updates + 1  # a replica without rows keeps in step with the others
            self.updater.pass_over()
        if self.engine.layout.whole_from(step + 1) == step + 1:
            updates = agree_counts(updates, scale, self.skips, self._group, self._device)
        return updates

    def _not_ready(self) -> CapabilityError:
        if not self._trains:
            return CapabilityError(
                "this train step has no optimizer, so it can't be called",
                where="fa.train_step(optimizer=None)",
                fix="give an optimizer; or use train_step.look(state, fn), or lend it with given={...}",
            )
        return CapabilityError(
            'the model was built without values (init="meta") and none were restored',
            where="train_step(state, batch)",
            fix="state = fa.restore(directory, like=state), or fa.fsdp(init='seeded')",
        )

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """Parameters, gradients, buffers and optimizer state, by name."""
        leaves = self.engine.layout.leaves
        grads = {leaf.name: leaf.param.grad for leaf in leaves if leaf.param.grad is not None}
        parts = {
            "params": self.params,
            "gradients": grads,
            "buffers": self.engine.layout.buffers,
            "opt": self._trees.opt,
        }
        return {name: value for name, value in tree.items(parts) if isinstance(value, torch.Tensor)}

    def trees(self, scale: dict[str, torch.Tensor] | None) -> Trees:
        """What states show at this moment: a module may have replaced the tensor of a buffer."""
        flat = self.engine.layout.buffers
        changed = False
        for module, attribute, name in self.buffer_slots:
            value = _torch.buffers_of(module)[attribute]
            if value is not None and value is not flat[name]:
                flat[name] = value
                changed = True
        if changed:
            self._trees = attrs.evolve(self._trees, buffers=self._show(flat))
        if scale is not self._trees.scale:
            self._trees = attrs.evolve(self._trees, scale=scale)
        return self._trees

    def grown_buffers(self) -> list[str]:
        """A line for each buffer that is saved and has another shape than after `init`. Each once."""
        shapes, self._first_shapes = self._first_shapes, {}
        now = {name: [*buffer.shape] for name, buffer in self.engine.layout.buffers.items()}
        changed = {name: shape for name, shape in shapes.items() if now.get(name) != shape}
        self._first_shapes = {name: shape for name, shape in shapes.items() if name not in changed}
        return [f"{name} was {shape} after init, and is {now.get(name)}" for name, shape in changed.items()]

    def transient(self) -> list[str]:
        """The names of buffers that modules make themselves and don't save."""
        return _torch.transient_buffers(self._built.modules)

    def _move_scale(self, scale: dict[str, torch.Tensor], skip: torch.Tensor, weight: Scalar) -> None:
        """Grow or shrink the loss scale in place, and keep the weight for the next step."""
        policy = self.lowered.settings.precision
        _torch.amp_update_scale_(
            scale["scale"], scale["growth"], skip, policy.growth, policy.backoff, policy.interval
        )
        scale["scale"].clamp_(min=policy.min_scale)
        current = torch.as_tensor(weight, dtype=torch.float32).to(scale["weight"].device, non_blocking=True)
        scale["weight"].copy_(torch.where(current > 0, current, scale["weight"]))

    def check_filled(self, complete: bool) -> None:
        """Raise CapabilityError if a model without values would get only some of them."""
        if self._empty and not complete:
            raise CapabilityError(
                'the model was built without values (init="meta"), and not all of them are restored',
                where="fa.restore(only=, skip=)",
                fix="restore all of params and buffers, or build it with values: fa.fsdp(init='seeded')",
            )

    def restored(self) -> None:
        """Note that the parameters hold values now."""
        self._empty = False
        if self.same_rows is not None:
            self.same_rows.reset()
        if self.engine.hooks.end is not None:
            self.engine.hooks.end()

    def check_modules(self) -> None:
        """Raise ReplacedParameterError if the modules do not hold the parameters that are trained."""
        self._watched.check()

    def claim(self, holder: object, close: Callable[[], None]) -> None:
        """Let the modules go with `holder`: see `models.building.claim`."""
        claim(self._built, holder, close)

    def close(self) -> None:
        """Free the engine and let others own the modules."""
        self._watched.close()
        self.engine.close()
        release(self._built)
