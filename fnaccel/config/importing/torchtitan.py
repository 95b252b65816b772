"""A job file of torchtitan (TOML): parallelism, training, optimizer, schedule, checkpoints, metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fnaccel.config.importing.draft import Draft, Imported, leaves_of
from fnaccel.config.importing.texts import call, sharded

_PRECISIONS = {"bfloat16": "bf16", "float32": "fp32"}
_OPTIMIZERS = {"AdamW": "adamw", "Adam": "adam"}
_BACKGROUND = {"disabled": False, "async": True, "async_with_pinned_mem": True}
_SECTIONS = (
    "job", "profiling", "metrics", "model", "optimizer", "lr_scheduler", "training", "parallelism",
    "checkpoint",
    "activation_checkpoint", "compile", "float8", "quantize", "mx", "comm", "experimental", "validation",
    "fault_tolerance", "memory_estimation", "debug",
)  # fmt: skip
SECTIONS = frozenset(_SECTIONS)
_AXES = {
    "data_parallel_replicate_degree": 1,
    "data_parallel_shard_degree": -1,
    "context_parallel_degree": 1,
    "tensor_parallel_degree": 1,
}
_OTHERS = {
    "job": "of torchtitan's own job folder. checkpoint.directory and trackers have their own paths here",
    "profiling": "fa.profile, or tracking.profile: a directory",
    "model": "the model comes from your script",
    "comm": "fa.start(timeout=), and launch.watchdog",
    "experimental": "of torchtitan's own loader of code",
    "validation": "fa.evaluate in the body of fa.scan",
    "fault_tolerance": "needs torchft. launch.restarts and launch.min_machines go on with fewer machines",
    "memory_estimation": "fnaccel plan shows memory for any number of ranks",
    "mx": "needs TransformerEngine: fp8: {backend: transformer_engine, recipe: mxfp8}",
    "quantize": "model.converters does not name it, or it has no form here",
    "debug": "of torchtitan's own checks",
    "parallelism": "needs an axis that fnaccel does not have, or is the default of its axis",
    "training": "the data come from your script",
    "checkpoint": "fa.save and fa.restore do it: any layout restores any other",
    "metrics": "of torchtitan's own loggers",
    "optimizer": "of torchtitan's own container of optimizers",
    "lr_scheduler": "the schedule takes its own number",
    "activation_checkpoint": "fa.remat keeps attention or matmuls: remat: attention",
    "compile": "of torchtitan's own choice of parts",
    "float8": "model.converters does not name it, or it is of torchtitan's own filter",
}
_FLOAT8 = """recipe_name enable_fsdp_float8_all_gather precompute_float8_dynamic_scale_for_fsdp
    filter_fqns emulate force_recompute_fp8_weight_in_bwd"""
_NAMES = {
    "parallelism": """data_parallel_replicate_degree data_parallel_shard_degree context_parallel_degree
        tensor_parallel_degree fsdp_reshard_after_forward context_parallel_rotate_method
        pipeline_parallel_degree pipeline_parallel_schedule enable_async_tensor_parallel
        disable_loss_parallel expert_parallel_degree""",
    "training": """local_batch_size global_batch_size batch_size seq_len max_norm steps seed deterministic
        dataset dataset_path mixed_precision_param mixed_precision_reduce enable_cpu_offload gc_freq compile
        dtype""",
    "optimizer": "name lr beta1 beta2 eps weight_decay implementation fused",
    "lr_scheduler": "warmup_steps decay_ratio decay_type min_lr_factor lr_min",
    "checkpoint": """enable enable_checkpoint folder interval keep_latest_k async_mode export_dtype
        last_save_model_only""",
    "activation_checkpoint": "mode selective_ac_option",
    "compile": "enable components backend",
    "float8": _FLOAT8,
    "quantize.linear.float8": _FLOAT8,
    "metrics": """log_freq enable_tensorboard enable_wandb enable_color_printing disable_color_printing
        save_tb_folder""",
}
_KNOWN = [f"{section}.{name}" for section, names in _NAMES.items() for name in names.split()]


def read(document: Mapping[str, Any]) -> Imported:
    """The recipe of a torchtitan job file.

    Torchtitan's defaults hold where the file says nothing, and are listed in the notes.

    Raises:
        ConfigError: a value can't be read, or two contradict each other.

    Example:
        >>> titan = read({"training": {"steps": 10}, "parallelism": {"tensor_parallel_degree": 2}})
        >>> titan.recipe.strategy, titan.recipe.run.steps
        ('fsdp * tensor(2)', 10)
    """
    draft = Draft(leaves_of(document), "torchtitan")
    _parallelism(draft)
    _training(draft)
    _optimizer(draft)
    _transforms(draft)
    _saving(draft)
    for key in draft.leaves:
        section = key.split(".")[0]
        if draft.has(key) and section in _OTHERS and (key in _KNOWN or section not in _NAMES):
            draft.skip(key, _OTHERS[section])
    return draft.finish(_KNOWN)


def _parallelism(draft: Draft) -> None:
    sizes = {name: draft.whole(f"parallelism.{name}", default) or 1 for name, default in _AXES.items()}
    copies, shards, cut, layers = sizes.values()
    options: dict[str, Any] = {}
    reshard = draft.choice(
        "parallelism.fsdp_reshard_after_forward", {"default": True, "always": True, "never": False}, "default"
    )
    if not reshard:
        options["reshard_after_forward"] = False
    if draft.truth("training.enable_cpu_offload"):
        options["offload"] = True
    axes = [call("ddp", copies)] * (copies != 1)
    if shards != 1 or cut != 1:
        axes += [sharded(options, degree=None if shards == -1 else shards)]
    method = draft.choice(
        "parallelism.context_parallel_rotate_method", {"allgather": None, "alltoall": "ring"}, "allgather"
    )
    axes += [call("context", cut, method=method)] * (cut != 1)
    axes += [call("tensor", layers)] * (layers != 1)
    strategy = " * ".join(axes) or "local"
    draft.fill("strategy", strategy, "parallelism")
    for name in (*_AXES, "fsdp_reshard_after_forward"):
        draft.row(
            f"parallelism.{name}", f"strategy: {strategy}", "an axis of the product, or an option of it"
        )
    draft.row(
        "parallelism.context_parallel_rotate_method",
        f"strategy: {strategy}" if cut != 1 else "nothing",
        "how keys and values reach all ranks",
    )
    draft.row(
        "training.enable_cpu_offload", f"strategy: {strategy}", "parameters and slots stay on the CPU, or not"
    )
    for name, what in (
        ("pipeline_parallel_degree", "pipelines"),
        ("expert_parallel_degree", "expert parallelism"),
    ):
        key = f"parallelism.{name}"
        draft.skip(
            key,
            f"needs {what}, which fnaccel does not have"
            if (draft.whole(key, 1) or 1) > 1
            else "1 is the default",
        )


def _training(draft: Draft) -> None:
    draft.set("training.steps", "run.steps", draft.whole("training.steps", 10_000), "updates of the run")
    for key in ("training.seed", "debug.seed"):
        if draft.get(key) is not None:
            draft.set(key, "run.seed", draft.whole(key), "of parameters, draws and data")
    norm = draft.number("training.max_norm", 1.0)
    draft.set("training.max_norm", "clip_norm", norm or None, "the norm over all ranks. 0: no bound")
    # without the key torchtitan computes in bf16 where parameters are sharded
    low = draft.choice("training.mixed_precision_param", _PRECISIONS, "bfloat16")
    draft.set("training.mixed_precision_param", "precision", low, "master parameters are fp32")
    draft.skip("training.mixed_precision_reduce", "gradients are averaged in fp32")
    draft.skip("training.gc_freq", "Python's garbage collector runs as usual")
    for key in ("training.local_batch_size", "training.batch_size"):
        draft.skip(key, "batches are global here: batch_size of your loader, on all ranks together")
    _accumulation(draft)
    _note(draft, "training.steps", "training.max_norm", "training.mixed_precision_param")


def _accumulation(draft: Draft) -> None:
    key, local = "training.global_batch_size", draft.whole("training.local_batch_size")
    total = draft.whole(key)
    if total is None or total < 0:
        draft.skip(key, "no accumulation")
        return
    sizes = [draft.whole(f"parallelism.{name}", default) or 1 for name, default in list(_AXES.items())[:2]]
    draft.row(key, "nothing", "batch_size of your loader. accumulate: global / (local * data-parallel ranks)")
    if local is not None and -1 not in sizes:
        each = local * math.prod(sizes)
        if each < 1 or total % each:
            raise draft.wrong(key, f"it does not divide by {each} rows of all ranks", "a multiple")
        draft.set(key, "accumulate", total // each, "micro-batches of each global batch of your loader")


def _optimizer(draft: Draft) -> None:
    name = draft.get("optimizer.name", "AdamW")
    chosen = next(
        (ours for name_there, ours in _OPTIMIZERS.items() if name_there == name), f"torch.optim:{name}"
    )
    draft.set("optimizer.name", "optimizer.name", chosen, "with torch's fused kernel")
    draft.set("optimizer.lr", "optimizer.lr", draft.number("optimizer.lr", 8e-4), "the highest rate")
    options: dict[str, Any] = {}
    betas = [draft.number(f"optimizer.{key}", value) for key, value in (("beta1", 0.9), ("beta2", 0.95))]
    if chosen in ("adamw", "adam"):
        options = {"betas": betas, "eps": draft.number("optimizer.eps", 1e-8)}
        options["weight_decay"] = draft.number("optimizer.weight_decay", 0.1)
        for key in ("beta1", "beta2", "eps", "weight_decay"):
            draft.row(f"optimizer.{key}", "optimizer.options", "with the same meaning")
    draft.fill("optimizer.options", options, "optimizer")
    for key in ("implementation", "fused"):
        draft.skip(f"optimizer.{key}", "the fused kernel is the default")
    _note(draft, *(f"optimizer.{key}" for key in ("name", "lr", "beta1", "beta2", "eps", "weight_decay")))
    _schedule(draft)


def _schedule(draft: Draft) -> None:
    """Torchtitan counts updates from 1: the first rate is above 0, and the last one above the lowest."""
    total, peak = draft.fields["run.steps"], draft.fields["optimizer.lr"]
    warmup = min(draft.whole("lr_scheduler.warmup_steps", 200) or 0, max(total - 1, 0))
    shape = draft.choice(
        "lr_scheduler.decay_type", {name: name for name in ("linear", "cosine", "sqrt")}, "linear"
    )
    ratio = draft.number("lr_scheduler.decay_ratio", 1.0)
    decay = max(1, min(round(total * ratio), total - warmup))
    newer = draft.get("lr_scheduler.min_lr_factor") is not None
    low = draft.number(f"lr_scheduler.{'min_lr_factor' if newer else 'lr_min'}", 0.0)
    options = {
        "warmup": max(warmup - 1, 0),
        "total": total,
        "decay": decay,
        "shape": shape,
        "end": low * peak,
    }
    if warmup > 1:
        options["start"] = peak / warmup
    draft.fill("optimizer.schedule", "warmup_stable_decay", "lr_scheduler")
    draft.fill("optimizer.schedule_options", options, "lr_scheduler")
    for key in [key for key in draft.leaves if key.startswith("lr_scheduler.") and key in _KNOWN]:
        draft.row(key, "optimizer.schedule: warmup_stable_decay", "the same rate at each update")
    _note(draft, "lr_scheduler.warmup_steps", "lr_scheduler.decay_type")


def _note(draft: Draft, *keys: str) -> None:
    absent = [key for key in keys if key not in draft.leaves]
    if absent:
        draft.notes.append(f"torchtitan's defaults hold for: {', '.join(absent)}")


def _transforms(draft: Draft) -> None:
    key = "activation_checkpoint.mode"
    mode = draft.choice(
        key, {"none": False, "full": True, "selective": "matmuls", "memory_budget": True}, "selective"
    )
    draft.set(key, "remat", mode, "what is recomputed in backward. matmuls: their results are kept")
    if draft.truth("compile.enable") or draft.truth("training.compile"):
        draft.fill("compile", "block", "compile.enable")
    for key in ("compile.enable", "training.compile"):
        draft.row(key, f"compile: {draft.fields.get('compile')}", "torchtitan compiles each block, too")
    if draft.get("compile.backend") is not None and "compile" in draft.fields:
        draft.set(
            "compile.backend", "compile_options.backend", draft.get("compile.backend"), "of torch.compile"
        )
    converters = draft.names("model.converters")
    section = next((name for name in ("float8", "quantize.linear.float8") if name in converters), None)
    if section is not None:
        _float8(draft, section)


def _float8(draft: Draft, section: str) -> None:
    """Layers in fp8. A section without its name in `model.converters` changes nothing in torchtitan."""
    draft.fields["precision"] = "fp8"
    draft.row("model.converters", "precision: fp8", "needs torchao, and a GPU that computes in fp8")
    recipe = draft.get(f"{section}.recipe_name", "tensorwise")
    draft.fill("fp8.recipe", recipe, section)
    draft.row(f"{section}.recipe_name", f"fp8.recipe: {recipe}", "how tensors are scaled")
    for key, field in (("enable_fsdp_float8_all_gather", "all_gather"), ("emulate", "emulate")):
        if draft.has(f"{section}.{key}"):
            draft.set(
                f"{section}.{key}", f"fp8.{field}", draft.truth(f"{section}.{key}"), "of torchao's layers"
            )
    names = draft.names(f"{section}.filter_fqns")
    if names:
        skipped = [f"*{name}*" for name in names]
        draft.set(f"{section}.filter_fqns", "fp8.skip", skipped, "layers that stay in bf16")


def _saving(draft: Draft) -> None:
    enabled = draft.truth("checkpoint.enable") or draft.truth("checkpoint.enable_checkpoint")
    keys = [key for key in draft.leaves if key.startswith("checkpoint.") and key in _KNOWN]
    if enabled:
        folder = draft.get("checkpoint.folder", "checkpoint")
        draft.set("checkpoint.folder", "checkpoint.directory", folder, "the root of the checkpoints")
        draft.set("checkpoint.interval", "checkpoint.every", draft.whole("checkpoint.interval", 500), "steps")
        keep = draft.whole("checkpoint.keep_latest_k", 10)
        draft.set("checkpoint.keep_latest_k", "checkpoint.keep", keep or None, "the newest. 0: all")
        mode = draft.choice("checkpoint.async_mode", _BACKGROUND, "disabled")
        draft.set(
            "checkpoint.async_mode",
            "checkpoint.background",
            mode,
            "training goes on while a state is written",
        )
        for key in ("checkpoint.enable", "checkpoint.enable_checkpoint"):
            draft.row(key, "checkpoint.directory", "a folder turns saving on")
        _note(draft, "checkpoint.folder", "checkpoint.interval", "checkpoint.keep_latest_k")
    else:
        draft.skip_all(keys, "checkpoints are off")
    trackers = [name for name in ("tensorboard", "wandb") if draft.truth(f"metrics.enable_{name}")]
    for name in ("tensorboard", "wandb"):
        draft.row(
            f"metrics.enable_{name}",
            f"tracking.trackers: {name}" if name in trackers else "nothing",
            f"needs {name}" if name in trackers else "it is off",
        )
    if trackers:
        draft.fill("tracking.trackers", trackers, "metrics")
    if draft.get("metrics.log_freq") is not None:
        draft.set("metrics.log_freq", "tracking.log_every", draft.whole("metrics.log_freq"), "steps")
