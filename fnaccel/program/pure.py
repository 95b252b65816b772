"""`pure`: an update of a train step as a function of tensors, for torch.func and torch.compile.

It is the story of `update.py` over the operations `PURE`: the loss and its gradients (`pure_loss.py`), then
GRADS records, the rules of the optimizers, and UPDATE records. The two stages are apart, so that an
all-reduce can stand between them. `torch.where` chooses what stays as it is in an update that is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import attrs
import torch

from fnaccel import _torch, tree
from fnaccel.data.batch import Batch, Window
from fnaccel.data.micro_batches import micro_batches
from fnaccel.engine.aux_values import ratio
from fnaccel.engine.gradients import differences
from fnaccel.engine.pure_gradients import PureGradients
from fnaccel.engine.update_facts import UpdateFacts
from fnaccel.errors import (
    ArgumentError,
    CapabilityError,
    TreeMismatchError,
    UnknownNameError,
    nearest,
)
from fnaccel.optim.chain_kernel import with_number
from fnaccel.optim.pure_rules import PureOptimizers
from fnaccel.optim.rules import wide
from fnaccel.program.assemble import assemble
from fnaccel.program.instance import Instance
from fnaccel.program.lower import UserUpdate, lower
from fnaccel.program.pure_loss import PureLoss, Sums, cut_in_graph
from fnaccel.program.pure_refusals import refuse
from fnaccel.program.pure_values import as_number, copied, keep, no_row_counts, own_models, signed, unless
from fnaccel.program.train_step import TrainStep
from fnaccel.state import Position, Seed, TrainState
from fnaccel.step.spec import Spec
from fnaccel.step.step import Info
from fnaccel.strategies.strategy import Strategy
from fnaccel.texts import unmatched
from fnaccel.tree import Tree
from fnaccel.world.mesh import Mesh
from fnaccel.world.simulation import absent_world

Values = dict[str, Any]
"""`params`, `buffers`, `opt`, `ema`, `transforms`: dicts of tensors as a state shows them. `updates`, `step`,
`seed`: 0-d tensors."""

_WHERE = "fa.pure(train_step)"
_CALL = "update(values, batch, ...)"
_NAMES = ("params", "buffers", "opt", "ema", "transforms", "updates", "step", "seed")
_TRANSFORM_OPTIONS = {
    ("clip_norm", "max_norm"): "max_norm",
    ("clip_value", "max_value"): "max_value",
    ("with_ema", "decay"): "ema_decay",
}


class PureUpdate:
    """`update(values, batch, *, lr=None, extras=None, **options) -> (values, metrics)`. `fa.pure` makes it.

    Attributes:
        options: the names of numbers that a call may give beside `lr`.

    Example:
        >>> update = fa.pure(train_step)
        >>> values, metrics = update(update.init(seed=0), batch, lr=0.05)
        >>> sorted(metrics)
        ['loss', 'lr', 'weight']
    """

    made_of_step: ClassVar[bool] = True

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        lowered = lower(spec.step)
        refuse(spec, lowered)
        assert spec.optimizers is not None
        self._loss_fn, self._settings = lowered.loss, lowered.settings
        self._tail = lowered.tail
        self._instance = self._build(0)
        self._instance.claim(self, self.close)
        layout = self._instance.engine.layout
        self._device = layout.mesh.world.device
        self._nested = isinstance(layout.model, dict)
        self._trained = [leaf.name for leaf in layout.leaves]
        # on the meta device: the model's own tensors may be exchanged
        self._params = {n: torch.empty_like(p, device="meta") for n, p in layout.parameters.items()}
        self._buffers = list(layout.buffers)
        self._loss = PureLoss(layout.model, lowered.loss, self._instance.buffer_slots)
        self._optimizers = PureOptimizers(spec.optimizers, layout.leaves)
        self._hook_options = {
            option: (name, field)
            for (name, field), option in _TRANSFORM_OPTIONS.items()
            if name in dict((*lowered.tail.gradients, *lowered.tail.updates))
        }
        self.options = sorted({*self._optimizers.options, *self._hook_options})
        self._instance.module_modes.train()

    def __repr__(self) -> str:
        return f"PureUpdate(options: {', '.join(['lr', *self.options])})"

    def __call__(
        self, values: Values, batch: Tree, *, lr: Any = None, extras: Tree = None, **options: Any
    ) -> tuple[Values, dict[str, Any]]:
        """One update. Nothing is written, and no value is read on the host.

        Args:
            values: as `init`, `values` or an update returned them.
            batch: rows, a `fa.data.Batch` or a `fa.data.Window`, as the train step takes them. In compiled
                code: a pytree of tensors.
            lr: the learning rate, a number or a 0-d tensor. Of several optimizers with rates of their own a
                dict by the names of the metrics `lr/NAME`: `{"adam": 0.1, "sgd": 0.01}`. None, or a name that
                is left out: the schedules of the description, which count the updates in `values`. Groups
                with a rate of their own keep it.
            extras: what the loss finds in `info.extras`.
            options: numbers of the description for this update, by the names in `self.options`.

        Returns:
            The next values, and metrics with their graphs: `loss`, `weight`, `lr`, those of transforms and
            aux.

        Raises:
            UnknownNameError: no such option. Names the nearest.
            TreeMismatchError: values of another train step.
            CapabilityError: a schedule that takes no tensor, and no `lr`.
        """
        self._check(values, lr, options)
        self._optimizers.check_rate(lr)
        sums = self._sums(values, batch, extras, differentiate=True)
        return self._finish(values, sums, lr, options)

    def loss(self, values: Values, batch: Tree, *, extras: Tree = None) -> torch.Tensor:
        """The loss of a batch at these values, a 0-d tensor that may be differentiated.

        It is the loss of the next update: in training mode, over all micro-batches. Buffers stay as they are.

        Example:
            >>> update = fa.pure(train_step)
            >>> update.loss(update.init(), batch).shape
            torch.Size([])
        """
        self._check(values, 0.0, {})
        sums = self._sums(values, batch, extras, differentiate=False)
        return ratio(sums.total, sums.weight)

    def init(self, seed: int = 0) -> Values:
        """The values of `train_step.init(seed)`. The train step itself is left alone.

        Example:
            >>> sorted(fa.pure(train_step).init(seed=1))
            ['buffers', 'ema', 'opt', 'params', 'seed', 'step', 'transforms', 'updates']
        """
        with _torch.outside_of_func():
            instance = self._build(seed)
            try:
                return self.values(instance.first_state(seed, None))
            finally:
                instance.close()

    def values(self, state: TrainState) -> Values:
        """Copies of the values of a state, which stays live. Position and extras are left out.

        Raises:
            StaleStateError: the state was donated.
            TreeMismatchError: the state of another train step.
            CapabilityError: a transform keeps something that is neither a tensor nor a number.
        """
        values: Values = {
            name: copied(getattr(state, name)) for name in ("params", "buffers", "opt", "transforms")
        }
        values["ema"] = {} if state.ema is None else copied(state.ema)
        numbers = ("updates", state.updates, torch.float32), ("step", state.step, torch.int64)
        for name, number, dtype in (*numbers, ("seed", signed(state.rng.root), torch.int64)):
            values[name] = torch.as_tensor(number, dtype=dtype, device=self._device).detach().clone()
        self._check(values, 0.0, {})
        return values

    def state(self, values: Values) -> TrainState:
        """A state of these values, which `train_step.adopt` takes. It shows copies.

        Position in the data and extras are those of a first state: `attrs.evolve(update.state(values),
        data=state.data)` goes on from another.

        Example:
            >>> update = fa.pure(train_step)
            >>> values, metrics = update(update.init(), batch)
            >>> state = train_step.adopt(update.state(values))
            >>> state.step, state.updates
            (1, 1)
        """
        self._check(values, 0.0, {})
        first = self._instance.first_state(0, None)
        copies = {name: copied(values[name]) for name in ("params", "buffers", "opt", "transforms")}
        copies["transforms"] = tree.map(
            lambda like, value: value if isinstance(like, torch.Tensor) else type(like)(value.item()),
            first.transforms,
            copies["transforms"],
        )
        updates = values["updates"].detach()
        return TrainState(
            step=int(values["step"]),
            updates=updates.clone() if isinstance(first.updates, torch.Tensor) else int(updates),
            ema=None if first.ema is None else copied(values["ema"]),
            rng=Seed(int(values["seed"]) & ((1 << 64) - 1)),
            data=Position(),
            **copies,
        )

    def close(self) -> None:
        """Free the modules."""
        self._instance.close()

    def _build(self, seed: int) -> Instance:
        return assemble(self._spec, lower(self._spec.step), _WHERE, seed, None)

    def _sums(self, values: Values, batch: Tree, extras: Tree, *, differentiate: bool) -> Sums:
        """Totals and gradients of all micro-batches."""
        count = self._settings.micro_batches
        facts = None
        if self._loss_fn.informed is not None:
            facts = UpdateFacts(values["seed"], values["step"], values["updates"], extras, self._device)
        known = isinstance(batch, Batch) or isinstance(batch, Window)  # noqa: SIM101 - a graph takes no union
        if torch.compiler.is_compiling() or not (known or count > 1):
            datas = cut_in_graph(batch, count)
            infos: list[Any] = [None if facts is None else facts.at(None)] * len(datas)
        else:
            parts = [part for part in micro_batches(batch, count, self._device) if part.valid]
            datas = [part.data for part in parts]
            infos = [None if facts is None else facts.of(part) for part in parts]
        params, buffers = self._flat(values["params"]), self._flat(values["buffers"])
        trained = {name: params[name] for name in self._trained}
        fixed = {name: value for name, value in params.items() if name not in trained}
        return self._loss.sums(trained, fixed, buffers, datas, infos, differentiate=differentiate)

    def _finish(
        self, values: Values, sums: Sums, lr: Any, options: Mapping[str, Any]
    ) -> tuple[Values, dict[str, Any]]:
        """Everything after the gradients."""
        params, opt = self._flat(values["params"]), self._flat(values["opt"])
        shown = dict(params)
        updates, owns = values["updates"], dict(values["transforms"])
        loss = ratio(sums.total, sums.weight)
        metrics: dict[str, Any] = {"loss": loss, "weight": as_number(sums.weight, loss)}
        if sums.aux is not None:
            metrics.update(sums.aux if isinstance(sums.aux, dict) else {"aux": sums.aux})
        own = {name: value for name, value in options.items() if name in self._optimizers.options}

        info = Info(step=values["step"], updates=updates, params=shown, metrics=metrics)
        grads = PureGradients(
            self._trained, [wide(grad) for grad in sums.grads], no_row_counts(sums.weight, loss)
        )
        grads.scale_by(ratio(torch.ones_like(loss), sums.weight))
        hooks = [(name, self._with_options(name, hook, options)) for name, hook in self._tail.gradients]
        self._tail.change(grads, hooks, owns, info, keep)

        skip = grads.skip
        old = [params[name] for name in self._trained]
        done = self._optimizers.update(old, grads.values, opt, updates, lr, own)
        metrics.update(done.rates)
        moved = unless(skip, old, done.params)
        params.update(dict(zip(self._trained, moved, strict=True)))
        slots = unless(skip, opt, done.opt)
        ema = self._flat(values["ema"])
        for name, hook in self._tail.updates:
            if isinstance(hook, UserUpdate):
                params = {key: value.clone() for key, value in params.items()}  # which it may write to
                keep(owns, name, hook.fn(params, owns.get(name), replace(info, skip=grads.skipped())))
            else:
                now, averages = {**sums.buffers, **params}, list(ema.values())
                taken = [now[key] for key in ema]
                decay = self._settings.ema_decay
                if callable(decay):
                    metrics["ema_decay"] = options.get("ema_decay", decay(updates.to(self._optimizers.dtype)))
                    hook = with_number(hook, "decay", metrics["ema_decay"])
                averaged = self._with_options(name, hook, options).next_averages(averages, taken)
                ema = dict(zip(ema, unless(skip, averages, averaged), strict=True))
        for name in self._tail.users:
            if name in owns:
                owns[name] = unless(skip, values["transforms"][name], owns[name])
        if skip is not None:
            metrics["skipped"] = skip.to(loss.dtype)
        after: Values = {
            "params": self._instance.by_model(params),
            "buffers": self._instance.by_model(sums.buffers),
            "opt": self._instance.by_model(slots),
            "ema": self._instance.by_model(ema) if ema else {},
            "transforms": owns,
            "updates": unless(skip, updates, updates + 1),
            "step": values["step"] + 1,
            "seed": values["seed"],
        }
        return after, metrics

    def _with_options(self, name: str, hook: Any, options: Mapping[str, Any]) -> Any:
        """A record of a transform, with the numbers that a call gave for it."""
        for option, value in options.items():
            if option in self._hook_options and self._hook_options[option][0] == name:
                hook = with_number(hook, self._hook_options[option][1], value)
        return hook

    def _flat(self, named: Mapping[str, Any]) -> dict[str, Any]:
        """By canonical name: those of several models as `model/name`."""
        if not self._nested:
            return dict(named)
        return {f"{key}/{name}": value for key, own in named.items() for name, value in own.items()}

    def _check(self, values: Values, lr: Any, options: Mapping[str, Any]) -> None:
        """Raise for a name that this update does not know. In compiled code tracing itself does."""
        if torch.compiler.is_compiling():
            return
        for name in options:
            if name not in self.options:
                raise UnknownNameError(
                    f"there is no number {name!r} in the description that a pure update could change",
                    where=_CALL,
                    fix=f"{nearest(name, ['lr', *self.options])}; options that are no numbers, and momentum "
                    "or slots that the description lacks, change the program: another train step",
                )
        if lr is None and self._optimizers.host_only:
            raise CapabilityError(
                "the schedule of the rate takes no tensor, and a pure update counts in tensors",
                where=_CALL,
                fix="give lr=, or a schedule of fa.schedules",
            )
        if not isinstance(values, dict):  # pyright: ignore[reportUnnecessaryIsInstance] - the user's
            raise ArgumentError(
                f"values is {type(values).__name__}, not a dict of tensors",
                where=_CALL,
                fix="values = update.init(seed=0), or update.values(state)",
            )
        problems = unmatched(_NAMES, values)
        if not problems:
            problems = differences(self._flat(values["params"]), self._params, "parameters")
            problems += unmatched(self._buffers, self._flat(values["buffers"]))  # a forward may grow one
        if problems:
            raise TreeMismatchError(
                f"these are not the values of this train step: {'; '.join(problems)}",
                where=_CALL,
                fix="values = update.init(seed=0), or update.values(state); names and shapes stay",
            )


def pure(train_step: TrainStep) -> PureUpdate:
    """An update of a train step as a function of tensors: `values, metrics = update(values, batch, lr=0.1)`.

    It computes what the train step does: micro-batches, `fa.Mean` and aux, autocast, clipping, updates that
    are left out, averages, functions of yours on gradients and parameters. It writes to nothing and reads
    nothing on the host. So `torch.func.grad` differentiates through any number of updates, by the rate, by
    numbers of the description or by first parameters. `torch.func.vmap` maps it, and
    `torch.compile(your_function, fullgraph=True)` makes one graph of several updates.

    It has modules of its own, and the state of the train step stays live.

    - On several ranks each makes updates of its own, and nothing is averaged: a population over ranks, or the
      inner steps in the loss of a train step, which averages the gradient that goes through them.
    - Modules are in training mode. Buffers are values: a batch norm's statistics move in `values["buffers"]`.
      Under vmap they need a first dimension, so map over stacked values.
    - A parameter that the loss does not reach has the gradient 0, as in JAX, so weight decay moves it. A
      train step leaves it as it is: freeze it.
    - Dropout by torch's generator draws other masks in each call, and none of those of the train step. Under
      vmap name `randomness="different"`. `fa.random.dropout` by `info.key` is equal everywhere.

    Args:
        train_step: under `fa.local()` or `fa.ddp()`. It need not have a state.

    Returns:
        The function, with `init(seed)`, `values(state)`, `state(values)` and `loss(values, batch)`.

    Raises:
        CapabilityError: another strategy, fp16, `fa.compile`, an optimizer without a rule, a transform around
            the call, or one that asks for a second gradient.
        OwnershipError: the model is a built module that a train step holds.

    Source: https://arxiv.org/abs/1502.03492 (gradients through training), https://arxiv.org/abs/2211.06934

    Example:
        >>> update = fa.pure(train_step)
        >>> def final(lr):
        ...     values = update.init(seed=0)
        ...     for batch in batches:
        ...         values, metrics = update(values, batch, lr=lr)
        ...     return update.loss(values, batches[0])
        >>> torch.func.grad(final)(torch.tensor(0.1)).shape
        torch.Size([])
    """
    if not isinstance(train_step, TrainStep):  # pyright: ignore[reportUnnecessaryIsInstance] - the user's
        raise ArgumentError(
            f"fa.pure takes a train step, not {type(train_step).__name__}",
            where=_WHERE,
            fix="train_step = fa.train_step(loss_fn, model=..., optimizer=...) first",
        )
    spec = train_step.spec
    refuse(spec, lower(spec.step))
    alone = attrs.evolve(absent_world(1, 1, _WHERE), device=spec.mesh.world.device)
    mesh = Mesh(world=alone, degrees={})
    return PureUpdate(attrs.evolve(spec, model=own_models(spec.model), strategy=Strategy(), mesh=mesh))
