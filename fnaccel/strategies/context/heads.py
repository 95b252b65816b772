"""Context parallelism by heads: all-to-all exchanges turn parts of all heads into all tokens of some heads.

Each rank attends over whole sequences with its share of the heads (DeepSpeed Ulysses, Jacobs et al. 2023):
one exchange before attention, and one after it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from fnaccel import _torch
from fnaccel.errors import CapabilityError
from fnaccel.strategies.context.kernels import scaled_dot_product
from fnaccel.strategies.context.split import Split


def heads_attention(
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
    """Attention of this rank's heads over all tokens. Arguments as for `gather_attention`.

    Raises:
        CapabilityError: the ranks can't share the heads, or rows are other tokens than keys.
    """
    ranks = split.chunks.ranks
    heads = query.shape[-3] if query.dim() > 2 else 1
    if heads % ranks:
        raise CapabilityError(
            f"{ranks} ranks can't share {heads} heads of attention",
            where='fa.context(method="heads")',
            fix=f"a number of heads that {ranks} divides, or method='gather' or 'ring'",
        )
    if query.shape[-2] != key.shape[-2]:
        raise CapabilityError(
            f"{query.shape[-2]} rows attend to {key.shape[-2]} keys of each rank",
            where='fa.context(method="heads")',
            fix="fa.context(method='gather') takes rows that are other tokens than the keys",
        )
    if key.shape[-3] % ranks:  # fewer heads of keys than ranks: repeated, so that each rank has its own
        key, value = (tensor.repeat_interleave(heads // key.shape[-3], dim=-3) for tensor in (key, value))
    if query.shape[-1] == value.shape[-1]:
        sizes = [tensor.shape[-3] // ranks for tensor in (query, key, value)]
        grouped = [tensor.unflatten(-3, (ranks, -1)) for tensor in (query, key, value)]
        query, key, value = _all_tokens(torch.cat(grouped, dim=-3), split).split(sizes, dim=-3)
    else:
        query, key, value = (
            _all_tokens(tensor.unflatten(-3, (ranks, -1)), split) for tensor in (query, key, value)
        )
    mask = None if mask is None else _of_these_heads(mask, split, query.shape[-2] // ranks, heads // ranks)
    out = scaled_dot_product(query, key, value, mask, dropout, causal, scale, gqa)
    return _all_heads(out, split)


def _all_tokens(grouped: torch.Tensor, split: Split) -> torch.Tensor:
    """`[..., ranks, heads, part, width]` of this rank to `[..., heads, tokens, width]` of its heads."""
    received = _Exchanged.apply(grouped.movedim(-4, 0).contiguous(), split.group)
    # ranks and their parts first: together they are the tokens
    by_rank = received.movedim(-2, 1).flatten(0, 1)
    return split.chunks.in_order(by_rank).movedim(0, -2)


def _all_heads(out: torch.Tensor, split: Split) -> torch.Tensor:
    """The inverse of `_all_tokens`, with all heads in one dimension."""
    by_rank = split.chunks.by_rank(out.movedim(-2, 0)).unflatten(0, (split.chunks.ranks, -1))
    received = _Exchanged.apply(by_rank.movedim(1, -2).contiguous(), split.group)
    return received.movedim(0, -4).flatten(-4, -3)


def _of_these_heads(mask: torch.Tensor, split: Split, rows: int, heads: int) -> torch.Tensor:
    """The mask of all rows, for the heads of this rank."""
    if mask.dim() > 1 and mask.shape[-2] == rows:
        numbers = mask.to(torch.uint8) if mask.dtype is torch.bool else mask
        mask = split.gather(numbers, -2).to(mask.dtype)
    if mask.dim() > 2 and mask.shape[-3] > 1:
        mask = mask.narrow(-3, split.chunks.rank * heads, heads)
    return mask


class _Exchanged(torch.autograd.Function):
    """Part i of dim 0 goes to rank i. The gradient goes back the same way."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _torch.all_to_all_in_graph(parts, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _torch.all_to_all_in_graph(grads[0].contiguous(), ctx.group), None
