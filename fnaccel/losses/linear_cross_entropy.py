"""`linear_cross_entropy`: cross entropy of a linear head, whose logits are there for some rows at a time.

Logits of all rows, and their gradient, are the largest tensors of a language model's step. Here the forward
goes through the rows in chunks, and computes the gradients of a chunk while its logits are there (Hsu et al.
2024, "Liger Kernel", section 3.2). The backward multiplies them by the gradient of the sum.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn

from fnaccel.errors import ArgumentError, require, require_counts
from fnaccel.losses.logits import losses_of
from fnaccel.losses.targets import Targets

_WHERE = "fa.losses.linear_cross_entropy"
Reduction = Literal["sum", "mean", "none"]


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor | nn.Module,
    labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    reduction: Reduction = "sum",
    rows: int | None = None,
) -> torch.Tensor:
    """Cross entropy of `F.linear(hidden, weight, bias)`, with the logits of some rows at a time.

    It takes one derivative in one pass over the rows, also under `torch.compile`. It can be differentiated
    again, and runs inside of `torch.func`'s `grad` and `vmap`. Logits are in fp32 where a row is summed up.

    Args:
        hidden: `[..., width]`, what the head gets.
        weight: `[vocabulary, width]`, or the head itself, a linear module. Where ranks have different columns
            of the vocabulary (`fa.tensor`), give the head itself.
        labels: int64, `[...]`.
        bias: `[vocabulary]`, beside a weight.
        ignore_index: rows with this label have no loss.
        label_smoothing: the part of a target that is spread over the vocabulary (Szegedy et al. 2016).
        z_loss: times the square of a row's log-sum-exp, which is added (Chowdhery et al. 2022, section 5).
        soft_cap: logits are `soft_cap * tanh(logits / soft_cap)` (Gemma 2).
        reduction: `"sum"`; `"mean"` over rows that are not ignored; or `"none"`, the loss of each row, which
            is its label's log-probability with the other sign. It computes logits once more in the backward.
        rows: how many rows have logits at a time. By default 128 on CPUs, and 1,024 elsewhere.

    Returns:
        A number, or `[...]`: fp32, or fp64 for hidden states in fp64.

    Raises:
        ArgumentError: labels have another shape than the rows, or no such reduction.
        CapabilityError: a head that is no `nn.Linear`, or whose forward something has replaced.

    Example:
        >>> hidden, head, labels = torch.randn(2, 5, 8), nn.Linear(8, 50), torch.randint(50, (2, 5))
        >>> loss = fa.losses.linear_cross_entropy(hidden, head, labels) / labels.numel()
    """
    require_counts(_WHERE, rows=rows)
    require(soft_cap is None or soft_cap > 0, f"soft_cap={soft_cap!r}", _WHERE, "more than 0, or None")
    require(
        reduction in ("sum", "mean", "none"), f"reduction={reduction!r}", _WHERE, '"sum", "mean" or "none"'
    )
    if labels.shape != hidden.shape[:-1]:
        raise ArgumentError(
            f"labels have the shape {list(labels.shape)}, for hidden states of {list(hidden.shape)}",
            where=_WHERE,
            fix="one label for each row of hidden states, shifted by one for a language model",
        )
    targets = Targets(labels, ignore_index, label_smoothing, z_loss, soft_cap, reduction, rows)
    if not isinstance(weight, nn.Module):
        return targets.losses(hidden, weight, bias)
    require(
        bias is None,
        "a bias beside a head, which has its own",
        _WHERE,
        "the head alone, or its weight and bias",
    )
    return losses_of(weight, hidden, targets)


def log_probabilities(
    hidden: torch.Tensor,
    weight: torch.Tensor | nn.Module,
    labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    ignore_index: int = -100,
    soft_cap: float | None = None,
    rows: int | None = None,
) -> torch.Tensor:
    """The log-probability of each label, as preferences (DPO) and policies (GRPO) need it, in fp32.

    It is `linear_cross_entropy` of each row, with the other sign: whole logits are never there.

    Args:
        hidden, weight, labels, bias, ignore_index, soft_cap, rows: as there. Ignored rows have 0.

    Returns:
        `[...]`, the shape of the labels.

    Raises:
        ArgumentError, CapabilityError: as there.

    Example:
        >>> hidden, head, tokens = torch.randn(2, 5, 8), nn.Linear(8, 50), torch.randint(50, (2, 5))
        >>> of_rows = fa.losses.log_probabilities(hidden, head, tokens).sum(1)
    """
    options: Any = {"ignore_index": ignore_index, "soft_cap": soft_cap, "rows": rows}
    return -linear_cross_entropy(hidden, weight, labels, bias, reduction="none", **options)
