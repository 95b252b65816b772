"""The options of `fnaccel convert`."""

from __future__ import annotations

from pathlib import Path

from fnaccel.cli.terminal import Parser

_HELP = """Write the checkpoint SOURCE as TARGET, block by block.

SOURCE is of fa.save, Accelerate, DeepSpeed, torch.distributed.checkpoint, torch.save or safetensors.
--only, --skip and --rename take names as TARGET has them: `encoder.weight` in hf and safetensors,
`params/encoder.weight` and `opt/encoder.weight/exp_avg` in fnaccel. All of them may be repeated."""


def parser() -> Parser:
    """The options of `fnaccel convert`."""
    options = Parser("fnaccel convert", _HELP)
    options.add_argument("source", type=Path, metavar="SOURCE", help="a file or directory")
    options.add_argument(
        "target", type=Path, metavar="TARGET", help="a new directory, or with --to safetensors a new file"
    )
    options.add_argument(
        "--to", choices=("hf", "fnaccel", "safetensors"),
        help="default: hf from fnaccel, fnaccel from anything else",
    )  # fmt: skip
    options.add_argument("--from", dest="form", metavar="FORMAT", help="default: detected from the files")
    options.add_argument("--step", type=int, help="which step of an fnaccel root (default: the newest)")
    options.add_argument("--model", metavar="KEY", help="the model's key, if SOURCE has several models")
    options.add_argument("--ema", action="store_true", help="averages instead of parameters")
    options.add_argument("--dtype", help="dtype of floating-point values: bf16, fp16, fp32")
    options.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of one file (default: 5GB)")
    options.add_argument("--only", action="append", metavar="PATTERN", help="names to take (shell patterns)")
    options.add_argument("--skip", action="append", metavar="PATTERN", help="names to leave out")
    options.add_argument(
        "--rename", action="append", default=[], metavar="RE=REPLACEMENT",
        help="a regular expression and its replacement",
    )  # fmt: skip
    options.add_argument(
        "--trust-pickle", action="store_true",
        help="load pickles, which can run any code: DCP and DeepSpeed need it",
    )  # fmt: skip
    options.add_argument("--json", action="store_true", help="print JSON")
    options.add_argument("--overwrite", action="store_true", help="replace an earlier export")
    return options
