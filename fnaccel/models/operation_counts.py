"""Floating-point operations that the table of torch lacks, and the kinds of collectives.

The table lacks attention on CPUs, and grouped products. torch lets libraries register formulas:
`torch.utils.flop_counter.register_flop_formula`.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

Shape = Sequence[int]

COLLECTIVE_KINDS = {
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "allgather": "all_gather",
    "allgather_base": "all_gather",
    "allgather_coalesced": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "recv_any_source": "recv",
    "monitored_barrier": "barrier",
}
"""By the names of operators of `c10d` and `_c10d_functional`, without the underscores around them."""


def operation_counts() -> dict[Any, Callable[..., int]]:
    """torch's table of formulas by operation, with these added to it once. `FlopCounterMode` reads it."""
    flop_counter: Any = importlib.import_module("torch.utils.flop_counter")  # imports triton if there is one
    formulas: dict[str, Callable[..., int]] = {
        "_scaled_dot_product_flash_attention_for_cpu": _attention,
        "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
        "_scaled_dot_product_fused_attention_overrideable": _attention,
        "_scaled_dot_product_fused_attention_overrideable_backward": _attention_backward,
        "_grouped_mm": _grouped_product,
    }
    for name, formula in formulas.items():
        operation = getattr(torch.ops.aten, name, None)
        if operation is not None and operation not in flop_counter.flop_registry:
            flop_counter.register_flop_formula(operation)(formula)
    return flop_counter.flop_registry


def _attention(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    """Scores, and the products with values. As in torch's table, a causal mask saves nothing."""
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _attention_backward(_: Shape, query: Shape, key: Shape, value: Shape, *__: Any, **___: Any) -> int:
    """Scores again, and the gradients of scores, queries, keys and values."""
    return 2 * math.prod(query[:-1]) * key[-2] * (3 * query[-1] + 2 * value[-1])


def _grouped_product(left: Shape, right: Shape, *_: Any, **__: Any) -> int:
    """Every row of the tokens meets one matrix of the group."""
    groups = left[0] if len(left) == len(right) == 3 else 1
    return 2 * groups * left[-2] * left[-1] * right[-1]
