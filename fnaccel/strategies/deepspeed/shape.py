"""Whether a DeepSpeed configuration can be read: sections, numbers, and keys that look misspelt."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import Any

from fnaccel.strategies.deepspeed.draft import Draft

# sections and numbers that are checked here: DeepSpeed checks the others
_SECTIONS = ("zero_optimization", "bf16", "fp16", "optimizer", "scheduler", "torch_autocast")
_NUMBERS = (
    "gradient_clipping",
    "gradient_accumulation_steps",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "steps_per_print",
)
_ROWS = ("gradient_accumulation_steps", "train_batch_size", "train_micro_batch_size_per_gpu")
# correct keys, to suggest for a misspelt one (https://www.deepspeed.ai/docs/config-json/)
_TOP = (
    *_SECTIONS, *_NUMBERS, "activation_checkpointing", "aio", "amp", "autotuning", "checkpoint", "comet",
    "comms_logger", "communication_data_type", "compression_training", "csv_monitor", "curriculum_learning",
    "data_efficiency", "data_types", "dump_state", "elasticity", "eigenvalue", "flops_profiler",
    "gradient_predivide_factor", "memory_breakdown", "prescale_gradients",
    "seq_parallel_communication_data_type",
    "sparse_attention", "sparse_gradients", "tensorboard", "wall_clock_breakdown", "wandb",
    "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer",
)  # fmt: skip


def check_shape(draft: Draft, written: Mapping[str, Any]) -> None:
    """See that a file can be read at all.

    Raises:
        ConfigError: sections that are none, numbers that are text, misspelt keys: all of them.
    """
    for key in _SECTIONS:
        value = draft.written(key)
        if value is not None and not isinstance(value, dict):
            draft.object_to(f"{key} is {value!r} in {draft.origin}, and not a section {{...}}")
    for key in _NUMBERS:
        value = draft.written(key)
        whole = key != "gradient_clipping"
        if value is not None and (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
            or (whole and value != int(value))
        ):
            draft.object_to(
                f"{key} is {value!r} in {draft.origin}, and not a {'whole ' if whole else ''}number"
            )
        elif value is not None and key in _ROWS and not 1 <= value < 2**31:
            draft.object_to(f"{key} is {value!r} in {draft.origin}, and counts from 1")
    for key in written:
        near = difflib.get_close_matches(key, _TOP, n=1, cutoff=0.85)
        if key not in _TOP and near:
            draft.object_to(f"DeepSpeed has no key {key!r} in {draft.origin}: {near[0]!r} may be meant")
    stage = draft.written("zero_optimization.stage")
    if stage is not None and (type(stage) is not int or not 0 <= stage <= 3):
        draft.object_to(f"zero_optimization.stage is {stage!r} in {draft.origin}, and not 0, 1, 2 or 3")
    draft.check("fa.deepspeed")
