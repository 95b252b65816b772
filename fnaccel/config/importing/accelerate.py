"""A configuration file of Accelerate, of any kind. Sections have files of their own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fnaccel.config.importing import (
    deepspeed_section,
    fsdp,
    machines,
    parallelism,
    precision,
    sagemaker,
)
from fnaccel.config.importing.draft import Draft, Imported, leaves_of

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
_KINDS = ("NO", *_DEVICES, "FSDP", "DEEPSPEED", "MEGATRON_LM", "TPU", "XLA", "TP")
_GENERAL = {
    "main_training_function": "the script runs as a whole: no function of it is looked up",
    "use_mps_device": "fa.start takes the device of this machine",
    "use_xpu": "fa.start takes the device of this machine",
    "ipex": "IPEX has ended: its features went into PyTorch",
}
_IPEX = "ipex_config"
_TP = "tp_config.tp_size"
IPEX_KEYS = (f"{_IPEX}.ipex", f"{_IPEX}.use_xpu")
_SECTIONS: Mapping[str, Iterable[str]] = {
    fsdp.SECTION: fsdp.KEYS,
    deepspeed_section.SECTION: deepspeed_section.KEYS,
    parallelism.SECTION: parallelism.KEYS,
    parallelism.MEGATRON: parallelism.MEGATRON_KEYS,
    precision.SECTION: precision.KEYS,
    precision.DYNAMO: precision.KEYS,
    machines.MPI: machines.KEYS,
    _IPEX: IPEX_KEYS,
    sagemaker.ARGUMENTS: sagemaker.KEYS,
}
KEYS = {
    *("compute_environment", "distributed_type", "mixed_precision", "dynamo_backend"),
    *("gradient_accumulation_steps", "gradient_clipping", _TP),
    *_GENERAL, *machines.KEYS, *machines.TPU_KEYS, *sagemaker.KEYS, *_SECTIONS,
    *(key for keys in _SECTIONS.values() for key in keys),
}  # fmt: skip
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
    _general(draft)
    remote = {"ec2_instance_type", "iam_role_name", sagemaker.ARGUMENTS} & set(document)
    if str(draft.get("compute_environment")) == "AMAZON_SAGEMAKER" or remote:
        strategy = _on_sagemaker(draft)
    else:
        strategy = _on_machines(draft, files)
    draft.fill("strategy", strategy, "distributed_type")
    for section in _SECTIONS:
        empty = draft.leaves.get(section) in (None, {}, "")
        if section in draft.leaves and empty:
            draft.skip(section, "the section is empty")
    return draft.finish(KEYS)


def _general(draft: Draft) -> None:
    for key, why in _GENERAL.items():
        draft.skip(key, why)
    for key in IPEX_KEYS:
        draft.skip(key, _GENERAL["ipex"])
    draft.row("compute_environment", "launch", f"{draft.get('compute_environment')}: where the ranks run")
    if draft.get("gradient_accumulation_steps") is not None:
        why = "each batch is cut into so many micro-batches. Accelerate took so many batches: data.window"
        draft.set(
            "gradient_accumulation_steps", "accumulate", draft.whole("gradient_accumulation_steps"), why
        )
    if draft.get("gradient_clipping") is not None:
        draft.set(
            "gradient_clipping",
            "clip_norm",
            draft.number("gradient_clipping") or None,
            "the norm over all ranks",
        )
    draft.skip_all(("gradient_accumulation_steps", "gradient_clipping"), "it is the default")


def _on_sagemaker(draft: Draft) -> str:
    strategy = sagemaker.read(draft)
    draft.row(
        "compute_environment",
        "launch.carrier: sagemaker",
        "needs an account, a role and the SDK of SageMaker",
    )
    draft.skip_all(("use_cpu", "debug"), "the instances decide it")
    draft.skip_all([key for key in draft.leaves if key in machines.KEYS], "SageMaker starts the ranks")
    return strategy


def _on_machines(draft: Draft, files: Mapping[str, Mapping[str, Any]]) -> str:
    kind = _kind(draft)
    hosted = any(
        draft.get(f"{deepspeed_section.SECTION}.{name}") is not None for name in ("deepspeed_hostfile",)
    ) or bool(draft.get("tpu_name"))
    if kind in ("TPU", "XLA"):
        draft.fill("launch.tpu", True, "distributed_type")
        draft.skip("num_processes", "one process drives all chips of a TPU VM")
        draft.leaves, leaves = {k: v for k, v in draft.leaves.items() if k != "num_processes"}, draft.leaves
        size = machines.read(draft, cpu=False, hosts=hosted)
        draft.leaves = leaves
    else:
        size = machines.read(draft, cpu=kind == "MULTI_CPU", hosts=hosted)
    if kind == "NO" and (size.total or 1) > 1:
        raise draft.wrong(
            "distributed_type",
            f"this is one process, and num_processes is {size.total}",
            "MULTI_GPU or MULTI_CPU, or num_processes: 1",
        )
    machines.read_tpu(draft)
    strategy = _strategy(draft, kind, size, files)
    name = strategy.split("(")[0] if len(strategy) > 30 else strategy
    draft.row(
        "distributed_type",
        f"strategy: {name}",
        _DEVICES.get(kind, "the axes and options follow from the other keys"),
    )
    for section, owner in _OWNERS.items():
        why = f"distributed_type is {kind}, so Accelerate does not read the section of {owner}"
        draft.skip_all(draft.below(section), why) if kind != owner else None
    return strategy


_OWNERS = {fsdp.SECTION: "FSDP", deepspeed_section.SECTION: "DEEPSPEED", parallelism.MEGATRON: "MEGATRON_LM"}


def _kind(draft: Draft) -> str:
    sections = {
        fsdp.SECTION: "FSDP",
        deepspeed_section.SECTION: "DEEPSPEED",
        parallelism.MEGATRON: "MEGATRON_LM",
    }
    filled = [name for section, name in sections.items() if draft.below(section)]
    count = draft.whole("num_processes", 1) or 1
    # a part of a file, as guides show it
    default = filled[0] if filled else "NO" if count == 1 else "MULTI_GPU"
    kind: str = draft.choice("distributed_type", {name: name for name in _KINDS}, default)
    return kind


def _strategy(
    draft: Draft, kind: str, size: machines.Machines, files: Mapping[str, Mapping[str, Any]]
) -> str:
    options: dict[str, Any] | None = None
    plain = "local" if kind == "NO" else "ddp"
    if kind == "FSDP":
        options, name = fsdp.read(draft)
        plain = fsdp.text(options, name, size.count)
    elif kind == "DEEPSPEED":
        plain = deepspeed_section.read(draft, files, size.count)
    elif kind == "MEGATRON_LM":
        plain = parallelism.read_megatron(draft)
    elif kind == "TP":
        degree = draft.whole(_TP, 1) or 1
        draft.row(_TP, f"strategy: tensor({degree})", "needs a model with a plan of its layers")
        plain = f"tensor({degree})"
    elif kind in ("TPU", "XLA"):
        return "xla"
    product = parallelism.read(draft, options, size.total)
    if kind in ("DEEPSPEED", "MEGATRON_LM") and product is not None:
        for key in parallelism.KEYS:
            draft.skip(key, f"{kind} is no axis of a product. Needs fsdp instead: strategy: {product}")
        return plain
    return product or plain
