"""Context parallelism by gathering: each rank attends from its own rows to the keys of all ranks.

One all-gather of keys and values in the forward, one reduce-scatter of their gradients in the backward
(Llama 3, Dubey et al. 2024). Each rank holds the keys and values of the whole sequence for one layer.
"""

from __future__ import annotations

import torch

from fnaccel.strategies.context.kernels import scaled_dot_product
from fnaccel.strategies.context.split import Split


def gather_attention(
    split: Split,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    dropout: float,
    scale: float | None,
    gqa: bool,
) -> torch.Tensor:
    """Attention of this rank's rows, with keys and values gathered.

    Args:
        split: the ranks that share the sequence.
        query: `[..., rows, width]`.
        key, value: this rank's, `[..., length, width]`.
        mask: None, or as torch takes it, over the keys of the whole sequence.
        causal: whether a token attends to no token after it.
        dropout, scale, gqa: as torch takes them.
    """
    width, rows = key.shape[-1], query.shape[-2]
    both = split.gather(torch.cat([key, value], dim=-1), -2)
    key, value = both[..., :width], both[..., width:]
    if not causal:
        return scaled_dot_product(query, key, value, mask, dropout, False, scale, gqa)
    outputs: list[torch.Tensor] = []
    start = 0
    for first, size in split.chunks.spans(rows):
        # no chunk attends to a key behind its last row: those are not computed at all
        end = first + size
        visible = None
        if first:
            at = torch.arange(end, device=query.device)
            visible = at[first:, None] >= at[None, :]
        outputs.append(
            scaled_dot_product(
                query.narrow(-2, start, size), key[..., :end, :], value[..., :end, :],
                visible, dropout, visible is None, scale, gqa,
            )
        )  # fmt: skip
        start += size
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-2)
