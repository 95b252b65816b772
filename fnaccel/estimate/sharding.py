"""The units of fsdp as a trace counts them: bytes and dtypes of each group of parameters."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fnaccel.estimate.sharded import Unit
from fnaccel.models.blocks import find_units
from fnaccel.models.building import Built
from fnaccel.step.precision_policy import Precision
from fnaccel.strategies.fsdp import Fsdp
from fnaccel.strategies.fsdp_engine import mixed_precision_of
from fnaccel.strategies.shard_dims import shard_dims

Units = list[tuple[nn.Module, Unit]]


def units_of(
    built: Built, options: Fsdp, shards: int, degrees: Mapping[str, int], precision: Precision
) -> tuple[Units, Unit, dict[str | None, list[str]]]:
    """The units of a model, the unit of its root, and the names of the modules that are units."""
    named = dict(built.named("parameters"))
    dim_of = shard_dims(built, shards, degrees, options.reshard_after_forward)
    dims = {id(param): dim_of[name] for name, param in named.items()}
    left: set[int] = {
        id(param)
        for name, param in named.items()
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in options.ignore) or dim_of[name] is None
    }
    units: Units = []
    names: dict[str | None, list[str]] = {}
    for key, module in built.modules.items():
        chosen = find_units(module, built.units.get(key, options.units), "fa.fsdp(units=...)")
        names[key] = [name for name, _ in chosen]
        policy = options.policy or mixed_precision_of(precision)
        for _, inner in reversed(chosen):
            params = [param for param in inner.parameters() if id(param) not in left]
            if params:
                left |= {id(param) for param in params}
                units.append((inner, _unit(params, dims, shards, policy, options.reshard_after_forward)))
    sharded = {param for param in named.values() if id(param) in left}
    policy = options.policy or mixed_precision_of(precision, root=built.host, ignored=sharded)
    rest = [param for param in named.values() if id(param) not in left]
    return units, _unit(rest, dims, shards, policy, False), names


def _unit(
    params: list[Any], dims: Mapping[int, int | None], shards: int, policy: Any, frees: bool | int
) -> Unit:
    param_dtype = params[0].dtype if params else torch.float32
    compute = policy.param_dtype or param_dtype
    reduce = policy.reduce_dtype or compute
    padded = {id(param): _padded(param, dims[id(param)], shards) for param in params}
    moved = [param for param in params if dims[id(param)] and shards > 1]
    whole = sum(padded.values())
    trained = sum(padded[id(param)] for param in params if param.requires_grad)
    casts = any(param.dtype != compute for param in params)
    return Unit(
        params=params,
        whole=whole * compute.itemsize,
        cast=whole * compute.itemsize // shards if casts else 0,
        moved=sum(param.numel() for param in moved) * compute.itemsize,
        moved_gradient=max((p.numel() for p in moved if p.requires_grad), default=0) * compute.itemsize,
        reduction=trained * reduce.itemsize,
        part=trained * param_dtype.itemsize // shards,
        summed=sum(p.numel() for p in params if p.requires_grad) * reduce.itemsize
        if reduce != compute
        else 0,
        resharded=0 if isinstance(frees, bool) else whole * compute.itemsize // frees,
        frees=bool(frees),
        compute=compute,
        casts_gradients=reduce != param_dtype,
        dtype=policy.param_dtype if policy.cast_forward_inputs else None,
    )


def _padded(param: Any, dim: int | None, shards: int) -> int:
    """The elements of a parameter, with the padding of its dimension that is sharded."""
    if dim is None or not param.shape:
        return param.numel()
    rows = param.shape[dim]
    return param.numel() // rows * (-(-rows // shards) * shards) if rows else 0
