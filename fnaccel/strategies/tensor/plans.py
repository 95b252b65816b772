"""Plans: which style cuts which modules. Some are ready, and models of transformers bring their own."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from typing import Any

import attrs
from torch import nn

from fnaccel.errors import ArgumentError, CapabilityError, nearest
from fnaccel.strategies.strategy import Pairs
from fnaccel.strategies.tensor.styles import parse


@attrs.frozen(kw_only=True)
class Ready:
    """A ready plan.

    Attributes:
        styles: patterns of module paths and their styles.
        heads: names of the configuration's fields that the number of ranks has to divide.
        blocks: the pattern of the blocks, without their number. With `sequence=True` activations are cut at
            the input of the first, and joined at the output of the last.
        attention: patterns of the modules that take the whole sequence, if their forward knows its length.
        norms: patterns of the modules in blocks that compute with a part of the sequence.
    """

    styles: Mapping[str, str]
    heads: tuple[str, ...]
    blocks: str = ""
    attention: tuple[str, ...] = ()
    norms: tuple[str, ...] = ()


READY: dict[str, Ready] = {
    "gpt2": Ready(
        styles={
            "*h.*.attn.c_attn": "packed_colwise:3",
            "*h.*.attn.c_proj": "rowwise",
            "*h.*.attn.num_heads": "/",
            "*h.*.attn.split_size": "/",
            "*h.*.mlp.c_fc": "colwise",
            "*h.*.mlp.c_proj": "rowwise",
            "*wte": "vocab",
            "lm_head": "colwise_gather",
        },
        heads=("num_attention_heads",),
        blocks="*h",
        attention=("*h.*.attn",),
        norms=("*h.*.ln_1", "*h.*.ln_2"),
    ),
    "llama": Ready(
        styles={
            "*layers.*.self_attn.[qkv]_proj": "colwise",
            "*layers.*.self_attn.o_proj": "rowwise",
            "*layers.*.mlp.gate_proj": "colwise",
            "*layers.*.mlp.up_proj": "colwise",
            "*layers.*.mlp.down_proj": "rowwise",
            "*embed_tokens": "vocab",
            "lm_head": "colwise_gather",
        },
        heads=("num_attention_heads", "num_key_value_heads"),
        blocks="*layers",
        attention=("*layers.*.self_attn",),
        norms=("*layers.*.input_layernorm", "*layers.*.post_attention_layernorm"),
    ),
    "bert": Ready(
        styles={
            "*layer.*.attention.self.query": "colwise",
            "*layer.*.attention.self.key": "colwise",
            "*layer.*.attention.self.value": "colwise",
            "*layer.*.attention.self.num_attention_heads": "/",
            "*layer.*.attention.self.all_head_size": "/",
            "*layer.*.attention.output.dense": "rowwise",
            "*layer.*.intermediate.dense": "colwise",
            "*layer.*.output.dense": "rowwise",
        },
        heads=("num_attention_heads",),
        blocks="*encoder.layer",
        attention=("*layer.*.attention.self",),
        norms=("*layer.*.attention.output.LayerNorm", "*layer.*.output.LayerNorm"),
    ),
    "t5": Ready(
        styles={
            "*Attention.[qkv]": "colwise",
            "*Attention.o": "rowwise",
            "*Attention.relative_attention_bias": "colwise",
            "*Attention.n_heads": "/",
            "*Attention.inner_dim": "/",
            "*DenseReluDense.wi": "colwise",
            "*DenseReluDense.wi_[01]": "colwise",
            "*DenseReluDense.wo": "rowwise",
            "shared": "vocab",
            "*embed_tokens": "vocab",
            "lm_head": "colwise_gather",
        },
        heads=("num_heads",),
    ),
}
"""Ready plans for models of transformers, by name."""

_THEIRS = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "colwise_gather_output": "colwise_gather",
    "colwise_rep": "colwise_gather",
    "embedding_rowwise": "vocab",
    "embedding_colwise": "colwise_gather",
    "packed_colwise": "packed_colwise:2",
    "replicate": "replicate",
    "replicated_with_grad_allreduce": "replicate_partial",
}
"""The styles of transformers' `tp_plan`, as ours."""

_EXPERTS = ("moe_tp_experts", "moe_identity_expert", "grouped_gemm", "ep_router")
"""Styles of transformers for the experts of a mixture, and for its router."""

_HEADS = ("num_attention_heads", "num_key_value_heads")


@attrs.frozen(kw_only=True)
class Plan:
    """A plan for one model: (pattern, style) pairs, of which the first that matches counts.

    Attributes:
        pairs: the pairs. A pattern may also name an attribute of a module, whose style is "/", or the weight
            of a module, whose style is the dimension that is cut.
        optional: whether a pattern may match nothing.
        heads: numbers of heads by name, which the number of ranks has to divide.
    """

    pairs: tuple[tuple[str, str | int], ...]
    optional: bool = False
    heads: Mapping[str, int] = attrs.field(factory=dict)


def plan_for(model: nn.Module, plan: str | Pairs, *, sequence: bool) -> Plan:
    """The plan of one model.

    Args:
        model: the whole model.
        plan: pairs, the name of a ready plan, or "auto" for the model's own.
        sequence: whether activations outside of column and row layers are cut along the sequence.

    Raises:
        ArgumentError: there is no such plan, or it can't cut sequences.
        CapabilityError: the model's own plan cuts experts.
    """
    if not isinstance(plan, str):
        return Plan(pairs=plan)
    config = getattr(model, "config", None)
    name = plan
    if plan == "auto":
        kind = str(getattr(config, "model_type", ""))
        if kind not in READY:
            return _own(model, config, kind, sequence=sequence)
        name = kind
    if name not in READY:
        raise ArgumentError(
            f"no plan is called {name!r}", where="fa.tensor(plan=)", fix=nearest(name, [*READY, "auto"])
        )
    ready = READY[name]
    pairs = [*ready.styles.items()]
    if sequence:
        pairs = [*_sequence_pairs(model, ready, name), *pairs]
    return Plan(pairs=tuple(pairs), optional=True, heads=_numbers(config, ready.heads))


def _sequence_pairs(model: nn.Module, ready: Ready, name: str) -> list[tuple[str, str]]:
    paths = [path for path, _ in model.named_modules()]
    lists = [path for path, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    stacks = fnmatch.filter(lists, ready.blocks) if ready.blocks else []
    if len(stacks) != 1:
        raise ArgumentError(
            f"the plan {name!r} can't cut the sequences of this model",
            where="fa.tensor(sequence=True)",
            fix="sequence=False; or a plan of yours with scatter_input, gather_output and sequence",
        )
    count = sum(path.rpartition(".")[0] == stacks[0] for path in paths)
    first, last = f"{stacks[0]}.0", f"{stacks[0]}.{count - 1}"
    both = [(first, "scatter_input+gather_output")]
    ends = both if count == 1 else [(first, "scatter_input"), (last, "gather_output")]
    inputs = [(attention, "gather_input") for attention in ready.attention]
    return [*ends, *inputs, *((norm, "sequence") for norm in ready.norms)]


def _own(model: nn.Module, config: object, kind: str, *, sequence: bool) -> Plan:
    """The plan that a model brings: in our styles, or in those of transformers."""
    theirs: Any = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    if not isinstance(theirs, Mapping) or not theirs:
        raise ArgumentError(
            f"{type(model).__name__} {f'({kind}) ' if kind else ''}brings no plan",
            where='fa.tensor(plan="auto")',
            fix="plan={pattern: style, ...}, or an attribute tp_plan of the model: see docs/parallelism.md",
        )
    pairs: list[tuple[str, str]] = []
    for pattern, style in theirs.items():
        if style in _EXPERTS:
            raise CapabilityError(
                f"{type(model).__name__} is a mixture of experts: its plan cuts {pattern} by {style!r}, and "
                "fa.tensor cuts no experts",
                where='fa.tensor(plan="auto")',
                fix="fa.fsdp(), which shards the weights of experts; or fa.tensor with a plan of yours that "
                "leaves them out, so that each rank has them whole",
            )
        pairs.append((str(pattern), _THEIRS.get(style) or "+".join(parse(style))))
    if sequence:
        check_ends([style for _, style in pairs], f"the plan of {type(model).__name__}")
    return Plan(pairs=tuple(pairs), optional=config is not None, heads=_numbers(config, _HEADS))


def check_ends(styles: Iterable[str], described: str) -> None:
    """Check that a plan says where sequences are cut and joined.

    Raises:
        ArgumentError: it does not.
    """
    lacking = {"scatter_input", "gather_output"} - {part for style in styles for part in parse(style)}
    if lacking:
        raise ArgumentError(
            f"{described} cuts no sequences: it lacks {', '.join(sorted(lacking))}",
            where="fa.tensor(sequence=True)",
            fix='"scatter_input" for the first block, "gather_output" for the last; or sequence=False',
        )


def _numbers(config: object, names: tuple[str, ...]) -> dict[str, int]:
    values = {name: getattr(config, name, None) for name in names}
    return {name: value for name, value in values.items() if isinstance(value, int)}
