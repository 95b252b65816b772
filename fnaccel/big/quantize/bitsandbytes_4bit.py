"""The 4-bit layer: codes, scales and maps of bitsandbytes' `Linear4bit` in buffers.

bitsandbytes keeps them in attributes of a parameter, which no state would save. It also rewrites the codes
on CPUs in evaluation, and the bias in each forward. This layer does neither.
"""

from __future__ import annotations

import json
import math
from typing import Any

import bitsandbytes
import torch

from fnaccel.big.quantize.layer import LinearLayer, QuantizedLayer, Shape
from fnaccel.big.quantize.records import Fp4, Nf4
from fnaccel.checkpoint.format.dtypes import NAMES, name_of
from fnaccel.errors import CheckpointError

_bnb: Any = bitsandbytes
_Linear4bit: Any = _bnb.nn.Linear4bit
_QuantState: Any = _bnb.functional.QuantState
_NESTED_BLOCK = 256
_NAMES = {
    "codes": "weight",
    "absmax": "weight.absmax",
    "quant_map": "weight.quant_map",
    "nested_absmax": "weight.nested_absmax",
    "nested_quant_map": "weight.nested_quant_map",
}
_SUFFIXES = {suffix: name for name, suffix in _NAMES.items()}


class FourBitLinear(QuantizedLayer, _Linear4bit):
    """A linear layer of nf4 or fp4 codes. peft and transformers take it for bitsandbytes' own layer.

    Buffers: `codes` `[(n + 1) // 2, 1]` uint8 for n weights, `absmax` `[blocks]` (fp32, or uint8 codes if
    doubly quantized), `quant_map` `[16]` fp32. If doubly quantized, also `nested_absmax` `[blocks / 256]`
    fp32, `nested_quant_map` `[256]` fp32 and `offset` `[]` fp32.
    """

    def __init__(self, layer: LinearLayer, record: Nf4 | Fp4) -> None:
        super().__init__(layer, record)
        # names that peft and bitsandbytes read
        self.compute_dtype = record.compute
        self.compute_type_is_set = True
        self.quant_storage = torch.uint8
        self.support_avx512bf16_for_cpu = False
        weights = self.out_features * self.in_features
        blocks = math.ceil(weights / record.block)
        self.declare("codes", ((weights + 1) // 2, 1), torch.uint8)
        self.declare("absmax", (blocks,), torch.uint8 if record.double else torch.float32)
        self.declare("quant_map", (16,), torch.float32)
        if record.double:
            self.declare("nested_absmax", (math.ceil(blocks / _NESTED_BLOCK),), torch.float32)
            self.declare("nested_quant_map", (256,), torch.float32)
            self.declare("offset", (), torch.float32)
        if layer.weight.is_meta:
            return
        self.fill("weight", layer.weight, layer.weight.device)

    @property
    def quant_state(self) -> Any:
        """bitsandbytes' view of the buffers. None while they are empty."""
        buffers: Any = dict(self.named_buffers(recurse=False))
        if buffers["codes"].is_meta:
            return None
        nested = None
        if self.record.double:
            nested = _QuantState(
                absmax=buffers["nested_absmax"],
                code=buffers["nested_quant_map"],
                blocksize=_NESTED_BLOCK,
                dtype=torch.float32,
            )
        return _QuantState(
            absmax=buffers["absmax"],
            shape=torch.Size((self.out_features, self.in_features)),
            code=buffers["quant_map"],
            blocksize=self.record.block,
            quant_type=self.record.kind,
            dtype=self.weight_dtype,
            offset=buffers.get("offset"),
            state2=nested,
        )

    @property
    def weight(self) -> Any:
        """The codes as bitsandbytes' parameter, which peft reads. It shares their memory."""
        return _bnb.nn.Params4bit(
            self.get_buffer("codes"),
            requires_grad=False,
            quant_state=self.quant_state,
            blocksize=self.record.block,
            compress_statistics=self.record.double,
            quant_type=self.record.kind,
            bnb_quantized=True,
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":  # peft merges an adapter so
            self._take(value.data, value.quant_state)
        elif name != "quant_state":
            super().__setattr__(name, value)

    def encode(self, weight: torch.Tensor) -> None:
        """Quantize a weight `[out_features, in_features]`."""
        record = self.record
        codes, state = _bnb.functional.quantize_4bit(
            weight, blocksize=record.block, compress_statistics=record.double, quant_type=record.kind
        )
        self._take(codes, state)

    def _take(self, codes: torch.Tensor, state: Any) -> None:
        self.set_value("codes", codes.reshape(-1, 1))
        self.set_value("absmax", state.absmax)
        self.set_value("quant_map", state.code.clone())  # bitsandbytes shares one tensor between all layers
        if self.record.double:
            self.set_value("nested_absmax", state.state2.absmax)
            self.set_value("nested_quant_map", state.state2.code)
            self.set_value("offset", state.offset)

    def full_weight(self) -> torch.Tensor:
        """The weight in full width, `[out_features, in_features]` of `weight_dtype`."""
        return _bnb.functional.dequantize_4bit(self.get_buffer("codes"), self.quant_state)

    def _packed(self) -> str:
        return f"weight.quant_state.bitsandbytes__{self.record.kind}"

    def stored_shapes(self) -> dict[str, tuple[Shape, torch.dtype]]:
        """Shapes and dtypes by bitsandbytes' own names. The JSON text has no fixed length."""
        buffers = dict(self.named_buffers(recurse=False))
        shapes: dict[str, tuple[Shape, torch.dtype]] = {
            suffix: (tuple(buffers[name].shape), buffers[name].dtype)
            for name, suffix in _NAMES.items()
            if name in buffers
        }
        return shapes | {self._packed(): (None, torch.uint8)}

    def stored(self) -> dict[str, torch.Tensor]:
        """The tensors by bitsandbytes' own names, the numbers as JSON in a tensor of bytes."""
        buffers = dict(self.named_buffers(recurse=False))
        numbers: dict[str, Any] = {
            "quant_type": self.record.kind,
            "blocksize": self.record.block,
            "dtype": name_of(self.weight_dtype),
            "shape": [self.out_features, self.in_features],
        }
        if self.record.double:
            numbers |= {
                "nested_blocksize": _NESTED_BLOCK,
                "nested_dtype": "float32",
                "nested_offset": float(buffers["offset"]),
            }
        text = torch.frombuffer(bytearray(json.dumps(numbers).encode()), dtype=torch.uint8)
        tensors = {suffix: buffers[name] for name, suffix in _NAMES.items() if name in buffers}
        return tensors | {self._packed(): text}

    def put(self, suffix: str, tensor: torch.Tensor) -> None:
        """Take one tensor of a quantized file."""
        if suffix in _SUFFIXES:
            self.set_value(_SUFFIXES[suffix], tensor)
            return
        numbers = json.loads(bytes(tensor.tolist()))
        expected = {
            "quant_type": self.record.kind,
            "blocksize": self.record.block,
            "shape": [self.out_features, self.in_features],
            "nested_blocksize": _NESTED_BLOCK if self.record.double else None,
        }
        for name, value in expected.items():
            if numbers.get(name) != value:
                raise CheckpointError(
                    f"{name} is {numbers.get(name)}, and this layer has {value}",
                    where=f"a quantized checkpoint, read with {self.record}",
                    fix="quantize with the record of the checkpoint: fa.big.quantization_of(folder)",
                )
        self.weight_dtype = NAMES[numbers["dtype"]]
        if self.record.double:
            offset = torch.tensor(numbers["nested_offset"], dtype=torch.float32, device=tensor.device)
            self.set_value("offset", offset)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., in_features]` to `[..., out_features]`, in the dtype of the input."""
        compute = self.record.compute or x.dtype
        bias = None if self.bias is None else self.bias.to(compute)
        codes, state = self.get_buffer("codes"), self.quant_state
        return _bnb.matmul_4bit(x.to(compute), codes, bias=bias, quant_state=state).to(x.dtype)
