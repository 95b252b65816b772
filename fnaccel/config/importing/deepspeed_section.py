"""The section `deepspeed_config` of Accelerate, with and without a DeepSpeed JSON file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fnaccel.config.importing import deepspeed_file
from fnaccel.config.importing.draft import DEFAULT, MICRO_BATCHES, Draft, Table, call, leaves_of
from fnaccel.errors import ConfigError

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


def read(draft: Draft, files: Mapping[str, Mapping[str, Any]]) -> str:
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
    deepspeed_file.read_into(draft, path, f"{path}: ")
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
