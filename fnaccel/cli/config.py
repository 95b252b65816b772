"""`fnaccel config`: shows, checks and writes recipes. Nothing is launched."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from fnaccel.cli.asking import ask
from fnaccel.cli.launch import add_recipe_options, job_of
from fnaccel.cli.options.config import parser
from fnaccel.cli.overriding import DEFAULT_FILE, Layer, check_overrides, layers
from fnaccel.cli.terminal import Parser, columns
from fnaccel.config import Recipe, from_yaml, scan_options
from fnaccel.config.apply import make_optimizer, transformed
from fnaccel.errors import ConfigError, UnknownNameError, nearest
from fnaccel.launch.accelerators import count_accelerators
from fnaccel.launch.job import check_values
from fnaccel.step.precision_policy import check_precision
from fnaccel.strategies import strategy


def run(arguments: Sequence[str]) -> int:
    """Run `fnaccel config show`, `validate` or `default`.

    Args:
        arguments: after `fnaccel config`.

    Raises:
        UnknownNameError: no such action.
        ConfigError: the recipe has a mistake, or the file to write exists.
        LaunchError: the values of the section `launch` contradict each other.

    Example:
        >>> Path("gpt.yaml").write_text("strategy: ddp")
        >>> run(["validate", "gpt.yaml"])
        gpt.yaml is a recipe
        0
    """
    action, *rest = arguments or ["ask"]
    if action.startswith("-") and action not in ("-h", "--help"):
        action, rest = "ask", list(arguments)
    if action in ("-h", "--help"):
        parser().parse_args([action])
    if action not in _ACTIONS:
        raise UnknownNameError(
            f"no action is called {action!r}", where="fnaccel config", fix=nearest(action, _ACTIONS)
        )
    return _ACTIONS[action](rest)


def _show(arguments: Sequence[str]) -> int:
    options = Parser("fnaccel config show", "Each value of the recipe, and its source.")
    add_recipe_options(options)
    options.add_argument("--json", action="store_true", help="print JSON")
    parsed = options.parse_args(arguments)
    sources = layers(_without(parsed, "json"), os.environ)
    rows = sourced(check_overrides(sources), sources)
    if parsed.json:
        print(
            json.dumps([dict(zip(("key", "value", "source"), row, strict=True)) for row in rows], default=str)
        )
    else:
        print(columns([(key, source, _text(value)) for key, value, source in rows], "<<"))
    return 0


def sourced(recipe: Recipe, sources: Sequence[Layer]) -> list[tuple[str, Any, str]]:
    """The dotted key, the value and the source of each field of a recipe.

    Args:
        recipe: the default recipe with the fields of all sources.
        sources: a later source goes over an earlier one.

    Example:
        >>> rows = sourced(Recipe(strategy="ddp"), [Layer("flag", {"strategy": "ddp"}, "flag")])
        >>> rows[0]
        ('strategy', 'ddp', 'flag')
    """
    fields: dict[str, Any] = {}
    for name, value in attrs.asdict(recipe, recurse=False).items():
        if attrs.has(type(value)):
            inner = attrs.asdict(value, recurse=False)
            fields |= {f"{name}.{key}": each for key, each in inner.items()}
        else:
            fields[name] = value
    return [(key, value, _source(key, sources)) for key, value in fields.items()]


def _source(key: str, sources: Sequence[Layer]) -> str:
    """The last source that sets a field, or a part of it: `launch.env.A` sets `launch.env`."""
    names = [
        source.source
        for source in sources
        if any(field == key or field.startswith(f"{key}.") for field in source.fields)
    ]
    return names[-1] if names else "default"


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _without(parsed: argparse.Namespace, name: str) -> argparse.Namespace:
    return argparse.Namespace(**{key: value for key, value in vars(parsed).items() if key != name})


def _validate(arguments: Sequence[str]) -> int:
    options = Parser("fnaccel config validate", "Check a recipe, without a model and without data.")
    options.add_argument("file", metavar="FILE")
    path = Path(options.parse_args(arguments).file)
    check_recipe(from_yaml(path))
    print(f"{path} is a recipe")
    return 0


def check_recipe(recipe: Recipe) -> None:
    """Check names and values that a recipe itself does not check. Accelerators are not counted.

    Raises:
        ConfigError, UnknownNameError, ArgumentError: a name or a value that a run would refuse.
        LaunchError: the values of the section `launch` contradict each other.

    Example:
        >>> check_recipe(Recipe(strategy="fsdp"))
    """
    strategy(recipe.strategy)
    check_precision(recipe.precision, "precision")
    transformed(recipe, _no_loss)
    # a length in epochs needs the data
    lengths = recipe.optimizer.schedule_options.values()
    if not recipe.optimizer.by_pattern and not any(isinstance(length, str) for length in lengths):
        make_optimizer(recipe.optimizer)
    scan_options(recipe)
    ranks = recipe.launch.ranks
    job = job_of(attrs.evolve(recipe.launch, ranks=1, cpu=not recipe.launch.tpu, gpus=None))
    check_values(attrs.evolve(job, processes=1 if ranks is None else ranks, cpu=recipe.launch.cpu))


def _no_loss(model: object, batch: object) -> None:
    """A loss function that is never called: transforms only need one to apply to."""
    del model, batch


def _default(arguments: Sequence[str]) -> int:
    options = Parser("fnaccel config default", f"Write ./{DEFAULT_FILE} for this machine.")
    options.parse_args(arguments)
    text = default_text(count_accelerators(), bf16=_has_bf16())
    try:
        with Path(DEFAULT_FILE).open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(
            f"there is a file {DEFAULT_FILE} already",
            where="fnaccel config default",
            fix=f"look at it with: fnaccel config show. To begin again, remove ./{DEFAULT_FILE} first",
        ) from None
    print(f"wrote ./{DEFAULT_FILE}, which fnaccel launch takes in this folder:\n\n{text}", end="")
    return 0


def default_text(accelerators: int, *, bf16: bool) -> str:
    """The commented YAML of a recipe for a machine.

    Args:
        accelerators: how many the machine has.
        bf16: whether they compute in bf16.

    Example:
        >>> from_yaml(default_text(4, bf16=True)).launch.ranks
        4
    """
    found = f"{accelerators} accelerator{'s' * (accelerators != 1)}" if accelerators else "no accelerator"
    plan = "ddp" if accelerators > 1 else "local"
    why = "each holds the whole model. fsdp shares it" if plan == "ddp" else "one process"
    low = "the accelerators compute in bf16" if bf16 else "bf16 is slow or missing here"
    where = f"ranks: {accelerators}" if accelerators else "ranks: 1\n  cpu: true"
    return (
        f"# written by fnaccel config default: this machine has {found}\n"
        f"strategy: {plan}  # {why}\n"
        f"precision: {'bf16' if bf16 else 'fp32'}  # {low}\n"
        f"launch:\n  {where}\n"
    )


def _has_bf16() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)


_ACTIONS: dict[str, Callable[[Sequence[str]], int]] = {
    "ask": ask,
    "show": _show,
    "validate": _validate,
    "default": _default,
}
