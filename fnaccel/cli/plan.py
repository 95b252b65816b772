"""`fnaccel plan`: the plan of a train step, and a rank's memory and collectives, for any number of ranks."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import attrs
import torch

from fnaccel.cli.terminal import Parser
from fnaccel.config import Recipe, from_yaml
from fnaccel.config.apply import make_optimizer, transformed
from fnaccel.config.references import load
from fnaccel.errors import require
from fnaccel.program.planned import check_distributed, planned
from fnaccel.strategies import distribute, footprint, strategy
from fnaccel.world.mesh import Mesh, resolve
from fnaccel.world.world import World

_PROG = "fnaccel plan"
_HELP = """Print the plan of a train step of LOSS, and the memory and the collectives of a rank.

No ranks are started, and the model is built without values.
References are `module:name`, the current directory first, or `path/to/file.py:name`."""


def parser() -> Parser:
    """The options of `fnaccel plan`."""
    options = Parser(_PROG, _HELP)
    add = options.add_argument
    add("loss", metavar="LOSS", help="a function loss_fn(model, batch), or a step made of one")
    add("--model", required=True, metavar="REF", help="a factory: a class or a function")
    add("-n", "--ranks", type=int, default=1, help="how many ranks there would be (default: 1)")
    add("--per-machine", type=int, metavar="RANKS", help="how many of them on one machine (default: all)")
    add("--config", metavar="FILE", help="a recipe in YAML. The options below go over it")
    add("--strategy", help='such as fsdp, or "ddp(2) * fsdp(4) * tensor(2)" (default: local)')
    add("--precision", help="fp32, bf16 or fp16")
    add("--accumulate", type=int, help="micro-batches in an update")
    add("--optimizer", metavar="NAME", help="adamw, adam, sgd, adafactor (default: adamw)")
    return options


def _recipe(options: argparse.Namespace) -> Recipe:
    base = Recipe() if options.config is None else from_yaml(Path(options.config))
    flags = {name: getattr(options, name) for name in ("strategy", "precision", "accumulate")}
    if options.optimizer is not None:
        flags["optimizer"] = attrs.evolve(base.optimizer, name=options.optimizer)
    return attrs.evolve(base, **{name: value for name, value in flags.items() if value is not None})


def run(arguments: Sequence[str]) -> int:
    """Print the plan and the footprint.

    Raises:
        FnaccelError: an option is wrong, or the train step could not run.
    """
    options = parser().parse_args(arguments)
    ranks = options.ranks
    local = options.per_machine or ranks
    require(ranks >= 1, f"{ranks} ranks can't train", f"{_PROG} -n", "-n 1, or more")
    require(
        local >= 1 and ranks % local == 0,
        f"{ranks} ranks do not make machines of {local}",
        f"{_PROG} --per-machine",
        "a number that divides the ranks",
    )
    recipe = _recipe(options)
    axes = strategy(recipe.strategy)
    world = World(
        rank=0, size=ranks, local_rank=0, local_size=local, machine=0, machines=ranks // local,
        device=torch.device("cpu"), backend="none", source=_PROG,
    )  # fmt: skip
    mesh = Mesh(world=world, degrees=resolve(axes.degrees(), ranks, str(axes)))
    model = distribute(load(options.model, f"{_PROG} --model"), axes)
    check_distributed(model)
    optimizer = make_optimizer(recipe.optimizer)
    made = planned(transformed(recipe, load(options.loss, f"{_PROG} LOSS")), model, optimizer, mesh)
    print(made.plan)
    if made.delegation is None:
        print(footprint(model.model, axes, ranks, optimizer=made.spec.optimizers))
    else:
        print(f"{made.delegation.by} lays the model out itself: its memory is not counted here")
    return 0
