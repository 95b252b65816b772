"""The settings of torch that generated code depends on, and that a new process has to take over. (2.13)"""

from __future__ import annotations

from typing import Any

import torch
from torch._functorch import config as autograd
from torch._inductor import config as inductor


def settings() -> tuple[Any, ...]:
    """Those of this process."""
    return (
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        inductor.save_config(),
        autograd.save_config(),
    )


def take_over(found: tuple[Any, ...]) -> None:
    """Use those of another process."""
    threads, precision, dtype, deterministic, kernels, graphs = found
    torch.set_num_threads(threads)
    if torch.get_float32_matmul_precision() != precision:  # to set what is set already makes another key
        torch.set_float32_matmul_precision(precision)
    torch.set_default_dtype(dtype)
    torch.use_deterministic_algorithms(deterministic)
    inductor.load_config(kernels)
    autograd.load_config(graphs)
