"""`fnaccel config validate`: names and values that a run would refuse, found without a model and data."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from fnaccel.cli.main import complain
from fnaccel.cli.options import config as options_of
from fnaccel.cli.terminal import print_json
from fnaccel.config import from_yaml
from fnaccel.errors import FnaccelError


def run(arguments: Sequence[str]) -> int:
    """Check a file. Returns 2 after the list of its mistakes.

    Raises:
        ConfigError: the file can't be read.
    """
    options = options_of.validate().parse_args(arguments)
    mistakes: list[FnaccelError] = []
    recipe = from_yaml(options.file, mistakes)
    complain(*mistakes)  # at once: what follows imports torch, which takes seconds
    others = importlib.import_module("fnaccel.cli.config.checking").mistakes_of(recipe)
    complain(*others)
    if mistakes or others:
        return 2
    if options.json:
        print_json({"recipe": str(options.file), "valid": True})
    else:
        print(f"{options.file} is a recipe")
    return 0
