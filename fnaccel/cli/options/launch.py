"""The options of `fnaccel launch`."""

from __future__ import annotations

# argparse: no dependency, and with REMAINDER all arguments after the script's name are the script's,
# even if they look like an option of the launcher
import argparse
from typing import Any

from fnaccel.cli.terminal import Parser
from fnaccel.errors import LaunchError
from fnaccel.launch.options import flags_of
from fnaccel.launch.recipe import LaunchRecipe

_HELP = """Run a script as several processes that find each other through fa.start().

Options come before the script. Arguments after the script's name are the script's own.
The options under "recipe" change the result of fa.config.recipe() in the script."""


class _Parser(Parser):
    failure = LaunchError


_GROUPS = {
    "several machines": "the same command on each. gloo uses the interface to machine 0, "
    "or GLOO_SOCKET_IFNAME",
    "TPU": "one process drives all chips of a TPU VM: fa.xla()",
    "carriers": "who starts the processes. Their options are sections of the recipe: "
    "--set launch.slurm.time=2:00:00",
    "more about the processes": None,
}
"""The titles of groups in `--help`, and what is below each title."""


def parser() -> Parser:
    """The options of `fnaccel launch`: those of `LaunchRecipe`, of the recipe, and of the command itself."""
    usage = "fnaccel launch [OPTIONS] (SCRIPT | -m MODULE) [ARGUMENT ...]"
    options = _Parser("fnaccel launch", _HELP, usage)
    options.add_argument("-m", "--module", nargs=argparse.REMAINDER, help="run a module, as python -m does")
    options.add_argument("script", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    _add_launch_options(options, "")
    add_recipe_options(options)
    groups = {title: options.add_argument_group(title, about) for title, about in _GROUPS.items()}
    for title, group in groups.items():
        _add_launch_options(group, title)
    carriers, more = groups["carriers"], groups["more about the processes"]
    carriers.add_argument(
        "--dry-run", action="store_true", help="print the commands of any carrier, and start nothing"
    )
    carriers.add_argument("--json", action="store_true", help="with --dry-run: print JSON")
    more.add_argument(
        "--end-with-input", action="store_true",
        help="end the ranks when standard input is closed, as SIGTERM does. For a launcher that ssh starts",
    )  # fmt: skip
    return options


def _add_launch_options(group: Any, title: str) -> None:
    """Add the options of `LaunchRecipe` with a group. Each is stored under its dotted field."""
    for name, option, kind in flags_of(LaunchRecipe, "launch."):
        if option.group != title:
            continue
        if kind is bool:
            action = "store_false" if option.name.startswith("--no-") else "store_true"
            group.add_argument(*option.flags, dest=name, action=action, default=None, help=option.help)
        else:
            metavar = option.metavar or option.name.lstrip("-").replace("-", "_").upper()
            action = "append" if option.repeated else "store"
            parse = None if kind is str else kind
            group.add_argument(
                *option.flags, dest=name, action=action, type=parse, metavar=metavar, help=option.help
            )


def add_recipe_options(options: argparse.ArgumentParser) -> None:
    """Add the options that set fields of the recipe. Each is stored under the dotted name of its field."""
    add = options.add_argument_group("recipe").add_argument
    add(
        "--config", metavar="FILE",
        help="a recipe in YAML (default: ./fnaccel.yaml if it exists). All options go over it",
    )  # fmt: skip
    add("--no-config", action="store_const", const="", dest="config", help="use no recipe file")
    add("--strategy", help='such as fsdp, or "ddp(2) * fsdp(4)"')
    add("--precision", help="fp32, bf16, fp16 or fp8")
    add("--accumulate", type=int, help="micro-batches in an update")
    add("--clip-norm", type=float, help="the largest norm of the gradient")
    add("--compile", metavar="SCOPE", help="auto, block, loss or step")
    for flag, field, metavar, about in (
        ("--compile-backend", "compile_options.backend", "NAME", "of torch.compile (default: inductor)"),
        ("--compile-mode", "compile_options.mode", "MODE", "such as reduce-overhead or max-autotune"),
        ("--attention", "attention", "KERNEL", "flash, efficient, cudnn or math"),
        ("--fp8-backend", "fp8.backend", "NAME", "torchao or transformer_engine"),
        ("--fp8-recipe", "fp8.recipe", "NAME", "such as tensorwise or rowwise, hybrid or mxfp8"),
    ):
        add(flag, dest=field, metavar=metavar, help=about)
    add(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="fields",
        help="any field of the recipe, such as optimizer.lr=1e-4. May be repeated",
    )  # fmt: skip
