"""The options of `fnaccel estimate`."""

from __future__ import annotations

from fnaccel.cli.terminal import Parser

DTYPES = "fp32,bf16,int8,int4"
"""The dtypes of the table of sizes."""
_HELP = """Print the memory of MODEL: its values in several dtypes, training per rank, inference.

Nothing is allocated, no rank is started, and no weights are read. MODEL is
  a folder or configuration file of transformers, or an id of the Hugging Face hub
  timm/NAME
  a reference to a factory, module:name or file.py:name. To train it, give --loss and --inputs."""


def parser() -> Parser:
    """The options of `fnaccel estimate`."""
    options = Parser("fnaccel estimate", _HELP)
    add = options.add_argument
    add("model", metavar="MODEL", help="see above")
    add(
        "--trust-remote-code", action="store_true", help="run code that the model brings along (default: off)"
    )
    add("--dtypes", default=DTYPES, metavar="LIST", help=f"of the table of sizes (default: {DTYPES})")
    add("--config", metavar="FILE", help="a recipe in YAML. The options below go over it")
    add("--strategy", help='such as fsdp, or "fsdp * tensor(8)" (default: local on one rank, else ddp)')
    add("--precision", help="fp32, bf16, fp16 or fp8")
    add("--accumulate", type=int, help="micro-batches in an update")
    add("--clip-norm", type=float, help="the largest norm of the gradient")
    add("--optimizer", metavar="NAME", help="adamw, adam, sgd, adafactor (default: adamw)")
    add("--remat", action="store_true", help="recompute blocks in backward")
    add("-n", "--ranks", type=int, default=1, help="how many ranks there would be (default: 1)")
    add("--per-machine", type=int, metavar="RANKS", help="how many of them on one machine (default: all)")
    add("--batch", type=int, metavar="ROWS", help="rows of each rank in a step (default: 1)")
    add("--length", type=int, metavar="TOKENS", help="tokens of a row (default: the model's, 2048 at most)")
    add("--loss", metavar="REF", help="loss_fn(model, batch) (default: the model's own)")
    add(
        "--inputs",
        metavar="REF",
        help="a batch of one rank, or a function of the number of rows that returns one",
    )
    add("--fits", metavar="SIZE", help="compare strategies with the memory of a device, such as 24GiB")
    add(
        "--inference",
        action="store_true",
        help="the memory of a forward pass and its cache, instead of training",
    )
    add(
        "--flops",
        metavar="RATE",
        help="operations of a rank in a second, such as 400T: a bound of the step's time",
    )
    add(
        "--link", metavar="RATE", help="bytes in a second within a machine, such as 450GB (default: no bound)"
    )
    add(
        "--network", metavar="RATE", help="bytes in a second between machines, such as 50GB (default: --link)"
    )
    add("--json", action="store_true", help="print JSON")
    return options
