"""`fnaccel config validate`: names and values that a run would refuse, found without a model and data."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from fnaccel.cli.options import config as options_of
from fnaccel.cli.terminal import print_json
from fnaccel.config import from_yaml


def run(arguments: Sequence[str]) -> int:
    """Check a file.

    Raises:
        FnaccelError: the recipe has a mistake.
    """
    options = options_of.validate().parse_args(arguments)
    recipe = from_yaml(options.file)
    # a mistake that reading finds is said at once: what follows imports torch, which takes seconds
    importlib.import_module("fnaccel.cli.config.checking").check_recipe(recipe)
    if options.json:
        print_json({"recipe": str(options.file), "valid": True})
    else:
        print(f"{options.file} is a recipe")
    return 0
