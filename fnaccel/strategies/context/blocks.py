"""Attention to some of the keys, with the log-sum-exp that merges it with attention to the others.

The softmax over all keys is a weighted sum of softmaxes over blocks of them, weighted by their sums of
exponentials (Milakov and Gimelshein 2018; Dao et al. 2022). torch's flash kernels compute a block if there is
no mask. Else plain operations do, some rows at a time.
"""

from __future__ import annotations

import math
from typing import Any

import torch

_ROWS = 512  # rows at a time: the scores of a block are never all in memory
_HALF = (torch.float16, torch.bfloat16)


def block_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to one block of keys, in fp32 (fp64 for fp64), and the log of the sum of exponentials.

    Args:
        query: `[..., heads, rows, width]`.
        key, value: `[..., heads, keys, width]`, with the heads of `query`.
        mask: None, or as torch takes it, over these rows and keys.
        causal: whether row i attends to keys 0 to i. Rows and keys are the same tokens then.
        scale: of the scores. None is 1 / sqrt(width).

    Returns:
        The output, `[..., heads, rows, width]`, and the log-sum-exp, `[..., heads, rows]`. A row without a
        visible key is 0, and its log-sum-exp is -inf.
    """
    flash = _flash(query, value, mask)
    if flash == "cpu":
        out, total = _kernel("flash_attention_for_cpu")(query, key, value, 0.0, causal, scale=scale)
    elif flash == "cuda":
        out, total = _kernel("flash_attention")(query, key, value, 0.0, causal, False, scale=scale)[:2]
    else:
        tiles = [
            _plain(rows, key, value, _rows_of(mask, start), causal, start, scale)
            for start, rows in _tiles(query)
        ]
        out, total = (
            torch.cat(parts, dim) for parts, dim in zip(zip(*tiles, strict=True), (-2, -1), strict=True)
        )
    wide = _wide(query)
    return out.to(wide), total.to(wide)


def merged(
    first: tuple[torch.Tensor, torch.Tensor] | None, second: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to two blocks of keys, from attention to each."""
    if first is None:
        return second
    total = torch.logaddexp(first[1], second[1])
    # a row that sees no key has -inf: its weights are 0, not NaN
    weights = [torch.exp(part[1] - total).nan_to_num(0.0).unsqueeze(-1) for part in (first, second)]
    return first[0] * weights[0] + second[0] * weights[1], total


def block_gradients(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    total: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """This block's part of the gradients of query, key and value.

    Args:
        grad: the gradient of the output.
        query, key, value, mask, causal, scale: as for `block_attention`.
        out, total: the output over all blocks, in the dtype of `query`, and its log-sum-exp.
    """
    flash = _flash(query, value, mask)
    if flash == "cpu":
        return _kernel("flash_attention_for_cpu_backward")(
            grad, query, key, value, out, total.contiguous(), 0.0, causal, scale=scale
        )
    if flash == "cuda":
        # without dropout no random numbers are drawn
        state = torch.empty(2, dtype=torch.uint64, device=query.device)
        return _kernel("flash_attention_backward")(
            grad, query, key, value, out, total.contiguous(), None, None, query.shape[-2], key.shape[-2],
            0.0, causal, state, state, scale=scale,
        )  # fmt: skip
    wide = _wide(query)
    grad, query, key, value, out = (tensor.to(wide) for tensor in (grad, query, key, value, out))
    of_query: list[torch.Tensor] = []
    of_key, of_value = torch.zeros_like(key), torch.zeros_like(value)
    factor = _factor(query, scale)
    for start, rows in _tiles(query):
        stop = start + rows.shape[-2]
        scores = _scores(rows, key, _rows_of(mask, start), causal, start, scale)
        sums = total[..., start:stop, None]
        chances = torch.exp(scores - torch.where(sums == -math.inf, 0.0, sums))
        part = grad[..., start:stop, :]
        of_value += chances.transpose(-2, -1) @ part
        inner = (part * out[..., start:stop, :]).sum(-1, keepdim=True)
        of_scores = chances * (part @ value.transpose(-2, -1) - inner) * factor
        of_query.append(of_scores @ key)
        of_key += of_scores.transpose(-2, -1) @ rows
    return torch.cat(of_query, -2), of_key, of_value


def _kernel(name: str) -> Any:
    """One of torch's kernels that return the log-sum-exp. (2.13. Those of GPUs were not run)"""
    return getattr(torch.ops.aten, f"_scaled_dot_product_{name}").default


def _flash(query: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> str:
    """The kind of device whose flash kernel takes a block, or ""."""
    if mask is not None or query.dim() != 4 or query.shape[-1] != value.shape[-1]:
        return ""
    device = query.device.type
    if device == "cpu" or (device == "cuda" and query.dtype in _HALF and query.shape[-1] % 8 == 0):
        return device
    return ""


def _plain(
    rows: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    start: int,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = _scores(rows, key, mask, causal, start, scale)
    total = torch.logsumexp(scores, dim=-1)
    chances = torch.exp(scores - torch.where(total == -math.inf, 0.0, total).unsqueeze(-1))
    return chances @ value.to(scores.dtype), total


def _scores(
    rows: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    start: int,
    scale: float | None,
) -> torch.Tensor:
    wide = _wide(rows)
    scores = rows.to(wide) @ key.to(wide).transpose(-2, -1) * _factor(rows, scale)
    if causal:
        at = torch.arange(key.shape[-2], device=key.device)
        hidden = at[None, :] > at[start : start + rows.shape[-2], None]
        scores = scores.masked_fill(hidden, -math.inf)
    if mask is not None and mask.dtype is torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    elif mask is not None:
        scores = scores + mask.to(wide)
    return scores


def _tiles(query: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    return [(index * _ROWS, rows) for index, rows in enumerate(query.split(_ROWS, dim=-2))]


def _rows_of(mask: torch.Tensor | None, start: int) -> torch.Tensor | None:
    if mask is None or mask.dim() < 2 or mask.shape[-2] == 1:
        return mask
    return mask[..., start : start + _ROWS, :]


def _factor(query: torch.Tensor, scale: float | None) -> float:
    return 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale


def _wide(tensor: torch.Tensor) -> Any:
    return torch.promote_types(tensor.dtype, torch.float32)
