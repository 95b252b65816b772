"""A configuration file of Accelerate, of any kind. Sections have files of their own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fnaccel.config.importing import deepspeed_file, machines, precision, strategies
from fnaccel.config.importing.draft import DEFAULT, MICRO_BATCHES, Draft, Imported, call, leaves_of

_DEVICES = {
    "MULTI_GPU": "a process for each GPU",
    "MULTI_CPU": "processes on CPUs",
    "MULTI_XPU": "needs a torch with XPUs",
    "MULTI_NPU": "needs torch_npu",
    "MULTI_MLU": "needs torch_mlu",
    "MULTI_MUSA": "needs torch_musa",
    "MULTI_SDAA": "needs torch_sdaa",
    "MULTI_HPU": "needs habana_frameworks",
    "MULTI_NEURON": "needs torch_neuronx",
}
_OWNERS = {
    strategies.FSDP: "FSDP",
    deepspeed_file.SECTION: "DEEPSPEED",
    strategies.MEGATRON: "MEGATRON_LM",
}
_KINDS = ("NO", *_DEVICES, *_OWNERS.values(), "TPU", "XLA", "TP")
_DEVICE = "fa.start takes the device of this machine"
_NO_IPEX = "IPEX has ended: its features went into PyTorch"
_IPEX = {"ipex": _NO_IPEX, "use_xpu": _NO_IPEX}
_GENERAL = {
    "main_training_function": "the script runs as a whole: no function of it is looked up",
    "use_mps_device": _DEVICE,
    "use_xpu": _DEVICE,
    "ipex": _NO_IPEX,
}
_STEP = ("gradient_accumulation_steps", "gradient_clipping")
_TP = "tp_config.tp_size"
_TOP = (
    *("compute_environment", "distributed_type", "mixed_precision", "dynamo_backend", _TP, *_STEP, *_GENERAL),
    *(*machines.KEYS, *machines.TPU_KEYS, *machines.SAGEMAKER),
)
_SECTIONS: Mapping[str, Iterable[str]] = {
    strategies.FSDP: strategies.FSDP_KEYS,
    deepspeed_file.SECTION: deepspeed_file.KEYS,
    strategies.PARALLELISM: [f"{strategies.PREFIX}{name}" for name in strategies.PARALLELISM_KEYS],
    strategies.MEGATRON: strategies.MEGATRON_KEYS,
    precision.FP8: precision.FP8_KEYS,
    precision.DYNAMO: [f"dynamo_{name}" for name in precision.DYNAMO_KEYS],
    machines.MPI: machines.MPI_KEYS,
    "ipex_config": _IPEX,
    machines.ARGUMENTS: machines.ESTIMATOR,
}
KEYS = {*_TOP, *_SECTIONS, *(f"{section}.{name}" for section, names in _SECTIONS.items() for name in names)}
"""Dotted keys of Accelerate's files, for the nearest name."""
TOP = {key.split(".")[0] for key in KEYS}


def read(document: Mapping[str, Any], files: Mapping[str, Mapping[str, Any]]) -> Imported:
    """The recipe of an Accelerate file.

    Args:
        document: the parsed file.
        files: parsed DeepSpeed files, by their path in the document.

    Raises:
        ConfigError: values contradict each other, can't be read, or lack a file.

    Example:
        >>> read({"distributed_type": "FSDP", "num_processes": 4}, {}).recipe.strategy
        'fsdp'
    """
    draft = Draft(leaves_of(document), "Accelerate")
    precision.read(draft)
    draft.reasons(_GENERAL)
    draft.reasons(_IPEX, "ipex_config")
    count, norm = _STEP
    if draft.get(count) is not None:
        draft.set(count, "accumulate", draft.whole(count), MICRO_BATCHES)
    if draft.get(norm) is not None:
        draft.set(norm, "clip_norm", draft.number(norm) or None, "the norm over all ranks")
    draft.skip(DEFAULT, *_STEP)
    remote = {"ec2_instance_type", "iam_role_name", machines.ARGUMENTS} & set(document)
    if str(draft.get("compute_environment")) == "AMAZON_SAGEMAKER" or remote:
        strategy = machines.read_sagemaker(draft)
    else:
        strategy = _on_machines(draft, files)
    draft.row("compute_environment", "launch", f"{draft.get('compute_environment')}: where the ranks run")
    draft.fill("strategy", strategy, "distributed_type")
    for section in _SECTIONS:
        if draft.leaves.get(section) in (None, {}, ""):
            draft.skip("the section is empty", section)
    return draft.finish(KEYS)


def _on_machines(draft: Draft, files: Mapping[str, Mapping[str, Any]]) -> str:
    kind = _kind(draft)
    if kind in ("TPU", "XLA"):
        draft.fill("launch.tpu", True, "distributed_type")
        draft.skip("one process drives all chips of a TPU VM", "num_processes")
    machines.read(draft, cpu=kind == "MULTI_CPU")
    total = draft.fields.get("launch.ranks", 0) * draft.fields["launch.machines"]
    if kind == "NO" and total > 1:
        what = f"this is one process, and num_processes is {total}"
        raise draft.wrong("distributed_type", what, "MULTI_GPU or MULTI_CPU, or num_processes: 1")
    strategy = _strategy(draft, kind, files)
    if kind not in ("TPU", "XLA"):
        strategy = strategies.read_parallelism(draft, kind, total or None) or strategy
    name = strategy.split("(")[0] if len(strategy) > 30 else strategy
    why = _DEVICES.get(kind, "the axes and options follow from the other keys")
    draft.row("distributed_type", f"strategy: {name}", why)
    for section, owner in _OWNERS.items():
        if kind != owner:
            why = f"distributed_type is {kind}, so Accelerate does not read the section of {owner}"
            draft.skip(why, *draft.below(section))
    return strategy


def _kind(draft: Draft) -> str:
    filled = [owner for section, owner in _OWNERS.items() if draft.below(section)]
    several = (draft.whole("num_processes") or 1) != 1
    # a part of a file, as guides show it
    default = filled[0] if filled else "MULTI_GPU" if several else "NO"
    return draft.choice("distributed_type", {name: name for name in _KINDS}, default)


def _strategy(draft: Draft, kind: str, files: Mapping[str, Mapping[str, Any]]) -> str:
    if kind == "FSDP":
        return strategies.read_fsdp(draft)
    if kind == "DEEPSPEED":
        return deepspeed_file.read_section(draft, files)
    if kind == "MEGATRON_LM":
        return strategies.read_megatron(draft)
    if kind == "TP":
        strategy = call("tensor", draft.whole(_TP) or 1)
        draft.row(_TP, f"strategy: {strategy}", "needs a model with a plan of its layers")
        return strategy
    return {"NO": "local", "TPU": "xla", "XLA": "xla"}.get(kind, "ddp")
