"""The options of `fnaccel plan`."""

from __future__ import annotations

from fnaccel.cli.terminal import Parser

_HELP = """Print the plan of a train step of LOSS, and the memory and the collectives of a rank.

No ranks are started, and the model is built without values.
References are `module:name`, the current directory first, or `path/to/file.py:name`."""


def parser() -> Parser:
    """The options of `fnaccel plan`."""
    options = Parser("fnaccel plan", _HELP)
    add = options.add_argument
    add("loss", metavar="LOSS", help="a function loss_fn(model, batch), or a step made of one")
    add("--model", required=True, metavar="REF", help="a factory (a class, a function) or a module")
    add("--config", metavar="FILE", help="a recipe in YAML. The options below go over it")
    add("--strategy", help='such as fsdp, or "ddp(2) * tensor(2)" (default: local on one rank, else ddp)')
    add("--precision", help="fp32, bf16 or fp16")
    add("--accumulate", type=int, help="micro-batches in an update")
    add("--clip-norm", type=float, help="the largest norm of the gradient")
    add("--optimizer", metavar="NAME", help="adamw, adam, sgd, adafactor (default: adamw)")
    add("-n", "--ranks", type=int, default=1, help="how many ranks there would be (default: 1)")
    add("--per-machine", type=int, metavar="RANKS", help="how many of them on one machine (default: all)")
    add("--json", action="store_true", help="print JSON")
    return options
