"""`fa.params` and `fa.call`: parameters as an argument, equal to a raw loop on each strategy that can."""

from __future__ import annotations

import attrs
import pytest
import torch

import fnaccel as fa
from fnaccel import errors
from fnaccel.testing import count_collectives
from tests.parameter_losses import (
    LOSSES,
    accumulated,
    captured,
    equals,
    loss_of,
    part_of,
    raw,
    recomputed,
    trained,
)
from tests.tiny_models import Block, Net, batch_of, program, whole_params


def each(step):
    return fa.accumulate(step, 4, sync="each")


WAYS = {
    "local": (1, fa.local(), None),
    "local-accumulated": (1, fa.local(), accumulated),
    "local-remat": (1, fa.local(), recomputed),
    "local-captured": (1, fa.local(), captured),
    "ddp": (2, fa.ddp(), None),
    "fsdp": (2, fa.fsdp(), None),
    "fsdp-accumulated": (2, fa.fsdp(), accumulated),
    "fsdp-each": (2, fa.fsdp(), each),
    "fsdp-remat": (2, fa.fsdp(), recomputed),
    "fsdp-root": (2, fa.fsdp(units=None), None),
    "fsdp-kept": (2, fa.fsdp(reshard_after_forward=False), None),
    "fsdp-linear-remat": (2, fa.fsdp(units="Linear"), recomputed),
    "fsdp-captured": (2, fa.fsdp(), captured),
    "ddp-captured": (2, fa.ddp(), captured),
}


def rows():
    for way in WAYS:
        for name in LOSSES:
            if name == "adapted" and ("accumulated" in way or "captured" in way):
                continue  # maml in test_programs.py
            if name == "pushed" and "remat" in way:
                continue  # refused by name: see below
            few = way in ("fsdp-each", "fsdp-root", "fsdp-linear-remat") and name not in ("halved", "both")
            yield pytest.param(way, name, marks=[pytest.mark.long] if few or "captured" in way else [])


@pytest.mark.parametrize(("way", "name"), list(rows()))
def test_equals_a_raw_loop(pools, way, name):
    ranks, strategy, change = WAYS[way]
    expected = raw(name)
    for found in pools.run(ranks, trained, name, strategy, change):
        assert equals(found, expected)


class Tied(torch.nn.Module):
    """One weight under two names, a frozen layer, a buffer, and a method."""

    def __init__(self):
        super().__init__()
        self.inp = torch.nn.Linear(3, 6, bias=False)
        self.mix = torch.nn.Linear(6, 6)
        self.out = torch.nn.Linear(3, 6, bias=False)
        self.out.weight = self.inp.weight
        self.register_buffer("shift", torch.ones(6))
        self.mix.requires_grad_(False)

    def forward(self, x):
        return self.last(torch.tanh(self.mix(self.inp(x)) + self.shift))

    def last(self, h):
        return (h @ self.out.weight).sum(1, keepdim=True)


def scaled(model, batch):
    x, y = batch
    params = fa.params(model)
    assert list(params) == ["inp.weight"]
    assert params["inp.weight"].shape == (6, 3)
    inside = fa.call(model.mix, {"weight": torch.eye(6), "bias": torch.zeros(6)}, fa.call(model.inp, {}, x))
    assert torch.allclose(inside, x @ params["inp.weight"].T)
    half = {name: 0.5 * value for name, value in params.items()}
    method = fa.call(model, half | {"shift": torch.zeros(6)}, torch.ones(len(y), 6), method="last")
    return fa.Mean((fa.call(model, half, x) - y + method).square().sum(), weight=len(y))


def train_tied(strategy):
    train_step = program(scaled, strategy=strategy, optimizer=fa.sgd(0.05), model=Tied)
    state = train_step.init(seed=0)
    for number in range(2):
        mesh = train_step.mesh["loss"]
        batch = part_of(batch_of(12, seed=number), mesh.rank, mesh.size)
        state, metrics = train_step(state, batch)
    return [float(metrics["loss"])], whole_params(state)


def test_tied_frozen_buffers_submodules_and_methods(pools):
    (expected,) = pools.run(1, train_tied, fa.local())
    for strategy in (fa.ddp(), fa.fsdp(), fa.fsdp(units=None)):
        for found in pools.run(2, train_tied, strategy):
            assert equals(found, expected)


def teach(strategy):
    """A lent model's parameters are values, and take no gradient."""
    teacher = program(strategy=strategy)
    taught = teacher.init(seed=1)
    seen = []

    def loss(model, batch, given):
        x, _ = batch
        params = fa.params(given["teacher"])
        seen.append(sorted(params))
        assert not any(value.requires_grad for value in params.values())
        aim = fa.call(given["teacher"], {n: 0.5 * p for n, p in params.items()}, x)
        return fa.Mean((model(x) - aim).square().sum(), weight=len(x))

    train_step = program(loss, strategy=strategy)
    state = train_step.init(seed=0)
    rank, ranks = train_step.mesh["loss"].rank, train_step.mesh["loss"].size
    for number in range(2):
        batch = part_of(batch_of(12, seed=number), rank, ranks)
        state, metrics = train_step(state, batch, given={"teacher": taught})
    assert seen[0] == sorted(taught.params)
    return [float(metrics["loss"])], whole_params(state)


def test_a_lent_model(pools):
    (expected,) = pools.run(1, teach, fa.local())
    for strategy in (fa.ddp(), fa.fsdp()):
        for found in pools.run(2, teach, strategy):
            assert equals(found, expected)


def told(strategy, name):
    return trained(name, strategy)[2]


def test_the_plan_says_what_is_whole(pools):
    for plan in pools.run(2, told, fa.fsdp(), "halved"):
        assert "the loss takes whole parameters (fa.params): 460 B a rank" in plan
    for plan in pools.run(2, told, fa.ddp(), "halved"):
        assert "whole parameters" not in plan


def counted(name):
    train_step = program(loss_of(name), strategy=fa.fsdp(), optimizer=fa.sgd(0.05))
    state = train_step.init(seed=0)
    batch = part_of(batch_of(12), train_step.mesh["loss"].rank, 2)
    for _ in range(2):
        state, _ = train_step(state, batch)
    with count_collectives() as counts:
        train_step(state, batch)
    return dict(counts.counts)


def test_one_gather_and_one_reduction_a_unit(pools):
    for counts in pools.run(2, counted, "halved"):
        found = {name: count for name, count in counts.items() if "gather" in name or "scatter" in name}
        # three units; FSDP2 gathers the root's parameters for the forward of the host as well
        assert sorted(found.values()) == [3, 4], counts


def looked(strategy):
    train_step = program(strategy=strategy)
    state = train_step.init(seed=0)
    x, _ = batch_of(4)

    def half(model):
        return fa.call(model, {n: 0.5 * p for n, p in fa.params(model).items()}, x)

    found = train_step.look(state, half)
    doubled = {name: 2.0 * value for name, value in state.params.items()}
    state = train_step.adopt(attrs.evolve(state, params=doubled))
    return found, train_step.look(state, half)  # values of this moment, not of the look before


def test_in_a_look(pools):
    (expected,) = pools.run(1, looked, fa.local())
    for found in pools.run(2, looked, fa.fsdp()):
        assert fa.tree.allclose(found, expected, rtol=1e-5, atol=1e-6)


def failing(strategy):
    """A loss that fails after it has taken whole parameters leaves the state live and exact."""
    fails = [True]

    def loss(model, batch):
        x, y = batch
        params = fa.params(model)
        total = (fa.call(model, {n: 0.5 * p for n, p in params.items()}, x) - y).square().sum()
        if fails[0]:
            raise RuntimeError("of the user")
        return fa.Mean(total, weight=len(y))

    train_step = program(loss, strategy=strategy, optimizer=fa.sgd(0.05))
    state = train_step.init(seed=0)
    batch = part_of(batch_of(12), train_step.mesh["loss"].rank, train_step.mesh["loss"].size)
    with pytest.raises(RuntimeError, match="of the user"):
        train_step(state, batch)
    fails[0] = False
    state, metrics = train_step(state, batch)
    return [float(metrics["loss"])], whole_params(state)


def test_a_loss_that_fails(pools):
    expected = raw("halved", steps=1)
    for found in pools.run(2, failing, fa.fsdp()):
        assert equals(found, expected)


def low(strategy):
    return trained("halved", strategy, bf16)


def bf16(step):
    return fa.with_precision(step, "bf16")


def test_bf16(pools):
    (expected,) = pools.run(1, low, fa.local())
    for strategy in (fa.ddp(), fa.fsdp()):
        for found in pools.run(2, low, strategy):
            assert abs(found[0][0] - expected[0][0]) < 1e-2
            assert fa.tree.allclose(found[1], expected[1], rtol=2e-2, atol=2e-3)


def refused(strategy, change=None):
    with pytest.raises(errors.CapabilityError) as raised:
        trained("halved", strategy, change, ragged=False)
    return str(raised.value)


def test_what_is_refused(pools):
    plan = {"blocks.*.mix": "colwise_gather"}
    for text in pools.run(2, refused, fa.tensor(2, plan=plan)):
        assert "ranks along tp compute parts of one model" in text
        assert "fa.fsdp()" in text


def test_a_plain_module():
    model = Tied()
    params = fa.params(model)
    assert list(params) == ["inp.weight"]
    assert params["inp.weight"] is model.inp.weight
    x = torch.ones(2, 3)
    assert torch.equal(fa.call(model, params, x), model(x))
    with pytest.raises(
        errors.UnknownNameError, match=r"no parameter or buffer 'inp.wieght'[^$]*did you mean 'inp.weight'"
    ):
        fa.call(model, {"inp.wieght": params["inp.weight"]}, x)
    with pytest.raises(errors.TreeMismatchError, match=r"shape \[3, 6\], not \[6, 3\]"):
        fa.call(model, {"inp.weight": params["inp.weight"].T}, x)
    with pytest.raises(errors.ArgumentError, match="is list, not a dict"):
        fa.call(model, [params], x)
    with pytest.raises(errors.ArgumentError, match="is float, not a tensor"):
        fa.call(model, {"inp.weight": 1.0}, x)
    with pytest.raises(errors.ArgumentError, match="dict, not a module"):
        fa.params({"one": model})


class Attentive(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = torch.nn.Linear(3, 8)

    def forward(self, x):
        q = self.inp(x).view(len(x), 2, 2, 2)
        return torch.nn.functional.scaled_dot_product_attention(q, q, q).sum((1, 2, 3))[:, None]


class Normed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.norm = torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)
        self.drop = torch.nn.Dropout(0.5)

    def forward(self, x):
        return self.norm(self.inp(x))

    def dropped(self, x):
        return self.drop(self.inp(x))

    def masked(self, x):
        return self.inp(x)[self.inp(x) > 0]

    def branching(self, x):
        return self.inp(x) if self.inp(x).sum() > 0 else x


def of_rows(method, **options):
    def total(model, x):
        held = {name: value.detach() for name, value in fa.params(model).items()}

        def row(p, x):
            return fa.call(model, p, x[None], method=method).sum()

        grads = torch.func.vmap(torch.func.grad(row), (None, 0), **options)(held, x)
        return sum(value.square().sum() for value in grads.values()) + model.inp(x).sum()

    return total


def second(model, x):
    params = fa.params(model)
    grads = torch.autograd.grad(fa.call(model, params, x).sum(), list(params.values()), create_graph=True)
    return sum(grad.square().sum() for grad in grads)


def forward_mode(model, x):
    held = {name: value.detach() for name, value in fa.params(model).items()}
    moved = torch.func.jvp(lambda p: fa.call(model, p, x), (held,), (held,))[1]
    return moved.square().sum() + model(x).sum()


LACKING = {
    "a forward derivative through fa.remat": (fa.remat, Net, forward_mode),
    "no second derivative": (Attentive, second),
    "running statistics of a batch norm": (Normed, of_rows("forward")),
    "draws random numbers": (Normed, of_rows("dropped")),
    "reads a tensor on the host": (Normed, of_rows("branching")),
    "length depends on values": (Normed, of_rows("masked")),
}


@pytest.mark.parametrize("what", LACKING)
def test_what_torch_lacks(what):
    *change, make, total = LACKING[what]
    with fa.start(device="cpu"):

        def loss(model, batch):
            return total(model, batch[0])

        train_step = program(change[0](loss) if change else loss, model=make)
        state = train_step.init(seed=0)
        with pytest.raises(errors.CapabilityError, match=what):
            train_step(state, batch_of(4))
        assert train_step.live_state is state


def test_the_ways_of_what_torch_lacks():
    def math(model, batch):
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return second(model, batch[0])

    different = of_rows("dropped", randomness="different")
    for make, loss in ((Attentive, math), (Normed, lambda model, batch: different(model, batch[0]))):
        with fa.start(device="cpu"):
            train_step = program(loss, model=make)
            _, metrics = train_step(train_step.init(seed=0), batch_of(4))
            assert torch.isfinite(metrics["loss"])


def test_dropout_of_a_block_that_runs_again():
    """The second run draws what the first drew."""

    class DroppingBlock(Block):
        def forward(self, x):
            return torch.nn.functional.dropout(super().forward(x), 0.5)

    class Dropping(Net):
        def __init__(self):
            super().__init__()
            self.blocks = torch.nn.ModuleList(DroppingBlock() for _ in range(2))

    found = []
    for change in (None, recomputed):
        with fa.start(device="cpu"):
            found.append(trained("halved", fa.local(), change, make=Dropping))
    assert equals(found[1], found[0])
