"""The tensors of a checkpoint that go into quantized layers: weights in full width, or codes and scales."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

import attrs
from torch import nn

from fnaccel.big.quantize.choosing import chosen_layers, quantized_layers
from fnaccel.big.quantize.filling import stored_owner
from fnaccel.big.quantize.layer import QuantizedLayer
from fnaccel.big.quantize.records import Record
from fnaccel.big.quantize.replacing import quantize, tell_peft
from fnaccel.checkpoint.format.found import Found, Source
from fnaccel.errors import ArgumentError
from fnaccel.interchange.fitting import mismatch
from fnaccel.interchange.parameter_names import strips

_WHERE = "fa.big.load"


@attrs.frozen(eq=False)
class Part:
    """The tensors of one quantized layer, by the name after its path.

    Attributes:
        path: of the layer.
        layer: the layer.
        tensors: `weight` in full width, or all that a quantized file has for it.
    """

    path: str
    layer: QuantizedLayer
    tensors: dict[str, Found]


@contextlib.contextmanager
def quantized(model: nn.Module, record: Record | None) -> Generator[None]:
    """Replace layers of a model by empty quantized ones. If the body raises, they are put back.

    Raises:
        ArgumentError: the model itself is a linear layer, or as in `fa.big.quantize`.
    """
    if record is None:
        yield
        return
    before = {path: model.get_submodule(path) for path in chosen_layers(model, record).converted}
    if "" in before:
        raise ArgumentError(
            "the model is one linear layer, which can't be replaced in place",
            where=_WHERE,
            fix="put it into a module: torch.nn.Sequential(layer)",
        )
    as_it_was = [(parameter, parameter.requires_grad, parameter.data) for parameter in model.parameters()]
    quantize(model, record)
    try:
        yield
    except BaseException:
        for path, layer in before.items():
            model.set_submodule(path, layer)
        for parameter, trained, values in as_it_was:
            parameter.data = values
            parameter.requires_grad_(trained)
        tell_peft(model, None)
        raise


def split_source(source: Source, model: nn.Module) -> tuple[Source, list[Part]]:
    """The part of a checkpoint that quantized layers take, and the rest.

    Raises:
        TreeMismatchError: tensors of a quantized layer are missing, or have another shape. Lists all of them.
    """
    layers = quantized_layers(model)
    if not layers:
        return source, []
    best: tuple[list[str], list[Part], set[str]] | None = None
    for strip in strips(source.weights):
        parts = {path: Part(path, layer, {}) for path, layer in layers.items()}
        taken: set[str] = set()
        for name, entry in source.weights.items():
            owner = stored_owner(model, strip(name))
            if owner is not None:
                path = strip(name).removesuffix(owner[1]).rstrip(".")
                parts[path].tensors[owner[1]] = entry
                taken.add(name)
        filled = {id(part.layer) for part in parts.values() if part.tensors}
        # a layer at two paths has its tensors under one of them
        needed = [part for part in parts.values() if part.tensors or id(part.layer) not in filled]
        problems = [problem for part in needed for problem in _problems(part)]
        if best is None or len(problems) < len(best[0]):
            best = problems, needed, taken
        if not problems:
            break
    problems, found_parts, taken = best or ([], [], set[str]())
    if problems:
        hint = (
            "quantization=fa.big.quantization_of(path) if the checkpoint is quantized, or the model that was "
        )
        raise mismatch(problems, source, _WHERE, f"{hint}saved. The model is as before", "the model")
    remaining = {name: entry for name, entry in source.weights.items() if name not in taken}
    return attrs.evolve(source, weights=remaining), found_parts


def _problems(part: Part) -> list[str]:
    weight = part.tensors.get("weight")
    if not part.tensors:
        return [f"{part.path}.weight: only in the model"]
    if weight is not None and weight.dtype.is_floating_point:
        shape = part.layer.full_shape
        return (
            []
            if weight.shape == shape
            else [f"{part.path}.weight: {weight} in the source, {list(shape)} here"]
        )
    return [
        f"{part.path}.{suffix}: "
        + ("only in the model" if suffix not in part.tensors else f"{part.tensors[suffix]} in the source")
        + f" ({dtype} {'' if shape is None else list(shape)})".replace("torch.", "")
        for suffix, (shape, dtype) in part.layer.stored_shapes().items()
        if suffix not in part.tensors
        or part.tensors[suffix].dtype != dtype
        or (shape is not None and part.tensors[suffix].shape != tuple(shape))
    ]
