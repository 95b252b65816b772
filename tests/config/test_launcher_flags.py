"""A flag of the launcher reaches any script: train steps take what they leave open, or raise."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import fnaccel as fa
from fnaccel.config.applying import transformed
from fnaccel.errors import ArgumentError, ConfigError, FlagMismatchError, UnusedOverrideError
from fnaccel.world import flags


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def loss_fn(model, batch):
    return fa.Mean(model(batch).square().sum(), weight=len(batch))


@pytest.fixture
def given(monkeypatch):
    """Set the launcher's flags, and begin a world."""
    worlds = []

    def set_flags(variable=flags.VARIABLE, **fields):
        dotted = {name.replace("__", "."): value for name, value in fields.items()}
        text = (
            json.dumps(dotted)
            if variable == flags.VARIABLE
            else " ".join(f"{k}={v}" for k, v in dotted.items())
        )
        monkeypatch.setenv(variable, text)
        monkeypatch.setattr(flags, "_taken", ("", ""))
        worlds.append(fa.start(device="cpu"))
        return worlds[-1]

    yield set_flags
    for world in worlds:
        world.close()


def made(step=loss_fn, strategy=None, optimizer=None, **options):
    model = fa.distribute(Net) if strategy is None else fa.distribute(Net, strategy)
    return fa.train_step(step, model=model, optimizer=optimizer or fa.sgd(0.1), **options)


def names(train_step):
    return [(row.what, row.detail) for row in train_step.plan.rows]


EACH = {
    "precision": ("bf16", lambda s: fa.with_precision(s, "bf16"), lambda s: fa.with_precision(s, "fp32")),
    "accumulate": (4, lambda s: fa.accumulate(s, 4, sync="each"), lambda s: fa.accumulate(s, 2)),
    "clip_norm": (0.5, lambda s: fa.clip_norm(s, 0.5), lambda s: fa.clip_norm(s, 1.0)),
    "clip_value": (0.5, lambda s: fa.clip_value(s, 0.5), lambda s: fa.clip_value(s, 1.0)),
    "compile": ("loss", lambda s: fa.compile(s, "loss", backend="eager"), lambda s: fa.compile(s, "block")),
    "ema": (0.5, lambda s: fa.with_ema(s, 0.5), lambda s: fa.with_ema(s, 0.9)),
    "remat": ("attention", lambda s: fa.remat(s, save="attention"), lambda s: fa.remat(s)),
    "attention": (["math"], lambda s: fa.transforms.attention(s, "math"), lambda s: fa.transforms.attention(s, "flash")),
    "on_spike": ("skip", lambda s: fa.transforms.on_spike(s, do="skip"), lambda s: fa.transforms.on_spike(s, do="stop")),
}  # fmt: skip


@pytest.mark.parametrize("field", EACH)
def test_a_flag_is_applied_to_a_step_that_leaves_it_open(given, field):
    value, same, _ = EACH[field]
    given(**{field: value})
    train_step = made()
    assert f"from the launcher: {field}={value!r}" in str(train_step.plan)
    expected = {transform.name for transform in same(loss_fn).transforms}
    assert expected <= {name for name, _ in names(train_step)} | {"compile"}


@pytest.mark.parametrize("field", EACH)
def test_an_equal_choice_of_the_script_is_fine(given, field):
    value, same, _ = EACH[field]
    given(**{field: value})
    assert "from the launcher" not in str(made(same(loss_fn)).plan)


@pytest.mark.parametrize("field", EACH)
def test_another_choice_of_the_script_raises_with_both(given, field):
    value, _, other = EACH[field]
    given(**{field: value})
    with pytest.raises(FlagMismatchError) as raised:
        made(other(loss_fn))
    name = other(loss_fn).transforms[0].name
    assert f"{field}={value!r}" in str(raised.value)
    assert f"{name}({other(loss_fn).transforms[0].describe()})" in str(raised.value)


@pytest.mark.parametrize(
    ("field", "value"), [("clip_norm", None), ("accumulate", 1), ("precision", "fp32"), ("remat", False)]
)
def test_a_flag_that_asks_for_nothing(given, field, value):
    given(**{field: value})
    plain = names(made())
    assert len(plain) == 2  # gradients and the optimizer
    step = {"clip_norm": fa.clip_norm(1.0), "accumulate": fa.accumulate(2), "precision": fa.with_precision("bf16"),
            "remat": fa.remat()}[field](loss_fn)  # fmt: skip
    with pytest.raises(FlagMismatchError):
        made(step)


def test_an_open_strategy(given):
    given()
    assert str(made().plan).count("local()")
    assert fa.distribute(Net).strategy is None


def on_ranks(text=None):
    import os

    os.environ[flags.VARIABLE] = json.dumps({} if text is None else {"strategy": text})
    try:
        with fa.start(device="cpu"):
            train_step = made()
            state = train_step.init()
            state, metrics = train_step(state, torch.ones(4, 3))
            return str(train_step.plan).splitlines()[1], float(metrics["loss"])
    finally:
        del os.environ[flags.VARIABLE]


def test_an_open_strategy_on_several_ranks(pools):
    (one, loss), *_ = pools.run(1, on_ranks)
    (two, same), *_ = pools.run(2, on_ranks)
    (cut, third), *_ = pools.run(2, on_ranks, "fsdp")
    assert ("local()" in one, "ddp()" in two, "fsdp()" in cut) == (True, True, True)
    assert loss == pytest.approx(same) == pytest.approx(third)


def test_a_strategy_of_the_launcher(given):
    given(strategy="fsdp")
    assert "fsdp()" in str(made().plan)
    assert "from the launcher: strategy='fsdp'" in str(made().plan)
    assert "from the launcher" not in str(made(strategy=fa.fsdp()).plan)
    with pytest.raises(FlagMismatchError, match=r"strategy='fsdp'.*ddp\(\)"):
        made(strategy="ddp")


def test_a_step_without_an_optimizer_takes_the_strategy_only(given):
    given(strategy="fsdp", clip_norm=1.0, precision="bf16")
    teacher = fa.train_step(loss_fn, model=fa.distribute(Net), optimizer=None)
    assert "fsdp()" in str(teacher.plan)
    assert "with_precision" not in str(teacher.plan)
    other = fa.train_step(
        fa.with_precision(loss_fn, "fp32"), model=fa.distribute(Net, "local"), optimizer=None
    )
    assert "local()" in str(other.plan)


def test_each_train_step_takes_what_it_leaves_open(given):
    given(precision="bf16", clip_norm=1.0)
    first, second = made(), made(fa.clip_norm(loss_fn, 1.0))
    assert "from the launcher: precision='bf16', clip_norm=1.0" in str(first.plan)
    assert "from the launcher: precision='bf16'\n" in str(second.plan) + "\n"


def test_a_recipe_takes_them_first(given):
    given(strategy="fsdp", clip_norm=1.0, optimizer__lr=0.5)
    recipe = fa.config.recipe()
    assert (recipe.strategy, recipe.clip_norm, recipe.optimizer.lr) == ("fsdp", 1.0, 0.5)
    train_step = made(strategy="local")
    assert "clip_norm" not in str(train_step.plan)
    flags.check_taken()


def test_a_recipe_comes_too_late(given):
    given(clip_norm=1.0)
    made()
    flags.check_taken()
    with pytest.raises(ConfigError, match="a train step has used"):
        fa.config.recipe()


def test_fields_that_only_a_recipe_has(given):
    given(clip_norm=1.0, optimizer__lr=0.5, checkpoint__every=3)
    with pytest.raises(UnusedOverrideError, match=r"optimizer\.lr=0\.5, checkpoint\.every=3"):
        made()


def test_the_variable_does_the_same(given):
    given(variable="FNACCEL_SET", precision="bf16", compile="loss", compile_options__backend="eager")
    plan = str(made().plan)
    assert "from the launcher: precision='bf16', compile='loss', compile_options={'backend': 'eager'}" in plan


def test_options_of_what_is_not_there(given):
    given(compile_options__backend="eager")
    with pytest.raises(ArgumentError, match="compile_options"):
        made()


@pytest.mark.parametrize("same", [True, False])
def test_options_are_compared_with_those_of_the_script(given, same):
    given(compile="loss", compile_options__backend="eager")
    step = fa.compile(loss_fn, "loss", backend="eager" if same else "inductor")
    if same:
        assert "from the launcher" not in str(made(step).plan)
        return
    with pytest.raises(FlagMismatchError, match=r"compile='loss', compile_options=\{'backend': 'eager'\}"):
        made(step)


def test_zero_is_a_value(given):
    """0 == False, and a bound of 0 is a mistake and not a bound that is left out."""
    given(clip_norm=0.0)
    with pytest.raises(ArgumentError, match="clipped to 0"):
        made()
    with pytest.raises(ArgumentError, match="clipped to 0"):
        transformed(fa.config.Recipe(clip_value=0.0), loss_fn)
    assert [t.name for t in transformed(fa.config.Recipe(ema=0.0), loss_fn).transforms] == ["with_ema"]


def test_nobody_used_them(given):
    given(clip_norm=1.0)
    with pytest.raises(UnusedOverrideError, match=r"clip_norm=1\.0"):
        flags.check_taken()


def test_it_trains_as_the_script_would(given):
    given(accumulate=2, clip_norm=0.1, precision="bf16")
    train_step = made()
    losses = []
    state = train_step.init(seed=0)
    for _ in range(3):
        state, metrics = train_step(state, torch.ones(4, 3))
        losses.append(float(metrics["loss"]))
    with fa.simulate(ranks=1):  # a world without a launcher
        step = fa.chain(fa.with_precision("bf16"), fa.accumulate(2), fa.clip_norm(0.1))(loss_fn)
        other = made(step, "local")
        state = other.init(seed=0)
        for loss in losses:
            state, metrics = other(state, torch.ones(4, 3))
            assert float(metrics["loss"]) == loss
