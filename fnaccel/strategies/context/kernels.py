"""torch's attention kernels, called so that no other interception sees the call.

Models call `F.scaled_dot_product_attention`, which `attention.py` replaces. The operator below it is not
replaced, so a graph that `torch.compile(backend="eager")` traced may run under the replaced name.
"""

from __future__ import annotations

import torch


def scaled_dot_product(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
    gqa: bool,
) -> torch.Tensor:
    """Attention on this rank alone. Arguments as torch's function of the long name takes them."""
    return torch.ops.aten.scaled_dot_product_attention(
        query, key, value, mask, dropout, causal, scale=scale, enable_gqa=gqa
    )
