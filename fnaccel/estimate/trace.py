"""One step of one rank without values: which bytes live when, and what is sent. Nothing is allocated.

The forward and backward passes of the loss run on fake tensors, with four of each run of equal blocks. Under
fsdp the modules are sharded by torch's own FSDP2 over ranks that are simulated, so its gathers and buffers
are those of a real step. What lives for all of a step, and the gradients of ddp, are arithmetic.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import nn

from fnaccel import _torch as framework
from fnaccel.data.micro_batches import micro_batches
from fnaccel.engine.passes import Inputs
from fnaccel.estimate._torch import unsharded_gradients, without_chunks
from fnaccel.estimate.account import GRADIENTS, Account
from fnaccel.estimate.repeated import TRACED, Repeated, multiply, shorten
from fnaccel.estimate.stages import OneStage
from fnaccel.extend import Build, Built, Forward, MicroBatch, Spec
from fnaccel.models import _torch
from fnaccel.models.blocks import NamedUnits, find_units
from fnaccel.models.module_modes import ModuleModes
from fnaccel.models.unknown_values import ordinary_batch
from fnaccel.program.lower import Lowered
from fnaccel.step.loss import read_loss
from fnaccel.strategies._torch import finish_shards
from fnaccel.strategies.fsdp import Fsdp
from fnaccel.strategies.fsdp_engine import forward_of, shard
from fnaccel.strategies.shard_dims import shard_dims
from fnaccel.tree import Tree

_TRACED = 3


@attrs.frozen(kw_only=True)
class TracePlan:
    """The modules, the step and the batch that a trace runs, and the strategy's part in it.

    Attributes:
        built: the modules of one rank, after model axes and transforms changed them, without values.
        lowered: the step.
        batch: one rank's batch, on the meta device.
        spec: the train step, on a mesh of simulated ranks.
        fsdp: the axis of shards, or None.
        averaged: whether gradients are copied into buckets as backward makes them.
        inside: names of modules that transforms are about.
        most: how many blocks of a run of equal ones are traced. 0: all.
        stage: the stage of a pipeline that is traced alone.
    """

    built: Built
    lowered: Lowered
    batch: Tree
    spec: Spec
    fsdp: Fsdp | None = None
    averaged: bool = False
    inside: Mapping[str | None, Sequence[str]]
    most: int = TRACED
    stage: OneStage | None = None


def trace(plan: TracePlan, account: Account) -> int:
    """Run the forward and backward passes of one step, and count them in `account`.

    Of a stage they are those of one micro-batch, with the work of all.

    Returns:
        How many blocks were not traced, since they equal one that was.
    """
    host, fake = plan.built.host, _torch.fake_mode()
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        with fake:
            batch = fill(host, plan.batch)
        if plan.fsdp is not None:
            stack.enter_context(without_chunks())
        # outside of the fake mode, since meshes read the numbers of their ranks
        runs, forward = _prepared(plan)
        account.leave_out(tensors_of(host, batch))

        def label_gradients() -> None:
            account.label(unsharded_gradients(host), GRADIENTS)

        for run in runs:
            multiply(run, account, label_gradients)
        stack.enter_context(fake)
        stack.enter_context(ordinary_batch())
        pass_ = _Pass(plan, account, forward)
        trained = plan.spec.optimizers or {}
        ModuleModes([(module, key in trained) for key, module in plan.built.modules.items()])
        stack.enter_context(account)
        if plan.stage is None:
            pass_.step(batch)
        else:
            stack.enter_context(torch.enable_grad())
            pass_.stage(batch, plan.stage)
    return sum(run.left_out for run in runs)


def fill(host: nn.Module, batch: Tree) -> Any:
    """Put fake tensors on the CPU in the place of parameters and buffers, and return a batch of them."""

    def filled(param: nn.Parameter) -> nn.Parameter:
        value = torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device="cpu")
        return nn.Parameter(value, requires_grad=param.requires_grad)

    framework.replace_parameters(host, filled)
    for module in host.modules():
        slots = framework.buffers_of(module)
        for name, value in slots.items():
            slots[name] = None if value is None else _empty(value)
    return _torch.tree_map(_empty, batch)


def _empty(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty(value.shape, dtype=value.dtype, device="cpu")


def tensors_of(host: nn.Module, batch: Any) -> Iterator[torch.Tensor]:
    """This rank's tensors that live for all of a step."""
    yield from map(framework.local_of, host.parameters())
    yield from host.buffers()
    yield from (value for value in _torch.tree_leaves(batch) if isinstance(value, torch.Tensor))


def _prepared(plan: TracePlan) -> tuple[list[Repeated], Forward]:
    """Take equal blocks away, let the strategy arm the others, and return the runs and how to call them."""
    built, fsdp, mesh = plan.built, plan.fsdp, plan.spec.mesh
    units: dict[str | None, list[tuple[str, nn.Module]]] = {key: [] for key in built.modules}
    dims: dict[int, int | None] = {}
    if fsdp is not None:  # units and dimensions are those of the whole model
        for key, module in built.modules.items():
            units[key] = find_units(module, built.units.get(key, fsdp.units), "fa.fsdp(units=...)")
        dim_of = shard_dims(built, mesh.degrees, fsdp)
        dims = {id(param): dim_of[name] for name, param in built.named("parameters")}
    runs = [
        run
        for key, module in built.modules.items()
        if plan.most
        for run in shorten(module, [*plan.inside[key], *(name for name, _ in units[key])], plan.most)
    ]
    if fsdp is None:
        return runs, Forward(run=built.host, lend=built.host)
    for key, module in built.modules.items():
        names = {id(part): name for name, part in module.named_modules()}
        built.units[key] = NamedUnits(tuple(names[id(unit)] for _, unit in units[key] if id(unit) in names))
    build = Build(spec=plan.spec, settings=plan.lowered.settings, seed=0, prepare=lambda _: None)
    shard(built, build, fsdp, {name: dims[id(param)] for name, param in built.named("parameters")})
    finish_shards(built.host)
    return runs, forward_of(built.host)


class _Pass:
    """The passes of a step, with an account of everything that they hold."""

    def __init__(self, plan: TracePlan, account: Account, forward: Forward) -> None:
        self._plan = plan
        self._account = account
        self._forward = forward
        self._communicates = True
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
            before = account.moment()
            with self._forward.sync(self._communicates):
                self._run(micro, results)
            account.label(unsharded_gradients(self._plan.built.host), GRADIENTS)
            if number == 1 and len(micros) > _TRACED:
                account.work.repeat(before.work, len(micros) - _TRACED)
        account.phase = "update"
        account.hold(0)

    def stage(self, batch: Tree, stage: OneStage) -> None:
        """A micro-batch of one stage, and a second one beside the gradients of the first."""
        account, settings, host = self._account, self._plan.lowered.settings, self._plan.built.host
        first, *others = micro_batches(batch, settings.micro_batches, torch.device("cpu"))
        weights = [param for param in host.parameters() if param.requires_grad]
        stage.watch(account)
        stage.rows = [micro.valid / first.valid for micro in (first, *others)]
        for number in range(2 if others else 1):
            self._communicates = number == 1 or not others
            before = account.moment()
            with self._forward.sync(self._communicates):
                stage.run(lambda: self._total(first, []), weights)
            account.label([w.grad for w in weights if w.grad is not None], GRADIENTS)
            account.label(unsharded_gradients(host), GRADIENTS)
            stage.ran()
            if number == 0:
                account.work.repeat(before.work, max(0, len(others) - 1))

    def _run(self, micro: MicroBatch, results: list[Any]) -> None:
        account = self._account
        account.phase = "forward"
        total = self._total(micro, results)
        account.phase = "backward"
        account.hold(0)
        total.backward()

    def _total(self, micro: MicroBatch, results: list[Any]) -> torch.Tensor:
        """The total of the loss of a micro-batch."""
        loss = self._plan.lowered.loss

        def forward(model: Any, data: Tree) -> torch.Tensor:
            parts = read_loss(loss.fn(model, data), loss.where)
            results.append(_torch.tree_map(_plain, (parts.weight, parts.aux)))
            return parts.total

        if loss.informed is not None:  # extras are in a state, and here is none
            inputs = Inputs(step=0, updates=0, rates=[], root=0, rank=0, streams=())
            facts = inputs.facts(torch.device("cpu"), loss.informed)
            loss.informed.info = facts.of(attrs.evolve(micro, valid=0, first=0))
        return self._forward.run(forward, micro.data)

    def _accumulated(self, param: torch.Tensor) -> None:
        assert param.grad is not None
        if self._plan.averaged and self._communicates:
            param.grad = None
        else:
            self._account.label([framework.local_of(param.grad)], GRADIENTS)


def _plain(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value
