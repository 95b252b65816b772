"""Frozen weights in a small dtype: what is stored, what is computed, what backward keeps, what is refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fnaccel as fa
from fnaccel import errors
from fnaccel.testing import assert_close
from fnaccel.world.world import current

FP8 = torch.float8_e4m3fn


class Adapted(nn.Module):
    """Trained layers before and after frozen ones: gradients flow through what is cast."""

    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(16, 32)
        self.base = nn.ModuleDict(
            {
                "embed": nn.Embedding(8, 32),
                "up": nn.Linear(32, 48),
                "norm": nn.LayerNorm(48),
                "down": nn.Linear(48, 32),
            }
        )
        self.out = nn.Linear(32, 4)

    def forward(self, x):
        hidden = self.inp(x) + self.base["embed"](x.argmax(1) % 8)
        return self.out(self.base["down"](self.base["norm"](self.base["up"](hidden)).relu()))


def loss_fn(model, batch):
    x, y = batch
    return fa.Mean(F.cross_entropy(model(x).float(), y, reduction="sum"), weight=len(y))


def batch_of(rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 16, generator=generator)
    return x, x[:, :4].argmax(1)


def made(step, strategy="local", model=Adapted, frozen=("base.*",), **options):
    return fa.train_step(
        step, model=fa.distribute(model, strategy), optimizer=fa.sgd(0.5), frozen=frozen, **options
    )


def trained(step, strategy="local", rounds=3, **options):
    world = current()
    train_step = made(step, strategy, **options)
    state = train_step.init(seed=0)
    losses = []
    for call in range(rounds):
        x, y = batch_of(13, call)
        if world.size == 2:
            x, y = (x[:9], y[:9]) if world.rank == 0 else (x[9:], y[9:])
        state, metrics = train_step(state, (x, y))
        losses.append(float(metrics["loss"]))
    found = {name: value.detach().float().clone() for name, value in state.params.items()}
    dtypes = {name: value.dtype for name, value in state.params.items()}
    train_step.close()
    return {"losses": losses, "params": found, "dtypes": dtypes}


def rounded(factory=Adapted, dtype=FP8):
    """The oracle: a model whose frozen weights were rounded once, and are kept in fp32."""

    def make():
        net = factory()
        for name, param in net.named_parameters():
            if name.startswith("base.") and "norm" not in name:
                param.data = param.data.to(dtype).float()
        return net

    return make


@pytest.fixture
def world():
    with fa.start() as started:
        yield started


@pytest.mark.parametrize("precision", ["bf16", None])
@pytest.mark.parametrize(("storage", "dtype"), [("fp8", FP8), ("bf16", torch.bfloat16)])
def test_equals_a_model_whose_weights_were_rounded(storage, dtype, precision, world):
    """Casting rounds once, where it is stored; through all of training it is the rounded model."""
    plain = loss_fn if precision is None else fa.with_precision(loss_fn, precision)
    compute = "bf16" if precision else "fp32"
    found = trained(fa.transforms.cast_layers(plain, storage, compute=compute))
    expected = trained(plain, model=rounded(dtype=dtype))
    assert_close(found["losses"], expected["losses"])
    assert_close(found["params"], expected["params"])
    small = {"base.embed.weight", "base.up.weight", "base.up.bias", "base.down.weight", "base.down.bias"}
    assert {name for name, kind in found["dtypes"].items() if kind is dtype} == small
    assert all(kind is torch.float32 for name, kind in found["dtypes"].items() if name not in small)


def test_without_autocast_layers_compute_in_bf16(world):
    """And hand on what they were given: the trained layers around them stay in fp32."""
    found = trained(fa.transforms.cast_layers(loss_fn, "bf16"))
    expected = trained(loss_fn)
    assert_close(found["losses"], expected["losses"], precision="bf16")
    assert found["losses"] != expected["losses"]


def test_backward_keeps_the_small_weights(world):
    """Backward reads the small weight again: made zero in between, it lets no gradient through."""
    for kept in (True, False):
        train_step = made(fa.transforms.cast_layers(fa.with_precision(loss_fn, "bf16"), "fp8"))
        train_step.init(seed=0)
        model = train_step.engine.layout.model
        with torch.autocast("cpu", dtype=torch.bfloat16):
            total = loss_fn(model, batch_of(5)).total
        if not kept:
            model.base["up"].weight.data.copy_(torch.zeros(48, 32))
        total.backward()
        assert bool(model.inp.weight.grad.any()) is kept
        train_step.close()


def test_tied_weights_stay_tied_or_stay_large(world):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(4, 16)
            self.inp = nn.Linear(16, 16)
            self.head = nn.Linear(16, 4, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x):
            return self.head(self.inp(x) + self.embed(x.argmax(1) % 4))

    train_step = made(
        fa.with_precision(fa.transforms.cast_layers(loss_fn), "bf16"), model=Tied, frozen=("embed*",)
    )
    assert "stored in float8_e4m3fn: embed, head" in str(train_step.plan)
    state = train_step.init()
    state, _ = train_step(state, batch_of(6))
    model = train_step.engine.layout.model
    assert model.head.weight is model.embed.weight
    assert state.params["embed.weight"].dtype is FP8
    with pytest.raises(errors.CapabilityError, match="not head: tied to embed, which is not cast"):
        made(fa.transforms.cast_layers(loss_fn, skip=("embed",)), model=Tied, frozen=("embed*",))


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp8", FP8)])
def test_ddp_agrees_with_one_process(pools, world, name, dtype):
    step = fa.transforms.cast_layers(loss_fn, name)
    alone = trained(step)
    for found in pools.run(2, trained, step, "ddp"):
        assert found["dtypes"]["base.up.weight"] is dtype
        assert_close(found["losses"], alone["losses"], precision="bf16")
        assert_close(found["params"], alone["params"], precision="bf16")


def test_a_checkpoint_holds_the_small_values(world, tmp_path):
    train_step = made(fa.transforms.cast_layers(loss_fn, "fp8"))
    state = train_step.init(seed=0)
    state, _ = train_step(state, batch_of(6))
    kept = fa.snapshot(state)
    fa.save(str(tmp_path), state)
    other = made(fa.transforms.cast_layers(loss_fn, "fp8"))
    back = fa.restore(str(tmp_path), like=other.init(seed=5))
    assert back.params["base.up.weight"].dtype is FP8
    assert torch.equal(back.params["base.up.weight"].float(), kept.params["base.up.weight"].float())
    plain = made(loss_fn)
    with pytest.raises(errors.TreeMismatchError, match="float8_e4m3fn"):
        fa.restore(str(tmp_path), like=plain.init())


def test_a_teacher_without_an_optimizer_is_all_frozen(world):
    teacher = fa.train_step(
        fa.transforms.cast_layers(loss_fn, "fp8"), model=fa.distribute(Adapted, "local"), optimizer=None
    )
    assert "stored in float8_e4m3fn: inp, base.embed, base.up, base.down, out" in str(teacher.plan)
    state = teacher.init()
    assert state.params["inp.weight"].dtype is FP8
    assert teacher.look(state, lambda model, x: model(x), batch_of(3)[0]).dtype is torch.float32


def test_the_plan_says_what_is_stored_small(world):
    text = str(made(fa.transforms.cast_layers(loss_fn, skip=("*norm*", "*embed*"))).plan)
    assert "frozen weights stored in float8_e4m3fn, computed in bfloat16" in text
    assert "stored in float8_e4m3fn: base.up, base.down" in text
    assert "not inp, out: trained" in text
    assert "not base.embed: skip='*embed*'" in text


def test_mistakes_are_named(world):
    cast = fa.transforms.cast_layers(loss_fn)
    for make, error, words in (
        (lambda: made(cast, frozen=()), errors.CapabilityError, "no weight of this model"),
        (lambda: made(fa.transforms.cast_layers(loss_fn, only=("out",))), errors.CapabilityError, "out.weight is trained"),
        (lambda: made(fa.transforms.cast_layers(loss_fn, only=("oout",))), errors.ArgumentError, "matches no layer"),
        (lambda: made(cast, "fsdp"), errors.CapabilityError, "fsdp gathers"),
        (lambda: made(fa.compile(cast, "loss")), errors.CapabilityError, "torch.compile"),
        (lambda: made(fa.with_precision(cast, "fp16")), errors.CapabilityError, "cast twice"),
        (lambda: fa.transforms.cast_layers(loss_fn, "fp9"), errors.UnknownNameError, "fp8"),
        (lambda: fa.transforms.cast_layers(loss_fn, "fp32"), errors.ArgumentError, "save nothing"),
        (lambda: fa.transforms.cast_layers(cast), errors.RepeatedTransformError, "twice"),
    ):  # fmt: skip
        with pytest.raises(error, match=words):
            make()


def test_trained_parameters_are_refused_when_only_init_can_tell(world):
    def factory():
        net = Adapted()
        net.scale = float(net.out.weight.sum())  # has no value while the plan is made
        return net

    train_step = made(fa.transforms.cast_layers(loss_fn, only=("out",)), model=factory)
    assert "known when init has built it" in str(train_step.plan)
    with pytest.raises(errors.CapabilityError, match=r"out\.weight is trained"):
        train_step.init()
