"""The options of `fnaccel bench`."""

from __future__ import annotations

from fnaccel.cli.options.subject import REFERENCES, add_subject
from fnaccel.cli.terminal import Parser

SCOPES = "eager,block,loss,step"
"""The scopes that are measured by default."""
_HELP = f"""Measure a train step of LOSS in each scope of fa.compile, or under each of some strategies.

Each runs in fresh processes, one after the other.

{REFERENCES}"""


def parser() -> Parser:
    """The options of `fnaccel bench`."""
    options = Parser("fnaccel bench", _HELP)
    add = options.add_argument
    add_subject(options)
    add(
        "--batch", required=True, metavar="REF",
        help="of all ranks: a pytree of tensors, a function that returns one, or a DataLoader",
    )  # fmt: skip
    add("--steps", type=int, default=30, help="how many are timed (default: 30)")
    add(
        "--scopes", metavar="LIST",
        help=f"separated by commas. Eager always runs, as the reference (default: {SCOPES})",
    )  # fmt: skip
    add(
        "--strategies", metavar="LIST",
        help='compare strategies instead, such as "ddp, fsdp, ddp(2) * tensor(2)", in the first of --scopes. '
        "The first strategy is the reference. local takes one rank",
    )  # fmt: skip
    add("-n", "--nproc", dest="ranks", type=int, default=1, metavar="RANKS", help="processes (default: 1)")
    add("--cpu", action="store_true", help="compute on the CPU, whatever else there is")
    add("--cold", action="store_true", help="leave out torch's compile cache, as on a new machine")
    add("--json", action="store_true", help="print JSON")
    return options
