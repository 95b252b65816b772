"""The options of `fnaccel test`."""

from __future__ import annotations

from pathlib import Path

from fnaccel.cli.terminal import Parser

_HELP = """Check this machine, or several: kernel, cards, ports, collectives, a training under each strategy
against one process, and a checkpoint. On several machines run the same command on each.

Nothing is left behind. The exit code is 1 if a check failed."""


def parser() -> Parser:
    """The options of `fnaccel test`."""
    options = Parser("fnaccel test", _HELP)
    add = options.add_argument
    add("-n", "--nproc", type=int, help="ranks on this machine (default: its accelerators, or 2)")
    add("--cpu", action="store_true", help="compute on the CPU, whatever else there is")
    add(
        "--strategies", metavar="LIST", default="ddp, fsdp",
        help='such as "ddp, fsdp(2) * tensor(2)" (default: ddp, fsdp)',
    )  # fmt: skip
    add("--folder", type=Path, help="a folder that all machines share, to save in")
    add("--nnodes", type=int, default=1, help="how many machines (default: 1)")
    add("--node-rank", type=int, help="number of this machine, from 0")
    add("--master-addr", help="an address of machine 0 that all reach")
    add("--master-port", type=int, help="a free port there (default: 29500)")
    add("--verbose", action="store_true", help="print what the ranks of a failed check have printed")
    add("--json", action="store_true", help="print JSON")
    return options
