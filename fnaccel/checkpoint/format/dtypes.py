"""The dtypes a checkpoint may hold: torch's, under their own name and the one safetensors gives them."""

from __future__ import annotations

import torch

CODES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
"""The name of a dtype in a safetensors header."""


def name_of(dtype: torch.dtype) -> str:
    """`torch.float32` -> `"float32"`."""
    return str(dtype).removeprefix("torch.")


NAMES: dict[str, torch.dtype] = {name_of(dtype): dtype for dtype in CODES}
"""The dtype of a name in a manifest."""
