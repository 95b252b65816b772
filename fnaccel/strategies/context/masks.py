"""Attention masks in a cut sequence: brought to the keys of the whole sequence, or refused."""

from __future__ import annotations

import torch

from fnaccel.errors import CapabilityError
from fnaccel.strategies.context.split import Split


def over_all_keys(mask: torch.Tensor, rows: int, keys: int, split: Split) -> torch.Tensor:
    """A mask over the keys of the whole sequence, in their order.

    Args:
        mask: bool, or floating point to be added. Dims: `[..., rows or 1, keys or 1]`. Keys are those of this
            rank if the mask is the same for all rows, or those of the whole sequence. Rows are those of this
            rank, or of the whole sequence if keys are.
        rows, keys: this rank's rows and keys.
        split: the ranks that share the sequence.

    Raises:
        CapabilityError: the mask is this rank's rows by this rank's keys, or of another size.
    """
    whole = keys * split.chunks.ranks
    height, width = (mask.shape[-2] if mask.dim() > 1 else 1), mask.shape[-1]
    if width == 1 and height in (1, rows):
        return mask
    if width == keys and height == 1:
        return _gathered(mask, split)
    if width == whole and height in (1, rows):
        return mask
    if width == whole and height == rows * split.chunks.ranks:
        return split.chunks.cut(mask, -2)
    raise CapabilityError(
        f"an attention mask of shape {list(mask.shape)} does not say which tokens of other ranks are "
        f"visible: this rank has {rows} rows of {whole} keys",
        where="scaled_dot_product_attention under fa.context",
        fix=f"is_causal=True for a causal mask; or a mask of {rows} rows and {whole} keys, whose keys are in "
        f"the order of the sequence; or one over keys alone, [batch, 1, 1, {whole}]",
    )


def _gathered(mask: torch.Tensor, split: Split) -> torch.Tensor:
    if mask.dtype is not torch.bool:
        return split.gather(mask, -1)
    return split.gather(mask.to(torch.uint8), -1).bool()
