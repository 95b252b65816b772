"""What a loss or a metric function returns, and how parts of it combine.

A loss is a total and its weight, so that micro-batches and ranks of any size combine exactly.
The three classes are frozen dataclasses, not attrs: a loss builds them inside compiled code.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch

from fnaccel.errors import LossError


@dataclass(frozen=True)
class Mean:
    """A sum over examples and how many there were; combines to `sum(totals) / sum(weights)`.

    Args:
        total: 0-d tensor, the sum over this micro-batch's examples (or tokens).
        weight: how many, as an int, a float or a 0-d tensor.
        aux: any pytree to report beside the loss; its leaves combine as their type says
            (`Mean`, `Sum`, `Concat`; a bare tensor is averaged).

    Example: `fa.Mean(F.cross_entropy(logits, y, reduction="sum"), weight=y.numel())`.
    """

    total: Any
    weight: Any
    aux: Any = None


@dataclass(frozen=True)
class Sum:
    """A value that adds up over micro-batches and ranks, such as a count of errors."""

    value: Any


@dataclass(frozen=True)
class Concat:
    """Rows that are put together in the order of the samples.

    Args:
        value: a tensor of shape `[rows, ...]`, or a list with one object for each row: strings, dicts, or
            anything that pickles. Lists come back as one list.
        pad: what narrower rows are filled up with, if batches or ranks differ in the width of their rows. All
            rows get the largest width. None: they must be equally wide.

    Example: `fa.Concat(logits.argmax(-1), pad=-100)`, `fa.Concat(tokenizer.batch_decode(ids))`.
    """

    value: Any
    pad: float | None = None


def is_combinable(leaf: Any) -> bool:
    """Whether a leaf of `aux` says itself how it combines."""
    return isinstance(leaf, Mean | Sum | Concat)


def parts_of(leaf: Any, rows: int, where: str) -> tuple[Any, Any]:
    """(total, weight) of a leaf of `aux` or of metrics; a bare scalar stands for `rows` rows.

    Raises:
        LossError: a tensor that is no scalar, or an object, that does not say how it combines.
    """
    if isinstance(leaf, Mean):
        return leaf.total, leaf.weight
    if isinstance(leaf, Sum):
        return leaf.value, 1
    if not isinstance(leaf, torch.Tensor) and not _is_number(leaf):
        raise LossError(
            f"a {type(leaf).__name__} says nothing of how it combines",
            where=where,
            fix="return numbers and tensors; or fa.Concat([...]) with one object for each row",
        )
    if isinstance(leaf, torch.Tensor) and leaf.dim() != 0:
        raise LossError(
            f"a tensor of shape {list(leaf.shape)} says nothing of how it combines",
            where=where,
            fix="return fa.Concat(rows), fa.Sum(value) or fa.Mean(total, weight)",
        )
    return leaf if rows == 1 else leaf * rows, rows


def _is_number(value: Any) -> bool:
    """Whether a value adds up: Python's numbers, and NumPy's scalars and 0-d arrays."""
    if isinstance(value, Real):
        return True
    return (
        getattr(value, "shape", None) == () and getattr(getattr(value, "dtype", None), "kind", "") in "biuf"
    )


def read_loss(output: Any, where: str) -> tuple[torch.Tensor, Any, Any]:
    """(total, weight, aux) of what a loss function returned.

    Raises:
        LossError: nothing was returned, or the total is no scalar tensor.
    """
    if isinstance(output, Mean):
        total, weight, aux = output.total, output.weight, output.aux
    elif isinstance(output, tuple) and len(output) == 2:  # pyright: ignore[reportUnknownArgumentType]
        (total, aux), weight = output, 1
    else:
        total, weight, aux = output, 1, None
    if not isinstance(total, torch.Tensor):
        raise LossError(
            f"the loss function returned {'nothing' if total is None else type(total).__name__}",
            where=where,
            fix="return a scalar tensor, (scalar, aux), or fa.Mean(total, weight=...)",
        )
    if total.dim() != 0:
        raise LossError(
            f"the loss is not a scalar: it has shape {list(total.shape)}",
            where=where,
            fix="sum it and say how many: fa.Mean(loss.sum(), weight=loss.numel())",
        )
    _check_weight(weight, where)
    return total, weight, aux


def _check_weight(weight: Any, where: str) -> None:
    # a tensor's value is not looked at: that would be a host read in every step
    if isinstance(weight, torch.Tensor):
        what = f"a tensor of shape {list(weight.shape)}" if weight.dim() else ""
    else:
        what = "" if isinstance(weight, int | float) and weight >= 0 else repr(weight)
    if what:
        raise LossError(
            f"the weight of a loss is {what}",
            where=where,
            fix="say how many rows or tokens the total stands for: a number, or a 0-d tensor",
        )


def check_attached(total: torch.Tensor, where: str) -> None:
    """Raise LossError where a loss carries no gradient."""
    if not total.requires_grad:
        raise LossError(
            "the loss is detached: no parameter would get a gradient",
            where=where,
            fix="remove .detach(), .item() or torch.no_grad() between the model and the loss",
        )
