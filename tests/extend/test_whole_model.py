"""Units, frozen parameters and patterns are those of the whole model, also if an axis cuts and replaces modules."""

from __future__ import annotations

from typing import ClassVar

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule

import fnaccel as fa
from fnaccel.errors import ArgumentError
from fnaccel.models.parameter import Cut
from fnaccel.strategies import Axis, maker
from tests.tiny_models import Net, batch_of, loss_fn, whole_params


class _Summed(torch.autograd.Function):
    """The same input on each rank. The gradient is summed."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx, grad):
        total = torch.ops._c10d_functional.all_reduce(grad.contiguous(), "sum", ctx.group)
        return torch.ops._c10d_functional.wait_tensor(total), None


class _Joined(torch.autograd.Function):
    """The columns of all ranks. Each rank takes the gradient of its own."""

    @staticmethod
    def forward(ctx, x, group, rank):
        ctx.rank, ctx.width = rank, x.shape[1]
        rows = torch.ops._c10d_functional.all_gather_into_tensor(x.t().contiguous(), 2, group)
        return torch.ops._c10d_functional.wait_tensor(rows).t().contiguous()

    @staticmethod
    def backward(ctx, grad):
        return grad.narrow(1, ctx.rank * ctx.width, ctx.width), None, None


class Columned(nn.Module):
    """Some columns of a Linear: another class, with parameters of its own."""

    def __init__(self, linear, axis):
        super().__init__()
        self.group, self.rank = axis.group.group_name, axis.rank
        self.weight = nn.Parameter(linear.weight.detach().chunk(axis.size)[axis.rank].clone())
        self.bias = nn.Parameter(linear.bias.detach().chunk(axis.size)[axis.rank].clone())

    def forward(self, x):
        columns = F.linear(_Summed.apply(x, self.group), self.weight, self.bias)
        return _Joined.apply(columns, self.group, self.rank)


@attrs.frozen
class Columns(Axis):
    mesh_axis: ClassVar[str] = "tp"
    maker: ClassVar[str] = "tests.extend.test_whole_model:columns"
    degree: int = -1
    away: str = ""

    def apply(self, built, mesh):
        model = built.model
        for number, block in enumerate(model.blocks):
            for kind, value in block.mix.named_parameters():
                built.cuts[f"blocks.{number}.mix.{kind}"] = Cut(shape=value.shape, dim=0)
            block.mix = Columned(block.mix, mesh["tp"])
        model.out.forward = lambda x, forward=model.out.forward: forward(x)
        if self.away:
            del model.blocks[int(self.away)]


@maker
def columns(degree=-1, away=""):
    return fa.strategies.Strategy((Columns(degree, away),))


COLUMNS = "tests.extend.test_whole_model:columns(2)"


def wide(name, module):
    return isinstance(module, nn.Linear) and module.out_features == 6


UNITS = {
    "block": ("block", {"blocks.0", "blocks.1"}),
    "class": ("Linear", {"inp", "blocks.0.mix", "blocks.1.mix", "out"}),
    "size": (30, {"blocks.0.mix", "blocks.1.mix"}),  # 42 parameters in all, and 21 on a rank
    "function": (wide, {"inp", "blocks.0.mix", "blocks.1.mix"}),
}


def patched(model, name):
    return {
        path
        for path, module in model.named_modules()
        if name in getattr(vars(module).get("forward"), "__qualname__", "")
    }


def remat_units(strategy, kind):
    train_step = fa.train_step(
        fa.remat(loss_fn, UNITS[kind][0]), model=fa.distribute(Net, strategy), optimizer=fa.sgd(0.1)
    )
    state = train_step.init(seed=0)
    state, metrics = train_step(state, batch_of(4))
    return patched(train_step.engine.layout.model, "recomputed"), float(metrics["loss"])


@pytest.mark.parametrize("kind", UNITS)
def test_remat_recomputes_the_units_of_the_whole_model(pools, kind):
    [(whole, loss)] = pools.run(1, remat_units, "local", kind)
    assert whole == UNITS[kind][1]
    for units, there in pools.run(2, remat_units, COLUMNS, kind):
        assert units == whole
        assert there == pytest.approx(loss, rel=1e-6, abs=1e-6)


def compiled_units(strategy, kind):
    step = fa.compile(loss_fn, "block", units=UNITS[kind][0], backend="eager")
    train_step = fa.train_step(step, model=fa.distribute(Net, strategy), optimizer=fa.sgd(0.1))
    train_step.init(seed=0)
    model = train_step.engine.layout.model
    return {
        path
        for path, module in model.named_modules()
        if hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")
    }


@pytest.mark.parametrize("kind", UNITS)
def test_compile_takes_the_units_of_the_whole_model(pools, kind):
    assert pools.run(1, compiled_units, "local", kind) == [UNITS[kind][1]]
    assert pools.run(2, compiled_units, COLUMNS, kind) == [UNITS[kind][1]] * 2


def fsdp_units(kind):
    strategy = fa.fsdp(2, units=UNITS[kind][0]) * columns(2)
    train_step = fa.train_step(loss_fn, model=fa.distribute(Net, strategy), optimizer=fa.sgd(0.1))
    train_step.init(seed=0)
    model = train_step.engine.layout.model
    return {path for path, module in model.named_modules() if isinstance(module, FSDPModule)}


@pytest.mark.parametrize("kind", UNITS)
def test_fsdp_shards_the_units_of_the_whole_model(pools, kind):
    for units in pools.run(4, fsdp_units, kind):
        assert units == UNITS[kind][1]


def trained(strategy, compiled, parts):
    """Parameters after some steps with a frozen block and rates by size, and the names that were trained."""
    optimizer = fa.optim.optimizer_groups([
        (lambda name, p: p.numel() >= 30, fa.sgd(0.3)), ("out.*", fa.sgd(0.2)), ("*", fa.sgd(0.1)),
    ])  # fmt: skip
    step = fa.clip_norm(loss_fn, 0.5)
    step = fa.compile(step, "step", backend="aot_eager") if compiled else fa.remat(step, 30)
    train_step = fa.train_step(
        step, model=fa.distribute(Net, strategy), optimizer=optimizer, frozen="blocks.0.*"
    )
    state = train_step.init(seed=0)
    for number in range(3):
        batch = batch_of(8, seed=number)
        rows = (
            slice(None)
            if parts == 1
            else slice(4 * train_step.mesh.batch_rank, 4 * train_step.mesh.batch_rank + 4)
        )
        state, _ = train_step(state, tuple(x[rows] for x in batch))
    return whole_params(state), {leaf.name for leaf in train_step.engine.layout.leaves}


@pytest.mark.long_except("False")
@pytest.mark.parametrize(("strategy", "ranks", "compiled"), [
    (COLUMNS, 2, False), (f"ddp(2) * {COLUMNS}", 4, False), (f"fsdp(2, units=30) * {COLUMNS}", 4, False),
    (COLUMNS, 2, True), (f"fsdp(2, units=30) * {COLUMNS}", 4, True),
])  # fmt: skip
def test_frozen_parameters_and_patterns_are_those_of_the_whole_model(pools, strategy, ranks, compiled):
    [(expected, leaves)] = pools.run(1, trained, "local", False, 1)
    assert not any(name.startswith("blocks.0.") for name in leaves)
    for params, there in pools.run(ranks, trained, strategy, compiled, ranks // 2):
        assert there == leaves
        assert params.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(params[name], value, atol=1e-5, rtol=1e-5)


def without_a_unit():
    step = fa.remat(loss_fn)
    strategy = columns(2, away="1")
    train_step = fa.train_step(step, model=fa.distribute(Net, strategy), optimizer=fa.sgd(0.1))
    with pytest.raises(ArgumentError) as raised:
        train_step.init(seed=0)
    return str(raised.value)


def test_an_axis_that_takes_a_unit_away_is_named(pools):
    for text in pools.run(2, without_a_unit):
        assert "took the module 'blocks.1' away, which is a unit" in text
        assert "where: transform remat" in text
