"""The 8-bit layer: codes and scales of bitsandbytes' `Linear8bitLt` in buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import bitsandbytes
import torch

from fnaccel.big import _torch
from fnaccel.big.quantize.layer import LinearLayer, QuantizedLayer, Shape
from fnaccel.big.quantize.records import Int8
from fnaccel.errors import CheckpointError

_bnb: Any = bitsandbytes
_Linear8bit: Any = _bnb.nn.Linear8bitLt


class _Int8Weight(_bnb.nn.Int8Params):
    """bitsandbytes' parameter, which `nn.TransformerEncoder` does not take for a weight in full width."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _torch.without_overrides(func, args, kwargs or {})


class Int8Linear(QuantizedLayer, _Linear8bit):
    """A linear layer of int8 codes. peft and transformers take it for bitsandbytes' own layer.

    Buffers: `codes` `[out_features, in_features]` int8 and `scales` `[out_features]` fp32.
    """

    def __init__(self, layer: LinearLayer, record: Int8) -> None:
        super().__init__(layer, record)
        self.index = None  # peft reads it
        self.declare("codes", (self.out_features, self.in_features), torch.int8)
        self.declare("scales", (self.out_features,), torch.float32)
        if not layer.weight.is_meta:
            self.fill("weight", layer.weight, layer.weight.device)

    @property
    def state(self) -> Any:
        """bitsandbytes' view of the buffers."""
        state: Any = _bnb.MatmulLtState()
        state.threshold = self.record.threshold
        state.has_fp16_weights = False
        state.use_pool = self.record.threshold > 0
        state.is_training = self.training
        if not self.missing():
            state.CB, state.SCB = self.get_buffer("codes"), self.get_buffer("scales")
        return state

    @property
    def weight(self) -> Any:
        """The codes as bitsandbytes' parameter, which peft reads. It shares their memory."""
        codes, scales = self.get_buffer("codes"), self.get_buffer("scales")
        return _Int8Weight(codes, requires_grad=False, has_fp16_weights=False, CB=codes, SCB=scales)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":  # peft merges an adapter so
            self.set_value("codes", value.data)
            self.set_value("scales", value.SCB)
        elif name != "state":
            super().__setattr__(name, value)

    def encode(self, weight: torch.Tensor) -> None:
        """Quantize a weight `[out_features, in_features]`, by way of fp16, as bitsandbytes does."""
        codes, scales, _ = _bnb.functional.int8_vectorwise_quant(weight.to(torch.float16))
        self.set_value("codes", codes)
        self.set_value("scales", scales)

    def full_weight(self) -> torch.Tensor:
        """The weight in full width, `[out_features, in_features]` of `weight_dtype`."""
        codes, scales = self.get_buffer("codes"), self.get_buffer("scales")
        return _bnb.functional.int8_vectorwise_dequant(codes, scales).to(self.weight_dtype)

    def stored_shapes(self) -> dict[str, tuple[Shape, torch.dtype]]:
        """Shapes and dtypes by bitsandbytes' own names."""
        return {
            "weight": ((self.out_features, self.in_features), torch.int8),
            "SCB": ((self.out_features,), torch.float32),
            "weight_format": ((), torch.uint8),
        }

    def stored(self) -> dict[str, torch.Tensor]:
        """The tensors by bitsandbytes' own names. Format 0 is row-major, the only one."""
        form = torch.zeros((), dtype=torch.uint8)
        return {"weight": self.get_buffer("codes"), "SCB": self.get_buffer("scales"), "weight_format": form}

    def put(self, suffix: str, tensor: torch.Tensor) -> None:
        """Take one tensor of a quantized file."""
        if suffix == "weight":
            self.set_value("codes", tensor)
        elif suffix == "SCB":
            self.set_value("scales", tensor)
        elif int(tensor) != 0:
            raise CheckpointError(
                f"weight_format is {int(tensor)}, a layout of old GPUs that bitsandbytes no longer reads",
                where="a quantized checkpoint",
                fix="quantize the full-width weights again",
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., in_features]` to `[..., out_features]`, in the dtype of the input."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return _bnb.matmul(x, self.get_buffer("codes"), bias=bias, state=self.state)
