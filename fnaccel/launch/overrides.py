"""Overrides from the launcher to a script's recipe, in one environment variable.

`fa.config.recipe()` takes overrides. Without the launcher they are those of FNACCEL_SET.
The launcher raises at the end of a script that never did.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from fnaccel.errors import UnusedOverrideError
from fnaccel.world import settings
from fnaccel.world.launched import detect

VARIABLE = "FNACCEL_OVERRIDES"
FLAGS = ("strategy", "precision", "accumulate", "clip_norm", "compile", "attention")
"""Options of the launcher with the name of the recipe's field that they set."""
_TAKEN = "FNACCEL_OVERRIDES_TAKEN"


def pack(overrides: dict[str, Any]) -> dict[str, str]:
    """The environment that carries overrides (dotted field -> value) to the ranks."""
    return {VARIABLE: json.dumps(overrides)} if overrides else {}


def take() -> dict[str, Any]:
    """The overrides, which count as used from here on.

    Raises:
        ConfigError: FNACCEL_SET is not a list of `KEY=VALUE`.
    """
    if "FNACCEL_LAUNCHED" in os.environ and _TAKEN not in os.environ and detect(os.environ).rank == 0:
        _show_own(sys.argv)
    os.environ[_TAKEN] = "1"
    chosen = settings.read(os.environ)
    settings.show(os.environ)
    return chosen | json.loads(os.environ.get(VARIABLE, "{}"))


def check_taken() -> None:
    """Raise UnusedOverrideError if overrides were given and never taken."""
    overrides = json.loads(os.environ.get(VARIABLE, "{}"))
    if overrides and _TAKEN not in os.environ:
        flags = ", ".join(f"{name}={value!r}" for name, value in overrides.items())
        raise UnusedOverrideError(
            f"the launcher was told {flags}, and the script never used it",
            where="fnaccel launch",
            fix="build the step from recipe = fa.config.recipe(), or drop the flags",
        )


def _show_own(argv: list[str]) -> None:
    """Say that options behind the script do not change the recipe, if the launcher has the same ones."""
    flags = {f"--{name.replace('_', '-')}" for name in (*FLAGS, "set")}
    own = [name for name in (word.partition("=")[0] for word in argv[1:]) if name in flags]
    if own:
        text = f"{', '.join(own)} behind {Path(argv[0]).name} is the script's own, no option of the launcher"
        print(f"fnaccel: {text}: those come before the script", file=sys.stderr, flush=True)
