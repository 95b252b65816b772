"""The section `fsdp_config` of Accelerate, in both generations of its keys, as the options of `fa.fsdp`."""

from __future__ import annotations

from typing import Any

from fnaccel.config.importing.draft import Draft
from fnaccel.config.importing.texts import sharded

SECTION = "fsdp_config"
_STRATEGY = f"{SECTION}.fsdp_sharding_strategy"
_RESHARD = f"{SECTION}.fsdp_reshard_after_forward"
_WRAP = f"{SECTION}.fsdp_auto_wrap_policy"
_CLASSES = f"{SECTION}.fsdp_transformer_layer_cls_to_wrap"
_SIZE = f"{SECTION}.fsdp_min_num_params"
_SYNC = f"{SECTION}.fsdp_sync_module_states"
_LOADING = f"{SECTION}.fsdp_cpu_ram_efficient_loading"
_NAMES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
# FSDP1 numbers its strategies from 1
_STRATEGIES = {**{name: name for name in _NAMES}, **{str(n): name for n, name in enumerate(_NAMES, 1)}}
_POLICIES = {"TRANSFORMER_BASED_WRAP": "classes", "SIZE_BASED_WRAP": "size", "NO_WRAP": "none"}
_UNUSED = {
    "fsdp_version": "fa.fsdp is FSDP2. It trains to the same values as FSDP1",
    "fsdp_state_dict_type": "each rank saves its shards, and any number of ranks restores them. "
    "fa.interchange.export_hf writes one whole file",
    "fsdp_use_orig_params": "FSDP2 always keeps the parameters of the model",
    "fsdp_limit_all_gathers": "FSDP2 always limits them",
    "fsdp_ignored_modules": "needs patterns of parameter names: strategy: fsdp(ignore=('head*',))",
    "fsdp_backward_prefetch_policy": "FSDP2 always gathers one unit ahead in backward",
    "fsdp_backward_prefetch": "FSDP2 always gathers one unit ahead in backward",
    "fsdp_activation_checkpointing_offload": "activations stay on the device",
}
KEYS = [
    f"{SECTION}.{name}"
    for name in (
        *_UNUSED, "fsdp_sharding_strategy", "fsdp_reshard_after_forward", "fsdp_auto_wrap_policy",
        "fsdp_transformer_layer_cls_to_wrap", "fsdp_min_num_params", "fsdp_offload_params",
        "fsdp_forward_prefetch",
        "fsdp_sync_module_states", "fsdp_cpu_ram_efficient_loading", "fsdp_activation_checkpointing",
    )
]  # fmt: skip


def read(draft: Draft) -> tuple[dict[str, Any], str]:
    """The options of `fa.fsdp`, and the name of FSDP1's sharding strategy.

    Raises:
        ConfigError: two keys contradict each other, or a name does not exist.
    """
    name = _sharding(draft)
    options: dict[str, Any] = {}
    if name in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2"):
        options["reshard_after_forward"] = False
    options |= _units(draft)
    options |= _flag(draft, "fsdp_offload_params", "offload", True, "parameters and slots stay on the CPU")
    options |= _flag(draft, "fsdp_forward_prefetch", "forward_prefetch", 1, "one unit is gathered ahead")
    options |= _loading(draft)
    remat = f"{SECTION}.fsdp_activation_checkpointing"
    if draft.has(remat):
        draft.set(remat, "remat", draft.truth(remat), "blocks are recomputed in backward, or not")
    if draft.truth(f"{remat}_offload"):
        raise draft.wrong(f"{remat}_offload", "not built yet", "torch.autograd.graph.save_on_cpu in the loss")
    for key, why in _UNUSED.items():
        draft.skip(f"{SECTION}.{key}", why)
    return options, name


def text(options: dict[str, Any], name: str, machines: int) -> str:
    """The text of the strategy, without degrees of `parallelism_config`.

    Args:
        options: of `fa.fsdp`.
        name: of FSDP1's sharding strategy.
        machines: FSDP1's hybrid strategies shard within a machine.
    """
    if name == "NO_SHARD":
        return "ddp"
    return sharded(options, copies=machines if name.startswith("HYBRID") else None)


def _sharding(draft: Draft) -> str:
    name = draft.choice(_STRATEGY, _STRATEGIES, "FULL_SHARD")
    draft.row(_STRATEGY, _shown(name), "the same sharding under FSDP2")
    if not draft.has(_RESHARD):
        return name
    value = draft.get(_RESHARD, True)
    if str(value).upper() in _STRATEGIES:  # Accelerate also writes the name of a strategy here
        chosen = _STRATEGIES[str(value).upper()]
    else:
        chosen = "FULL_SHARD" if draft.truth(_RESHARD, default=True) else "SHARD_GRAD_OP"
        if name.startswith("HYBRID"):
            chosen = "HYBRID_SHARD" if chosen == "FULL_SHARD" else "HYBRID_SHARD_ZERO2"
    # a file for FSDP2 may keep FSDP1's key, which Accelerate then does not read
    if draft.get(_STRATEGY) is not None and chosen != name:
        raise draft.wrong(
            _RESHARD, f"fsdp_sharding_strategy is {name}, which contradicts it", f"remove {_STRATEGY}"
        )
    draft.row(_RESHARD, _shown(chosen), "whether parameters are freed after forward")
    return chosen


def _shown(name: str) -> str:
    shape = "ddp" if name == "NO_SHARD" else "hsdp" if name.startswith("HYBRID") else "fsdp"
    late = name in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2")
    return f"strategy: {shape}(reshard_after_forward=False)" if late else f"strategy: {shape}"


def _units(draft: Draft) -> dict[str, Any]:
    policy = draft.choice(_WRAP, _POLICIES, "TRANSFORMER_BASED_WRAP")
    names = draft.names(_CLASSES)
    size = draft.whole(_SIZE)
    unused = f"fsdp_auto_wrap_policy is {draft.get(_WRAP, 'absent')}, so Accelerate does not read it"
    draft.skip(_SIZE, unused)
    draft.skip(_CLASSES, unused)
    if policy == "none":
        draft.row(_WRAP, "strategy: fsdp(units=None)", "all parameters are gathered together")
        return {"units": None}
    if policy == "size":
        if not size:
            raise draft.wrong(_WRAP, "the size is missing", "give fsdp_min_num_params")
        draft.row(_WRAP, f"strategy: fsdp(units={size})", "modules of at least so many parameters")
        draft.row(_SIZE, f"strategy: fsdp(units={size})", "modules of at least so many parameters")
        return {"units": size}
    if not names:
        why = "the repeated layers of the model. units='no_split' takes the classes that the model names"
        draft.row(_WRAP, "strategy: fsdp", why)
        draft.skip(_CLASSES, "no class is named: the repeated layers of the model are taken")
        return {}
    draft.row(_WRAP, f"strategy: fsdp(units={tuple(names)!r})", "the classes are gathered one by one")
    draft.row(_CLASSES, f"strategy: fsdp(units={tuple(names)!r})", "needs a model with these classes")
    return {"units": tuple(names)}


def _flag(draft: Draft, name: str, option: str, value: object, why: str) -> dict[str, Any]:
    key = f"{SECTION}.{name}"
    if draft.truth(key):
        draft.row(key, f"strategy: fsdp({option}={value!r})", why)
        return {option: value}
    draft.skip(key, "it is the default")
    return {}


def _loading(draft: Draft) -> dict[str, Any]:
    if draft.truth(_LOADING):
        if not draft.truth(_SYNC, default=True):
            raise draft.wrong(
                _SYNC, "fsdp_cpu_ram_efficient_loading is true, which needs it", f"write {_SYNC}: true"
            )
        why = "rank 0 builds the model, and sends the parts. Needs a factory for the model"
        draft.row(_LOADING, "strategy: fsdp(init='rank0')", why)
        draft.row(_SYNC, "strategy: fsdp(init='rank0')", "rank 0 sends the values")
        return {"init": "rank0"}
    draft.skip(_LOADING, "it is the default: each rank builds the model from the seed")
    draft.skip(_SYNC, "all ranks build the same values from the seed")
    return {}
