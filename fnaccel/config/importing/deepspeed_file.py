"""A DeepSpeed JSON file. The file itself goes on: the recipe names it, and agrees with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fnaccel.config.importing.draft import Draft, Imported, call, leaves_of
from fnaccel.errors import ConfigError

TOP = (
    "zero_optimization", "bf16", "fp16", "gradient_accumulation_steps", "gradient_clipping",
    "train_batch_size",
    "train_micro_batch_size_per_gpu", "optimizer", "scheduler", "steps_per_print", "wall_clock_breakdown",
    "activation_checkpointing", "aio", "amp", "communication_data_type", "prescale_gradients",
    "flops_profiler",
    "gradient_predivide_factor", "sparse_gradients", "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "tensorboard", "wandb", "csv_monitor", "comms_logger", "dump_state", "data_types", "compression_training",
    "data_efficiency", "curriculum_learning", "elasticity", "autotuning", "checkpoint", "memory_breakdown",
    "sparse_attention", "hybrid_engine", "data_sampling", "pipeline", "tensor_parallel", "torch_autocast",
    "seq_parallel_communication_data_type", "compile", "eigenvalue", "timers",
)  # fmt: skip
"""Sections and keys of DeepSpeed's configuration."""
_AUTO = {
    "gradient_accumulation_steps": "auto: filled from accumulate",
    "gradient_clipping": "auto: filled from clip_norm, or no bound",
    "bf16.enabled": "auto: filled from precision",
    "fp16.enabled": "auto: filled from precision",
    "train_batch_size": "auto: batches of any size",
    "train_micro_batch_size_per_gpu": "auto: batches of any size",
    "zero_optimization.stage": "auto: 2",
    "optimizer.params.lr": "auto: filled from optimizer.lr. Set it: the recipe has the default",
    "scheduler.params.warmup_max_lr": "auto: filled from optimizer.lr. Set it: the recipe has the default",
    "scheduler.params.warmup_min_lr": "auto: 0",
    "scheduler.params.warmup_num_steps": "auto: needs optimizer.schedule_options.warmup",
    "scheduler.params.total_num_steps": "auto: needs optimizer.schedule_options.total",
}
_PEAKS = ("warmup_max_lr", "cycle_max_lr")


def read(document: Mapping[str, Any], path: str) -> Imported:
    """The recipe that trains with a DeepSpeed JSON file.

    Args:
        document: the parsed file.
        path: the file, as the recipe is to name it.

    Raises:
        ConfigError: values of the file contradict each other.

    Example:
        >>> read({"bf16": {"enabled": True}, "gradient_clipping": 1.0}, "ds.json").recipe.clip_norm
        1.0
    """
    draft = Draft(leaves_of(document), "DeepSpeed")
    read_into(draft, path, "")
    draft.fill("strategy", call("deepspeed", config=path), "the file")
    return draft.finish(TOP)


def read_into(draft: Draft, path: str, prefix: str) -> None:
    """Write the rows of the file's keys, and set the fields that have to agree with it.

    Args:
        draft: its leaves hold the keys of the file.
        path: the file, as the recipe is to name it.
        prefix: before each key of the file in the table.

    Raises:
        ConfigError: values of the file contradict each other, or those of the document.
    """
    _precision(draft, prefix)
    _step(draft, prefix)
    _optimizer(draft, prefix)
    became = f"strategy: {call('deepspeed', config=path)}"
    for key in [key for key in draft.leaves if key.startswith(prefix)]:
        name = key[len(prefix) :]
        if draft.leaves[key] == "auto":
            draft.row(key, became, _AUTO.get(name, "auto: filled by the strategy, see docs/deepspeed.md"))
        elif name.split(".")[0] in TOP:
            draft.row(key, became, "DeepSpeed reads it from the file")


def _precision(draft: Draft, prefix: str) -> None:
    low = [name for name in ("bf16", "fp16") if draft.get(f"{prefix}{name}.enabled") is True]
    if len(low) > 1:
        raise ConfigError(
            "bf16.enabled and fp16.enabled are both true",
            where=f"{draft.tool}: {prefix}fp16.enabled",
            fix="keep one of them",
        )
    if low:
        draft.set(f"{prefix}{low[0]}.enabled", "precision", low[0], "and master parameters are fp32")
    elif not any(draft.get(f"{prefix}{name}.enabled") == "auto" for name in ("bf16", "fp16")):
        draft.fill("precision", "fp32", f"{prefix}bf16.enabled")


def _step(draft: Draft, prefix: str) -> None:
    why = "each batch of the loader is cut into so many micro-batches"
    draft.step(f"{prefix}gradient_accumulation_steps", f"{prefix}gradient_clipping", why)
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    keys = [f"{prefix}{name}" for name in names]
    if all(draft.get(key, "auto") != "auto" for key in keys):
        total, micro, steps = (draft.whole(key) or 0 for key in keys)
        if micro * steps == 0 or total % (micro * steps):
            what = f"no number of ranks makes it from micro-batches of {micro} and {steps} steps"
            raise draft.wrong(keys[0], what, "a multiple of both")


def _optimizer(draft: Draft, prefix: str) -> None:
    kind, rate = draft.get(f"{prefix}optimizer.type"), draft.get(f"{prefix}optimizer.params.lr")
    if kind is not None:
        why = f"DeepSpeed's own {kind}, with the values of the file"
        draft.set(f"{prefix}optimizer.type", "optimizer.name", "from_deepspeed", why)
    if draft.get(f"{prefix}scheduler.type") is None:
        if kind is not None:
            draft.fill("optimizer.schedule", "constant", f"{prefix}optimizer.type")
    else:
        key = f"{prefix}scheduler.type"
        why = f"DeepSpeed's own {draft.get(key)}, with the values of the file"
        draft.set(key, "optimizer.schedule", "deepspeed_lr", why)
        draft.fill("optimizer.schedule_options", {}, key)
        peaks = [draft.get(f"{prefix}scheduler.params.{name}") for name in _PEAKS]
        first, rate = rate, next((peak for peak in peaks if peak not in (None, "auto")), rate)
        if first not in (None, "auto", rate):
            what = f"the scheduler rises to {rate}, which DeepSpeed takes"
            raise draft.wrong(f"{prefix}optimizer.params.lr", what, f'write {rate} or "auto"')
    for key in (f"{prefix}optimizer.params.lr", *(f"{prefix}scheduler.params.{name}" for name in _PEAKS)):
        if draft.get(key) == rate and rate not in (None, "auto"):
            draft.set(key, "optimizer.lr", draft.number(key), "the file and the recipe have to agree")
