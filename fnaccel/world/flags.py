"""The launcher's flags in a rank: fields of the recipe, in one environment variable.

`fa.config.recipe()` takes them, or else each train step takes those that it leaves open. Without the launcher
they are those of FNACCEL_SET. The launcher raises at the end of a script that never used any.
"""

from __future__ import annotations

import functools
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
    """The fields of FNACCEL_SET and of the launcher, by their dotted names.

    Raises:
        ConfigError: FNACCEL_SET is not a list of `KEY=VALUE`.
    """
    return settings.read(os.environ) | _launched()


def for_steps() -> dict[str, Any]:
    """Those of them that a train step may use. The fields of `launch` are the launcher's."""
    return {name: value for name, value in given().items() if not name.startswith("launch.")}


def take_for_recipe() -> dict[str, Any]:
    """The fields for a recipe, which count as used from here on.

    Raises:
        ConfigError: FNACCEL_SET is not a list of `KEY=VALUE`, or a train step has used them.
    """
    if "FNACCEL_LAUNCHED" in os.environ and detect(os.environ).rank == 0:
        _show_own(*sys.argv)
    if _taken_by() == _STEP:
        raise ConfigError(
            f"a train step has used {described(for_steps())}",
            where="fa.config.recipe()",
            fix="ask for the recipe before the first fa.train_step",
        )
    _mark(_RECIPE)
    settings.show(os.environ)
    return given()


def take_for_steps(flags: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of a world, for a train step. None of them if a recipe has taken them."""
    if not flags or _taken_by() == _RECIPE:
        return {}
    _mark(_STEP)
    return flags


def check_taken() -> None:
    """Raise UnusedOverrideError if the launcher was given flags that nothing has taken."""
    fields = _launched()
    if fields and not _taken_by():
        raise unused(fields)


def unused(fields: Mapping[str, Any]) -> UnusedOverrideError:
    """The error for fields that a script does not use."""
    source = "the launcher was told" if fields.keys() & _launched().keys() else f"{settings.VARIABLE} says"
    return UnusedOverrideError(
        f"{source} {described(fields)}, and the script never used it",
        where="fnaccel launch",
        fix="build the step from recipe = fa.config.recipe(), or leave the options out",
    )


def described(fields: Mapping[str, Any]) -> str:
    """Fields as `name=value`."""
    return ", ".join(f"{name}={value!r}" for name, value in fields.items())


def _launched() -> dict[str, Any]:
    """The fields that the launcher has sent."""
    return json.loads(os.environ.get(VARIABLE, "{}"))


def _text() -> str:
    """All that was given. Empty if nothing was."""
    return f"{os.environ.get(settings.VARIABLE, '')} {os.environ.get(VARIABLE, '')}".strip()


def _mark(by: str) -> None:
    global _taken
    _taken = by, _text()


def _taken_by() -> str:
    """What has taken the flags: a recipe, a train step, or nothing ("")."""
    by, text = _taken
    return by if text and text == _text() else ""


@functools.cache
def _show_own(*argv: str) -> None:
    """Say once that options behind the script do not change the recipe, if the launcher has the same ones."""
    flags = {f"--{name.replace('_', '-')}" for name in (*FLAGS, "set")}
    own = [name for name in (word.partition("=")[0] for word in argv[1:]) if name in flags]
    if own:
        text = f"{', '.join(own)} behind {Path(argv[0]).name} is the script's own, no option of the launcher"
        print(f"fnaccel: {text}: those come before the script", file=sys.stderr, flush=True)
