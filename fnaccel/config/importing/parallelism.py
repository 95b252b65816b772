"""`parallelism_config` and `megatron_lm_config` of Accelerate as products of strategies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fnaccel.config.importing.draft import Draft
from fnaccel.config.importing.texts import call, sharded
from fnaccel.errors import ConfigError

SECTION = "parallelism_config"
MEGATRON = "megatron_lm_config"
_PREFIX = "parallelism_config_"
_SIZES = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")
_AXES = ("ddp", "fsdp", "tensor", "context", "context")
_OTHERS = (
    "cp_backend", "cp_comm_strategy", "sp_backend", "sp_seq_length", "sp_seq_length_is_variable",
    "sp_attn_implementation",
)  # fmt: skip
KEYS = [f"{SECTION}.{_PREFIX}{name}" for name in (*_SIZES, *_OTHERS)]
_METHODS = {"allgather": "gather", "alltoall": "ring"}
_MEGATRON_UNUSED = {
    "pp_degree": "needs pipelines, which fnaccel does not have. The ranks hold copies or shards instead",
    "num_layers_per_virtual_pipeline_stage": "needs pipelines, which fnaccel does not have",
}
MEGATRON_KEYS = [
    f"{MEGATRON}.megatron_lm_{name}"
    for name in (
        *_MEGATRON_UNUSED, "tp_degree", "num_micro_batches", "sequence_parallelism", "recompute_activations",
        "use_distributed_optimizer", "gradient_clipping", "context_parallel_size",
    )
]  # fmt: skip


def read(draft: Draft, options: Mapping[str, Any] | None, ranks: int | None) -> str | None:
    """The product of `parallelism_config`, or None if the section is absent or sets no size.

    Args:
        draft: the table.
        options: of `fa.fsdp`, if the file is for FSDP. None: it is not.
        ranks: on all machines together, if they are known.

    Raises:
        ConfigError: the sizes do not multiply to the ranks, or contradict each other.
    """
    sizes = {name: _size(draft, name) for name in _SIZES}
    if not draft.below(SECTION):
        return None
    if sizes["cp_size"] > 1 and sizes["sp_size"] > 1:
        raise draft.wrong(
            _key(draft, "sp_size"), f"cp_size is {sizes['cp_size']}, and both cut sequences", "one of the two"
        )
    for name, axis in zip(_SIZES, _AXES, strict=True):
        text = f"strategy: {axis}({sizes[name]})"
        draft.row(
            _key(draft, name),
            text if sizes[name] > 1 else "strategy",
            "a size of 1 adds no axis" if sizes[name] == 1 else "one axis of the product",
        )
    method = _method(draft, sizes)
    total = math.prod(sizes.values())
    if ranks is not None and total > 1 and total != ranks:
        raise ConfigError(
            f"the sizes of {SECTION} multiply to {total}, and num_processes is {ranks}",
            where=f"{draft.tool}: {SECTION}",
            fix=f"num_processes: {total}, or other sizes",
        )
    axes = _data_axes(sizes, options)
    cut = sizes["cp_size"] * sizes["sp_size"]
    axes += [call("context", cut, method=method)] * (cut > 1)
    axes += [call("tensor", sizes["tp_size"])] * (sizes["tp_size"] > 1)
    return " * ".join(axes) if total > 1 else None


def _data_axes(sizes: Mapping[str, int], options: Mapping[str, Any] | None) -> list[str]:
    copies, shards = sizes["dp_replicate_size"], sizes["dp_shard_size"]
    # cp needs shards in Accelerate: FSDP2 also shards over the ranks of a sequence
    if shards > 1 or options is not None:
        return [call("ddp", copies)] * (copies > 1) + [sharded(options or {}, degree=shards)]
    return [call("ddp", copies)]


def _method(draft: Draft, sizes: Mapping[str, int]) -> str | None:
    key = _key(draft, "cp_comm_strategy")
    method = draft.choice(key, _METHODS, "allgather")
    became = f"strategy: context(method={method!r})" if sizes["cp_size"] > 1 else "nothing"
    draft.row(
        key,
        became,
        "allgather gathers keys and values, alltoall sends them round"
        if sizes["cp_size"] > 1
        else "cp_size is 1",
    )
    for name in ("cp_backend", "sp_backend", "sp_attn_implementation"):
        draft.skip(
            _key(draft, name),
            "F.scaled_dot_product_attention is cut, with any kernel: see fa.transforms.attention",
        )
    for name in ("sp_seq_length", "sp_seq_length_is_variable"):
        draft.skip(_key(draft, name), "each batch may have its own length")
    if sizes["sp_size"] > 1:
        return "heads"
    return method if sizes["cp_size"] > 1 else None


def _size(draft: Draft, name: str) -> int:
    size = draft.whole(_key(draft, name), 1)
    assert size is not None
    if size < 1:
        raise draft.wrong(_key(draft, name), "a size is 1 or more", "write the number of ranks")
    return size


def _key(draft: Draft, name: str) -> str:
    """The key with or without its prefix, whichever the document has."""
    plain = f"{SECTION}.{name}"
    return plain if plain in draft.leaves else f"{SECTION}.{_PREFIX}{name}"


def read_megatron(draft: Draft) -> str:
    """The product that has the effect of `megatron_lm_config`: tensor parallelism and a sharded optimizer."""

    def key(name: str) -> str:
        return f"{MEGATRON}.megatron_lm_{name}"

    def size(name: str) -> int:
        return draft.whole(key(name), 1) or 1

    degree, cut = size("tp_degree"), size("context_parallel_size")
    sequence = draft.truth(key("sequence_parallelism"))
    sharding = draft.truth(key("use_distributed_optimizer"))
    data = "fsdp(reshard_after_forward=False)" if sharding else "ddp"
    draft.row(
        key("use_distributed_optimizer"),
        f"strategy: {data}",
        "whether slots are sharded over the ranks that hold copies",
    )
    draft.row(
        key("tp_degree"),
        f"strategy: tensor({degree})" if degree > 1 else "nothing",
        "needs a model with a plan of its layers" if degree > 1 else "1 is the default",
    )
    if sequence and degree > 1:
        draft.row(
            key("sequence_parallelism"),
            "strategy: tensor(sequence=True)",
            "needs a plan that marks the ends of the sequence",
        )
    else:
        draft.skip(
            key("sequence_parallelism"),
            "it is the default" if not sequence else "it has an effect beside tp_degree only",
        )
    draft.row(
        key("context_parallel_size"),
        f"strategy: context({cut})" if cut > 1 else "nothing",
        "sequences are cut over ranks" if cut > 1 else "1 is the default",
    )
    for name, why in _MEGATRON_UNUSED.items():
        draft.skip(key(name), why if size(name) > 1 else "1 is the default")
    _megatron_step(draft, key)
    axes = [data] + [call("context", cut)] * (cut > 1)
    axes += [call("tensor", degree, sequence=sequence or None)] * (degree > 1)
    return " * ".join(axes)


def _megatron_step(draft: Draft, key: Any) -> None:
    if draft.has(key("num_micro_batches")):
        count = draft.whole(key("num_micro_batches"), 1)
        draft.set(
            key("num_micro_batches"), "accumulate", count, "each batch is cut into so many micro-batches"
        )
    if draft.has(key("gradient_clipping")):
        norm = draft.number(key("gradient_clipping"))
        draft.set(key("gradient_clipping"), "clip_norm", norm or None, "the norm over all ranks. 0: no bound")
    if draft.has(key("recompute_activations")):
        scope = "attention" if draft.truth(key("recompute_activations")) else False
        draft.set(key("recompute_activations"), "remat", scope, "Megatron's selective recomputation, or none")
