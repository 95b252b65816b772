"""The options of `fnaccel config` and its actions."""

from __future__ import annotations

from fnaccel.cli.terminal import Parser

_HELP = """Show, check or write a recipe. Without an action: ask questions, and write one.

  ask       ask questions, and write ./fnaccel.yaml from the answers (--answers FILE for scripts)
  show      each value of the recipe that a launch would use, and its source
  validate  check a file: keys, kinds, names, and the values of the job
  default   write ./fnaccel.yaml for this machine. A file that exists is kept"""


def parser() -> Parser:
    """The options of `fnaccel config` without an action."""
    return Parser("fnaccel config", _HELP, "fnaccel config [ask | show | validate | default] ...")
