"""Recipes: what YAML may say, what the launcher may override, and what is refused."""

from __future__ import annotations

import pytest
import torch

import fnaccel as fa
from fnaccel import errors
from fnaccel.config.apply import make_optimizer, transformed
from fnaccel.config.yaml import override
from fnaccel.launch import overrides
from tests.models import Net, batch_of, loss_fn


def test_every_field_of_a_step_becomes_a_transform():
    recipe = fa.config.Recipe(
        precision="bf16", accumulate=2, clip_norm=1.0, clip_value=0.5, skip_nonfinite=True, ema=0.9, remat=True,
        compile="block", transforms=("tests.config.test_config:mine",),
    )  # fmt: skip
    assert [t.name for t in transformed(recipe, loss_fn).transforms] == [
        "with_precision", "accumulate", "skip_nonfinite", "clip_norm", "clip_value", "with_ema", "remat", "compile",
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
        (lambda: override(fa.config.Recipe(), {"optimiser.lr": 1.0}), errors.ConfigError, "'optimizer'"),
        (lambda: fa.config.apply("fsdp", loss_fn, Net), errors.ArgumentError, "a recipe is not str"),
    ],
)
def test_mistakes(made, error, says):
    with fa.start(), pytest.raises(error, match=says):
        made()


def test_a_closure_is_not_yaml():
    def inner(updates):
        return 0.1

    recipe = fa.config.Recipe(transforms=(mine, inner))
    with pytest.raises(errors.NotSerializableError, match="a closure"):
        fa.config.to_yaml(recipe)


def test_overrides_go_over_the_scripts_recipe(monkeypatch):
    for name, value in overrides.pack({"strategy": "fsdp", "optimizer.lr": 0.5, "clip_norm": None}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("FNACCEL_OVERRIDES_TAKEN", "")
    monkeypatch.delenv("FNACCEL_OVERRIDES_TAKEN")
    with pytest.raises(errors.UnusedOverrideError, match="strategy='fsdp'"):
        overrides.check_taken()
    recipe = fa.config.recipe(fa.config.Recipe(precision="bf16", clip_norm=1.0))
    assert (recipe.strategy, recipe.precision, recipe.optimizer.lr, recipe.clip_norm) == (
        "fsdp",
        "bf16",
        0.5,
        None,
    )
    overrides.check_taken()


def test_shard_options_are_what_shard_takes():
    loader = torch.utils.data.DataLoader([1, 2, 3], batch_size=2)
    recipe = fa.config.Recipe(data=fa.config.DataRecipe(window=2, seed=5, remainder="wrap"))
    shards = fa.shard(loader, **fa.config.shard_options(recipe))
    assert (shards.window, shards.seed, shards.remainder) == (2, 5, "wrap")
