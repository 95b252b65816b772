"""`LossInfo`: what a loss function may know of its update beside the model and the batch."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from fnaccel.errors import LossError
from fnaccel.random import Key
from fnaccel.step.loss import Scalar

_NO_ROWS = (
    "give batches of fa.shard: for batch in fa.shard(loader).on(train_step.mesh). In a test of the loss "
    "function: fa.LossInfo(key, rows=torch.arange(n))"
)


# a plain class: no attrs value can be built inside compiled code
class LossInfo:
    """What a loss function knows of its update: `loss_fn(model, batch, *, info)`.

    A loss function that has a parameter `info` gets it by keyword. Other loss functions get nothing. FORWARD
    transforms never see it. A captured step takes all of it as inputs of its graph: numbers are 0-d tensors
    there, those of `extras` too.

    Args:
        key: of random numbers. It depends on the seed and the step only, and is equal on all ranks and in all
            micro-batches: fold in `info.rows` for numbers that differ between rows.
        step: calls of the train step before this one (an int, or a 0-d int64 tensor).
        updates: updates before this one (an int, or a 0-d tensor).
        extras: those of the state. A captured step takes bools and texts as they are, and compiles again if
            they change.
        rows: the places of the rows. None if they are not known.
        valid: whether the rows count: a bool, or a 0-d tensor.

    Example:
        >>> def loss_fn(model, batch, *, info):
        ...     x = model.embed(batch["tokens"])
        ...     x = fa.random.dropout(x, 0.1, key=info.key.fold_in(info.rows))  # a mask for each row
        ...     logits = model.lm_head(x).flatten(0, 1)
        ...     total = F.cross_entropy(logits, batch["labels"].flatten(), reduction="sum")
        ...     return fa.Mean(total, weight=batch["labels"].numel())
        >>> train_step = make(loss_fn)
        >>> state, metrics = train_step(train_step.init(), next(iter(fa.shard(loader))))
    """

    def __init__(
        self,
        key: Key,
        *,
        step: Scalar = 0,
        updates: Scalar = 0,
        extras: Any = None,
        rows: torch.Tensor | None = None,
        valid: torch.Tensor | bool = True,
    ) -> None:
        self.key = key
        self.step = step
        self.updates = updates
        self.extras = extras
        self._rows = rows
        self._valid = valid

    @property
    def rows(self) -> torch.Tensor:
        """The places of this micro-batch's rows in the global batch: int64, shape `[rows]`.

        The batches of a window count on. So a row has the same place on any ranks and in any micro-batches.

        Raises:
            LossError: `fa.shard` did not make the batch, so its place is not known.
        """
        if self._rows is None:
            raise LossError(
                "fa.shard did not make this batch, so the places of its rows in the global batch are unknown",
                where="info.rows",
                fix=_NO_ROWS,
            )
        return self._rows

    @property
    def valid(self) -> torch.Tensor:
        """Whether each row of this micro-batch counts: bool, shape `[rows]`.

        False in the copies that a rank runs if the last batch has no rows for it. Their loss is left out,
        but a collective inside of the loss function sees them.

        Raises:
            LossError: as `rows`.

        Example:
            >>> def loss_fn(model, batch, *, info):  # in-batch negatives of all ranks, those that count
            ...     z = model.embed(batch["tokens"]).mean(1)
            ...     others = fa.gather(z, valid=info.valid.sum(), gradient=True)
            ...     return fa.Mean((z @ others.T).logsumexp(-1).sum(), weight=len(z))
        """
        return torch.ones_like(self.rows, dtype=torch.bool) & self._valid

    def of_rows(self, rows: torch.Tensor | None) -> LossInfo:
        """The same for other rows."""
        return LossInfo(
            self.key, step=self.step, updates=self.updates, extras=self.extras, rows=rows, valid=self._valid
        )

    @property
    def places(self) -> torch.Tensor | None:
        """`rows`, or None if they are not known."""
        return self._rows

    def __repr__(self) -> str:
        rows = "not known" if self._rows is None else f"{len(self._rows)} places"
        return f"LossInfo(step={self.step}, updates={self.updates}, rows={rows})"


class Informed:
    """A loss function with `info`, as a function of the model and the batch.

    FORWARD transforms and compiled code call it, and neither could hand `info` on. So it is set before
    each forward. In a captured step the graph itself sets it.

    Args:
        fn: the loss function.
        traced: whether it runs in compiled code, which takes numbers as tensors.
        dynamic: whether the number of rows varies in compiled code.

    Attributes:
        info: of the next forward.
    """

    def __init__(self, fn: Callable[..., Any], *, traced: bool = False, dynamic: bool = False) -> None:
        self._fn = fn
        self.traced = traced
        self.dynamic = dynamic
        self.info: LossInfo | None = None

    def __call__(self, model: object, *args: Any) -> Any:
        """The loss."""
        return self._fn(model, *args, info=self.info)


def takes_info(fn: Callable[..., Any], positional: int = 2) -> bool:
    """Whether a function has a parameter `info` that is still open after some positional arguments.

    A function under `functools.wraps` has it if the wrapper hands it on.
    """
    code = getattr(fn, "__code__", None)
    if code is not None and "info" not in code.co_varnames and not hasattr(fn, "__wrapped__"):
        return False  # without the signature, which takes 20 us
    if _is_bound(fn):
        return False
    try:
        inner = list(inspect.signature(fn).parameters.values())
        outer = list(inspect.signature(fn, follow_wrapped=False).parameters.values())
    except (TypeError, ValueError):  # a builtin
        return False
    if not any(p.name == "info" and _is_open(p, place, positional) for place, p in enumerate(inner)):
        return False
    return any(p.name == "info" or p.kind is p.VAR_KEYWORD for p in outer)


def _is_bound(fn: Any) -> bool:
    """Whether `info` is given already, by a partial at any depth of wrappers."""
    while fn is not None:
        if isinstance(fn, functools.partial) and "info" in fn.keywords:
            return True
        fn = getattr(fn, "__wrapped__", None)
    return False


def _is_open(parameter: inspect.Parameter, place: int, positional: int) -> bool:
    if parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
        return place >= positional
    return parameter.kind is parameter.KEYWORD_ONLY
