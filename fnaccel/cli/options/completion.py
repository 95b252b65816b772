"""The options of `fnaccel completion`."""

from __future__ import annotations

from fnaccel.cli.terminal import Parser

_HELP = """Print a script that completes commands, options and files in a shell.

  bash  fnaccel completion bash > ~/.local/share/bash-completion/completions/fnaccel
  zsh   fnaccel completion zsh > a folder of $fpath, as _fnaccel
  tcsh  fnaccel completion tcsh > ~/.fnaccel.tcsh, and `source` it"""


def parser() -> Parser:
    """The options of `fnaccel completion`."""
    options = Parser("fnaccel completion", _HELP)
    options.add_argument("shell", choices=["bash", "zsh", "tcsh"], help="the shell")
    options.add_argument("--json", action="store_true", help="print JSON")
    return options
