"""AdamW with moments in 8 and 4 bits: the backends' own classes are the oracle, and state comes back."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

import fnaccel as fa
from fnaccel import errors
from fnaccel.optim.quantized import code_table
from fnaccel.testing import assert_close
from fnaccel.world.world import current

pytest.importorskip("torchao", exc_type=ImportError)
pytest.importorskip("bitsandbytes")

ROWS = (5, 3)
MAKE = {
    "8bit": lambda **o: fa.optim.adamw8bit(0.01, **o),
    "bitsandbytes": lambda **o: fa.optim.adamw8bit(0.01, backend="bitsandbytes", **o),
    "4bit": lambda **o: fa.optim.adamw8bit(0.01, codes="4bit", **o),
    "fp8": lambda **o: fa.optim.adamw8bit(0.01, codes="fp8", **o),
}


class Wide(nn.Module):
    """Uneven rows over two ranks; `odd` has rows that no block divides, and stays in fp32."""

    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(256, 17)
        self.odd = nn.Linear(17, 256)
        self.out = nn.Linear(256, 33)

    def forward(self, x):
        return self.out(self.odd(self.inp(x).tanh()).tanh())


def loss_fn(model, batch):
    x, y = batch
    return fa.Mean((model(x) - y).square().sum(), weight=len(y))


def global_batch(step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(sum(ROWS), 256, generator=generator)
    return x, x[:, :33].sin()


def rank_batch(step):
    world = current()
    x, y = global_batch(step)
    if world.size == 1:
        return x, y
    start = sum(ROWS[: world.rank])
    return x[start : start + ROWS[world.rank]], y[start : start + ROWS[world.rank]]


def whole(value):
    full = value.full_tensor() if hasattr(value, "full_tensor") else value
    return full.detach().clone()


def begun(kind, strategy="local", step=loss_fn, **options):
    train_step = fa.train_step(step, model=fa.distribute(Wide, strategy), optimizer=MAKE[kind](**options))
    return train_step, train_step.init(seed=0)


def trained(kind, strategy="local", steps=4, folder=None):
    train_step, state = begun(kind, strategy)
    for step in range(steps):
        state, _ = train_step(state, rank_batch(step))
    if folder is not None:
        fa.save(folder, state)
    found = {name: whole(value) for name, value in state.params.items()}
    train_step.close()
    return found


def continued(kind, strategy, folder):
    """Two steps after a restore."""
    train_step, state = begun(kind, strategy)
    state = fa.restore(folder, like=state)
    for step in (4, 5):
        state, _ = train_step(state, rank_batch(step))
    found = {name: whole(value) for name, value in state.params.items()}
    train_step.close()
    return found


def oracle(kind, patch, steps=4):
    """The backend's own class on a plain module; what we keep in fp32 it is given as such."""
    torch.manual_seed(0)
    net = Wide()
    large, rest = [net.inp.weight, net.out.weight], [net.inp.bias, net.odd.weight, net.odd.bias, net.out.bias]
    if kind == "bitsandbytes":
        import bitsandbytes as bnb

        quantized = bnb.optim.AdamW8bit(large, lr=0.01, weight_decay=0.01)
    else:
        from torchao import optim

        if kind == "8bit":  # torchao's arithmetic, with our table
            for name, signed in (("signed", True), ("unsigned", False)):
                table = code_table(signed=signed).tolist()
                patch.setattr(f"torchao.optim.subclass_8bit.get_qmap_{name}", lambda table=table: table)
        quantized = getattr(optim, {"8bit": "AdamW8bit", "4bit": "AdamW4bit", "fp8": "AdamWFp8"}[kind])(
            large, lr=0.01
        )
    plain = torch.optim.AdamW(rest, lr=0.01, weight_decay=0.01)
    # torchao compiles each update by itself: seconds a shape, and the same numbers
    with torch.compiler.set_stance("force_eager"):
        for step in range(steps):
            loss = loss_fn(net, global_batch(step))
            (loss.total / loss.weight).backward()
            for one in (quantized, plain):
                one.step()
                one.zero_grad()
            for moments in quantized.state.values() if kind == "fp8" else ():  # no second moment is 0
                moments["exp_avg_sq"].codes.view(torch.uint8).clamp_(min=1)
    return {name: value.detach() for name, value in net.named_parameters()}


@pytest.fixture
def world():
    with fa.start() as started:
        yield started


@pytest.mark.parametrize("kind", MAKE)
def test_equals_the_backends_own_class(kind, world, monkeypatch):
    steps = 3 if kind == "fp8" else 4  # then one moment lies at the edge of two codes
    assert_close(trained(kind, steps=steps), oracle(kind, monkeypatch, steps))


@pytest.mark.parametrize("kind", MAKE)
def test_slots_are_plain_small_and_made_before_step_0(kind, world):
    _, state = begun(kind)
    for name in ("inp.weight", "out.weight"):
        slots = state.opt[name]
        assert set(slots) == {"exp_avg_codes", "exp_avg_scale", "exp_avg_sq_codes", "exp_avg_sq_scale"}
        assert {type(slot) for slot in slots.values()} == {torch.Tensor}
        stored = sum(slot.numel() * slot.element_size() for slot in slots.values())
        fp32 = 2 * 4 * state.params[name].numel()
        assert stored < (0.15 if kind == "4bit" else 0.3) * fp32
    assert set(state.opt["odd.weight"]) == {"exp_avg", "exp_avg_sq"}
    assert state.opt["odd.weight"]["exp_avg"].dtype is torch.float32


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("kind", MAKE)
def test_ranks_agree_with_one_process(kind, strategy, pools, world):
    """A sum over ranks rounds otherwise, and a moment at the edge of two codes may take the other one."""
    expected = trained(kind)
    for found in pools.run(2, trained, kind, strategy):
        apart = torch.cat([(found[name] - expected[name]).abs().flatten() for name in expected])
        # 1 element in 100 may differ, by what four updates move at most
        assert float((apart > 1e-5).float().mean()) < 0.01
        assert float(apart.max()) < 4 * 0.011


@pytest.mark.parametrize("kind", MAKE)
def test_a_checkpoint_of_two_ranks_goes_on_on_one(kind, pools, world, tmp_path):
    pools.run(2, trained, kind, "fsdp", 4, str(tmp_path))
    here = continued(kind, "local", str(tmp_path))
    there = pools.run(2, continued, kind, "fsdp", str(tmp_path))[0]
    apart = torch.cat([(here[name] - there[name]).abs().flatten() for name in here])
    assert float((apart > 1e-5).float().mean()) < 0.01


@pytest.mark.parametrize("kind", MAKE)
def test_restoring_is_exact(kind, world, tmp_path):
    trained(kind, folder=str(tmp_path))
    assert_close(continued(kind, "local", str(tmp_path)), trained(kind, steps=6), precision="fp64")


def test_groups_schedules_skipping_and_clipping(world):
    step = fa.skip_nonfinite(fa.clip_norm(loss_fn, 0.5))
    train_step, state = begun("8bit", step=step, groups={"inp.*": {"lr": 0.0, "weight_decay": 0.0}})
    first = fa.snapshot(state)
    x, y = global_batch(0)
    state, metrics = train_step(state, (x, y / 0.0))
    assert float(metrics["skipped"]) == 1.0
    assert fa.tree.allclose(fa.snapshot(state).params, first.params, rtol=0, atol=0)
    assert fa.tree.allclose(fa.snapshot(state).opt, first.opt, rtol=0, atol=0)
    state, _ = train_step(state, (x, y))
    assert torch.equal(state.params["inp.weight"], first.params["inp.weight"])
    assert not torch.equal(state.params["out.weight"], first.params["out.weight"])
    assert int(state.opt["out.weight"]["exp_avg_codes"].count_nonzero()) > 0


def test_compiled_updates_are_compiled_whole(world, monkeypatch):
    """Compiling for real takes 18 s: what is compiled, and that it is what runs, is what is looked at."""
    seen = []

    def compile_(fn, **options):
        assert options == {"fullgraph": True, "dynamic": False}
        return lambda *args: (seen.append(args[0].shape), fn(*args))[1]

    expected = trained("8bit")
    monkeypatch.setattr(torch, "compile", compile_)
    train_step, state = begun("8bit", compiled=True)
    for step in range(4):
        state, _ = train_step(state, rank_batch(step))
    assert [tuple(shape) for shape in seen] == 4 * [(17, 256), (33, 256)]
    assert_close({name: whole(value) for name, value in state.params.items()}, expected)
    with pytest.raises(errors.ArgumentError, match="nothing to compile"):
        fa.optim.adamw8bit(0.1, backend="bitsandbytes", compiled=True)


def test_mistakes_are_named(world, monkeypatch):
    with pytest.raises(errors.UnknownNameError, match="torchao"):
        fa.optim.adamw8bit(0.1, backend="torchoa")
    with pytest.raises(errors.ArgumentError, match="betas"):
        fa.optim.adamw8bit(0.1, codes="4bit", betas=(0.9, 1.0))
    with pytest.raises(errors.ConfigError, match="weight_decay"):
        fa.optim.adamw8bit(0.1, codes="fp8", groups={"*": {"weight_decy": 0.0}})
    small = fa.train_step(
        loss_fn, model=fa.distribute(lambda: nn.Linear(8, 8), "local"), optimizer=fa.optim.adamw8bit(0.1)
    )
    with pytest.raises(errors.CapabilityError, match="no parameter's moments"):
        small.init()
    for name, optimizer in (
        ("torchao.optim.adam", MAKE["8bit"]),
        ("bitsandbytes.functional", MAKE["bitsandbytes"]),
    ):
        monkeypatch.setitem(sys.modules, name, None)
        made = fa.train_step(loss_fn, model=fa.distribute(Wide, "local"), optimizer=optimizer())
        with pytest.raises(errors.MissingBackendError, match="quantize"):
            made.init()


def test_the_plan_names_the_backend(world):
    train_step, _ = begun("bitsandbytes")
    assert "backend='bitsandbytes'" in str(train_step.plan)


def gradients(kind, rows, width, steps=20):
    """Gradients of 20 steps, of which 8-bit moments have to make ordinary steps."""
    generator = torch.Generator().manual_seed(0)

    def draw():
        return torch.randn(rows, width, generator=generator)

    def some(share):
        return torch.rand(rows, width, generator=generator) < share

    first = draw()
    outliers, scales = torch.where(some(0.01), 1e3, 1.0), torch.exp(3 * draw())
    empty = torch.ones(rows, 1)
    empty[::2] = 0
    make = {
        "plain": draw,
        "constant": lambda: first,
        "rows of zeros": lambda: draw() * empty,
        "many zeros": lambda: draw() * some(0.1),
        "outliers": lambda: draw() * outliers,
        "outliers that move": lambda: draw() * torch.where(some(0.02), 1e3, 1.0),
        "all sizes": lambda: draw() * scales,
        "tiny": lambda: 1e-6 * draw(),
    }[kind]
    return [make() for _ in range(steps)]


BOUNDED = [
    "plain",
    "constant",
    "rows of zeros",
    "many zeros",
    "outliers",
    "outliers that move",
    "all sizes",
    "tiny",
]


def largest_steps(optimizer, given):
    """The largest step of each element, of a loss whose gradient is the batch. The rate is 1."""

    class Weight(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(given[0].shape))

    train_step = fa.train_step(
        lambda model, batch: fa.Mean((model.weight * batch).sum(), weight=1),
        model=fa.distribute(Weight, "local"),
        optimizer=optimizer,
    )
    state = train_step.init(seed=0)
    largest, before = torch.zeros_like(given[0]), torch.zeros_like(given[0])
    for grad in given:
        state, _ = train_step(state, grad)
        now = state.params["weight"].detach().clone()
        largest, before = torch.maximum(largest, (now - before).abs()), now
    return largest


@pytest.mark.parametrize("width", [32, 512])
@pytest.mark.parametrize("kind", BOUNDED)
def test_no_element_moves_far(kind, width, world):
    """At most 1.2 times what fp32 AdamW moves it by, in blocks of 32 and of 256."""
    given = gradients(kind, 8192 // width, width)
    ours = largest_steps(fa.optim.adamw8bit(1.0, weight_decay=0.0), given)
    expected = largest_steps(fa.adamw(1.0, weight_decay=0.0), given)
    assert (ours <= 1.2 * expected).all()
    assert ours.mean() > 0.8 * expected.mean()


class Small(nn.Module):
    """A bias before the weight, whose moments alone are quantized. Without it there is no other parameter."""

    def __init__(self, bias):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(256)) if bias else 0.0
        self.weight = nn.Parameter(torch.ones(16, 256))

    def forward(self, x):
        return ((x + self.bias) * self.weight).sum()


@pytest.mark.parametrize("bias", [True, False])
def test_parameters_before_quantized_ones(bias, world):
    train_step = fa.train_step(
        lambda model, x: fa.Mean(model(x), weight=1),
        model=fa.distribute(lambda: Small(bias), "local"),
        optimizer=fa.optim.adamw8bit(0.5, weight_decay=0.0),
    )
    state, _ = train_step(train_step.init(seed=0), torch.ones(16, 256))
    assert (state.params["weight"] - 0.5).abs().max() < 1e-5
    assert not bias or (state.params["bias"] + 0.5).abs().max() < 1e-5


def test_no_second_moment_is_0(world):
    given = gradients("all sizes", 16, 256)
    for codes, second in (("8bit", code_table(signed=False)[0]), ("fp8", 2.0**-9)):
        assert second > 0
        ours = largest_steps(fa.optim.adamw8bit(1.0, weight_decay=0.0, codes=codes), given)
        assert ours.max() < 4, codes
    for signed in (True, False):
        table = code_table(signed=signed)
        assert len(table) == 256
        assert (table.diff() > 0).all()
        assert table[-1] == 1
