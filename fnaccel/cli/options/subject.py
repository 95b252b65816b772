"""The options of `fnaccel plan` and `fnaccel bench` that name a step, a model and a recipe."""

from __future__ import annotations

import argparse

REFERENCES = "References are `module:name`, the current directory first, or `path/to/file.py:name`."


def add_subject(options: argparse.ArgumentParser) -> None:
    """Add LOSS, `--model`, `--config`, and fields of the recipe that go over the file."""
    add = options.add_argument
    add("loss", metavar="LOSS", help="a function loss_fn(model, batch), or a step made of one")
    add("--model", required=True, metavar="REF", help="a factory (a class, a function) or a module")
    add("--config", metavar="FILE", help="a recipe in YAML. The options below go over it")
    add("--strategy", help='such as fsdp, or "ddp(2) * tensor(2)" (default: local on one rank, else ddp)')
    add("--precision", help="fp32, bf16 or fp16")
    add("--accumulate", type=int, help="micro-batches in an update")
    add("--clip-norm", type=float, help="the largest norm of the gradient")
    add("--optimizer", metavar="NAME", help="adamw, adam, sgd, adafactor (default: adamw)")
