"""The return values of losses and metric functions, and how their parts combine.

A loss is a total and its weight, so that micro-batches and ranks of any size combine exactly.
The classes are frozen dataclasses, not attrs: a loss builds them inside compiled code.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from fnaccel import _torch
from fnaccel.errors import LossError
from fnaccel.tree import Tree

_PLAIN = (int, float, torch.Tensor)

Scalar = int | float | torch.Tensor
"""A number, or a 0-d tensor on any device."""


@dataclass(frozen=True)
class Mean:
    """A sum over examples and their number. Combines to `sum(totals) / sum(weights)`.

    Args:
        total: 0-d tensor, the sum over this micro-batch's examples (or tokens). In aux and in metrics of
            `fa.evaluate` a tensor of any shape, such as a total for each class.
        weight: how many, as an int, a float or a 0-d tensor. For a total with dimensions also a tensor that
            broadcasts to it.
        aux: any pytree to report beside the loss. Its leaves combine as their type says
            (`Mean`, `Sum`, `Max`, `Min`, `Concat`). A bare tensor is averaged.
        of_mean: whether `fa.Mean.of` made it, for the check of totals.

    Example:
        >>> logits, labels = GPT()(batch["tokens"]).flatten(0, 1), batch["labels"].flatten()
        >>> loss = fa.Mean(F.cross_entropy(logits, labels, reduction="sum"), weight=labels.numel())
        >>> loss.weight
        32
    """

    total: Any
    weight: Scalar
    aux: Any = None
    of_mean: bool = field(default=False, repr=False, compare=False)

    @staticmethod
    def of(mean: torch.Tensor, weight: Scalar, aux: Any = None) -> Mean:
        """A mean that is divided already, such as `F.cross_entropy(logits, labels)`.

        Args:
            mean: 0-d tensor, the mean over this micro-batch's examples (or tokens).
            weight: how many of them there are.
            aux: as for `fa.Mean`.

        Example:
            >>> def loss_fn(model, batch):
            ...     logits, labels = model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten()
            ...     return fa.Mean.of(F.cross_entropy(logits, labels), weight=len(labels))
            >>> train_step = make(loss_fn)
            >>> state, metrics = train_step(train_step.init(), batch)
        """
        return Mean(mean * weight, weight, aux, of_mean=True)

    @staticmethod
    def of_tokens(
        mean: torch.Tensor, labels: torch.Tensor, aux: Any = None, *, shift: bool = True, ignore: int = -100
    ) -> Mean:
        """The loss of a Hugging Face model: `fa.Mean.of_tokens(model(**batch).loss, batch["labels"])`.

        Args:
            mean: 0-d tensor, the mean over the tokens with a label.
            labels: integers of shape `[batch, tokens]`, as the model got them.
            aux: as for `fa.Mean`.
            shift: whether the model compares each token with the one before, as causal models do. Then the
                first label of each row does not count. False for masked and sequence-to-sequence models.
            ignore: the label of tokens that do not count.

        Example:
            >>> labels = torch.tensor([[5, 7, -100], [5, 7, 9]])
            >>> int(fa.Mean.of_tokens(torch.tensor(2.0), labels).weight)
            3
        """
        counted = labels[..., 1:] if shift else labels
        return Mean.of(mean, (counted != ignore).sum(), aux)


@dataclass(frozen=True)
class Sum:
    """A value of any shape that adds up over micro-batches and ranks: a count of errors, a confusion matrix.

    Raises:
        LossError: when it is returned, if its shape differs between micro-batches, batches or ranks.

    Example:
        >>> def score(model, batch):
        ...     return {"errors": fa.Sum((model(batch["tokens"]).argmax(-1) != batch["labels"]).sum())}
        >>> errors = fa.evaluate(train_step, state, score, fa.shard(loader))["errors"]
    """

    value: Any


@dataclass(frozen=True)
class Extreme:
    """The base of `Max` and `Min`."""

    value: Any

    @staticmethod
    def fold(values: torch.Tensor) -> torch.Tensor:
        """What stays of values of shape `[n, ...]`."""
        raise NotImplementedError


@dataclass(frozen=True)
class Max(Extreme):
    """The largest over micro-batches and ranks of a value of any shape, element by element. NaN stays NaN.

    Example:
        >>> def score(model, batch):
        ...     return {"largest": fa.Max(model(batch["tokens"]).abs().max())}
        >>> largest = fa.evaluate(train_step, state, score, fa.shard(loader))["largest"]
    """

    @staticmethod
    def fold(values: torch.Tensor) -> torch.Tensor:
        """The largest values along dim 0."""
        return values.amax(0)


@dataclass(frozen=True)
class Min(Extreme):
    """The smallest over micro-batches and ranks of a value of any shape, element by element. NaN stays NaN.

    Example:
        >>> def score(model, batch):
        ...     return {"smallest": fa.Min(model(batch["tokens"]).min())}
        >>> smallest = fa.evaluate(train_step, state, score, fa.shard(loader))["smallest"]
    """

    @staticmethod
    def fold(values: torch.Tensor) -> torch.Tensor:
        """The smallest values along dim 0."""
        return values.amin(0)


@dataclass(frozen=True)
class Concat:
    """Rows that are put together in the order of the samples.

    Args:
        value: a tensor of shape `[rows, ...]`, or a list with one object for each row: strings, dicts, or
            anything that pickles. Lists come back as one list.
        pad: the value that fills up narrower rows, if batches or ranks differ in the width of their rows. All
            rows get the largest width. None: they must be equally wide.

    Raises:
        LossError: when it is returned, if ranks along an axis such as `cp` each have a part of every row.

    Example:
        >>> def predict(model, batch):
        ...     return fa.Concat(model(batch["tokens"]).argmax(-1), pad=-100)
        >>> fa.evaluate(train_step, state, predict, fa.shard(loader)).shape
        torch.Size([12, 8])
    """

    value: Any
    pad: float | None = None


def is_combinable(leaf: Tree) -> bool:
    """Whether a leaf of `aux` says itself how it combines."""
    return isinstance(leaf, Mean | Sum | Extreme | Concat)


def parts_of(leaf: Tree, rows: int, where: str) -> tuple[Any, Any]:
    """(total, weight) of a leaf of `aux` or of metrics, the total as it counts.

    A bare scalar stands for `rows` rows.

    Raises:
        LossError: a tensor that is no scalar, or an object, that does not say how it combines.
    """
    if isinstance(leaf, Mean):
        weight = _as_tensor(leaf.weight, where)
        return counted(_as_tensor(leaf.total, where), weight), weight
    if isinstance(leaf, Sum):
        return _as_tensor(leaf.value, where), 1
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
            fix="return fa.Concat(rows), fa.Sum(value), fa.Max(value) or fa.Mean(total, weight)",
        )
    return leaf if rows == 1 else leaf * rows, rows


def _as_tensor(value: Any, where: str) -> Any:
    """An array of NumPy as a tensor, other values as they are.

    Raises:
        LossError: it is complex, and sums are real.
    """
    plain = isinstance(value, _PLAIN) or not getattr(value, "shape", ())
    value = value if plain else torch.as_tensor(value)
    if isinstance(value, complex) or (isinstance(value, torch.Tensor) and value.is_complex()):
        raise LossError(
            "an fa.Sum or fa.Mean is complex, and values are summed as real numbers",
            where=where,
            fix="return two: fa.Sum(value.real) and fa.Sum(value.imag)",
        )
    return value


def _is_number(value: Tree) -> bool:
    """Whether a value adds up: Python's numbers, and NumPy's scalars and 0-d arrays."""
    if isinstance(value, numbers.Real):
        return True
    return (
        getattr(value, "shape", None) == () and getattr(getattr(value, "dtype", None), "kind", "") in "biuf"
    )


class LossParts(NamedTuple):
    """The parts of a loss function's output.

    `weighted` if it gave a weight of its own, `of_mean` if by `fa.Mean.of`.
    """

    total: torch.Tensor
    weight: Scalar
    aux: Any
    weighted: bool
    of_mean: bool = False


def read_loss(output: Tree, where: str) -> LossParts:
    """The parts of a loss function's output.

    Raises:
        LossError: nothing was returned, the total is no scalar tensor, or the weight is no weight.
    """
    weighted = isinstance(output, Mean)
    if isinstance(output, Mean):
        total, weight, aux = output.total, output.weight, output.aux
    elif isinstance(output, tuple) and len(output) == 2:  # pyright: ignore[reportUnknownArgumentType]
        (total, aux), weight = output, 1
        if isinstance(total, Mean):
            raise LossError(
                "the loss function returned (fa.Mean, aux)",
                where=where,
                fix="give aux to the mean: fa.Mean(total, weight=..., aux=aux)",
            )
    else:
        total, weight, aux = output, 1, None
    if not isinstance(total, torch.Tensor):
        raise _no_tensor(total, where)
    if total.is_complex():
        raise LossError(
            f"the loss is complex: {total.dtype}",
            where=where,
            fix="take its real part, or its absolute value",
        )
    if total.dim() != 0:
        raise LossError(
            f"the loss is not a scalar: it has shape {list(total.shape)}",
            where=where,
            fix="sum it and say how many: fa.Mean(loss.sum(), weight=loss.numel())",
        )
    of_mean = isinstance(output, Mean) and output.of_mean
    return LossParts(total, check_weight(weight, where), aux, weighted, of_mean)


def _no_tensor(output: Tree, where: str) -> LossError:
    fix = "return a scalar tensor, (scalar, aux), or fa.Mean(total, weight=...)"
    if isinstance(output, dict) and "loss" in output:  # a transformers model's output is such a mapping
        fix = 'did you mean output["loss"]? ' + fix
    return LossError(
        f"the loss function returned {'nothing' if output is None else type(output).__name__}",
        where=where,
        fix=fix,
    )


def check_weight(weight: Scalar, where: str) -> Any:
    """A weight as a number or a 0-d tensor. One of numpy's numbers as Python's.

    The value of a tensor on an accelerator is not looked at, since that would be a host read in every step.

    Raises:
        LossError: negative, infinite, NaN, or no number.
    """
    problem = ""
    if isinstance(weight, torch.Tensor):
        if weight.dim():
            problem = f"a tensor of shape {list(weight.shape)}"
        elif readable(weight) and not 0 <= float(weight) < math.inf:
            problem = f"a tensor of value {float(weight)}"
    elif isinstance(weight, int):  # in a graph it may be symbolic, and has no infinity
        problem = "" if weight >= 0 else repr(weight)
    elif isinstance(weight, float):
        if type(weight) is not float:  # a total divided by numpy's would be a numpy number
            return check_weight(float(weight), where)
        problem = "" if 0 <= weight < math.inf else repr(weight)
    elif isinstance(weight, numbers.Real):
        return check_weight(float(weight), where)  # one of numpy's
    else:
        problem = repr(weight)
    if problem:
        raise LossError(
            f"the weight of a loss is {problem}",
            where=where,
            fix="say how many rows or tokens the total stands for: a finite number of at least 0, "
            "or a 0-d tensor of one",
        )
    return weight


def readable(value: torch.Tensor) -> bool:
    """Whether the host can read a tensor at no cost.

    It is on the CPU, no graph is being captured, and no function of torch.func differentiates or maps it.
    """
    return value.device.type == "cpu" and not torch.compiler.is_compiling() and not _torch.is_mapped(value)


def is_zero(weight: Scalar) -> bool:
    """Whether the host can see, at no cost, that a weight is 0."""
    return readable(weight) and not float(weight) if isinstance(weight, torch.Tensor) else not weight


def masked(total: torch.Tensor, weight: Scalar) -> tuple[torch.Tensor, Any]:
    """A total and its weight as they count: a total of weight 0 is 0, a tensor weight that is none is NaN."""
    if not isinstance(weight, torch.Tensor) or readable(weight):
        return (_nothing(total) if is_zero(weight) else total), weight
    valid = (weight >= 0) & (weight < math.inf)
    zero = torch.zeros_like(total)
    return torch.where(weight > 0, total, zero), torch.where(valid, weight, math.nan)


def counted(total: Any, weight: Any) -> Any:
    """A total as it counts in sums of aux and metrics: 0 where its weight is 0, since it may be NaN there.

    Both may have dimensions. torch.compile can trace it.
    """
    is_tensor = isinstance(total, torch.Tensor)
    if not isinstance(weight, torch.Tensor) or (readable(weight) and not weight.dim()):
        if not is_zero(weight):
            return total
        return torch.zeros_like(total) if is_tensor else 0.0
    if not is_tensor:
        return total
    total = total.to(weight.device) if total.device.type == "cpu" else total
    return torch.where(weight.to(total.device) == 0, torch.zeros_like(total), total)


def _nothing(total: torch.Tensor) -> torch.Tensor:
    """0 with the graph of a total, which may be NaN: a mean over nothing is."""
    return torch.where(torch.zeros_like(total, dtype=torch.bool), total, torch.zeros_like(total))


def is_uncounted(weight: Scalar) -> Any:
    """Whether no row counts, by the global weight: a bool, or a 0-d float tensor on the device.

    The update is left out then.
    """
    if isinstance(weight, torch.Tensor):
        if not readable(weight):
            return (~((weight > 0) & (weight < math.inf))).float()
        weight = float(weight)
    return not 0 < weight < math.inf


def check_reached(grads: Sequence[Any], where: str) -> None:
    """Raise LossError if no parameter of a model that lies whole on this rank got a gradient."""
    if all(grad is None for grad in grads):
        raise LossError(
            "no trainable parameter got a gradient: the loss does not depend on them",
            where=where,
            fix="compute it with the model that the loss function is given: def loss_fn(model, batch)",
        )


def gradients_changed(where: str) -> LossError:
    """The error for a loss that calls `backward()` or `zero_grad()`."""
    return LossError(
        "the loss function changed gradients of the model: it called backward() or zero_grad()",
        where=where,
        fix="return the loss: train_step calls backward(), and drops the gradients after the update",
    )


def check_attached(total: torch.Tensor, where: str) -> None:
    """Raise LossError if a loss carries no gradient."""
    if not total.requires_grad:
        raise LossError(
            "the loss is detached: no parameter would get a gradient",
            where=where,
            fix="remove .detach(), .item() or torch.no_grad() between the model and the loss",
        )
