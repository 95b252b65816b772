"""How a loader puts weights into an empty quantized model, one tensor at a time."""

from __future__ import annotations

import torch
from torch import nn

from fnaccel.big.quantize.layer import QuantizedLayer


def quantized_owner(module: nn.Module, name: str) -> QuantizedLayer | None:
    """The quantized layer whose weight is called `name` in a full-width file, or None.

    Example:
        >>> from fnaccel.big.quantize.filling import quantized_owner
        >>> model = fa.big.quantize(GPT(), fa.big.Nf4())
        >>> quantized_owner(model, "blocks.0.up.weight") is model.blocks[0].up
        True
        >>> print(quantized_owner(model, "blocks.0.up.bias"))
        None
    """
    path, _, last = name.rpartition(".")
    return _layer(module, path) if last == "weight" else None


def stored_owner(module: nn.Module, name: str) -> tuple[QuantizedLayer, str] | None:
    """The quantized layer that a tensor of a file belongs to, and the tensor's name for `fill`.

    None for any other tensor. The bias of a quantized layer is an ordinary parameter.

    Example:
        >>> from fnaccel.big.quantize.filling import stored_owner
        >>> model = fa.big.quantize(GPT(), fa.big.Nf4())
        >>> stored_owner(model, "blocks.0.up.weight.absmax")[1]
        'weight.absmax'
    """
    parts = name.split(".")
    for end in range(len(parts) - 1, -1, -1):
        layer = _layer(module, ".".join(parts[:end]))
        suffix = ".".join(parts[end:])
        if layer is not None:
            return (layer, suffix) if suffix == "weight" or suffix in layer.stored_shapes() else None
    return None


def fill(layer: QuantizedLayer, suffix: str, tensor: torch.Tensor, device: torch.device | str) -> None:
    """Put a tensor of a file into a quantized layer.

    Args:
        layer: from `quantized_owner` or `stored_owner`.
        suffix: the name after the layer's path.
        tensor: a full-width `weight`, which is quantized on `device`, or a tensor of a quantized file, which
            is taken as it is.
        device: where the codes are from here on.

    Raises:
        CheckpointError: another shape or dtype, or numbers that contradict the layer's record.

    Example:
        >>> from fnaccel.big.quantize.filling import fill
        >>> with torch.device("meta"):
        ...     model = fa.big.quantize(GPT(), fa.big.Nf4())
        >>> fill(model.blocks[0].up, "weight", GPT().blocks[0].up.weight, "cpu")
        >>> model.blocks[0].up.missing(), model.blocks[1].up.missing()
        ([], ['codes', 'absmax', 'quant_map'])
    """
    layer.fill(suffix, tensor, device)


def _layer(module: nn.Module, path: str) -> QuantizedLayer | None:
    try:
        layer = module.get_submodule(path)
    except AttributeError:
        return None
    return layer if isinstance(layer, QuantizedLayer) else None
