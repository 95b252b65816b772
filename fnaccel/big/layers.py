"""The layers of a model: the parts that are placed and fetched whole."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence

import attrs
import torch
from torch import nn

from fnaccel.errors import ArgumentError, nearest
from fnaccel.models.blocks import blocks
from fnaccel.models.constant_buffers import constant_buffers

WHOLE = frozenset({"MultiheadAttention", "TransformerEncoderLayer"})
"""Classes of torch whose forward reads the weights of its children, and may not call them."""


@attrs.frozen(eq=False)
class Layer:
    """A module that is not split, or a tensor that belongs to a module with other modules inside.

    Attributes:
        path: of the module, or of the tensor.
        tensors: parameters and buffers by full name, in the order of the model. Tied ones have an entry each.
    """

    path: str
    tensors: Mapping[str, torch.Tensor]


def layers(model: nn.Module, no_split: Collection[str] | None = None) -> list[Layer]:
    """The layers of a model, in its order. Every parameter and buffer is in one of them.

    Args:
        model: with values or without.
        no_split: classes of modules that stay whole. See `classes_not_split`.
    """
    classes = classes_not_split(model, no_split) | WHOLE
    return list(_layers("", model, classes))


def split(parts: Sequence[Layer], too_large: Collection[Layer], model: nn.Module) -> list[Layer]:
    """The layers of a model, with some of them replaced by their inner layers."""
    modules = dict(model.named_modules(remove_duplicate=False))
    result: list[Layer] = []
    for layer in parts:
        module = modules.get(layer.path)
        inner = [] if layer not in too_large or module is None else layers(module, ())
        prefix = f"{layer.path}." if layer.path else ""
        if len(inner) > 1:
            result += [
                Layer(prefix + part.path, {prefix + name: tensor for name, tensor in part.tensors.items()})
                for part in inner
            ]
        else:
            result.append(layer)
    return result


def lasting_buffers(model: nn.Module) -> set[int]:
    """`id`s of the buffers that stay on the device of their layer, unless all buffers are offloaded.

    Codes of quantized weights are fetched as weights are.
    """
    constant = {id(tensor) for _, tensor in constant_buffers(model)}
    return {id(tensor) for tensor in model.buffers()} - constant


def _layers(path: str, module: nn.Module, classes: frozenset[str]) -> Iterator[Layer]:
    children = list(module.named_children())
    direct = _own(path, module)
    whole = (path and type(module).__name__ in classes) or "parametrizations" in dict(children)
    if whole or not children:
        tensors = _tensors(path, module)
        if tensors:
            yield Layer(path, tensors)
        return
    for name, tensor in direct.items():
        yield Layer(name, {name: tensor})
    for name, child in children:
        yield from _layers(f"{path}.{name}" if path else name, child, classes)


def _own(path: str, module: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors that a module holds itself, by full name."""
    prefix = f"{path}." if path else ""
    named = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    return {f"{prefix}{name}": tensor for name, tensor in named}


def _tensors(path: str, module: nn.Module) -> dict[str, torch.Tensor]:
    prefix = f"{path}." if path else ""
    parameters = module.named_parameters(remove_duplicate=False)
    named = itertools.chain(parameters, module.named_buffers(remove_duplicate=False))
    return {f"{prefix}{name}": tensor for name, tensor in named}


def classes_not_split(
    model: nn.Module, no_split: Collection[str] | None = None, where: str = "no_split="
) -> frozenset[str]:
    """The classes of modules that stay on one device, as residual connections need it.

    Args:
        model: with values or without.
        no_split: names of classes. By default those that the model names in `_no_split_modules`, as models of
            transformers do, or else the classes of the repeated members of its outermost ModuleList.
        where: the location in error messages.

    Raises:
        ArgumentError: the model has no module of a class.
    """
    if no_split is None:
        lists = [getattr(module, "_no_split_modules", None) for module in model.modules()]
        named = frozenset(name for listed in lists for name in listed or ())
        return named or frozenset(
            type(module).__name__ for _, module in blocks(model) if any(module.children())
        )
    names = {no_split} if isinstance(no_split, str) else set(no_split)
    classes = {type(module).__name__ for module in model.modules()}
    for name in sorted(names - classes):
        raise ArgumentError(
            f"the model has no module of class {name!r}", where=where, fix=nearest(name, classes)
        )
    return frozenset(names)
