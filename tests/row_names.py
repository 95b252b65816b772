"""Names of the rows of a parametrized test: what a value is, where pytest would number it (`options0`)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from typing import Any

import attrs
import numpy as np
import torch

LONGEST = 90
"""Characters of a name: pytest numbers longer ones. Two rows of equal names need `pytest.param(..., id=...)`."""


def row_name(value: Any) -> str | None:
    """The name of a value, or None if pytest has one for it, as for numbers, strings, classes and functions."""
    plain = value is None or type(value) in (bytes, int, float, complex, bool)
    if plain or (hasattr(value, "__name__") and not _is_lambda(value)):
        return None
    name = ascii(value if isinstance(value, str) else _short(value, 4))[1:-1]
    return name if len(name) <= LONGEST else f"{name[:55]}..{name[-30:]}"


def _is_lambda(value: Any) -> bool:
    return getattr(value, "__name__", None) == "<lambda>"


def _short(value: Any, depth: int) -> str:
    """The text of a value, `depth` levels deep."""
    if depth == 0:
        return "..."
    if isinstance(value, Mapping):
        pairs = [f"{_short(key, depth)}={_short(entry, depth - 1)}" for key, entry in value.items()]
        return ",".join(pairs) or "nothing"
    if isinstance(value, (list, tuple, Set)):
        entries = sorted(value, key=str) if isinstance(value, Set) else value
        return ",".join(_short(entry, depth - 1) for entry in entries) or "nothing"
    if isinstance(value, torch.Tensor):
        plain = value.layout == torch.strided and value.device.type == "cpu" and value.numel() <= 8
        shown = value.tolist() if plain else f"of shape {list(value.shape)}"
        return f"{_short(value.dtype, depth)} {shown}"
    if isinstance(value, (np.generic, np.ndarray)):
        return f"{value.dtype} {value}"
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if _is_lambda(value):  # the names and numbers in its code
        code = value.__code__
        numbers = [str(entry) for entry in code.co_consts if isinstance(entry, (str, int, float))]
        return " ".join((*code.co_names, *numbers)) or f"of {' '.join(code.co_varnames)}"
    if attrs.has(type(value)) and type(value).__str__ is object.__str__:
        return f"{type(value).__name__}({_options(value, depth)})"
    return getattr(value, "__name__", None) or re.sub(r" at 0x[0-9a-f]+", "", str(value))


def _options(value: Any, depth: int) -> str:
    """The fields of a record that differ from their default."""
    pairs = [
        (field.name, getattr(value, field.name, None), field.default)
        for field in attrs.fields(type(value))
        if field.init
    ]
    return ",".join(
        f"{name}={_short(entry, depth - 1)}"
        for name, entry, usual in pairs
        if entry is not None and entry is not usual
    )
