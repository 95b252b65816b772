"""`quantize` and `dequantize`: layers of a model are replaced one at a time, in place."""

from __future__ import annotations

import fnmatch
from typing import Any

import torch
from torch import nn

from fnaccel.big import _torch
from fnaccel.big.dispatch import check_free
from fnaccel.big.quantize.choosing import chosen_layers, quantized_layers
from fnaccel.big.quantize.layer import QuantizedLayer, is_conv1d
from fnaccel.big.quantize.records import Record
from fnaccel.errors import CapabilityError, require

_WIDTHS = (torch.float32, torch.float16, torch.bfloat16)


def quantize(module: nn.Module, record: Record) -> nn.Module:
    """Replace linear layers by quantized ones, in place. Each full-width weight is freed before the next.

    All layers or none: each is quantized once to see that it can be, before the first one is replaced.

    A model on the meta device stays empty: its weights are quantized as `fa.big.load` puts them in. All
    parameters that remain get `requires_grad=False`: a quantized model is trained by an adapter, such as
    LoRA of peft, whose parameters are added afterwards.

    Args:
        module: a model, with values or on the meta device. Linear layers and transformers' `Conv1D` are
            replaced, their paths stay. Weights are fp32, fp16 or bf16.
        record: `fa.big.Nf4()`, `Fp4()`, `Int8()`, `Int8Weights()` or `Int4Weights()`.

    Returns:
        The module. A new layer if the module itself is a linear layer.

    Raises:
        ArgumentError: a pattern matches nothing, or no layer can be quantized.
        CapabilityError: the model is quantized already, or a weight has another dtype.
        MissingBackendError: the library is not installed.

    Example:
        >>> model = fa.big.quantize(GPT(), fa.big.Nf4(skip="blocks.1.*", block=32))
        >>> sorted(fa.big.quantized_layers(model))
        ['blocks.0.down', 'blocks.0.up', 'lm_head']
    """
    where = f"fa.big.quantize(module, {record})"
    _check(module, where)
    choice = chosen_layers(module, record)
    _check_dtypes(module, choice.converted, where)
    paths: dict[int, list[str]] = {}
    for path in choice.converted:  # a layer may have several
        paths.setdefault(id(module.get_submodule(path)), []).append(path)
    with torch.no_grad():
        # an error in a layer has to come before one is replaced, and full-width weights are not kept for it
        for group in paths.values():
            _try(module.get_submodule(group[0]), record)
        _keep(module, record)
        for group in paths.values():
            module = _replaced(module, group, record.make(module.get_submodule(group[0])))
    module.requires_grad_(False)
    tell_peft(module, record.bits)
    return module


def dequantize(module: nn.Module, *, dtype: torch.dtype | None = None) -> nn.Module:
    """Replace quantized layers by layers in full width, in place. Weights stay as rounded as they were.

    Args:
        module: a quantized model with values.
        dtype: the dtype of these weights. By default that of the weights that were quantized.

    Returns:
        The module. A new layer if the module itself is a quantized layer. Parameters keep
        `requires_grad=False`.

    Raises:
        ArgumentError: the module has no quantized layer.
        CapabilityError: quantized layers have no values yet.

    Example:
        >>> model = fa.big.dequantize(fa.big.quantize(GPT(), fa.big.Nf4()))
        >>> type(model.blocks[0].down)
        <class 'torch.nn.modules.linear.Linear'>
    """
    where = "fa.big.dequantize"
    layers = quantized_layers(module)
    require(bool(layers), f"this {type(module).__name__} has no quantized layer", where, "leave out the call")
    check_filled(layers, where)
    paths: dict[int, list[str]] = {}
    for path, layer in layers.items():
        paths.setdefault(id(layer), []).append(path)
    del layers
    with torch.no_grad():
        for group in paths.values():
            layer: Any = module.get_submodule(group[0])
            module = _replaced(module, group, _full_layer(layer, dtype))
    tell_peft(module, None)
    return module


def _try(layer: Any, record: Record) -> None:
    """Quantize the weight of a layer, and throw the codes away."""
    weight = layer.weight
    with torch.device("meta"):
        sizes = weight.shape if not is_conv1d(type(layer)) else weight.shape[::-1]
        twin = type(layer)(*(sizes if is_conv1d(type(layer)) else sizes[::-1])).to(weight.dtype)
    made: Any = record.make(twin)
    if not weight.is_meta:
        made.encode(weight.detach().t().contiguous() if made.transposed else weight.detach().contiguous())


def check_filled(layers: dict[str, QuantizedLayer], where: str) -> None:
    """Raise CapabilityError if a quantized layer has no values."""
    empty = [path for path, layer in layers.items() if layer.missing()]
    if empty:
        raise CapabilityError(
            f"{', '.join(empty[:5])} has no values yet",
            where=where,
            fix="load the model first: fa.big.load(module, folder, quantization=record). If the layers "
            "are offloaded, take them home: fa.big.dispatch_of(module).remove()",
        )


def _full_layer(layer: QuantizedLayer, dtype: torch.dtype | None) -> nn.Module:
    weight = layer.full_weight().to(dtype or layer.weight_dtype)
    with torch.device("meta"):
        if is_conv1d(layer.kind):
            full: Any = layer.kind(layer.out_features, layer.in_features)
            weight = weight.t().contiguous()
        else:
            full = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
    full.weight = nn.Parameter(weight, requires_grad=False)
    full.bias = layer.bias
    return full.train(layer.training)


def _replaced(module: nn.Module, paths: list[str], layer: nn.Module) -> nn.Module:
    """Put a layer at its paths, with the hooks of the one before. Returns the root: for '' the layer."""
    _torch.hand_hooks_on(module.get_submodule(paths[0]), layer)
    for path in paths:
        if not path:
            return layer
        module.set_submodule(path, layer)
    return module


def _check(module: nn.Module, where: str) -> None:
    is_module = isinstance(module, nn.Module)  # pyright: ignore[reportUnnecessaryIsInstance]
    require(is_module, f"a {type(module).__name__} is no module", "fa.big.quantize", "give a model")
    check_free(module)
    if quantized_layers(module):
        raise CapabilityError(
            f"this {type(module).__name__} is quantized already",
            where=where,
            fix="fa.big.dequantize(module) first, or build the model again",
        )


def _check_dtypes(module: nn.Module, paths: tuple[str, ...], where: str) -> None:
    for path in paths:
        weight: Any = module.get_submodule(path).weight
        if weight.dtype not in _WIDTHS:
            raise CapabilityError(
                f"{path}.weight is {weight.dtype}, and only fp32, fp16 and bf16 can be quantized",
                where=where,
                fix=f'module.to(torch.bfloat16) before, or skip="{path}"',
            )


def _keep(module: nn.Module, record: Record) -> None:
    """Store the parameters that `keep` names in fp32."""
    for name, param in module.named_parameters():
        parts = name.split(".")
        names = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
        if param.is_floating_point() and any(fnmatch.filter(names, p) for p in record.keep):
            param.data = param.data.to(torch.float32)


def tell_peft(module: nn.Module, bits: int | None) -> None:
    """Set the flags by which peft learns that its layers go around layers of bitsandbytes."""
    marked: Any = module
    from_bitsandbytes = any(
        hasattr(layer, "quant_storage") or hasattr(layer, "index")
        for layer in quantized_layers(module).values()
    )
    for width in (4, 8):
        name = f"is_loaded_in_{width}bit"
        if from_bitsandbytes and width == bits:
            setattr(marked, name, True)
        elif name in vars(module):
            delattr(marked, name)
