"""Whether the total of an `fa.Mean` is a mean, as its autograd graph shows. Nothing is computed for it.

A mean in the place of a total trains with gradients that are too small by the number of rows. The graph is
followed from its root, through sums of numbers and factors that the host can read, to reductions: the terms.
"""

from __future__ import annotations

import itertools
import logging
import math
import operator
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import attrs
import torch

from fnaccel.errors import LossError
from fnaccel.step.loss import LossParts, Scalar, readable

Kind = Literal["mean", "part", "sum", "total", "penalty", "unknown"]
"""A "part" is a mean over other values than the weight, a "sum" of a torch loss, "penalty" of parameters."""

_logger = logging.getLogger("fnaccel")

_MEAN, _SUM = 1, 2  # torch's numbers of reduction="mean" and "sum"


def _backward_of(names: str) -> tuple[str, ...]:
    return tuple(f"{name}Backward" for name in names.split())


_MEANS, _SUMS, _NORM = _backward_of("Mean"), _backward_of("Sum Nansum"), _backward_of("LinalgVectorNorm")
_PASSED = _backward_of("Add Sub Rsub Neg ToCopy Clone Alias View Squeeze Unsqueeze")
_OF_PARAMETERS = (
    *_backward_of("Add Mul Pow Abs Sqrt Stack Cat Sum LinalgVectorNorm View ToCopy"),
    "torch::autograd::AccumulateGrad",
)
_MOST = 1_000
"""Nodes that are looked at."""
_SMALL = 2
"""Divisors up to this one are constants of a formula, as in half a squared error, and no number of rows."""


@attrs.define
class TotalCheck:
    """What updates showed of the totals of a loss.

    Attributes:
        note: a line of the plan, if their graphs show nothing.
        uneven: one, if a bare loss had micro-batches or ranks of other numbers of rows.
        rows: the numbers of rows so far, of a bare loss.
    """

    note: str = ""
    uneven: str = ""
    rows: frozenset[int] = frozenset()

    def take(self, parts: LossParts, where: str, known: Scalar | None = None) -> None:
        """Check the total of a loss function, before it is masked: see `check_total`."""
        if not check_total(parts, where, known):
            self.undecided(where)

    def count(self, rows: Iterable[int], where: str) -> None:
        """Warn, once, of a bare loss whose mean over micro-batches and ranks is not that over rows."""
        self.rows = self.rows.union(rows) - {0}  # fillers count for nothing
        if len(self.rows) > 1 and not self.uneven:
            self.uneven = (
                f"{where} returned a bare scalar for {' and '.join(map(str, sorted(self.rows)))} rows: each "
                "micro-batch counts the same, so another split into ranks trains otherwise. "
                "fa.Mean(total, weight=rows) does not"
            )
            _logger.warning(self.uneven)

    def undecided(self, where: str) -> None:
        """Note that nothing is known."""
        self.note = (
            f"whether the total of {where} is a mean was not checked, since its graph does not show it: "
            "train_step.check_totals(state, loss_fn, batch) does it"
        )


def check_total(parts: LossParts, where: str, known: Scalar | None = None) -> bool:
    """Whether a total is seen to be one. False if its graph does not show it.

    Args:
        parts: of the output of a loss function. A loss without a weight is a mean by right.
        where: its name, for the message.
        known: the weight from `fa.with_weight`.

    Raises:
        LossError: it is a mean, or that of an `fa.Mean.of` is a sum.
    """
    weight: Any = parts.weight if known is None else known
    if not parts.weighted and known is None:
        return True
    if isinstance(weight, torch.Tensor) and not readable(weight):
        return False
    if float(weight) in (0.0, 1.0) or parts.total.grad_fn is None:
        return True
    terms = [term for term in _terms(parts.total.grad_fn, float(weight)) if term[0] != "penalty"]
    kinds, name = {kind for kind, _ in terms}, terms[0][1] if terms else ""
    # a mean for each row, or several, which a loop adds up, are a total
    looped = len(terms) == float(weight) or ("mean" not in kinds and len(terms) % float(weight) == 0)
    if kinds and kinds <= {"mean", "part"} and not looped:
        taker, fix = "fa.Mean", "fa.Mean.of(mean, weight=...), or sum: reduction='sum'"
        if known is not None:
            taker = "fa.with_weight"
            fix = "return a sum: reduction='sum'; or for a mean, fa.with_weight(step, lambda batch: 1)"
        raise LossError(
            f"{taker} takes a total, and this one is a mean ({name}): gradients would be {float(weight):g} "
            "times too small",
            where=where,
            fix=fix,
        )
    if parts.of_mean and kinds == {"sum"}:
        raise LossError(
            f"fa.Mean.of takes a mean, and this one is a sum ({name}): gradients would be {float(weight):g} "
            "times too large",
            where=where,
            fix="fa.Mean(total, weight=n)",
        )
    return bool(kinds) and not kinds & {"mean", "part", "unknown"}


def _terms(root: Any, weight: float) -> Iterator[tuple[Kind, str]]:
    """The kind of each term, and the name of its operation."""
    waiting: list[tuple[Any, list[float | None], list[float | None]]] = [(root, [], [])]
    for _ in range(_MOST):
        if not waiting:
            return
        node, times, by = waiting.pop()
        name, inputs = node.name(), [node for node, _ in node.next_functions if node is not None]
        if name.startswith(_PASSED):
            waiting += [(each, times, by) for each in inputs]
        elif numbers := _numbers_of(node, name, inputs):
            count = float(len(numbers)) if name.startswith(_MEANS) else 1.0
            if count == weight > _SMALL:  # of a loss for each row
                yield "mean", name
                continue
            waiting += [(each, times, [*by, count]) for each in numbers]
        elif name.startswith("MulBackward") and len(inputs) == 1:
            waiting.append((inputs[0], [*times, _number(node, "_saved_other", "_saved_self")], by))
        elif name.startswith("DivBackward") and len(inputs) == 1 and node.next_functions[0][0] is not None:
            waiting.append((inputs[0], times, [*by, _number(node, "_saved_other")]))
        else:
            yield _kind(node, name, weight, times, by), name
    yield "unknown", root.name()


def _kind(node: Any, name: str, weight: float, times: list[float | None], by: list[float | None]) -> Kind:
    """The kind of a reduction to one number, which is multiplied by `times` and divided `by` numbers."""
    reduction = getattr(node, "_saved_reduction", None)
    averaged = reduction == _MEAN or name.startswith(_MEANS)
    if not averaged and name.startswith(_SUMS + _NORM) and _is_of_parameters(node):
        return "penalty"
    summed = reduction == _SUM or name.startswith(_SUMS)
    if not (averaged or summed) or None in (*times, *by):
        return "unknown"
    counts = {weight, *_products(getattr(node, "_saved_self_sym_sizes", ()))}
    lasting, divisors = Counter(times), Counter(by)
    lasting, divisors = lasting - divisors, divisors - lasting  # a mean by hand times its rows
    if averaged:
        if counts & {*lasting}:
            return "total"
        if any(map(_is_whole, lasting)):
            return "unknown"
        before, number = next(each for each in node.next_functions if each[0] is not None)
        made = getattr(before, "_input_metadata", None)
        return "mean" if made is None or weight in _products(made[number].shape) else "part"
    if any(map(_is_whole, lasting)):
        return "sum" if reduction == _SUM and not divisors else "unknown"
    if any(_is_whole(value) and value > _SMALL for value in counts & {*divisors}):
        return "mean"
    return "unknown" if any(map(_is_whole, divisors)) else "total"


def _numbers_of(node: Any, name: str, inputs: list[Any]) -> list[Any]:
    """The numbers that a sum or a mean is of, if it is of a stack of them, or of one number."""
    sizes = tuple(getattr(node, "_saved_self_sym_sizes", ()))
    if len(inputs) != 1 or not name.startswith(_SUMS + _MEANS):
        return []
    if math.prod(sizes) == 1 and name.startswith(_MEANS):
        return inputs
    of = inputs[0].next_functions if inputs[0].name().startswith("StackBackward") else ()
    return [each for each, _ in of if each is not None] if sizes == (len(of),) else []


def _is_of_parameters(root: Any) -> bool:
    """Whether nothing but parameters enters a graph. A factor that is no parameter may be data."""
    waiting = [root]
    for _ in range(_MOST):
        if not waiting:
            return True
        node = waiting.pop()
        nodes = [each for each, _ in node.next_functions]
        if not node.name().startswith(_OF_PARAMETERS):
            return False
        if None in nodes and _number(node, "_saved_other", "_saved_self") is None:
            return False
        waiting += [each for each in nodes if each is not None]
    return False


def _products(sizes: Iterable[int]) -> set[float]:
    """How many values a sum is of: the products of its first dimensions."""
    return {float(count) for count in itertools.accumulate(sizes, operator.mul)}


def _number(node: Any, *names: str) -> float | None:
    """The factor that an operation has saved, or None if it has none that the host can read.

    What hooks of saved tensors hold stays packed: they may compute a region again to unpack it.
    """
    for name in names:
        raw = getattr(node, f"_raw{name}", None)
        value = getattr(node, name, None) if raw is None else getattr(raw, "data", None)  # not in torch 2.9
        if value is not None:
            held = type(value) is torch.Tensor and value.numel() == 1 and readable(value)
            return float(value) if held or isinstance(value, int | float) else None
    return None


def _is_whole(value: float | None) -> bool:
    return value is not None and value >= 2 and value.is_integer()
