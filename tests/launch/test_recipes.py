"""Launches that a recipe describes: the section `launch`, ./fnaccel.yaml, FNACCEL_SET."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import fnaccel

pytestmark = pytest.mark.launcher

TRAIN = """
    import os
    import fnaccel as fa

    recipe = fa.config.recipe(fa.config.Recipe(clip_norm=1.0))
    with fa.start() as world:
        print(world.rank, world.size, os.environ.get("COLOUR"), recipe.strategy, recipe.run.steps, flush=True)
"""


def test_a_recipe_is_launched_by_its_file_alone(launcher):
    launcher.write("launch: {ranks: 2, cpu: true, env: {COLOUR: red}}\nrun: {steps: 3}", "fnaccel.yaml")
    ended = launcher(launcher.write(TRAIN), env={"COLOUR": "blue"})
    assert ended.code == 0, ended.err
    assert sorted(ended.out.splitlines()) == ["0 2 red local 3", "1 2 red local 3"]
    assert ended.err.count("fnaccel.yaml") == 1


@pytest.mark.long
def test_a_launch_says_once_that_the_variable_is_used(launcher):
    chosen = {"FNACCEL_SET": "launch.ranks=2 launch.cpu=true strategy=ddp run.steps=9"}
    ended = launcher("--set", "run.steps=4", launcher.write(TRAIN), env=chosen)
    assert ended.code == 0, ended.err
    assert sorted(ended.out.splitlines()) == ["0 2 None ddp 4", "1 2 None ddp 4"]
    assert ended.err.count("FNACCEL_SET sets launch.ranks=2") == 1


@pytest.mark.long
def test_a_script_that_takes_no_recipe_may_be_launched_by_one(launcher):
    launcher.write("launch: {ranks: 1, cpu: true}", "r.yaml")
    script = launcher.write("print('ran')")
    ended = launcher("--config", "r.yaml", script)
    assert (ended.code, ended.out) == (0, "ran\n"), ended.err
    ended = launcher("--config", "r.yaml", "--set", "run.seed=1", script)
    assert ended.code == 1
    assert "the launcher was told run.seed=1" in ended.err


@pytest.mark.long
def test_the_variable_under_plain_python(launcher):
    script = launcher.folder / launcher.write(TRAIN)
    root = str(Path(fnaccel.__file__).parents[1])
    environ = {**os.environ, "FNACCEL_SET": "launch.cpu=true run.steps=5", "PYTHONPATH": root}
    done = subprocess.run(
        [sys.executable, str(script)], env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout == "0 1 None local 5\n"
    assert done.stderr.count("fnaccel: FNACCEL_SET sets launch.cpu=true run.steps=5") == 1
