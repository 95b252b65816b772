"""The sections `run` and `launch` of a recipe, and FNACCEL_SET."""

from __future__ import annotations

import pytest
import torch

import fnaccel as fa
from fnaccel import errors
from fnaccel.config.yaml import override
from fnaccel.world import flags, settings

TEXT = """
run: {seed: 5, steps: 7, epochs: 2}
launch:
  ranks: 2
  machines: 4
  min_machines: 2
  address: 10.0.0.1
  cpu: true
  gpus: [0, 1]
  watchdog: 60
  env: {NCCL_DEBUG: INFO, OMP_NUM_THREADS: 1}
"""


def test_sections_from_yaml_and_back():
    recipe = fa.config.from_yaml(TEXT)
    assert recipe.run == fa.config.RunRecipe(seed=5, steps=7, epochs=2)
    assert recipe.launch == fa.config.LaunchRecipe(
        ranks=2, machines=4, min_machines=2, address="10.0.0.1", cpu=True, gpus="0,1", watchdog=60.0,
        env={"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert fa.config.from_yaml(fa.config.to_yaml(recipe)) == recipe


def test_a_recipe_without_the_sections_writes_none():
    assert fa.config.to_yaml(fa.config.Recipe(clip_norm=1.0)) == "clip_norm: 1.0\n"


@pytest.mark.parametrize(
    ("cards", "text"),
    [
        (0, "0"),
        ("0,1", "0,1"),
        pytest.param((0, 1), "0,1", id="tuple"),
        (["GPU-6e", 2], "GPU-6e,2"),
        (None, None),
    ],
)
def test_ways_to_write_gpus(cards, text):
    assert fa.config.LaunchRecipe(gpus=cards).gpus == text


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        ("launch: {rank: 2}", errors.ConfigError, "LaunchRecipe has no key 'rank'(.|\n)*'ranks'"),
        ("run: {step: 2}", errors.ConfigError, "RunRecipe has no key 'step'(.|\n)*'steps'"),
        ("lunch: {ranks: 2}", errors.ConfigError, "Recipe has no key 'lunch'(.|\n)*'launch'"),
        ("launch: {ranks: two}", errors.ConfigError, "recipe.launch.ranks"),
        ("launch: {cpu: 1}", errors.ConfigError, "recipe.launch.cpu"),
        ("launch: {gpus: true}", errors.ConfigError, "gpus=True names no GPUs"),
        ("launch: {gpus: []}", errors.ConfigError, "gpus=\\[\\] names no GPUs"),
        ("launch: {env: {A: true}}", errors.ConfigError, "the variable A is True(.|\n)*launch.env.A"),
        ("run: {steps: 0}", errors.ArgumentError, "steps=0"),
        ("run: {epochs: -1}", errors.ArgumentError, "epochs=-1"),
    ],
)
def test_mistakes(text, error, says):
    with pytest.raises(error, match=says):
        fa.config.from_yaml(text)


def test_env_must_hold_variables():
    with pytest.raises(errors.ConfigError, match="holds no variables"):
        fa.config.LaunchRecipe(env=["A=1"])


def test_the_length_and_the_seed_reach_the_loop():
    loader = torch.utils.data.DataLoader(list(range(8)), batch_size=2, shuffle=True)
    recipe = fa.config.from_yaml("run: {seed: 5, steps: 7}")
    assert fa.config.scan_options(recipe) == {"steps": 7}
    assert {"epochs": 3, **fa.config.scan_options(fa.config.Recipe())} == {"epochs": 3}
    assert fa.config.shard_options(recipe)["seed"] == 5
    chosen = override(recipe, {"data.seed": 0})
    assert fa.config.shard_options(chosen)["seed"] == 0
    assert fa.shard(loader, **fa.config.shard_options(fa.config.Recipe())).seed == 0


def test_a_set_variable_goes_over_the_scripts_recipe(monkeypatch, capsys):
    monkeypatch.setattr(flags, "_taken", ("", ""))
    monkeypatch.setenv("FNACCEL_SET", "strategy='ddp(2) * fsdp(4)' optimizer.lr=1e-4 launch.ranks=2")
    monkeypatch.setattr(settings, "_shown", set())
    recipe = fa.config.recipe(fa.config.Recipe(clip_norm=1.0, strategy="local"))
    assert (recipe.strategy, recipe.optimizer.lr, recipe.clip_norm) == ("ddp(2) * fsdp(4)", 1e-4, 1.0)
    fa.config.recipe()
    lines = (
        "fnaccel: FNACCEL_SET sets strategy='ddp(2) * fsdp(4)' optimizer.lr=1e-4 launch.ranks=2\n"
        "fnaccel: launch.ranks has no effect here. Only fnaccel launch starts processes\n"
    )
    assert capsys.readouterr().err == lines, "once"
    monkeypatch.setenv("FNACCEL_OVERRIDES", '{"strategy": "fsdp"}')
    assert fa.config.recipe().strategy == "fsdp", "the launcher's options go over it"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("strategy", "'strategy' sets nothing"),
        ("=3", "'=3' sets nothing"),
        ("strategy='fsdp", "No closing quotation"),
        ("launch.watchdog=-1", "launch.watchdog=-1"),
        ("launch.watchdog=long", "launch.watchdog='long'"),
        ("launch.cpu=maybe", "launch.cpu='maybe'"),
    ],
)
def test_a_set_variable_with_a_mistake_stops_the_start(monkeypatch, text, says):
    monkeypatch.setenv("FNACCEL_SET", text)
    with pytest.raises(errors.ConfigError, match=says) as raised, fa.start():
        pass
    assert "where: FNACCEL_SET" in str(raised.value)


def test_the_fields_that_a_start_uses(monkeypatch):
    monkeypatch.setenv("FNACCEL_SET", "launch.cpu=true launch.watchdog=600 strategy=fsdp")
    assert settings.for_start({"FNACCEL_SET": "launch.cpu=true strategy=fsdp"}) == {"launch.cpu": True}
    with fa.start() as world:
        assert world.device.type == "cpu"
    monkeypatch.setenv("FNACCEL_SET", "optimiser.lr=1")
    monkeypatch.setattr(flags, "_taken", ("", ""))
    with pytest.raises(errors.ConfigError, match="'optimizer'"):
        fa.config.recipe()
