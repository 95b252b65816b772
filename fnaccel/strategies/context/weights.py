"""A loss that counts rows would count each row once on every rank that has a part of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from fnaccel import tree
from fnaccel.errors import LossError
from fnaccel.extend import rows_of
from fnaccel.step.loss import Mean, is_combinable
from fnaccel.tree import Tree


def weighs_tokens(fn: Callable[..., Any], ranks: int) -> Callable[..., Any]:
    """A loss or metric function that raises if a weight is the number of rows.

    Only weights that are plain numbers are looked at. In a graph nothing is: the step is run without it
    first.
    """

    @functools.wraps(fn)
    def checked(model: object, batch: Tree, *args: Any, **info: Any) -> Any:
        output = fn(model, batch, *args, **info)
        if not torch.compiler.is_compiling():
            for leaf in tree.leaves(output, is_leaf=is_combinable):
                if isinstance(leaf, Mean):
                    check_weight(leaf.weight, batch, ranks)
                    if leaf.aux is not None:
                        for inner in tree.leaves(leaf.aux, is_leaf=is_combinable):
                            check_weight(getattr(inner, "weight", None), batch, ranks)
        return output

    return checked


def check_weight(weight: object, batch: Tree, ranks: int) -> None:
    """Raise LossError if a weight is the number of rows of a batch.

    Raises:
        LossError: see above.
    """
    if isinstance(weight, int | float) and weight and weight == rows_of(batch):
        raise LossError(
            f"the weight {weight} is the number of rows, and {ranks} ranks have tokens of each row: it would "
            f"count {ranks} times",
            where="the loss function under fa.context",
            fix="weigh by tokens: fa.Mean(total, weight=labels.numel()), or the number of labels that count",
        )
