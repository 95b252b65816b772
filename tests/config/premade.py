"""Apply a recipe of examples/recipes to a small GPT, as examples/train_recipe.py does. The functions run on ranks."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import fnaccel as fa
from fnaccel.cli.launch import parser
from fnaccel.cli.overriding import gather_overrides, layers
from fnaccel.config.references import load
from fnaccel.config.yaml import override

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "recipes"
SCRIPT = ROOT / "examples" / "train_recipe.py"


def read(name: str) -> fa.config.Recipe:
    return fa.config.from_yaml(FOLDER / f"{name}.yaml")


def build_gpt() -> torch.nn.Module:
    """A small GPT, with the list of classes that models of transformers have."""
    model = load(f"{SCRIPT}:GPT", "tests")(width=32, layers=2, heads=2)
    model._no_split_modules = ["Block"]
    return model


def some_updates(name: str, changes: dict[str, Any], folder: str) -> tuple[list[float], str, list[str]]:
    """The losses of four calls, the plan, and the checkpoints in `folder`."""
    command = parser().parse_args(["--config", str(FOLDER / f"{name}.yaml"), "train.py"])
    fields = gather_overrides(layers(command, {}))
    if "checkpoint.directory" in fields:
        changes = {**changes, "checkpoint.directory": folder}
    recipe = override(load(f"{SCRIPT}:defaults", "tests")(steps=3), {**fields, **changes})
    tokens = torch.randint(256, (8, 17), generator=torch.Generator().manual_seed(0))
    rows = 8 * [
        {"tokens": row[:-1], "labels": row[1:], "positions": torch.arange(16)} for row in tokens
    ]  # the same in each batch
    with contextlib.chdir(ROOT), fa.start():  # a recipe's paths are seen from the root
        shards = fa.shard(DataLoader(rows, batch_size=8), **fa.config.shard_options(recipe))
        train_step = fa.config.apply(recipe, load(f"{SCRIPT}:loss_fn", "tests"), build_gpt, shards=shards)
        state, losses = train_step.init(seed=0), []
        options = {**fa.config.scan_options(recipe), "steps": 4}
        for state, metrics in fa.scan(train_step, state, shards, **options):
            losses.append(float(metrics["loss"]))
        saves = "save" in options
        saved = [checkpoint.path.name for checkpoint in fa.checkpoint.checkpoints(folder)] if saves else []
        return losses, str(train_step.plan), saved
