"""One step of one rank without values: which bytes live when. Nothing is allocated and no rank runs.

The forward and backward passes of the loss run on fake tensors, with four of each run of equal blocks. The
other blocks, and everything that a strategy holds, are arithmetic.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import nn

from fnaccel import _torch as framework
from fnaccel.data.micro_batches import micro_batches
from fnaccel.estimate.account import Account
from fnaccel.estimate.crossings import Crossings, watch
from fnaccel.estimate.repeated import TRACED, Repeated, shorten
from fnaccel.estimate.sharded import GRADIENTS, Gathers, Unit
from fnaccel.models import _torch
from fnaccel.models.building import Built
from fnaccel.models.module_modes import ModuleModes
from fnaccel.models.unknown_values import ordinary_batch
from fnaccel.program.lower import Lowered
from fnaccel.step.loss import read_loss
from fnaccel.tree import Tree

_TRACED = 3


@attrs.define(kw_only=True, eq=False)
class TracePlan:
    """The modules, the step and the batch that a trace runs, and the strategy's part in it.

    Attributes:
        built: the modules of one rank, after model axes and transforms changed them, without values.
        lowered: the step.
        batch: one rank's batch, on the meta device.
        units: the modules that are sharded, and their unit. Empty without shards.
        gathers: the account of shards, or None.
        averaged: whether gradients are copied into buckets as backward makes them.
        inside: names of modules that transforms and strategy are about.
        most: how many blocks of a run of equal ones are traced. 0: all.
    """

    built: Built
    lowered: Lowered
    batch: Tree
    units: Sequence[tuple[nn.Module, Unit]] = ()
    root: Unit | None = None
    gathers: Gathers | None = None
    averaged: bool = False
    inside: Mapping[str | None, Sequence[str]] = attrs.field(factory=dict[str | None, Sequence[str]])
    most: int = TRACED


def trace(plan: TracePlan, account: Account) -> int:
    """Run the forward and backward passes of one step, and count them in `account`.

    Returns:
        How many blocks were not traced, since they equal one that was.
    """
    modules = plan.built.modules.items() if plan.most else ()
    runs = [run for key, module in modules for run in shorten(module, plan.inside.get(key, ()), plan.most)]
    fake = _torch.fake_mode()
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(fake)
        stack.enter_context(ordinary_batch())
        units = [unit for _, unit in plan.units] + ([] if plan.root is None else [plan.root])
        batch = fill(plan.built.host, units, plan.batch, account)
        pass_ = _Pass(plan, account, runs)
        ModuleModes(list(plan.built.modules.values()), trains=True)
        stack.enter_context(account)
        pass_.step(batch)
    return sum(run.left_out for run in runs)


def fill(host: nn.Module, units: Sequence[Unit], batch: Tree, account: Account) -> Any:
    """Put fake tensors on the CPU in the place of parameters and buffers, and return a batch of them.

    Parameters of a unit have its compute dtype. None of these tensors are counted.
    """
    dtypes = {id(param): unit.compute for unit in units for param in unit.params}
    replaced: dict[int, nn.Parameter] = {}

    def filled(param: nn.Parameter) -> nn.Parameter:
        if id(param) not in replaced:
            dtype = dtypes.get(id(param)) or param.dtype
            value = torch.empty_strided(param.shape, param.stride(), dtype=dtype, device="cpu")
            replaced[id(param)] = nn.Parameter(value, requires_grad=param.requires_grad)
        return replaced[id(param)]

    framework.replace_parameters(host, filled)
    for unit in units:
        unit.params = [replaced[id(param)] for param in unit.params if id(param) in replaced]
    for module in host.modules():
        slots = framework.buffers_of(module)
        for name, value in slots.items():
            slots[name] = None if value is None else _empty(value)
    inputs = _torch.tree_map(_empty, batch)
    tensors = (value for value in _torch.tree_leaves(inputs) if isinstance(value, torch.Tensor))
    account.leave_out([*host.parameters(), *host.buffers(), *tensors])
    return inputs


def _empty(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty(value.shape, dtype=value.dtype, device="cpu")


class _Pass:
    """The passes of a step, with an account of everything that they hold."""

    def __init__(self, plan: TracePlan, account: Account, runs: Sequence[Repeated]) -> None:
        self._plan = plan
        self._account = account
        self._communicates = True
        events: dict[int, tuple[nn.Module, list[Crossings]]] = {}
        gathers = plan.gathers
        present = {id(module) for module in plan.built.host.modules()}
        if gathers is not None:
            for module, unit in plan.units:
                if id(module) in present:
                    events.setdefault(id(module), (module, []))[1].append(_crossings_of(gathers, unit))
        for run in runs:
            self._leave_out(run, lambda module: events.setdefault(id(module), (module, []))[1])
        for module, crossings in events.values():
            watch(module, _together(crossings))
        for param in plan.built.host.parameters():
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(self._accumulated)

    def step(self, batch: Tree) -> None:
        """All micro-batches, or the first ones and the last one if there are many."""
        account, settings = self._account, self._plan.lowered.settings
        micros = micro_batches(batch, settings.micro_batches, torch.device("cpu"))
        account.phase = "forward"
        account.hold(0)
        traced = [*micros[: _TRACED - 1], micros[-1]] if len(micros) > _TRACED else micros
        results: list[Any] = []
        for number, micro in enumerate(traced):
            self._communicates = number == len(traced) - 1 or settings.sync_each
            if self._plan.gathers is not None:
                self._plan.gathers.communicates = self._communicates
            work = account.work.copy()
            self._differentiate(self._forward(micro.data, results))
            if number == 1 and len(micros) > _TRACED:
                account.work.repeat(work, len(micros) - _TRACED)
        account.phase = "update"
        account.hold(0)

    def _forward(self, data: Tree, results: list[Any]) -> torch.Tensor:
        gathers, root, loss = self._plan.gathers, self._plan.root, self._plan.lowered.loss
        self._account.phase = "forward"
        if gathers is not None and root is not None:
            gathers.before_forward(root)
        parts = read_loss(loss.fn(self._plan.built.model, data), loss.where)
        results.append(_torch.tree_map(_plain, (parts.weight, parts.aux)))
        total = parts.total
        if gathers is not None and root is not None:
            gathers.after_forward(root)
            total.register_hook(lambda _: gathers.before_backward(root))
        return total

    def _differentiate(self, total: torch.Tensor) -> None:
        self._account.phase = "backward"
        self._account.hold(0)
        total.backward()
        del total
        if self._plan.gathers is not None:
            self._plan.gathers.end()

    def _accumulated(self, param: torch.Tensor) -> None:
        grad, account = param.grad, self._account
        assert grad is not None
        size = grad.nbytes
        if self._plan.averaged and self._communicates:
            param.grad = None
            del grad
            if id(param) in account.labelled:
                account.labelled.discard(id(param))
                account.label(-size, GRADIENTS)
        elif id(param) not in account.labelled:
            account.labelled.add(id(param))
            account.label(size, GRADIENTS)

    def _leave_out(self, run: Repeated, events: Callable[[nn.Module], list[Crossings]]) -> None:
        """Count the blocks that are not traced like the second and the third, between which they would be."""
        account = self._account
        before_second = activations = grads = calls = 0
        work = account.work

        # In forward they run ahead of the strategy's events, and in backward behind them. By then the blocks
        # before have freed their tensors.
        def second_begins() -> None:
            nonlocal before_second, work, calls
            before_second, work, calls = account.live, account.work.copy(), calls + 1

        def third_begins() -> None:
            nonlocal activations, calls
            calls -= 1
            if calls:
                raise RuntimeError("the blocks of a run are not called one after the other")
            activations = (account.live - before_second) * run.left_out
            account.hold(activations)
            account.work.repeat(work, run.left_out)

        def backward_begins() -> None:
            nonlocal grads, work
            grads, work = account.held(GRADIENTS), account.work.copy()

        def backward_ended() -> None:
            account.hold(-activations)
            account.hold((account.held(GRADIENTS) - grads) * run.left_out, GRADIENTS)
            account.work.repeat(work, run.left_out)

        events(run.second).insert(0, Crossings(second_begins, _nothing, _nothing, _nothing))
        events(run.third).insert(0, Crossings(third_begins, _nothing, backward_begins, _nothing))
        events(run.third).append(Crossings(_nothing, _nothing, _nothing, backward_ended))


def _nothing() -> None:
    pass


def _crossings_of(gathers: Gathers, unit: Unit) -> Crossings:
    return Crossings(
        lambda: gathers.before_forward(unit),
        lambda: gathers.after_forward(unit),
        lambda: gathers.before_backward(unit),
        lambda: gathers.after_backward(unit),
    )


def _together(crossings: Sequence[Crossings]) -> Crossings:
    def run(functions: Sequence[Callable[[], Any]]) -> Any:
        results = [function() for function in functions]
        return next((result for result in results if result is not None), None)

    return Crossings(
        lambda: run([each.before_forward for each in crossings]),
        lambda: run([each.after_forward for each in crossings]),
        lambda: run([each.before_backward for each in crossings]),
        lambda: run([each.after_backward for each in crossings]),
    )


def _plain(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value
