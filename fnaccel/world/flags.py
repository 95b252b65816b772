"""The launcher's flags in a rank: fields of the recipe, in one environment variable.

`fa.config.recipe()` takes them, or else each train step takes those that it leaves open. Without the launcher
they are those of FNACCEL_SET. The launcher raises at the end of a script that never used any.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fnaccel.errors import ConfigError, UnusedOverrideError
from fnaccel.world import settings
from fnaccel.world.launched import detect

VARIABLE = "FNACCEL_OVERRIDES"
FLAGS = ("strategy", "precision", "accumulate", "clip_norm", "compile", "attention")
"""Options of the launcher with the name of the recipe's field that they set."""
_RECIPE, _STEP = "recipe", "step"
_taken = ("", "")
"""What has taken flags in this process, and these flags as text: a later launcher has others."""


def pack(fields: dict[str, Any]) -> dict[str, str]:
    """The environment that carries flags (dotted field -> value) to the ranks."""
    return {VARIABLE: json.dumps(fields)} if fields else {}


def given() -> dict[str, Any]:
    """The fields of FNACCEL_SET and of the launcher, by their dotted names. The launcher's own are left out.

    Raises:
        ConfigError: FNACCEL_SET is not a list of `KEY=VALUE`.
    """
    fields = settings.read(os.environ) | json.loads(os.environ.get(VARIABLE, "{}"))
    return {name: value for name, value in fields.items() if not name.startswith("launch.")}


def take_for_recipe() -> dict[str, Any]:
    """The fields for a recipe, which count as used from here on. Those of `launch` too, for its section.

    Raises:
        ConfigError: FNACCEL_SET is not a list of `KEY=VALUE`, or a train step has used them.
    """
    if "FNACCEL_LAUNCHED" in os.environ and not _taken_by() and detect(os.environ).rank == 0:
        _show_own(sys.argv)
    if _taken_by() == _STEP:
        raise ConfigError(
            f"a train step has used {described(given())}",
            where="fa.config.recipe()",
            fix="ask for the recipe before the first fa.train_step",
        )
    _mark(_RECIPE)
    chosen = settings.read(os.environ)
    settings.show(os.environ)
    return chosen | json.loads(os.environ.get(VARIABLE, "{}"))


def take_for_steps(flags: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of a world, for a train step. None of them if a recipe has taken them."""
    ours = flags == given()  # a command's own options are no flags
    if ours and _taken_by() == _RECIPE:
        return {}
    if flags and ours:
        _mark(_STEP)
    return flags


def check_taken() -> None:
    """Raise UnusedOverrideError if the launcher was given flags that nothing has taken."""
    fields = json.loads(os.environ.get(VARIABLE, "{}"))
    if fields and not _taken_by():
        raise unused(fields)


def unused(fields: Mapping[str, Any]) -> UnusedOverrideError:
    """The error for fields that a script does not use."""
    launched = any(name in fields for name in json.loads(os.environ.get(VARIABLE, "{}")))
    source = "the launcher was told" if launched else f"{settings.VARIABLE} says"
    return UnusedOverrideError(
        f"{source} {described(fields)}, and the script never used it",
        where="fnaccel launch",
        fix="build the step from recipe = fa.config.recipe(), or leave the options out",
    )


def described(fields: Mapping[str, Any]) -> str:
    """Fields as `name=value`."""
    return ", ".join(f"{name}={value!r}" for name, value in fields.items())


def _text() -> str:
    return f"{os.environ.get(settings.VARIABLE, '')} {os.environ.get(VARIABLE, '')}"


def _mark(by: str) -> None:
    global _taken
    _taken = by, _text()


def _taken_by() -> str:
    """What has taken the flags: a recipe, a train step, or nothing ("")."""
    by, text = _taken
    return by if text == _text() else ""


def _show_own(argv: list[str]) -> None:
    """Say that options behind the script do not change the recipe, if the launcher has the same ones."""
    flags = {f"--{name.replace('_', '-')}" for name in (*FLAGS, "set")}
    own = [name for name in (word.partition("=")[0] for word in argv[1:]) if name in flags]
    if own:
        text = f"{', '.join(own)} behind {Path(argv[0]).name} is the script's own, no option of the launcher"
        print(f"fnaccel: {text}: those come before the script", file=sys.stderr, flush=True)
