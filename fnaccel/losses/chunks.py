"""The losses of a linear head's rows and their gradients, chunk after chunk, in the memory of one chunk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
import torch.nn.functional as F

AllReduce = Callable[[torch.Tensor, str], torch.Tensor]


@attrs.frozen(eq=False)
class Columns:
    """The columns of the vocabulary that this rank has, where ranks have different ones.

    Attributes:
        start: the first of them.
        vocabulary: how many all ranks have.
        all_reduce: `all_reduce(tensor, "sum" | "max")` over those ranks.
    """

    start: int
    vocabulary: int
    all_reduce: AllReduce


@attrs.define(eq=False)  # frozen ones are no code that torch.compile can trace
class Terms:
    """What the loss of a row consists of, and how it is computed."""

    ignore_index: int
    label_smoothing: float
    z_loss: float
    soft_cap: float | None
    compute: torch.dtype
    rows: int
    columns: Columns | None


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def in_chunks(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    factors: torch.Tensor | None,
    wants: tuple[bool, ...],
    terms: Terms,
) -> tuple[torch.Tensor, ...]:
    """The losses of rows, and the gradients of their sum, after each was multiplied by its factor.

    Gradients that nobody wants are empty.
    """
    wide, compute = _wide(hidden.dtype), terms.compute
    losses = hidden.new_empty(len(hidden), dtype=wide)
    inputs = (hidden, weight, bias)
    grads = [
        torch.zeros_like(x, dtype=wide, memory_format=torch.contiguous_format)
        if want and x is not None
        else hidden.new_empty(0)
        for x, want in zip(inputs, wants, strict=True)
    ]
    with torch.autocast(hidden.device.type, enabled=False):
        weight = weight.to(compute)
        memory = weight.new_empty(min(terms.rows, len(hidden)), len(weight))
        for start in range(0, len(hidden), terms.rows):
            part = slice(start, start + terms.rows)
            states = hidden[part].to(compute)
            logits = torch.mm(states, weight.t(), out=memory[: len(states)]).to(wide)
            if bias is not None:
                logits += bias
            counted = labels[part] != terms.ignore_index
            losses[part], slopes = _of_chunk(logits, labels[part], counted, terms, any(wants))
            if slopes is None:
                continue
            scale = counted.to(wide) if factors is None else counted * factors[part].to(wide)
            if wants[0]:
                grads[0][part] = (slopes.to(compute) @ weight).to(wide) * scale[:, None]
            if wants[1] and compute is wide:
                grads[1].addmm_(slopes.t(), states * scale[:, None])
            elif wants[1]:
                states = states * scale[:, None].to(compute)
                # a sum over rows may be more than fp16 has, before the factor of the loss makes it small
                largest = states.abs().amax().clamp(min=1.0) if compute is torch.float16 else 1.0
                grads[1] += (slopes.to(compute).t() @ (states / largest)).to(wide) * largest
            if wants[2]:
                grads[2] += scale @ slopes
    return losses, *(grad if x is None else grad.to(x.dtype) for grad, x in zip(grads, inputs, strict=True))


_SCHEMA = (
    "(Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, Tensor? factors, bool[] wants,"
    " int ignore_index, float label_smoothing, float z_loss, float? soft_cap, ScalarType compute, int rows)"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)


@torch.library.custom_op("fnaccel::linear_cross_entropy", mutates_args=(), schema=_SCHEMA)
def _as_one_operation(
    hidden: Any, weight: Any, bias: Any, labels: Any, factors: Any, wants: Any, *terms: Any
) -> Any:
    """`in_chunks` in a graph, which would hold each chunk on its own."""
    options: Any = (*terms, None)
    return in_chunks(hidden, weight, bias, labels, factors, wants, Terms(*options))


@_as_one_operation.register_fake
def _shapes(hidden: Any, weight: Any, bias: Any, labels: Any, factors: Any, wants: Any, *terms: Any) -> Any:  # noqa: ARG001
    losses = hidden.new_empty(hidden.shape[:1], dtype=_wide(hidden.dtype))
    grads = [
        torch.empty_like(x, memory_format=torch.contiguous_format)
        if want and x is not None
        else hidden.new_empty(0)
        for x, want in zip((hidden, weight, bias), wants, strict=True)
    ]
    return losses, *grads


def losses_and_gradients(
    hidden: Any, weight: Any, bias: Any, labels: Any, factors: Any, wants: tuple[bool, ...], terms: Terms
) -> tuple[torch.Tensor, ...]:
    """`in_chunks`, in a graph of `torch.compile` as one operation."""
    if terms.columns is not None or not torch.compiler.is_compiling():
        return in_chunks(hidden, weight, bias, labels, factors, wants, terms)
    *values, _ = attrs.astuple(terms, recurse=False)
    return _as_one_operation(hidden, weight, bias, labels, factors, list(wants), *values)


def _of_chunk(
    logits: torch.Tensor, labels: torch.Tensor, counted: torch.Tensor, terms: Terms, slope: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Losses of some rows, and their derivatives by the logits, in the memory of the logits."""
    columns = terms.columns
    start, vocabulary = (0, logits.shape[-1]) if columns is None else (columns.start, columns.vocabulary)
    local = labels.where(counted, start) - start
    if columns is not None:
        own = counted & (local >= 0) & (local < logits.shape[-1])
        local = local.where(own, 0)
    else:
        own = counted
    place = local[:, None]
    bent = None
    if terms.soft_cap is not None:
        logits = logits.div_(terms.soft_cap).tanh_()
        bent = logits.square().neg_().add_(1) if slope else None
        logits.mul_(terms.soft_cap)
    chosen = logits.gather(1, place)[:, 0].where(own, 0)
    mean = logits.sum(1) / vocabulary if terms.label_smoothing else chosen.new_zeros(())
    largest = logits.amax(1)
    if columns is not None:
        largest = columns.all_reduce(largest, "max")
    exponents = logits.sub_(largest[:, None]).exp_()
    total = exponents.sum(1)
    if columns is not None:
        total, chosen, mean = columns.all_reduce(torch.stack([total, chosen, mean.expand_as(chosen)]), "sum")
    log_sum = largest + total.log()
    smooth = terms.label_smoothing
    losses = log_sum - (1 - smooth) * chosen - smooth * mean + terms.z_loss * log_sum.square()
    losses = losses.where(counted, 0)
    if not slope:
        return losses, None
    slopes = exponents.mul_(((1 + 2 * terms.z_loss * log_sum) / total)[:, None])
    slopes.scatter_add_(1, place, ((smooth - 1) * own.to(slopes.dtype))[:, None])
    if smooth:
        slopes.sub_(smooth / vocabulary)
    return losses, slopes if bent is None else slopes.mul_(bent)


def plain_losses(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    terms: Terms,
) -> torch.Tensor:
    """The losses of rows, of operations that can be differentiated any number of times."""
    compute = terms.compute
    logits = F.linear(hidden.to(compute), weight.to(compute), None if bias is None else bias.to(compute))
    logits = logits.to(_wide(hidden.dtype))
    if terms.soft_cap is not None:
        logits = terms.soft_cap * torch.tanh(logits / terms.soft_cap)
    counted = labels != terms.ignore_index
    log_sum = logits.logsumexp(1)
    chosen = logits.gather(1, labels.where(counted, 0)[:, None])[:, 0]
    smooth = terms.label_smoothing
    losses = log_sum - (1 - smooth) * chosen - smooth * logits.mean(1) + terms.z_loss * log_sum.square()
    return losses.where(counted, 0)
