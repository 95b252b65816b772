"""`fsdp_config`, `parallelism_config` and `megatron_lm_config` of Accelerate as the text of a strategy."""

from __future__ import annotations

import math
from typing import Any

from fnaccel.config.importing.draft import DEFAULT, Draft, Table, call
from fnaccel.errors import ConfigError

FSDP = "fsdp_config"
PARALLELISM = "parallelism_config"
MEGATRON = "megatron_lm_config"
PREFIX = "parallelism_config_"
_STRATEGY = f"{FSDP}.fsdp_sharding_strategy"
_RESHARD = f"{FSDP}.fsdp_reshard_after_forward"
_WRAP = f"{FSDP}.fsdp_auto_wrap_policy"
_CLASSES = f"{FSDP}.fsdp_transformer_layer_cls_to_wrap"
_SIZE = f"{FSDP}.fsdp_min_num_params"
_SYNC = f"{FSDP}.fsdp_sync_module_states"
_LOADING = f"{FSDP}.fsdp_cpu_ram_efficient_loading"
_REMAT = f"{FSDP}.fsdp_activation_checkpointing"
_OFFLOAD = f"{_REMAT}_offload"
_SHAPES = {
    "FULL_SHARD": "fsdp",
    "SHARD_GRAD_OP": "fsdp(reshard_after_forward=False)",
    "NO_SHARD": "ddp",
    "HYBRID_SHARD": "hsdp",
    "HYBRID_SHARD_ZERO2": "hsdp(reshard_after_forward=False)",
}
# FSDP1 numbers its strategies from 1
_STRATEGIES = {**{name: name for name in _SHAPES}, **{str(n): name for n, name in enumerate(_SHAPES, 1)}}
_POLICIES = {"TRANSFORMER_BASED_WRAP": "classes", "SIZE_BASED_WRAP": "size", "NO_WRAP": "none"}
_OPTIONS: Table = {
    "fsdp_offload_params": ("fsdp.offload", Draft.flag, "parameters and slots stay on the CPU"),
    "fsdp_forward_prefetch": ("fsdp.forward_prefetch", Draft.one, "one unit is gathered ahead"),
    "fsdp_activation_checkpointing": ("remat", Draft.truth, "blocks are recomputed in backward, or not"),
}
_UNSET = {
    **dict.fromkeys(_OPTIONS, DEFAULT),
    "fsdp_cpu_ram_efficient_loading": "it is the default: each rank builds the model from the seed",
    "fsdp_sync_module_states": "all ranks build the same values from the seed",
    "fsdp_activation_checkpointing_offload": "activations stay on the device",
    "fsdp_version": "fa.fsdp is FSDP2. It trains to the same values as FSDP1",
    "fsdp_state_dict_type": "each rank saves its shards, and any number of ranks restores them. "
    "fa.interchange.export_hf writes one whole file",
    "fsdp_use_orig_params": "FSDP2 always keeps the parameters of the model",
    "fsdp_limit_all_gathers": "FSDP2 always limits them",
    "fsdp_ignored_modules": "needs patterns of parameter names: strategy: fsdp(ignore=('head*',))",
    "fsdp_backward_prefetch_policy": "FSDP2 always gathers one unit ahead in backward",
    "fsdp_backward_prefetch": "FSDP2 always gathers one unit ahead in backward",
}
FSDP_KEYS = (
    *("fsdp_sharding_strategy", "fsdp_reshard_after_forward", "fsdp_auto_wrap_policy"),
    *("fsdp_transformer_layer_cls_to_wrap", "fsdp_min_num_params", *_UNSET),
)


def read_fsdp(draft: Draft) -> str:
    """Set the options of `fa.fsdp`, from both generations of keys, and return the strategy without degrees.

    Raises:
        ConfigError: two keys contradict each other, or a name does not exist.
    """
    name = _sharding(draft)
    if "reshard" in _SHAPES[name]:
        draft.options["reshard_after_forward"] = False
    _read_units(draft)
    draft.read(_OPTIONS, FSDP)
    if draft.truth(_LOADING):
        if draft.truth(_SYNC) is False:
            what = "fsdp_cpu_ram_efficient_loading is true, which needs it"
            raise draft.wrong(_SYNC, what, f"write {_SYNC}: true")
        why = "rank 0 builds the model, and sends the parts. Needs a factory for the model"
        draft.set(_LOADING, "fsdp.init", "rank0", why)
        draft.set(_SYNC, "fsdp.init", "rank0", "rank 0 sends the values")
    if draft.truth(_OFFLOAD):
        if not draft.truth(_REMAT):
            raise draft.wrong(_OFFLOAD, "only blocks that are recomputed can", f"write {_REMAT}: true")
        draft.fields["remat"] = "offload"
        draft.row(_OFFLOAD, "remat: offload", "the inputs of blocks wait in host memory")
    draft.reasons(_UNSET, FSDP)
    if name == "NO_SHARD":
        return "ddp"
    if name.startswith("HYBRID"):  # FSDP1 shards within a machine
        return call("hsdp", draft.fields["launch.machines"], -1, **draft.options)
    return call("fsdp", **draft.options)


def _sharding(draft: Draft) -> str:
    name = draft.choice(_STRATEGY, _STRATEGIES, "FULL_SHARD")
    draft.row(_STRATEGY, f"strategy: {_SHAPES[name]}", "the same sharding under FSDP2")
    if _RESHARD not in draft.leaves:
        return name
    value = str(draft.get(_RESHARD)).upper()
    if value in _STRATEGIES:  # Accelerate also writes the name of a strategy here
        chosen = _STRATEGIES[value]
    else:
        late = draft.truth(_RESHARD) is False
        if name.startswith("HYBRID"):
            chosen = "HYBRID_SHARD_ZERO2" if late else "HYBRID_SHARD"
        else:
            chosen = "SHARD_GRAD_OP" if late else "FULL_SHARD"
    # a file for FSDP2 may keep FSDP1's key, which Accelerate then does not read
    if draft.get(_STRATEGY) is not None and chosen != name:
        what = f"fsdp_sharding_strategy is {name}, which contradicts it"
        raise draft.wrong(_RESHARD, what, f"remove {_STRATEGY}")
    draft.row(_RESHARD, f"strategy: {_SHAPES[chosen]}", "whether parameters are freed after forward")
    return chosen


def _read_units(draft: Draft) -> None:
    policy = draft.choice(_WRAP, _POLICIES, "TRANSFORMER_BASED_WRAP")
    names, size = tuple(draft.names(_CLASSES)), draft.whole(_SIZE)
    if policy == "none":
        draft.set(_WRAP, "fsdp.units", None, "all parameters are gathered together")
    elif policy == "size":
        if not size:
            raise draft.wrong(_WRAP, "the size is missing", "give fsdp_min_num_params")
        for key in (_WRAP, _SIZE):
            draft.set(key, "fsdp.units", size, "modules of at least so many parameters")
    elif names:
        draft.set(_WRAP, "fsdp.units", names, "the classes are gathered one by one")
        draft.set(_CLASSES, "fsdp.units", names, "needs a model with these classes")
    else:
        why = "the repeated layers of the model. units='no_split' takes the classes that the model names"
        draft.row(_WRAP, "strategy: fsdp", why)
        draft.skip("no class is named: the repeated layers of the model are taken", _CLASSES)
    unused = f"fsdp_auto_wrap_policy is {draft.get(_WRAP, 'absent')}, so Accelerate does not read it"
    draft.skip(unused, _SIZE, _CLASSES)


_AXES = {
    "dp_replicate_size": "ddp",
    "dp_shard_size": "fsdp",
    "tp_size": "tensor",
    "cp_size": "context",
    "sp_size": "context",
}
_METHODS = {"allgather": "gather", "alltoall": "ring"}
_ANY_KERNEL = "F.scaled_dot_product_attention is cut, with any kernel: see fa.transforms.attention"
_ANY_LENGTH = "each batch may have its own length"
_SEQUENCES = {
    "cp_backend": _ANY_KERNEL,
    "sp_backend": _ANY_KERNEL,
    "sp_attn_implementation": _ANY_KERNEL,
    "sp_seq_length": _ANY_LENGTH,
    "sp_seq_length_is_variable": _ANY_LENGTH,
}
PARALLELISM_KEYS = (*_AXES, "cp_comm_strategy", *_SEQUENCES)


def read_parallelism(draft: Draft, kind: str, ranks: int | None) -> str | None:
    """The product of `parallelism_config`, or None if the section is absent, sets no size, or has no effect.

    Args:
        draft: the table.
        kind: the distributed type of the file.
        ranks: on all machines together, if they are known.

    Raises:
        ConfigError: the sizes do not multiply to the ranks, or contradict each other.
    """
    if not draft.below(PARALLELISM):
        return None
    sizes = {name: _axis_size(draft, name) for name in _AXES}
    if sizes["cp_size"] > 1 and sizes["sp_size"] > 1:
        what = f"cp_size is {sizes['cp_size']}, and both cut sequences"
        raise draft.wrong(draft.key(PARALLELISM, "sp_size", PREFIX), what, "one of the two")
    key = draft.key(PARALLELISM, "cp_comm_strategy", PREFIX)
    method = draft.choice(key, _METHODS, "allgather")
    total = math.prod(sizes.values())
    if ranks is not None and total > 1 and total != ranks:
        raise ConfigError(
            f"the sizes of {PARALLELISM} multiply to {total}, and num_processes is {ranks}",
            where=f"{draft.tool}: {PARALLELISM}",
            fix=f"num_processes: {total}, or other sizes",
        )
    product = _product(sizes, method, draft.options if kind == "FSDP" else None)
    if kind in ("DEEPSPEED", "MEGATRON_LM") and total > 1:
        why = f"{kind} is no axis of a product. Needs fsdp instead: strategy: {product}"
        draft.reasons(dict.fromkeys(PARALLELISM_KEYS, why), PARALLELISM, PREFIX)
        return None
    for name, axis in _AXES.items():
        became, why = "strategy", "a size of 1 adds no axis"
        if sizes[name] > 1:
            became, why = f"strategy: {axis}({sizes[name]})", "one axis of the product"
        draft.row(draft.key(PARALLELISM, name, PREFIX), became, why)
    if sizes["cp_size"] > 1:
        why = "allgather gathers keys and values, alltoall sends them round"
        draft.row(key, f"strategy: context(method={method!r})", why)
    draft.skip("cp_size is 1", key)
    draft.reasons(_SEQUENCES, PARALLELISM, PREFIX)
    return product if total > 1 else None


def _axis_size(draft: Draft, name: str) -> int:
    key = draft.key(PARALLELISM, name, PREFIX)
    size = draft.whole(key)
    if size is not None and size < 1:
        raise draft.wrong(key, "a size is 1 or more", "write the number of ranks")
    return size or 1


def _product(sizes: dict[str, int], method: str, options: dict[str, Any] | None) -> str:
    copies, shards = sizes["dp_replicate_size"], sizes["dp_shard_size"]
    cut = sizes["cp_size"] * sizes["sp_size"]
    axes: list[str] = []
    # cp needs shards in Accelerate: FSDP2 also shards over the ranks of a sequence
    sharded = options is not None or shards > 1
    if copies > 1 or not sharded:
        axes.append(call("ddp", copies))
    if sharded:
        axes.append(call("fsdp", shards, **(options or {})))
    if cut > 1:
        axes.append(call("context", cut, method="heads" if sizes["sp_size"] > 1 else method))
    if sizes["tp_size"] > 1:
        axes.append(call("tensor", sizes["tp_size"]))
    return " * ".join(axes)


_DEGREES = {
    "tp_degree": ("strategy: tensor({})", "needs a model with a plan of its layers"),
    "context_parallel_size": ("strategy: context({})", "sequences are cut over ranks"),
    "pp_degree": ("strategy: pipeline({})", "the blocks of the model are split over ranks"),
}
_STAGES = {
    "num_layers_per_virtual_pipeline_stage": "fa.pipeline(virtual=) is a number of stages a rank",
    "decoder_last_pipeline_num_layers": "fa.pipeline(split=) names the modules where stages begin",
    "pipeline_model_parallel_split_rank": "fa.pipeline(split=) names the modules where stages begin",
}
MEGATRON_KEYS = (
    *(f"megatron_lm_{name}" for name in (*_DEGREES, *_STAGES)),
    *("megatron_lm_num_micro_batches", "megatron_lm_gradient_clipping", "megatron_lm_sequence_parallelism"),
    *("megatron_lm_use_distributed_optimizer", "megatron_lm_recompute_activations"),
)


def read_megatron(draft: Draft) -> str:
    """The product that has the effect of `megatron_lm_config`: stages, cut layers and a sharded optimizer."""
    section = f"{MEGATRON}.megatron_lm_"
    sizes: dict[str, int] = {}
    for name, (became, why) in _DEGREES.items():
        size = sizes[name] = draft.whole(section + name) or 1
        if size > 1:
            draft.row(section + name, became.format(size), why)
        draft.skip("1 is the default", section + name)
    for name, why in _STAGES.items():
        draft.skip(why, section + name)
    degree, cut = sizes["tp_degree"], sizes["context_parallel_size"]
    sharded = draft.truth(f"{section}use_distributed_optimizer")
    averaging = call("fsdp", reshard_after_forward=False) if sharded else "ddp"
    stages = sizes["pp_degree"]
    axes = [call("pipeline", stages), averaging] if stages > 1 else [averaging]
    why = "whether slots are sharded over the ranks that hold copies"
    draft.row(f"{section}use_distributed_optimizer", f"strategy: {averaging}", why)
    key = f"{section}sequence_parallelism"
    sequence = bool(draft.truth(key))
    if sequence and degree > 1:
        why = "needs a plan that marks the ends of the sequence"
        draft.row(key, "strategy: tensor(sequence=True)", why)
    draft.skip("it has an effect beside tp_degree only" if sequence else DEFAULT, key)
    why = "each batch is cut into so many micro-batches"
    draft.step(f"{section}num_micro_batches", f"{section}gradient_clipping", why)
    key = f"{section}recompute_activations"
    if draft.get(key) is not None:
        scope = "attention" if draft.truth(key) else False
        draft.set(key, "remat", scope, "Megatron's selective recomputation, or none")
    if cut > 1:
        axes.append(call("context", cut))
    if degree > 1:
        axes.append(call("tensor", degree, **({"sequence": True} if sequence else {})))
    return " * ".join(axes)
