"""The words that options of transforms, loaders and recipes take. No torch: a recipe is read without it."""

from __future__ import annotations

from typing import Literal

DtypeName = Literal["fp32", "bf16", "fp16", "fp64", "float32", "bfloat16", "float16", "float64"]
"""The names of dtypes that parameters and computation may have."""

PrecisionName = Literal[DtypeName, "fp8"]
"""The names that `fa.with_precision` and a recipe take."""

Scope = Literal["auto", "block", "loss", "step"]
"""The part that `fa.compile` makes one program."""

Kept = Literal["nothing", "attention", "matmuls", "offload"]
"""What `fa.remat` keeps for backward, or where."""

Action = Literal["warn", "skip", "stop"]
"""The answer of `fa.transforms.on_spike` to a spike."""

Sampling = Literal["poisson"]
"""The ways of `fa.shard` to draw rows with a probability, instead of each row once an epoch."""

Remainder = Literal["wrap", "drop", "keep"]
"""The use of rows that fill no whole global batch: repeat from the start, leave out, or use."""
