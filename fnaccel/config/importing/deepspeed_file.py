"""DeepSpeed: its JSON file, and Accelerate's section `deepspeed_config` with and without such a file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fnaccel.config.importing.draft import DEFAULT, MICRO_BATCHES, Draft, Imported, Table, call, leaves_of
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
    """The recipe that trains with a DeepSpeed JSON file. The recipe names the file, and agrees with it.

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
    _read_keys(draft, path, "")
    draft.fill("strategy", call("deepspeed", config=path), "the file")
    return draft.finish(TOP)


def _read_keys(draft: Draft, path: str, prefix: str) -> None:
    """Write the rows of the file's keys, after a prefix, and set the fields that have to agree with it."""
    _precision(draft, prefix)
    _step(draft, prefix)
    _optimizer(draft, prefix)
    became = f"strategy: {call('deepspeed', config=path)}"
    for key in [key for key in draft.leaves if key.startswith(prefix)]:
        name = key[len(prefix) :]
        if draft.leaves[key] == "auto":
            draft.row(key, became, _AUTO.get(name, "auto: filled by the strategy, see docs/deepspeed.md"))
        elif name.split(".")[0] == "pipeline":
            draft.skip(
                "DeepSpeed builds pipelines in code. fa.pipeline() splits the blocks of any model", key
            )
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


SECTION = "deepspeed_config"
FILE = f"{SECTION}.deepspeed_config_file"
_FOLDER = f"{SECTION}.offload_optimizer_nvme_path"
_LAUNCHERS = {
    **dict.fromkeys(("openmpi", "mpich", "impi", "mvapich"), "mpirun"),
    "pdsh": "pdsh",
    "slurm": "slurm",
    "standard": None,
    "nossh": None,
}


def _stage(draft: Draft, key: str) -> int:
    stage = draft.whole(key)
    if stage not in (None, 0, 1, 2, 3):
        raise draft.wrong(key, "there is no such stage", "0, 1, 2 or 3")
    return 2 if stage is None else stage


def _device(draft: Draft, key: str) -> str | None:
    device, least = str(draft.get(key)).lower(), 3 if "param" in key else 1
    return device if device in ("cpu", "nvme") and draft.options["stage"] >= least else None


def _nvme_path(draft: Draft, _: str) -> str | None:
    if "nvme" not in draft.options.values():
        return None
    paths = (draft.text(_FOLDER), draft.text(f"{SECTION}.offload_param_nvme_path"))
    folders = set(paths) - {None, "none", "None"}
    if len(folders) != 1:
        raise draft.wrong(_FOLDER, "nvme needs one folder", f"{_FOLDER}: /mnt/nvme, the same for parameters")
    return folders.pop()


def _zero3_init(draft: Draft, key: str) -> bool | None:
    stage = draft.options["stage"]
    if draft.truth(key) and stage != 3:
        draft.skip(f"it has an effect with stage 3 only, and the stage is {stage}", key)
    return draft.flag(key) if stage == 3 else None


def _classes(draft: Draft, key: str) -> tuple[str, ...] | None:
    return tuple(draft.names(key)) or None if draft.options.get("stage") in (3, None) else None


def _given(draft: Draft, key: str) -> str | None:
    text = str(draft.get(key, ""))
    return None if text.lower() in ("", "none", "null") else text


_MOE: Table = {"deepspeed_moe_layer_cls_names": ("deepspeed.moe_layers", _classes, "gathered as one")}
_OPTIONS: Table = {
    "zero_stage": ("deepspeed.stage", _stage, "what DeepSpeed shards over ranks"),
    "offload_optimizer_device": ("deepspeed.offload_optimizer", _device, "slots are kept there"),
    "offload_param_device": ("deepspeed.offload_params", _device, "parameters are kept there"),
    "offload_optimizer_nvme_path": ("deepspeed.nvme_path", _nvme_path, "the folder on each machine"),
    "offload_param_nvme_path": ("deepspeed.nvme_path", _nvme_path, "the folder on each machine"),
    "zero3_init_flag": ("deepspeed.zero3_init", _zero3_init, "of stage 3"),
    **_MOE,
}
_HOSTS: Table = {
    "deepspeed_hostfile": ("launch.hosts.file", _given, "the machines of the job"),
    "deepspeed_inclusion_filter": ("launch.hosts.include", _given, "the machines of the job"),
    "deepspeed_exclusion_filter": ("launch.hosts.exclude", _given, "the machines of the job"),
}
_STEP = ("gradient_accumulation_steps", "gradient_clipping")
_UNSET = {
    **dict.fromkeys(_HOSTS, "there is one machine, or no host file"),
    **dict.fromkeys(_STEP, "left open: the default of the recipe holds"),
    "deepspeed_multinode_launcher": "without a host file the same command starts on each machine",
    "deepspeed_config_file": "no file is named: the other keys hold",
    "zero3_save_16bit_model": "fa.interchange.export_hf writes 16-bit weights of any stage",
}
_UNSET_WITHOUT_FILE = {
    "offload_optimizer_device": "nothing is offloaded",
    "offload_param_device": "nothing is offloaded: parameters need stage 3",
    "offload_optimizer_nvme_path": "nothing is offloaded to NVMe",
    "offload_param_nvme_path": "nothing is offloaded to NVMe",
    "zero3_init_flag": DEFAULT,
    "deepspeed_moe_layer_cls_names": "no class is named, or the stage is not 3",
}
KEYS = (*_OPTIONS, *_UNSET)


def read_section(draft: Draft, files: Mapping[str, Mapping[str, Any]]) -> str:
    """The text of the strategy `deepspeed`.

    Args:
        draft: the table.
        files: parsed DeepSpeed files by path.

    Raises:
        ConfigError: the file is missing, or contradicts the section.
    """
    _read_hosts(draft)
    path = _given(draft, FILE)
    if path is None:
        draft.read(_OPTIONS, SECTION)
    else:
        _read_file(draft, path, files)
    count, norm = (f"{SECTION}.{name}" for name in _STEP)
    draft.step(count, norm, MICRO_BATCHES)
    draft.reasons(_UNSET, SECTION)
    if path is None:
        draft.reasons(_UNSET_WITHOUT_FILE, SECTION)
    else:
        draft.skip(f"{path} holds it", *draft.below(SECTION))
    return call("deepspeed", **draft.options)


def _read_file(draft: Draft, path: str, files: Mapping[str, Mapping[str, Any]]) -> None:
    if path not in files:
        raise ConfigError(
            f"the DeepSpeed file {path} is needed, and was not given",
            where=f"{draft.tool}: {FILE}",
            fix="fnaccel config import FILE --deepspeed ds.json, or put the file beside FILE",
        )
    draft.set(FILE, "deepspeed.config", path, "the path is seen from the folder of the command")
    draft.leaves |= leaves_of(files[path], f"{path}: ")
    _read_keys(draft, path, f"{path}: ")
    _fill_auto(draft, path)
    stage = draft.options.get("stage", draft.get(f"{path}: zero_optimization.stage", 0))
    key = f"{SECTION}.zero3_init_flag"
    if draft.truth(key) and stage == 3:
        draft.set(key, "deepspeed.zero3_init", True, "each parameter is partitioned as it is made")
    draft.read(_MOE, SECTION)


_IN_BOTH = {
    "zero_stage": ("stage", "zero_optimization.stage", 0),
    "offload_optimizer_device": ("offload_optimizer", "zero_optimization.offload_optimizer.device", "none"),
    "offload_param_device": ("offload_params", "zero_optimization.offload_param.device", "none"),
}


def _fill_auto(draft: Draft, path: str) -> None:
    """Set the options that fill an "auto" of the file.

    Raises:
        ConfigError: the file and the section have different values.
    """
    for name, (option, other, default) in _IN_BOTH.items():
        key, written = f"{SECTION}.{name}", draft.get(f"{path}: {other}", default)
        value = draft.get(key)
        if value is not None and written == "auto":
            why = f'it fills the "auto" of {path}'
            if str(value).lower() != "none":
                draft.set(key, f"deepspeed.{option}", value, why)
            draft.row(key, f"strategy: deepspeed({option}={value!r})", why)
        elif value is not None and str(value) != str(written):
            fix = f"remove {key}, or make both equal: DeepSpeed takes one"
            raise draft.wrong(key, f"the file of {FILE} says {written!r}", fix)


def _read_hosts(draft: Draft) -> None:
    if draft.fields["launch.machines"] > 1 and _given(draft, f"{SECTION}.deepspeed_hostfile"):
        draft.read(_HOSTS, SECTION)
        key = f"{SECTION}.deepspeed_multinode_launcher"
        carrier = draft.choice(key, _LAUNCHERS, "pdsh")
        if carrier is not None:
            draft.set(key, "launch.carrier", carrier, f"needs {carrier} on this machine")
