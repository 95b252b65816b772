"""Which layers of a model are quantized, which are left as they are, and why."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator
from typing import Any, cast

from torch import nn

from fnaccel.big.quantize.layer import LinearLayer, QuantizedLayer, is_conv1d
from fnaccel.big.quantize.records import Record
from fnaccel.errors import ArgumentError, require
from fnaccel.models.layers import Layers, check_patterns

_HEAD = "lm_head"


def chosen_layers(module: nn.Module, record: Record) -> Layers:
    """The linear layers that a record quantizes, and the reason for each that it leaves.

    Patterns are shell patterns of paths, as in `module.named_modules()`. One that matches a module covers all
    layers below it. By default (`skip=None`) the output head is left: `get_output_embeddings()` of a model of
    transformers and a layer called `lm_head`. Layers that share their weight with
    another are always left.

    Args:
        module: a model, with values or on the meta device.
        record: the description. Layers that its `keep` names are left, and stored in fp32.

    Returns:
        A record with `converted` (paths) and `skipped` (path -> reason). `describe()` shortens both.

    Raises:
        ArgumentError: a pattern of `skip` or `keep` matches nothing, or no layer is left to be quantized.

    Example:
        >>> print(*fa.big.chosen_layers(GPT(), fa.big.Nf4(skip="*.down", block=32)).describe(), sep="\\n")
        blocks.0-1.up, lm_head
        not blocks.0-1.down: skip='*.down'
    """
    where = f"fa.big.quantize(module, {record})"
    require(isinstance(record, Record), f"the record is {record!r}", "fa.big.quantize", "fa.big.Nf4()")
    if not record.optional:
        check_patterns((*(record.skip or ()), *record.keep), module, where)
    skip = _of_file(record.skip, module) if record.optional else record.skip or ()
    heads = _heads(module) if record.skip is None else set[int]()
    tied = _tied(module)
    converted: list[str] = []
    skipped: dict[str, str] = {}
    for path, layer in linear_layers(module):
        pattern = covering(path, record.keep)
        if pattern is not None:
            skipped[path] = f"keep={pattern!r}"
        elif (pattern := covering(path, skip)) is not None:
            skipped[path] = f"skip={pattern!r}"
        elif id(layer) in heads:
            skipped[path] = "the output head"
        elif path in tied:
            skipped[path] = f"tied to {tied[path]}"
        elif not layer.weight.numel():
            skipped[path] = "it has no weights"
        elif "weight" not in dict(cast(nn.Module, layer).named_parameters(recurse=False)):
            skipped[path] = "a hook computes its weight"
        elif (obstacle := record.obstacle(layer)) is not None:
            skipped[path] = obstacle
        else:
            converted.append(path)
    if not converted:
        reasons = "; ".join(Layers((), skipped).describe()[1:]) or "it has no nn.Linear and no Conv1D"
        raise ArgumentError(
            f"no layer of this {type(module).__name__} can be quantized: {reasons}",
            where=where,
            fix="give fewer patterns in skip= and keep=",
        )
    return Layers(tuple(converted), skipped)


def _of_file(patterns: Iterable[str] | None, module: nn.Module) -> list[str]:
    """The patterns of a file. A name that is a whole path is no end of another path."""
    paths = {path for path, _ in module.named_modules()}
    return [p for p in patterns or () if not (p.startswith("*.") and p[2:] in paths)]


def linear_layers(module: nn.Module) -> Iterator[tuple[str, LinearLayer]]:
    """(path, layer) of all layers in full width that could be quantized, under each of their paths.

    A subclass of `nn.Linear` is left: its owner may read the weight itself, as `nn.MultiheadAttention` does.
    """
    for path, layer in module.named_modules(remove_duplicate=False):
        if type(layer) is nn.Linear or is_conv1d(type(layer)):
            yield path, cast(LinearLayer, layer)


def quantized_layers(module: nn.Module) -> dict[str, QuantizedLayer]:
    """The quantized layers of a model, by each of their paths.

    Each has `full_weight()`, the rounded weight `[out_features, in_features]`, and `record`, its description.

    Example:
        >>> model = fa.big.quantize(GPT(), fa.big.Nf4(block=32))
        >>> layers = fa.big.quantized_layers(model)
        >>> str(layers["blocks.0.up"].record), "lm_head" in layers
        ('Nf4(block=32)', False)
    """
    return {
        path: layer
        for path, layer in module.named_modules(remove_duplicate=False)
        if isinstance(layer, QuantizedLayer)
    }


def covering(path: str, patterns: Iterable[str]) -> str | None:
    """The first pattern that matches a layer, its weight, or a module that the layer is part of."""
    parts = path.split(".")
    names = [".".join(parts[:end]) for end in range(1, len(parts) + 1)] + [f"{path}.weight"]
    return next((p for p in patterns if any(fnmatch.fnmatchcase(name, p) for name in names)), None)


def _heads(module: nn.Module) -> set[int]:
    """The output layers: that which a model of transformers names, and those called `lm_head`."""
    named: Any = getattr(module, "get_output_embeddings", None)
    heads = {id(layer) for path, layer in linear_layers(module) if path.split(".")[-1] == _HEAD}
    return heads | {id(named())} if callable(named) else heads


def _tied(module: nn.Module) -> dict[str, str]:
    """The layers whose weight is another layer's too: the one's path -> the other's."""
    owners: dict[int, list[tuple[str, nn.Module]]] = {}
    for path, layer in module.named_modules(remove_duplicate=False):
        for param in layer.parameters(recurse=False):
            owners.setdefault(id(param), []).append((path, layer))
    return {
        path: next(other for other, owner in shared if owner is not layer)
        for shared in owners.values()
        for path, layer in shared
        if any(owner is not layer for _, owner in shared)
    }
