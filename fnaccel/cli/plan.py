"""`fnaccel plan`: the plan of a train step, and a rank's memory and collectives, for any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from fnaccel.cli.options.plan import parser
from fnaccel.cli.subject import fields_of, recipe_of, step_fields
from fnaccel.cli.terminal import print_json
from fnaccel.config.applying import make_optimizer, under_own
from fnaccel.config.references import load
from fnaccel.errors import require
from fnaccel.models.meta import modules_without_values
from fnaccel.program.launcher_flags import choose
from fnaccel.program.model_notes import model_notes, with_notes
from fnaccel.program.planned import planned
from fnaccel.strategies import Footprint, distribute, footprint
from fnaccel.world.mesh import Mesh, resolve
from fnaccel.world.simulation import absent_world, check_machines

_PROG = "fnaccel plan"


def run(arguments: Sequence[str]) -> int:
    """Print the plan and the footprint.

    Raises:
        FnaccelError: an option is wrong, or the train step could not run.
    """
    options = parser().parse_args(arguments)
    ranks = options.ranks
    local = options.per_machine or ranks
    require(ranks >= 1, f"{ranks} ranks can't train", f"{_PROG} -n", "-n 1, or more")
    check_machines(ranks, local, f"{_PROG} --per-machine")
    fields = fields_of(options, _PROG)
    recipe = recipe_of(fields, _PROG)
    model = distribute(load(options.model, f"{_PROG} --model"))
    optimizer = make_optimizer(recipe.optimizer)
    step = under_own(recipe, load(options.loss, f"{_PROG} LOSS"))
    chosen = choose(step, model, ranks, step_fields(fields), trains=True)
    axes = chosen.strategy
    mesh = Mesh(world=absent_world(ranks, local, _PROG), degrees=resolve(axes.degrees(), ranks, str(axes)))
    made = planned(chosen, optimizer, mesh)
    modules = modules_without_values(model.model)
    built = {key: module for key, module in modules.items() if not isinstance(module, str)}
    plan = with_notes(made.plan, model_notes(built, made.spec))
    sizes = None if made.delegation else footprint(model.model, axes, ranks, optimizer=optimizer)
    if options.json:
        parts = {"plan": attrs.asdict(plan), "footprint": None if sizes is None else _plain(sizes)}
        print_json(parts)
        return 0
    print(plan)
    if made.delegation is None:
        print(sizes)
    else:
        print(f"{made.delegation.by} lays the model out itself: its memory is not counted here")
    return 0


def _plain(sizes: Footprint) -> dict[str, Any]:
    """The bytes of the largest rank, and the collectives."""
    names = ("layout", "parameters", "gradients", "slots", "largest_unit")
    return {
        **{name: getattr(sizes, name) for name in names},
        "traffic": [attrs.asdict(each) for each in sizes.traffic],
    }
