"""Recipes: what YAML may say, what the launcher may override, and what is refused."""

from __future__ import annotations

import sys
from typing import get_args

import pytest
import torch
from torch import nn

import fnaccel as fa
from fnaccel import errors
from fnaccel.config.applying import make_optimizer, transformed
from fnaccel.config.yaml import override
from fnaccel.step.choices import Kept
from fnaccel.world import flags
from tests.tiny_models import Net, batch_of, loss_fn


def test_every_field_of_a_step_becomes_a_transform():
    recipe = fa.config.Recipe(
        precision="bf16", accumulate=2, clip_norm=1.0, clip_value=0.5, skip_nonfinite=True, on_spike="skip", ema=0.9, remat=True,
        compile="block", transforms=("tests.config.test_config:mine",),
    )  # fmt: skip
    assert [t.name for t in transformed(recipe, loss_fn).transforms] == [
        "with_precision", "accumulate", "skip_nonfinite", "on_spike", "on_spike_read", "clip_norm", "clip_value", "with_ema",
        "remat", "compile",
        "mine",
    ]  # fmt: skip


def mine(step):
    return fa.Transform("mine", fa.Phase.FORWARD, apply=lambda fn: fn)(step)


def slow_start(updates):
    return 0.01 * updates


def test_functions_by_reference():
    described = fa.config.OptimizerRecipe(
        name="torch.optim:RMSprop", schedule="tests.config.test_config:slow_start", options={"alpha": 0.9}
    )
    optimizer = make_optimizer(described)
    assert (optimizer.name, optimizer.lr(3)) == ("RMSprop", 0.03)
    recipe = fa.config.Recipe(optimizer=fa.config.OptimizerRecipe(schedule=slow_start))
    assert "tests.config.test_config:slow_start" in fa.config.to_yaml(recipe)
    with fa.start():
        train_step = fa.config.apply(recipe, loss_fn, Net)
        state = train_step.init()
        _, metrics = train_step(state, batch_of(2))
        assert metrics["lr"] == 0.0


@pytest.mark.parametrize(
    ("made", "error", "says"),
    [
        (lambda: make_optimizer(fa.config.OptimizerRecipe(name="adamv")), errors.UnknownNameError, "adamw"),
        (
            lambda: make_optimizer(fa.config.OptimizerRecipe(schedule="cosin")),
            errors.UnknownNameError,
            "'cosine'",
        ),
        (
            lambda: make_optimizer(fa.config.OptimizerRecipe(options={"beta": 1})),
            errors.ConfigError,
            "no option 'beta'",
        ),
        (
            lambda: make_optimizer(fa.config.OptimizerRecipe(name="nowhere:X")),
            errors.ConfigError,
            "nothing that can be",
        ),
        (lambda: fa.config.from_yaml("missing.yaml"), errors.ConfigError, "no file"),
        (lambda: fa.config.from_yaml("optimizer: 3"), errors.ConfigError, "not keys and values"),
        (lambda: fa.config.from_yaml("[]"), errors.ConfigError, "holds list, not keys and values"),
        (lambda: fa.config.from_yaml("remat: 'no'"), errors.ConfigError, "remat='no' names nothing"),
        (
            lambda: fa.config.from_yaml("accumulate: 2.7"),
            errors.ConfigError,
            "is not a whole number @ recipe.acc",
        ),
        (
            lambda: fa.config.from_yaml("precision: no"),
            errors.ConfigError,
            "False is not one of: fp32, bf16, .* fp8 @ recipe.precision",
        ),
        (
            lambda: fa.config.from_yaml("data: {remainder: 3}"),
            errors.ConfigError,
            "3 is not one of: wrap, drop, keep @ recipe.data",
        ),
        (
            lambda: fa.config.from_yaml("accumulate: true"),
            errors.ConfigError,
            "is not a whole number @ recipe.acc",
        ),
        (
            lambda: fa.config.from_yaml("strategy: ddp\nremat: true\nstrategy: fsdp"),
            errors.ConfigError,
            "two keys 'strategy' .*line 3",
        ),
        (
            lambda: override(fa.config.Recipe(), {"remat": "no"}),
            errors.ConfigError,
            "remat='no' names nothing",
        ),
        (lambda: override(fa.config.Recipe(), {"optimiser.lr": 1.0}), errors.ConfigError, "'optimizer'"),
        (lambda: fa.config.apply("fsdp", loss_fn, Net), errors.ArgumentError, "a recipe is not str"),
    ],
)
def test_mistakes(made, error, says):
    with fa.start(), pytest.raises(error, match=says):
        made()


def test_values_that_say_the_same_in_another_way():
    recipe = fa.config.from_yaml("accumulate: 2.0\nremat: yes\noptimizer: {lr: 1e-3}\ndata: {window: 'm:f'}")
    assert (recipe.accumulate, recipe.remat, recipe.optimizer.lr) == (2, True, 1e-3)
    assert recipe.data.window == "m:f"
    assert fa.config.from_yaml("# nothing") == fa.config.Recipe()


def test_a_closure_is_not_yaml():
    def inner(updates):
        return 0.1

    recipe = fa.config.Recipe(transforms=(mine, inner))
    with pytest.raises(errors.NotSerializableError, match="a closure"):
        fa.config.to_yaml(recipe)


def test_overrides_go_over_the_scripts_recipe(monkeypatch):
    for name, value in flags.pack({"strategy": "fsdp", "optimizer.lr": 0.5, "clip_norm": None}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(flags, "_taken", ("", ""))
    with pytest.raises(errors.UnusedOverrideError, match="strategy='fsdp'"):
        flags.check_taken()
    recipe = fa.config.recipe(fa.config.Recipe(precision="bf16", clip_norm=1.0))
    assert (recipe.strategy, recipe.precision, recipe.optimizer.lr, recipe.clip_norm) == (
        "fsdp",
        "bf16",
        0.5,
        None,
    )
    flags.check_taken()


@pytest.mark.parametrize(
    ("words", "launched", "said"),
    [
        (["--strategy", "fsdp", "--set=a=1"], True, "--strategy, --set behind train.py"),
        (["--lr", "--strategies", "fsdp"], True, ""),
        (["--strategy", "fsdp"], False, ""),
    ],
)
def test_an_option_behind_the_script_is_said_to_be_the_scripts(monkeypatch, capsys, words, launched, said):
    """The launcher can't know whether the script reads it. Under python there is no launcher to mean."""
    monkeypatch.setattr(flags, "_taken", ("", ""))
    if launched:
        monkeypatch.setenv("FNACCEL_LAUNCHED", "1")
    monkeypatch.setattr(sys, "argv", ["jobs/train.py", *words])
    assert fa.config.recipe() == fa.config.recipe() == fa.config.Recipe()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == bool(said)
    assert said in "".join(lines)


def test_shard_options_are_what_shard_takes():
    loader = torch.utils.data.DataLoader([1, 2, 3], batch_size=2)
    recipe = fa.config.Recipe(data=fa.config.DataRecipe(window=2, seed=5, remainder="wrap"))
    shards = fa.shard(loader, **fa.config.shard_options(recipe))
    assert (shards.window, shards.seed, shards.remainder) == (2, 5, "wrap")


EPOCHS = """
strategy: STRATEGY
optimizer:
  lr: 0.3
  schedule: warmup_cosine
  schedule_options: {total: 3 epochs, warmup: 10%}
  by_pattern:
    "*.bias": {name: sgd, lr: 0.1, schedule: linear, schedule_options: {end: 0.0, total: 0.5 epochs}}
"""


@pytest.mark.parametrize(("ranks", "updates"), [(1, 10), (2, 10)])
def test_lengths_in_epochs(pools, ranks, updates):
    """40 rows in batches of 4 are 10 updates on any number of ranks: the batch size is global."""
    for plan in pools.run(ranks, plan_in_epochs, "fsdp" if ranks > 1 else "local"):
        assert f"warmup_cosine(0.3, warmup=3, total={3 * updates}, end=0.0)" in plan
        assert "linear(start=0.1, end=0.0, total=5)" in plan


def plan_in_epochs(strategy):
    loader = torch.utils.data.DataLoader(list(range(40)), batch_size=4)
    recipe = fa.config.from_yaml(EPOCHS.replace("STRATEGY", strategy))
    return str(fa.config.apply(recipe, loss_fn, Net, shards=fa.shard(loader)).plan)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"total": "3 epochs"}, "no data is given"),
        ({"total": "3 eons"}, "'3 eons' is no number of updates"),
        ({"total": "10%"}, "'10%' is no number of updates"),
    ],
)
def test_lengths_that_say_nothing(options, says):
    described = fa.config.OptimizerRecipe(schedule="cosine", schedule_options=options)
    with fa.start(), pytest.raises(errors.ConfigError, match=says):
        fa.config.apply(fa.config.Recipe(optimizer=described), loss_fn, Net)


def test_optimizers_by_pattern():
    text = """
optimizer:
  lr: 0.0003
  by_pattern:
    '*.bias':
      name: sgd
      lr: 0.1
    blocks.*.weight:
      name: torch.optim:Muon
      lr: 0.02
      starts: 3
"""
    recipe = fa.config.from_yaml(text)
    assert fa.config.to_yaml(recipe) == text.lstrip()
    optimizer = make_optimizer(recipe.optimizer)
    assert isinstance(optimizer, fa.optim.OptimizerGroups)
    assert [select for select, _ in optimizer.members] == ["*.bias", "blocks.*.weight", "*"]
    assert [one.starts for _, one in optimizer.members] == [0, 3, 0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("optimizer: {by_pattern: {a: {nam: sgd}}}", "did you mean 'name'"),
        ("optimizer: {by_pattern: {a: 3}}", "holds int"),
        ("optimizer: {by_pattern: 3}", "holds int"),
    ],
)
def test_mistakes_in_optimizers_by_pattern(text, says):
    with pytest.raises(errors.ConfigError, match=says):
        fa.config.from_yaml(text)


def test_optimizers_by_model():
    text = "optimizer:\n  lr: 0.01\n  by_model:\n    d:\n      name: sgd\n      lr: 0.5\n"
    recipe = fa.config.from_yaml(text)
    assert fa.config.to_yaml(recipe) == text

    def both(models, batch):
        x, y = batch
        return fa.Mean((models["g"](x) + models["d"](x) - y).square().sum(), weight=len(x))

    with fa.start(device="cpu"):
        models = {"g": lambda: nn.Linear(2, 1), "d": lambda: nn.Linear(2, 1)}
        train_step = fa.config.apply(recipe, both, models)
        assert "g: adamw" in str(train_step.plan).replace("'", "")
        assert "d: sgd" in str(train_step.plan).replace("'", "")
        state = train_step.init(seed=0)
        before = {name: state.params[name]["weight"].clone() for name in models}
        state, _ = train_step(state, (torch.ones(4, 2), torch.ones(4, 1)))
        after = {name: state.params[name]["weight"].detach() for name in models}
        moved = {name: float((after[name] - before[name].detach()).abs().max()) for name in models}
        assert moved["g"] == pytest.approx(0.01, rel=1e-2)  # the first step of adamw is its rate
        assert moved["d"] > 0.02
        with pytest.raises(errors.ConfigError, match="there is no model 'd'"):
            fa.config.apply(recipe, both, {"g": models["g"], "disc": models["d"]})
        with pytest.raises(errors.ConfigError, match="there is no model 'd'"):
            fa.config.apply(recipe, loss_fn, Net)


def test_patterns_within_patterns_are_refused():
    nested = fa.config.OptimizerRecipe(by_pattern={"a": fa.config.OptimizerRecipe()})
    with pytest.raises(errors.ArgumentError, match="by_pattern or a by_model of its own"):
        make_optimizer(fa.config.OptimizerRecipe(by_pattern={"b": nested}))


def test_options_of_the_compiler_attention_and_fp8():
    recipe = fa.config.from_yaml("""
precision: fp8
fp8: {recipe: rowwise, skip: "*head*", emulate: true}
attention: flash
compile: loss
compile_options: {backend: aot_eager, limit: 2}
""")
    records = {t.name: t.apply for t in transformed(recipe, loss_fn).transforms}
    assert records["float8"] == fa.transforms.Float8(recipe="rowwise", skip="*head*", emulate=True)
    assert records["attention"].kernels == ("flash",)
    assert (records["compile"].backend, records["compile"].limit) == ("aot_eager", 2)
    assert fa.config.from_yaml(fa.config.to_yaml(recipe)) == recipe


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"compile_options": {"mode": "default"}}, errors.ArgumentError, "no effect"),
        ({"fp8": {"recipe": "rowwise"}}, errors.ArgumentError, "no effect"),
        ({"precision": "fp8", "fp8": {"recipee": "rowwise"}}, errors.ConfigError, "can't take"),
        ({"compile": "auto", "compile_options": {"nope": 1}}, errors.ConfigError, "can't take"),
        ({"attention": "flsh"}, errors.UnknownNameError, "no attention"),
    ],
)
def test_options_that_can_not_be(options, error, says):
    with pytest.raises(error, match=says):
        transformed(fa.config.Recipe(**options), loss_fn)


def test_a_recipe_names_what_remat_keeps():
    """The recipe has a list of its own, since reading one needs no torch."""
    for name in get_args(Kept):
        assert fa.config.Recipe(remat=name).remat == name
    with pytest.raises(errors.ConfigError, match=f"one of: {', '.join(get_args(Kept))}$"):
        fa.config.Recipe(remat="all")
