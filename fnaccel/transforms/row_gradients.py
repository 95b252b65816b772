"""The gradient of each row of a batch, by `torch.func.vmap` of `torch.func.grad` over a loss of one row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from fnaccel import _torch
from fnaccel.errors import ArgumentError, CapabilityError, LossError, MicroBatchError
from fnaccel.models.parameter_values import params, run_with
from fnaccel.step.loss import Concat, Extreme, Max, Mean, Min, Sum, read_loss
from fnaccel.step.loss_info import Informed
from fnaccel.tree import Tree

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_RECURRENT = (nn.RNN, nn.GRU, nn.RNNCellBase)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


class Rows(NamedTuple):
    """What the rows of one chunk have.

    Attributes:
        grads: of each trained parameter, with the rows in front: `[rows, ...]`.
        norms: of each row's gradient over all parameters, `[rows]`.
        totals: of each row, `[rows]`.
        weight: of all rows.
        aux: of all rows, combined by its types.
    """

    grads: dict[str, torch.Tensor]
    norms: torch.Tensor
    totals: torch.Tensor
    weight: Any
    aux: Any


def rows_of(
    loss_fn: Callable[..., Any],
    model: nn.Module,
    batch: Tree,
    given: tuple[Any, ...],
    chunk: int | None,
    where: str,
) -> Iterator[Rows]:
    """The gradients of the rows of a batch, some rows at a time.

    Args:
        loss_fn: a loss. A row's own loss is its total for a batch of this row alone.
        model: its model.
        batch: tensors with the rows in dim 0.
        given: further arguments of the loss.
        chunk: how many rows at a time. None: all.
        where: the name of the caller, for messages.

    Raises:
        CapabilityError: a layer without gradients of rows, such as a batch norm that trains, a complex
            parameter, or a forward that replaces a buffer.
        MicroBatchError: columns of different lengths, or without rows.
    """
    if not torch.compiler.is_compiling():
        _check_layers(model, where)
    leaves, structure = _torch.flatten(batch)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    columns = [leaves[place] for place in places]
    rows = _count(columns, where)
    informed = loss_fn if isinstance(loss_fn, Informed) else None
    info = None if informed is None else informed.info
    if info is not None and info.places is not None:  # a row's own place
        columns.append(info.places)
    held = {name: value.detach() for name, value in params(model).items()}
    for name, value in held.items():
        if value.is_complex():
            raise CapabilityError(
                f"{name} is complex, and clipping and noise are those of real numbers",
                where=where,
                fix="two real parameters, and torch.view_as_complex in the forward",
            )
    kinds: list[Any] = []

    def row(values: Mapping[str, torch.Tensor], *cells: torch.Tensor) -> Any:
        filled = list(leaves)
        for place, cell in zip(places, cells[: len(places)], strict=True):
            filled[place] = cell[None]
        if informed is not None and info is not None:
            informed.info = info.of_rows(cells[-1][None] if len(cells) > len(places) else None)
        output = run_with(model, values, loss_fn, _torch.unflatten(filled, structure), *given)
        total, weight, aux = _parts(output, where)
        parts, kind = _taken(aux, where)
        kinds[:] = [kind, weight if isinstance(weight, (int, float)) else None]
        told = weight if isinstance(weight, torch.Tensor) else torch.zeros((), device=total.device)
        return total, (total, told, parts)

    mapped = torch.func.vmap(
        torch.func.grad(row, has_aux=True), (None, *[0] * len(columns)), randomness="different"
    )
    for start in range(0, rows, chunk) if chunk else [0]:
        some = [column[start : start + chunk] for column in columns] if chunk else columns
        grads, (totals, told, parts) = mapped(held, *some)
        if informed is not None:  # what stands there is a row inside of vmap
            informed.info = info
        replaced = () if torch.compiler.is_compiling() else model.named_buffers()
        for name in (name for name, value in replaced if _torch.is_mapped(value)):
            fix = "return such a value as aux of the loss, and leave buffers as they are"
            raise CapabilityError(f"the forward put a row's value into buffer {name!r}", where=where, fix=fix)
        kind, host = kinds
        squares = [grad.flatten(1).square().sum(1) for grad in grads.values()]
        norms = torch.stack([square.to(totals.dtype) for square in squares]).sum(0).sqrt()
        weight = told.sum() if host is None else host * len(totals)
        yield Rows(grads, norms, totals, weight, _combined(parts, kind))


def _check_layers(model: nn.Module, where: str) -> None:
    for name, module in model.named_modules():
        what = _unmapped(module)
        if what is not None:
            raise CapabilityError(f"{name or 'the model'} is {what[0]}", where=where, fix=what[1])


def _unmapped(module: Any) -> tuple[str, str] | None:
    """What a layer is that has no gradients of rows, and the way. Those of torch 2.9 to 2.13."""
    if isinstance(module, _NORMS) and module.training:
        return (
            "a batch norm in training mode, and a row has no gradient of its own behind one",
            "a norm over each row, such as nn.GroupNorm or nn.LayerNorm; or eval() the norm",
        )
    if isinstance(module, _RECURRENT):
        name = type(module).__name__
        return f"an nn.{name}, which torch.func.vmap can't map", "nn.LSTM, or a cell made of nn.Linear"
    if isinstance(module, _EMBEDDINGS) and module.sparse and module.weight.requires_grad:
        return "an embedding with sparse gradients, which torch.func.vmap can't map", "sparse=False"
    if isinstance(module, _EMBEDDINGS) and module.max_norm is not None:
        return (
            "an embedding with max_norm, which changes its weight in the forward pass",
            "max_norm=None, and an UPDATE transform that scales rows of the weight after each update",
        )
    return None


def _count(columns: list[torch.Tensor], where: str) -> int:
    # compared one by one: a set of symbolic lengths makes a program for each number of rows
    rows = columns[0].shape[0] if columns and columns[0].dim() else 0
    if rows == 0 or any(column.dim() == 0 or column.shape[0] != rows for column in columns):
        if columns and all(column.dim() and column.shape[0] == 0 for column in columns):
            raise MicroBatchError(
                "a batch without rows has no gradients of rows",
                where=where,
                fix="fa.shard(loader) gives a rank without rows some that do not count",
            )
        shapes = ", ".join(str(list(column.shape)) for column in columns) or "none"
        raise MicroBatchError(
            f"a batch of rows has tensors of the same length in dim 0, and these have shapes {shapes}",
            where=where,
            fix="give tensors, padded to one width, in tuples, lists or dicts",
        )
    return rows


def _parts(output: Tree, where: str) -> tuple[torch.Tensor, Any, Any]:
    """Total, weight and aux of a row. The weight's value is not read: inside of vmap it has several."""
    if isinstance(output, Mean):
        return read_loss(Mean(output.total, 1), where).total, output.weight, output.aux
    parts = read_loss(output, where)
    return parts.total, parts.weight, parts.aux


def _taken(aux: Tree, where: str) -> tuple[list[torch.Tensor], Any]:
    """The tensors of a row's aux, and how they are put together again."""
    leaves, structure = _torch.flatten(aux)
    tensors: list[torch.Tensor] = []
    kinds: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, Mean):
            tensors += [torch.as_tensor(leaf.total), torch.as_tensor(leaf.weight)]
        elif isinstance(leaf, (Sum, Extreme, Concat)):
            if not isinstance(leaf.value, (torch.Tensor, int, float)):
                raise LossError(
                    f"fa.{type(leaf).__name__} of {type(leaf.value).__name__} in aux of a row",
                    where=where,
                    fix="give a tensor: torch.func.vmap maps nothing else",
                )
            tensors.append(torch.as_tensor(leaf.value))
        elif leaf is not None:
            tensors.append(torch.as_tensor(leaf))
        kinds.append(Concat(None, leaf.pad) if isinstance(leaf, Concat) else type(leaf))
    return tensors, (kinds, structure)


def _combined(tensors: list[torch.Tensor], kind: Any) -> Any:
    kinds, structure = kind
    values = iter(tensors)
    leaves: list[Any] = []
    for each in kinds:
        if each is Mean:
            leaves.append(Mean(next(values).sum(0), next(values).sum(0)))
        elif each is Sum:
            leaves.append(Sum(next(values).sum(0)))
        elif each in (Max, Min):
            leaves.append(each(each.fold(next(values))))
        elif isinstance(each, Concat):
            leaves.append(Concat(next(values).flatten(0, 1), each.pad))
        else:
            leaves.append(None if each is type(None) else next(values).float().mean(0))
    return _torch.unflatten(leaves, structure)


def check_rows(rows: int | None, where: str) -> None:
    """Raise ArgumentError if an option is no number of rows."""
    if rows is not None and (type(rows) is not int or rows < 1):
        raise ArgumentError(
            f"{rows!r} is no number of rows", where=where, fix="give 1 or more, or leave it out"
        )
