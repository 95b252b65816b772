"""The settings of torch that generated code depends on, and that a new process has to take over. (2.13)"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch

_CONFIGS = ("torch._inductor.config", "torch._functorch.config", "torch._dynamo.config")


def settings() -> tuple[Any, ...]:
    """Those of this process. Configurations that nobody has imported, and so changed, are left out."""
    imported = [name for name in _CONFIGS if name in sys.modules]
    return (
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        {name: sys.modules[name].save_config() for name in imported},
    )


def take_over(found: tuple[Any, ...]) -> None:
    """Use those of another process."""
    threads, precision, dtype, deterministic, configs = found
    torch.set_num_threads(threads)
    if torch.get_float32_matmul_precision() != precision:  # to set what is set already makes another key
        torch.set_float32_matmul_precision(precision)
    torch.set_default_dtype(dtype)
    torch.use_deterministic_algorithms(deterministic)
    for name, values in configs.items():
        importlib.import_module(name).load_config(values)
