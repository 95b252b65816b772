"""The section `deepspeed_config` of Accelerate, with and without a DeepSpeed JSON file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fnaccel.config.importing import deepspeed_file
from fnaccel.config.importing.draft import Draft, leaves_of
from fnaccel.config.importing.texts import call
from fnaccel.errors import ConfigError

SECTION = "deepspeed_config"
FILE = f"{SECTION}.deepspeed_config_file"
_ONLY_STAGE_3 = {
    "offload_param_device": "offload_params",
    "zero3_init_flag": "zero3_init",
}
_SAVE = f"{SECTION}.zero3_save_16bit_model"
_LAUNCHERS = {
    "pdsh": "pdsh", "openmpi": "mpirun", "mpich": "mpirun", "impi": "mpirun", "mvapich": "mpirun",
    "slurm": "slurm",
    "standard": None, "nossh": None,
}  # fmt: skip
KEYS = [
    f"{SECTION}.{name}"
    for name in (
        "zero_stage", "gradient_accumulation_steps", "gradient_clipping", "offload_optimizer_device",
        "offload_optimizer_nvme_path", "offload_param_nvme_path", "deepspeed_config_file",
        "deepspeed_hostfile",
        "deepspeed_multinode_launcher", "deepspeed_inclusion_filter", "deepspeed_exclusion_filter",
        "deepspeed_moe_layer_cls_names", "zero3_save_16bit_model", *_ONLY_STAGE_3,
    )
]  # fmt: skip


def read(draft: Draft, files: Mapping[str, Mapping[str, Any]], machines: int) -> str:
    """The text of the strategy `deepspeed`.

    Args:
        draft: the table.
        files: parsed DeepSpeed files by path.
        machines: hosts have a meaning for several only.

    Raises:
        ConfigError: the file is missing, or contradicts the section.
    """
    _hosts(draft, machines)
    draft.skip(_SAVE, "fa.interchange.export_hf writes 16-bit weights of any stage")
    path = draft.get(FILE)
    if path is not None and str(path).lower() != "none":
        return _with_file(draft, str(path), files)
    draft.skip(FILE, "no file is named: the other keys hold")
    _step(draft)
    key = f"{SECTION}.zero_stage"
    stage = draft.whole(key, 2)
    if stage not in (0, 1, 2, 3):
        raise draft.wrong(key, "there is no such stage", "0, 1, 2 or 3")
    draft.row(key, f"strategy: {call('deepspeed', stage=stage)}", "what DeepSpeed shards over ranks")
    options = _offload(draft, stage) | _stage_3(draft, stage)
    return call("deepspeed", stage=stage, **options)


def _with_file(draft: Draft, path: str, files: Mapping[str, Mapping[str, Any]]) -> str:
    if path not in files:
        raise ConfigError(
            f"the DeepSpeed file {path} is needed, and was not given",
            where=f"{draft.tool}: {FILE}",
            fix="fnaccel config import FILE --deepspeed ds.json, or put the file beside FILE",
        )
    document = files[path]
    draft.row(
        FILE, f"strategy: {call('deepspeed', config=path)}", "the path is seen from the folder of the command"
    )
    leaves = leaves_of(document, f"{path}: ")
    draft.leaves |= leaves
    deepspeed_file.read_into(draft, path, f"{path}: ")
    options = _filled(draft, path)
    stage = options.get("stage", draft.get(f"{path}: zero_optimization.stage", 0))
    key = f"{SECTION}.zero3_init_flag"
    if draft.truth(key) and stage == 3:
        options["zero3_init"] = True
        draft.row(key, "strategy: deepspeed(zero3_init=True)", "each parameter is partitioned as it is made")
    _step(draft)
    _moe(draft, options)
    draft.skip_all(draft.below(SECTION), f"{path} holds it")
    return call("deepspeed", config=path, **options)


_IN_BOTH = {
    "zero_stage": ("stage", "zero_optimization.stage", 0),
    "offload_optimizer_device": ("offload_optimizer", "zero_optimization.offload_optimizer.device", "none"),
    "offload_param_device": ("offload_params", "zero_optimization.offload_param.device", "none"),
}


def _filled(draft: Draft, path: str) -> dict[str, Any]:
    """The options that fill an "auto" of the file.

    Raises:
        ConfigError: the file and the section have different values.
    """
    options: dict[str, Any] = {}
    for name, (option, other, default) in _IN_BOTH.items():
        key, written = f"{SECTION}.{name}", draft.get(f"{path}: {other}", default)
        value = draft.get(key)
        if value is None:
            continue
        if written == "auto":
            if str(value).lower() != "none":
                options[option] = value
            draft.row(key, f"strategy: deepspeed({option}={value!r})", f'it fills the "auto" of {path}')
        elif str(value) != str(written):
            fix = f"remove {key}, or make both equal: DeepSpeed takes one"
            raise draft.wrong(key, f"the file of {FILE} says {written!r}", fix)
    return options


def _step(draft: Draft) -> None:
    count, norm = f"{SECTION}.gradient_accumulation_steps", f"{SECTION}.gradient_clipping"
    if str(draft.get(count, "auto")) != "auto":
        why = "each batch is cut into so many micro-batches. Accelerate took so many batches: data.window"
        draft.set(count, "accumulate", draft.whole(count), why)
    if str(draft.get(norm, "auto")).lower() not in ("auto", "none"):
        draft.set(norm, "clip_norm", draft.number(norm) or None, "the norm over all ranks. 0: no bound")
    draft.skip_all((count, norm), "left open: the default of the recipe holds")


def _offload(draft: Draft, stage: int) -> dict[str, Any]:
    options: dict[str, Any] = {}
    key = f"{SECTION}.offload_optimizer_device"
    device = str(draft.get(key, "none")).lower()
    paths = [f"{SECTION}.offload_{part}_nvme_path" for part in ("optimizer", "param")]
    if device in ("cpu", "nvme") and stage > 0:
        options["offload_optimizer"] = device
        draft.row(key, f"strategy: deepspeed(offload_optimizer={device!r})", "slots are kept there")
    draft.skip_all([key], "nothing is offloaded")
    key = f"{SECTION}.offload_param_device"
    device = str(draft.get(key, "none")).lower()
    if device in ("cpu", "nvme") and stage == 3:
        options["offload_params"] = device
        draft.row(key, f"strategy: deepspeed(offload_params={device!r})", "parameters are kept there")
    draft.skip_all([key], "nothing is offloaded: parameters need stage 3")
    folders = {str(draft.get(path)) for path in paths if draft.get(path) is not None} - {"none", "None"}
    if "nvme" in options.values():
        if len(folders) != 1:
            raise draft.wrong(
                paths[0], "nvme needs one folder", f"{paths[0]}: /mnt/nvme, the same for parameters"
            )
        options["nvme_path"] = folders.pop()
        for path in paths:
            draft.row(
                path, f"strategy: deepspeed(nvme_path={options['nvme_path']!r})", "the folder on each machine"
            )
    draft.skip_all(paths, "nothing is offloaded to NVMe")
    return options


def _stage_3(draft: Draft, stage: int) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for name, option in _ONLY_STAGE_3.items():
        key = f"{SECTION}.{name}"
        if name != "offload_param_device" and draft.truth(key):
            if stage == 3:
                options[option] = True
                draft.row(key, f"strategy: deepspeed({option}=True)", "of stage 3")
            draft.skip_all([key], f"it has an effect with stage 3 only, and the stage is {stage}")
        draft.skip_all([key], "it is the default")
    if stage == 3:
        _moe(draft, options)
    draft.skip(
        f"{SECTION}.deepspeed_moe_layer_cls_names", "no class is named, or the stage is not 3"
    ) if not options.get("moe_layers") else None
    return options


def _moe(draft: Draft, options: dict[str, Any]) -> None:
    key = f"{SECTION}.deepspeed_moe_layer_cls_names"
    classes = draft.names(key)
    if classes:
        options["moe_layers"] = tuple(classes)
        draft.row(key, f"strategy: deepspeed(moe_layers={tuple(classes)!r})", "gathered as one")


def _hosts(draft: Draft, machines: int) -> None:
    keys = [f"{SECTION}.deepspeed_{name}" for name in ("hostfile", "inclusion_filter", "exclusion_filter")]
    launcher = f"{SECTION}.deepspeed_multinode_launcher"
    filled = [key for key in keys if str(draft.get(key, "")).lower() not in ("", "none", "null")]
    if machines > 1 and keys[0] in filled:
        for key, field in zip(keys, ("file", "include", "exclude"), strict=True):
            if key in filled:
                draft.set(key, f"launch.hosts.{field}", str(draft.get(key)), "the machines of the job")
        carrier = draft.choice(launcher, _LAUNCHERS, "pdsh")
        if carrier is not None:
            draft.set(launcher, "launch.carrier", carrier, f"needs {carrier} on this machine")
            draft.fill("launch.carrier", carrier, keys[0])
    draft.skip_all(keys, "there is one machine, or no host file")
    draft.skip_all([launcher], "without a host file the same command starts on each machine")
