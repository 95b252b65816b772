"""The aux of a loss: a pytree whose leaves combine over micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from fnaccel import tree
from fnaccel.collectives import gather_objects
from fnaccel.engine.rows import Rows, concatenated, rows_of_concat
from fnaccel.errors import LossError
from fnaccel.step.loss import Concat, Mean, Scalar, Sum, is_combinable, is_zero, parts_of, readable
from fnaccel.tree import Tree

RESERVED = frozenset({"loss", "weight", "lr", "grad_norm", "skipped", "loss_scale", "recompilations"})
"""Metrics that a step reports by itself."""


def plain(value: Tree) -> Any:
    """A value to add up: without its graph, and in fp32 at least (bf16 would stop counting at 256)."""
    if not isinstance(value, torch.Tensor):
        return value
    plain_value = value.detach()
    return plain_value.float() if plain_value.dtype in (torch.bfloat16, torch.float16) else plain_value


def divide(total: torch.Tensor, weight: Scalar, device: torch.device) -> torch.Tensor:
    """A total over its weight, as a tensor: 0 if there is no weight."""
    if not isinstance(total, torch.Tensor):
        total = torch.tensor(float(total), device=device)
    if not isinstance(weight, torch.Tensor):
        return total / weight if weight else torch.zeros_like(total)
    if readable(weight):
        return total / weight if float(weight) else torch.zeros_like(total)
    return torch.where(weight == 0, torch.zeros_like(total), total / weight)


def packed(values: list[Any], device: torch.device) -> torch.Tensor:
    """Numbers and 0-d tensors as one vector that ranks can sum. Nothing waits for the device."""
    dtype = torch.float32 if device.type == "mps" else torch.float64
    if not any(isinstance(v, torch.Tensor) for v in values):
        return torch.tensor([float(v) for v in values], dtype=dtype, device=device)
    # filled on the device: a copy of a host value would wait for all work before it
    return torch.stack(
        [
            v.detach().to(device, dtype)
            if isinstance(v, torch.Tensor)
            else torch.full((), float(v), dtype=dtype, device=device)
            for v in values
        ]
    )


def check_aux(aux: Tree) -> None:
    """Raise LossError if aux can't be reported. torch.compile can trace this function."""
    if isinstance(aux, dict):
        if any(name in RESERVED for name in aux):
            raise _taken([name for name in aux if name in RESERVED])
        for value in aux.values():
            _check_leaf(value)
    else:
        _check_leaf(aux)


def _check_leaf(value: Tree) -> None:
    if isinstance(value, dict):
        for inner in value.values():
            _check_leaf(inner)
    elif isinstance(value, (list, tuple)):  # a union is not traceable
        for inner in value:
            _check_leaf(inner)
    elif isinstance(value, (torch.Tensor, str)):
        parts_of(value, 1, "the loss function's aux")
    elif isinstance(value, Concat):
        rows_of_concat(value, "the loss function's aux")


def _no_metric(value: Tree) -> LossError:
    return LossError(
        f"aux holds {type(value).__name__}, which can't be added up over micro-batches and ranks",
        where="the loss function's aux",
        fix="return numbers, tensors, fa.Mean, fa.Sum or fa.Concat; print or log the rest",
    )


def _taken(names: list[str]) -> LossError:
    return LossError(
        f"aux holds {', '.join(map(repr, sorted(names)))}, which the step itself reports",
        where="the loss function's aux",
        fix="give it another name",
    )


def structure(aux: AuxValues, weighted: bool | None) -> str:
    """The text on which ranks have to agree: the kind of the loss, and the structure of its aux.

    Args:
        aux: the aux of this rank.
        weighted: whether the loss is an `fa.Mean`. None if the weights come from the batch.
    """
    kind = {True: "fa.Mean", False: "a bare loss", None: "a loss"}[weighted]
    return f"{kind} with {aux.shape or 'no aux'}"


def mixed_kinds(place: str) -> LossError:
    """The error for a bare loss beside an `fa.Mean`, which would weigh 1 beside a count."""
    return LossError(
        f"the loss function returned fa.Mean for one {place} and a bare loss for another",
        where="the loss function",
        fix="return fa.Mean(total, weight=...) on every path",
    )


class Agreement:
    """The structure of the loss on every rank, compared once, since ranks sum values by position."""

    __slots__ = ("seen",)

    def __init__(self) -> None:
        self.seen: str | None = None

    def check(self, shape: str, group: dist.ProcessGroup) -> None:
        """Compare with the other ranks the first time, and with that time afterwards.

        Raises:
            LossError: ranks or calls differ. If ranks differ, all ranks raise.
        """
        if self.seen is None:
            shapes = gather_objects(shape, over=group)
            if len(set(shapes)) > 1:
                listed = "; ".join(f"rank {rank} has {text}" for rank, text in enumerate(shapes))
                raise LossError(
                    f"the losses of ranks differ: {listed}",
                    where="the return value of the loss function",
                    fix="return the same kind of loss and the same keys on every rank, whatever its rows are",
                )
            self.seen = shape
        elif self.seen != shape:
            raise LossError(
                f"the loss changed its structure between calls: {shape} after {self.seen}",
                where="the return value of the loss function",
                fix="return the same kind of loss and the same keys in every call",
            )


class AuxValues:
    """The aux of one step: added up over micro-batches, then over ranks."""

    __slots__ = ("_concats", "_pairs", "_structure")

    def __init__(self) -> None:
        self._pairs: list[tuple[Any, Any]] = []
        self._concats: list[list[Rows]] = []
        self._structure: Any = None

    def take(self, aux: Tree, *, valid: bool) -> None:
        """Add the aux of one micro-batch. A filler's counts for nothing but gives its structure."""
        if aux is None:
            return
        leaves, structure = tree.flatten(aux, is_leaf=is_combinable)
        if self._structure is None:
            self._structure = [leaf if isinstance(leaf, Concat) else type(leaf) for leaf in leaves], structure
            self._pairs = [(0.0, 0.0)] * len(leaves)
            self._concats = [[] for _ in leaves]
        elif structure != self._structure[1]:
            raise LossError(
                f"aux changed its structure between micro-batches: {structure} after {self._structure[1]}",
                where="the loss function's aux",
                fix="return the same keys for every micro-batch",
            )
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Concat):
                rows: Any = rows_of_concat(leaf, "the loss function's aux")
                rows = [plain(row) for row in rows] if isinstance(rows, list) else plain(rows)
                self._concats[index].append(rows if valid else rows[:0])
            elif valid:
                total, weight = parts_of(leaf, 1, "the loss function's aux")
                if is_zero(weight):  # a mean over nothing may be NaN
                    total = 0.0
                old_total, old_weight = self._pairs[index]
                try:
                    self._pairs[index] = (old_total + plain(total), old_weight + plain(weight))
                except TypeError as error:
                    raise _no_metric(total) from error

    @property
    def shape(self) -> str:
        """The structure that has to be equal on all ranks."""
        if self._structure is None:
            return ""
        kinds, structure = self._structure
        names = ", ".join("Concat" if isinstance(k, Concat) else k.__name__ for k in kinds)
        return f"{names} in {structure}"

    @property
    def values(self) -> list[Any]:
        """Totals and weights by turns, to be summed over ranks."""
        return [value for pair in self._pairs for value in pair]

    def put(self, values: Sequence[Any]) -> None:
        """Take the sums of `values` over all ranks."""
        self._pairs = [(values[2 * i], values[2 * i + 1]) for i in range(len(self._pairs))]

    def finish(self, group: dist.ProcessGroup | None, device: torch.device) -> dict[str, Any]:
        """The metrics they make, as device tensors."""
        if self._structure is None:
            return {}
        kinds, structure = self._structure
        values: list[Any] = []
        for index, kind in enumerate(kinds):
            total, weight = self._pairs[index]
            if isinstance(kind, Concat):
                where = "the loss function's aux"
                parts = self._concats[index]
                values.append(
                    concatenated(parts, kind.pad, group, where=where, by_batch=False, compared=False)
                )
            elif kind is Sum:
                values.append(total)
            else:
                values.append(divide(total, weight, device).float())
        aux = tree.unflatten(structure, values)
        if not isinstance(aux, dict):
            return {"aux": aux}
        taken = RESERVED & aux.keys()
        if taken:
            raise _taken([*taken])
        return aux


def detached(aux: Tree) -> Any:
    """Aux without its graph, in new containers of the same kind."""
    if isinstance(aux, Mean):
        return Mean(plain(aux.total), plain(aux.weight), detached(aux.aux))
    if isinstance(aux, Sum):
        return Sum(plain(aux.value))
    if isinstance(aux, Concat):
        return Concat(plain(aux.value), aux.pad)
    if isinstance(aux, dict):
        return {key: detached(value) for key, value in aux.items()}
    if type(aux) in (list, tuple):
        return type(aux)([detached(value) for value in aux])
    return plain(aux)
