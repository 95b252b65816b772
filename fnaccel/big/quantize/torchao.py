"""The integer layers of torchao: weights of 8 or 4 bits, products in full width.

torchao quantizes, and the operations of a forward are those of its tensors, in the same order. Its tensors
themselves are not used: they would keep a full-width copy of each weight for backward.
"""

from __future__ import annotations

import importlib
import json
from typing import Any

import attrs
import torch
import torch.nn.functional as F

from fnaccel.big.quantize.layer import LinearLayer, QuantizedLayer, Shape
from fnaccel.big.quantize.records import Int4Weights, Int8Weights

_Linear: Any = torch.nn.Linear
_INT4: Any = vars(torch)["int4"]  # torch's stubs lack it
_SUFFIXES = {"_weight_qdata": "codes", "_weight_scale": "scales", "_weight_zero_point": "zeros"}


class IntegerLinear(QuantizedLayer, _Linear):
    """A linear layer of symmetric int8 or int4 codes.

    Buffers: `codes` int8 `[out_features, in_features]`, or for 4 bits uint8 `[(n + 1) // 2]`, two in a byte.
    `scales` `[out_features, groups]`, fp32 for 8 bits, and in the weight's dtype for 4 bits. `zeros` int8 of
    the same shape, all 0.
    """

    def __init__(self, layer: LinearLayer, record: Int8Weights | Int4Weights) -> None:
        super().__init__(layer, record)
        shape = (self.out_features, self.in_features)
        self._form = _Form(shape, record.group, record.bits, self.weight_dtype)
        count = self.out_features * self.in_features
        groups = self.in_features // (record.group or self.in_features)
        if record.bits == 8:
            self.declare("codes", (self.out_features, self.in_features), torch.int8)
        else:
            self.declare("codes", ((count + 1) // 2,), torch.uint8)
        self.declare("scales", (self.out_features, groups), self._scale_dtype())
        self.declare("zeros", (self.out_features, groups), torch.int8)
        if not layer.weight.is_meta:
            self.fill("weight", layer.weight, layer.weight.device)

    def _scale_dtype(self) -> torch.dtype:
        return torch.float32 if self.record.bits == 8 else self.weight_dtype

    @property
    def weight(self) -> Any:
        """The weight as torchao's tensor, which peft looks at. 8-bit codes share its memory."""
        torchao: Any = importlib.import_module("torchao.quantization")
        codes, scales, zeros = (self.get_buffer(name) for name in ("codes", "scales", "zeros"))
        block = [1, self.record.group or self.in_features]
        if self.record.bits == 8:
            return torchao.Int8Tensor(codes, scales, block, self.weight_dtype, zero_point=zeros)
        whole = unpacked(codes, (self.out_features, self.in_features))
        return torchao.IntxUnpackedToInt8Tensor(whole, scales, zeros, _INT4, block, self.weight_dtype, None)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            self.fill("weight", value, value.device)
        else:
            super().__setattr__(name, value)

    def encode(self, weight: torch.Tensor) -> None:
        """Quantize a weight `[out_features, in_features]`."""
        config = config_of(self.record)
        torchao: Any = importlib.import_module("torchao.quantization")
        # an inner layer, because torchao's public function takes modules
        inner = torch.nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        inner.weight = torch.nn.Parameter(weight, requires_grad=False)
        torchao.quantize_(inner, config)
        weight_tensor: Any = inner.weight
        self.put("_weight_qdata", weight_tensor.qdata)
        self.put("_weight_scale", weight_tensor.scale)
        self.put("_weight_zero_point", weight_tensor.zero_point)

    def full_weight(self) -> torch.Tensor:
        """The weight in full width, `[out_features, in_features]` of `weight_dtype`."""
        return self._form.full_weight(self.get_buffer("codes"), self.get_buffer("scales"))

    def stored_shapes(self) -> dict[str, tuple[Shape, torch.dtype]]:
        """Shapes and dtypes by torchao's own names. Codes of 4 bits have a byte each there."""
        groups = tuple(self.get_buffer("scales").shape)
        return {
            "_weight_qdata": ((self.out_features, self.in_features), torch.int8),
            "_weight_scale": (groups, self._scale_dtype()),
            "_weight_zero_point": (groups, torch.int8),
        }

    def stored(self) -> dict[str, torch.Tensor]:
        """The tensors by torchao's own names."""
        tensors = {suffix: self.get_buffer(name) for suffix, name in _SUFFIXES.items()}
        if self.record.bits == 4:
            codes = tensors["_weight_qdata"]
            tensors["_weight_qdata"] = unpacked(codes, (self.out_features, self.in_features))
        return tensors

    def put(self, suffix: str, tensor: torch.Tensor) -> None:
        """Take one tensor of a quantized file."""
        if suffix == "_weight_qdata" and self.record.bits == 4:
            tensor = packed(tensor)
        self.set_value(_SUFFIXES[suffix], tensor)

    def header(self) -> str:
        """The text about the weight that torchao reads in the header of a safetensors file."""
        encoder: Any = importlib.import_module("torchao.prototype.safetensors.safetensors_utils")
        return json.dumps(self.weight, cls=encoder.TensorSubclassAttributeJSONEncoder)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., in_features]` to `[..., out_features]`, in the dtype of the input."""
        codes, scales = self.get_buffer("codes"), self.get_buffer("scales")
        return _Product.apply(x, self.bias, codes, scales, self._form)  # pyright: ignore[reportReturnType]


@attrs.frozen
class _Form:
    """How codes and scales make a weight: the operations of torchao's tensors, in the same order."""

    shape: tuple[int, int]
    group: int | None
    bits: int
    dtype: torch.dtype

    def full_weight(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """The weight in full width. Zeros are left out, since all are 0."""
        whole = codes if self.bits == 8 else unpacked(codes, self.shape)
        groups = whole.to(scales.dtype).view(*scales.shape, -1)
        return (groups * scales.unsqueeze(-1)).view(self.shape).to(self.dtype)

    def product(self, x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """`x @ weight.T`. Scales of whole rows are multiplied afterwards, if they are in fp32."""
        if self.bits == 8 and self.group is None:
            out = torch.matmul(x, codes.t().to(x.dtype))
            return out * scales.flatten().to(out.dtype)
        return torch.matmul(x, self.full_weight(codes, scales).to(x.dtype).t())


class _Product(torch.autograd.Function):
    """`x @ weight.T + bias`. Backward dequantizes the weight again."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        codes: torch.Tensor,
        scales: torch.Tensor,
        form: _Form,
    ) -> torch.Tensor:
        ctx.save_for_backward(codes, scales)
        ctx.form, ctx.dtypes = form, (x.dtype, None if bias is None else bias.dtype)
        if form.bits == 4 and bias is not None:
            weight = form.full_weight(codes, scales).to(x.dtype)
            return F.linear(x, weight, bias.to(x.dtype)).to(x.dtype)
        out = form.product(x, codes, scales)
        return (out if bias is None else out + bias).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        dtype, bias_dtype = ctx.dtypes
        into_x = into_bias = None
        if ctx.needs_input_grad[0]:
            weight = ctx.form.full_weight(*ctx.saved_tensors)
            into_x = torch.matmul(grad, weight.to(grad.dtype)).to(dtype)
        if ctx.needs_input_grad[1]:
            into_bias = grad.reshape(-1, grad.shape[-1]).sum(0, dtype=bias_dtype)
        return into_x, into_bias, None, None, None


def config_of(record: Int8Weights | Int4Weights) -> Any:
    """torchao's own config of a record."""
    torchao: Any = importlib.import_module("torchao.quantization")
    if record.bits == 8:
        granularity = torchao.PerGroup(record.group) if record.group else torchao.PerRow()
        return torchao.Int8WeightOnlyConfig(granularity=granularity)
    granularity = torchao.PerGroup(record.group) if record.group else torchao.PerAxis(0)
    return torchao.IntxWeightOnlyConfig(weight_dtype=_INT4, granularity=granularity)


def packed(codes: torch.Tensor) -> torch.Tensor:
    """Codes from -8 to 7 (int8), two in a byte: uint8 `[(n + 1) // 2]`, the first in the low bits."""
    flat = codes.reshape(-1)
    if flat.numel() % 2:
        flat = F.pad(flat, (0, 1))
    low, high = flat.view(torch.uint8).view(-1, 2).unbind(1)
    return (low & 15) | (high << 4)


def unpacked(codes: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The codes that `packed` took, as int8 of a shape."""
    pairs = torch.stack((codes & 15, codes >> 4), dim=1).view(-1)[: torch.Size(shape).numel()]
    return ((pairs ^ 8).view(torch.int8) - 8).view(shape)
