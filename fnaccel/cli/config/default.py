"""`fnaccel config default`: writes a recipe for this machine. `write_recipe` never replaces a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fnaccel.cli.config.machine import this_machine
from fnaccel.cli.options import config as options_of
from fnaccel.cli.options.config import DEFAULT_FILE
from fnaccel.cli.terminal import print_json
from fnaccel.errors import ConfigError
from fnaccel.texts import counted


def run(arguments: Sequence[str]) -> int:
    """Write ./fnaccel.yaml.

    Raises:
        ConfigError: the file exists.
    """
    options = options_of.default().parse_args(arguments)
    machine = this_machine()
    text = default_text(machine.accelerators, bf16=machine.bf16)
    write_recipe(Path(DEFAULT_FILE), text, "fnaccel config default")
    if options.json:
        print_json({"written": DEFAULT_FILE})
        return 0
    print(f"wrote ./{DEFAULT_FILE}, which fnaccel launch takes in this folder:\n\n{text}", end="")
    return 0


def write_recipe(path: Path, text: str, command: str) -> None:
    """Write a recipe to a file that does not exist.

    Args:
        path: the file.
        text: its YAML.
        command: the command, for an error.

    Raises:
        ConfigError: the file exists.
    """
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(
            f"there is a file {path} already",
            where=command,
            fix=f"look at it with: fnaccel config show --config {path}. To begin again, remove it first",
        ) from None


def default_text(accelerators: int, *, bf16: bool) -> str:
    """The commented YAML of a recipe for a machine.

    Args:
        accelerators: how many the machine has.
        bf16: whether they compute in bf16.

    Example:
        >>> fa.config.from_yaml(default_text(4, bf16=True)).launch.ranks
        4
    """
    found = counted(accelerators, "accelerator") if accelerators else "no accelerator"
    plan = "ddp" if accelerators > 1 else "local"
    why = "each holds the whole model. fsdp shares it" if plan == "ddp" else "one process"
    low = "the accelerators compute in bf16" if bf16 else "bf16 is slow or missing here"
    where = f"ranks: {accelerators}" if accelerators else "ranks: 1\n  cpu: true"
    return (
        f"# written by fnaccel config default: this machine has {found}\n"
        f"strategy: {plan}  # {why}\n"
        f"precision: {'bf16' if bf16 else 'fp32'}  # {low}\n"
        f"launch:\n  {where}\n"
    )
