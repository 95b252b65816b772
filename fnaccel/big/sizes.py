"""Bytes of a model by module, in any dtype. Tied parameters count once."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Literal

import attrs
import torch
from torch import nn

from fnaccel.big.layers import layers
from fnaccel.errors import UnknownNameError, nearest
from fnaccel.texts import size_of

BITS: Mapping[DtypeName, int] = {
    "float32": 32, "fp32": 32, "bfloat16": 16, "bf16": 16, "float16": 16, "fp16": 16, "fp8": 8, "int8": 8,
    "int4": 4,
}  # fmt: skip
"""Bits of one value, by the name of a dtype."""

DtypeName = Literal["float32", "fp32", "bfloat16", "bf16", "float16", "fp16", "fp8", "int8", "int4"]
Dtype = DtypeName | torch.dtype
"""A dtype of torch, or a name in `BITS`."""


@attrs.frozen
class Sizes:
    """Bytes of a model.

    Attributes:
        modules: bytes below each module, by path. The model itself is `""`.
        layers: bytes of each part that is placed whole, by path.
        buffers: bytes of the buffers alone below each module, by path. The rest of `modules` is parameters.
        dtype: the dtype that floating-point values were counted in, or None if it was their own.

    Example:
        >>> fa.big.sizes(torch.nn.Linear(100, 10), "int8").largest
        ('', 1010)
    """

    modules: Mapping[str, int]
    layers: Mapping[str, int]
    buffers: Mapping[str, int]
    dtype: str | None = None

    @property
    def total(self) -> int:
        """Bytes of the model."""
        return self.modules[""]

    @property
    def largest(self) -> tuple[str, int]:
        """The path and the bytes of the largest layer, `("", 0)` for a model without tensors."""
        return max(self.layers.items(), key=lambda layer: layer[1], default=("", 0))

    def __str__(self) -> str:
        path, count = self.largest
        return f"{size_of(self.total)} in all, {size_of(count)} in the largest layer ({path or 'the model'})"


def sizes(model: nn.Module, dtype: Dtype | None = None, *, no_split: Collection[str] | None = None) -> Sizes:
    """The bytes of a model by module and by layer.

    Args:
        model: with values or without (`fa.big.empty`).
        dtype: count floating-point tensors in this dtype: one of torch, or `"fp32"`, `"bf16"`, `"fp16"`,
            `"fp8"`, `"int8"`, `"int4"`. By default their own. Scales of quantized weights are not counted.
        no_split: classes of modules that count as one layer. By default those that the model names in
            `_no_split_modules`, or else the classes of its blocks.

    Raises:
        UnknownNameError: no such dtype.
        ArgumentError: the model has no module of a class in `no_split`.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 5))
        >>> fa.big.sizes(model).total
        236
        >>> print(fa.big.sizes(model, "bf16"))
        122 B in all, 50 B in the largest layer (2)
    """
    bits = bits_of(dtype)
    modules: dict[str, int] = {}
    buffers: dict[str, int] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        tensors = [*module.parameters(), *module.buffers()]
        modules[path] = nbytes(tensors, bits)
        buffers[path] = nbytes(module.buffers(), bits)
    parts = {layer.path: nbytes(layer.tensors.values(), bits) for layer in layers(model, no_split)}
    return Sizes(modules, parts, buffers, None if dtype is None else str(dtype).removeprefix("torch."))


def bits_of(dtype: Dtype | None) -> int | None:
    """The bits of one value. None if each tensor keeps its dtype.

    Raises:
        UnknownNameError: no such dtype.
    """
    if dtype is None:
        return None
    if isinstance(dtype, torch.dtype):
        return dtype.itemsize * 8
    if dtype not in BITS:
        raise UnknownNameError(f"no dtype is called {dtype!r}", where="dtype=", fix=nearest(dtype, BITS))
    return BITS[dtype]


def nbytes(tensors: Iterable[torch.Tensor], bits: int | None = None) -> int:
    """Bytes of tensors, each counted once.

    Args:
        tensors: parameters and buffers.
        bits: bits of a floating-point value. By default those of its dtype.
    """
    distinct = {id(tensor): tensor for tensor in tensors}.values()
    return sum(
        -(-tensor.numel() * bits // 8) if bits and tensor.is_floating_point() else tensor.nbytes
        for tensor in distinct
    )
